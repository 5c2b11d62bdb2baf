"""The events of a lake's stream that could not be written as rows, with the reason, in ``_quarantine``.

A task writes them to a file in ``_staging``. The commit of the micro-batch names that file, and what the commit names
counts: after the commit the file is moved to ``_quarantine``. If a crash comes in between, the next program that
commits to the lake or opens it moves the file; a file that no commit names is removed with the other leftovers. So an
event is in quarantine exactly once, from the commit on that adds the events around it. Compaction merges the files. It
first writes a note of what it will move; if a crash comes in between, the next program finishes that.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError
from tailrace.lake.store.lake_root import LakeRoot, sha256_of
from tailrace.lake.store.layout import QUARANTINE, LakeLayout, checked_quarantine_name, cluster_time_of, is_quarantine
from tailrace.lake.store.manifest import Commit, StagedFile
from tailrace.lake.store.quarantine_index import add_commit, replace_files, stored_files
from tailrace.lake.store.quarantine_ledger import QuarantineLedger, begin_ledger, ledger_fault, note_replaced

#: What may be done with an event that cannot be written: end the stream, or put the event aside.
ON_ERRORS: Final = ("fail", "quarantine")

#: The key of the rows' digest in a file's footer.
_DIGEST: Final = b"tailrace.sha256"
_DIGEST_ROWS: Final = 1024
_RESTORE: Final = "Restore it from a copy, or remove it"
#: The beginning of the name of a file that waits for its commit.
_WAITING: Final = "quarantine-"
#: The note of a merge, next to the lake's other state, and the name of a merged file that waits for the note.
_MERGE: Final = "quarantine.json"
STAGED_MERGE: Final = re.compile(r"merge-quarantine-[0-9a-f]{32}")

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.core.event.quarantined import QuarantinedEvent

T = TypeVar("T")


def divided(files: Sequence[StagedFile]) -> tuple[tuple[StagedFile, ...], tuple[StagedFile, ...]]:
    """The files of rows, and those of events that were put aside."""
    rows = tuple(file for file in files if not is_quarantine(file.name))
    return rows, tuple(file for file in files if is_quarantine(file.name))


def schema() -> pa.Schema:
    """As the quarantine of tables has it, with the event in place of the document."""
    import pyarrow as pa  # noqa: PLC0415  --help and the planner have no use for it

    return pa.schema(
        [
            pa.field("namespace", pa.string()),
            pa.field("reason", pa.string()),
            pa.field("code", pa.int32()),
            pa.field("cluster_time", pa.struct([("t", pa.int64()), ("i", pa.int64())])),
            pa.field("token", pa.string()),
            pa.field("event", pa.binary()),
            pa.field("noticed", pa.timestamp("us", tz="UTC")),
        ]
    )


def stage(root: LakeRoot, events: Sequence[QuarantinedEvent], *, one_token: int = 1) -> StagedFile:
    """Write events to a file, in the order of the stream, that a commit may name. ``one_token`` is how many events may
    have one token: the number of shards that they come from. Raises LakeFullError and StoreAwayError."""
    import pyarrow as pa  # noqa: PLC0415

    now = time.time_ns() // 1000
    equal = groupby(sorted(events, key=_token_of), key=_token_of)
    ordered = [one for _, same in equal for one in islice(same, one_token)]
    rows = [
        {
            "namespace": one.namespace,
            "reason": one.reason,
            "code": one.code,
            "cluster_time": {"t": one.cluster_time.seconds, "i": one.cluster_time.increment},
            "token": one.token,
            "event": one.event,
            "noticed": now,
        }
        for one in ordered
    ]
    first, last = ordered[0].token, ordered[-1].token
    name = f"{QUARANTINE}/{cluster_time_of(first):016X}-{uuid.uuid4().hex}.parquet"
    place = waiting(LakeLayout(root), name)
    path = LakeLayout(root).staging / f"{_WAITING}{place.name}" if isinstance(place, ObjectPlace) else place
    with durable.writing(path):
        try:
            if isinstance(place, ObjectPlace):
                durable.make_private(path.parent)
            write_rows(pa.Table.from_pylist(rows, schema()), path)
            staged = StagedFile(name, len(rows), path.stat().st_size, sha256_of(path), first, last)
            if isinstance(place, ObjectPlace):
                move_up(path, place)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return staged


def name_after(path: LakeRoot) -> str:
    """A new name for what takes the place of a file; it sorts where that did."""
    return f"{path.name.partition('-')[0]}-{uuid.uuid4().hex}.parquet"


def move_up(path: Path, place: ObjectPlace) -> None:
    """Upload a file that was written for it, and remove it here."""
    try:
        place.upload(path)
    finally:
        path.unlink(missing_ok=True)


def _token_of(event: QuarantinedEvent) -> str:
    return event.token


class RowsDigest:
    """The SHA-256 of what a file's rows hold, one table after the other. No log knows the quarantine's files, so each
    carries its own, in its footer."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, table: pa.Table) -> RowsDigest:
        import pyarrow as pa  # noqa: PLC0415

        for batch in table.to_batches(_DIGEST_ROWS):
            columns = [one.cast(pa.int64()) if pa.types.is_timestamp(one.type) else one for one in batch.columns]
            for row in zip(*(one.to_pylist() for one in columns), strict=True):
                self._sha256.update(repr(row).encode("utf-8", "surrogatepass"))
        return self

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """For the file's footer."""
        return {_DIGEST: self._sha256.hexdigest().encode()}


def write_rows(table: pa.Table, path: Path) -> None:
    """Write a file of rows with their digest, and sync it. Raises OSError and ArrowException."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    table = table.replace_schema_metadata(RowsDigest().add(table).metadata)
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)
    durable.sync_file(path)


def read_checked(path: LakeRoot) -> pa.Table:
    """The rows of a file. Raises FileNotFoundError, and SinkError where it is damaged or was changed."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(_source(path), page_checksum_verification=True) as file:
            known = (file.metadata.metadata or {}).get(_DIGEST)
            table: pa.Table = file.read()
        if known is not None and RowsDigest().add(table).metadata[_DIGEST] != known:
            raise SinkError(f"{path} is damaged: it was changed after it was written", hint=_RESTORE)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise SinkError(f"{path} cannot be read: {error}", hint=_RESTORE) from error
    return table


def _source(path: LakeRoot) -> Any:
    """What Arrow reads: an object as a whole, since these are small."""
    import pyarrow as pa  # noqa: PLC0415

    return path if isinstance(path, Path) else pa.BufferReader(path.read_bytes())


def waiting(layout: LakeLayout, name: str) -> LakeRoot:
    """Where a file lies until its commit has been made. In a store it lies at its place from the beginning
    (``quarantine_index.py``)."""
    if isinstance(layout.root, ObjectPlace):
        return layout.root / name
    return layout.staging / f"{_WAITING}{name.removeprefix(f'{QUARANTINE}/')}"


def check_waiting(layout: LakeLayout, files: Sequence[StagedFile], number: int) -> None:
    """Each file that the commit after ``number`` is to name waits for it. In a directory the ledger begins with it."""
    if files and isinstance(layout.root, Path):
        begin_ledger(layout, number, names_in(layout, None))
    for file in files:
        if not waiting(layout, file.name).exists():
            raise SinkError(f"{waiting(layout, file.name)} is gone before it could be committed")


def settle(layout: LakeLayout, commit: Commit | None) -> None:
    """Move the files that ``commit`` names to their place, if they are not there yet, and finish a merge that a crash
    has interrupted. The caller holds the lock. In a store the index names them."""
    if isinstance(layout.root, ObjectPlace):
        add_commit(layout, commit)
        return
    finish_merge(layout)
    names = [] if commit is None else [name for name in commit.quarantined if waiting(layout, name).exists()]
    if not names:
        return
    folder = layout.root / QUARANTINE
    with durable.writing(folder):
        durable.make_directory(folder)
        durable.sync_directory(layout.root)
        for name in names:
            os.rename(str(waiting(layout, name)), layout.root / name)
        durable.sync_directory(folder)
    durable.step("commit.quarantine")


@dataclass(frozen=True, slots=True)
class QuarantineMerge:
    """A merge of files of the quarantine, noted before anything is moved: the file ``staged`` in ``_staging``, which is
    whole and on the device, takes the place of those in ``replaces`` under ``name``."""

    name: str
    staged: str
    replaces: tuple[str, ...]

    def staged_at(self, layout: LakeLayout) -> Path:
        return layout.staging / self.staged

    def note(self, layout: LakeLayout) -> None:
        """Write the note: from here on the replaced files no longer count."""
        known = {"name": self.name, "staged": self.staged, "replaces": list(self.replaces)}
        durable.write_sealed(layout.local / _MERGE, known)
        durable.step("quarantine.noted")

    @classmethod
    def noted(cls, layout: LakeLayout) -> QuarantineMerge | None:
        """The merge that is under way or was interrupted. Every name is checked before it becomes a path."""
        path = layout.local / _MERGE
        known = durable.read_sealed(path)
        if known is None:
            return None
        name, staged, replaces = known.get("name"), known.get("staged"), known.get("replaces")
        if not isinstance(replaces, list) or not isinstance(staged, str) or not STAGED_MERGE.fullmatch(staged):
            raise SinkError(f"{path} is damaged: it does not name the files of a merge")
        for one in (name, *replaces):
            checked_quarantine_name(f"{QUARANTINE}/{one}", path)
        return cls(str(name), staged, tuple(replaces))


def finish_merge(layout: LakeLayout) -> None:
    """Finish the merge that is noted, if there is one. This needs no room on the disk. The caller holds the lock."""
    merge = QuarantineMerge.noted(layout)
    if merge is None:
        return
    assert isinstance(layout.root, Path)
    folder, staged = layout.root / QUARANTINE, merge.staged_at(layout)
    place = folder / merge.name
    with durable.writing(place):
        if staged.exists():
            os.replace(staged, place)
            durable.sync_directory(folder)
        elif not place.exists():
            raise SinkError(f"{staged} is missing: it was to replace files in {folder}")
        durable.step("quarantine.placed")
        for name in merge.replaces:
            (folder / name).unlink(missing_ok=True)
        durable.sync_directory(folder)
        durable.step("quarantine.replaced")
        (layout.local / _MERGE).unlink(missing_ok=True)
        durable.sync_directory(layout.local)


def files_of(layout: LakeLayout, newest: Commit | None) -> list[LakeRoot]:
    """The files of the quarantine, those of the newest micro-batch included that still wait. Takes no lock."""
    if isinstance(layout.root, ObjectPlace):
        return [*stored_files(layout, newest)]
    return [path for _, path in sorted(_by_name(layout, newest).items())]


def directory_fault(
    layout: LakeLayout, newest: Callable[[], Commit | None], commits: Callable[[int], Iterable[Commit]]
) -> tuple[str, str] | None:
    """What is wrong with the files of a quarantine in a directory, with a hint: one is missing or not the lake's."""
    return ledger_fault(layout, lambda: names_in(layout, newest()), commits)


def names_in(layout: LakeLayout, newest: Commit | None) -> set[str]:
    """The names of the files of a quarantine in a directory, including those of the newest micro-batch that still
    wait."""
    return {f"{QUARANTINE}/{name}" for name in _by_name(layout, newest)}


def _by_name(layout: LakeLayout, newest: Commit | None) -> dict[str, LakeRoot]:
    """The files of a quarantine in a directory, by the names that they have in ``_quarantine``."""
    assert isinstance(layout.root, Path)
    folder = layout.root / QUARANTINE
    found: dict[str, LakeRoot] = {path.name: path for path in folder.glob("*.parquet")} if folder.is_dir() else {}
    for name in newest.quarantined if newest is not None else ():
        for path in (waiting(layout, name), layout.root / name):  # it may be moved between the two looks
            if path.exists():
                found.setdefault(Path(name).name, path)
                break
    merge = QuarantineMerge.noted(layout)
    if merge is not None:
        for name in merge.replaces:
            found.pop(name, None)
        found[merge.name] = merge.staged_at(layout) if merge.staged_at(layout).exists() else folder / merge.name
    return found


def rows_in(paths: Sequence[LakeRoot]) -> int:
    """How many events are in these files. Raises SinkError where one of them is none of the quarantine's."""
    return sum(_read(path, _rows_of) for path in paths)


def _rows_of(path: LakeRoot) -> int:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        found = pq.read_metadata(_source(path))
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise SinkError(f"{path} cannot be read: {error}", hint=_RESTORE) from error
    if not {"reason", "token", "event"} <= {*found.schema.names}:
        raise SinkError(f"{path} is not a file of events that were put aside", hint="Move it out of the directory")
    return int(found.num_rows)


def events_in(paths: Sequence[LakeRoot]) -> Iterator[bytes]:
    """The events in these files."""
    for path in paths:
        yield from _read(path, read_checked).column("event").to_pylist()


def last_token(paths: Sequence[LakeRoot]) -> str | None:
    """The greatest token in these files, which are checked."""

    def last_of(path: LakeRoot) -> str:
        return str(read_checked(path).column("token")[-1].as_py())

    return max((_read(path, last_of) for path in paths), default=None)


def _read(path: LakeRoot, read: Callable[[LakeRoot], T]) -> T:
    """What ``read`` gives for a file, which may be moved to its place meanwhile."""
    try:
        return read(path)
    except FileNotFoundError:
        if isinstance(path, ObjectPlace):
            raise
        return read(path.parent.parent / QUARANTINE / path.name.removeprefix(_WAITING))


class QuarantineRemoval:
    """Rows to take out of the quarantine. What stays of each file is written next to it first, since that needs room;
    ``carry_out`` only renames and removes, or exchanges the index. The caller holds the lock. Raises LakeFullError.

    ``rows`` are to go, of ``searched`` that were read.
    """

    def __init__(self, layout: LakeLayout, paths: Sequence[LakeRoot], goes: Callable[[dict[str, Any]], bool]) -> None:
        self.rows = self.searched = 0
        self._layout = layout
        self._changes: list[tuple[LakeRoot, LakeRoot | None]] = []
        #: The ledger as it was, until a file may have gone.
        self._ledger: QuarantineLedger | None = None
        try:
            for path in paths:
                self._prepare(layout, path, goes)
            if isinstance(layout.root, Path):  # before the lake's commit: it needs room
                gone = {f"{QUARANTINE}/{path.name}": None for path, beside in self._changes if beside is None}
                self._ledger = note_replaced(layout, gone) if gone else None
        except BaseException:
            self.discard()
            raise

    def _prepare(self, layout: LakeLayout, path: LakeRoot, goes: Callable[[dict[str, Any]], bool]) -> None:
        import pyarrow as pa  # noqa: PLC0415

        table = read_checked(path)
        left = [not goes(row) for row in table.to_pylist()]
        self.searched += len(left)
        if all(left):
            return
        self.rows += left.count(False)
        if not any(left):
            self._changes.append((path, None))
            return
        beside = layout.staging / f"{_WAITING}{uuid.uuid4().hex}"
        place = path.parent / name_after(path) if isinstance(path, ObjectPlace) else beside
        self._changes.append((path, place))
        with durable.writing(beside):
            write_rows(table.filter(pa.array(left)), beside)
        if isinstance(place, ObjectPlace):
            move_up(beside, place)

    def carry_out(self) -> None:
        """Replace each file with what stays of it, one after another. If this fails, the remaining files are as they
        were, and their rows can be taken out by another try. In a store all are replaced at once, and then removed."""
        if isinstance(self._layout.root, ObjectPlace):
            self._exchange()
            return
        self._ledger = None
        try:
            for path, beside in self._changes:
                assert isinstance(path, Path)
                with durable.writing(path):
                    if beside is None:
                        path.unlink()
                    else:
                        os.replace(str(beside), path)
                    durable.sync_directory(path.parent)
                durable.step("quarantine.removed")
        except BaseException:
            self.discard()
            raise

    def _exchange(self) -> None:
        """If this fails, what was uploaded stays: a request may still be done. The next start removes it."""
        replaced = {
            f"{QUARANTINE}/{path.name}": None if other is None else f"{QUARANTINE}/{other.name}"
            for path, other in self._changes
        }
        replace_files(self._layout, replaced)

    def discard(self) -> None:
        """Remove what was written next to the files, and what the ledger says of them."""
        for _, beside in self._changes:
            if beside is not None:
                beside.unlink(missing_ok=True)
        if self._ledger is not None:
            with suppress(OSError, SinkError):  # no room: it then excuses files that have not gone
                self._ledger.write(self._layout)
            self._ledger = None
