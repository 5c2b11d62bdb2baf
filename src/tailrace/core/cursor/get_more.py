"""The ``getMore`` and ``killCursors`` commands: their fields, checked as the server checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.cursor.command import GENERIC_FIELDS, Fields
from tailrace.core.cursor.fields_of_44 import check_get_more, check_kill_cursors
from tailrace.core.expression.language.version import USUAL, Version, knows
from tailrace.core.raw_bson import ARRAY, INT64, NULL, STRING
from tailrace.errors import UsageError

#: How long a getMore that finds nothing waits where it does not say, in milliseconds.
AWAIT_MS_DEFAULT: Final = 1000
_GET_MORE_FIELDS: Final = GENERIC_FIELDS | {
    b"getMore",
    b"collection",
    b"batchSize",
    b"maxTimeMS",
    b"term",
    b"lastKnownCommittedOpTime",
}
_KILL_FIELDS: Final = GENERIC_FIELDS | {b"killCursors", b"cursors", b"maxTimeMS"}


@dataclass(frozen=True, slots=True)
class GetMoreCommand:
    """``batch_size``  ``None``: no limit; 0 says the same
    ``await_ms``    how long to wait when there is nothing
    """

    cursor_id: int
    namespace: str
    batch_size: int | None
    await_ms: int

    @classmethod
    def parse(cls, database: str, command: bytes, version: Version = USUAL) -> GetMoreCommand:
        """Raises ``UsageError`` with the code and the message of a server of ``version``."""
        if not knows(version, "5.0"):
            check_get_more(command)
        fields = Fields("getMore", command, _GET_MORE_FIELDS, version)
        cursor_id = fields.long(fields.required(b"getMore"))
        collection = fields.text(fields.required(b"collection"))
        if not collection:
            raise UsageError("Collection names cannot be empty", code=73)
        batch_size = fields.not_negative(b"batchSize")
        await_ms = fields.time_limit()
        term = fields.given(b"term")
        if term is not None:
            fields.long(term)
        return cls(
            cursor_id=cursor_id,
            namespace=f"{database}.{collection}",
            batch_size=batch_size or None,
            await_ms=AWAIT_MS_DEFAULT if await_ms is None else await_ms,
        )


def cursors_to_kill(command: bytes, version: Version = USUAL) -> list[int]:
    """The ids in a killCursors command; nulls are skipped. Raises ``UsageError`` with the code and the message of a
    server of ``version``."""
    known = _KILL_FIELDS
    if not knows(version, "5.0"):
        check_kill_cursors(command)
        known = frozenset(element.name for element in raw_bson.elements(command))
    fields = Fields("killCursors", command, known, version)
    collection = fields.get(b"killCursors")
    if collection is None or collection.type != STRING:
        type_name = "missing" if collection is None else raw_bson.type_name(collection.type)
        raise UsageError(f"collection name has invalid type {type_name}", code=2)
    listed = fields.get(b"cursors")
    if listed is not None and listed.type == NULL:
        raise UsageError("invalid parameter: expected an object (cursors)", code=10065)
    listed = fields.required(b"cursors")
    if listed.type != ARRAY:
        raise fields.wrong_type(listed, "type 'array'")
    array = fields.value(listed)
    ids = []
    for element in raw_bson.elements(array):
        if element.type == NULL:
            continue
        if element.type != INT64:
            type_name = raw_bson.type_name(element.type)
            raise UsageError(
                f"BSON field 'killCursors.cursors.{element.name.decode()}' is the wrong type '{type_name}', expected "
                "type 'long'",
                code=14,
            )
        ids.append(raw_bson.read_int64(array, element.value_start))
    return ids
