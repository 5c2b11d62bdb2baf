"""Take documents that are gone out of what tables keep of the past: older versions, the change feed, the quarantine and
the state's file.

A table equals its collection, so a document that is still in it is refused: delete it at the source, and the table
follows. Everything else that is kept is not needed for the newest version, and is removed file by file: each data file
and each file of the feed that holds one of the documents. ``as of`` passes over a version that lacks a file, and a feed
that lacks one is an error to its readers, as with versions that have grown old. Everything here can be repeated: what a
crash has left is found by the next run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, reason
from tailrace.core.event.named_document import NamedDocuments, StoreErasure
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import delta, places
from tailrace.lake.store.mirrored import ICEBERG
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit, live_files, log_chain
from tailrace.lake.tables.data_files import opened
from tailrace.lake.tables.deletion_vector import NONE, RowNumbers
from tailrace.lake.tables.delta_commit import Actions, Batch, TableFile
from tailrace.lake.tables.delta_table import BESIDE, CollectionTable
from tailrace.lake.tables.holding import lock, state_folder
from tailrace.lake.tables.live_files import gone_of
from tailrace.lake.tables.merging import purge
from tailrace.lake.tables.names import KEY, place_of
from tailrace.lake.tables.ownership import TablesOwnership
from tailrace.lake.tables.quarantine import FOLDER as QUARANTINE
from tailrace.lake.tables.standing import note
from tailrace.lake.tables.state import TableMark, TableState
from tailrace.lake.tables.state_file import rewrite_file

_FOLLOW: Final = "Let the writer follow (`tailrace tables write ... --once`, or `tailrace run`), then repeat"
_RESTORE: Final = "Restore it from a copy, or remove the quarantine"


def erase_documents(root: TablePlace, documents: NamedDocuments, *, dry_run: bool = False) -> StoreErasure:
    """Erase what the tables in ``root`` keep of ``documents``. ``dry_run`` counts, and changes nothing. Of tables in an
    object store, the place knows the folder of their state (``object_place``).

    Raises UsageError where there are no tables, and where one of the documents is still in its table, SinkError where a
    writer runs or something is damaged. Nothing has changed then, unless the error comes from the disk or the store."""
    held = state_folder(root)
    if not (held.is_dir() if isinstance(root, Path) else (held / "lock").exists()):
        raise UsageError(f"{root} holds no tables of Tailrace" + _without_state(root))
    with _held(root, claim=not dry_run):
        report, works = StoreErasure("tables", str(root)), []
        marks = _checked(root, documents)
        for namespace in documents.namespaces:
            work = _TablePast(root, namespace, documents.keys(namespace), marks.get(namespace))
            works.append(work)
            for what, number in work.rows.items():
                report.count(what, number)
        aside = _InQuarantine(root / QUARANTINE, documents)
        report.count("rows of the quarantine", aside.rows)
        if dry_run:
            return report
        for work in works:
            work.carry_out()
        aside.carry_out()
        # Whatever was found: pages that LMDB has given up still hold what was on them.
        rewrite_file(state_folder(root) / "state")
        report.erased = report.total
        report.kept += [note for work in works for note in work.notes]
    return report


def _without_state(root: TablePlace) -> str:
    return f", or {state_folder(root)} is not the folder of their state" if isinstance(root, ObjectPlace) else ""


@contextmanager
def _held(root: TablePlace, *, claim: bool) -> Iterator[None]:
    """Keep writers out: by the lock of the state, and in an object store by the session that its owner's object has."""
    descriptor = lock(root)
    try:
        if claim and isinstance(root, ObjectPlace):
            state = TableState(state_folder(root) / "state")
            try:
                TablesOwnership(root, state, "")
            finally:
                state.close()
        yield
    finally:
        os.close(descriptor)


def _remove(root: TablePlace, name: str) -> None:
    """Delete a file or object below ``root``."""
    place = root / name
    if not isinstance(place, Path):
        place.unlink(missing_ok=True)
        return
    with durable.writing(place):
        place.unlink(missing_ok=True)
        durable.sync_directory(place.parent)


def _checked(root: TablePlace, documents: NamedDocuments) -> dict[str, TableMark]:
    """What the tables took over last, if nothing but their past is known about the documents."""
    state = TableState(state_folder(root) / "state", readonly=True)
    try:
        if state.position() is None or state.copy_begun() is not None or state.copying() or state.resyncing():
            raise UsageError(f"a copy into the tables in {root} has not come to its end", hint=_FOLLOW)
        collections = state.collections()
        for document in documents.documents:
            for one in collections:
                if one.namespace == document.namespace and state.holds(one.number, document.key):
                    raise _still_there(root, document.namespace)
        return state.marks()
    finally:
        state.close()


def _still_there(root: TablePlace, namespace: str) -> UsageError:
    return UsageError(
        f"a document to erase is still in the table of {namespace} in {root}",
        hint=f"Delete it at the source: the table follows. {_FOLLOW}",
    )


@dataclass
class _TablePast:
    """What one table keeps of the past of documents with some keys."""

    root: TablePlace
    namespace: str
    keys: set[bytes]
    mark: TableMark | None = None
    rows: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _files: list[str] = field(default_factory=list)
    _folder: TablePlace = field(init=False)
    _live: dict[str, TableFile] = field(init=False, default_factory=dict)
    #: Files of the newest version in which only rows that are gone are of the documents.
    _worn: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._folder = place_of(self.root, self.namespace)
        if not delta.is_table(self._folder):
            return
        table = CollectionTable(self._folder, self.namespace)
        self._live = {file.name: file for file in table.files()}
        for name in sorted(file.name for file in places.files_below(self._folder)):
            self._look(name)

    def _look(self, name: str) -> None:
        """Look into a file, whether a version names it or not."""
        *above, last = name.split("/")
        if above[:1] in ([delta.LOG], [BESIDE]) or not last.endswith(".parquet"):
            return
        if last.startswith("."):
            self._files.append(name)  # of a writer that was killed: it has no footer
            return
        count = self._count(name)
        if not count:
            return
        if name in self._live:
            gone = gone_of(self._folder, self._live[name])
            if self._count(name, gone):
                raise _still_there(self.root, self.namespace)
            self._worn.append(name)
        what = "rows of the change feed" if above == [delta.FEED_FOLDER] else "rows of earlier versions"
        self.rows[what] = self.rows.get(what, 0) + count
        self._files.append(name)

    def _count(self, name: str, gone: RowNumbers = NONE) -> int:
        """How many rows of a file are of the documents, without those that are gone."""
        wanted = pa.array(sorted(self.keys), pa.binary())
        with opened(self._folder, name) as file:
            if KEY not in file.schema_arrow.names:
                raise SinkError(f"{self._folder / name} is not a file of this table", hint="Remove it, and repeat")
            first, count = 0, 0
            for one in file.iter_batches(65_536, columns=[KEY]):
                numbers = first + np.flatnonzero(pc.is_in(one.column(0), value_set=wanted))
                count += int(np.isin(numbers, gone, assume_unique=True, invert=True).sum())
                first += one.num_rows
            return count

    def carry_out(self) -> None:
        """Remove the files, and from the log the bounds of their columns. Files of the newest version are written anew
        first, without the rows that are gone."""
        if not delta.is_table(self._folder):
            return
        purge(CollectionTable(self._folder, self.namespace), self._worn)
        if self._may_be_in_log():
            self._shorten_log()
        self._remove_unfinished_checkpoint()
        for name in self._files:
            _remove(self._folder, name)
            durable.step("tables.erased")
        if self.rows:
            self.notes.append(
                f"{self.namespace}: the row is gone from the newest version; versions and feed before the files that "
                "were removed can no longer be read"
            )
        if self.rows and (self._folder / ICEBERG).is_dir():
            self.notes.append(
                f"{self.namespace}: nor can Iceberg snapshots of these versions, until the writer drops them"
            )

    def _remove_unfinished_checkpoint(self) -> None:
        beside = self._folder / BESIDE
        if isinstance(beside, Path):
            shutil.rmtree(beside, ignore_errors=True)
            return
        for name in [file.name for file in places.files_below(beside)]:
            _remove(beside, name)

    def _may_be_in_log(self) -> bool:
        """Whether bounds in the log may be values of the documents: it has some of a file that holds one of them, or of
        a file that is no longer there to be asked."""
        there = {file.name for file in places.files_below(self._folder)}
        return not _bounded_in(self._folder) <= there - set(self._files)

    def _shorten_log(self) -> None:
        """The bounds of columns are values of documents, and the log has them for each file: let it begin with the
        newest version. Raises SinkError if no checkpoint of it can be made."""
        table = CollectionTable(self._folder, self.namespace)
        known = -1 if self.mark is None else self.mark.version
        if 0 <= known < table.version:
            table = _stating_anew(table)
        table.make_checkpoint()
        if table.version and table.version not in delta.checkpoints_in(self._folder):
            raise SinkError(f"a checkpoint of the table {self._folder} cannot be written", hint="Make room, and repeat")
        if self.mark is not None and 0 <= known < table.version:
            self._know(note(self.mark, table))
            durable.step("tables.version_known")
        numbers, names = delta.listed(self._folder)
        for path in (delta.commit_path(self._folder, number) for number in numbers if number < table.version):
            path.unlink(missing_ok=True)
        older = [paths for number, paths in names.items() if number < table.version]
        for path in (path for paths in [*older, *delta.unfinished(self._folder).values()] for path in paths):
            path.unlink(missing_ok=True)
        if isinstance(self._folder, Path):
            durable.sync_directory(self._folder / delta.LOG)
        durable.step("tables.log_erased")

    def _know(self, mark: TableMark) -> None:
        """Let the state know of the version that the log begins with."""
        state = TableState(state_folder(self.root) / "state")
        try:
            with state.writing() as transaction:
                transaction.set_mark(mark)
        finally:
            state.close()


def _stating_anew(table: CollectionTable) -> CollectionTable:
    """The table with a version that states what our last one stated. Files were moved since, and the commit that the
    state knows may have bounds of the files before: of rows that are gone, if it is merged on read."""
    last, number = delta_commit.newest(table.root), table.version + 1
    if last is None:
        return table
    batch = Batch(last.batch, last.time, last.time, last.collection or None, last.state, last.witness)
    previous = log_chain.previous(table.root, number)
    app = f"tailrace/{table.namespace}"
    made = delta_commit.publish(table.root, number, app, batch, Actions("changes"), previous=previous)
    found = CollectionTable(table.root, table.namespace)
    found.committed = number, made
    return found


def _bounded_in(root: TablePlace) -> set[str]:
    """The names of the files whose columns have bounds in the log, of each version that it has. A log that cannot be
    read has them of a file that is not there."""
    numbers, checkpoints = delta.listed(root)
    if delta.unfinished(root):
        return {""}
    try:
        actions = [one for number in numbers for one in delta_commit.actions_of(root, number)]
        for path in (path for paths in checkpoints.values() for path in paths):
            actions += live_files.in_checkpoint(path)
        files = [live_files.file_of(one["add"]) for one in actions if "add" in one]
    except (SinkError, OSError, KeyError, TypeError, ValueError, pa.ArrowException):
        return {""}
    return {file.name for file in files if "minValues" in json.loads(file.stats or "{}")}


class _InQuarantine:
    """Rows of the quarantine that are of some documents: the others are written again, and every file that no longer
    counts goes. ``rows``: how many, of the newest version and of older files."""

    def __init__(self, root: TablePlace, documents: NamedDocuments) -> None:
        self._root = root
        self._documents = documents
        self._left: pa.Table | None = None
        self._files: list[str] = []
        self.rows = 0
        try:
            table = places.delta_table(root)
        except TableNotFoundError:
            return
        except (DeltaError, OSError, ValueError) as error:
            raise SinkError(
                f"the quarantine {root} cannot be read: {error}", hint="Restore it, or remove it"
            ) from error
        live = set(pa.table(table.get_add_actions()).column("path").to_pylist())
        pieces, gone = [], 0
        for name in sorted(file.name for file in places.files_below(root) if file.name.endswith(".parquet")):
            if f"/{name}".rpartition("/")[0].endswith(delta.LOG):
                continue
            read, is_one = self._read(root / name)
            found = is_one.count(True)
            self.rows += found
            if name in live:
                gone += found
                pieces.append(read.filter(pa.array([not one for one in is_one], pa.bool_())))
            if found:
                self._files.append(name)
        if gone:
            self._left = pa.concat_tables(pieces)

    def _read(self, path: TablePlace) -> tuple[pa.Table, list[bool]]:
        try:
            with places.parquet_file(path) as file:
                read = file.read()
            columns = [read.column(name).to_pylist() for name in ("namespace", KEY)]
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise SinkError(f"{path} cannot be read: {error}", hint=_RESTORE) from error
        return read, [key in self._documents.keys(name) for name, key in zip(*columns, strict=True)]

    def carry_out(self) -> None:
        """Write the other rows, and remove the files."""
        if self._left is not None:
            try:
                write_deltalake(
                    self._root.absolute().as_uri(),
                    self._left,
                    mode="overwrite",
                    storage_options=places.options_of(self._root),
                )
            except (DeltaError, OSError) as error:
                raise SinkError(f"the quarantine {self._root} cannot be written: {reason(error)}") from error
            durable.step("tables.quarantine_written")
        for name in self._files:
            _remove(self._root, name)
            durable.step("tables.quarantine_erased")
