"""How long an archive is kept: old segments go, from the oldest on, and the head says so first."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from tailrace.base.durable import writing
from tailrace.read.archive.layout import HEAD, IMAGES, ArchiveSegment, head, listed
from tailrace.read.archive.record import write_record


@dataclass(frozen=True, slots=True)
class Retention:
    """Which segments may go: those whose last entry is older than ``seconds``, and the oldest ones while the files of
    one oplog hold more than ``bytes``. ``None`` keeps all. The newest segment always stays."""

    seconds: float | None = None
    bytes: int | None = None

    def expired(self, found: list[ArchiveSegment], now: float) -> list[ArchiveSegment]:
        """The oldest of these segments, as many as may go."""
        count = 0
        if self.seconds is not None:
            while count < len(found) - 1 and found[count].until.seconds < now - self.seconds:
                count += 1
        if self.bytes is not None:
            sizes = [_size(segment) for segment in found]
            while count < len(found) - 1 and sum(sizes[count:]) > self.bytes:
                count += 1
        return found[:count]


def _size(segment: ArchiveSegment) -> int:
    images = segment.images_path
    return segment.path.stat().st_size + (images.stat().st_size if images.exists() else 0)


def retain(folder: Path, retention: Retention) -> int:
    """Take away what may go of one oplog; how many segments that were. Its writer calls this, and nobody else."""
    reach = head(folder)
    if reach is None:
        return 0
    expired = retention.expired([segment for segment in listed(folder) if segment.until > reach.start], time.time())
    if expired:
        write_record(folder / HEAD, replace(reach, start=expired[-1].until).document())
    remove_before(folder)
    return len(expired)


def remove_before(folder: Path) -> None:
    """Delete what lies before the head's start, also where an earlier run was ended in the middle of it, and what a
    writer that was killed has left."""
    reach = head(folder)
    segments = listed(folder)
    kept = {segment.images_path.name for segment in segments}
    with writing(folder):
        for segment in segments:
            if reach is not None and segment.until <= reach.start:
                segment.path.unlink(missing_ok=True)
                segment.images_path.unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.name.endswith(".unfinished") or (IMAGES.fullmatch(path.name) and path.name not in kept):
                path.unlink(missing_ok=True)
