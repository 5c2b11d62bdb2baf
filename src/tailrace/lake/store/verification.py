"""Read a lake's files, and compare them with what its log says, and the log with itself and with what others read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.base.object_place import ObjectPlace, reason
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import checkpoint as log_checkpoint
from tailrace.lake.store import quarantine
from tailrace.lake.store.changing_note import set_back
from tailrace.lake.store.checkpoint_file import read_held, require_seen
from tailrace.lake.store.commit_log import CommitLog, Head
from tailrace.lake.store.identity import read_identity
from tailrace.lake.store.lake_root import NOWHERE, LakeRoot, rooted, sha256_of, size_of
from tailrace.lake.store.layout import is_in_period, is_lake_file
from tailrace.lake.store.manifest import Erasure, FileEntry, Gap, LakeChange
from tailrace.lake.store.part_writer import TOKEN, count_equal, footer_equal_tokens, footer_range, parquet_file
from tailrace.lake.store.quarantine_index import index_fault, uncounted

_PROBLEMS_MAX = 100
_READ_ROWS = 65_536


@dataclass(slots=True)
class LakeReport:
    """``problems`` are sentences, at most 100; the lake is sound if there are none. ``rows`` were read, in ``files``
    files of ``days`` days, from ``first_token`` to ``last_token``.

    ``gaps`` were accepted, ``erasures`` and ``changes`` were asked for; they are not problems. ``replaced`` files are
    kept for readers until the retention has passed; ``quarantined`` events were put aside; ``leftovers`` belong to no
    commit (a micro-batch that is running or was interrupted). ``full``: every byte was read.
    """

    files: int = 0
    rows: int = 0
    days: int = 0
    first_token: str | None = None
    last_token: str | None = None
    gaps: tuple[Gap, ...] = ()
    erasures: tuple[Erasure, ...] = ()
    changes: tuple[LakeChange, ...] = ()
    replaced: int = 0
    leftovers: int = 0
    quarantined: int = 0
    full: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems

    def add(self, problem: str) -> None:
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(problem)


def verify(path: LakeRoot | str, *, full: bool = False, checkpoint: Path | None = None) -> LakeReport:
    """Check the lake at ``path``: the log's chain of commits, files against the log, footers and rows against both, the
    order of every token (so that a doubled event is found too: of equal tokens, which two shards may give, each file's
    footer has the number), each file's day. Reads the tokens of every row, their
    pages' checksums too. ``full`` reads every byte and compares it with the hash in the log, and the files that
    ``deltalake`` finds with ours. If the checkpoint of a stream into this lake lies at ``checkpoint``, or next to the
    lake, the lake is compared with what the checkpoint has seen of it. Writes nothing: a read-only copy can be checked.

    Raises UsageError if ``path`` is not a lake, SinkError if its log is damaged or has a hole.
    """
    root = rooted(path)
    known = read_identity(root)
    if known is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    log = CommitLog(root)
    report = LakeReport(full=full)
    with log.reading() as head:
        for problem in (*log.problems(), *log_checkpoint.problems(log.layout)):
            report.add(problem)
        where = checkpoint or (None if log.layout.local == NOWHERE else log.layout.default_checkpoint)
        if where is not None:
            _compare_with_checkpoint(log, head, where, str(known["id"]), report)
        # On another machine than the writer's, no lock of a lake in a store keeps that one out.
        state = log.state(head.number if isinstance(root, ObjectPlace) and head.number >= 0 else None)
        present = set(log.layout.files_present())
        # Under the lock, since a compaction or an erasure may replace these files.
        if set_back(known, state) and set_back(read_identity(root) or known, state):  # and was not changed just now
            report.add(f"{log.layout.identity} is older than the lake's log, which has been changed since")
        newest = log.newest_batch(head)
        _check_quarantine(quarantine.files_of(log.layout, newest), report)
        if isinstance(root, Path) and (found := quarantine.directory_fault(log.layout, lambda: newest, log.commits)):
            report.add(found[0])
        if isinstance(root, ObjectPlace):
            report.leftovers += len(uncounted(log.layout, newest))
            if (fault := index_fault(log.layout, newest, log.checked())) is not None:
                report.add(fault)
    live = state.in_order
    report.gaps = state.gaps
    report.days = len({file.day for file in live})
    for name in sorted(present - set(state.files)):
        if not is_lake_file(name):
            report.add(f"{name} is not in the log, and is not a name that lakes use")
        elif name in state.removed:
            report.replaced += 1
        else:
            report.leftovers += 1
    lanes: dict[tuple[bool, str | None], str] = {}
    for file in live:
        if file.name not in present:
            report.add(f"{file.name} is in the log and missing in the directory")
            continue
        _check_file(root, file, report, lanes)
    report.erasures, report.changes = state.erasures, state.changes
    if head.last_token is not None and report.last_token != head.last_token and report.sound:
        erased = state.erasures and (report.last_token is None or report.last_token < head.last_token)
        if not erased:
            report.add(f"the last event is {report.last_token}, and the log says {head.last_token}")
    if state.number < 0 and present:
        report.add(f"{log.layout.log} is empty, and the lake holds files: its log is gone")
    if full and state.number >= 0:  # else the making of the lake was cut off: its next start goes on with it
        _compare_with_delta(root, state.number, set(state.files), report)
    return report


def _compare_with_checkpoint(log: CommitLog, head: Head, checkpoint: Path, lake_id: str, report: LakeReport) -> None:
    """A lake that was set back is a sound lake on its own: only its checkpoint knows that there was more."""
    try:
        held = read_held(checkpoint)
        if held is not None and held.get("lake") == lake_id:
            require_seen(log, head, checkpoint, held)
    except SinkError as error:
        report.add(error.message)


def _check_quarantine(paths: Sequence[LakeRoot], report: LakeReport) -> None:
    try:
        report.quarantined = quarantine.rows_in(paths)
        report.last_token = quarantine.last_token(paths)  # it may be the last one that the log knows of
    except (OSError, pa.ArrowException, SinkError) as error:
        report.add(f"the quarantine cannot be read: {error.message if isinstance(error, SinkError) else error}")


def _compare_with_delta(root: LakeRoot, version: int, names: set[str], report: LakeReport) -> None:
    from deltalake.exceptions import DeltaError  # noqa: PLC0415  half a second, and only here

    from tailrace.lake.store.places import delta_table  # noqa: PLC0415  the same

    try:
        uris = delta_table(root, version).file_uris()
        found = {uri.removeprefix("file://").removeprefix(f"{root.absolute()}/") for uri in uris}
    except (OSError, DeltaError) as error:
        why = reason(error) if isinstance(root, ObjectPlace) else error
        report.add(f"deltalake cannot read version {version}: {why}")
        return
    if found != names:
        report.add(f"deltalake finds {len(found)} files in version {version}, and the log names {len(names)}")


def _check_file(
    root: LakeRoot, entry: FileEntry, report: LakeReport, lanes: dict[tuple[bool, str | None], str]
) -> None:
    """``lanes`` holds the last token of each lane so far."""
    report.files += 1
    path = root / entry.name
    try:
        if (size := size_of(path)) != entry.size:
            report.add(f"{entry.name} has {size} bytes, and the log says {entry.size}")
        elif report.full and sha256_of(path) != entry.sha256:
            report.add(f"{entry.name} is not what was written: its SHA-256 differs from the log's")
        with parquet_file(path, entry.size) as file:
            if footer_range(file.metadata.metadata) != (entry.first_token, entry.last_token):
                report.add(f"{entry.name}: its footer and the log name different tokens")
            rows = equal = 0
            for tokens in _tokens(file):
                before = lanes.get(entry.lane, "")
                lanes[entry.lane] = _check_tokens(entry, tokens, report, before, begins=rows == 0)
                equal += count_equal(tokens, before if rows else "")
                rows += len(tokens)
            if equal != footer_equal_tokens(file.metadata.metadata):
                says = footer_equal_tokens(file.metadata.metadata)
                report.add(f"{entry.name}: {equal} of its tokens are repeated, but its footer says {says}")
    except (OSError, pa.ArrowException) as error:
        report.add(f"{entry.name} cannot be read: {error}")
        return
    report.rows += rows
    if rows != entry.rows:
        report.add(f"{entry.name} has {rows} rows, and the log says {entry.rows}")
    last = lanes.get(entry.lane)
    if last != entry.last_token:
        report.add(f"{entry.name} ends with token {last}, and the log says {entry.last_token}")


def _tokens(file: pq.ParquetFile) -> Iterator[pa.Array]:
    for batch in file.iter_batches(batch_size=_READ_ROWS, columns=[TOKEN]):
        if batch.num_rows:
            yield batch.column(0)


def _check_tokens(entry: FileEntry, tokens: pa.Array, report: LakeReport, before: str, *, begins: bool) -> str:
    """``begins``: these are the first of the file. Of two neighbours with one token, which two shards may give, both
    are in one file."""
    first, last = str(tokens[0]), str(tokens[-1])
    if first < before or (begins and first == before):
        report.add(f"{entry.name}: token {first} does not follow {before}")
    if pc.all(pc.less_equal(tokens.slice(0, len(tokens) - 1), tokens.slice(1))).as_py() is False:
        report.add(f"{entry.name}: its tokens do not ascend")
    for token in (first, last):
        if not is_in_period(entry.name, token):
            report.add(f"{entry.name}: token {token} is of another day or hour")
    report.first_token = min(report.first_token or first, first)
    report.last_token = max(report.last_token or last, last)
    return last
