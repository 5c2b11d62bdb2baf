"""A window of oplog entries, folded by document: what each collection holds at the window's end.

Changes of one document are applied one after the other; what comes before an insert, a delete or a replacement does not
matter. Names are assigned to the collections' UUIDs, so the order in which the shards of a cluster report a drop or a
rename makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import numpy as np

from tailrace import raw_bson
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.entry import OplogEntry, first_elements
from tailrace.oplog.selection import Selection
from tailrace.tables.apply import DELETE, INSERT, LETTERS, UPDATE, Change, DocumentWork, StateMismatchError, apply_all
from tailrace.tables.names import sortable_key
from tailrace.tables.oplogs import EntryRun, OplogWindow
from tailrace.tables.state import TabledCollection

__all__ = ["Documents", "Fold", "Folded", "StateMismatchError"]

_COMMAND: Final = ord("c")
#: So many documents, or so many bytes of them, are in memory while their changes are applied.
_WORKS_MAX: Final = 16_384
_WORK_BYTES: Final = 64 << 20
#: What an element ``_id`` has before its value: its type and its name.
_ID_HEAD: Final = 5
_CRUD: Final = {"i": INSERT, "u": UPDATE, "d": DELETE}


class Documents(Protocol):
    """Documents by the number of their collection and their sortable key."""

    def get(self, number: int, key: bytes) -> bytes | None: ...

    def put(self, number: int, key: bytes, time: ClusterTime, document: bytes) -> None: ...

    def delete(self, number: int, key: bytes) -> None: ...

    def forget(self, collection: TabledCollection) -> None: ...


class Folded(NamedTuple):
    """The result of a window: changes in the selected collections, and the rows that each table has to take over."""

    changes: int
    touched: dict[int, list[bytes]]


class Fold:
    """Applies windows to the state.

    ``collections``  those that have tables now, by UUID (16 bytes)
    ``unknown``      those that got a selected name with documents that the oplog did not show; they have to be copied
    """

    def __init__(self, selection: Selection, collections: Mapping[bytes, TabledCollection]) -> None:
        self._selection = selection
        self.collections = dict(collections)
        self.unknown: dict[bytes, str] = {}
        self.dropped: list[TabledCollection] = []
        #: By UUID, then by the element ``_id`` of the document.
        self._changes: dict[bytes, dict[bytes, list[Change]]] = {}
        self._seen: dict[bytes, bytes] = {}
        self._gone: set[bytes] = set()
        self._wanted: dict[bytes, bool] = {}
        self._count = 0

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, window: OplogWindow, number: Callable[[], int]) -> None:
        """Group the window's entries by document. ``number`` returns the number for a new collection."""
        for run, indexes in window.in_order():
            self._read_run(run, indexes, number)

        for uuid, namespace in self._seen.items():
            if uuid not in self.collections and uuid not in self._gone:
                self.unknown.setdefault(uuid, namespace.decode("utf-8", "replace"))

    def _read_run(self, run: EntryRun, indexes: range | list[int], number: Callable[[], int]) -> None:
        raw = run.raw
        groups: dict[bytes, dict[bytes, list[Change]] | None] = {}
        for row, op, first, last, name, id_end, o, o_end, time in zip(*_of_interest(run, indexes), strict=True):
            if op == _COMMAND:
                for entry in run.member.operations(raw[first:last]):
                    self._operation(entry, number)
                continue
            where = raw[first:last]
            if where not in groups:
                groups[where] = self._group(run, row)
            group = groups[where]
            if group is None:
                continue
            self._count += 1
            identifier = raw[name:id_end]
            change = (op, raw[o:o_end], time)
            found = group.get(identifier) if op == UPDATE else None
            if found is None:
                group[identifier] = [change]
            else:
                found.append(change)

    def _group(self, run: EntryRun, row: int) -> dict[bytes, list[Change]] | None:
        """The changes of an entry's collection by document; ``None`` if nobody wants them."""
        namespace = run.raw[run.rows.namespace_start[row] : run.rows.namespace_end[row]]
        known = self._wanted.get(namespace)
        if known is None:
            known = self._wants(namespace)
        if not known:
            return None
        uuid = run.raw[run.rows.uuid[row] : run.rows.uuid[row] + 16]
        self._seen[uuid] = namespace
        return self._changes.setdefault(uuid, {})

    def _wants(self, namespace: bytes) -> bool:
        answer = self._wanted[namespace] = self._selection.has(namespace.decode("utf-8", "replace"))
        return answer

    def _operation(self, entry: OplogEntry, number: Callable[[], int]) -> None:
        """A command, or an operation of a transaction."""
        code = _CRUD.get(entry.operation)
        if code is None:
            if entry.operation == "c" and entry.collection_uuid is not None:
                self._command(entry, number)
            return
        if entry.from_migrate or entry.collection_uuid is None or entry.o is None or not self._wants(entry.namespace):
            return
        key = raw_bson.find(entry.o2 if code == UPDATE and entry.o2 is not None else entry.o, b"_id")
        if key is None:
            return
        document = entry.o2 if code == UPDATE and entry.o2 is not None else entry.o
        identifier = document[key.start : key.end]
        self._count += 1
        self._seen[entry.collection_uuid] = entry.namespace
        change = (code, entry.o, int(entry.cluster_time))
        group = self._changes.setdefault(entry.collection_uuid, {})
        if code == UPDATE:
            group.setdefault(identifier, []).append(change)
        else:
            # Behind those of an equal number: all changes of a transaction have one time.
            group.pop(identifier, None)
            group[identifier] = [change]

    def _command(self, entry: OplogEntry, number: Callable[[], int]) -> None:
        """Apply what a command did to the names of collections."""
        body, uuid = entry.o, entry.collection_uuid
        assert body is not None
        assert uuid is not None
        fields = first_elements(body)
        database = entry.namespace.partition(b".")[0].decode("utf-8", "replace")

        def text(name: bytes) -> str:
            return raw_bson.read_string(body, fields[name].value_start).decode("utf-8", "replace")

        if b"create" in fields:
            self._create(uuid, f"{database}.{text(b'create')}", number)
        elif b"drop" in fields and not entry.from_migrate:
            self._drop(uuid)
        elif b"renameCollection" in fields:
            target = fields.get(b"dropTarget")
            if target is not None and target.type == raw_bson.BINARY:
                self._drop(raw_bson.value(body, target)[5:21])
            self._rename(uuid, text(b"to"), number)

    def _create(self, uuid: bytes, namespace: str, number: Callable[[], int]) -> None:
        if uuid not in self.collections and self._selection.has(namespace) and uuid not in self.unknown:
            self.collections[uuid] = TabledCollection(uuid.hex(), number(), namespace)

    def _drop(self, uuid: bytes) -> None:
        self._gone.add(uuid)
        self.unknown.pop(uuid, None)
        found = self.collections.pop(uuid, None)
        if found is not None:
            self.dropped.append(found)

    def _rename(self, uuid: bytes, namespace: str, number: Callable[[], int]) -> None:
        found = self.collections.get(uuid)
        if not self._selection.has(namespace):
            self._drop(uuid)
        elif found is not None:
            self.collections[uuid] = replace(found, namespace=namespace)
        else:
            self.unknown[uuid] = namespace

    # -- applying ---------------------------------------------------------------------------------------------------

    def keys(self) -> set[bytes]:
        """The sortable keys of the documents that were changed."""
        return {_key(identifier) for group in self._changes.values() for identifier in group}

    def apply(self, state: Documents) -> Folded:
        """Bring the state up to the end of the windows that were read. Raises StateMismatchError."""
        touched: dict[int, list[bytes]] = {}
        grouped: dict[tuple[bytes, bytes], list[Change]] = {}
        for uuid, group in self._changes.items():
            if uuid not in self.collections:
                continue
            for identifier, changes in group.items():
                # Numbers of different types can be the same _id: an insert of 1.0 after a delete of 1.
                place = (uuid, _key(identifier))
                before = grouped.get(place)
                grouped[place] = changes if before is None else sorted(before + changes, key=lambda one: one[2])
        works: list[DocumentWork] = []
        size = 0
        for (uuid, key), changes in grouped.items():
            collection = self.collections[uuid]
            held = state.get(collection.number, key)
            works.append(DocumentWork(collection, key, held, changes))
            size += len(held or b"")
            if len(works) >= _WORKS_MAX or size >= _WORK_BYTES:
                _take_over(works, state, touched)
                works, size = [], 0
        _take_over(works, state, touched)
        for gone in self.dropped:
            state.forget(gone)
        return Folded(self._count, touched)


def _of_interest(run: EntryRun, indexes: range | list[int]) -> list[list[int]]:
    """The entries of a run that may matter, in order, as columns: row, operation, a range, where the element ``_id``
    is, where ``o`` is, time. The range is the whole of a command, and of others the namespace and the UUID."""
    rows = run.rows
    picked = np.asarray(indexes)
    operation = rows.operation[picked]
    changes = np.isin(operation, list(LETTERS)) & (rows.migrated[picked] == 0)
    changes &= (rows.uuid[picked] != 0) & (rows.id_type[picked] != 0)
    picked = picked[changes | (operation == _COMMAND)]
    whole = rows.operation[picked] == _COMMAND
    uuid, names = rows.uuid[picked], rows.namespace_start[picked]
    first = np.where(whole, rows.start[picked], np.minimum(names, uuid))
    last = np.where(whole, rows.start[picked + 1], np.maximum(rows.namespace_end[picked], uuid + 16))
    element = rows.id_start[picked] - _ID_HEAD
    columns = (element, rows.id_end[picked], rows.change_start[picked], rows.change_end[picked], rows.time[picked])
    return [one.tolist() for one in (picked, rows.operation[picked], first, last, *columns)]


def _key(identifier: bytes) -> bytes:
    """The sortable key of an element ``_id``."""
    return sortable_key(identifier[0], identifier[_ID_HEAD:])


def _take_over(works: list[DocumentWork], state: Documents, touched: dict[int, list[bytes]]) -> None:
    """Apply the changes of some documents, and write what became of them."""
    apply_all(works)
    for work in works:
        number, held, after = work.collection.number, work.held, work.document
        if after is not None:
            state.put(number, work.key, ClusterTime(work.changes[-1][2] & (2**64 - 1)), after)
        elif held is not None:
            state.delete(number, work.key)
        if held is not None or after is not None:
            touched.setdefault(number, []).append(work.key)
