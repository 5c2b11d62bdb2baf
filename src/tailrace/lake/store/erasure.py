"""Take events out of a lake: those that a ``$match`` selects, or whole days that have become old.

Files are rewritten without the events, as compaction rewrites them: while the stream writes, and in one commit that
names the new files and no longer names the old. Readers see a version before or a version after. The old files still
hold the events until they are removed: at once (``vacuum``), or when the retention of replaced files has passed.

The commits of micro-batches are not touched. What was erased stays known as a number in the table's properties, so that
a lake that ends before the log's last token is not taken for damaged, and nothing erased is written again: the stream
goes on after the last token that the lake ever had.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import bson
import pyarrow as pa

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.core.expression.match import tree
from tailrace.core.expression.stages.pipeline import compile_stages
from tailrace.core.plan.conjuncts import parts_of
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog, Head, check_present
from tailrace.lake.store.identity import in_force, metadata_after, read_identity
from tailrace.lake.store.lake_root import LakeRoot, present, rooted, sync_directories
from tailrace.lake.store.layout import QUARANTINE, cluster_time_of, merged_name
from tailrace.lake.store.log_state import LogState
from tailrace.lake.store.manifest import Commit, Erasure, FileEntry, Removal, StagedFile
from tailrace.lake.store.part_writer import FileLimits, PartWriter, equal_tokens_in, kept_metadata, opened_checked
from tailrace.lake.store.retention import Release, remove_replaced
from tailrace.lake.store.session import require_session

EVENT: Final = "event"
READ_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """``rows`` events were erased, and ``kept`` rows of the ``files`` files that held them were written to new ones;
    ``searched`` rows were read. ``removed`` replaced files have left the directory; ``replaced`` are still there
    and may hold erased events. ``quarantined`` events went from the quarantine. ``first_token`` and ``last_token`` are
    those of the erased events."""

    rows: int
    kept: int
    files: int
    searched: int
    removed: int
    replaced: int
    first_token: str | None = None
    last_token: str | None = None
    quarantined: int = 0


def erase(
    path: LakeRoot | str,
    match: Mapping[str, Any],
    *,
    vacuum: bool = False,
    everything: bool = False,
    release: Release | None = None,
) -> ErasureReport:
    """Erase from the lake at ``path`` every event that the ``$match`` document ``match`` selects, with MongoDB's own
    comparison: ``{"ns.coll": "customers", "documentKey._id": 5}``.

    With ``vacuum`` all replaced files leave the directory at once, and readers that opened the lake earlier fail;
    ``release`` is called before, as by ``expire``. Without it Iceberg snapshots lose their files: what is to be erased
    does not wait for a catalogue.
    A stream may go on writing. Raises UsageError where ``path`` is no lake, the lake has no column ``event``, ``match``
    cannot be used, or it selects every event of the lake (of its quarantine, if there are no others) and ``everything``
    does not say that this is meant; LakeFullError; SinkError where the lake is damaged. An error after the lake's
    commit says what was erased so far; the same call does the rest.
    """
    matches = matcher_of(match, everything=everything)
    with erasable(path) as (log, _):
        work = _Work(log, matches)
        try:
            work.search(log.state())  # most of it without the lock, so that a stream can commit meanwhile
            with log.locked() as head:
                state = log.state()
                work.search(state)
                aside = _in_quarantine(log, head, lambda row: matches(row["event"]))
                with _discarding(aside):
                    if not everything:
                        _check_not_everything(work, aside)
                    if work.rows:
                        erasure = Erasure(work.rows, len(work.gone))
                        _commit(log, head, state, gone=tuple(work.gone), made=tuple(work.made), erasure=erasure)
                _finish(log, aside, work.rows)
        except BaseException:
            work.discard()
            raise
        removed = _vacuum(log, work.rows, aside.rows, release) if vacuum else 0
        kept = sum(file.rows for file in work.made)
        found = ErasureReport(work.rows, kept, len(work.gone), work.searched, removed, _left(log))
        return replace(found, first_token=work.first_token, last_token=work.last_token, quarantined=aside.rows)


def drop_days(
    path: LakeRoot | str, before: date, *, vacuum: bool = False, release: Release | None = None
) -> ErasureReport:
    """Take all days before ``before`` (UTC, by cluster time) out of the lake at ``path``. No data file is read or
    written. ``vacuum``, ``release`` and errors as for ``erase``."""
    with _ours(path) as (log, _):
        with log.locked() as head:
            state = log.state()
            gone = tuple(file for file in state.in_order if file.day < before.isoformat())
            rows = sum(file.rows for file in gone)
            aside = _in_quarantine(log, head, lambda row: _day_of(row["token"]) < before)
            with _discarding(aside):
                if gone:
                    erasure = Erasure(rows, len(gone), before.isoformat())
                    _commit(log, head, state, gone=gone, made=(), erasure=erasure)
            _finish(log, aside, rows)
        removed = _vacuum(log, rows, aside.rows, release) if vacuum else 0
        found = ErasureReport(rows, 0, len(gone), rows, removed, _left(log), quarantined=aside.rows)
        if not gone:
            return found
        return replace(found, first_token=gone[0].first_token, last_token=max(file.last_token for file in gone))


@contextmanager
def _ours(path: LakeRoot | str) -> Iterator[tuple[CommitLog, dict[str, Any]]]:
    """The lake, while no compaction runs: nobody else replaces files then."""
    root = rooted(path)
    known = read_identity(root)
    if known is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    log = CommitLog(root)
    require_session(log.layout)
    with durable.locked(log.layout.compaction_lock):
        yield log, known


@contextmanager
def erasable(path: LakeRoot | str) -> Iterator[tuple[CommitLog, dict[str, Any]]]:
    """The lake, as for every change of it, if its rows say what an event holds."""
    with _ours(path) as (log, known):
        if EVENT not in known["stream"].get("columns", [EVENT]):
            raise UsageError(
                "the lake has no column 'event', which says what each event holds",
                hint="Rewrite the lake's files with a program of your own into a new table",
            )
        yield log, known


def _in_quarantine(log: CommitLog, head: Head, goes: Callable[[dict[str, Any]], bool]) -> quarantine.QuarantineRemoval:
    """What to take out of the quarantine. It is prepared before the lake's commit, so that a full disk or a damaged
    file stops both."""
    newest = log.newest_batch(head)
    quarantine.settle(log.layout, newest)
    return quarantine.QuarantineRemoval(log.layout, quarantine.files_of(log.layout, newest), goes)


@contextmanager
def _discarding(aside: quarantine.QuarantineRemoval) -> Iterator[None]:
    try:
        yield
    except BaseException:
        aside.discard()
        raise


def _finish(log: CommitLog, aside: quarantine.QuarantineRemoval, rows: int) -> None:
    """Take the events out of the quarantine, after the lake's commit. It has no versions: they are gone at once."""
    with _half_done(f"{rows:,} events were erased from the lake, but not all selected ones from {QUARANTINE}"):
        aside.carry_out()


def _vacuum(log: CommitLog, rows: int, aside: int, release: Release | None) -> int:
    done = (
        f"{rows:,} events were erased from the lake and {aside:,} from {QUARANTINE}, "
        "but not all replaced files were removed"
    )
    with _half_done(done):
        return remove_replaced(log, timedelta(0), release)


@contextmanager
def _half_done(done: str) -> Iterator[None]:
    """If the rest fails, say what was done so far: there is no report then."""
    try:
        yield
    except (OSError, SinkError) as error:
        kind = type(error) if isinstance(error, SinkError) else SinkError
        cause = error.message if isinstance(error, SinkError) else error
        raise kind(f"{done}: {cause}", hint="Remove the cause and repeat the erasure: it does the rest") from error


def _day_of(token: str) -> date:
    return datetime.fromtimestamp(cluster_time_of(token).seconds, UTC).date()


def _check_not_everything(work: _Work, aside: quarantine.QuarantineRemoval) -> None:
    """Refuse to erase all rows, and in a lake without rows to erase everything in the quarantine."""
    if 0 < work.rows == work.searched:
        _refuse_everything(work.rows)
    if work.searched == 0 and 0 < aside.rows == aside.searched:
        _refuse_everything(aside.rows)


def _refuse_everything(rows: int = 0) -> None:
    which = f": it selects all {rows:,} of them" if rows else ""
    raise UsageError(
        f"this $match would erase every event of the lake{which}",
        hint="If that is meant: tailrace lake erase --all, or erase(everything=True). --dry-run shows what would go",
    )


def matcher_of(match: Mapping[str, Any], *, everything: bool = False) -> Callable[[bytes], bool]:
    """The test whether an event is to go. Raises UsageError for a ``match`` that cannot be used, and, unless
    ``everything`` may go, for one without a condition."""
    try:
        stage = bson.encode({"$match": dict(match)})
    except (bson.errors.BSONError, OverflowError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"the $match cannot be written as BSON: {error}") from None
    compiled = compile_stages([stage])
    parsed = compiled.stages[0].parsed
    if not everything and all(isinstance(one, tree.Always) and one.truth for one in parts_of(parsed)):  # type: ignore[arg-type]
        _refuse_everything()
    return lambda event: compiled.apply(event) is not None


def _commit(
    log: CommitLog,
    head: Head,
    state: LogState,
    *,
    gone: tuple[FileEntry, ...],
    made: tuple[StagedFile, ...],
    erasure: Erasure,
) -> None:
    """The caller holds the lake's lock."""
    known = in_force(log, head)
    check_present(log.layout, made)
    sync_directories({(log.layout.root / file.name).parent for file in made})
    durable.step("erasure.files")
    now = datetime.now(UTC)
    commit = Commit(
        head.number + 1,
        "erase",
        str(known["claim"]),
        head.digest,
        made,
        tuple(Removal(file.name, now, file.size, file.collection) for file in gone),
        erasure=erasure,
        newest=head.newest,
        committed_at=now,
    )
    log.write(commit, metadata_after(known, state, commit))


def _left(log: CommitLog) -> int:
    """Replaced files that are still in the directory."""
    state = log.state()
    return len(present(log.layout.root, (name for name in state.removed if name not in state.files)))


class _Work:
    """Files that hold events to erase, and the files without them that take their place."""

    def __init__(self, log: CommitLog, matches: Callable[[bytes], bool]) -> None:
        self._log = log
        self._matches = matches
        self._seen: set[str] = set()
        self.gone: list[FileEntry] = []
        self.made: list[StagedFile] = []
        self.rows = self.searched = 0
        self.first_token: str | None = None
        self.last_token: str | None = None

    def search(self, state: LogState) -> None:
        """Look through the files of ``state`` that were not looked through before."""
        for file in state.in_order:
            if file.name not in self._seen:
                self._seen.add(file.name)
                self.searched += file.rows
                if self._holds_some(file):
                    self._rewrite(file)

    def discard(self) -> None:
        """Remove what was made, unless the log names it after all, or a store may still make the commit: then the next
        start of the stream removes what no commit names."""
        if self._log.in_doubt and isinstance(self._log.layout.root, ObjectPlace):
            return
        with self._log.locked():
            held = self._log.state().files
            for file in self.made:
                if file.name not in held:
                    (self._log.layout.root / file.name).unlink(missing_ok=True)

    def _holds_some(self, file: FileEntry) -> bool:
        with opened_checked(self._log.layout.root, file) as parquet:
            batches = parquet.iter_batches(batch_size=READ_ROWS, columns=[EVENT])
            return any(self._matches(event) for batch in batches for event in batch.column(0).to_pylist())

    def _rewrite(self, file: FileEntry) -> None:
        root = self._log.layout.root
        before = self.rows
        equal = equal_tokens_in(root, file)
        # Named as what compaction makes, so that a crash leaves nothing that a stream's start would not remove.
        writer = PartWriter(
            root,
            f"merge-{uuid.uuid4().hex}",
            limits=FileLimits(file_bytes=1 << 62),
            metadata=kept_metadata(root, file),
            name=lambda *_: merged_name(file.name),
            one_token=1 + equal,
        )
        made = [replace(one, collection=file.collection) for one in writer.write_all(self._kept(file))]
        self.made += made
        self.gone.append(file)
        if sum(one.rows for one in made) + self.rows - before != file.rows or writer.equal_tokens > equal:
            raise SinkError(f"{root / file.name} does not hold the {file.rows} rows that the log says")

    def _kept(self, file: FileEntry) -> Iterator[pa.RecordBatch]:
        with opened_checked(self._log.layout.root, file) as parquet:
            for batch in parquet.iter_batches(batch_size=READ_ROWS):
                chosen = [self._matches(event) for event in batch.column(EVENT).to_pylist()]
                if not any(chosen):
                    yield batch
                    continue
                self._count(batch.column("token").filter(pa.array(chosen)).to_pylist())
                yield batch.filter(pa.array([not one for one in chosen]))

    def _count(self, tokens: Sequence[str]) -> None:
        self.rows += len(tokens)
        self.first_token = min(self.first_token or tokens[0], tokens[0])
        self.last_token = max(self.last_token or tokens[-1], tokens[-1])
