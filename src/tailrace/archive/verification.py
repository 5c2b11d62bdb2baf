"""Whether an archive is whole: every file read, every digest computed, every neighbour found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tailrace.archive.layout import (
    HEAD,
    IMAGES,
    ArchiveSegment,
    existing,
    first_hole,
    head,
    listed,
    oplog_folder,
)
from tailrace.archive.segment import SegmentReader, digest_of, images_of
from tailrace.errors import OplogFormatError, SourceError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.batch import entry_time


@dataclass(slots=True)
class OplogReport:
    """What one oplog's archive holds, and what is wrong with it: a sentence each in ``faults``.

    ``bytes``  of its files; ``raw_bytes`` of the entries in them
    """

    name: str
    after: ClusterTime | None = None
    until: ClusterTime | None = None
    segments: int = 0
    entries: int = 0
    raw_bytes: int = 0
    bytes: int = 0
    images: int = 0
    faults: list[str] = field(default_factory=list)


def status(folder: Path) -> list[OplogReport]:
    """What each oplog's archive holds, by its files' footers; entries are not read. Raises SourceError, UsageError."""
    return [_report(folder, name, None) for name in existing(folder).oplogs]


def verify(folder: Path, on_segment: Callable[[Path], None] | None = None) -> list[OplogReport]:
    """As ``status``, with everything read: digests, order, each entry's time. ``on_segment`` is told of each file."""
    return [_report(folder, name, on_segment or (lambda path: None)) for name in existing(folder).oplogs]


def _report(root: Path, name: str, on_segment: Callable[[Path], None] | None) -> OplogReport:
    folder = oplog_folder(root, name)
    report = OplogReport(name)
    try:
        reach = head(folder)
        found = [] if reach is None else [segment for segment in listed(folder) if segment.until > reach.start]
    except SourceError as error:
        report.faults.append(error.message)
        return report
    if reach is None:
        if folder.is_dir() and listed(folder):
            report.faults.append(f"{folder / HEAD} is missing")
        return report
    report.after, report.until = reach.start, reach.until
    hole = first_hole(reach, found)
    if hole is not None:
        report.faults.append(f"{folder} has a hole: the entries after {hole[0]} up to {hole[1]} are not there")
    for segment in found:
        if on_segment is not None:
            on_segment(segment.path)
        _add(report, segment, whole=on_segment is not None)
    _add_strangers(report, folder, found)
    return report


def _add(report: OplogReport, segment: ArchiveSegment, *, whole: bool) -> None:
    try:
        report.bytes += segment.path.stat().st_size
        reader = SegmentReader(segment)
        report.segments += 1
        report.entries += int(reader.about["entries"])
        report.raw_bytes += int(reader.about["bytes"])
        images = int(reader.about["images"])
        report.images += images
        if images and not segment.images_path.exists():
            report.faults.append(f"{segment.images_path} is missing: {images} pre-images")
        if segment.images_path.exists():
            report.bytes += segment.images_path.stat().st_size
        if whole:
            report.faults += _faults(segment, reader, images)
    except (SourceError, OSError, KeyError, ValueError, TypeError) as error:
        report.faults.append(error.message if isinstance(error, SourceError) else f"{segment.path}: {error}")


def _faults(segment: ArchiveSegment, reader: SegmentReader, images: int) -> Iterator[str]:
    if digest_of(segment.path) != segment.digest:
        yield f"{segment.path} is not what was written: its digest is another"
        return
    previous, entries = segment.after, 0
    for group in range(reader.row_groups):
        times = reader.times(group)
        entries += len(times)
        inside = len(times) and int(times[0]) > previous and int(times[-1]) <= segment.until
        if not inside or (len(times) > 1 and not bool(np.all(times[1:] > times[:-1]))):
            yield f"{segment.path}: row group {group} is out of order"
        previous = ClusterTime(int(times[-1]))
        column = reader.column(group, "entry")
        try:
            wrong = [time for time, entry in zip(times, column.to_pylist(), strict=True) if entry_time(entry) != time]
        except OplogFormatError as error:
            yield f"{segment.path}: row group {group}: {error}"
            continue
        if wrong:
            yield f"{segment.path}: row group {group}: {len(wrong)} entries are not of the time that stands beside them"
    if entries != reader.about["entries"]:
        yield f"{segment.path} holds {entries} entries and was written with {reader.about['entries']}"
    if images:
        images_of(segment, [])


def _add_strangers(report: OplogReport, folder: Path, found: list[ArchiveSegment]) -> None:
    """Files that nobody needs: what a killed writer has left goes when the next one begins, others are named."""
    known = {segment.path.name for segment in listed(folder)} | {segment.images_path.name for segment in found}
    for path in sorted(folder.iterdir()):
        if path.name not in known and path.suffix == ".parquet" and not IMAGES.fullmatch(path.name):
            report.faults.append(f"{path} is no file of the archive")
