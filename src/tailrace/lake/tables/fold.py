"""A window of oplog entries, folded by document: what each collection holds at the window's end.

Changes of one document are applied one after another; what comes before an insert, a delete or a replacement does not
matter. Names are assigned to the collections' UUIDs, so the order in which the shards of a cluster report a drop or a
rename makes no difference.

Entries of a migration (``fromMigrate``) copy documents that other entries have given already, with one exception: when
a database gets another primary shard, that shard creates its unsharded collections again, with other UUIDs, and fills
them only by migration entries. The donor then drops its own. So a collection is filled by such entries of the shard
that created it first, until another shard creates it too: then it is sharded, and its chunks move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, first_elements
from tailrace.core.oplog.entry_kinds import FOLLOWED_COMMANDS, command_name, refusal
from tailrace.core.oplog.selection import Selection
from tailrace.lake.tables.masking import masked_equally, masked_in
from tailrace.lake.tables.state import TabledCollection
from tailrace.read.source.listing import is_utf8
from tailrace.read.source.mask_file import Masks
from tailrace.read.window.apply import (
    DELETE,
    DELETE_OF,
    INSERT,
    UPDATE,
    DocumentWork,
    StateMismatchError,
    TimedChange,
    apply_all,
)
from tailrace.read.window.oplogs import EntryRun, OplogWindow
from tailrace.read.window.rows import COMMAND, ID_HEAD, entries_of_interest, uuid_of
from tailrace.read.window.shard_commit import is_shard_commit, net_operations
from tailrace.read.window.sortable_key import sortable_key

__all__ = ["Documents", "Fold", "FoldOfOne", "Folded", "StateMismatchError", "uuid_of"]

#: How many documents, or bytes of them, are in memory while their changes are applied.
_WORKS_MAX: Final = 16_384
_WORK_BYTES: Final = 64 << 20
_CRUD: Final = {"i": INSERT, "u": UPDATE, "d": DELETE}
_HINT: Final = (
    "Or leave the collection out of the tables, or remove the directory: then the next run copies the collections "
    "as they are now"
)


class Documents(Protocol):
    """Documents by the number of their collection and their sortable key."""

    def get(self, number: int, key: bytes) -> bytes | None: ...

    def put(self, number: int, key: bytes, time: ClusterTime, document: bytes) -> None: ...

    def delete(self, number: int, key: bytes) -> None: ...

    def confirm_missing(self, number: int, key: bytes) -> None: ...

    def forget(self, collection: TabledCollection) -> None: ...


class Folded(NamedTuple):
    """The result of a window: changes in the selected collections, and the rows that each table has to take over."""

    changes: int
    touched: dict[int, list[bytes]]


class Fold:
    """Applies windows to the state.

    ``collections``  those that have tables now, by UUID (16 bytes)
    ``unknown``      those that got a selected name with documents that the oplog did not show; they have to be copied
    ``ignored``      those whose changes somebody else applies, until they get another name
    ``disturbed``    names that a collection has got or lost, though they may have the same one again
    ``masks``        what is masked in every change before it is applied
    ``unreadable``   selected names that are not UTF-8: streams show nothing of such a collection, and it has no table
    """

    def __init__(
        self,
        selection: Selection,
        collections: Mapping[bytes, TabledCollection],
        *,
        ignored: Collection[bytes] = (),
        masks: Masks | None = None,
    ) -> None:
        self._selection = selection
        self._masks = masks
        self._ignored = set(ignored)
        self.collections = dict(collections)
        self.unknown: dict[bytes, str] = {}
        self.dropped: list[TabledCollection] = []
        self.disturbed: set[str] = set()
        self.unreadable: set[str] = set()
        #: By UUID, then by the element ``_id`` of the document.
        self._changes: dict[bytes, dict[bytes, list[TimedChange]]] = {}
        self._seen: dict[bytes, bytes] = {}
        self._gone: set[bytes] = set()
        self._wanted: dict[bytes, bool] = {}
        self._pending = {uuid for uuid, one in self.collections.items() if one.pending}
        self._count = 0

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, window: OplogWindow, number: Callable[[], int]) -> None:
        """Group the window's entries by document. ``number`` returns the number for a new collection."""
        for run, indexes in window.in_order():
            self._read_run(run, indexes, number)

        for uuid, namespace in self._seen.items():
            if uuid not in self.collections and uuid not in self._gone and uuid not in self._ignored:
                self.unknown.setdefault(uuid, _text(namespace))

    def _read_run(self, run: EntryRun, indexes: range | list[int], number: Callable[[], int]) -> None:
        raw = run.raw
        groups: dict[bytes, dict[bytes, list[TimedChange]] | None] = {}
        filling: dict[bytes, dict[bytes, list[TimedChange]] | None] = {}
        for row, op, migrated, first, last, name, id_end, o, o_end, time in zip(
            *entries_of_interest(run, indexes), strict=True
        ):
            if op == COMMAND:
                self._commands(run, raw[first:last], number)
                filling.clear()
                continue
            where = raw[first:last]
            if migrated:
                if where not in filling:
                    filling[where] = self._group_filled(run, row, op, number)
                group = filling[where]
            else:
                if where not in groups:
                    groups[where] = self._group(run, row)
                group = groups[where]
                if self._pending and group is not None and op != DELETE:
                    self._arrive(uuid_of(run, row))
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

    def _commands(self, run: EntryRun, raw: bytes, number: Callable[[], int]) -> None:
        """A command entry, with the operations of the transaction that it commits."""
        operations = run.member.operations(raw)
        if is_shard_commit(raw):
            for entry, document_key in net_operations(operations):
                self._operation(entry, run.member.name, number, document_key)
            return
        for entry in operations:
            self._operation(entry, run.member.name, number)

    def _group(self, run: EntryRun, row: int) -> dict[bytes, list[TimedChange]] | None:
        """The changes of an entry's collection by document; ``None`` if nobody wants them."""
        namespace = run.raw[run.rows.namespace_start[row] : run.rows.namespace_end[row]]
        if not self._wants(namespace):
            return None
        uuid = uuid_of(run, row)
        self._seen[uuid] = namespace
        return self._changes.setdefault(uuid, {})

    def _group_filled(
        self, run: EntryRun, row: int, op: int, number: Callable[[], int]
    ) -> dict[bytes, list[TimedChange]] | None:
        """The same for an entry of a migration: ``None`` if it copies what another entry has given."""
        namespace = run.raw[run.rows.namespace_start[row] : run.rows.namespace_end[row]]
        uuid = uuid_of(run, row)
        if self._wants(namespace) and self._fills(uuid, namespace, op, run.member.name, number):
            return self._changes.setdefault(uuid, {})
        return None

    def _wants(self, namespace: bytes) -> bool:
        answer = self._wanted.get(namespace)
        if answer is None:
            answer = self._wanted[namespace] = self._selects(_text(namespace))
        return answer

    def _selects(self, namespace: str) -> bool:
        if not self._selection.has(namespace):
            return False
        if is_utf8(namespace):
            return True
        self.unreadable.add(namespace)
        return False

    def _fills(self, uuid: bytes, namespace: bytes, op: int, member: str, number: Callable[[], int]) -> bool:
        """Whether migration entries of ``member`` are all that fills the collection."""
        collection = self.collections.get(uuid)
        if uuid in self._ignored:
            return False
        if collection is None and op == INSERT and uuid not in self._gone and uuid not in self.unknown:
            # It was created before we began to read: what it holds is copied once it has its name.
            name = _text(namespace)
            if self._named(name):
                self.collections[uuid] = TabledCollection(uuid.hex(), number(), name, pending=True)
                self._pending.add(uuid)
            else:
                self.unknown[uuid] = name
        return collection is not None and collection.filled == member

    def _operation(
        self, entry: OplogEntry, member: str, number: Callable[[], int], document_key: bytes | None = None
    ) -> None:
        """A command, or an operation of a transaction. ``document_key``: of a delete that is of this document only."""
        code = _CRUD.get(entry.operation)
        uuid = entry.collection_uuid
        if code is None:
            self._refuse_unknown(entry)
            if entry.operation == "c" and uuid is not None:
                self._command(entry, member, number)
            return
        if uuid is None or entry.o is None or not self._wants(entry.namespace):
            return
        if entry.from_migrate:
            if not self._fills(uuid, entry.namespace, code, member, number):
                return
        elif code != DELETE:
            self._arrive(uuid)
        document = entry.o2 if code == UPDATE and entry.o2 is not None else entry.o
        key = raw_bson.find(document, b"_id")
        if key is None:
            return
        identifier = document[key.start : key.end]
        self._count += 1
        self._seen[uuid] = entry.namespace
        change = (code, entry.o, int(entry.cluster_time))
        group = self._changes.setdefault(uuid, {})
        if document_key is not None:
            group.setdefault(identifier, []).append((DELETE_OF, document_key, int(entry.cluster_time)))
        elif code == UPDATE:
            group.setdefault(identifier, []).append(change)
        else:
            # After those of an equal number: all changes of a transaction have one time.
            group.pop(identifier, None)
            group[identifier] = [change]

    def _refuse_unknown(self, entry: OplogEntry) -> None:
        """Raises UnknownEntryError for an operation or a command that may have changed documents of a table, in a way
        that nobody here knows."""
        if entry.operation == "n":
            return
        uuid, followed = entry.collection_uuid, self._follows(entry.namespace)
        if entry.operation == "c":
            fields = entry.command_fields()
            name = command_name(fields)
            if name is None or name in FOLLOWED_COMMANDS:
                return
            value, database = fields[name], entry.namespace.partition(b".")[0]
            if value.type == raw_bson.STRING and entry.o is not None:
                text = raw_bson.read_string(entry.o, value.value_start)
                followed = self._follows(text) or self._follows(database + b"." + text)
            else:
                followed = any(one.namespace.startswith(f"{_text(database)}.") for one in self.collections.values())
        if uuid not in self._ignored and (followed or uuid in self.collections):
            raise refusal(entry, _HINT)

    def _follows(self, namespace: bytes) -> bool:
        """Whether a collection of that name has a table, or gets one."""
        return self._wants(namespace)

    def _command(self, entry: OplogEntry, member: str, number: Callable[[], int]) -> None:
        """Apply what a command did to the names of collections."""
        body, uuid = entry.o, entry.collection_uuid
        assert body is not None
        assert uuid is not None
        fields = first_elements(body)
        database = _text(entry.namespace.partition(b".")[0])

        def text(name: bytes) -> str:
            return _text(raw_bson.read_string(body, fields[name].value_start))

        if b"create" in fields:
            self._create(uuid, f"{database}.{text(b'create')}", member, number)
        elif b"drop" in fields and not entry.from_migrate:
            self._drop(uuid)
        elif b"renameCollection" in fields:
            target = fields.get(b"dropTarget")
            if target is not None and target.type == raw_bson.BINARY:
                self._drop(raw_bson.value(body, target)[5:21])
            self._rename(uuid, text(b"to"), number)

    def _create(self, uuid: bytes, namespace: str, member: str, number: Callable[[], int]) -> None:
        collection = self.collections.get(uuid)
        if uuid in self._ignored:
            return
        if collection is None:
            if self._selects(namespace) and uuid not in self.unknown:
                pending = bool(self._named(namespace))
                self.collections[uuid] = TabledCollection(
                    uuid.hex(), number(), namespace, pending=pending, filled=member
                )
                if pending:
                    self._pending.add(uuid)
        elif collection.filled not in {"", member}:
            self.collections[uuid] = replace(collection, filled="")

    def _named(self, namespace: str) -> list[bytes]:
        """The collections that have the name now, by UUID."""
        return [uuid for uuid, one in self.collections.items() if one.namespace == namespace and not one.pending]

    def _arrive(self, uuid: bytes) -> None:
        """A collection that was waiting for its name has it: the other one's shard is no longer the primary."""
        collection = self.collections.get(uuid)
        if collection is None or not collection.pending:
            return
        self._pending.discard(uuid)
        if collection.filled:
            self.collections[uuid] = replace(collection, pending=False)
        else:
            del self.collections[uuid]
            self.dropped.append(collection)
            self.unknown[uuid] = collection.namespace
        self.supersede(uuid, collection.namespace)

    def missing(self, uuid: bytes, namespace: str) -> None:
        """A collection that is there now. If the oplog has not shown it, it has to be copied."""
        if uuid not in self.collections and uuid not in self._gone and uuid not in self._ignored:
            self.unknown.setdefault(uuid, namespace)

    def supersede(self, uuid: bytes, namespace: str) -> None:
        """Forget the other collections that have had this one's name."""
        for other in self._named(namespace):
            if other != uuid:
                self._drop(other)

    def _drop(self, uuid: bytes) -> None:
        self._gone.add(uuid)
        unknown = self.unknown.pop(uuid, None)
        self._pending.discard(uuid)
        collection = self.collections.pop(uuid, None)
        if unknown is not None:
            self.disturbed.add(unknown)
        if collection is not None:
            self.disturbed.add(collection.namespace)
            self.dropped.append(collection)
            if not collection.pending and not self._named(collection.namespace):
                for waiting in [
                    one for one in self._pending if self.collections[one].namespace == collection.namespace
                ]:
                    self._arrive(waiting)

    def _rename(self, uuid: bytes, namespace: str, number: Callable[[], int]) -> None:
        collection = self.collections.get(uuid)
        self._ignored.discard(uuid)
        if not self._selects(namespace):
            self._drop(uuid)
        elif collection is not None and masked_equally(self._masks, collection.namespace, namespace):
            self.disturbed |= {collection.namespace, namespace}
            self.collections[uuid] = replace(collection, namespace=namespace)
        else:
            if collection is not None:  # what is held of it was masked by the rules of its old name
                self.dropped.append(self.collections.pop(uuid))
                self._pending.discard(uuid)
            before = namespace if collection is None else collection.namespace
            self.disturbed |= {namespace, self.unknown.get(uuid, before)}
            self.unknown[uuid] = namespace

    # -- applying ---------------------------------------------------------------------------------------------------

    def keys(self) -> set[bytes]:
        """The sortable keys of the documents that were changed."""
        return {_key(identifier) for group in self._changes.values() for identifier in group}

    def apply(self, state: Documents) -> Folded:
        """Bring the state up to the end of the windows that were read. Raises StateMismatchError."""
        touched: dict[int, list[bytes]] = {}
        write_in_turn(self._works(state), state, touched)
        for gone in self.dropped:
            state.forget(gone)
        return Folded(self._count, touched)

    def _works(self, state: Documents) -> Iterator[DocumentWork[TabledCollection]]:
        for (uuid, key), changes in self.grouped().items():
            collection = self.collections[uuid]
            held = state.get(collection.number, key)
            yield DocumentWork(collection, key, held, masked_in(collection.namespace, self._masks, changes))

    def grouped(self) -> dict[tuple[bytes, bytes], list[TimedChange]]:
        """The changes of each document, by the UUID of its collection and its sortable key."""
        return _grouped({uuid: group for uuid, group in self._changes.items() if uuid in self.collections})


def _grouped(found: Mapping[bytes, dict[bytes, list[TimedChange]]]) -> dict[tuple[bytes, bytes], list[TimedChange]]:
    grouped: dict[tuple[bytes, bytes], list[TimedChange]] = {}
    for uuid, group in found.items():
        for identifier, changes in group.items():
            # Numbers of different types can be the same _id: an insert of 1.0 after a delete of 1.
            place = (uuid, _key(identifier))
            before = grouped.get(place)
            grouped[place] = changes if before is None else sorted(before + changes, key=lambda one: one[2])
    return grouped


def _text(name: bytes) -> str:
    """A name of the server's, with surrogates for what is not UTF-8."""
    return name.decode("utf-8", "surrogateescape")


class _Everything(Selection):
    """All collections, the server's own and its temporary ones too."""

    def has(self, namespace: str) -> bool:
        return True


class FoldOfOne(Fold):
    """What happened to one collection, whatever it was called meanwhile."""

    def __init__(
        self, uuid: bytes, collections: Mapping[bytes, TabledCollection], *, masks: Masks | None = None
    ) -> None:
        super().__init__(_Everything(("*.*",)), collections, masks=masks)
        self._uuid = uuid

    def _group(self, run: EntryRun, row: int) -> dict[bytes, list[TimedChange]] | None:
        return super()._group(run, row) if uuid_of(run, row) == self._uuid else None

    def _group_filled(
        self, run: EntryRun, row: int, op: int, number: Callable[[], int]
    ) -> dict[bytes, list[TimedChange]] | None:
        return super()._group_filled(run, row, op, number) if uuid_of(run, row) == self._uuid else None

    def _operation(
        self, entry: OplogEntry, member: str, number: Callable[[], int], document_key: bytes | None = None
    ) -> None:
        if entry.operation == "c" or entry.collection_uuid == self._uuid:
            super()._operation(entry, member, number, document_key)

    def _follows(self, namespace: bytes) -> bool:
        return any(one.namespace == _text(namespace) for one in self.collections.values())

    def _create(self, uuid: bytes, namespace: str, member: str, number: Callable[[], int]) -> None:
        if uuid == self._uuid:
            super()._create(uuid, namespace, member, number)

    def _rename(self, uuid: bytes, namespace: str, number: Callable[[], int]) -> None:
        if uuid == self._uuid:
            super()._rename(uuid, namespace, number)


def _key(identifier: bytes) -> bytes:
    """The sortable key of an element ``_id``."""
    return sortable_key(identifier[0], identifier[ID_HEAD:])


def write_in_turn(
    works: Iterable[DocumentWork[TabledCollection]], state: Documents, touched: dict[int, list[bytes]]
) -> None:
    """Apply the changes of documents, and write what became of them, with a bounded part of them in memory."""
    part: list[DocumentWork[TabledCollection]] = []
    size = 0
    for work in works:
        part.append(work)
        size += len(work.held or b"")
        if len(part) >= _WORKS_MAX or size >= _WORK_BYTES:
            _write_back(part, state, touched)
            part, size = [], 0
    _write_back(part, state, touched)


def _write_back(
    works: Sequence[DocumentWork[TabledCollection]], state: Documents, touched: dict[int, list[bytes]]
) -> None:
    """Apply the changes of some documents, and write what became of them."""
    apply_all(works)
    for work in works:
        number, held, after = work.collection.number, work.held, work.document
        if work.changed is None:  # its changes were those of a document on another shard
            continue
        if after is not None:
            state.put(number, work.key, ClusterTime(work.changed & (2**64 - 1)), after)
        elif held is not None:
            state.delete(number, work.key)
        else:  # what was deleted may be there, where a search does not find it
            state.confirm_missing(number, work.key)
        # Of a document that came and went, too: the table is not what it was all the time.
        touched.setdefault(number, []).append(work.key)
