"""Definitions of the source carried out on the target, in order.

They are sent as ``applyOps``, by UUID where the server knows one: then each can be carried out twice, whatever has
happened in between, and a fence comes before it (``fence_operation``). A user who may not do that sends plain commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.act.sync import indexes
from tailrace.act.sync.capped_changes import CappedWriter
from tailrace.act.sync.catalog import OnTarget, edited, replaced
from tailrace.act.sync.commands import TargetCommands
from tailrace.act.sync.folded_catalog import Definition, target_of
from tailrace.act.sync.index_definitions import IndexDefinitions, Note, body_of, string_of
from tailrace.act.sync.ownership import SyncOwnership
from tailrace.act.sync.plain_views import drop_views, listed_view, view_names, write_view
from tailrace.act.sync.state import SyncedCollection, SyncState
from tailrace.act.sync.target import answered
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry
from tailrace.core.printable import in_a_line
from tailrace.errors import SinkError, UsageError
from tailrace.read.images.delta import apply_operation

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
_UNAUTHORIZED: Final = 13
_VIEWS: Final = "system.views"
_DROPS: Final = frozenset((b"dropIndexes", b"deleteIndexes", b"dropIndex", b"deleteIndex"))


class TargetDefinitions:
    """Carries out definitions on the target of ``state``."""

    def __init__(self, state: SyncState, ownership: SyncOwnership) -> None:
        self._state = state
        self._target: MongoClient[Any] = state.client
        self._commands = TargetCommands(ownership)
        self._indexes = IndexDefinitions(state, self._commands)
        self.capped = CappedWriter(self._commands)
        self.version = self._commands.version

    @property
    def chosen(self) -> Mapping[bytes, bytes]:
        """The UUIDs that the server has chosen, by the source's, where it was not to have these."""
        return self._commands.chosen

    @property
    def notes_at_once(self) -> bool:
        """Whether what is to be noted about a definition must be noted right after it. A command by name cannot be
        repeated after others that have changed the names; the note then shows that it was already given."""
        return not self._commands.by_uuid

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
            return [self._drop(definition.before, definition.time)]
        if name in (b"createIndexes", b"commitIndexBuild"):
            return self._indexes.build(definition, consistent=consistent)
        if name in _DROPS:
            return self._indexes.drop(definition)
        if name == b"collMod":
            return self._indexes.modify(definition, consistent=consistent)
        return []

    # -- collections ------------------------------------------------------------------------------------------------

    def _create(self, definition: Definition) -> list[Note]:
        made, body = definition.after, body_of(definition.entry)
        assert made is not None
        database, _, name = made.target.partition(".")
        notes: list[Note] = []
        without = [b"create", b"temp"]  # a primary that is elected on the target would drop what is temporary
        if (limit := indexes.clustered_limit(body)) is not None:
            without.append(b"expireAfterSeconds")
            notes.append(self._indexes.note(made.uuid, limit, there=True))
        if self._commands.version >= (7, 0):
            without.append(b"recordPreImages")
        command = raw_bson.encode_document(string_of(b"create", name), edited(body, without)[4:-1])
        self._commands.operate(database, made.target_uuid, command, f"create {made.target}", named=name)
        return [self._note(made), *notes]

    def _drop(self, collection: SyncedCollection, at: ClusterTime) -> Note:
        database, _, name = collection.target.partition(".")
        command = raw_bson.encode_document(string_of(b"drop", name))
        self._commands.operate(database, collection.target_uuid, command, f"drop {collection.target}")
        state, uuid = self._state, collection.uuid
        return lambda session: state.forget_collection(uuid, at, session)

    def _rename(self, definition: Definition) -> list[Note]:
        before, after = definition.before, definition.after
        notes = [self._drop(one, definition.time) for one in definition.gone]
        if before is None:
            return notes
        if after is None:
            return [*notes, self._drop(before, definition.time)]
        if before.target != after.target:
            database, new = before.target.partition(".")[0], after.target.partition(".")[0]
            if database != new:
                raise UsageError(
                    f"{in_a_line(before.target)} cannot be renamed to {in_a_line(after.target)} on the target: the new "
                    "names of this sync put them into two databases",
                    hint="Rename whole databases (shop=store) rather than single collections",
                )
            command = raw_bson.encode_document(
                string_of(b"renameCollection", before.target),
                string_of(b"to", after.target),
                raw_bson.encode_element(raw_bson.BOOL, b"stayTemp", b"\0"),
            )
            plain = raw_bson.encode_document(
                string_of(b"renameCollection", before.target), string_of(b"to", after.target)
            )
            what = f"rename {before.target} to {after.target}"
            named = after.target.partition(".")[2]
            self._commands.operate(database, before.target_uuid, command, what, plain=plain, at="admin", named=named)
        return [*notes, self._note(after)]

    def _note(self, collection: SyncedCollection) -> Note:
        """To be called after the command: where it could not give a UUID, the server has chosen one."""
        state = self._state
        if not self._commands.by_uuid:
            chosen = self._uuid_of(collection)
            self._commands.chosen[collection.target_uuid] = chosen
            collection = replace(collection, target_uuid=chosen)
        return lambda session: state.set_collection(collection, session)

    def _uuid_of(self, collection: SyncedCollection) -> bytes:
        database, _, name = collection.target.partition(".")
        return self._listed_uuid(database, name) or collection.target_uuid

    # -- views ------------------------------------------------------------------------------------------------------

    def _view(self, definition: Definition) -> None:
        """The server keeps views as documents: they are written as such."""
        entry = definition.entry
        document = entry.o2 if entry.operation == "u" and entry.o2 is not None else body_of(entry)
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
        key = raw_bson.encode_document(string_of(b"_id", target))
        before, body = self._read_view(target, key), None
        if entry.operation == "d":
            operation["o"] = RawBSONDocument(key)
        else:
            body = self._view_body(entry, source, target, before)
            operation["o"] = RawBSONDocument(body)
            operation["op"] = "i" if before is None else "u"
            if operation["op"] == "u":
                operation["o2"] = RawBSONDocument(key)
        if body is None and before is None:
            return
        if not self._commands.by_uuid:
            write_view(self._commands, target, body)
            return
        try:
            if body is not None:
                self._make_views(database)
            self._commands.apply([operation], f"define the view {target}")
        except SinkError as error:
            if error.code != _UNAUTHORIZED:
                raise
            write_view(self._commands, target, body)

    def _make_views(self, database: str) -> None:
        """The server makes the collection of views with the first one."""
        if self._listed_uuid(database, _VIEWS) is None:
            made = {"op": "c", "ns": f"{database}.$cmd", "o": {"create": "system.views"}}
            self._commands.open(database, f"create {database}.system.views")
            self._commands.apply([made], f"create {database}.system.views")

    def _listed_uuid(self, database: str, name: str) -> bytes | None:
        """The UUID of a collection; ``None``: there is none."""
        found = answered(
            f"list {in_a_line(database)}.{in_a_line(name)}",
            lambda: list(self._target[database].list_collections(filter={"name": name})),
            check=self._commands.ownership.check,
        )
        return bytes(found[0]["info"]["uuid"]) if found else None

    def _drop_views(self, definition: Definition) -> None:
        """The views of a database go with it. Those that are not of this sync stay."""
        database, on_target = self._database_of(definition), OnTarget(self._state.settings)
        if not self._commands.by_uuid or not all(map(on_target.has, view_names(self._commands, database))):
            drop_views(self._commands, database, on_target.has)
            return
        uuid = self._listed_uuid(database, _VIEWS)
        if uuid is None:
            return
        command = raw_bson.encode_document(string_of(b"drop", "system.views"))
        try:
            self._commands.operate(database, uuid, command, f"drop the views of {database}")
        except SinkError as error:
            if error.code != _UNAUTHORIZED:
                raise
            drop_views(self._commands, database, on_target.has)

    def _database_of(self, definition: Definition) -> str:
        """What the database of a command is called on the target."""
        database = definition.entry.namespace.decode("utf-8", "surrogateescape").partition(".")[0]
        return self._state.settings.target_of(f"{database}.x").partition(".")[0]

    def _view_body(self, entry: OplogEntry, source: str, target: str, before: bytes | None) -> bytes:
        body = body_of(entry)
        if entry.operation == "u":
            found = apply_operation(before, b"u", body, again=True)
            body = found or body
        on = raw_bson.find(body, b"viewOn")
        if on is not None and on.type == raw_bson.STRING:
            below = raw_bson.read_string(body, on.value_start).decode("utf-8", "surrogateescape")
            renamed = target_of(self._state.settings, f"{source.partition('.')[0]}.{below}").partition(".")[2]
            body = replaced(body, b"viewOn", string_of(b"viewOn", renamed))
        return replaced(body, b"_id", string_of(b"_id", target))

    def _read_view(self, target: str, key: bytes) -> bytes | None:
        if not self._commands.by_uuid:
            return listed_view(self._commands, target)
        views = self._target.get_database(target.partition(".")[0], codec_options=_RAW)["system.views"]
        try:
            found = answered("read the views", lambda: views.find_one(RawBSONDocument(key)))
        except SinkError as error:
            if error.code == _UNAUTHORIZED:
                return listed_view(self._commands, target)
            raise
        return None if found is None else raw_bson.bytes_of(found)
