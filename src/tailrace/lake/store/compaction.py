"""Merge a day's small files into larger ones: same rows, same order, nothing twice and nothing missing meanwhile.

Files that follow each other hold tokens that follow each other, so merging is reading one after another. The merged
file is written without the lake's lock; only the commit, which names it and no longer names the others, is made under
it. The others stay in their place until the retention has passed, for readers that opened the lake earlier.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import quarantine_merge
from tailrace.lake.store.commit_log import CommitLog, check_present
from tailrace.lake.store.compaction_policy import RETENTION, CompactionPolicy
from tailrace.lake.store.identity import read_identity
from tailrace.lake.store.lake_root import LakeRoot, present, rooted
from tailrace.lake.store.layout import merged_name
from tailrace.lake.store.manifest import Commit, FileEntry, Removal, StagedFile
from tailrace.lake.store.part_writer import FileLimits, PartWriter, equal_tokens_in, kept_metadata, opened_checked
from tailrace.lake.store.remembered import remembered
from tailrace.lake.store.retention import NotReleasedError, Release, check_released, remove_replaced
from tailrace.lake.store.session import require_session

_READ_ROWS = 8192
#: How much larger than the largest of its parts a merged file is, in a partition that still grows. With 2, 1,024 small
#: commits left 4.1 times the bytes of the live files, with 4 it is 3.6, and with 8 it is 2.6, but with half as many
#: live files again.
_GROWTH = 4

_log = logging.getLogger("tailrace.lake")


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The number of files before and after, and their bytes. ``aside_before`` and ``aside_after`` count the
    quarantine's files."""

    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    aside_before: int = 0
    aside_after: int = 0

    def __add__(self, other: CompactionResult) -> CompactionResult:
        return CompactionResult(
            self.files_before + other.files_before,
            self.files_after + other.files_after,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
            self.aside_before + other.aside_before,
            self.aside_after + other.aside_after,
        )


def compact(
    path: LakeRoot | str,
    *,
    target_bytes: int = 128 << 20,
    retention: timedelta = RETENTION,
    release: Release | None = None,
) -> CompactionResult:
    """Merge all small files of the lake at ``path`` up to ``target_bytes``, also those of its quarantine. A running
    stream and readers do not have to stop.

    Files that were replaced longer than ``retention`` ago are removed; ``release`` is called before, as by ``expire``.
    Raises UsageError if ``path`` is not a lake, or one with Iceberg snapshots and there is no ``release``;
    LakeFullError, or SinkError if another compaction is running.
    """
    root = rooted(path)
    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    check_released(root, release)
    require_session(CommitLog(root).layout)
    policy = CompactionPolicy(target_bytes=target_bytes, retention=retention)
    result = CompactionResult()
    log = CommitLog(root)
    with durable.locked(log.layout.compaction_lock, wait=False) as mine:
        if not mine:
            raise SinkError(f"another compaction of {root} is running")
        with log.locked():
            files = log.live_files()
        for group in _groups(files, policy.target_bytes):
            result += _merge(log, group)
        aside_before, aside_after = quarantine_merge.merge_quarantine(log, policy.target_bytes)
        result += CompactionResult(aside_before=aside_before, aside_after=aside_after)
        remove_replaced(log, policy.retention, release)
    return result


def accept_lost(path: LakeRoot | str) -> int | None:
    """Let the quarantine of the lake at ``path`` go on without the files that it has lost. Returns their number, or
    ``None`` if its ledger was lost too: then all files that are there count from now on.

    Raises UsageError if ``path`` is not a lake in a directory, SinkError if a compaction is running.
    """
    root = rooted(path)
    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    if not isinstance(root, Path):
        raise UsageError(f"{root} is in an object store: its quarantine cannot go on without what it has lost")
    log = CommitLog(root)
    with durable.locked(log.layout.compaction_lock, wait=False) as mine:
        if not mine:
            raise SinkError(f"another compaction of {root} is running")
        return quarantine_merge.accept_lost(log)


def compact_after(
    root: LakeRoot, commit: Commit, policy: CompactionPolicy, release: Release | None = None
) -> CompactionResult:
    """What a stream does after each commit: nothing, or, every ``policy.every`` commits, merge what has become worth
    merging.

    A lake that cannot be compacted (no room for a second copy, somebody compacting by hand) is still a sound lake, so
    the stream continues.
    """
    if not policy.due(commit.number) or not commit.files:
        return CompactionResult()
    return _compact_beside(root, commit.newest_file.period, policy, release)


def compact_idle(root: LakeRoot, policy: CompactionPolicy, release: Release | None = None) -> CompactionResult:
    """What a stream does where nothing has happened for a while: what ``compact_after`` would do at its next turn,
    which may not come soon. What was found at the newest commit is remembered."""
    if policy.every == 0:
        return CompactionResult()
    now = datetime.now(UTC)
    known, state = remembered(CommitLog(root))
    if not state.files or known.is_idle(policy, now):
        return CompactionResult()
    files, until = state.in_order, now - policy.retention
    growing = max(files, key=lambda file: file.last_token).period
    due = any(_tail(lane, policy) for lane in _partitions([file for file in files if file.period == growing]))
    if not due and not present(root, (one.name for one in state.removed.values() if one.at <= until)):
        next_at = min((one.at for one in state.removed.values() if one.at > until), default=None)
        known.idle = policy, None if next_at is None else next_at + policy.retention
        return CompactionResult()
    return _compact_beside(root, growing, policy, release)


def _compact_beside(
    root: LakeRoot, growing: str, policy: CompactionPolicy, release: Release | None
) -> CompactionResult:
    """Merge while a stream writes: in the period that is ``growing`` what has become worth it, in the others all small
    files. Then remove what readers no longer need."""
    result = CompactionResult()
    log = CommitLog(root)
    with durable.locked(log.layout.compaction_lock, wait=False) as mine:
        if not mine:
            return result
        files = log.live_files()
        groups = list(_groups([file for file in files if file.period != growing], policy.target_bytes))
        for lane in _partitions([file for file in files if file.period == growing]):
            tail = _tail(lane, policy)
            if tail:
                groups.append(tail)
        try:
            for group in groups:
                result += _merge(log, group)
        except durable.LakeFullError:
            return result
        finally:
            _remove_beside(log, policy.retention, release)
    return result


def _remove_beside(log: CommitLog, retention: timedelta, release: Release | None) -> None:
    """Remove what readers no longer need. Where a catalogue keeps its snapshots, their files stay for now."""
    try:
        remove_replaced(log, retention, release)
    except NotReleasedError as error:
        _log.warning("%s: old files were not removed: %s", log.layout.root, error)


def _groups(files: Sequence[FileEntry], target: int) -> Iterator[list[FileEntry]]:
    """Neighbours of one partition that are worth merging: two or more, none large already, together about the
    target."""
    for partition in _partitions(files):
        group: list[FileEntry] = []
        for file in partition:
            if file.size >= target or sum(held.size for held in group) + file.size > target * 3 // 2:
                if len(group) > 1:
                    yield group
                group = []
            if file.size < target:
                group.append(file)
        if len(group) > 1:
            yield group


def _partitions(files: Sequence[FileEntry]) -> Iterable[list[FileEntry]]:
    """The files of each partition, in the order of the stream."""
    found: dict[object, list[FileEntry]] = {}
    for file in files:
        found.setdefault((file.period, file.lane), []).append(file)
    return found.values()


def _tail(files: Sequence[FileEntry], policy: CompactionPolicy) -> list[FileEntry]:
    """The newest files of a growing partition, as many as can be merged into one at least ``_GROWTH`` times the largest
    of them: so a row is rewritten about log4(target / file size) times. Empty where fewer than ``fan_in`` come
    together."""
    together = largest = count = 0
    for number, file in enumerate(reversed(files), 1):
        if file.size >= policy.target_bytes:
            break
        together += file.size
        largest = max(largest, file.size)
        if number >= policy.fan_in and _GROWTH * largest <= together:
            count = number
    return next(_groups(files[len(files) - count :], policy.target_bytes), [])


def _merge(log: CommitLog, group: Sequence[FileEntry]) -> CompactionResult:
    merged = _write_merged(log, group)
    durable.step("compaction.merged")
    try:
        with log.locked() as head:
            held = log.state().files
            gone = [file.name for file in group if file.name not in held]
            if gone:
                raise SinkError(f"{gone[0]} of {log.layout.root} was replaced while it was being compacted")
            check_present(log.layout, (merged,))
            now = datetime.now(UTC)
            removed = tuple(Removal(file.name, now, file.size, file.collection) for file in group)
            claim = str((read_identity(log.layout.root) or {}).get("claim"))
            number = head.number + 1
            log.write(
                Commit(
                    number, "compaction", claim, head.digest, (merged,), removed, newest=head.newest, committed_at=now
                )
            )
    except BaseException:
        # Where the log names the merged file, the compaction has happened. Where a store may still make the commit, the
        # next start of the stream removes what no commit names.
        if log.in_doubt and isinstance(log.layout.root, ObjectPlace):
            raise
        with log.locked():
            if merged.name not in log.state().files:
                (log.layout.root / merged.name).unlink(missing_ok=True)
        raise
    return CompactionResult(len(group), 1, sum(file.size for file in group), merged.size)


def _write_merged(log: CommitLog, group: Sequence[FileEntry]) -> StagedFile:
    """The rows of ``group`` in one new file, its count of rows and token range checked against the log's, and the
    number of repeated tokens against the footers'."""
    root = log.layout.root
    equal = sum(equal_tokens_in(root, file) for file in group)
    writer = PartWriter(
        root,
        f"merge-{uuid.uuid4().hex}",
        limits=FileLimits(file_bytes=1 << 62),
        metadata=kept_metadata(root, group[0]),
        name=lambda *_: merged_name(group[0].name),
        one_token=1 + equal,
    )
    merged = writer.write_all(_rows(root, group))
    expected = (sum(file.rows for file in group), group[0].first_token, group[-1].last_token, equal)
    found = [(file.rows, file.first_token, file.last_token, writer.equal_tokens) for file in merged]
    if found != [expected]:
        for file in merged:
            (root / file.name).unlink(missing_ok=True)
        raise SinkError(f"{root / group[0].name} and its neighbours do not hold the rows that the log says")
    return replace(merged[0], collection=group[0].collection)


def _rows(root: LakeRoot, group: Sequence[FileEntry]) -> Iterator[pa.RecordBatch]:
    for entry in group:
        with opened_checked(root, entry) as file:
            yield from file.iter_batches(batch_size=_READ_ROWS)
