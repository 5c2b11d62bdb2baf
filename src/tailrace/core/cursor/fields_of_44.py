"""Reading the fields of a command as mongod 4.4 does: one by one in the command's order, so that the first wrong one is
what it speaks of, and with codes and messages of its own (measured on 4.4.2). From 5.0 on all commands are read by one
set of rules, which ``command`` holds.

Each check passes what 4.4 takes. What it means is read by the same code as on other versions.
"""

from __future__ import annotations

import math
from typing import Any, Final

from tailrace.core import raw_bson
from tailrace.core.cursor.command import GENERIC_FIELDS, as_int64, decoded
from tailrace.core.event.bson_text import spaced_document_text
from tailrace.core.raw_bson import ARRAY, BOOL, DECIMAL128, DOUBLE, INT32, INT64, OBJECT, STRING, Element
from tailrace.errors import UsageError

_NUMBERS: Final = (INT32, INT64, DOUBLE, DECIMAL128)
_INT32_MAX: Final = (1 << 31) - 1
_INT64_MIN: Final = -(1 << 63)
_EMPTY_STRING: Final = b"\1\0\0\0\0"
#: Fields that any command may carry from 5.0 on.
_LATER: Final = frozenset({b"apiVersion", b"apiStrict", b"apiDeprecationErrors"})
_GENERIC: Final = GENERIC_FIELDS - _LATER
_AGGREGATE: Final = _GENERIC | {b"aggregate", b"pipeline", b"bypassDocumentValidation", b"exchange"}
_GET_MORE: Final = _GENERIC | {b"getMore", b"collection", b"lastKnownCommittedOpTime"}


def check_aggregate(command: bytes) -> None:
    """Raise ``UsageError`` for the first field of an ``aggregate`` that 4.4 does not take. Its namespace and its stages
    come first, and are not this function's matter."""
    for element in raw_bson.elements(command):
        name = element.name.decode("utf-8", "replace")
        match element.name:
            case b"allowDiskUse" | b"explain" | b"fromMongos" | b"needsMerge":
                _be(element, BOOL, "a boolean")
            case b"collation" | b"readConcern" | b"writeConcern":
                _be(element, OBJECT, "an object")
            case b"cursor":
                _check_cursor(command, element)
            case b"maxTimeMS":
                _check_time_limit(command, element)
            case b"hint":
                if element.type not in (STRING, OBJECT):
                    text = "hint must be specified as a string representing an index name, or an object representing "
                    raise UsageError(f"{text}an index's key pattern", code=9)
            case other if other not in _AGGREGATE:
                raise UsageError(f"unrecognized field '{name}'", code=9)


def check_get_more(command: bytes) -> None:
    """The same for a ``getMore``."""
    for element in raw_bson.elements(command):
        name = element.name.decode("utf-8", "replace")
        match element.name:
            case b"getMore" if element.type != INT64:
                raise UsageError(f"Field 'getMore' must be of type long {_in(command)}", code=14)
            case b"collection" if element.type != STRING:
                raise UsageError(f"Field 'collection' must be of type string {_in(command)}", code=14)
            case b"batchSize":
                if element.type not in _NUMBERS:
                    raise UsageError(f"Field 'batchSize' must be a number {_in(command)}", code=14)
                size = _whole(command, element)
                if size < 0:
                    raise UsageError(f"Batch size for getMore must be positive, but received: {size}", code=2)
            case b"maxTimeMS":
                _check_time_limit(command, element)
            case b"term" if element.type != INT64:
                raise UsageError(f"Field 'term' must be of type NumberLong {_in(command)}", code=14)
            case other if other not in _GET_MORE | {b"term"}:
                text = f"Failed to parse: {spaced_document_text(command)}. Unrecognized field '{name}'."
                raise UsageError(text, code=9)
    collection = raw_bson.find(command, b"collection")
    if collection is None:
        raise UsageError(f"Field 'collection' missing {_in(command)}", code=9)
    if raw_bson.value(command, collection) == _EMPTY_STRING:
        database = raw_bson.find(command, b"$db")
        named = b"" if database is None else raw_bson.read_string(command, database.value_start)
        raise UsageError(f"Invalid namespace for getMore: {named.decode('utf-8', 'replace')}.", code=73)
    cursor = raw_bson.find(command, b"getMore")
    if cursor is not None and not any(raw_bson.value(command, cursor)):
        raise UsageError("Cursor id for getMore must be non-zero", code=2)


def check_kill_cursors(command: bytes) -> None:
    """The same for ``killCursors``, which takes any other field, and an id at least."""
    collection = raw_bson.find(command, b"killCursors")
    if collection is None or collection.type != STRING:
        raise UsageError(f"First parameter must be a string {_in(command)}", code=9)
    listed = raw_bson.find(command, b"cursors")
    if listed is None or listed.type != ARRAY:
        raise UsageError(f"Field 'cursors' must be of type array {_in(command)}", code=9)
    array = raw_bson.value(command, listed)
    ids = list(raw_bson.elements(array))
    for element in ids:
        if element.type != INT64:
            one = spaced_document_text(raw_bson.encode_document(array[element.start : element.end]))[2:-2]
            raise UsageError(f"Field 'cursors' contains an element that is not of type long: {one}", code=9)
    if not ids:
        raise UsageError(f"Must specify at least one cursor id {_in(command)}", code=2)


def _in(command: bytes) -> str:
    return f"in: {spaced_document_text(command)}"


def _be(element: Element, wanted: int, called: str) -> None:
    if element.type != wanted:
        name, found = element.name.decode(), raw_bson.type_name(element.type)
        raise UsageError(f"{name} must be {called}, not a {found}", code=14)


def _check_cursor(command: bytes, element: Element) -> None:
    if element.type != OBJECT:
        raise UsageError("cursor field must be missing or an object", code=14)
    inner = raw_bson.value(command, element)
    for one in raw_bson.elements(inner):
        if one.name != b"batchSize":
            raise UsageError("cursor object can't contain fields other than batchSize", code=2)
        if one.type not in _NUMBERS:
            raise UsageError("cursor.batchSize must be a number", code=14)
        if _whole(inner, one) < 0:
            raise UsageError("cursor.batchSize must not be negative", code=2)


def _check_time_limit(command: bytes, element: Element) -> None:
    if element.type not in _NUMBERS:
        raise UsageError("maxTimeMS must be a number", code=2)
    given = decoded(command, element)
    if isinstance(given, float) and math.isnan(given):
        raise UsageError("maxTimeMS has non-integral value", code=2)
    number = as_int64(given)
    if not 0 <= number <= _INT32_MAX:
        raise UsageError("maxTimeMS is out of range", code=2)
    if isinstance(given, float) and number != given:
        raise UsageError("maxTimeMS has non-integral value", code=2)


def _whole(document: bytes, element: Element) -> int:
    """A number made whole. What a double cannot be made is the smallest number there is, as the processor has it."""
    given: Any = decoded(document, element)
    if isinstance(given, float) and not math.isfinite(given):
        return _INT64_MIN
    return as_int64(given)
