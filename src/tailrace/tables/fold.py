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
from tailrace.errors import TailraceError
from tailrace.images.delta import ImageMismatchError, UnknownDocumentError, apply_operation
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.entry import OplogEntry, first_elements
from tailrace.tables.merge_updates import merged
from tailrace.tables.names import Selection, sortable_key
from tailrace.tables.oplogs import EntryRun, OplogWindow
from tailrace.tables.state import TabledCollection

_INSERT, _UPDATE, _DELETE, _COMMAND = ord("i"), ord("u"), ord("d"), ord("c")
_CRUD: Final = {"i": _INSERT, "u": _UPDATE, "d": _DELETE}
_LETTERS: Final = {_INSERT: b"i", _UPDATE: b"u", _DELETE: b"d"}


class StateMismatchError(TailraceError):
    """A change does not fit the state: the document is not the one that the server had."""


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
            if op not in _LETTERS or migrated or not uuid_at or not kind:
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
            if op == _UPDATE:
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
        key = raw_bson.find(entry.o2 if code == _UPDATE and entry.o2 is not None else entry.o, b"_id")
        if key is None:
            return
        document = entry.o2 if code == _UPDATE and entry.o2 is not None else entry.o
        place = (entry.collection_uuid, key.type.to_bytes(1) + raw_bson.value(document, key))
        self._count += 1
        self._seen[entry.collection_uuid] = entry.namespace
        change = (code, entry.o, int(entry.cluster_time))
        if code == _UPDATE:
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
        for (uuid, key), changes in grouped.items():
            collection = self.collections[uuid]
            held = state.get(collection.number, key)
            after = _applied(held, changes, collection, key)
            if after is not None:
                state.put(collection.number, key, ClusterTime(changes[-1][2] & (2**64 - 1)), after)
            elif held is not None:
                state.delete(collection.number, key)
            if held is not None or after is not None:
                touched.setdefault(collection.number, []).append(key)
        for gone in self.dropped:
            state.forget(gone)
        return Folded(self._count, touched)


def _applied(
    document: bytes | None, changes: list[tuple[int, bytes, int]], collection: TabledCollection, key: bytes
) -> bytes | None:
    if len(changes) > 2 and (changes[0][2] & (2**64 - 1)) > collection.copied:
        changes = _fewer(changes)
    for op, change, time in changes:
        again = (time & (2**64 - 1)) <= collection.copied
        try:
            document = apply_operation(document, _LETTERS[op], change, again=again or op != _UPDATE)
        except UnknownDocumentError as error:
            if not again:
                raise _mismatch(error, collection, key, time) from None
        except ImageMismatchError as error:
            raise _mismatch(error, collection, key, time) from None
    return document


def _fewer(changes: list[tuple[int, bytes, int]]) -> list[tuple[int, bytes, int]]:
    """The same changes, with the updates after the first change merged into one if possible."""
    if any(op != _UPDATE for op, _, _ in changes[1:]):
        return changes
    first = 0 if changes[0][0] == _UPDATE else 1
    one = merged([change for _, change, _ in changes[first:]])
    return changes if one is None else [*changes[:first], (_UPDATE, one, changes[-1][2])]


def _mismatch(error: TailraceError, collection: TabledCollection, key: bytes, time: int) -> StateMismatchError:
    when = ClusterTime(time & (2**64 - 1))
    return StateMismatchError(
        f"{collection.namespace}: the change at {when} of the document with the key {key.hex()[:80]} does not fit what "
        f"the tables' state holds: {error.message}",
        hint="Remove the directory of the tables; the next run copies the collections again",
    )
