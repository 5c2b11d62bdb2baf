"""Definitions of the source carried out on the target, in order.

They go as ``applyOps``, by UUID where the server knows one: then each can be carried out twice, whatever has happened
between, and a fence stands before it (``Ownership.fence_operation``). A user who may not do that gives plain commands.

Indexes are built by a plain command, which the server does not take into ``applyOps``. An owner that was stopped in the
moment between the check of its lease and this command may so build an index once more that was dropped meanwhile; it
can change no document by that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import NetworkTimeout, OperationFailure, PyMongoError

from tailrace.act.sync import indexes
from tailrace.act.sync.catalog import TTL_MAX, edited, name_of, replaced, truth_of, version_of
from tailrace.act.sync.fold import CappedChange, Definition, target_of
from tailrace.act.sync.ownership import Ownership
from tailrace.act.sync.state import SyncedCollection, SyncState
from tailrace.act.sync.target import MAJORITY, is_worth_again, sink_error
from tailrace.act.sync.writer import TargetMismatchError
from tailrace.core import raw_bson
from tailrace.core.oplog.entry import OplogEntry
from tailrace.core.printable import in_a_line
from tailrace.errors import SinkError, UsageError
from tailrace.read.images.delta import apply_operation
from tailrace.read.source.failure import Backoff
from tailrace.read.window.apply import INSERT, LETTERS

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
RETRY_SECONDS: Final = 120.0
_UNAUTHORIZED: Final = 13
#: There is no such collection or index: it was done before.
_DONE_BEFORE: Final = (26, 27)
_DROPS: Final = frozenset((b"dropIndexes", b"deleteIndexes", b"dropIndex", b"deleteIndex"))
#: ``applyOps`` takes so many bytes at a time of capped collections' changes.
_CAPPED_BYTES: Final = 8 << 20
#: Before, nobody deletes from a capped collection but the server, when it makes room.
_CAPPED_DELETES_SINCE: Final = (6, 0)

_log = logging.getLogger("tailrace.sync")
#: What is to be noted with the next position.
Note = Callable[[ClientSession], None]


class Definitions:
    """Carries out definitions on the target of ``state``."""

    def __init__(self, state: SyncState, ownership: Ownership) -> None:
        self._state = state
        self._target: MongoClient[Any] = state.client
        self._ownership = ownership
        self.version = version_of(self._target)
        #: Whether this user may give operations by UUID.
        self._by_uuid = True

    def carry_out(self, definition: Definition, *, consistent: bool) -> list[Note]:
        """Carry out a definition, which may have been done before. ``consistent``: the target equals the source just
        before it. Returns what is to be noted with the position after it. Raises SinkError, LeaseLost."""
        name = definition.name
        if name == b"view":
            self._view(definition)
            return []
        if name == b"views":
            self._drop_views(definition)
            return []
        if name == b"create":
            return self._create(definition)
        if name == b"spread":  # its documents are on several shards from now on
            assert definition.after is not None
            return [self._note(definition.after)]
        if name in (b"renameCollection", b"arrive"):
            return self._rename(definition)
        if name == b"drop":
            assert definition.before is not None
            return [self._drop(definition.before)]
        if name in (b"createIndexes", b"commitIndexBuild"):
            return self._build(definition, consistent=consistent)
        if name in _DROPS:
            return self._drop_index(definition)
        if name == b"collMod":
            return self._modify(definition, consistent=consistent)
        return []

    # -- collections ------------------------------------------------------------------------------------------------

    def _create(self, definition: Definition) -> list[Note]:
        made, body = definition.after, _body(definition.entry)
        assert made is not None
        database, _, name = made.target.partition(".")
        notes: list[Note] = [self._note(made)]
        without = [b"create"]
        if (limit := indexes.clustered_limit(body)) is not None:
            without.append(b"expireAfterSeconds")
            notes.append(self._note_index(made.uuid, limit, there=True))
        if self.version >= (7, 0):
            without.append(b"recordPreImages")
        command = raw_bson.encode_document(_string(b"create", name), edited(body, without)[4:-1])
        self._operate(database, made.target_uuid, command, f"create {made.target}", plain=edited(command, [b"temp"]))
        return notes

    def _drop(self, collection: SyncedCollection) -> Note:
        database, _, name = collection.target.partition(".")
        command = raw_bson.encode_document(_string(b"drop", name))
        self._operate(database, collection.target_uuid, command, f"drop {collection.target}")
        state, uuid = self._state, collection.uuid
        return lambda session: state.forget_collection(uuid, session)

    def _rename(self, definition: Definition) -> list[Note]:
        before, after = definition.before, definition.after
        notes = [self._drop(one) for one in definition.gone]
        if before is None:
            return notes
        if after is None:
            return [*notes, self._drop(before)]
        if before.target != after.target:
            database, new = before.target.partition(".")[0], after.target.partition(".")[0]
            if database != new:
                raise UsageError(
                    f"{in_a_line(before.target)} cannot be renamed to {in_a_line(after.target)} on the target: the new "
                    "names of this sync put them into two databases",
                    hint="Rename whole databases (shop=store) rather than single collections",
                )
            command = raw_bson.encode_document(
                _string(b"renameCollection", before.target),
                _string(b"to", after.target),
                raw_bson.encode_element(raw_bson.BOOL, b"stayTemp", b"\0"),
            )
            plain = raw_bson.encode_document(_string(b"renameCollection", before.target), _string(b"to", after.target))
            what = f"rename {before.target} to {after.target}"
            self._operate(database, before.target_uuid, command, what, plain=plain, at="admin")
        return [*notes, self._note(after)]

    def _note(self, collection: SyncedCollection) -> Note:
        state = self._state
        return lambda session: state.set_collection(collection, session)

    # -- views ------------------------------------------------------------------------------------------------------

    def _view(self, definition: Definition) -> None:
        """The server keeps views as documents: they are written as such."""
        entry = definition.entry
        document = entry.o2 if entry.operation == "u" and entry.o2 is not None else _body(entry)
        named = raw_bson.find(document, b"_id")
        if named is None or named.type != raw_bson.STRING:
            return
        source = raw_bson.read_string(document, named.value_start).decode("utf-8", "surrogateescape")
        settings = self._state.settings
        if not settings.has(source):
            return
        target = target_of(settings, source)
        database = target.partition(".")[0]
        operation: dict[str, Any] = {"op": entry.operation, "ns": f"{database}.system.views"}
        key = raw_bson.encode_document(_string(b"_id", target))
        if entry.operation == "d":
            operation["o"] = RawBSONDocument(key)
        else:
            operation["o"] = RawBSONDocument(self._view_body(entry, source, target, key))
            operation["op"] = "i" if self._read_view(database, key) is None else "u"
            if operation["op"] == "u":
                operation["o2"] = RawBSONDocument(key)
            self._make_views(database)
        if entry.operation != "d" or self._read_view(database, key) is not None:
            self._apply([operation], f"define the view {target}")

    def _make_views(self, database: str) -> None:
        """The server makes the collection of views with the first one."""
        if self._listed_views(database) is None:
            made = {"op": "c", "ns": f"{database}.$cmd", "o": {"create": "system.views"}}
            self._apply([made], f"create {database}.system.views")

    def _listed_views(self, database: str) -> bytes | None:
        """The UUID of the collection of views; ``None``: there is none."""
        try:
            found = list(self._target[database].list_collections(filter={"name": "system.views"}))
        except PyMongoError as error:
            raise sink_error("list the views", error) from error
        return bytes(found[0]["info"]["uuid"]) if found else None

    def _drop_views(self, definition: Definition) -> None:
        """The views of a database go with it. Those that are not of this sync stay."""
        settings = self._state.settings
        database = settings.target_of(f"{definition.entry.namespace.decode().partition('.')[0]}.x").partition(".")[0]
        uuid = self._listed_views(database)
        if uuid is None:
            return
        command = raw_bson.encode_document(_string(b"drop", "system.views"))
        self._operate(database, uuid, command, f"drop the views of {database}")

    def _view_body(self, entry: OplogEntry, source: str, target: str, key: bytes) -> bytes:
        body = _body(entry)
        if entry.operation == "u":
            found = apply_operation(self._read_view(target.partition(".")[0], key), b"u", body, again=True)
            body = found or body
        on = raw_bson.find(body, b"viewOn")
        if on is not None and on.type == raw_bson.STRING:
            below = raw_bson.read_string(body, on.value_start).decode("utf-8", "surrogateescape")
            renamed = target_of(self._state.settings, f"{source.partition('.')[0]}.{below}").partition(".")[2]
            body = replaced(body, b"viewOn", _string(b"viewOn", renamed))
        return replaced(body, b"_id", _string(b"_id", target))

    def _read_view(self, database: str, key: bytes) -> bytes | None:
        try:
            found = self._target.get_database(database, codec_options=_RAW)["system.views"].find_one(
                RawBSONDocument(key)
            )
        except PyMongoError as error:
            raise sink_error("read the views", error) from error
        return None if found is None else bytes(found.raw)

    # -- indexes and options ----------------------------------------------------------------------------------------

    def _build(self, definition: Definition, *, consistent: bool) -> list[Note]:
        collection = definition.before
        assert collection is not None
        body, notes = _body(definition.entry), list[Note]()
        specs = _specs(definition.name, body)
        for listed in specs:
            spec = edited(listed, [b"ns"])
            if indexes.waits(spec) and not consistent:
                notes.append(self._note_index(collection.uuid, spec, there=False))
                continue
            try:
                self._build_one(collection, spec)
            except SinkError as error:
                if consistent or error.code is None:
                    raise
                # A later document is there already, which the source got only without the index.
                _log.info("the index %s of %s waits: %s", name_of(spec), collection.target, error.message)
                notes.append(self._note_index(collection.uuid, spec, there=False))
                continue
            if indexes.expires(spec):
                notes.append(self._note_index(collection.uuid, spec, there=True))
        return notes

    def _build_one(self, collection: SyncedCollection, spec: bytes) -> None:
        indexes.build(
            self._target,
            collection.target,
            [spec],
            self.version,
            has_collation=self._has_collation(collection),
            check=self._ownership.check,
        )

    def _has_collation(self, collection: SyncedCollection) -> bool:
        database, _, name = collection.target.partition(".")
        try:
            found = list(self._target[database].list_collections(filter={"name": name}))
        except PyMongoError as error:
            raise sink_error(f"list {collection.target}", error) from error
        return bool(found) and "collation" in found[0]["options"]

    def _note_index(self, uuid: bytes, spec: bytes, *, there: bool) -> Note:
        state, fields = self._state, indexes.noted(spec, there=there)
        return lambda session: state.note_index(uuid, name_of(spec), fields, session)

    def _drop_index(self, definition: Definition) -> list[Note]:
        collection, body = definition.before, _body(definition.entry)
        assert collection is not None
        index = _text(body, b"index")
        database, _, name = collection.target.partition(".")
        command = raw_bson.encode_document(_string(b"dropIndexes", name), _string(b"index", index))
        self._operate(database, collection.target_uuid, command, f"drop the index {index} of {collection.target}")
        state, uuid = self._state, collection.uuid
        return [lambda session: state.forget_index(uuid, index, session)]

    def _modify(self, definition: Definition, *, consistent: bool) -> list[Note]:
        collection, body = definition.before, _body(definition.entry)
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
            named = _string(b"name", indexes.CLUSTERED)
            held = raw_bson.encode_document(named, options[limit.start : limit.end])
            notes.append(self._note_index(collection.uuid, held, there=True))
            options = edited(options, [b"expireAfterSeconds"])
        if self.version >= (7, 0):
            options = edited(options, [b"recordPreImages"])
        if len(options) > len(raw_bson.EMPTY_DOCUMENT):
            command = raw_bson.encode_document(_string(b"collMod", name), options[4:-1])
            self._operate(database, collection.target_uuid, command, f"alter {collection.target}")
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
                command = raw_bson.encode_document(_string(b"dropIndexes", name), _string(b"index", index))
                self._operate(database, collection.target_uuid, command, f"set the index {index} aside")
            notes.append(self._note_index(collection.uuid, spec, there=False))
            return None
        if not there:
            notes.append(self._note_index(collection.uuid, spec, there=False))
            return None
        if indexes.expires(spec):
            notes.append(self._note_index(collection.uuid, spec, there=True))
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
        try:
            with there.cursor_command({"listIndexes": name}, codec_options=_RAW) as cursor:
                return next((bytes(one.raw) for one in cursor if one["name"] == index), None)
        except OperationFailure as error:
            if error.code in _DONE_BEFORE:
                return None
            raise sink_error(f"list the indexes of {collection.target}", error) from error
        except PyMongoError as error:
            raise sink_error(f"list the indexes of {collection.target}", error) from error

    # -- capped collections -----------------------------------------------------------------------------------------

    def write_capped(self, changes: Sequence[CappedChange], collections: Mapping[bytes, SyncedCollection]) -> None:
        """Changes of capped collections, in order: they cannot be in a transaction."""
        operations: list[dict[str, Any]] = []
        size = 0
        for one in changes:
            collection = collections.get(one.uuid)
            if collection is None:
                continue
            if one.operation != INSERT:
                self._apply_all(operations)
                operations, size = [], 0
            operation = self._capped(one, collection)
            if operation is not None:
                operations.append(operation)
                size += len(one.body)
            if size >= _CAPPED_BYTES:
                self._apply_all(operations)
                operations, size = [], 0
        self._apply_all(operations)

    def _apply_all(self, operations: list[dict[str, Any]]) -> None:
        if operations:
            self._apply(operations, "write capped collections")

    def _capped(self, change: CappedChange, collection: SyncedCollection) -> dict[str, Any] | None:
        key = raw_bson.encode_document(change.identifier)
        operation: dict[str, Any] = {"ns": collection.target, "ui": Binary(collection.target_uuid, 4)}
        letter = LETTERS[change.operation].decode()
        if change.operation == INSERT:
            return {"op": letter, **operation, "o": RawBSONDocument(change.body)}
        database, _, name = collection.target.partition(".")
        if letter == "d":
            if self.version < _CAPPED_DELETES_SINCE:
                return None  # the target makes room by itself
            return {"op": letter, **operation, "o": RawBSONDocument(key)}
        found = self._target.get_database(database, codec_options=_RAW)[name].find_one(RawBSONDocument(key))
        if found is None:
            return None  # the target has made room already
        after = apply_operation(bytes(found.raw), b"u", change.body, again=True)
        assert after is not None
        return {"op": "u", **operation, "o2": RawBSONDocument(key), "o": RawBSONDocument(after)}

    # -- the target -------------------------------------------------------------------------------------------------

    def _operate(
        self,
        database: str,
        uuid: bytes,
        command: bytes,
        what: str,
        *,
        plain: bytes | None = None,
        at: str | None = None,
    ) -> None:
        """A command by the UUID of its collection; ``plain``: what a user gives who may not do that."""
        if self._by_uuid:
            operation = {
                "op": "c",
                "ns": f"{database}.$cmd",
                "ui": Binary(uuid, 4),
                "o": RawBSONDocument(command),
            }
            try:
                self._apply([operation], what)
            except SinkError as error:
                if error.code in _DONE_BEFORE:
                    return
                if error.code != _UNAUTHORIZED:
                    raise
                self._by_uuid = False
            else:
                return
        try:
            self._command(at or database, dict(bson.decode(plain or command)), what)
        except SinkError as error:
            if error.code not in _DONE_BEFORE:
                raise

    def _apply(self, operations: Sequence[Mapping[str, Any]], what: str) -> None:
        """Operations as ``applyOps``, behind the fence."""
        reply = self._command("admin", {"applyOps": [self._ownership.fence_operation(), *operations]}, what)
        if not all(reply["results"]):
            raise TargetMismatchError(f"the target did not {what}: {reply['results']}")

    def _command(self, database: str, command: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        backoff = Backoff(give_up_s=RETRY_SECONDS)
        while True:
            self._ownership.check()
            try:
                reply: Mapping[str, Any] = self._target.get_database(database, write_concern=MAJORITY).command(
                    {**command, "writeConcern": MAJORITY.document}
                )
            except NetworkTimeout:
                continue
            except PyMongoError as error:
                self._ownership.judge(error)
                if not is_worth_again(error) or backoff.exhausted:
                    raise sink_error(what, error) from error
                backoff.wait()
            else:
                return reply


def _body(entry: OplogEntry) -> bytes:
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


def _string(name: bytes, text: str) -> bytes:
    return raw_bson.encode_element(
        raw_bson.STRING, name, raw_bson.encode_string(text.encode("utf-8", "surrogateescape"))
    )


def _text(document: bytes, name: bytes) -> str:
    found = raw_bson.find(document, name)
    if found is None or found.type != raw_bson.STRING:
        return ""
    return raw_bson.read_string(document, found.value_start).decode("utf-8", "surrogateescape")
