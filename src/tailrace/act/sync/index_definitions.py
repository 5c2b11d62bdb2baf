"""Indexes and options of collections, as the source's entries define them.

Indexes are built by a plain command, which the server does not take into ``applyOps``. So an owner that was stopped
between the check of its lease and this command may build an index again that was dropped meanwhile; that changes no
document.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.client_session import ClientSession

from tailrace.act.sync import indexes
from tailrace.act.sync.catalog import CLUSTERED, TTL_MAX, edited, name_of, truth_of
from tailrace.act.sync.commands import DONE_BEFORE, TargetCommands
from tailrace.act.sync.folded_catalog import Definition
from tailrace.act.sync.state import SyncedCollection, SyncState
from tailrace.act.sync.target import answered
from tailrace.core import raw_bson
from tailrace.core.oplog.entry import OplogEntry
from tailrace.errors import SinkError

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
_log = logging.getLogger("tailrace.sync")
#: What is to be noted with the next position.
Note = Callable[[ClientSession], None]


class IndexDefinitions:
    """Carries out what entries say about indexes and options, by ``commands``."""

    def __init__(self, state: SyncState, commands: TargetCommands) -> None:
        self._state = state
        self._commands = commands
        self._target = commands.client

    def build(self, definition: Definition, *, consistent: bool) -> list[Note]:
        collection = definition.before
        assert collection is not None
        body, notes = body_of(definition.entry), list[Note]()
        specs = _specs(definition.name, body)
        for listed in specs:
            spec = edited(listed, [b"ns"])
            if indexes.waits(spec) and not consistent:
                notes.append(self.note(collection.uuid, spec, there=False))
                continue
            try:
                self._build_one(collection, spec)
            except SinkError as error:
                if consistent or error.code is None:
                    raise
                # A later document is there already, which the source got only without the index.
                _log.info("the index %s of %s waits: %s", name_of(spec), collection.target, error.message)
                notes.append(self.note(collection.uuid, spec, there=False))
                continue
            if indexes.expires(spec):
                notes.append(self.note(collection.uuid, spec, there=True))
        return notes

    def _build_one(self, collection: SyncedCollection, spec: bytes) -> None:
        indexes.build(
            self._target,
            collection.target,
            [spec],
            self._commands.version,
            has_collation=self._has_collation(collection),
            check=self._commands.ownership.check,
        )

    def _has_collation(self, collection: SyncedCollection) -> bool:
        database, _, name = collection.target.partition(".")
        found = answered(
            f"list {collection.target}",
            lambda: list(self._target[database].list_collections(filter={"name": name})),
            check=self._commands.ownership.check,
        )
        return bool(found) and "collation" in found[0]["options"]

    def note(self, uuid: bytes, spec: bytes, *, there: bool) -> Note:
        state, fields = self._state, indexes.noted(spec, there=there)
        return lambda session: state.note_index(uuid, name_of(spec), fields, session)

    def drop(self, definition: Definition) -> list[Note]:
        collection, body = definition.before, body_of(definition.entry)
        assert collection is not None
        index = _text(body, b"index")
        database, _, name = collection.target.partition(".")
        command = raw_bson.encode_document(string_of(b"dropIndexes", name), string_of(b"index", index))
        self._commands.operate(
            database, collection.target_uuid, command, f"drop the index {index} of {collection.target}"
        )
        state, uuid = self._state, collection.uuid
        return [lambda session: state.forget_index(uuid, index, session)]

    def modify(self, definition: Definition, *, consistent: bool) -> list[Note]:
        collection, body = definition.before, body_of(definition.entry)
        assert collection is not None
        database, _, name = collection.target.partition(".")
        notes: list[Note] = []
        options = edited(body, [b"collMod"])
        index = raw_bson.find(options, b"index")
        if index is not None and index.type == raw_bson.OBJECT:
            part = raw_bson.value(options, index)
            options = edited(options, [b"index"])
            left = self._modify_index(collection, part, notes, consistent=consistent)
            if left is not None:
                options = edited(options, added=[raw_bson.encode_element(raw_bson.OBJECT, b"index", left)])
        if (limit := raw_bson.find(options, b"expireAfterSeconds")) is not None:
            named = string_of(b"name", CLUSTERED)
            held = raw_bson.encode_document(named, options[limit.start : limit.end])
            notes.append(self.note(collection.uuid, held, there=True))
            options = edited(options, [b"expireAfterSeconds"])
        if self._commands.version >= (7, 0):
            options = edited(options, [b"recordPreImages"])
        if len(options) > len(raw_bson.EMPTY_DOCUMENT):
            command = raw_bson.encode_document(string_of(b"collMod", name), options[4:-1])
            self._commands.operate(database, collection.target_uuid, command, f"alter {collection.target}")
        return notes

    def _modify_index(
        self, collection: SyncedCollection, part: bytes, notes: list[Note], *, consistent: bool
    ) -> bytes | None:
        """What of an index's new options goes to the target now; ``None``: nothing. The rest is noted."""
        index = _text(part, b"name")
        noted = {
            one["_id"]["name"]: one for one in self._state.indexes() if bytes(one["_id"]["uuid"]) == collection.uuid
        }
        spec = bytes(noted[index]["spec"]) if index in noted else self._listed(collection, index)
        if spec is None:
            return None  # dropped meanwhile, by what was done before
        there = index not in noted or bool(noted[index]["there"])
        changed = edited(part, [b"name", b"keyPattern"])
        for element in raw_bson.elements(changed):
            option = changed[element.start : element.end]
            off = element.type == raw_bson.BOOL and changed[element.value_start] == 0
            spec = edited(spec, [element.name], () if off else [option])
        if truth_of(spec, b"unique"):
            spec = edited(spec, [b"prepareUnique"])
        if indexes.waits(spec) and not consistent:
            if there:
                database, _, name = collection.target.partition(".")
                command = raw_bson.encode_document(string_of(b"dropIndexes", name), string_of(b"index", index))
                self._commands.operate(database, collection.target_uuid, command, f"set the index {index} aside")
            notes.append(self.note(collection.uuid, spec, there=False))
            return None
        if not there:
            notes.append(self.note(collection.uuid, spec, there=False))
            return None
        if indexes.expires(spec):
            notes.append(self.note(collection.uuid, spec, there=True))
            if raw_bson.find(changed, b"expireAfterSeconds") is not None:
                return self._held_part(collection, index, part)
        return part

    def _held_part(self, collection: SyncedCollection, index: str, part: bytes) -> bytes | None:
        """The new options with the limit of age at its maximum."""
        seconds = raw_bson.encode_element(raw_bson.INT32, b"expireAfterSeconds", raw_bson.encode_int32(TTL_MAX))
        there = self._listed(collection, index)
        if there is not None and raw_bson.find(there, b"expireAfterSeconds") is not None:
            left = edited(part, [b"expireAfterSeconds"])
            return left if sum(1 for _ in raw_bson.elements(left)) > 1 else None
        return edited(part, [b"expireAfterSeconds"], [seconds])

    def _listed(self, collection: SyncedCollection, index: str) -> bytes | None:
        """An index of the target as the server lists it."""
        database, _, name = collection.target.partition(".")
        there = self._target.get_database(database, codec_options=_RAW)

        def ask() -> bytes | None:
            with there.cursor_command({"listIndexes": name}, codec_options=_RAW) as cursor:
                return next((raw_bson.bytes_of(one) for one in cursor if one["name"] == index), None)

        try:
            return answered(f"list the indexes of {collection.target}", ask, check=self._commands.ownership.check)
        except SinkError as error:
            if error.code in DONE_BEFORE:
                return None
            raise


def body_of(entry: OplogEntry) -> bytes:
    assert entry.o is not None
    return entry.o


def _specs(name: bytes, body: bytes) -> list[bytes]:
    """The definitions of the indexes that an entry made."""
    if name == b"createIndexes":
        return [edited(body, [b"createIndexes"])]
    array = raw_bson.find(body, b"indexes")
    if array is None or array.type != raw_bson.ARRAY:
        return []
    return [raw_bson.value(body, one) for one in raw_bson.elements(body, array.value_start)]


def string_of(name: bytes, text: str) -> bytes:
    return raw_bson.encode_element(
        raw_bson.STRING, name, raw_bson.encode_string(text.encode("utf-8", "surrogateescape"))
    )


def _text(document: bytes, name: bytes) -> str:
    found = raw_bson.find(document, name)
    if found is None or found.type != raw_bson.STRING:
        return ""
    return raw_bson.read_string(document, found.value_start).decode("utf-8", "surrogateescape")
