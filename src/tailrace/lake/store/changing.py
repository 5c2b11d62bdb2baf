"""Change what a lake holds: its stream or its columns, in one commit that adds files and no longer names others.

``lake.json`` and the log must change together. So a note of what the lake is to become is first written into
``lake.json``, then the commit is made, and then the note replaces the old contents (``changing_note.py``). The lake has
a new claim then, which no checkpoint holds: an older checkpoint, which belongs to another stream, is refused from the
commit on, and a fresh one goes on where the stream was.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import quarantine
from tailrace.lake.store.changing_note import CHANGING, COMMIT, digest_of, divided, may_happen
from tailrace.lake.store.checkpoint_file import CHECKPOINT_FILE, read_held
from tailrace.lake.store.commit_log import CommitLog, Head, check_present
from tailrace.lake.store.identity import metadata_after, partitioning_of, read_identity, require_changed
from tailrace.lake.store.lake_root import LakeRoot, exchange_sealed, sync_directories, write_sealed
from tailrace.lake.store.layout import merged_name, new_name
from tailrace.lake.store.log_state import LogState
from tailrace.lake.store.manifest import Commit, FileEntry, LakeChange, Removal, StagedFile
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.session import require_session


@dataclass(frozen=True, slots=True)
class LakeBefore:
    """A lake that is to be changed, at one commit: ``known`` is its ``lake.json``, and ``aside`` are the tokens of the
    events in its quarantine with the reasons."""

    log: CommitLog
    known: Mapping[str, Any]
    head: Head
    state: LogState
    aside: Mapping[str, str]

    @property
    def root(self) -> LakeRoot:
        return self.log.layout.root

    @property
    def partitioning(self) -> Partitioning:
        return partitioning_of(self.known)


@contextmanager
def lake_before(root: LakeRoot) -> Iterator[LakeBefore]:
    """The lake at ``root``, while nobody compacts or erases in it. Raises UsageError where it is no lake, SinkError
    where it is being compacted or is damaged, or where another machine writes it."""
    known = read_identity(root)
    if known is None:
        raise UsageError(f"{root} is not a lake of Tailrace", hint="tailrace run begins one")
    log = CommitLog(root)
    require_session(log.layout)
    with durable.locked(log.layout.compaction_lock, wait=False) as mine:
        if not mine:
            raise SinkError(f"a compaction or an erasure of {root} is running", hint="Try again when it has ended")
        with log.locked() as head:
            problems = log.problems()
            if problems:
                raise SinkError(problems[0], hint="Restore it from a copy; --verify says what else is wrong")
            newest = log.newest_batch(head)
            quarantine.settle(log.layout, newest)
            aside = _reasons(quarantine.files_of(log.layout, newest))
            known = read_identity(root) or known
            require_changed(log, known)
            before = LakeBefore(log, known, head, log.state(), aside)
        yield before


def _reasons(paths: Sequence[LakeRoot]) -> dict[str, str]:
    tables = [quarantine.read_checked(path).select(["token", "reason"]) for path in paths]
    return {str(row["token"]): str(row["reason"]) for table in tables for row in table.to_pylist()}


def changed_name(first_token: str, index: int, partitioning: Partitioning, collection: str | None) -> str:
    """A name for a file that a change writes. It is of the kind that compaction gives, so that a stream that starts
    meanwhile does not take the file for a leftover."""
    return merged_name(new_name(first_token, index, partitioning, collection))


def commit_change(
    before: LakeBefore,
    change: LakeChange,
    stream: Mapping[str, Any],
    columns: Sequence[Mapping[str, Any]],
    *,
    gone: Sequence[FileEntry],
    made: Sequence[StagedFile],
) -> Commit:
    """Make the lake one of ``stream`` with ``columns``: the files ``made`` take the place of those that are ``gone``.

    The log's newest micro-batch reaches to the last event that there is then: some may have been added after its own.
    Raises SinkError where a stream has written the lake meanwhile; the lake is then as it was. Of a lake in a store it
    is not always known whether the commit was made where an error is raised: ``log.in_doubt`` says so.
    """
    log = before.log
    noted = {"claim": change.claim, "stream": dict(stream), "columns": [dict(column) for column in columns]}
    change = replace(change, digest=digest_of(noted))
    with log.locked() as found:
        if (found.number, found.digest) != (before.head.number, before.head.digest):
            raise SinkError(
                f"the lake {before.root} was written while it was being changed",
                hint="A stream writes it: stop that first (Ctrl-C, SIGTERM), and try again",
            )
        check_present(log.layout, tuple(made))
        sync_directories({(before.root / file.name).parent for file in made})
        durable.step("change.files")
        head, known = _note(before, found, noted)
        durable.step("change.noted")
        newest = head.newest
        if newest is not None and made:
            newest = replace(newest, last_token=max(newest.last_token, *(file.last_token for file in made)))
        now = datetime.now(UTC)
        commit = Commit(
            head.number + 1,
            "change",
            change.claim,
            head.digest,
            tuple(sorted(made, key=lambda file: file.first_token)),
            tuple(Removal(file.name, now, file.size, file.collection) for file in gone),
            change=change,
            newest=newest,
            committed_at=now,
        )
        try:
            log.write(commit, metadata_after(known, log.state(), commit))
        except SinkError as error:
            if log.in_doubt and isinstance(before.root, ObjectPlace):
                raise StoreAwayError(
                    f"{error.message}. Whether the lake {before.root} was changed is not known",
                    hint="Try again when the store answers: the change is made, or nothing is left to change",
                ) from error
            _take_back(log, noted)
            raise
        _put_in_force(log, known)
        durable.step("change.identity")
    return commit


def _note(before: LakeBefore, head: Head, noted: Mapping[str, Any]) -> tuple[Head, dict[str, Any]]:
    """Write the note, and give what the lake is to become, and the log's end, to which a commit that adds nothing may
    have come: an older note stays until its commit can no longer be made. The caller holds the lock."""
    log = before.log
    place = log.layout.identity
    if not isinstance(place, ObjectPlace):
        there = read_identity(before.root) or before.known  # a fresh checkpoint may have taken the lake over
        write_sealed(place, {**there, CHANGING: {**noted, COMMIT: head.number + 1}})
        return head, {**there, **noted}
    seen = log.identity
    if seen is None:
        raise SinkError(f"{before.root} is no longer a lake: lake.json is gone")
    there, older = divided(log, seen)
    if may_happen(older, head.number):
        fence = Commit(head.number + 1, "start", str(there["claim"]), head.digest, newest=head.newest)
        head = log.write(fence)
        durable.step("change.fence")
    note = {CHANGING: {**noted, COMMIT: head.number + 1}}
    exchange_sealed(place, lambda now: {**there, **note} if now == seen else None)
    return head, {**there, **noted}


def _take_back(log: CommitLog, noted: Mapping[str, Any]) -> None:
    """Remove the note of a change in a store whose commit cannot come. It stays where the store does not answer, or the
    change was made after all: a start removes it."""
    place = log.layout.identity
    if not isinstance(place, ObjectPlace):
        return

    def without(there: dict[str, object] | None) -> dict[str, object] | None:
        left, note = divided(log, there or {})
        return left if note and note[CHANGING]["claim"] == noted["claim"] else None

    with suppress(SinkError):
        exchange_sealed(place, without)


def _put_in_force(log: CommitLog, known: Mapping[str, Any]) -> None:
    """Let what was noted take the place of the old contents, after the commit. In a store a stream that has just been
    opened elsewhere may have done it, or may have left the note for the next one. Raises SinkError where an older
    ``lake.json`` has come meanwhile."""
    place = log.layout.identity
    if not isinstance(place, ObjectPlace):
        write_sealed(place, known)
        return

    def of(there: dict[str, object] | None) -> dict[str, object] | None:
        in_force, note = divided(log, there or {})
        return in_force if there is not None and CHANGING in there and not note else None

    try:
        exchange_sealed(place, of)
    except StoreAwayError:
        raise
    except SinkError:
        require_changed(log, read_identity(log.layout.root) or known)


def discard(before: LakeBefore, made: Sequence[StagedFile]) -> None:
    """Remove files that were made, unless the log names them. Of a lake in a store they stay where the commit may still
    be made, the store does not answer, or another machine has taken the lake over: its next start removes them."""
    is_stored = isinstance(before.root, ObjectPlace)
    if not made or (is_stored and before.log.in_doubt):
        return
    with suppress(SinkError) if is_stored else nullcontext(), before.log.locked():
        held = before.log.state().files
        for file in made:
            if file.name not in held:
                (before.root / file.name).unlink(missing_ok=True)


def new_claim() -> str:
    return str(uuid.uuid4())


def set_superseded_aside(root: LakeRoot, checkpoint: Path) -> Path | None:
    """Move away a checkpoint of this lake that a change has shut out, so that the next run begins a fresh one in its
    place. Returns where the old one is."""
    known, held = read_identity(root), read_held(checkpoint)
    if known is None or held is None or held.get("lake") != known["id"] or held.get("claim") == known["claim"]:
        return None
    place = checkpoint.with_name(f"{checkpoint.name}.superseded-{str(held.get('claim'))[:8]}")
    if place.exists():
        raise UsageError(f"{place} is in the way of {checkpoint / CHECKPOINT_FILE}", hint="Remove or rename it")
    with durable.writing(place):
        checkpoint.rename(place)
        durable.sync_directory(place.parent)
    durable.step("change.checkpoint")
    return place
