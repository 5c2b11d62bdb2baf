"""A replica set as the driver's side sees it: one oplog, of which all that is majority-committed stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.plan import Plan
from tailrace.lake.spark.planning.deployment import Deployment, Look
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.planning.planner import Limits
from tailrace.lake.spark.query.offset import Offset, StreamIdentity
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.read.source.failure import is_transient
from tailrace.read.source.live import LiveSource
from tailrace.read.source.outline import Outline
from tailrace.read.source.replica_set_oplog import ReplicaSetOplog
from tailrace.read.source.witness import replica_set_id

if TYPE_CHECKING:
    from tailrace.lake.spark.planning.exact import StateOf

T = TypeVar("T")
#: The start, the end, and the slices between them.
_Planned: TypeAlias = tuple[Offset, Offset, "Future[Sequence[OplogSlice]]"]


class ReplicaSetDeployment(Deployment):
    """One replica set. What is majority-committed there stays, so it is settled as soon as it is seen."""

    def __init__(self, options: ReadOptions, client: MongoClient[Any]) -> None:
        super().__init__(options, client)
        self._oplog = _oplog(options, client)
        self._planned: _Planned | None = None
        self.name = self._oplog.source.name
        self.server_version = self._oplog.server_version
        replica_sets = {self.name: replica_set_id(self._oplog.connection)}
        self.identity = StreamIdentity.of(options, replica_sets, self._cluster_id())

    def _cluster_id(self) -> str:
        """Of the cluster that this replica set is a shard of; empty where it is none, or the user may not know."""
        connection = self._oplog.connection
        versions = connection.client["admin"]["system.version"]

        def read() -> str:
            try:
                document = versions.find_one({"_id": "shardIdentity"}, {"clusterId": 1})
            except OperationFailure as error:
                if is_transient(error):
                    raise
                return ""
            return "" if document is None else str(document.get("clusterId", ""))

        return connection.retrying(read)

    @property
    def clients(self) -> Sequence[MongoClient[Any]]:
        return [self._oplog.connection.client]

    def _asked_version(self) -> str:
        return self._oplog.live.server_version

    @property
    def oplogs(self) -> Sequence[ReplicaSetOplog]:
        return [self._oplog]

    @property
    def outline(self) -> Outline:
        return self._oplog.outline

    def end(self, position: Offset, newest: ClusterTime, limits: Limits | None) -> Offset:
        """As in any deployment. A thread begins to plan the slices now: Spark asks for them only when it has written
        the offset, which takes as long."""
        self._forget_planned()
        end = super().end(position, newest, limits)
        if end.cluster_time > position.cluster_time:
            planned: Future[Sequence[OplogSlice]] = Future()
            work = partial(_fulfil, planned, partial(super().slices, position, end))
            threading.Thread(target=work, name="tailrace-slices", daemon=True).start()
            self._planned = position, end, planned
        return end

    def slices(self, start: Offset, end: Offset) -> Sequence[OplogSlice]:
        planned = self._forget_planned()
        if planned is not None and planned[:2] == (start, end) and planned[2].exception() is None:
            return planned[2].result()
        return super().slices(start, end)

    def _forget_planned(self) -> _Planned | None:
        """Wait for what is being planned, and return it: only one thread at a time may count an oplog's entries."""
        planned, self._planned = self._planned, None
        if planned is not None:
            wait([planned[2]])
        return planned

    def close(self) -> None:
        self._forget_planned()
        super().close()

    def newest(self) -> ClusterTime:
        return self._oplog.newest()

    def settle(self, until: ClusterTime) -> None:
        """A replica set has nothing to settle: its own oplog holds every entry up to ``until``."""

    def look(self, after: ClusterTime) -> Look:
        newest = self._oplog.newest()
        return Look(newest, newest > after and self._oplog.has_news(after, newest))

    def oldest(self) -> ClusterTime:
        return self._oplog.source.oldest()[0]

    def at(self, time: ClusterTime) -> Offset:
        return Offset(time, ((self.name, time),), self.identity)

    def _marked_sources(self, position: Offset) -> Mapping[str, LiveSource]:
        return {self.name: self._oplog.live}

    def require_history(self, position: Offset) -> None:
        self._oplog.require_history(position.cluster_time)

    def first_invalidating(self, start: Offset, until: ClusterTime) -> ClusterTime | None:
        after = start.cluster_time
        if start.resume is not None and start.resume.token.from_invalidate:
            after = start.resume.token.cluster_time  # the stream begins after this invalidation
        outline = self._oplog.outline
        return outline.first_invalidating(after, until, show_migration_events=self._shows_migrations)

    def advanced(self, position: Offset, to: ClusterTime, *, invalidated: bool) -> Offset:
        return position.advanced(to, invalidated=invalidated)

    @property
    def _is_sharded(self) -> bool:
        return False

    def _state_members(self, after: ClusterTime | None) -> Sequence[StateOf]:
        from tailrace.lake.spark.planning.exact import StateOf  # noqa: PLC0415  not without lmdb

        return [StateOf(None, self._oplog.source, self._oplog.connection.client)]

    def _confirm_history(self, plan: Plan) -> None:
        self._oplog.confirm_history(plan)

    def _slice(self, start: Offset, end: Offset, low: ClusterTime, high: ClusterTime) -> OplogSlice:
        resume = start.resume if low == start.cluster_time else None
        version = end.server_version or self.server_version
        return OplogSlice(low, high, version, start.token_version, resume)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  the thread that waits for it is told
        future.set_exception(error)


def _oplog(options: ReadOptions, client: MongoClient[Any]) -> ReplicaSetOplog:
    if options.archive is None:
        return ReplicaSetOplog(client, options.watched)
    from tailrace.read.archive.replica_set_oplog import ArchivedReplicaSetOplog  # noqa: PLC0415  Arrow and Parquet

    return ArchivedReplicaSetOplog(client, options.watched, options.archive)
