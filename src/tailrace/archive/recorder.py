"""A whole deployment into an archive: a replica set's oplog, or those of all shards and of the config server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from tailrace.archive.layout import (
    CONFIG_OPLOG,
    DESCRIPTION,
    Description,
    Membership,
    describe,
    oplog_folder,
)
from tailrace.archive.retention import Retention
from tailrace.archive.writer import ArchiveProgress, OplogWriter, SegmentLimits
from tailrace.durable import write_json, writing
from tailrace.errors import SourceError, TailraceError, UsageError, on_shard
from tailrace.oplog.cluster_time import ZERO, ClusterTime
from tailrace.source.connection import Connection
from tailrace.source.membership import changes
from tailrace.source.mongod import MongodSource
from tailrace.source.topology import Cluster, ShardAddress

#: How often config.shards is looked at for shards that come and go.
_MEMBERS_S: Final = 5.0
_UNAUTHORIZED: Final = 13

_log = logging.getLogger("tailrace.archive")


@dataclass(frozen=True, slots=True)
class ArchivePolicy:
    """How an archive is written.

    ``from_oldest``  a new archive begins with the oldest entry of each oplog; otherwise with the newest one
    ``once``         stop when everything is archived that was there at the beginning
    """

    from_oldest: bool = True
    once: bool = False
    images: bool = True
    limits: SegmentLimits = field(default_factory=SegmentLimits)
    retention: Retention = field(default_factory=Retention)


class Recorder:
    """Archives a deployment into ``folder`` until it is stopped.

    ``client``   of a replica set, which stays open
    ``cluster``  the cluster that this is; ``None`` for a replica set

    One thread for each oplog, beside one that writes. The first failure of any ends all, after each has published what
    it has; ``run`` raises it.
    """

    def __init__(
        self, client: MongoClient[Any], cluster: Cluster | None, folder: Path, policy: ArchivePolicy | None = None
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._folder = folder
        self._policy = policy or ArchivePolicy()
        self._writers: dict[str, OplogWriter] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._failure: TailraceError | None = None
        self._running = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def statistics(self) -> dict[str, ArchiveProgress]:
        """What each oplog's writer has done so far."""
        with self._lock:
            return {name: writer.written for name, writer in self._writers.items()}

    def stop(self) -> None:
        """End, with everything published that was read. From any thread or signal handler."""
        self._ended.set()

    def run(
        self, on_progress: Callable[[dict[str, ArchiveProgress]], None] | None = None, *, every_s: float = 5.0
    ) -> None:
        """Archive until ``stop``, or with ``once`` to the present. Raises TailraceError."""
        description = self._begin()
        try:
            while not self._ended.wait(every_s if on_progress else _MEMBERS_S):
                if on_progress is not None:
                    on_progress(self.statistics())
                if self._cluster is not None and not self._policy.once:
                    description = self._follow_members(description)
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    def _begin(self) -> Description:
        known = describe(self._folder)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        if self._cluster is None:
            source = MongodSource(self._client)
            found = Description(source.name, source.server_version, {})
            self._check(known, found)
            if known is None:
                self._save(found)
            until = source.newest() if self._policy.once else None
            self._start(source.name, self._client, self._first(source), until)
            return found
        return self._begin_cluster(self._cluster, known)

    def _begin_cluster(self, cluster: Cluster, known: Description | None) -> Description:
        view = cluster.open_view()
        if view.config_after is None:
            raise UsageError(
                "a list of shards cannot be archived: nothing tells of shards that come and go",
                hint="Give the URI of the config server or of the mongos",
            )
        found = Description(None, cluster.server_version(), {name: Membership(ZERO) for name in view.shards})
        self._check(known, found)
        if known is None:
            # The oplogs of shards that went before are not archived: streams begin behind the last such change.
            before = [change.time for change in changes(Connection(cluster.config_client()), ZERO)]
            since = max(before, default=ZERO)
            if since > view.config_after:
                return self._begin_cluster(cluster, None)  # a shard came or went while its cluster was looked at
            found = replace(found, since=since)
            self._save(found)
        description = known or found
        until = view.time if self._policy.once else None
        config = MongodSource(cluster.config_client())
        self._start(CONFIG_OPLOG, cluster.config_client(), self._first(config), until)
        # Shards that came or went while nobody archived are found in the config server's oplog.
        description = self._follow_members(description)
        for name, shard in description.shards.items():
            if shard.until is None and name not in self._writers:
                client = cluster.client(name)
                begin = shard.after or self._first(MongodSource(client))
                self._start(name, client, begin or None, until)
        return description

    def _first(self, source: MongodSource) -> ClusterTime | None:
        return None if self._policy.from_oldest else ClusterTime(source.newest() - 1)

    def _check(self, known: Description | None, found: Description) -> None:
        if known is not None and known.name != found.name:
            known_name, found_name = known.name or "a cluster", found.name or "a cluster"
            raise UsageError(
                f"{self._folder} is the archive of {known_name}, and this is {found_name}",
                hint="Give each deployment a directory of its own",
            )

    def _save(self, description: Description) -> None:
        write_json(self._folder / DESCRIPTION, description.document())

    def _follow_members(self, description: Description) -> Description:
        """Begin to archive shards that were added; note those that were removed, whose oplogs end there."""
        cluster = self._cluster
        assert cluster is not None
        shards = dict(description.shards)
        last = max([description.since, *(time for shard in shards.values() for time in shard if time is not None)])
        for change in changes(Connection(cluster.config_client()), last):
            shard = shards.get(change.name)
            if change.host is None and shard is not None and shard.until is None:
                shards[change.name] = shard._replace(until=change.time)
                if change.name in self._writers:
                    self._writers[change.name].end_at(change.time)
                _log.info("shard %s was removed from the cluster at %s", change.name, change.time)
            elif change.host is not None and shard is not None:
                raise SourceError(
                    f"shard {change.name} was removed from the cluster and added again at {change.time}: an "
                    "archive holds one oplog of a name",
                    hint="What was archived before stays readable; archive into another directory from here on",
                )
            elif change.host is not None:
                shards[change.name] = Membership(change.time)
                client = cluster.client_at(ShardAddress(change.name, change.host))
                self._start(change.name, client, change.time, None)
                _log.info("shard %s was added to the cluster: it is archived from %s", change.name, change.time)
        if shards != description.shards:
            description = replace(description, shards=shards)
            self._save(description)
        return description

    def _start(self, name: str, client: MongoClient[Any], begin: ClusterTime | None, until: ClusterTime | None) -> None:
        writer = OplogWriter(
            MongodSource(client),
            oplog_folder(self._folder, name),
            begin=begin,
            until=until,
            limits=self._policy.limits,
            retention=self._policy.retention,
            images=self._policy.images and name != CONFIG_OPLOG,
        )
        thread = threading.Thread(target=self._run, args=(name, writer), name=f"tailrace-archive-{name}", daemon=True)
        with self._lock:
            self._writers[name] = writer
            self._running += 1
        self._threads[name] = thread
        thread.start()

    def _run(self, name: str, writer: OplogWriter) -> None:
        try:
            writer.run()
        except TailraceError as error:
            if error.code == _UNAUTHORIZED and writer.reads_images:
                error.hint = f"{error.hint or ''} Or leave them out: --no-pre-images".strip()
            with self._lock:
                self._failure = self._failure or (error if self._cluster is None else on_shard(error, name))
            self._ended.set()
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._ended.set()

    def _end(self) -> None:
        for writer in self._writers.values():
            writer.stop()
        for thread in self._threads.values():
            thread.join()
