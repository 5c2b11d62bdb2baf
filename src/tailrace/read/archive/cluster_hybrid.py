"""A cluster's live oplogs with its archive: streams that begin before some shard's oplog does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.plan import Plan
from tailrace.errors import ChangeStreamHistoryLost, SourceError, UsageError
from tailrace.read.archive.hybrid import HybridSource
from tailrace.read.archive.layout import CONFIG_OPLOG, existing
from tailrace.read.archive.place import ArchivePlace, archive_place
from tailrace.read.archive.replica_set_oplog import ArchivedReplicaSetOplog
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.live import LiveSource
from tailrace.read.source.membership import Member
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.promise import AskedLately
from tailrace.read.source.replica_set_oplog import ReplicaSetOplog


class ArchivedShards:
    """What a stream over a cluster reads of each shard: its oplog, and before that its archive.

    Raises UsageError if ``folder`` is not a cluster's archive.
    """

    def __init__(self, folder: str | ArchivePlace) -> None:
        self._folder = archive_place(folder)
        self._description = existing(self._folder)
        if not self._description.is_cluster:
            raise UsageError(f"{folder} is the archive of a replica set, and this is a cluster")

    def source(self, name: str, client: MongoClient[Any]) -> LiveSource:
        """A source that never stops trying; the config server's oplog is read from the present on."""
        return self._hybrid(name, client, math.inf)

    def bounded_source(self, name: str, client: MongoClient[Any]) -> LiveSource:
        """As ``source``, but one that gives up after a while, for Spark's workers."""
        if name not in self._description.shards:
            self._description = existing(self._folder)
        return self._hybrid(name, client)

    def asked(self, client: MongoClient[Any]) -> AskedLately:
        """Only the stream asks for promises."""
        return AskedLately()

    def oplog(self, name: str, client: MongoClient[Any], scope: Scope | Selection) -> ReplicaSetOplog:
        """A shard's oplog as the driver's side of Spark sees it."""
        if name not in self._description.shards:
            self._description = existing(self._folder)
        if name not in self._description.shards:
            return ReplicaSetOplog(client, scope)
        return ArchivedReplicaSetOplog(client, scope, self._folder, name)

    def _hybrid(self, name: str, client: MongoClient[Any], retry_seconds: float | None = None) -> LiveSource:
        live = MongodSource(client) if retry_seconds is None else MongodSource(client, retry_seconds=retry_seconds)
        if name == CONFIG_OPLOG or name not in self._description.shards:
            return live
        return HybridSource(live, ArchiveSource(self._folder, name), of_shard=True)

    def confirm_history(self, plan: Plan, members: Sequence[Member]) -> None:
        """Raises 286 if a shard's oplog and its archive do not reach back to the plan's start, or do not meet, and
        SourceError if the cluster had other shards then."""
        after = plan.read_after or ClusterTime(0)
        behind = [one for one in members if not reaches_back(after, *MongodSource(one.client).oldest())]
        if not behind:
            return
        self.confirm_members(after)
        for member in behind:
            source = self._hybrid(member.name, member.client)
            try:
                plan.confirm_history(*source.oldest())
            except ChangeStreamHistoryLost:
                if isinstance(source, HybridSource):
                    source.refuse_hole()
                raise

    def confirm_members(self, after: ClusterTime) -> None:
        """Raises 286 if the archive does not know who was a shard after ``after``, and SourceError if the cluster had
        other shards then."""
        self._description = existing(self._folder)
        if after < self._description.since:
            raise history_lost(
                f"The archive {self._folder} knows the cluster's shards only from {self._description.since}"
            )
        for name, shard in self._description.shards.items():
            changed = max(shard.after, shard.until or ClusterTime(0))
            if changed > after:
                raise SourceError(
                    f"the shard {name} was added or removed at {changed}, after the stream's start, which lies in the "
                    "archive",
                    hint="Read the archive up to there on its own (tailrace replay), and start the stream after it",
                )
