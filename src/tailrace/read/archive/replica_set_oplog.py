"""A replica set's oplog with its archive, as the driver's side of Spark sees it."""

from __future__ import annotations

from typing import Any

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.plan import Plan
from tailrace.errors import ChangeStreamHistoryLost
from tailrace.read.archive.hybrid import HybridSource
from tailrace.read.archive.outline import HybridOutline
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.replica_set_oplog import ReplicaSetOplog


class ArchivedReplicaSetOplog(ReplicaSetOplog):
    """Like a replica set's oplog; it begins where the archive does, if the two meet. ``shard``: the name that the oplog
    has in the archive of a cluster."""

    def __init__(
        self, client: MongoClient[Any], scope: Scope | Selection, folder: str | ArchivePlace, shard: str | None = None
    ) -> None:
        super().__init__(client, scope)
        self.hybrid = HybridSource(self.source, ArchiveSource(folder, shard), of_shard=shard is not None)
        self.source = self.hybrid
        self.outline = HybridOutline(self.hybrid, self.outline, scope)

    def confirm_history(self, plan: Plan) -> None:
        """Raises 286 if the plan's start lies before both, or in a hole between them."""
        try:
            super().confirm_history(plan)
        except ChangeStreamHistoryLost:
            self.hybrid.refuse_hole()
            raise

    def require_history(self, after: ClusterTime) -> None:
        """Raises 286 if entries after ``after`` may be gone from both, or lie between the two."""
        try:
            super().require_history(after)
        except ChangeStreamHistoryLost:
            self.hybrid.refuse_hole()
            raise
