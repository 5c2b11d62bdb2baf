"""Changes of capped collections, in their order: no transaction takes them.

They are sent as ``applyOps``, after the fence. When a process has died in the middle, nobody knows how many have
arrived. The last document on the target shows it: what was inserted up to it is not inserted again, since it would then
come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.act.sync.commands import TargetCommands
from tailrace.act.sync.fold import CappedChange
from tailrace.act.sync.inserting import has_empty_timestamp, insertion
from tailrace.act.sync.state import SyncedCollection
from tailrace.act.sync.target import answered
from tailrace.core import raw_bson
from tailrace.read.images.delta import apply_operation
from tailrace.read.source.connection import collection_of
from tailrace.read.window.apply import INSERT, LETTERS

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
#: How many bytes ``applyOps`` takes at a time; a larger document goes alone.
_BYTES: Final = 4 << 20
#: Before, nobody deletes from a capped collection but the server, when it makes room; and applyOps puts the time in the
#: place of an empty timestamp.
_SINCE: Final = (6, 0)


#: Before, the server makes no room between the inserts of one command.
_TOGETHER_SINCE: Final = (5, 0)


class CappedWriter:
    """Writes capped collections by ``commands``."""

    def __init__(self, commands: TargetCommands) -> None:
        self._commands = commands

    def write(
        self, changes: Sequence[CappedChange], collections: Mapping[bytes, SyncedCollection], *, again: bool = False
    ) -> None:
        """Write changes in order. ``again``: the first of them may have been written already."""
        left = [one for one in changes if one.uuid in collections]
        if again:
            for uuid in {one.uuid for one in left}:
                left = self._without_written(left, collections[uuid])
        operations: list[dict[str, Any]] = []
        inserted: list[CappedChange] = []
        size = 0
        for one in left:
            full = size + len(one.body) > _BYTES or self._commands.version < _TOGETHER_SINCE
            if operations and (one.operation != INSERT or full):
                self._apply(operations, inserted, collections)
                operations, inserted, size = [], [], 0
            operation = self._operation(one, collections[one.uuid])
            if operation is not None:
                operations.append(operation)
                size += len(one.body)
                if one.operation == INSERT:
                    inserted.append(one)
                else:
                    self._apply(operations, inserted, collections)
                    operations = []
        if operations:
            self._apply(operations, inserted, collections)

    def _apply(
        self,
        operations: list[dict[str, Any]],
        inserted: list[CappedChange],
        collections: Mapping[bytes, SyncedCollection],
    ) -> None:
        self._commands.apply(operations, "write capped collections")
        if self._commands.version < _SINCE:
            for one in inserted:
                if has_empty_timestamp(one.body):
                    self._restore_timestamps(one.body, collections[one.uuid].target)

    def _restore_timestamps(self, document: bytes, namespace: str) -> None:
        """Put back the empty timestamps that the server has replaced by its time: the document keeps its size."""
        database, _, name = namespace.partition(".")
        command = {"update": name, "updates": [insertion(document)], "bypassDocumentValidation": True}
        self._commands.command(database, command, f"write {namespace}")

    def _without_written(self, changes: list[CappedChange], collection: SyncedCollection) -> list[CappedChange]:
        """The changes without those of a collection up to the insert of the document that is its last one."""
        database, _, name = collection.target.partition(".")
        there = collection_of(self._commands.client.get_database(database, codec_options=_RAW), name)
        last = answered(f"read {collection.target}", lambda: there.find_one(sort=[("$natural", -1)]))
        document = b"" if last is None else raw_bson.bytes_of(last)
        element = raw_bson.find(document, b"_id") if document else None
        identifier = b"" if element is None else document[element.start : element.end]
        places = [
            place
            for place, one in enumerate(changes)
            if one.uuid == collection.uuid and one.operation == INSERT and one.identifier == identifier
        ]
        done = places[-1] if places else -1
        return [one for place, one in enumerate(changes) if one.uuid != collection.uuid or place > done]

    def _operation(self, change: CappedChange, collection: SyncedCollection) -> dict[str, Any] | None:
        key = raw_bson.encode_document(change.identifier)
        operation: dict[str, Any] = {"ns": collection.target, "ui": Binary(collection.target_uuid, 4)}
        letter = LETTERS[change.operation].decode()
        if change.operation == INSERT:
            return {"op": letter, **operation, "o": RawBSONDocument(change.body)}
        database, _, name = collection.target.partition(".")
        if letter == "d":
            if self._commands.version < _SINCE:
                return None  # the target makes room on its own
            return {"op": letter, **operation, "o": RawBSONDocument(key)}
        there = collection_of(self._commands.client.get_database(database, codec_options=_RAW), name)
        document = there.find_one(RawBSONDocument(key))
        if document is None:
            return None  # the target has made room already
        after = apply_operation(raw_bson.bytes_of(document), b"u", change.body, again=True)
        assert after is not None
        return {"op": "u", **operation, "o2": RawBSONDocument(key), "o": RawBSONDocument(after)}
