"""Merge a day's small files into larger ones: same rows, same order, nothing twice and nothing missing meanwhile.

Files that follow each other hold tokens that follow each other, so merging is reading one after the other. The merged
file is written to ``_staging`` without the lake's lock; only the swap (``swap.py``) is made under it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.errors import SinkError, UsageError
from tailrace.spark.lake import durable
from tailrace.spark.lake.commit_log import CommitLog, check_staged
from tailrace.spark.lake.compaction_policy import CompactionPolicy
from tailrace.spark.lake.identity import read_identity
from tailrace.spark.lake.layout import merged_name
from tailrace.spark.lake.manifest import Commit, FileEntry, StagedFile
from tailrace.spark.lake.part_writer import SPARK_SCHEMA, FileLimits, PartWriter
from tailrace.spark.lake.swap import check_can_swap

_READ_ROWS = 8192


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """How many files became how many, and the bytes they had before and after."""

    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def __add__(self, other: CompactionResult) -> CompactionResult:
        return CompactionResult(
            self.files_before + other.files_before,
            self.files_after + other.files_after,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
        )


def compact(path: Path | str, *, target_bytes: int = 128 << 20, offline: bool = False) -> CompactionResult:
    """Merge all small files of the lake at ``path`` up to ``target_bytes``; a running stream need not stop.

    ``offline`` is for file systems without an atomic swap, and only while nobody reads. Raises UsageError where
    ``path`` is no lake, SwapUnsupportedError, LakeFullError, or SinkError where another compaction is running.
    """
    root = Path(path)
    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    result = CompactionResult()
    log = CommitLog(root)
    with durable.locked(log.layout.compaction_lock, wait=False) as mine:
        if not mine:
            raise SinkError(f"another compaction of {root} is running")
        with log.locked():
            files = log.live_files()
        if not offline and any(_groups(files, target_bytes)):
            check_can_swap(log.layout)
        for group in _groups(files, target_bytes):
            result += _merge(log, group, target_bytes, offline=offline)
    return result


def compact_after(root: Path, commit: Commit, policy: CompactionPolicy) -> CompactionResult:
    """What a stream does after each commit: nothing, or every ``policy.every`` commits what has become worth merging.

    A lake that cannot be compacted (no atomic swap, no room for a second copy, somebody compacting by hand) is still a
    good lake, so the stream goes on.
    """
    result = CompactionResult()
    if not policy.due(commit.number):
        return result
    log = CommitLog(root)
    with durable.locked(log.layout.compaction_lock, wait=False) as mine:
        if not mine:
            return result
        files = log.live_files()
        today = commit.files[-1].day
        groups = list(_groups([file for file in files if file.day != today], policy.target_bytes))
        tail = _tail([file for file in files if file.day == today], policy)
        if tail:
            groups.append(tail)
        try:
            if groups:
                check_can_swap(log.layout)
            for group in groups:
                result += _merge(log, group, policy.target_bytes)
        except (durable.SwapUnsupportedError, durable.LakeFullError):
            return result
    return result


def _groups(files: Sequence[FileEntry], target: int) -> Iterator[list[FileEntry]]:
    """Neighbours of one day that are worth merging: two or more, none large already, together about the target."""
    for _, day in groupby(files, key=lambda file: file.day):
        group: list[FileEntry] = []
        for file in day:
            if file.size >= target or sum(held.size for held in group) + file.size > target * 3 // 2:
                if len(group) > 1:
                    yield group
                group = []
            if file.size < target:
                group.append(file)
        if len(group) > 1:
            yield group


def _tail(files: Sequence[FileEntry], policy: CompactionPolicy) -> list[FileEntry]:
    """The newest files of a growing day, as many as can be merged into one at least twice the largest of them: so a row
    is rewritten about log2(target / file size) times. Empty where fewer than ``fan_in`` come together."""
    together = largest = count = 0
    for number, file in enumerate(reversed(files), 1):
        if file.size >= policy.target_bytes:
            break
        together += file.size
        largest = max(largest, file.size)
        if number >= policy.fan_in and 2 * largest <= together:
            count = number
    return next(_groups(files[len(files) - count :], policy.target_bytes), [])


def _merge(log: CommitLog, group: Sequence[FileEntry], target: int, *, offline: bool = False) -> CompactionResult:
    layout = log.layout
    merged = _write_merged(log, group, target)
    durable.step("compaction.merged")
    try:
        with log.locked() as head:
            gone = [file.name for file in group if not (layout.root / file.name).exists()]
            if gone:
                raise SinkError(f"{layout.root / gone[0]} has gone while it was being compacted")
            check_staged(layout, merged)
            number = head.number + 1
            entries = tuple(
                _entry(file, source, number) for file, source in zip(merged, _origins(group, merged), strict=True)
            )
            identity = read_identity(layout.root) or {}
            removed = tuple(file.name for file in group)
            log.write(Commit(number, str(identity.get("claim")), None, entries, removed, offline=offline))
    except BaseException:
        # If the manifest is there, the compaction has happened: taking the lock finishes it before anything goes.
        with log.locked():
            log.discard(merged)
        raise
    return CompactionResult(
        len(group), len(merged), sum(file.size for file in group), sum(file.size for file in merged)
    )


def _write_merged(log: CommitLog, group: Sequence[FileEntry], target: int) -> tuple[StagedFile, ...]:
    """The rows of ``group`` in one new staged file, its count of rows and token range checked against the log's."""
    root = log.layout.root
    metadata = pq.read_metadata(root / group[0].name).metadata or {}
    kept = {SPARK_SCHEMA: metadata[SPARK_SCHEMA]} if SPARK_SCHEMA in metadata else {}
    writer = PartWriter(
        log.layout.staging, f"merge-{uuid.uuid4().hex}", limits=FileLimits(file_bytes=1 << 62), metadata=kept
    )
    merged = writer.write_all(_rows(root, group))
    rows = sum(file.rows for file in merged)
    if len(merged) != 1 or rows != sum(file.rows for file in group):
        log.discard(merged)
        raise SinkError(f"{root / group[0].name} and its neighbours do not hold the rows that the log says")
    return merged


def _rows(root: Path, group: Sequence[FileEntry]) -> Iterator[pa.RecordBatch]:
    for entry in group:
        with pq.ParquetFile(root / entry.name) as file:
            yield from file.iter_batches(batch_size=_READ_ROWS)


def _origins(group: Sequence[FileEntry], merged: Sequence[StagedFile]) -> Iterator[FileEntry]:
    """For each merged file, the one that it takes its place in the order from."""
    by_first = {file.first_token: file for file in group}
    for file in merged:
        yield by_first[file.first_token]


def _entry(file: StagedFile, origin: FileEntry, number: int) -> FileEntry:
    return FileEntry(
        name=merged_name(origin.name, number),
        staged=file.staged,
        rows=file.rows,
        size=file.size,
        first_token=file.first_token,
        last_token=file.last_token,
        last_wall_time=file.last_wall_time,
    )
