"""Commit a micro-batch to the lake exactly once, even if Spark does it twice.

Spark replays a micro-batch under the same number when it died between our commit and its own; it calls ``abort`` when
``commit`` raised, also when the commit had already happened (both measured with PySpark 4.3). So a batch is recognised
by its claim, its number and the range that it was planned for, and what the log holds is never deleted. Its rows prove
nothing: those of a replay may differ where the pipeline uses looked-up documents.

Lake and checkpoint are compared each time, both ways (``checkpoint_file.py``), and the range must begin where the
reading of the lake has ended, or earlier: otherwise there would be a hole.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError
from tailrace.lake.store import quarantine
from tailrace.lake.store.checkpoint_file import WAY_OUT, read_held, require_seen, write_held
from tailrace.lake.store.commit_log import CommitLog, Head, append_commit, check_present
from tailrace.lake.store.identity import check_claim, metadata_after
from tailrace.lake.store.lake_root import LakeRoot, sync_directories
from tailrace.lake.store.layout import LakeLayout, checked_name, is_quarantine
from tailrace.lake.store.manifest import BatchMark, Commit, PlannedRange, StagedFile

_FRESH = "Was an old copy of the checkpoint restored? A fresh directory goes on after the lake's last event"


def commit_batch(
    root: LakeRoot,
    claim: str,
    batch: int,
    planned: PlannedRange,
    files: tuple[StagedFile, ...],
    *,
    checkpoint: Path | None = None,
) -> Commit | None:
    """Add ``files``, in the order of the stream, as micro-batch ``batch``, planned for the range ``planned``; files of
    events that were put aside go to the quarantine in the same commit. ``checkpoint`` is Spark's directory, which keeps
    what it has seen of the lake.

    Returns the new commit, or ``None`` where nothing was to be added: no files, or a batch that was committed before
    (its files are dropped). Raises SinkError where the claim is not the lake's, lake or checkpoint was set back, the
    files are out of order, or they repeat what the lake holds; the lake is then as it was.
    """
    rows, aside = quarantine.divided(files)
    for file in rows:
        checked_name(file.name, f"micro-batch {batch}")
    log = CommitLog(root)
    with log.locked() as head:
        known = check_claim(log, head, claim)
        held = None if checkpoint is None else _held(log, head, claim, checkpoint)
        if isinstance(root, Path) or (head.newest is not None and head.newest.aside):  # in a store each is a request
            quarantine.settle(log.layout, log.newest_batch(head))
        if files and _is_replay(head, claim, batch, planned):
            _discard(log.layout, files)
            _remember(checkpoint, held, head)
            return None
        _require_no_hole(root, head, batch, planned)
        if not files:
            log.reach(head, planned)
            return None
        first = min(file.first_token for file in files)
        if head.last_token is not None and first <= head.last_token:
            raise SinkError(
                f"micro-batch {batch} begins at token {first}, and the lake {root} already reaches to "
                f"{head.last_token}",
                hint="Give a fresh checkpoint directory: it goes on after the lake's last event",
            )
        check_present(log.layout, rows)
        quarantine.check_waiting(log.layout, aside, head.number)
        if isinstance(root, Path):
            sync_directories({(root / file.name).parent for file in rows} | {log.layout.staging})
        durable.step("commit.files")
        last = max(file.last_token for file in files)
        count = sum(file.rows for file in rows)
        mark = BatchMark(head.number + 1, claim, batch, planned, first, last, count, len(aside))
        commit = append_commit(head, claim, batch, mark, rows, quarantined=aside)
        _remember(checkpoint, held, log.write(commit, _metadata(log, head, commit, known)))
        quarantine.settle(log.layout, commit)
        return commit


def _metadata(log: CommitLog, head: Head, commit: Commit, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table's metadata, if the commit changes it: where it says where the lake begins, or its events are those of
    another server version than the ones before."""
    before = "" if head.newest is None else head.newest.planned.server_version
    same = commit.planned is None or commit.planned.server_version in ("", before)
    if same and commit.begins is None:
        return None
    return metadata_after(known, log.state(), commit)


def _held(log: CommitLog, head: Head, claim: str, checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint keeps of the lake, compared with the lake."""
    held = read_held(checkpoint)
    if held is None or held.get("claim") != claim:
        raise SinkError(
            f"the checkpoint {checkpoint} is gone or was replaced while its stream was running",
            hint="Start again: what was committed is intact",
        )
    require_seen(log, head, checkpoint, held)
    return held


def _remember(checkpoint: Path | None, held: dict[str, Any] | None, head: Head) -> None:
    """Let the checkpoint know the commit before Spark does: an older lake is noticed from then on. If a crash comes
    before, Spark gives the micro-batch again."""
    if checkpoint is not None and held is not None:
        write_held(checkpoint, held, head)
        durable.step("commit.checkpoint")


def _require_no_hole(root: LakeRoot, head: Head, batch: int, planned: PlannedRange) -> None:
    """A range that begins after all that the lake has been read to comes from a newer checkpoint than the lake."""
    if head.reached is not None and planned.after > head.reached:
        raise SinkError(
            f"the lake {root} is older than its checkpoint: micro-batch {batch} is planned for {planned}, but the lake "
            f"reaches only to {head.reached}. Perhaps an old copy of the lake was put in its place",
            hint=WAY_OUT,
        )


def abort_batch(root: LakeRoot, files: tuple[StagedFile, ...]) -> None:
    """Drop the files of a failed micro-batch, unless its commit has happened after all. If there is no room to find
    that out, they stay: the next start drops what no commit names, and Spark is to tell why the micro-batch failed.

    In a store they always stay. A request whose answer was lost may be done later, and make the commit after all."""
    if isinstance(root, ObjectPlace):
        return
    log = CommitLog(root)
    rows, aside = quarantine.divided(files)
    for file in rows:
        checked_name(file.name, "the micro-batch")
    with suppress(durable.LakeFullError), log.locked() as head:
        held = log.state().files if rows else {}
        newest = log.newest_batch(head) if aside else None
        quarantine.settle(log.layout, newest)
        named = newest.quarantined if newest is not None else ()
        _discard(log.layout, tuple(file for file in files if file.name not in held and file.name not in named))


def _discard(layout: LakeLayout, files: tuple[StagedFile, ...]) -> None:
    for file in files:
        path = quarantine.waiting(layout, file.name) if is_quarantine(file.name) else layout.root / file.name
        path.unlink(missing_ok=True)


def _is_replay(head: Head, claim: str, batch: int, planned: PlannedRange) -> bool:
    """Whether this micro-batch is the newest one, given again. One that is older, or of another range that the lake has
    passed, comes from an old copy of the checkpoint."""
    newest = head.newest
    if newest is None or newest.claim != claim:
        return False
    if newest.batch == batch and newest.planned == planned:
        return True
    if batch <= newest.batch:
        raise SinkError(
            f"the checkpoint is behind the lake: it gives micro-batch {batch} again for the range {planned}, but the "
            f"lake holds micro-batch {newest.batch} of {newest.planned}",
            hint=_FRESH,
        )
    if planned.after < newest.planned.until:
        raise SinkError(
            f"the checkpoint is behind the lake: micro-batch {batch} is planned for {planned}, but the lake holds "
            f"micro-batch {newest.batch} of {newest.planned}",
            hint=_FRESH,
        )
    return False
