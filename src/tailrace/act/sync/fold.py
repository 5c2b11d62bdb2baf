"""A window of oplog entries as steps: segments of changes, and the definitions between them.

A *segment* is what documents became up to a cluster time; it is written in one transaction with that position. A
*definition* (create, drop, rename, indexes, options, views) stands between two segments, since the server takes none of
them into a transaction beside other writes. Definitions of one time come before the changes of that time: a transaction
may create a collection and fill it.

Steps come one at a time, and who takes them may look at ``collections`` meanwhile: it is as of the step's place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncedCollection
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, parse_entry
from tailrace.core.oplog.entry_kinds import FOLLOWED_COMMANDS, command_name, refusal
from tailrace.core.printable import in_a_line
from tailrace.errors import SourceError, UsageError
from tailrace.read.snapshot.state import shown
from tailrace.read.window.apply import DELETE, DELETE_OF, INSERT, UPDATE, Change
from tailrace.read.window.oplogs import EntryRun, OplogWindow
from tailrace.read.window.rows import COMMAND, ID_HEAD, entries_of_interest, uuid_of
from tailrace.read.window.shard_commit import is_shard_commit, net_operations
from tailrace.read.window.sortable_key import sortable_key

_CRUD: Final = {"i": INSERT, "u": UPDATE, "d": DELETE}
#: The server's own collections that turn into a user's, or are a part of one.
_PARTS: Final = re.compile(
    r"[^.]+\.(?:tmp\.(?:agg_out|mr)\.|tmp[0-9A-Za-z]{5}\.(?:convertToCapped|renameCollection|create)"
    r"|system\.(?:resharding\.|views$))"
)
_BUCKETS: Final = ".system.buckets."
_RESHARDING: Final = ".system.resharding."
_VIEWS: Final = b".system.views"
#: Builds that have begun or were given up change nothing yet; of a database, its collections are dropped one by one.
_NOTHING: Final = frozenset((b"startIndexBuild", b"abortIndexBuild", b"dropDatabase", b"dbCheck", b"abortTransaction"))
_SHARDING: Final = frozenset(
    (
        b"modifyCollectionShardingIndexCatalog",
        b"createGlobalIndex",
        b"dropGlobalIndex",
        b"createDatabaseMetadata",
        b"dropDatabaseMetadata",
    )
)
_NEVER: Final = 2**64
_HINT: Final = "Or leave the collection out of the sync"

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
    changes: list[Change]


class CappedChange(NamedTuple):
    """One change of a capped collection, in order: its letter, the element ``_id``, the entry's ``o``, its time."""

    uuid: bytes
    operation: int
    identifier: bytes
    body: bytes
    time: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Everything up to ``until``, after the step before."""

    until: ClusterTime
    documents: list[DocumentChanges]
    capped: list[CappedChange]
    changes: int


@dataclass(frozen=True, slots=True)
class Definition:
    """A change of the catalogue. ``name``: what the entry's command is called, or ``b"view"``.

    ``before``   the collection as it was; ``None`` if the sync did not have it
    ``after``    as it is; ``None`` if the sync has it no longer
    ``gone``     another collection that the command drops
    """

    time: ClusterTime
    name: bytes
    uuid: bytes
    entry: OplogEntry
    before: SyncedCollection | None
    after: SyncedCollection | None
    gone: tuple[SyncedCollection, ...] = ()


@dataclass(slots=True)
class _Changes:
    """Of one ``_id`` as its bytes are."""

    before: int
    place: int
    changes: list[Change] = field(default_factory=list)


class _Waiting(NamedTuple):
    """An operation of a time whose definitions come first. ``key``: not ``None`` where it is not known whether the
    document was there, as for a shard's part of a transaction over several shards; of a delete there, the document key
    that it is of."""

    run: EntryRun
    entry: OplogEntry
    key: bytes | None


class _Row(NamedTuple):
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
        return self.run.raw[rows.namespace_start[self.row] : rows.namespace_end[self.row]]

    @property
    def uuid(self) -> bytes:
        return uuid_of(self.run, self.row)

    @property
    def entry(self) -> bytes:
        return self.run.raw[self.run.rows.start[self.row] : self.run.rows.start[self.row + 1]]

    @property
    def identifier(self) -> bytes:
        return self.run.raw[self.id_start : self.id_end]

    @property
    def body(self) -> bytes:
        return self.run.raw[self.start : self.end]


class SyncFold:
    """Turns windows into steps. ``collections``: those on the target, by UUID on the source.

    ``hold``        up to it, what was copied may be newer than the entries
    ``most``        a segment ends after about so many changes, or so many ``bytes_most``; may be set at any time
    ``unselected``  names of collections that were seen and are not synced
    """

    def __init__(
        self, settings: SyncSettings, collections: Mapping[bytes, SyncedCollection], hold: ClusterTime, most: int
    ) -> None:
        self._settings = settings
        self.collections = dict(collections)
        self._hold = hold
        self.most = most
        self.bytes_most = 8 << 20
        self._wanted: dict[bytes, bool] = {}
        self._gone: set[bytes] = set()
        self._reset()

    def _reset(self) -> None:
        #: The time of a definition that no segment has followed yet. A later one may be carried out only once: two of
        #: them, done again in a row, need not give what they gave (an index that becomes unique).
        self._defined = _NEVER
        self._groups: dict[bytes, dict[bytes, _Changes]] = {}
        #: The groups by what entries have for namespace and UUID.
        self._places: dict[bytes, dict[bytes, _Changes]] = {}
        self._capped: list[CappedChange] = []
        self._count = self._size = 0

    # -- steps ------------------------------------------------------------------------------------------------------

    def steps(self, window: OplogWindow) -> Iterator[Segment | Definition]:
        """The steps of a window; the last one is a segment up to its end. Raises UnknownEntryError, SourceError."""
        last, shared = int(window.after), False
        waiting: list[_Waiting] = []
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
                group = self._place(one, waiting, shared=shared)
                if group is None:
                    continue
            self._count += 1
            self._size += stop - start
            self._note(group, op, raw[id_start:id_end], raw[start:stop], time)
        yield from self._at(waiting)
        yield self._segment(window.until)

    def _place(self, one: _Row, waiting: list[_Waiting], *, shared: bool) -> dict[bytes, _Changes] | None:
        """Where an entry's change goes; ``None``: nowhere, or it was taken care of."""
        if one.operation == COMMAND:
            waiting.extend(_operations(one))
            return None
        if shared or one.namespace.endswith(_VIEWS):
            waiting.append(_Waiting(one.run, parse_entry(one.entry), None))
            return None
        if not self._takes(one):
            return None
        uuid = one.uuid
        if self.collections[uuid].capped:
            self._add(uuid, one.operation, one.identifier, one.body, one.time)
            return None
        group = self._groups.setdefault(uuid, {})
        if not one.migrated:
            self._places[one.run.raw[one.first : one.last]] = group
        return group

    def _at(self, waiting: list[_Waiting]) -> Iterator[Segment | Definition]:
        """What waits of one time: definitions first. What was before them is written under the names of then."""
        for run, entry, _ in waiting:
            if entry.operation == "n" or (entry.operation in _CRUD and not entry.namespace.endswith(_VIEWS)):
                continue
            if self._groups or self._capped or self._defined < entry.cluster_time:
                yield self._segment(ClusterTime(entry.cluster_time - 1))
            for definition in self._definitions(run, entry):
                self._defined = entry.cluster_time
                yield definition
        for run, entry, key in waiting:
            if entry.operation in _CRUD and not entry.namespace.endswith(_VIEWS):
                self._operation(run, entry, key)
        waiting.clear()

    def _segment(self, until: ClusterTime) -> Segment:
        segment = Segment(until, self._documents(), self._capped, self._count)
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

    def _takes(self, one: _Row) -> bool:
        if not self._wants(one.namespace):
            return False
        found = self.collections.get(one.uuid)
        if found is None:
            self._missing(one.uuid, one.namespace, one.time)
            return False
        return not one.migrated or found.filled == one.run.member.name

    def _missing(self, uuid: bytes, namespace: bytes, time: int) -> None:
        """A change of a collection that is not on the target: it was gone when the others were listed."""
        if uuid in self._gone or time <= self._hold:
            return
        raise SourceError(
            f"{in_a_line(_text(namespace))} was changed at {ClusterTime(time)}, and nothing has told of its creation",
            hint="It came from outside of the selection. Begin the sync again with a selection that holds both names",
        )

    def _operation(self, run: EntryRun, entry: OplogEntry, document_key: bytes | None) -> None:
        """A change out of a transaction. ``document_key``: of a shard's part of one over several shards; for a delete,
        of this document only."""
        uuid = entry.collection_uuid
        if uuid is None or entry.o is None or not self._wants(entry.namespace):
            return
        found = self.collections.get(uuid)
        if found is None:
            self._missing(uuid, entry.namespace, entry.cluster_time)
            return
        if entry.from_migrate and found.filled != run.member.name:
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
        if self.collections[uuid].capped:
            if time <= self.collections[uuid].as_of:
                return  # the copy, which is of that time, has it
            self._capped.append(CappedChange(uuid, op, identifier, body, time))
        else:
            self._note(self._groups.setdefault(uuid, {}), op, identifier, body, time, before=before)

    def _note(
        self,
        group: dict[bytes, _Changes],
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
            return
        if op == INSERT and before is None and found.changes[-1][0] in (INSERT, UPDATE):
            raise two_documents(self._namespace_of(group), identifier)
        if op in (UPDATE, DELETE_OF):
            found.changes.append((op, body, time))
        else:
            del group[identifier]  # it comes after those of an equal number
            group[identifier] = found
            found.changes = [(op, body, time)]

    def _namespace_of(self, group: dict[bytes, _Changes]) -> str:
        return next(self.collections[uuid].namespace for uuid, one in self._groups.items() if one is group)

    def _wants(self, namespace: bytes) -> bool:
        answer = self._wanted.get(namespace)
        if answer is None:
            answer = self._wanted[namespace] = self.has(_text(namespace))
        return answer

    def has(self, namespace: str) -> bool:
        """Whether a collection is followed: one that is selected, or that may become one."""
        database, _, name = namespace.partition(".")
        if _BUCKETS in namespace:
            return self._settings.has(f"{database}.{name.removeprefix(_BUCKETS[1:])}")
        if _PARTS.match(namespace) is not None:
            return self._settings.selection.may_cover(database)
        return self._settings.has(namespace)

    # -- definitions ------------------------------------------------------------------------------------------------

    def _definitions(self, run: EntryRun, entry: OplogEntry) -> Iterator[Definition]:
        """What a command did to the catalogue, as far as it concerns the sync."""
        uuid = entry.collection_uuid
        if entry.operation in _CRUD:
            if self._wants(entry.namespace) and uuid is not None and not entry.from_migrate:
                yield Definition(entry.cluster_time, b"view", uuid, entry, None, None)
            return
        name = command_name(entry.command_fields()) if entry.operation == "c" else None
        if name is None or name not in FOLLOWED_COMMANDS:
            self._refuse_unknown(entry)
            return
        if name in _NOTHING or name in _SHARDING or uuid is None:
            return
        if name in (b"create", b"drop") and _named(entry, name) == "system.views":
            # Views are told one by one, but for those that go with their database.
            if name == b"drop" and self._wants(entry.namespace.partition(b".")[0] + _VIEWS):
                yield Definition(entry.cluster_time, b"views", uuid, entry, None, None)
        elif name == b"create":
            yield from self._create(run, entry, uuid)
        elif name == b"drop":
            if not entry.from_migrate:
                yield from self._drop(entry, uuid, name)
        elif name == b"renameCollection":
            yield from self._rename(entry, uuid)
        elif (found := self.collections.get(uuid)) is not None:
            yield Definition(entry.cluster_time, name, uuid, entry, found, found)

    def _refuse_unknown(self, entry: OplogEntry) -> None:
        """Raise UnknownEntryError for what may have changed something that is synced in a way that nobody knows."""
        known = entry.collection_uuid in self.collections or self._wants(entry.namespace)
        if entry.operation == "c" and entry.o is not None:
            fields = entry.command_fields()
            name, database = command_name(fields), entry.namespace.partition(b".")[0]
            value = None if name is None else fields[name]
            if value is not None and value.type == raw_bson.STRING:
                text = raw_bson.read_string(entry.o, value.value_start)
                known = known or self._wants(text) or self._wants(database + b"." + text)
            else:
                known = known or self._settings.selection.may_cover(_text(database))
        if known:
            raise refusal(entry, _HINT)

    def _create(self, run: EntryRun, entry: OplogEntry, uuid: bytes) -> Iterator[Definition]:
        name = f"{_text(entry.namespace.partition(b'.')[0])}.{_named(entry, b'create')}"
        found = self.collections.get(uuid)
        if found is not None:
            if found.filled not in {"", run.member.name}:
                after = self.collections[uuid] = replace(found, filled="")
                yield Definition(entry.cluster_time, b"spread", uuid, entry, found, after)
            return
        if not self.has(name) or uuid in self._gone:
            return
        capped = entry.command_fields().get(b"capped")
        is_capped = capped is not None and entry.o is not None and entry.o[capped.value_start] == 1
        made = SyncedCollection(uuid, name, self._target_of(name), uuid, filled=run.member.name, capped=is_capped)
        if self._named(name) is not None or _RESHARDING in name:
            made = replace(self._beside(made), pending=_RESHARDING not in name)
        self.collections[uuid] = made
        yield Definition(entry.cluster_time, b"create", uuid, entry, None, made)

    def _beside(self, made: SyncedCollection) -> SyncedCollection:
        """A collection whose name another one has still, or that no transaction may write to: it gets another name on
        the target until then."""
        database = made.target.partition(".")[0]
        return replace(made, target=f"{database}.tailrace.pending.{made.uuid.hex()}", pending=True)

    def _named(self, namespace: str) -> SyncedCollection | None:
        """The collection that has a name now."""
        return next((one for one in self.collections.values() if one.namespace == namespace and not one.pending), None)

    def _drop(self, entry: OplogEntry, uuid: bytes, name: bytes) -> Iterator[Definition]:
        self._gone.add(uuid)
        found = self.collections.pop(uuid, None)
        if found is None:
            return
        yield Definition(entry.cluster_time, name, uuid, entry, found, None)
        if not found.pending:
            yield from self._arrive(entry, found.namespace)

    def _arrive(self, entry: OplogEntry, namespace: str) -> Iterator[Definition]:
        """A collection that was waiting for its name has it now."""
        for uuid, one in list(self.collections.items()):
            if one.pending and one.namespace == namespace:
                after = replace(one, pending=False, target=self._target_of(namespace))
                self.collections[uuid] = after
                yield Definition(entry.cluster_time, b"arrive", uuid, entry, one, after)
                return

    def _rename(self, entry: OplogEntry, uuid: bytes) -> Iterator[Definition]:
        body = entry.o
        assert body is not None
        fields = entry.command_fields()
        gone: list[SyncedCollection] = []
        dropped = fields.get(b"dropTarget")
        if dropped is not None and dropped.type == raw_bson.BINARY:
            other = raw_bson.value(body, dropped)[5:21]
            self._gone.add(other)
            if (lost := self.collections.pop(other, None)) is not None:
                gone.append(lost)
        name = _named(entry, b"to")
        found = self.collections.get(uuid)
        after = None
        if found is not None and self.has(name):
            pending = self._named(name)
            after = replace(found, namespace=name, target=self._target_of(name), pending=False)
            if pending is not None and pending.uuid != uuid:
                after = self._beside(after)
            self.collections[uuid] = after
        elif found is not None:
            self._gone.add(uuid)
            del self.collections[uuid]
        elif self.has(name) and uuid not in self._gone:
            self._refuse_stranger(entry, name)
        if found is not None or gone:
            yield Definition(entry.cluster_time, b"renameCollection", uuid, entry, found, after, tuple(gone))
        if found is not None and not found.pending:
            yield from self._arrive(entry, found.namespace)

    def _refuse_stranger(self, entry: OplogEntry, name: str) -> None:
        """A collection that the sync does not have gets a name that is synced. It was gone when the others were listed,
        or nobody has looked at it so far."""
        before = _named(entry, b"renameCollection")
        if entry.cluster_time <= self._hold and self.has(before):
            return
        raise UsageError(
            f"{in_a_line(before)}, which is not synced, was renamed to {in_a_line(name)}, which is, at "
            f"{entry.cluster_time}: what it held before is not on the target",
            hint="Begin the sync again with a selection that holds both names",
        )

    def _target_of(self, namespace: str) -> str:
        return target_of(self._settings, namespace)


def two_documents(namespace: str, identifier: bytes) -> SourceError:
    """The error where a sharded collection holds two documents with one ``_id``."""
    return SourceError(
        f"{in_a_line(namespace)} holds two documents with the _id {shown(raw_bson.encode_document(identifier))} on two "
        "shards, which a replica set cannot hold",
        hint="Give one of them another _id, or leave the collection out of the sync",
    )


def target_of(settings: SyncSettings, namespace: str) -> str:
    """What a collection is called on the target; the buckets of a time series are named after it."""
    if _BUCKETS not in namespace:
        return settings.target_of(namespace)
    database, _, name = settings.target_of(namespace.replace(_BUCKETS, ".", 1)).partition(".")
    return f"{database}{_BUCKETS}{name}"


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


def _entries(window: OplogWindow) -> Iterator[_Row]:
    """The entries that may matter, in order."""
    if len({run.member.name for run in window.runs}) < 2:
        yield from _plain_entries(window)
        return
    before: _Row | None = None
    for one in _plain_entries(window):
        if before is not None:
            yield before._replace(followed=one.time == before.time)
        before = one
    if before is not None:
        yield before


def _plain_entries(window: OplogWindow) -> Iterator[_Row]:
    for run, indexes in window.in_order():
        columns = entries_of_interest(run, indexes)
        for row, op, migrated, first, last, name, id_end, o, o_end, time in zip(*columns, strict=True):
            yield _Row(run, row, op, migrated, time & (2**64 - 1), first, last, name, id_end, o, o_end, False)


def _operations(one: _Row) -> Iterator[_Waiting]:
    """A command, or the operations of the transaction that it commits."""
    operations = one.run.member.operations(one.entry)
    if is_shard_commit(one.entry):
        for entry, key in net_operations(operations):
            yield _Waiting(one.run, entry, key or b"")
    else:
        # What a user's applyOps deletes or inserts need not have been there, or missing.
        unsure = b"applyOps\0" in one.entry and parse_entry(one.entry).lsid is None
        for entry in operations:
            yield _Waiting(one.run, entry, b"" if unsure else None)


def _named(entry: OplogEntry, field_name: bytes) -> str:
    assert entry.o is not None
    return _text(raw_bson.read_string(entry.o, entry.command_fields()[field_name].value_start))


def _text(name: bytes) -> str:
    """A name of the server's, with surrogates for what is not UTF-8."""
    return name.decode("utf-8", "surrogateescape")
