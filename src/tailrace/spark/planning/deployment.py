"""The deployment as the driver's side sees it: where its oplogs begin and end, and what a stream starts with.

A replica set is here, a sharded cluster in ``tailrace.spark.planning.cluster``; ``open_deployment`` finds out which it
is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.plan.plan import Plan, build_plan
from tailrace.plan.profile import profile_for
from tailrace.source.connection import open_client
from tailrace.source.failure import is_transient
from tailrace.source.outline import MOST, Bucket, Weights
from tailrace.source.topology import Cluster
from tailrace.spark.planning.input_partition import OplogSlice
from tailrace.spark.planning.planner import Limits, batch_end, cuts, slices
from tailrace.spark.planning.replica_set import ReplicaSetOplog
from tailrace.spark.source.offset import Offset, Resume, StreamIdentity
from tailrace.spark.source.options import ReadOptions, Start


class Outline(Protocol):
    """What is counted of the oplogs, see ``tailrace.source.outline``."""

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]: ...

    def weigh(self, after: ClusterTime, until: ClusterTime, parts: int) -> Weights: ...

    def entries(self, bucket: Bucket) -> list[Bucket]: ...

    def is_smaller_than(self, size: int) -> bool: ...


class Look(NamedTuple):
    """``has_news``: an entry could give an event, and ``time`` is the newest cluster time anywhere. Otherwise ``time``
    is that up to which nothing more will appear, as things stand."""

    time: ClusterTime
    has_news: bool


class Deployment(ABC):
    """What a stream is read from: one oplog, or those of all shards."""

    identity: StreamIdentity
    server_version: str

    def __init__(self, options: ReadOptions, client: MongoClient[Any]) -> None:
        self._options = options
        self._client = client

    @property
    @abstractmethod
    def outline(self) -> Outline: ...

    @abstractmethod
    def newest(self) -> ClusterTime:
        """The newest majority-committed entry's cluster time, anywhere."""

    @abstractmethod
    def settle(self, until: ClusterTime) -> None:
        """See that nothing more will appear at or before ``until``, a time that some member has reached."""

    @abstractmethod
    def look(self, after: ClusterTime) -> Look:
        """What there is behind ``after``."""

    @abstractmethod
    def oldest(self) -> ClusterTime:
        """The cluster time from which on all history is there."""

    @abstractmethod
    def at(self, time: ClusterTime) -> Offset:
        """The offset of a stream that has come to ``time``."""

    @abstractmethod
    def require_history(self, position: Offset) -> None:
        """Raises 286 where entries behind ``position`` may be gone."""

    @abstractmethod
    def first_invalidating(self, start: Offset, until: ClusterTime) -> ClusterTime | None:
        """The cluster time of the entry that ends the stream after ``start``, where it lies at or before ``until``."""

    @abstractmethod
    def advanced(self, position: Offset, to: ClusterTime, *, invalidated: bool) -> Offset:
        """``position`` moved on to a time that was settled."""

    @abstractmethod
    def _confirm_history(self, plan: Plan) -> None:
        """Raises 286 where the oplogs do not reach back to the plan's start."""

    @abstractmethod
    def _slice(self, start: Offset, end: Offset, low: ClusterTime, high: ClusterTime) -> OplogSlice:
        """The slice (``low``, ``high``] of the range between two offsets."""

    def start(self, default: str) -> Offset:
        """Where a new stream starts; ``default`` is ``oldest`` or ``now``. Raises 286 where the oplog is too short."""
        start = self._options.start or Start(default)
        if start.option == "oldest":
            start = Start("startAtOperationTime", time=self.oldest())
        elif start.option == "now":
            now = self.newest()
            self.settle(now)  # a write that comes after this is later
            start = Start("startAtOperationTime", time=now.tick())
        plan = build_plan(self._options.stream_options(start), profile_for(self.server_version))
        self._confirm_history(plan)
        resume = None
        if plan.start_token is not None and not plan.start_token.is_high_water_mark:
            resume = Resume(start.option, plan.start_token)
        at = self.at(plan.read_after or ClusterTime(0))
        return replace(at, token_version=plan.token_version, resume=resume)

    def offset(self, value: dict[str, object]) -> Offset:
        """An offset from a checkpoint. ``UsageError`` where it belongs to another stream."""
        offset = Offset.from_json(value)
        self.identity.require_same(offset.stream)
        # The first checkpoint of a server that hid its id, read where the id is seen, is written with it from then on.
        return replace(offset, stream=self.identity)

    def end(self, position: Offset, newest: ClusterTime, limits: Limits | None) -> Offset:
        """Where the micro-batch behind ``position`` ends: at ``newest``, which was settled, or before, by ``limits``
        or by what ends the stream."""
        end = newest
        if limits is not None:
            floor = position.cluster_time
            if position.resume is not None:
                floor = min(max(floor, position.resume.token.cluster_time), newest)
            outline = self.outline
            if limits.events is not None or limits.bytes is None or not outline.is_smaller_than(limits.bytes):
                end = batch_end(outline.buckets(floor, newest), outline.entries, limits) or newest
        invalidating = self.first_invalidating(position, end)
        if invalidating is not None:
            return self.advanced(position, invalidating, invalidated=True)
        return self.advanced(position, end, invalidated=False)

    def slices(self, start: Offset, end: Offset) -> Sequence[OplogSlice]:
        """The range between two offsets as ascending slices of about the same weight."""
        after, until = start.cluster_time, end.cluster_time
        if until <= after:
            return []
        floor = after
        if start.resume is not None:
            # The token is searched for in the first slice, so that one must hold its time.
            floor = max(after, ClusterTime(min(start.resume.token.cluster_time, until)))
        weights = self.outline.weigh(floor, until, self._options.partitions)
        # Asking each entry costs the server four times what giving it costs, so where most would pass all are taken.
        filtered = bool(self._options.pipeline) or weights.matching < MOST
        cut_at = cuts(weights.buckets, self._options.partitions) if self._may_cut(start) else []
        return [
            replace(self._slice(start, end, low, high), filtered=filtered) for low, high in slices(after, until, cut_at)
        ]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _may_cut(self, start: Offset) -> bool:
        return self._options.partitions > 1

    @property
    def _shows_migrations(self) -> bool:
        return bool(self._options.stage.get("showMigrationEvents"))


class ReplicaSetDeployment(Deployment):
    """One replica set. What is majority-committed there stays, so it is settled as soon as it is seen."""

    def __init__(self, options: ReadOptions, client: MongoClient[Any]) -> None:
        super().__init__(options, client)
        self._oplog = ReplicaSetOplog(client, options.scope)
        self.name = self._oplog.source.name
        self.server_version = self._oplog.server_version
        self.identity = StreamIdentity.of(options, {self.name: self._replica_set_id()}, self._cluster_id())

    def _replica_set_id(self) -> str:
        """Tells replica sets of the same name apart. It lies beside the oplog, where we must be able to read anyhow."""
        read = self._oplog.connection.client["local"]["system.replset"].find_one
        config = self._oplog.connection.retrying(lambda: read({}, {"settings.replicaSetId": 1})) or {}
        return str(config.get("settings", {}).get("replicaSetId", ""))

    def _cluster_id(self) -> str:
        """Of the cluster that this replica set is a shard of; empty where it is none, or the user may not know."""
        connection = self._oplog.connection
        versions = connection.client["admin"]["system.version"]

        def read() -> str:
            try:
                found = versions.find_one({"_id": "shardIdentity"}, {"clusterId": 1})
            except OperationFailure as error:
                if is_transient(error):
                    raise
                return ""
            return "" if found is None else str(found.get("clusterId", ""))

        return connection.retrying(read)

    @property
    def outline(self) -> Outline:
        return self._oplog.outline

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

    def require_history(self, position: Offset) -> None:
        self._oplog.require_history(position.cluster_time)

    def first_invalidating(self, start: Offset, until: ClusterTime) -> ClusterTime | None:
        after = start.cluster_time
        if start.resume is not None and start.resume.token.from_invalidate:
            after = start.resume.token.cluster_time  # the stream begins behind this invalidation
        outline = self._oplog.outline
        return outline.first_invalidating(after, until, show_migration_events=self._shows_migrations)

    def advanced(self, position: Offset, to: ClusterTime, *, invalidated: bool) -> Offset:
        return position.advanced(to, invalidated=invalidated)

    def _confirm_history(self, plan: Plan) -> None:
        plan.confirm_history(*self._oplog.source.oldest())

    def _slice(self, start: Offset, end: Offset, low: ClusterTime, high: ClusterTime) -> OplogSlice:
        resume = start.resume if low == start.cluster_time else None
        return OplogSlice(low, high, self.server_version, start.token_version, resume)


def open_deployment(options: ReadOptions) -> Deployment:
    """What the uri leads to. Connects."""
    from tailrace.spark.planning.cluster import ClusterDeployment  # noqa: PLC0415 - which is a Deployment itself

    client = open_client(options.uri)
    try:
        cluster = Cluster.discover(client, options.uri, {})
        if cluster is not None:
            return ClusterDeployment(options, cluster, client)
        return ReplicaSetDeployment(options, client)
    except BaseException:
        client.close()
        raise
