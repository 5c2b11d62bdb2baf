"""Whether an archive is whole: every file read, every sum compared, every neighbour found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity
from tailrace.errors import OplogFormatError, SourceError
from tailrace.read.archive.checked_file import DAMAGE, damaged
from tailrace.read.archive.columns import raw_entries, record_batch
from tailrace.read.archive.layout import (
    IMAGES,
    ArchiveSegment,
    counting,
    existing,
    first_hole,
    followed,
    head,
    headless,
    listed,
    missing,
    oplog_folder,
    other_newest,
    segment_named,
    unfinished,
)
from tailrace.read.archive.place import ArchiveAwayError, ArchivePlace, files_in, has_files, size_of
from tailrace.read.archive.segment import SegmentReader


@dataclass(slots=True)
class OplogReport:
    """What one oplog's archive holds, and what is wrong with it: a sentence each in ``faults``.

    ``bytes``  of its files; ``raw_bytes`` of the entries in them
    ``erased``  entries of which documents were erased, for each of their collections
    """

    name: str
    after: ClusterTime | None = None
    until: ClusterTime | None = None
    segments: int = 0
    entries: int = 0
    raw_bytes: int = 0
    bytes: int = 0
    images: int = 0
    erased: int = 0
    faults: list[str] = field(default_factory=list)


def status(folder: ArchivePlace) -> list[OplogReport]:
    """What each oplog's archive holds, by its files' footers; entries are not read. Raises SourceError, UsageError."""
    return _reports(folder, None)


def verify(folder: ArchivePlace, on_segment: Callable[[ArchivePlace], None] | None = None) -> list[OplogReport]:
    """As ``status``, with everything read: sums, order, the columns next to the entries, and that each pre-image
    belongs to an entry. ``on_segment`` is notified of each file. Nothing is written."""
    return _reports(folder, on_segment or (lambda path: None))


def _reports(folder: ArchivePlace, on_segment: Callable[[ArchivePlace], None] | None) -> list[OplogReport]:
    description, reports = existing(folder), []
    for name in description.oplogs:
        report = _report(folder, name, on_segment)
        shard, until = description.shards.get(name), report.until
        if until is not None:  # a killed writer may have published what its head does not name
            until = max([until, *(segment.until for segment in _counting(oplog_folder(folder, name)))])
        lacking = None if shard is None else unfinished(name, shard, until)
        if lacking is not None:
            report.faults.append(f"{lacking}: let 'tailrace archive' read the rest of it")
        reports.append(report)
    return reports


def _report(root: ArchivePlace, name: str, on_segment: Callable[[ArchivePlace], None] | None) -> OplogReport:
    folder = oplog_folder(root, name)
    report = OplogReport(name)
    try:
        reach = head(folder)
        there = listed(folder) if has_files(folder) else []
        found = there if reach is None else counting(folder, reach, there)
    except ArchiveAwayError:
        raise
    except SourceError as error:
        report.faults.append(error.message)
        return report
    if reach is None:
        if found:
            report.faults.append(headless(folder).message)
        return report
    report.after, report.until = reach.start, reach.until
    hole = first_hole(reach, found)
    if hole is not None:
        report.faults.append(missing(folder, *hole).message)
    other = other_newest(reach, found)
    if other is not None:
        report.faults.append(other)
    report.faults += _of_another(root, folder, reach.identity(name))
    for segment in found:
        if on_segment is not None:
            on_segment(segment.path)
        _add(report, segment, found, whole=on_segment is not None)
    _add_strangers(report, folder)
    return report


def _of_another(root: ArchivePlace, folder: ArchivePlace, identity: DeploymentIdentity) -> Iterator[str]:
    difference = existing(root).identity.difference(identity)
    if difference is not None:
        yield f"{folder} is a part of another archive: {difference}"


def _add(report: OplogReport, segment: ArchiveSegment, found: list[ArchiveSegment], *, whole: bool) -> None:
    try:
        report.bytes += size_of(segment.path) if segment.size < 0 else segment.size
        reader = SegmentReader(segment)
        report.segments += 1
        report.entries += int(reader.about["entries"])
        report.raw_bytes += int(reader.about["bytes"])
        report.erased += sum(int(one["entries"]) for one in reader.erased.values())
        if not followed(segment, reader.previous, found):
            report.faults.append(f"{segment.path} was not written after the segment before it")
        if whole:
            report.faults += _faults(reader)
        images = reader.images()
        if images is not None:
            report.bytes += size_of(reader.images_path)
            report.images += images.metadata.num_rows
            if whole:
                report.faults += _image_faults(reader, images)
    except ArchiveAwayError:
        raise
    except SourceError as error:
        report.faults.append(error.message)
    except (*DAMAGE, OplogFormatError) as error:
        report.faults.append(f"{segment.path}: {error}")


def _faults(reader: SegmentReader) -> Iterator[str]:
    path, entries = reader.segment.path, 0
    for group in range(reader.row_groups):
        reader.times(group)  # ascending, and within the segment's range
        rows = reader.rows(group)
        entries += rows.num_rows
        # What stands next to the entries is made of them again.
        try:
            made = record_batch(raw_entries(rows.column("entry")))
        except OplogFormatError as error:
            yield f"{path}: row group {group}: {error}"
            continue
        for name in rows.column_names:
            if not rows.column(name).combine_chunks().equals(made.column(name)):
                yield f"{path}: row group {group}: the column {name} does not fit the entries"
    if entries != reader.about["entries"]:
        yield f"{path} holds {entries} entries and was written with {reader.about['entries']}"


def _image_faults(reader: SegmentReader, images: pq.ParquetFile) -> Iterator[str]:
    """Each pre-image is that of an update or a delete of the segment, in the collection that it names, or of a command
    (a transaction). They ascend."""
    path = reader.images_path
    places = _Places(reader)
    previous = (0, -1)
    for group in range(images.num_row_groups):
        try:
            rows = images.read_row_group(group, use_threads=False)
        except DAMAGE as error:
            yield damaged(path, error).message
            return
        for time, uuid, index, document in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            at = ClusterTime(time)
            if (time, index) < previous:
                yield f"{path} is out of order: {at} comes after {ClusterTime(previous[0])}"
                return
            previous = (time, index)
            if not places.takes_image(at, uuid):
                yield f"{path}: the pre-image at {at} belongs to no entry of the segment"
                return
            try:
                raw_bson.check_structure(document)
            except OplogFormatError as error:
                yield f"{path}: the pre-image at {at} is not a document: {error.message}"
                return


class _Places:
    """The entries of a segment that have pre-images, asked for in ascending order."""

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader
        self._group = -1
        self._times: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._entries: pa.ChunkedArray | None = None

    def takes_image(self, time: ClusterTime, uuid: bytes) -> bool:
        group = self._reader.row_group_of(time)
        if group is None:
            return False
        if group != self._group:
            self._group = group
            self._times, self._entries = self._reader.times(group), self._reader.column(group, "entry")
        place = int(np.searchsorted(self._times, np.uint64(time)))
        if self._entries is None or place == len(self._times) or int(self._times[place]) != time:
            return False
        entry: bytes = self._entries[place].as_py()
        operation, collection = (raw_bson.find(entry, name) for name in (b"op", b"ui"))
        kind = b"" if operation is None else raw_bson.value(entry, operation)[4:5]
        if kind == b"c":
            return True
        return kind in (b"u", b"d") and (collection is None or raw_bson.value(entry, collection)[5:] == uuid)


def _counting(folder: ArchivePlace) -> list[ArchiveSegment]:
    reach = head(folder)
    return [] if reach is None else counting(folder, reach, listed(folder))


def _add_strangers(report: OplogReport, folder: ArchivePlace) -> None:
    """Files that nobody needs: what a killed writer has left goes when the next one begins, others are named."""
    for name in sorted(one.name for one in files_in(folder)):
        if name.endswith(".parquet") and segment_named(folder, name) is None and not IMAGES.fullmatch(name):
            report.faults.append(f"{folder / name} is not a file of the archive")
