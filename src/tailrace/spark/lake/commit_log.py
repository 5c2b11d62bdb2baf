"""The lake's log: one manifest for each commit, numbered without gaps. What the log says is what the lake holds.

A commit is made in three steps under the lake's lock: the manifest is written (from then on the commit has happened),
the files are moved to their places, the head is advanced. Whoever comes after a crash finishes the last two by the same
code as the commit itself, and doing it twice changes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import SinkError
from tailrace.spark.lake import durable
from tailrace.spark.lake.layout import LakeLayout, file_name
from tailrace.spark.lake.manifest import Commit, FileEntry, StagedFile, check_ascending
from tailrace.spark.lake.swap import put_in_place

#: Manifests are folded into one snapshot each time so many have come, and only so many are kept beside it. So the
#: folder stays small and a start stays quick, however long the stream has run.
SNAPSHOT_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """Where the log stands: the newest commit's number, and the newest commit that added events (if any)."""

    number: int
    newest: Commit | None

    @property
    def last_token(self) -> str | None:
        return None if self.newest is None else self.newest.last_token


class CommitLog:
    """The log of the lake at ``root``. Every change is made while ``locked()``."""

    def __init__(self, root: Path | str) -> None:
        self.layout = LakeLayout(Path(root))

    @contextmanager
    def locked(self) -> Iterator[Head]:
        """Hold the lake's lock, everything that a crash has left undone being done, and give the head."""
        with durable.locked(self.layout.lock):
            yield self._recover()

    def head(self) -> Head:
        """The head as it was last written; a commit that is being made just now may be missing. Takes no lock."""
        value = durable.read_json(self.layout.head)
        if value is None:
            return self._rebuild_head()
        newest = value.get("newest")
        number = value.get("number")
        if not isinstance(number, int):
            raise SinkError(f"{self.layout.head} is damaged: no number")
        return Head(number, Commit.from_json(newest, self.layout.head) if isinstance(newest, dict) else None)

    def commits(self, after: int = 0) -> Iterator[Commit]:
        """The commits whose manifests are still kept, in order, beginning after number ``after``."""
        for path in sorted(self.layout.commits.glob("*.json")):
            if int(path.stem) > after:
                yield self._read(path)

    def live_files(self) -> list[FileEntry]:
        """The files that the lake holds, in the order of the stream: snapshot and manifests added up."""
        snapshot = durable.read_json(self.layout.snapshot)
        number, files = 0, dict[str, FileEntry]()
        if snapshot is not None:
            folded = Commit.from_json(snapshot, self.layout.snapshot)
            number, files = folded.number, {file.name: file for file in folded.files}
        for commit in self.commits(number):
            if commit.number != number + 1:
                raise SinkError(f"{self._path(number + 1)} is missing: the lake's log has a gap")
            number = commit.number
            for name in commit.removed:
                files.pop(name, None)
            files.update((file.name, file) for file in commit.files)
        return sorted(files.values(), key=lambda file: file.name)

    def write(self, commit: Commit) -> Head:
        """Make ``commit`` the next one: the caller holds the lock and has checked it. Returns the new head."""
        path = self._path(commit.number)
        durable.write_json(path, commit.to_json())
        durable.step("commit.manifest")
        return self._finish(commit, self.head())

    def discard(self, files: tuple[StagedFile, ...]) -> None:
        """Remove staged files that no commit took."""
        for file in files:
            (self.layout.staging / file.staged).unlink(missing_ok=True)

    def clean(self) -> int:
        """Remove what interrupted tasks and compactions have left in ``_staging``; the caller holds the lock, so that
        no commit is on its way. Returns how many files went."""
        removed = 0
        with durable.locked(self.layout.compaction_lock, wait=False) as no_compaction:
            for path in self.layout.staging.iterdir() if self.layout.staging.is_dir() else ():
                if path.is_file() and (no_compaction or not path.name.startswith("merge-")):
                    path.unlink(missing_ok=True)
                    removed += 1
            for directory in (self.layout.state, self.layout.commits):
                for path in directory.glob(durable.UNFINISHED):
                    path.unlink(missing_ok=True)
                    removed += 1
            if no_compaction:
                for swap in (self.layout.swap_beside, self.layout.swap_inside):
                    shutil.rmtree(swap, ignore_errors=True)
        return removed

    def _path(self, number: int) -> Path:
        return self.layout.commits / f"{number:010d}.json"

    def _read(self, path: Path) -> Commit:
        value = durable.read_json(path)
        if value is None:
            raise SinkError(f"{path} is missing: the lake's log has a gap")
        commit = Commit.from_json(value, path)
        if commit.number != int(path.stem):
            raise SinkError(f"{path} is damaged: it holds commit {commit.number}")
        return commit

    def _recover(self) -> Head:
        head = self.head()
        while (path := self._path(head.number + 1)).exists():
            head = self._finish(self._read(path), head)
        return head

    def _finish(self, commit: Commit, before: Head) -> Head:
        """Everything that follows a manifest; repeatable."""
        if commit.removed:
            put_in_place(self.layout, commit)
        else:
            self._move_into_place(commit)
        head = Head(commit.number, before.newest if commit.batch is None else commit)
        self._write_head(head)
        durable.step("commit.head")
        if commit.number % SNAPSHOT_EVERY == 0:
            self._take_snapshot(commit)
        return head

    def _move_into_place(self, commit: Commit) -> None:
        """Rename in the order of the stream: a reader that looks meanwhile sees a beginning of the batch."""
        days = set[Path]()
        for file in commit.files:
            place, staged = self.layout.root / file.name, self.layout.staging / file.staged
            with durable.writing(place):
                if not place.parent.is_dir():
                    place.parent.mkdir(exist_ok=True)
                    durable.sync_directory(self.layout.root)
                if staged.exists():
                    staged.replace(place)
                elif not place.exists():
                    raise SinkError(
                        f"{place} is missing, and so is {staged}: commit {commit.number} cannot be finished"
                    )
            days.add(place.parent)
            durable.step("commit.rename")
        for day in days:
            durable.sync_directory(day)

    def _write_head(self, head: Head) -> None:
        newest = None if head.newest is None else head.newest.to_json()
        durable.write_json(self.layout.head, {"number": head.number, "newest": newest})

    def _rebuild_head(self) -> Head:
        """From the manifests, the newest left out: it may not be finished, so ``_recover`` does it again."""
        number, newest = 0, None
        for commit in list(self.commits())[:-1]:
            number = commit.number
            newest = newest if commit.batch is None else commit
        return Head(number, newest)

    def _take_snapshot(self, commit: Commit) -> None:
        """Fold the log so far into ``snapshot.json``; the newest manifests stay for whoever reads them."""
        folded = Commit(commit.number, commit.claim, None, tuple(self.live_files()))
        durable.write_json(self.layout.snapshot, folded.to_json())
        durable.step("snapshot")
        for path in self.layout.commits.glob("*.json"):
            if int(path.stem) <= commit.number - SNAPSHOT_EVERY:
                path.unlink(missing_ok=True)


def next_commit(head: Head, claim: str, batch: int, files: tuple[StagedFile, ...]) -> Commit:
    """The commit that adds ``files`` (ascending, checked here) after ``head``; names follow from its number."""
    check_ascending(files)
    number = head.number + 1
    entries = tuple(
        FileEntry(
            name=file_name(file.day, number, index),
            staged=file.staged,
            rows=file.rows,
            size=file.size,
            first_token=file.first_token,
            last_token=file.last_token,
            last_wall_time=file.last_wall_time,
        )
        for index, file in enumerate(files)
    )
    return Commit(number, claim, batch, entries)


def check_staged(layout: LakeLayout, files: tuple[StagedFile, ...]) -> None:
    """Each staged file is there with the size that its task reported; otherwise the commit must not begin."""
    for file in files:
        path = layout.staging / file.staged
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise SinkError(
                f"{path} has gone before it could be committed: is another process writing this lake?"
            ) from None
        if size != file.size:
            raise SinkError(f"{path} has {size} bytes, and {file.size} were written")
