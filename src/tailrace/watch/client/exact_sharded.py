"""Streams of a sharded cluster with exact images: each shard's oplog passes through an image state of its own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, exact_plan
from tailrace.core.plan.profile import ServerProfile
from tailrace.core.stream.merge import CONFIG_SHARDS
from tailrace.errors import TailraceError, on_shard
from tailrace.read.images.directory import check_kind, shard_folder
from tailrace.read.images.source import ExactSource
from tailrace.read.source.live import LiveSource
from tailrace.read.source.membership import Beginning
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.promise import AskedLately
from tailrace.read.source.topology import Cluster, OpenView
from tailrace.watch.client import kernel_loader
from tailrace.watch.client.exact_stream import state_folder
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.sharded_stream import ShardedChangeStream

#: Seconds to wait for a shard's last reader to release the state: where the shard was removed and added again, and when
#: the stream closes, so that the next one can have the directory.
_RELEASE_S: Final = 10.0

_log = logging.getLogger("tailrace.images")


class ExactShards:
    """The sources of one stream, one for each shard, each with an image state in ``folder``. A
    ``tailrace.read.source.sharded.SharedReads``.

    Raises UsageError if ``folder`` has the state of a replica set.
    """

    def __init__(self, folder: Path, scope: Scope) -> None:
        check_kind(folder, sharded=True)
        self._folder = folder
        self._scope = scope
        self.profile: ServerProfile | None = None
        self._sources: dict[Path, ExactSource] = {}

    def begin(self, name: str, client: MongoClient[Any], after: ClusterTime | None) -> None:
        """Bring a shard's state to where the stream begins: after ``after``, or at any time from now on (``None``)."""
        try:
            source = self._opened(name, MongodSource(client))
            source.begin(after, client)
            if after is not None:
                source.take_back(after)
        except TailraceError as error:
            raise on_shard(error, name) from None

    def source(self, name: str, client: MongoClient[Any]) -> LiveSource:
        """A source that retries without limit. For a shard that joins the cluster later, the state begins with this
        source."""
        if name == CONFIG_SHARDS:
            return MongodSource(client, retry_seconds=math.inf)
        return self._opened(name, MongodSource(client, retry_seconds=math.inf))

    def asked(self, client: MongoClient[Any]) -> AskedLately:
        """Not shared: only this stream asks for promises."""
        return AskedLately()

    def _opened(self, name: str, live: LiveSource) -> ExactSource:
        """The shard's state with ``live`` to read from. The same state until a reader has had it."""
        directory = shard_folder(self._folder, name, live.name)
        found = self._sources.get(directory)
        assert self.profile is not None
        if found is not None and not found.reads:
            found.read_from(live)
            found.use_profile(self.profile)
            return found
        if found is not None:
            found.interrupt()
            found.ended.wait(_RELEASE_S)
        source = self._sources[directory] = ExactSource(
            live, directory, self._scope, self.profile, kernel=kernel_loader.is_ready, of_shard=True
        )
        return source

    def release(self) -> None:
        """Close the states that no reader has open, and wait for the readers, which close their own when they end."""
        for source in self._sources.values():
            source.release_unread()
        deadline = time.monotonic() + _RELEASE_S
        for directory, source in self._sources.items():
            if source.reads and not source.ended.wait(max(0.0, deadline - time.monotonic())):
                _log.warning("the images in %s stay in use: their reader still waits for its server", directory)


class ExactShardedStream(ShardedChangeStream):
    """Like its parent, but images come from the shards' states, for any version of the servers."""

    def __init__(
        self,
        cluster: Cluster,
        client: MongoClient[Any],
        request: WatchRequest,
        profile: ServerProfile | None,
        folder: str | Path | None,
    ) -> None:
        shards = self._exact = ExactShards(state_folder(folder), request.scope)
        try:
            super().__init__(cluster, client, request, profile, shards, on_close=shards.release)
        except BaseException:
            shards.release()
            raise

    def _planned(self, options: StreamOptions, profile: ServerProfile) -> Plan:
        self._exact.profile = profile
        return exact_plan(options, profile)

    def _viewed(self, cluster: Cluster, plan: Plan) -> OpenView:
        view = cluster.open_view()
        if plan.read_after is not None:
            return view
        # Each shard's documents are copied as they are at a time of its own. The stream begins once all are copied.
        self._begin((name, cluster.client(name), None) for name in view.shards)
        return cluster.open_view()

    def _confirm(self, begun: Beginning) -> None:
        self._begin(begun.members)

    def _begin(self, members: Iterable[tuple[str, MongoClient[Any], ClusterTime | None]]) -> None:
        for name, client, after in members:
            self._exact.begin(name, client, after)
