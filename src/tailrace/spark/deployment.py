"""The replica set as the driver's side sees it: where the oplog begins and ends, and what a stream starts with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tailrace.errors import ChangeStreamHistoryLost
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.pipeline.plan import build_plan
from tailrace.pipeline.profile import profile_for
from tailrace.source.connection import Connection
from tailrace.source.mongod import HISTORY_LOST, MongodSource
from tailrace.spark.input_partition import OplogSlice
from tailrace.spark.offset import Offset, Resume, StreamIdentity
from tailrace.spark.options import ReadOptions, Start
from tailrace.spark.outline import OplogOutline
from tailrace.spark.planner import cuts, slices

#: Part of a range's entries from which on the scope's filter of the oplog query is left out (measured: 0.9 µs of
#: server CPU to read an entry, 3 more to ask it).
_MOST: Final = 0.5


class Deployment:
    """One replica set and the stream that is read from it. Connects when it is made."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._connection = Connection(options.uri)
        self._source = MongodSource(self._connection.client)
        self.name = self._source.name
        self.server_version = self._source.server_version
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.server_version))
        self.outline = OplogOutline(self._connection, options.scope, numbers)
        self.identity = StreamIdentity.of(options, {self.name: self._replica_set_id()})

    def _replica_set_id(self) -> str:
        """Tells replica sets of the same name apart. It lies beside the oplog, where we must be able to read anyhow."""
        read = self._connection.client["local"]["system.replset"].find_one
        config = self._connection.retrying(lambda: read({}, {"settings.replicaSetId": 1})) or {}
        return str(config.get("settings", {}).get("replicaSetId", ""))

    def newest(self) -> ClusterTime:
        """The newest majority-committed entry's cluster time."""
        return self._source.newest()

    def start(self, default: str) -> Offset:
        """Where a new stream starts; ``default`` is ``oldest`` or ``now``. Raises 286 where the oplog is too short."""
        start = self._options.start or Start(default)
        oldest, complete = self._source.oldest()
        if start.option == "oldest":
            start = Start("startAtOperationTime", time=oldest)
        elif start.option == "now":
            start = Start("startAtOperationTime", time=self.newest().tick())
        plan = build_plan(self._options.stream_options(start), profile_for(self.server_version))
        plan.confirm_history(oldest, complete)
        resume = None
        if plan.start_token is not None and not plan.start_token.is_high_water_mark:
            resume = Resume(start.option, plan.start_token)
        after = plan.read_after or ClusterTime(0)
        return Offset(after, ((self.name, after),), self.identity, plan.token_version, resume=resume)

    def offset(self, value: dict[str, object]) -> Offset:
        """An offset from a checkpoint. ``UsageError`` where it belongs to another stream."""
        offset = Offset.from_json(value)
        self.identity.require_same(offset.stream)
        # The first checkpoint of a server that hid its id, read where the id is seen, is written with it from then on.
        return replace(offset, stream=self.identity)

    def require_history(self, after: ClusterTime) -> None:
        """Raises 286 where entries after ``after`` may be gone from the oplog."""
        oldest, complete = self._source.oldest()
        if not complete and after < oldest and after.tick() < oldest:
            raise ChangeStreamHistoryLost(
                HISTORY_LOST,
                hint=f"The checkpoint stands at {after} and the oldest entry is {oldest}. What lies between is lost to "
                "this stream: start a new one with a new checkpointLocation and startingFrom=oldest, load the gap from "
                "the collections, and keep a longer oplog (replSetResizeOplog, minRetentionHours)",
            )

    def first_invalidating(self, start: Offset, until: ClusterTime) -> ClusterTime | None:
        """The cluster time of the entry that ends the stream after ``start``, where it lies at or before ``until``."""
        after = start.cluster_time
        if start.resume is not None and start.resume.token.from_invalidate:
            after = start.resume.token.cluster_time  # the stream begins behind this invalidation
        migrations = bool(self._options.stage.get("showMigrationEvents"))
        return self.outline.first_invalidating(after, until, show_migration_events=migrations)

    def slices(self, start: Offset, end: Offset) -> Sequence[OplogSlice]:
        """The range between two offsets as ascending slices of about the same weight."""
        after, until = start.cluster_time, end.cluster_time
        if until <= after:
            return []
        floor = after
        if start.resume is not None:
            # The token is searched for in the first slice, so that one must hold its time.
            floor = max(after, ClusterTime(min(start.resume.token.cluster_time, until)))
        weights = self.outline.weigh(floor, until)
        # Asking each entry costs the server four times what giving it costs, so where most would pass all are taken.
        filtered = bool(self._options.pipeline) or weights.matching < _MOST
        cut_at = cuts(weights.buckets, self._options.partitions) if self._options.partitions > 1 else []
        return [
            OplogSlice(
                low, high, self.server_version, start.token_version, start.resume if low == after else None, filtered
            )
            for low, high in slices(after, until, cut_at)
        ]

    def close(self) -> None:
        self._source.close()
        self._connection.close()
