"""A window of oplog entries, folded by document: what each collection holds at the window's end.

Changes of one document are applied one after the other; what comes before an insert, a delete or a replacement does not
matter. Names are assigned to the collections' UUIDs, so the order in which the shards of a cluster report a drop or a
rename makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from tailrace import raw_bson
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.entry import OplogEntry, first_elements
from tailrace.oplog.selection import Selection
from tailrace.tables.apply import DELETE, INSERT, LETTERS, UPDATE, DocumentWork, StateMismatchError, apply_all
from tailrace.tables.names import sortable_key
from tailrace.tables.oplogs import EntryRun, OplogWindow
from tailrace.tables.state import TabledCollection

__all__ = ["Documents", "Fold", "Folded", "StateMismatchError"]

_COMMAND: Final = ord("c")
#: So many documents, or so many bytes of them, are in memory while their changes are applied.
_WORKS_MAX: Final = 16_384
_WORK_BYTES: Final = 64 << 20
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
        self._changes: dict[tuple[bytes, bytes], list[tuple[int, bytes, int]]] = {}
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
        raw, rows = run.raw, run.rows
        whole = isinstance(indexes, range)
        columns = [column if whole else column[indexes] for column in rows[1:]]
        starts = rows.start[:-1] if whole else rows.start[indexes]
        ends = rows.start[1:] if whole else rows.start[[index + 1 for index in indexes]]
        lists = [column.tolist() for column in (starts, ends, *columns)]
        wanted, changes, seen = self._wanted, self._changes, self._seen
        for start, end, time, op, ns, ns_end, uuid_at, o, o_end, _, _, migrated, kind, id_, id_end in zip(
            *lists, strict=True
        ):
            if op == _COMMAND:
                for entry in run.member.operations(raw[start:end]):
                    self._operation(entry, number)
                continue
            if op not in LETTERS or migrated or not uuid_at or not kind:
                continue
            namespace = raw[ns:ns_end]
            known = wanted.get(namespace)
            if known is None:
                known = self._wants(namespace)
            if not known:
                continue
            uuid = raw[uuid_at : uuid_at + 16]
            place = (uuid, kind.to_bytes(1) + raw[id_:id_end])
            seen[uuid] = namespace
            self._count += 1
            if op == UPDATE:
                found = changes.get(place)
                if found is None:
                    changes[place] = [(op, raw[o:o_end], time)]
                else:
                    found.append((op, raw[o:o_end], time))
            else:
                changes[place] = [(op, raw[o:o_end], time)]

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
        place = (entry.collection_uuid, key.type.to_bytes(1) + raw_bson.value(document, key))
        self._count += 1
        self._seen[entry.collection_uuid] = entry.namespace
        change = (code, entry.o, int(entry.cluster_time))
        if code == UPDATE:
            self._changes.setdefault(place, []).append(change)
        else:
            # Behind those of an equal number: all changes of a transaction have one time.
            self._changes.pop(place, None)
            self._changes[place] = [change]

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
        return {sortable_key(identifier[0], identifier[1:]) for _, identifier in self._changes}

    def apply(self, state: Documents) -> Folded:
        """Bring the state up to the end of the windows that were read. Raises StateMismatchError."""
        touched: dict[int, list[bytes]] = {}
        grouped: dict[tuple[bytes, bytes], list[tuple[int, bytes, int]]] = {}
        for (uuid, identifier), changes in self._changes.items():
            if uuid in self.collections:
                # Numbers of different types can be the same _id: an insert of 1.0 after a delete of 1.
                key = sortable_key(identifier[0], identifier[1:])
                place = (uuid, key)
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
