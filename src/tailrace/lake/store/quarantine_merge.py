"""Merge the quarantine's small files: a task writes one for each micro-batch in which it puts an event aside.

The merged file is written without the lake's lock, while no other compaction and no erasure runs, so the files that it
replaces stay as they are. Then, under the lock, the replacement is noted and carried out
(``quarantine.QuarantineMerge``).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.lake_root import LakeRoot, size_of
from tailrace.lake.store.layout import QUARANTINE
from tailrace.lake.store.quarantine_index import replace_files
from tailrace.lake.store.quarantine_ledger import go_on_without, note_replaced


def merge_quarantine(log: CommitLog, target_bytes: int) -> tuple[int, int]:
    """Merge neighbouring files up to about ``target_bytes``. Returns how many files were merged, and into how many. The
    caller holds the lock of compactions. Raises LakeFullError, and SinkError where a file is damaged."""
    with log.locked() as head:
        newest = log.newest_batch(head)
        quarantine.settle(log.layout, newest)
        files = quarantine.files_of(log.layout, newest)
    before = after = 0
    for group in _groups(files, target_bytes):
        _merge(log, group)
        before, after = before + len(group), after + 1
    return before, after


def accept_lost(log: CommitLog) -> int | None:
    """Let the quarantine of a lake in a directory go on without the files that it has lost. Returns their
    number, or ``None`` where its ledger cannot tell. The caller holds the lock of compactions."""
    layout = log.layout
    with log.locked() as head:
        newest = log.newest_batch(head)
        quarantine.settle(layout, newest)
        return go_on_without(layout, head.number, quarantine.names_in(layout, None), log.commits)


def _groups(files: Sequence[LakeRoot], target: int) -> Iterator[list[LakeRoot]]:
    """Groups of two or more neighbouring files, in the order of the stream. Large files are left out."""
    group: list[LakeRoot] = []
    size, last = 0, ""
    for path in files:
        first, end = _ends(path)
        own = size_of(path)
        if own >= target or size + own > target * 3 // 2 or first <= last:
            if len(group) > 1:
                yield group
            group, size = [], 0
        if own < target:
            group.append(path)
            size += own
        last = end
    if len(group) > 1:
        yield group


def _ends(path: LakeRoot) -> tuple[str, str]:
    """The first and the last token of a file."""
    tokens = quarantine.read_checked(path).column("token")
    return str(tokens[0].as_py()), str(tokens[-1].as_py())


def _merge(log: CommitLog, group: Sequence[LakeRoot]) -> None:
    layout = log.layout
    merge = quarantine.QuarantineMerge(
        quarantine.name_after(group[0]),
        f"merge-quarantine-{uuid.uuid4().hex}",
        tuple(path.name for path in group),
    )
    staged = merge.staged_at(layout)
    try:
        _write(group, staged)
        if isinstance(layout.root, ObjectPlace):
            _merge_stored(log, merge, layout.root / QUARANTINE / merge.name)
            return
        durable.step("quarantine.merged")
        with log.locked():
            for path in group:
                if not path.exists():
                    raise SinkError(f"{path} was removed while it was being compacted")
            durable.sync_directory(layout.staging)
            note_replaced(layout, {f"{QUARANTINE}/{name}": f"{QUARANTINE}/{merge.name}" for name in merge.replaces})
            merge.note(layout)
            quarantine.finish_merge(layout)
    except BaseException:
        noted = None if isinstance(layout.root, ObjectPlace) else quarantine.QuarantineMerge.noted(layout)
        if noted != merge:  # otherwise the next program finishes it
            staged.unlink(missing_ok=True)
        raise


def _merge_stored(log: CommitLog, merge: quarantine.QuarantineMerge, place: ObjectPlace) -> None:
    """Nothing is noted: the exchange of the index is one step. What is uploaded in vain goes at the next start."""
    quarantine.move_up(merge.staged_at(log.layout), place)
    durable.step("quarantine.merged")
    with log.locked():
        replaced: dict[str, str | None] = {f"{QUARANTINE}/{name}": None for name in merge.replaces}
        replaced[f"{QUARANTINE}/{merge.replaces[0]}"] = f"{QUARANTINE}/{merge.name}"
        replace_files(log.layout, replaced)


def _write(group: Sequence[LakeRoot], staged: Path) -> None:
    """The rows of ``group``, one file after the other, so that only one is in memory."""
    digest, rows = quarantine.RowsDigest(), 0
    with durable.writing(staged):
        writer = pq.ParquetWriter(staged, quarantine.schema(), compression="zstd", write_page_checksum=True)
        try:
            for path in group:
                table = quarantine.read_checked(path).cast(quarantine.schema())
                digest.add(table)
                writer.write_table(table)
                rows += table.num_rows
            writer.add_key_value_metadata(digest.metadata)
            writer.close()
        except BaseException:
            with suppress(OSError, pa.ArrowException):  # no room for its footer either: the first error is reported
                writer.close()
            raise
        durable.sync_file(staged)
    if quarantine.rows_in([staged]) != rows:
        raise SinkError(f"{staged} does not hold the {rows} rows that were written to it")
