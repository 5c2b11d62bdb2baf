"""Entries from an archive: the same that the oplog held, by the same contract as a running mongod's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tailrace.base.object_place import ObjectPlace
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.erased import ERASED, erased_collections
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.oplog.witness import DeploymentIdentity
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey
from tailrace.errors import SourceError, UsageError
from tailrace.read.archive.checked_file import damaged
from tailrace.read.archive.layout import ArchiveSegment, Reach, existing, followed, head, oplog_folder, segments
from tailrace.read.archive.owner import confirm_owner
from tailrace.read.archive.passing import passing
from tailrace.read.archive.place import ArchivePlace, archive_place, is_there
from tailrace.read.archive.segment import SegmentReader, images_of
from tailrace.read.source.batch import BATCH_BYTES_MAX, cut, is_initiating_set
from tailrace.read.source.live import LiveSource


class ArchiveSource:
    """One oplog of an archive.

    ``folder``  the archive's directory, or its place in an object store
    ``oplog``   which of a cluster's oplogs: a shard's name; may be left out for a replica set's archive

    What an archive does not hold are current documents (``updateLookup`` gives null). ``tail`` ends where the archive
    ends. Raises UsageError where there is no such archive, SourceError where it is damaged or has a hole.
    """

    def __init__(self, folder: str | ArchivePlace, oplog: str | None = None) -> None:
        self._root = archive_place(folder)
        self.description = existing(self._root)
        if oplog is None and self.description.is_cluster:
            raise UsageError(
                f"{folder} is a cluster's archive", hint=f"One of its oplogs: {', '.join(self.description.oplogs)}"
            )
        name = oplog or self.description.name or ""
        if name not in self.description.oplogs:
            raise UsageError(f"{folder} has no oplog {name}", hint=f"It has {', '.join(self.description.oplogs)}")
        self._name = name
        self._folder = oplog_folder(self._root, name)
        self._segments: list[ArchiveSegment] = []
        #: What the head in a store said when the segments were listed: a listing is asked for only when it has changed.
        self._reach: Reach | None = None
        #: The segment that was read last: entries and images are asked for in runs.
        self._reader: SegmentReader | None = None
        self.refresh()
        self._check_folder()

    @property
    def name(self) -> str:
        """The replica set's or shard's name."""
        return self._name

    @property
    def server_version(self) -> str:
        """That of the servers when the archive was made."""
        return self.description.server_version

    def refresh(self) -> None:
        """See what was archived since."""
        reach = head(self._folder) if isinstance(self._folder, ObjectPlace) else None
        if reach is None or reach != self._reach:
            self._segments = segments(self._folder, self._segments)
            self._reach = reach

    @property
    def identity(self) -> DeploymentIdentity:
        """Of the deployment whose oplog this is, as far as the archive knows it."""
        reach = head(self._folder)
        return DeploymentIdentity({self._name: ""}) if reach is None else reach.identity(self._name)

    def _check_folder(self) -> None:
        """An oplog's folder may have been put into another archive."""
        difference = self.description.identity.difference(self.identity)
        if difference is not None:
            raise SourceError(
                f"{self._folder} is a part of another archive: {difference}",
                hint="Restore the folder that belongs here from a copy of the archive",
            )

    @property
    def start(self) -> ClusterTime:
        """Every entry later than this, up to ``newest``, is there."""
        return self._some_segments()[0].after

    def _some_segments(self) -> list[ArchiveSegment]:
        if not self._segments:
            raise SourceError(
                f"the archive {self._root} holds no entry of {self._name} yet", hint="Run 'tailrace archive' first"
            )
        return self._segments

    def oldest(self) -> tuple[ClusterTime, bool]:
        """One tick after ``start``: an entry of that time need not exist, but nothing later is missing."""
        first = self._some_segments()[0]
        reader = self._opened(first)
        raw = b"" if not reader.row_groups else reader.column(0, "entry")[0].as_py()
        return ClusterTime(first.after + 1), bool(raw) and is_initiating_set(raw)

    def newest(self) -> ClusterTime:
        return self._some_segments()[-1].until

    def operation_time(self) -> ClusterTime:
        """As ``newest``."""
        return self.newest()

    def read(
        self,
        after: ClusterTime,
        until: ClusterTime,
        *,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        oplog_filter: bytes | None = None,
    ) -> Iterator[OplogBatch]:
        """See OplogSource. Of a filter, what it says about operation and namespace leaves entries out."""
        if until <= after:
            return
        self._check_history(after)
        edge = after
        for batch in self._batches(after, until, batch_bytes_max, oplog_filter):
            edge = batch.high_water
            yield batch
        if edge < until:
            yield OplogBatch(b"", until)

    def tail(
        self,
        after: ClusterTime,
        *,
        await_ms: int = 0,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        oplog_filter: bytes | None = None,
        batch_size: int | None = None,
        comment: object = None,
        on_error: object = None,
    ) -> Iterator[OplogBatch]:
        """The entries with ts > ``after`` to the archive's end. Nothing is waited for."""
        self._check_history(after)
        yield from self._batches(after, self.newest(), batch_bytes_max, oplog_filter)

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        return [self._entry(time) for time in times]

    def pre_images(self, keys: Sequence[PreImageKey]) -> list[bytes | None]:
        """Those that were still kept when their operations were archived."""
        by_segment: dict[ArchiveSegment, list[PreImageKey]] = {}
        for key in keys:
            segment = self._segment_of(key.cluster_time)
            if segment is not None:
                by_segment.setdefault(segment, []).append(key)
        found: dict[PreImageKey, bytes] = {}
        for segment, wanted in by_segment.items():
            found.update(images_of(self._opened(segment), wanted))
        return [found.get(key) for key in keys]

    def documents(self, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
        """``None`` each: an archive knows no current documents."""
        return [None] * len(lookups)

    def refuse_view(self, database: str, collection: str) -> None:
        """Nothing: an archive does not say what is a view."""

    def close(self) -> None:
        """Let go of the file that is open."""
        self._reader = None

    def confirm_owner(self, source: LiveSource, found: DeploymentIdentity, hint: str) -> None:
        """Raise OtherHistoryError where ``source``, of the deployment ``found``, is not the oplog that was archived."""
        newest = self._segments[-1] if self._segments else None
        confirm_owner(self._folder, newest, source, found, hint=hint)

    def last_entries(self) -> Iterator[bytes]:
        """The entries of the last row group, in order: what is compared with the live oplog where one goes over."""
        reader = self._opened(self._some_segments()[-1])
        if reader.row_groups:
            yield from reader.column(reader.row_groups - 1, "entry").to_pylist()

    def _batches(
        self, after: ClusterTime, until: ClusterTime, bytes_max: int, oplog_filter: bytes | None
    ) -> Iterator[OplogBatch]:
        passes = passing(oplog_filter)
        edge = after
        for segment in list(self._some_segments()):
            if segment.until <= edge or segment.after >= until:
                continue
            for batch in self._batches_of(segment, edge, until, passes):
                if len(batch.raw) <= bytes_max:
                    yield batch
                    continue
                for piece, _ in cut(batch.raw, bytes_max):
                    yield piece
                if piece.high_water < batch.high_water:
                    yield OplogBatch(b"", batch.high_water)
            edge = min(segment.until, until)

    def _batches_of(
        self, segment: ArchiveSegment, after: ClusterTime, until: ClusterTime, passes: Any
    ) -> Iterator[OplogBatch]:
        batches = self._opened(segment).batches(after, until, passes)
        while True:
            try:
                batch = next(batches, None)
            except SourceError:
                self._refuse_expired(segment)
                raise
            if batch is None:
                return
            yield batch

    def readers(self, after: ClusterTime, until: ClusterTime) -> Iterator[SegmentReader]:
        """The segments of a range, in order. A segment is released when the next one is taken."""
        for segment in list(self._some_segments()):
            if segment.until > after and segment.after < until:
                yield self._opened(segment)

    def _check_history(self, after: ClusterTime) -> None:
        oldest, complete = self.oldest()
        if not reaches_back(after, oldest, complete):
            raise history_lost(f"The archive {self._root} begins at {oldest}: start there or later")

    def _segment_of(self, time: ClusterTime) -> ArchiveSegment | None:
        return next((segment for segment in self._segments if segment.after < time <= segment.until), None)

    def _entry(self, time: ClusterTime) -> bytes | None:
        segment = self._segment_of(time)
        return None if segment is None else self._opened(segment).entry(time)

    def _replaced_by(self, segment: ArchiveSegment) -> ArchiveSegment | None:
        """The segment that took the place of one when documents were erased from it."""
        if is_there(segment.path):
            return None
        self._segments = segments(self._folder)
        found = next((one for one in self._segments if one.span == segment.span), None)
        return found if found is not None and found.digest != segment.digest else None

    def _refuse_expired(self, segment: ArchiveSegment) -> None:
        """Raises 286 if a segment that cannot be read was deleted because it is old."""
        reach = head(self._folder)
        if reach is not None and segment.until <= reach.start and not is_there(segment.path):
            raise history_lost(f"The archive {self._root} now begins at {reach.start}: what lay before has expired")

    def erased_between(self, after: ClusterTime, until: ClusterTime) -> set[str]:
        """The collections of which documents were erased from entries with ``after`` < ts <= ``until``."""
        return {
            name
            for reader in self.readers(after, until)
            if any(int(one["first"], 16) <= until and int(one["last"], 16) > after for one in reader.erased.values())
            for batch in reader.batches(after, until)
            if ERASED in batch.raw
            for entry in raw_bson.split(batch.raw)
            for name in erased_collections(entry)
        }

    def _opened(self, segment: ArchiveSegment) -> SegmentReader:
        reader = self._reader
        if reader is None or reader.segment.span != segment.span:
            try:
                reader = SegmentReader(segment)
            except SourceError:
                self._refuse_expired(segment)
                other = self._replaced_by(segment)
                if other is None:
                    raise
                reader = SegmentReader(other)
            if not followed(segment, reader.previous, self._segments):
                raise damaged(segment.path, ValueError("it was not written after the segment before it"))
            self._reader = reader
        return reader
