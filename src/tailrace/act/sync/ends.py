"""The source and the target of a sync, opened."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import Any, Final, Self

from pymongo import MongoClient

from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.shard_keys import is_router
from tailrace.act.sync.state import SyncState
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import RETRY_SECONDS, open_client
from tailrace.read.source.topology import Cluster
from tailrace.read.window.oplogs import Oplogs

ANEW: Final = "remove what was copied and the sync's state from the target, and start it again"


class Ends:
    """Connections to both ends, closed with the block. ``stopped`` ends waiting reads."""

    def __init__(self, source: Any, target: Any, settings: SyncSettings, stopped: threading.Event) -> None:
        self._settings, self._stopped = settings, stopped
        self._stack = ExitStack()
        with ExitStack() as opened:
            self.source: MongoClient[Any] = opened.enter_context(open_client(source))
            self.target: MongoClient[Any] = opened.enter_context(open_client(target))
            self.cluster = Cluster.discover(self.source, source, {})
            if self.cluster is not None:
                opened.callback(self.cluster.close)
            there = Cluster.discover(self.target, target, {}) if is_router(self.target) else None
            if there is not None:
                opened.callback(there.close)
            self.state = SyncState(self.target, settings, there)
            self._stack = opened.pop_all()

    @property
    def deployment(self) -> MongoClient[Any] | Cluster:
        """The source, as copies and verifications read it."""
        return self.cluster or self.source

    @property
    def members(self) -> list[MongoClient[Any]]:
        """The source's replica sets, each by a client of its own; of a cluster, its shards."""
        return (
            [self.source] if self.cluster is None else [self.cluster.client(one.name) for one in self.cluster.shards()]
        )

    @cached_property
    def oplogs(self) -> Oplogs:
        """The source's, for the one who follows. Raises OtherHistoryError where the state is of another history."""
        opened = self.new_oplogs()
        self._stack.callback(opened.close)
        return opened

    def new_oplogs(self) -> Oplogs:
        """Others, for readers that run at the same time as the follower."""
        document = self.state.read()
        return Oplogs(
            self.source,
            self.cluster,
            {} if document is None else document.members,
            self._stopped,
            witness=None if document is None else document.witness,
            what=f"the sync {self._settings.name!r}",
            anew=ANEW,
            archive=self._settings.archive,
        )

    def now(self) -> ClusterTime:
        """The source's time: of its last write that a majority has, on every shard."""
        return places_of(self.deployment, RETRY_SECONDS).now()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
