"""Transform: an oplog entry, or one operation of a transaction, becomes a change event (semantics 1.2, 2.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from tailrace.core import raw_bson
from tailrace.core.event.change_event import ChangeEvent, encode_namespace
from tailrace.core.event.resume_token import encode_event_token
from tailrace.core.event.update_description import describe_update
from tailrace.core.oplog.entry import OplogEntry, first_elements
from tailrace.core.oplog.entry_kinds import PASSED_OVER, count_kind
from tailrace.core.oplog.namespace import split_namespace
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import PreImageKey
from tailrace.core.raw_bson import (
    ARRAY,
    INT32,
    INT64,
    OBJECT,
    STRING,
    Element,
    encode_document,
    encode_element,
    encode_string,
)
from tailrace.core.stage.oplog_match import CRUD, END_OF_TRANSACTION
from tailrace.core.stage.setup import ShardSetup, ShardStage
from tailrace.errors import OplogFormatError

Elements = dict[bytes, Element]

#: Update descriptions of this much are given on before more are made.
_MADE_BYTES_MAX: Final = 32 * 1024 * 1024
SYSTEM_VIEWS: Final = b"system.views"
_VIEW_EVENTS: Final = {"i": "create", "u": "modify", "d": "drop"}
#: No-ops of the sharding code whose event bears the name of their field.
_NAMED_NO_OPS: Final = (
    b"shardCollection",
    b"refineCollectionShardKey",
    b"reshardCollection",
    b"migrateLastChunkFromShard",
)
_NAMED_SINCE_7_0: Final = (b"reshardBegin", b"reshardDoneCatchUp", b"migrateChunkToNewShard")
_NAMED_SINCE_8_1: Final = (b"reshardBlockingWrites",)
#: Of a collection's name: its buckets are themselves no time series.
_BUCKETS: Final = b"system.buckets."


class Transform(ShardStage):
    """Makes the events of a plan. Every entry that passed OplogMatch gives one event, or none (a command that 6.0 reads
    but has no event for)."""

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.plan)

    def __init__(self, plan: Plan) -> None:
        options = plan.options
        self._plan = plan
        self._expanded = options.show_expanded_events
        self._shows_views = options.scope.kind != "collection"
        self._raw_updates = options.show_raw_update_description
        self._disambiguates = self._expanded and plan.profile.disambiguated_paths
        self._wall_time = plan.shows_wall_time
        self._ns_type = plan.profile.ns_type
        self._describes_no_ops = plan.profile.describes_no_ops
        self._named_no_ops = (
            *_NAMED_NO_OPS,
            *(_NAMED_SINCE_7_0 if plan.profile.describes_no_ops else ()),
            *(_NAMED_SINCE_8_1 if plan.profile.shows_blocking_writes else ()),
        )
        self._ends_of_transactions = plan.profile.shows_ends_of_transactions
        self._refuses_old_updates = plan.profile.refuses_old_updates
        self._finds_logged_images = plan.finds_logged_images
        self._image_first = plan.reads_logged_images
        self._replaces_by_id = plan.profile.replacements_may_have_v
        self._images_come_last = plan.profile.places == "none"
        self.left: list[OplogEntry] = []
        #: Counts updates in an unknown form, by kind.
        self.unknown_operations: dict[str, int] = {}
        token = plan.start_token
        self._searched = None if token is None or token.is_high_water_mark else token

    def process(self, entries: list[OplogEntry], out: list[ChangeEvent]) -> None:
        """Append the events of ``entries`` to ``out``; what is there when an error is raised comes before it.

        Short entries may make long events, so it stops when those made are many bytes: the entries that it did not come
        to are ``left``.
        """
        self.left = []
        made = 0
        for position, entry in enumerate(entries):
            event = self.event(entry)
            if event is None:
                continue
            out.append(event)
            made += len(event.update_description or b"")
            if made > _MADE_BYTES_MAX:
                self.left = entries[position + 1 :]
                return

    def event(self, entry: OplogEntry) -> ChangeEvent | None:
        """The event of one entry. Raises ``OplogFormatError`` with the entry's position."""
        try:
            if entry.operation in CRUD:
                if self._shows_views and split_namespace(entry.namespace)[1] == SYSTEM_VIEWS:
                    return self._view(entry)
                return self._crud(entry)
            return self._command(entry) if entry.operation == "c" else self._no_op(entry)
        except OplogFormatError as error:
            if error.position is not None and error.position.startswith("oplog entry"):
                raise
            within = f"{entry.position}, {error.position}" if error.position else entry.position
            raise OplogFormatError(error.message, position=within, code=error.code) from None

    def _version(self, entry: OplogEntry) -> int:
        """The version of an event's token: the stream's, but that of the token searched for up to its place, so that
        the two can be compared."""
        token = self._searched
        if token is None:
            return self._plan.token_version
        if entry.cluster_time > token.cluster_time or entry.txn_op_index > token.txn_op_index:
            return self._plan.token_version
        return token.version

    def _start_event(
        self, entry: OplogEntry, operation_type: str, identifier: bytes | None, *, version: int, uuid: bytes | None
    ) -> ChangeEvent:
        """An event with its token and the fields that every event shares."""
        token = encode_event_token(
            entry.cluster_time,
            version=version,
            txn_op_index=entry.txn_op_index,
            from_invalidate=False,
            uuid=uuid,
            identifier=identifier,
        )
        event = ChangeEvent(operation_type, entry.cluster_time, token)
        if self._wall_time:
            if entry.wall_ms is None:
                raise OplogFormatError(
                    'Entry field "wall" should be date, found: missing', position=entry.position, code=40532
                )
            event.wall_time_ms = entry.wall_ms
        if entry.in_transaction:
            event.txn_number, event.lsid = entry.txn_number, entry.lsid
        return event

    # -- documents ------------------------------------------------------------------------------------------------

    def _keyed(self, entry: OplogEntry, operation_type: str, key: bytes | None) -> ChangeEvent:
        """An event that its document key identifies: bare in version 1, with the operation type in version 2."""
        version = self._version(entry)
        identifier = key
        if version == 2:
            parts = [_operation_type(operation_type)]
            if key is not None:
                parts.append(encode_element(OBJECT, b"documentKey", key))
            identifier = encode_document(*parts)
        return self._start_event(entry, operation_type, identifier, version=version, uuid=entry.collection_uuid)

    def _crud(self, entry: OplogEntry) -> ChangeEvent:
        body, uuid = entry.o, entry.collection_uuid
        if body is None:
            raise OplogFormatError("a CRUD entry has no document 'o'", position=entry.position)
        if uuid is None:
            raise OplogFormatError("a CRUD entry has no collection UUID 'ui'", position=entry.position)
        if entry.operation == "i":
            key = _document_id(body) if entry.o2 is None else entry.o2
            event = self._keyed(entry, "insert", key)
            event.full_document = body
        elif entry.operation == "d":
            key = body
            event = self._keyed(entry, "delete", key)
        else:
            key = entry.o2  # type: ignore[assignment]
            event = self._update(entry, body)
        event.namespace = split_namespace(entry.namespace)
        event.document_key = key
        if self._expanded:
            event.collection_uuid = uuid
        if entry.operation != "i":
            event.image_key = PreImageKey(uuid, entry.image_time, entry.image_index)
            event.logged_image = entry.logged_image if self._finds_logged_images else None
            event.image_first = self._image_first and event.logged_image is not None
        return event

    def _update(self, entry: OplogEntry, body: bytes) -> ChangeEvent:
        if self._refuses_old_updates:
            refuse_old_update(body, by_id=self._replaces_by_id)
        if is_replacement(body, by_id=self._replaces_by_id):
            event = self._keyed(entry, "replace", entry.o2)
            event.full_document = body
            return event
        self._count_version(body)
        event = self._keyed(entry, "update", entry.o2)
        event.update_is_raw = self._raw_updates
        event.raw_update = body
        event.lookup_uuid = entry.collection_uuid
        event.image_comes_last = self._images_come_last
        event.update_description = (
            body if self._raw_updates else describe_update(body, disambiguated_paths=self._disambiguates)
        )
        return event

    def _count_version(self, body: bytes) -> None:
        """An update in a form that no version up to 6.0 writes. The servers take it for the old form, and show nothing
        of a delta: so is it shown here, and counted."""
        version = raw_bson.find(body, b"$v")
        if version is not None and (number := raw_bson.read_int32(body, version.value_start)) not in (1, 2):
            for counted in (self.unknown_operations, PASSED_OVER):
                count_kind(counted, f"update $v {number}, shown as an old one")

    # -- definitions ----------------------------------------------------------------------------------------------

    def _described(self, entry: OplogEntry, operation_type: str, description: bytes) -> ChangeEvent:
        """An event that its operationDescription identifies, whether or not the stream shows it.

        A version 1 token of a rename has no identifier: that event is older than the descriptions.
        """
        version = self._version(entry)
        identifier: bytes | None = None
        if version == 2 or operation_type != "rename":
            identifier = encode_document(
                _operation_type(operation_type), encode_element(OBJECT, b"operationDescription", description)
            )
        event = self._start_event(entry, operation_type, identifier, version=version, uuid=entry.collection_uuid)
        if self._expanded:
            event.operation_description = description
            event.collection_uuid = entry.collection_uuid
        return event

    def _named(self, entry: OplogEntry, operation_type: str, uuid: bytes | None) -> ChangeEvent:
        """An event that nothing but its operation type identifies, and that only in version 2."""
        version = self._version(entry)
        identifier = encode_document(_operation_type(operation_type)) if version == 2 else None
        event = self._start_event(entry, operation_type, identifier, version=version, uuid=uuid)
        if self._expanded:
            event.collection_uuid = uuid
        return event

    def _view(self, entry: OplogEntry) -> ChangeEvent:
        """A write to ``system.views``: the view's namespace is the ``_id``. The token has the UUID of system.views, the
        event shows none."""
        body = entry.o
        if body is None:
            raise OplogFormatError("a CRUD entry has no document 'o'", position=entry.position)
        name = _text(body, raw_bson.find(body, b"_id"), entry)
        if entry.operation == "d":
            event = self._named(entry, "drop", entry.collection_uuid)
        else:
            description = _without(body, b"_id")
            event = self._described(entry, _VIEW_EVENTS[entry.operation], description)
            if self._ns_type and event.operation_type == "create":
                event.ns_type = _view_type(description)
        event.collection_uuid = None
        event.namespace = split_namespace(name)
        return event

    def _command(self, entry: OplogEntry) -> ChangeEvent | None:
        body = entry.o
        if body is None:
            raise OplogFormatError("a command entry has no document 'o'", position=entry.position)
        fields = first_elements(body)
        for name, build in _COMMANDS.items():
            if name in fields:
                return build(self, entry, body, fields)
        return None

    def _drop(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        collection = _text(body, fields[b"drop"], entry)
        event = self._named(entry, "drop", entry.collection_uuid)
        event.namespace = (split_namespace(entry.namespace)[0], collection)
        return event

    def _drop_database(self, entry: OplogEntry, _body: bytes, _fields: Elements) -> ChangeEvent:
        event = self._named(entry, "dropDatabase", None)
        event.namespace = (split_namespace(entry.namespace)[0], None)
        return event

    def _rename(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        source = split_namespace(_text(body, fields[b"renameCollection"], entry))
        target = split_namespace(_text(body, fields.get(b"to"), entry))
        parts: list[bytes] = []
        for element in raw_bson.elements(body):
            if element.name == b"to":
                parts.append(encode_element(OBJECT, b"to", encode_namespace(*target)))
            elif element.name not in (b"renameCollection", b"stayTemp"):
                parts.append(body[element.start : element.end])
        event = self._described(entry, "rename", encode_document(*parts))
        event.namespace, event.to = source, target
        return event

    def _create(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        collection = _text(body, fields[b"create"], entry)
        event = self._on_collection(entry, "create", _without(body, b"create"), collection)
        if self._ns_type and self._expanded:
            is_series = b"timeseries" in fields and not collection.startswith(_BUCKETS)
            event.ns_type = "timeseries" if is_series else "collection"
        return event

    def _create_indexes(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        collection = _text(body, fields[b"createIndexes"], entry)
        return self._on_collection(entry, "createIndexes", _indexes(_without(body, b"createIndexes")), collection)

    def _commit_index_build(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        return self._index_build(entry, "createIndexes", _text(body, fields[b"commitIndexBuild"], entry), fields)

    def _start_index_build(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        return self._index_build(entry, "startIndexBuild", _text(body, fields[b"startIndexBuild"], entry), fields)

    def _abort_index_build(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        return self._index_build(entry, "abortIndexBuild", _text(body, fields[b"abortIndexBuild"], entry), fields)

    def _index_build(self, entry: OplogEntry, operation_type: str, collection: bytes, fields: Elements) -> ChangeEvent:
        """An event about an index build, which shows the command's ``indexes`` and nothing else of it."""
        body, indexes = entry.o or raw_bson.EMPTY_DOCUMENT, fields.get(b"indexes")
        description = encode_document(b"" if indexes is None else body[indexes.start : indexes.end])
        return self._on_collection(entry, operation_type, description, collection)

    def _drop_indexes(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent | None:
        collection = _text(body, fields[b"dropIndexes"], entry)
        if entry.o2 is None and not self._expanded:
            return None  # the stream would not show it: the server does not look
        if entry.o2 is None:
            raise OplogFormatError("a dropIndexes entry has no document 'o2'", position=entry.position)
        return self._on_collection(entry, "dropIndexes", _indexes(_without(entry.o2, b"dropIndexes")), collection)

    def _modify(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent | None:
        collection = _text(body, fields[b"collMod"], entry)
        if entry.o2 is None and not self._expanded:
            return None
        if entry.o2 is None:
            raise OplogFormatError("a collMod entry has no document 'o2'", position=entry.position)
        event = self._on_collection(entry, "modify", _without(body, b"collMod"), collection)
        if self._expanded:
            old = first_elements(entry.o2)
            event.state_before_change = encode_document(
                *(
                    encode_element(old[stored].type, shown, raw_bson.value(entry.o2, old[stored]))
                    for stored, shown in (
                        (b"collectionOptions_old", b"collectionOptions"),
                        (b"indexOptions_old", b"indexOptions"),
                    )
                    if stored in old
                )
            )
        return event

    def _on_collection(
        self, entry: OplogEntry, operation_type: str, description: bytes, collection: bytes
    ) -> ChangeEvent:
        event = self._described(entry, operation_type, description)
        event.namespace = (split_namespace(entry.namespace)[0], collection)
        return event

    def _no_op(self, entry: OplogEntry) -> ChangeEvent:
        """A shard's announcement: by the field's name, or in the older form by ``type`` and, before 7.0, with the whole
        ``o2`` as its key."""
        body = entry.o2 or raw_bson.EMPTY_DOCUMENT
        fields = first_elements(body)
        for name in self._named_no_ops:
            if name in fields:
                return self._described_no_op(entry, name.decode(), _without(body, name))
        if self._ends_of_transactions and END_OF_TRANSACTION in fields:
            return self._end_of_transaction(entry, body, fields)
        kind = _text(body, fields.get(b"type"), entry).decode("utf-8", "replace")
        if self._describes_no_ops:
            return self._described_no_op(entry, kind, _without(body, b"type"))
        if kind == "migrateChunkToNewShard":
            kind = "kNewShardDetected"
        event = self._keyed(entry, kind, encode_document(encode_element(OBJECT, b"_id", body)))
        event.resharding_uuid = _resharding_uuid(body)
        if self._expanded:
            event.collection_uuid = entry.collection_uuid
        return event

    def _described_no_op(self, entry: OplogEntry, operation_type: str, description: bytes) -> ChangeEvent:
        event = self._described(entry, operation_type, description)
        event.namespace = split_namespace(entry.namespace)
        event.resharding_uuid = _resharding_uuid(description)
        return event

    def _end_of_transaction(self, entry: OplogEntry, body: bytes, fields: Elements) -> ChangeEvent:
        """About the namespaces that ``endOfTransaction`` lists, so it has no ``ns``. Its session is shown twice."""
        event = self._described(entry, END_OF_TRANSACTION.decode(), _without(body, END_OF_TRANSACTION))
        number = _checked(body, fields, b"txnNumber", INT64)
        event.txn_number = None if number is None else int.from_bytes(number, "little", signed=True)
        event.lsid = _checked(body, fields, b"lsid", OBJECT)
        return event


def _checked(body: bytes, fields: Elements, name: bytes, wanted: int) -> bytes | None:
    """The value of a field that has to be of one type where it is there."""
    element = fields.get(name)
    if element is None:
        return None
    if element.type != wanted:
        types = f"{raw_bson.type_name(wanted)}, found: {raw_bson.type_name(element.type)}"
        raise OplogFormatError(f'Entry field "{name.decode()}" should be {types}', code=40532)
    return raw_bson.value(body, element)


def _resharding_uuid(announcement: bytes) -> bytes | None:
    """What the event shows at its top too."""
    uuid = raw_bson.find(announcement, b"reshardingUUID")
    return None if uuid is None else raw_bson.value(announcement, uuid)


#: The command entries that give events, by the field that names them, in the order in which they are tried.
_COMMANDS: Final[dict[bytes, Callable[[Transform, OplogEntry, bytes, Elements], ChangeEvent | None]]] = {
    b"drop": Transform._drop,
    b"renameCollection": Transform._rename,
    b"dropDatabase": Transform._drop_database,
    b"create": Transform._create,
    b"createIndexes": Transform._create_indexes,
    b"commitIndexBuild": Transform._commit_index_build,
    b"startIndexBuild": Transform._start_index_build,
    b"abortIndexBuild": Transform._abort_index_build,
    b"dropIndexes": Transform._drop_indexes,
    b"collMod": Transform._modify,
}


def _view_type(description: bytes) -> str:
    """A view on time-series buckets is how a time-series collection is defined."""
    source = raw_bson.find(description, b"viewOn")
    if source is not None and source.type == STRING:
        name = raw_bson.read_string(description, source.value_start)
        if name.startswith(_BUCKETS):
            return "timeseries"
    return "view"


def _operation_type(name: str) -> bytes:
    return encode_element(STRING, b"operationType", encode_string(name))


def _text(body: bytes, element: Element | None, entry: OplogEntry) -> bytes:
    if element is None or element.type != STRING:
        raise OplogFormatError("an entry does not name its collection by a string", position=entry.position)
    return raw_bson.read_string(body, element.value_start)


def _without(document: bytes, name: bytes) -> bytes:
    """The document less every field of that name; what remains is copied as it stands."""
    return encode_document(*(document[e.start : e.end] for e in raw_bson.elements(document) if e.name != name))


def _indexes(index: bytes) -> bytes:
    """``{indexes: [index]}``: the description of one index created or dropped."""
    array = encode_document(encode_element(OBJECT, b"0", index))
    return encode_document(encode_element(ARRAY, b"indexes", array))


def _document_id(document: bytes) -> bytes:
    """``{_id: ...}`` of an inserted document: its key where the entry has no ``o2`` (servers before 5.3)."""
    element = raw_bson.find(document, b"_id")
    return raw_bson.EMPTY_DOCUMENT if element is None else encode_document(document[element.start : element.end])


def refuse_old_update(body: bytes, *, by_id: bool = False) -> None:
    """Raise ``OplogFormatError`` for the form of update that 7.0 no longer reads: ``$v: 1``, or no ``$v`` at all. With
    ``by_id`` an ``_id`` makes it none of that form, whatever its ``$v``."""
    version = raw_bson.find(body, b"$v")
    if (version is None or by_id) and raw_bson.find(body, b"_id") is not None:
        return
    number = 0
    if version is not None:
        if version.type == INT32:
            number = raw_bson.read_int32(body, version.value_start)
        elif not by_id:
            return  # is_replacement says so
    if number != 2:
        raise OplogFormatError(f"Unsupported or missing oplog version, $v: {number}", code=6741200)


def is_replacement(body: bytes, *, by_id: bool = False) -> bool:
    """Whether an update entry holds the whole new document: it has an ``_id`` and is not a delta of ``$v: 2``.

    Up to 8.2 a user's own field ``$v`` is read like the entry's: such a server cannot tell them apart either. With
    ``by_id`` the ``_id`` alone decides: a delta has none.
    """
    version = None if by_id else raw_bson.find(body, b"$v")
    if version is not None:
        if version.type != INT32:
            raise OplogFormatError("the field '$v' of an update entry is not a 32-bit integer")
        if raw_bson.read_int32(body, version.value_start) == 2:
            return False
    return raw_bson.find(body, b"_id") is not None
