"""Tables that follow their collections: copy, then micro-batch after micro-batch.

Each micro-batch has two parts. First the state: windows of the oplogs are folded into the documents, and position,
documents and the list of changed rows become durable in one step. Then the tables: each takes over its rows in one
Delta commit, with the micro-batch as its application transaction. After a crash between two tables, or between a table
and the note that it is done, the next start finishes the rest: each table's log says whether it has the micro-batch.

While there is more to read at once, the second part is left out for some time: the rows stay in the list, and the
tables take them over together with those of the next micro-batches.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pymongo import MongoClient

from tailrace import durable
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.oplog.cluster_time import ZERO, ClusterTime
from tailrace.source.connection import open_client
from tailrace.source.topology import Cluster
from tailrace.tables.collector import without_collecting
from tailrace.tables.copying import TablesCopy, key_of
from tailrace.tables.delta_commit import Batch
from tailrace.tables.delta_table import CollectionTable, tables_in
from tailrace.tables.fold import Fold, Folded
from tailrace.tables.names import folder_of
from tailrace.tables.oplogs import Oplogs, OplogWindow
from tailrace.tables.quarantine import Quarantine
from tailrace.tables.rows import Misfitting, Rows, chunks, make_rows
from tailrace.tables.schema import DocumentMisfitError, TableSchema
from tailrace.tables.settings import TableRule, TableSettings
from tailrace.tables.state import (
    StateTransaction,
    StoredDocument,
    TabledCollection,
    TableMark,
    TablesPosition,
    TableState,
    taken_over,
)

STATE: Final = "_tailrace"
_POLL_S: Final = 0.1
#: A micro-batch ends after about so many bytes of entries.
_BATCH_BYTES: Final = 192 << 20
#: While there is more to read, the tables take over their rows after this many seconds.
_BEHIND_S: Final = 30.0
#: The number of no collection: a table has rows of one that the state does not know.
_UNKNOWN: Final = 0

_Waiting: TypeAlias = list[tuple[bytes, StoredDocument | None]]

_log = logging.getLogger("tailrace.tables")


@dataclass(frozen=True, slots=True)
class TablesProgress:
    """What a writer has done since it began. ``time``: all tables equal their collections at this cluster time;
    ``None`` while there is no such time."""

    batches: int
    changes: int
    copied: int
    time: ClusterTime | None


class TablesWriter:
    """Writes the tables of ``settings`` from the deployment at ``uri``. One process at a time; ``stop`` from any
    thread."""

    def __init__(self, uri: Any, settings: TableSettings, *, client: MongoClient[Any] | None = None) -> None:
        self._settings = settings
        self._selection = settings.selection
        self._stopped = threading.Event()
        self._client = client or open_client(uri)
        self._owned = client is None
        self._cluster = Cluster.discover(self._client, uri, {})
        self._lock = _lock(settings.root)
        self._state = TableState(settings.root / STATE / "state")
        self._quarantine = Quarantine(settings.root / "_quarantine")
        self._tables: dict[str, CollectionTable] = {}
        position = self._state.position()
        self._oplogs = Oplogs(self._client, self._cluster, {} if position is None else position.members, self._stopped)
        self._copy = TablesCopy(
            self._oplogs, self._state, per_second=settings.documents_per_second, stopped=self._stopped
        )
        self._batches = self._changes = 0
        #: Whether there is more to read at once.
        self._behind = False
        #: When the tables took over their rows last, and the micro-batch when it was seen to their small files.
        self._published = time.monotonic()
        self._tidied = 0 if position is None else position.batch

    # -- its life ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End after the micro-batch that is being written."""
        self._stopped.set()

    def close(self) -> None:
        """Close everything."""
        self._oplogs.close()
        self._state.close()
        os.close(self._lock)
        if self._cluster is not None:
            self._cluster.close()
        if self._owned:
            self._client.close()

    def __enter__(self) -> TablesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def progress(self) -> TablesProgress:
        """What the writer has done so far."""
        position = self._state.position()
        stated = None if position is None else position.stated or None
        return TablesProgress(self._batches, self._changes, self._copy.copied, stated)

    def run(self, on_progress: Callable[[TablesProgress], None] | None = None) -> None:
        """Follow the collections until ``stop``. Raises TailraceError."""
        self.begin()
        while not self._stopped.is_set():
            begun = time.monotonic()
            did = self.step()
            if did and on_progress is not None:
                on_progress(self.progress)
            pause = self._settings.every_s - (time.monotonic() - begun) if did else _POLL_S
            if not self._behind:
                self._stopped.wait(max(0.0, pause))

    def run_to_present(self, until: ClusterTime | None = None) -> ClusterTime:
        """Bring the tables up to now, or at least to ``until``. Returns the cluster time at which they equal their
        collections."""
        goal = until or self._copy.now()
        self.begin()
        while not self._stopped.is_set():
            position = self._position()
            if position.stated >= max(goal, position.hold):
                break
            self.step(at_once=True, at_least=max(goal, position.hold))
        return self._position().stated

    def begin(self) -> None:
        """Copy the collections, if that was not done yet, and finish what a crash has interrupted."""
        if self._state.position() is None:
            self._copy_all()
        self._forget_unselected()
        self._copy_newly_selected()
        self._note_redeclared()
        before = self._position().batch
        try:
            self._publish()
        except DocumentMisfitError:
            self.step(at_once=True)  # what comes next may be the change that mends the document
            if self._position().batch == before:
                raise

    def step(self, *, at_once: bool = False, at_least: ClusterTime = ZERO) -> bool:
        """Run one micro-batch if there is anything for it. ``at_once``: even if nothing happened."""
        position = self._position()
        hold = position.hold if position.time < position.hold else ZERO
        window = self._oplogs.window(position.time, at_once=at_once, at_least=max(at_least, hold))
        if window is None:
            if self._behind and not self._stopped.is_set():
                self._behind = False
                self._publish()
            return False
        with without_collecting():
            folded, changed, is_last = self._fold(position, window)
            del window  # before anything looks for garbage in it
        durable.step("tables.state")
        self._batches += 1
        self._changes += folded.changes
        self._behind = not is_last
        waits = self._behind and position.stated and not self._stopped.is_set()
        if not waits or time.monotonic() - self._published >= _BEHIND_S:
            self._publish(position.time)
        return changed

    def _fold(self, position: TablesPosition, window: OplogWindow) -> tuple[Folded, bool, bool]:
        """Bring the state to the end of ``window``, and of those behind it that can be read at once, up to the size of
        a micro-batch. Returns also whether anything changed, and whether there is nothing more to read at once."""
        fold = Fold(self._selection, {bytes.fromhex(one.uuid): one for one in self._state.collections()})
        with self._state.writing() as state:
            window = self._read(fold, window, state)
            hold = self._copy_unknown(fold, state) or position.hold
            folded = fold.apply(state)
            for number, keys in folded.touched.items():
                state.wait(number, keys)
            known = {bytes.fromhex(one.uuid): one for one in self._state.collections()}
            for uuid, collection in fold.collections.items():
                if known.get(uuid) != collection:
                    state.set_collection(collection)
            until, members = window.until, self._oplogs.members
            state.set_position(TablesPosition(position.batch + 1, until, members, hold, position.stated))
        changed = bool(folded.touched or fold.dropped or fold.collections.keys() ^ known.keys())
        return folded, changed, window.is_last

    def _read(self, fold: Fold, window: OplogWindow, state: StateTransaction) -> OplogWindow:
        """Group the changes of ``window`` and of those behind it by document. Returns the last one."""
        size = 0
        while True:
            fold.read(window, state.next_number)
            size += window.size
            if window.is_last or size >= _BATCH_BYTES or self._stopped.is_set():
                return window
            following = self._oplogs.window(window.until)
            if following is None:
                return window
            window = following

    # -- copying ----------------------------------------------------------------------------------------------------

    def _copy_all(self) -> None:
        """Copy every selected collection into the state. The position is set at the end; until then, a copy
        that a crash interrupted is continued."""
        start = self._copy.begin()
        copied = self._copy.selected(self._selection)
        # Where the state was lost the tables are still there: they begin anew too, and those of what has gone end.
        held = tables_in(self._settings.root)
        batch = 1 + max(held.values(), default=-1)
        hold = self._copy.now()
        with self._state.writing() as state:
            _set_copied(state, copied, hold)
            for namespace in filter(self._selection.has, held):
                state.set_mark(TableMark(namespace, _UNKNOWN, -1, whole=True))
            state.set_selection(self._selection.patterns)
            state.set_position(TablesPosition(batch, start, self._oplogs.members, hold))
            state.end_copy()

    def _copy_newly_selected(self) -> None:
        """Collections that were there before a pattern was: their past is not in the oplog."""
        patterns = self._selection.patterns
        if self._state.selection() == patterns:
            self._copy.give_up()
            return
        copied = self._copy.selected(self._selection)
        with self._state.writing() as state:
            if copied:
                hold = self._copy.now()
                _set_copied(state, copied, hold)
                state.set_position(replace(self._position(), hold=hold))
            state.set_selection(patterns)

    def _copy_unknown(self, fold: Fold, state: StateTransaction) -> ClusterTime | None:
        """Copy collections that got a selected name with documents that the oplog did not show. Returns the time up to
        which changes may already be in the copies."""
        if not fold.unknown:
            return None
        made: list[tuple[bytes, TabledCollection]] = []
        for uuid, namespace in fold.unknown.items():
            collection = TabledCollection(uuid.hex(), state.next_number(), namespace)
            for documents in self._copy.documents(namespace, uuid):
                for document in documents:
                    state.put(collection.number, key_of(document), ZERO, document)
                self._copy.copied += len(documents)
            made.append((uuid, collection))
        hold = self._copy.now()
        for uuid, collection in made:
            fold.collections[uuid] = TabledCollection(
                collection.uuid, collection.number, collection.namespace, int(hold)
            )
        return hold

    # -- tables -----------------------------------------------------------------------------------------------------

    def _position(self) -> TablesPosition:
        position = self._state.position()
        if position is None:
            raise UsageError("nothing was copied yet", hint="Call begin() first")
        return position

    def _publish(self, after: ClusterTime | None = None) -> None:
        """Let each table take over its pending rows. Does nothing while a copy has not caught up."""
        position = self._position()
        if position.time < position.hold:
            return
        marks = self._state.marks()
        current = {one.namespace: one for one in self._state.collections()}
        done: list[TableMark] = []
        for namespace in sorted({*marks, *current}):
            mark = marks.get(namespace, TableMark(namespace, None, -1, whole=True))
            collection = current.get(namespace)
            since = position.stated if after is None else min(after, position.stated) if position.stated else after
            if mark.collection == _UNKNOWN or namespace not in marks:
                # Nobody has followed the table since its last version, which says nothing of the time behind its own.
                since = self._table(namespace).stated or since
            batch = Batch(position.batch, since or ZERO, position.time, None if collection is None else collection.uuid)
            if self._take_over(mark, collection, batch):
                number = None if collection is None else collection.number
                done.append(taken_over(TableMark(namespace, number, mark.batch, mark.whole), position.batch))
        with self._state.writing() as state:
            for mark in done:
                state.set_mark(mark)
            state.forget_waiting()
            state.set_position(position.now_stated())
        durable.step("tables.done")
        self._published = time.monotonic()
        self._daily_life(done, position.batch)

    def _take_over(self, mark: TableMark, collection: TabledCollection | None, batch: Batch) -> bool:
        """Bring one table up to ``batch``. Returns whether there was anything to do."""
        if collection is None:
            if mark.collection is None:
                return False
            table = self._table(mark.namespace)
            if table.batch < batch.number:
                table.look()
                table.write_whole(batch, table.schema(self._rule(mark.namespace).schema), (), "drop")
            return True
        table = self._table(mark.namespace)
        if mark.whole or mark.collection != collection.number or not table.exists:
            if table.batch < batch.number:
                table.look()
                self._write_whole(table, collection, batch)
            return True
        keys = self._state.waiting_keys(collection.number)
        if not keys:
            return False
        if table.batch < batch.number:
            table.refresh()
            self._change(table, collection, batch, keys)
        return True

    def _change(self, table: CollectionTable, collection: TabledCollection, batch: Batch, keys: list[bytes]) -> None:
        schema = table.schema(self._rule(collection.namespace).schema)
        rows = _Widening(schema, lambda misfits: self._quarantine.add(collection, batch, misfits), others=True)
        try:
            table.change(batch, rows, keys, rows.batches(self._state.waiting(collection.number)))
        except _RetypedError as error:
            _log.info("%s: a column becomes wider, all rows are rewritten", collection.namespace)
            self._write_whole(table, collection, batch, error.schema)

    def _write_whole(
        self, table: CollectionTable, collection: TabledCollection, batch: Batch, schema: TableSchema | None = None
    ) -> None:
        """Rewrite the table from the state, and again if a column had to become wider on the way."""
        given = schema or table.schema(self._rule(collection.namespace).schema)
        while True:
            rows = _Widening(given, lambda misfits: self._quarantine.add(collection, batch, misfits))
            try:
                table.write_whole(batch, rows, rows.batches(self._state.documents(collection.number)), "whole")
            except _RetypedError as error:
                given = error.schema
                continue
            return

    def _rule(self, namespace: str) -> TableRule:
        return self._settings.rule(namespace)

    def _table(self, namespace: str) -> CollectionTable:
        table = self._tables.get(namespace)
        if table is None:
            rule = self._rule(namespace)
            root = self._settings.root / folder_of(namespace)
            declared = rule.schema.declaration
            table = CollectionTable(
                root, namespace, partition_by=rule.partition_by, bounds=rule.z_order, declared=declared
            )
            self._tables[namespace] = table
        return table

    def _daily_life(self, marks: list[TableMark], batch: int) -> None:
        """Merge small files and remove old versions, every ``compact_every`` micro-batches."""
        every = self._settings.compact_every
        if not every or batch // every == self._tidied // every:
            return
        self._tidied = batch
        for mark in marks:
            table = self._table(mark.namespace)
            try:
                table.compact(target_bytes=self._settings.target_bytes, z_order=self._rule(mark.namespace).z_order)
                table.expire(self._settings.retention_h)
            except TailraceError as error:
                _log.warning("%s: %s", mark.namespace, error)  # retried next time

    def _note_redeclared(self) -> None:
        """Tables whose declared columns or partitions are others than before are written anew."""
        marks = [
            mark
            for mark in self._state.marks().values()
            if mark.collection is not None and self._selection.has(mark.namespace)
            if self._table(mark.namespace).redeclared and not mark.whole
        ]
        if marks:
            with self._state.writing() as state:
                for mark in marks:
                    state.set_mark(replace(mark, whole=True))
                state.set_position(self._position().next_batch())

    def _forget_unselected(self) -> None:
        """Stop following collections that have no rule any more. Their tables stay as they are."""
        gone = [one for one in self._state.collections() if not self._selection.has(one.namespace)]
        marks = [name for name in self._state.marks() if not self._selection.has(name)]
        if gone or marks:
            with self._state.writing() as state:
                for one in gone:
                    state.forget(one)
                for name in marks:
                    state.forget_mark(name)


@contextmanager
def held_tables(root: Path) -> Iterator[list[str]]:
    """The tables in ``root``, by namespace, held so that no other process writes them meanwhile."""
    descriptor = _lock(root)
    try:
        state = TableState(root / STATE / "state", readonly=True)
        try:
            found = sorted(state.marks())
        finally:
            state.close()
        yield found
    finally:
        os.close(descriptor)


def mark_for_rebuilding(root: Path, namespace: str) -> None:
    """Let the next writer rewrite a table from the state. Raises UsageError if there is no such table."""
    with held_tables(root) as namespaces:
        if namespace not in namespaces:
            raise UsageError(f"{namespace} has no table in {root}")
        state = TableState(root / STATE / "state")
        try:
            position, mark = state.position(), state.marks()[namespace]
            with state.writing() as transaction:
                transaction.set_mark(TableMark(namespace, mark.collection, mark.batch, whole=True))
                if position is not None:
                    transaction.set_position(position.next_batch())
        finally:
            state.close()


class _RetypedError(Exception):
    """A value did not fit its column, and by the policy the column becomes wider."""

    def __init__(self, schema: TableSchema) -> None:
        super().__init__()
        self.schema = schema


class _Widening:
    """A schema that grows while the rows of a table are made. ``quarantine`` is given the documents that do not fit
    before the table is committed: a crash in between leaves none of them in neither place. ``others``: the table has
    other rows, which keep their columns' types."""

    def __init__(
        self, schema: TableSchema, quarantine: Callable[[Sequence[Misfitting]], None], *, others: bool = False
    ) -> None:
        self.schema = schema
        self._quarantine = quarantine
        self._others = others

    @property
    def columns(self) -> Any:
        return self.schema.columns

    def batches(self, documents: Iterator[StoredDocument]) -> Iterator[pa.RecordBatch]:
        wrote = self._others
        misfits: list[Misfitting] = []
        for piece in chunks(documents):
            found: Rows = make_rows(self.schema, piece)
            if found.retyped and wrote:
                raise _RetypedError(found.schema)
            self.schema = found.schema
            misfits += found.misfits
            wrote = True
            yield found.batch
        self._quarantine(misfits)


def _set_copied(state: StateTransaction, collections: list[TabledCollection], until: ClusterTime) -> None:
    """The state has these collections now. Changes up to ``until`` may be in their documents already."""
    for collection in collections:
        state.set_collection(replace(collection, copied=int(until)))
        state.end_copying(collection.uuid)


def _lock(root: Path) -> int:
    """Lock the directory of the tables. Raises SinkError if another process holds it."""
    path = root / STATE / "lock"
    with durable.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SinkError(f"another process writes the tables in {root}", hint="Tables have one writer") from None
    return descriptor
