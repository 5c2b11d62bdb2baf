"""Where the files of one oplog go: what its one writer needs from a directory or from an object store.

In a directory, a lock says who writes, and a rename publishes. In a store a segment is uploaded under a name that has
its digest, and counts when ``head.json`` names it, which is written only over the head that this writer has written
before (``If-Match``). So a writer that was replaced publishes nothing. What it may delete is what can never count
again: what ends before the head's start, and what begins before the head's end and is not in its chain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import invariant
from tailrace.read.archive.claim import FolderClaim, StoreClaim
from tailrace.read.archive.layout import (
    HEAD,
    IMAGES,
    LOCK,
    ArchiveSegment,
    Reach,
    chained,
    head,
    oplog_folder,
    oplog_of,
    segment_named,
)
from tailrace.read.archive.place import ArchivePlace, files_in
from tailrace.read.archive.record import write_record
from tailrace.read.archive.retention import Retention, remove_before, retain

_SPAN: Final = 33


class FolderKeeping:
    """One oplog's folder in a directory. ``scratch``: where its unfinished files are."""

    put = None

    def __init__(self, folder: Path) -> None:
        self._folder = self.scratch = folder

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other process writes here."""
        with durable.writing(self._folder):
            durable.make_directory(self._folder)
        with durable.locked(self._folder / LOCK, wait=False) as held:
            yield held

    def head(self) -> Reach | None:
        """How far the archive reaches."""
        return head(self._folder)

    def write_head(self, reach: Reach) -> None:
        """Say how far it reaches."""
        write_record(self._folder / HEAD, reach.document())

    def remove_before(self) -> None:
        """Delete what was left."""
        remove_before(self._folder)

    def retain(self, retention: Retention) -> int:
        """Delete what may go; how many segments that were."""
        return retain(self._folder, retention)


class StoreKeeping:
    """One oplog below a prefix of an object store. Raises SinkError where another process writes there."""

    def __init__(self, folder: ObjectPlace, claim: StoreClaim) -> None:
        self._folder = folder
        self._claim = claim
        self._head = folder / HEAD
        self._tag = ""
        self._reach: Reach | None = None
        self._chain: list[ArchiveSegment] = []
        self._new: ArchiveSegment | None = None
        #: Sizes in bytes by name, of those names that begin with this span.
        self._files: dict[str, dict[str, int]] = {}
        scratch = oplog_folder(claim.beside, oplog_of(folder))
        assert isinstance(scratch, Path)
        self.scratch = scratch

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """The claim says who writes. What is read of the head after this is what ``write_head`` replaces."""
        with durable.writing(self.scratch):
            durable.make_directory(self.scratch)
            for left in self.scratch.glob(".*.unfinished"):
                left.unlink(missing_ok=True)
        try:
            self._tag = self._head.head()[1]
        except FileNotFoundError:
            self._tag = ""
        self._claim.check()  # after that: a process that takes over now finds our head, or we find another
        yield True

    def head(self) -> Reach | None:
        """How far the archive reaches."""
        return self._reach or head(self._folder)

    def write_head(self, reach: Reach) -> None:
        """Say how far it reaches: what was put there counts from now on."""
        content = durable.sealed({**reach.document(), "session": self._claim.session})
        try:
            self._tag = self._head.swap(content, self._tag) if self._tag else self._head.create(content)
        except FileExistsError:
            raise self._claim.lost() from None
        self._reach = reach
        if self._new is not None and self._new.digest == reach.newest:
            self._chain.append(self._new)
            self._new = None
        durable.step("archive.head")

    def put(self, temporary: Path, name: str) -> None:
        """Upload a finished file."""
        try:
            there = self._head.head()[1]
        except FileNotFoundError:
            there = ""
        if there != self._tag:
            raise self._claim.lost()
        size = temporary.stat().st_size
        (self._folder / name).upload(temporary)
        temporary.unlink()
        self._files.setdefault(name[:_SPAN], {})[name] = size
        self._new = segment_named(self._folder, name, size) or self._new
        durable.step("archive.images" if IMAGES.fullmatch(name) else "archive.uploaded")

    def remove_before(self) -> None:
        """Delete what was left by others and by earlier runs, as far as it can never count again."""
        reach = self._reach
        assert reach is not None
        found = []
        self._files.clear()
        for one in files_in(self._folder):
            segment = segment_named(self._folder, one.name, one.size)
            if segment is not None:
                found.append(segment)
            if segment is not None or IMAGES.fullmatch(one.name):
                self._files.setdefault(one.name[:_SPAN], {})[one.name] = one.size
        self._chain = chained(reach, [segment for segment in found if segment.until > reach.start])
        kept = {segment.span: segment.path.name for segment in self._chain}
        for span in list(self._files):
            after, until = (ClusterTime(int(part, 16)) for part in span.split("-"))
            if until <= reach.start or (span not in kept and after < reach.until):
                self._remove(span)
            elif span in kept:
                others = [name for name in self._files[span] if not IMAGES.fullmatch(name) and name != kept[span]]
                self._remove(span, others)

    def retain(self, retention: Retention) -> int:
        """Delete what may go; how many segments that were."""
        reach = self._reach
        expired = retention.expired(self._chain, time.time(), lambda one: sum(self._files[one.span].values()))
        if reach is None or not expired:
            return 0
        self.write_head(replace(reach, start=expired[-1].until))
        del self._chain[: len(expired)]
        for segment in expired:
            self._remove(segment.span)
        return len(expired)

    def _remove(self, span: str, names: list[str] | None = None) -> None:
        files = self._files[span]
        for name in list(files) if names is None else names:
            (self._folder / name).unlink()
            del files[name]
            durable.step("archive.removed")
        if not files:
            del self._files[span]


def keeping(folder: ArchivePlace, claim: FolderClaim | StoreClaim | None = None) -> FolderKeeping | StoreKeeping:
    """Where the files of the oplog in ``folder`` go."""
    if isinstance(folder, ObjectPlace):
        invariant(isinstance(claim, StoreClaim), "an archive in an object store is claimed before it is written")
        assert isinstance(claim, StoreClaim)
        return StoreKeeping(folder, claim)
    return FolderKeeping(folder)
