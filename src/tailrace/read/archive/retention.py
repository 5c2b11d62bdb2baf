"""How long an archive is kept: old segments are removed, from the oldest on, and the head says so first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tailrace.base.durable import writing
from tailrace.read.archive.layout import HEAD, IMAGES, ArchiveSegment, counting, head, listed
from tailrace.read.archive.place import is_there, size_of
from tailrace.read.archive.record import write_record


@dataclass(frozen=True, slots=True)
class Retention:
    """Which segments may go: those whose last entry is older than ``seconds``, and the oldest ones while the files of
    one oplog hold more than ``bytes``. ``None`` keeps all. The newest segment always stays."""

    seconds: float | None = None
    bytes: int | None = None

    def expired(
        self, found: list[ArchiveSegment], now: float, size: Callable[[ArchiveSegment], int] | None = None
    ) -> list[ArchiveSegment]:
        """The oldest of these segments, as many as may go. ``size`` says how many bytes the files of one have."""
        count = 0
        if self.seconds is not None:
            while count < len(found) - 1 and found[count].until.seconds < now - self.seconds:
                count += 1
        if self.bytes is not None:
            sizes = [(size or _size)(segment) for segment in found]
            while count < len(found) - 1 and sum(sizes[count:]) > self.bytes:
                count += 1
        return found[:count]


def _size(segment: ArchiveSegment) -> int:
    return size_of(segment.path) + sum(size_of(place) for place in [segment.images_path] if is_there(place))


def retain(folder: Path, retention: Retention) -> int:
    """Take away what may go of one oplog. Returns how many segments that were. Its writer calls this, and nobody
    else."""
    reach = head(folder)
    if reach is None:
        return 0
    expired = retention.expired(counting(folder, reach, listed(folder)), time.time())
    if expired:
        write_record(folder / HEAD, replace(reach, start=expired[-1].until).document())
    remove_before(folder)
    return len(expired)


def remove_before(folder: Path) -> None:
    """Delete what lies before the head's start, also where an earlier run was ended in the middle of it, and what a
    writer that was killed has left."""
    reach = head(folder)
    segments = listed(folder)
    # Of a span one segment counts: another one was replaced when documents were erased, or was to be.
    counts = {} if reach is None else {one.span: one.path.name for one in counting(folder, reach, segments)}
    gone = {segment.span for segment in segments if reach is not None and segment.until <= reach.start}
    kept = {segment.span for segment in segments}
    with writing(folder):
        for segment in segments:
            if segment.span in gone or counts.get(segment.span, segment.path.name) != segment.path.name:
                segment.path.unlink(missing_ok=True)
        for path in folder.iterdir():
            images = IMAGES.fullmatch(path.name)
            span = "" if images is None else f"{images[1]}-{images[2]}"
            if path.name.endswith(".unfinished") or (span and (span in gone or span not in kept)):
                path.unlink(missing_ok=True)
