"""A cluster's archive as one stream: its oplogs are merged as a live cluster's are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import Answer, NeedShard, NeedShardKeys, OplogBatch
from tailrace.core.stream.merge import CONFIG_SHARDS, MergedStream
from tailrace.core.stream.stream import Need
from tailrace.errors import SourceError, UsageError
from tailrace.read.archive.layout import CONFIG_OPLOG, archived_until, existing, oplog_folder, unfinished
from tailrace.read.archive.place import ArchivePlace, archive_place
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.drive import answers_of, drive

#: Servers before do not write an insert's document key: it takes the catalog of that time, which an archive lacks.
_KEYS_SINCE: Final = (5, 3)


class ArchivedCluster:
    """The oplogs of a cluster's archive. Raises UsageError where it is none, SourceError where it is damaged."""

    def __init__(self, folder: str | ArchivePlace) -> None:
        self._folder = archive_place(folder)
        self.description = existing(self._folder)
        if not self.description.is_cluster:
            raise UsageError(f"{folder} is the archive of a replica set, not of a cluster")
        self._sources: dict[str, ArchiveSource] = {}

    def source(self, name: str) -> ArchiveSource:
        """One of its oplogs."""
        found = self._sources.get(name)
        if found is None:
            found = self._sources[name] = ArchiveSource(self._folder, name)
        return found

    def oldest(self) -> ClusterTime:
        """The first cluster time at which a stream can begin: from here it is known who was a shard, and each one's
        oplog is there."""
        starts = [self.description.since, self.source(CONFIG_OPLOG).start]
        starts += [self.source(name).start for name, shard in self.description.shards.items() if not shard.after]
        return ClusterTime(max(starts) + 1)

    def shards_at(self, time: ClusterTime) -> list[str]:
        """The shards that the cluster had."""
        return sorted(
            name
            for name, (after, until) in self.description.shards.items()
            if after <= time and (until is None or until > time)
        )

    def refuse_unfinished(self, names: Iterable[str]) -> None:
        """Raise SourceError where one of the shards was removed, and is not archived up to there."""
        for name in names:
            shard = self.description.shards.get(name)
            if shard is None:
                continue
            lacking = unfinished(name, shard, archived_until(oplog_folder(self._folder, name)))
            if lacking is not None:
                raise SourceError(
                    f"{lacking}: no later event can be given", hint="Let 'tailrace archive' read the rest of it"
                )

    def check(self, plan: Plan) -> None:
        """Raises UsageError where an archive does not hold what the plan's stream would need."""
        if plan.profile.version < _KEYS_SINCE:
            raise UsageError(
                f"an archive of a cluster of {plan.profile.name} cannot be replayed: inserts name no shard key",
                hint="From 5.3 on they do",
            )

    def open(self, plan: Plan, until: ClusterTime | None = None) -> ArchivedStream:
        """The stream of a plan, which has a start. With ``until`` it ends there, if the archive reaches so far."""
        self.check(plan)
        return ArchivedStream(self, plan, until)


class ArchivedStream:
    """A merged stream and its archived oplogs: an iterator of blocks, which ends where the archive does.

    Raises SourceError in place of that end where it ends so early only because a removed shard's rest is not archived.
    """

    def __init__(self, cluster: ArchivedCluster, plan: Plan, until: ClusterTime | None = None) -> None:
        after = plan.read_after or ClusterTime(0)
        self._cluster = cluster
        self._until = until
        self.stream = MergedStream(plan, cluster.shards_at(after), config_after=after)
        self._answers = {name: answers_of(cluster.source(name)) for name in cluster.shards_at(after)}
        self._answers[CONFIG_SHARDS] = answers_of(cluster.source(CONFIG_OPLOG))
        self._batches: dict[str, Iterator[OplogBatch]] = {
            name: self._read(cluster.source(CONFIG_OPLOG if name == CONFIG_SHARDS else name), after)
            for name in self._answers
        }

    def __iter__(self) -> Iterator[EventBlock]:
        while True:
            yield from drive(self.stream, self._answer)
            if self.stream.invalidated:
                return
            if not self._feed():
                if self._until is None or self.stream.high_water < self._until:
                    self._cluster.refuse_unfinished(self.stream.participants)
                return

    def _read(self, source: ArchiveSource, after: ClusterTime) -> Iterator[OplogBatch]:
        if self._until is None or self._until > source.newest():
            return source.tail(after)
        # A shard that was added at the very end has nothing before it.
        return source.read(after, self._until) if after < self._until else iter([OplogBatch(b"", after)])

    def _feed(self) -> bool:
        """Give every participant that wants one its next batch; False where none has any."""
        fed = False
        for name in self.stream.participants:
            if not self.stream.wants(name):
                continue
            batch = next(self._batches[name], None)
            if batch is not None:
                self.stream.feed(name, batch)
                fed = True
        return fed

    def _answer(self, need: Need) -> Answer:
        request = need.request
        if isinstance(request, NeedShard):
            source = self._cluster.source(request.name)
            self._answers[request.name] = answers_of(source)
            self._batches[request.name] = self._read(source, request.read_after)
            return None
        if isinstance(request, NeedShardKeys):
            raise SourceError("an archive does not hold the shard keys of its collections")
        answered: Answer = self._answers[need.participant](need)  # type: ignore[assignment]
        return answered
