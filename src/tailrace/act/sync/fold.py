"""A window of oplog entries as steps: segments of changes, and the definitions between them.

A *segment* is what documents became up to a cluster time; it is written in one transaction with that position. A
*definition* (create, drop, rename, indexes, options, views) stands between two segments, since the server takes none of
them into a transaction together with other writes. Definitions of one time come before the changes of that time: a
transaction may create a collection and fill it.

Steps come one at a time, and the caller may look at ``collections`` meanwhile: it is as of the step's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, NamedTuple

from tailrace.act.sync.folded_catalog import VIEWS, Definition, FoldedCatalog
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncedCollection
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, parse_entry
from tailrace.core.printable import in_a_line
from tailrace.errors import SourceError
from tailrace.read.snapshot.state import shown
from tailrace.read.window.apply import DELETE, DELETE_OF, INSERT, UPDATE, TimedChange
from tailrace.read.window.oplogs import EntryRun, OplogWindow
from tailrace.read.window.rows import COMMAND, ID_HEAD, entries_of_interest, uuid_of
from tailrace.read.window.shard_commit import is_shard_commit, net_operations
from tailrace.read.window.sortable_key import sortable_key

_CRUD: Final = {"i": INSERT, "u": UPDATE, "d": DELETE}

_NEVER: Final = 2**64
#: Where a ``_LocatedEntry`` has its time.
_TIME: Final = 4

#: How a document came into a segment: by its first change, or not known.
THERE, NOT_THERE, UNKNOWN = 1, 0, -1


class DocumentChanges(NamedTuple):
    """The changes of one document in a segment.

    ``uuid``        its collection's, on the source
    ``key``         the sortable key of its ``_id``
    ``identifier``  the element ``_id`` that it had, or has, before the first change
    ``before``      whether it was there: ``THERE``, ``NOT_THERE``, ``UNKNOWN``
    ``changes``     from the last one that does not build on those before
    """

    uuid: bytes
    key: bytes
    identifier: bytes
    before: int
    changes: list[TimedChange]


class CappedChange(NamedTuple):
    """One change of a capped collection, in order: its letter, the element ``_id``, the entry's ``o``, its time."""

    uuid: bytes
    operation: int
    identifier: bytes
    body: bytes
    time: int


@dataclass(frozen=True, slots=True)
class ChangeSegment:
    """Everything up to ``until``, after the step before."""

    until: ClusterTime
    documents: list[DocumentChanges]
    capped: list[CappedChange]
    changes: int


@dataclass(slots=True)
class _Changes:
    """Of one ``_id`` as its bytes are."""

    before: int
    place: int
    changes: list[TimedChange] = field(default_factory=list)


class _Group(dict[bytes, _Changes]):
    """The changes of a collection, by the element ``_id``. ``size``: about that of a document."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class _Delayed(NamedTuple):
    """An operation of a time whose definitions come first. ``key``: not ``None`` where it is not known whether the
    document was there, as for a shard's part of a transaction over several shards; of a delete there, the document key
    that it is of."""

    run: EntryRun
    entry: OplogEntry
    key: bytes | None


class _LocatedEntry(NamedTuple):
    """An entry, as offsets into its run: of namespace and UUID (of a command, the whole), of the element ``_id``, of
    ``o``. ``followed``: the next entry has the same time."""

    run: EntryRun
    row: int
    operation: int
    migrated: int
    time: int
    first: int
    last: int
    id_start: int
    id_end: int
    start: int
    end: int
    followed: bool

    @property
    def namespace(self) -> bytes:
        rows = self.run.rows
        run = self.run
        return run.raw[rows.namespace_start[self.row] : rows.namespace_end[self.row]]

    @property
    def uuid(self) -> bytes:
        return uuid_of(self.run, self.row)

    @property
    def entry(self) -> bytes:
        run = self.run
        return run.raw[run.rows.start[self.row] : run.rows.start[self.row + 1]]

    @property
    def identifier(self) -> bytes:
        run = self.run
        return run.raw[self.id_start : self.id_end]

    @property
    def body(self) -> bytes:
        run = self.run
        return run.raw[self.start : self.end]


class SyncFold:
    """Turns windows into steps. ``collections``: those on the target, by UUID on the source.

    ``most``        a segment ends after about this many changes, or ``bytes_most`` bytes; may be set at any time
    ``gone``        as of ``FoldedCatalog``
    ``size_of``     about how large a collection's documents are: a small change of a large document is a large write
    """

    def __init__(
        self,
        settings: SyncSettings,
        collections: Mapping[bytes, SyncedCollection],
        most: int,
        *,
        gone: set[bytes] | None = None,
        size_of: Callable[[SyncedCollection], int] = lambda _: 0,
    ) -> None:
        self._catalog = FoldedCatalog(settings, collections, gone)
        self.most = most
        self.bytes_most = 16 << 20
        self._size_of = size_of
        self._reset()

    def _reset(self) -> None:
        #: The time of a definition that no segment has followed yet. A later one may be carried out only once: two of
        #: them, done again in a row, need not give what they gave (an index that becomes unique).
        self._defined = _NEVER
        self._groups: dict[bytes, _Group] = {}
        #: The groups by what entries have for namespace and UUID.
        self._places: dict[bytes, _Group] = {}
        self._capped: list[CappedChange] = []
        self._count = self._size = 0

    @property
    def collections(self) -> dict[bytes, SyncedCollection]:
        """Those as of the last step: later ones make another mapping."""
        return self._catalog.collections

    # -- steps ------------------------------------------------------------------------------------------------------

    def steps(self, window: OplogWindow) -> Iterator[ChangeSegment | Definition]:
        """The steps of a window; the last one is a segment up to its end. Raises UnknownEntryError, SourceError."""
        last, shared = int(window.after), False
        waiting: list[_Delayed] = []
        for one in _entries(window):
            run, _, op, migrated, time, first, end, id_start, id_end, start, stop, followed = one
            if time > last:
                if waiting:
                    yield from self._at(waiting)
                if self._count >= self.most or self._size >= self.bytes_most:
                    yield self._segment(ClusterTime(time - 1))
                shared = False
            last = time
            # Several shards may have an entry of one time. Definitions come first.
            shared = shared or followed
            raw = run.raw
            group = None if op == COMMAND or shared or migrated else self._places.get(raw[first:end])
            if group is None:
                group = self._place(_LocatedEntry(*one), waiting, shared=shared)
                if group is None:
                    continue
            self._count += 1
            self._size += stop - start
            self._note(group, op, raw[id_start:id_end], raw[start:stop], time)
        yield from self._at(waiting)
        yield self._segment(window.until)

    def _place(self, one: _LocatedEntry, waiting: list[_Delayed], *, shared: bool) -> _Group | None:
        """Where an entry's change goes; ``None``: nowhere, or it was taken care of."""
        if one.operation == COMMAND:
            waiting.extend(_operations(one))
            return None
        if shared or one.namespace.endswith(VIEWS):
            waiting.append(_Delayed(one.run, parse_entry(one.entry), None))
            return None
        if not self._takes(one):
            return None
        uuid = one.uuid
        if self._catalog.collections[uuid].capped:
            self._add(uuid, one.operation, one.identifier, one.body, one.time)
            return None
        group = self._group(uuid)
        if not one.migrated:
            run = one.run
            self._places[run.raw[one.first : one.last]] = group
        return group

    def _at(self, waiting: list[_Delayed]) -> Iterator[ChangeSegment | Definition]:
        """What waits of one time: definitions first. What came before them is written under the names of that time."""
        for run, entry, _ in waiting:
            if entry.operation == "n" or (entry.operation in _CRUD and not entry.namespace.endswith(VIEWS)):
                continue
            if self._groups or self._capped or self._defined < entry.cluster_time:
                yield self._segment(ClusterTime(entry.cluster_time - 1))
            for definition in self._catalog.definitions(run.member.name, entry):
                self._defined = entry.cluster_time
                yield definition
        for run, entry, key in waiting:
            if entry.operation in _CRUD and not entry.namespace.endswith(VIEWS):
                self._operation(run, entry, key)
        waiting.clear()

    def _segment(self, until: ClusterTime) -> ChangeSegment:
        segment = ChangeSegment(until, self._documents(), self._capped, self._count)
        self._reset()
        return segment

    def _documents(self) -> list[DocumentChanges]:
        """The changes of each document. Numbers of different types can be the same ``_id``: an insert of 1.0 after a
        delete of 1."""
        found: list[DocumentChanges] = []
        for uuid, group in self._groups.items():
            places: dict[bytes, int] = {}
            for identifier, one in group.items():
                key = sortable_key(identifier[0], identifier[ID_HEAD:])
                place = places.get(key)
                if place is None:
                    places[key] = len(found)
                    found.append(DocumentChanges(uuid, key, identifier, one.before, one.changes))
                else:
                    found[place] = _joined(found[place], identifier, one, group)
        return found

    # -- changes ----------------------------------------------------------------------------------------------------

    def _takes(self, one: _LocatedEntry) -> bool:
        if not self._catalog.wants(one.namespace):
            return False
        collection = self._catalog.collections.get(one.uuid)
        if collection is None:
            self._catalog.check_missing(one.uuid, one.namespace, one.time)
            return False
        return not one.migrated or collection.filled == one.run.member.name

    def _operation(self, run: EntryRun, entry: OplogEntry, document_key: bytes | None) -> None:
        """A change out of a transaction. ``document_key``: of a shard's part of one over several shards; for a delete,
        of this document only."""
        uuid = entry.collection_uuid
        if uuid is None or entry.o is None or not self._catalog.wants(entry.namespace):
            return
        collection = self._catalog.collections.get(uuid)
        if collection is None:
            self._catalog.check_missing(uuid, entry.namespace, entry.cluster_time)
            return
        if entry.from_migrate and collection.filled != run.member.name:
            return
        code = _CRUD[entry.operation]
        document = entry.o2 if code == UPDATE and entry.o2 is not None else entry.o
        key = raw_bson.find(document, b"_id")
        if key is None:
            return
        identifier = document[key.start : key.end]
        if document_key is None:
            self._add(uuid, code, identifier, entry.o, entry.cluster_time)
        elif code == DELETE and document_key:
            self._add(uuid, DELETE_OF, identifier, document_key, entry.cluster_time)
        else:
            self._add(uuid, code, identifier, entry.o, entry.cluster_time, before=UNKNOWN)

    def _add(
        self, uuid: bytes, op: int, identifier: bytes, body: bytes, time: int, *, before: int | None = None
    ) -> None:
        self._count += 1
        self._size += len(body)
        if self._catalog.collections[uuid].capped:
            if time <= self._catalog.collections[uuid].as_of:
                return  # the copy, which is of that time, has it
            self._capped.append(CappedChange(uuid, op, identifier, body, time))
        else:
            self._note(self._group(uuid), op, identifier, body, time, before=before)

    def _group(self, uuid: bytes) -> _Group:
        found = self._groups.get(uuid)
        if found is None:
            found = self._groups[uuid] = _Group(self._size_of(self._catalog.collections[uuid]))
        return found

    def _note(
        self,
        group: _Group,
        op: int,
        identifier: bytes,
        body: bytes,
        time: int,
        *,
        before: int | None = None,
    ) -> None:
        found = group.get(identifier)
        if found is None:
            if before is None:
                before = NOT_THERE if op == INSERT else UNKNOWN if op == DELETE_OF else THERE
            group[identifier] = _Changes(before, self._count, [(op, body, time)])
            self._size += group.size
            return
        if op == INSERT and before is None and found.changes[-1][0] in (INSERT, UPDATE):
            raise two_documents(self._namespace_of(group), identifier)
        if op in (UPDATE, DELETE_OF):
            found.changes.append((op, body, time))
        else:
            del group[identifier]  # it comes after those of an equal number
            group[identifier] = found
            found.changes = [(op, body, time)]

    def _namespace_of(self, group: _Group) -> str:
        return next(self._catalog.collections[uuid].namespace for uuid, one in self._groups.items() if one is group)


def two_documents(namespace: str, identifier: bytes) -> SourceError:
    """The error where a sharded collection holds two documents with one ``_id``."""
    return SourceError(
        f"{in_a_line(namespace)} holds two documents with the _id {shown(raw_bson.encode_document(identifier))} on two "
        "shards, which a replica set cannot hold",
        hint="Give one of them another _id, or leave the collection out of the sync",
    )


def _joined(
    before: DocumentChanges, identifier: bytes, one: _Changes, group: Mapping[bytes, _Changes]
) -> DocumentChanges:
    """Two lists of changes of one document, whose ``_id`` changed its type. Those with the later insert or delete stand
    later, and what has come before does not matter."""
    other = group.get(before.identifier)
    first = other is None or other.place < one.place
    changes = sorted(before.changes + one.changes, key=lambda change: change[2])
    if first:
        return before._replace(changes=changes)
    return before._replace(identifier=identifier, before=one.before, changes=changes)


#: The fields of a ``_LocatedEntry``, which few entries have to be.
_Located = tuple[EntryRun, int, int, int, int, int, int, int, int, int, int, bool]


def _entries(window: OplogWindow) -> Iterator[_Located]:
    """The entries that may matter, in order."""
    if len({run.member.name for run in window.runs}) < 2:
        yield from _plain_entries(window)
        return
    before: _Located | None = None
    for one in _plain_entries(window):
        if before is not None:
            yield (*before[:-1], one[_TIME] == before[_TIME])
        before = one
    if before is not None:
        yield before


def _plain_entries(window: OplogWindow) -> Iterator[_Located]:
    for run, indexes in window.in_order():
        row, op, migrated, first, last, name, id_end, o, o_end, time = entries_of_interest(run, indexes)
        times = [one & (2**64 - 1) for one in time]
        columns = (row, op, migrated, times, first, last, name, id_end, o, o_end)
        yield from zip(repeat(run, len(row)), *columns, repeat(False, len(row)), strict=True)


def _operations(one: _LocatedEntry) -> Iterator[_Delayed]:
    """A command, or the operations of the transaction that it commits."""
    operations = one.run.member.operations(one.entry)
    if is_shard_commit(one.entry):
        for entry, key in net_operations(operations):
            yield _Delayed(one.run, entry, key or b"")
    else:
        # What a user's applyOps deletes or inserts need not have been there, or missing.
        unsure = b"applyOps\0" in one.entry and parse_entry(one.entry).lsid is None
        for entry in operations:
            yield _Delayed(one.run, entry, b"" if unsure else None)
