"""One replica set's oplog as the driver's side sees it: a deployment of its own, or a shard of one."""

from __future__ import annotations

import re
from typing import Any

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.plan import Plan
from tailrace.errors import SourceError
from tailrace.read.source.connection import Connection
from tailrace.read.source.live import LiveSource
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.outline import OneOutline, OplogOutline


class ReplicaSetOplog:
    """Where the oplog begins and ends, and what lies in it for one scope. Connects when it is made."""

    def __init__(self, client: MongoClient[Any], scope: Scope | Selection) -> None:
        self.connection = Connection(client)
        #: The oplog itself, also where ``source`` has an archive before it.
        self.live = MongodSource(client)
        self.source: LiveSource = self.live
        self.server_version = self.source.server_version
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.server_version))
        self.outline: OneOutline = OplogOutline(self.connection, scope, numbers)
        self._looked_until = ZERO

    def newest(self) -> ClusterTime:
        """The newest majority-committed entry's cluster time."""
        return self.source.newest()

    def has_news(self, after: ClusterTime, newest: ClusterTime) -> bool:
        """Whether an entry that could give an event lies after ``after``. ``newest`` is the oplog's newest time; what
        was read and found of no interest is not read again."""
        looked_until = max(after, self._looked_until)
        if newest > looked_until and self.outline.any(looked_until, newest):
            return True
        self._looked_until = max(looked_until, newest)
        return False

    def bytes_behind(self, after: ClusterTime, newest: ClusterTime) -> int | None:
        """About how many bytes of entries lie between two times, by the oplog's size and the time that it covers; the
        entries are not counted. ``None`` where the user may not ask."""
        try:
            ask = self.connection.client["local"].command
            stats = self.connection.retrying(lambda: ask("collStats", "oplog.rs"))
        except SourceError:
            return None
        covered = max(1, newest.seconds - self.live.oldest()[0].seconds)
        behind = min(max(0, newest.seconds - after.seconds), covered)
        return int(stats["size"]) * behind // covered

    def confirm_history(self, plan: Plan) -> None:
        """Raises 286 where the oplog does not reach back to the plan's start."""
        plan.confirm_history(*self.source.oldest())

    def require_history(self, after: ClusterTime) -> None:
        """Raises 286 where entries after ``after`` may be gone from the oplog."""
        oldest, complete = self.source.oldest()
        if not reaches_back(after, oldest, complete):
            raise history_lost(
                f"The checkpoint stands at {after} and the oldest entry is of {oldest}. What lies between is lost to "
                "this stream: start a new one with a new checkpointLocation and startingFrom=oldest, load the gap from "
                "the collections, and keep a longer oplog (replSetResizeOplog, minRetentionHours)"
            )
