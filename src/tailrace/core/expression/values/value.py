"""The value model of the expression language: a BSON type byte and the value's own bytes.

A value is never decoded to pass it on: what is copied keeps its type, its NaN payload and its decimal exponent. Only an
operator that needs a number, a text or the elements of an array reads them here. A missing field is ``None``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final, NoReturn, TypeAlias

from bson.decimal128 import Decimal128, create_decimal128_context

from tailrace.core import raw_bson as bson
from tailrace.errors import InternalError, ServerError

Value: TypeAlias = tuple[int, bytes]
Maybe: TypeAlias = Value | None
Number: TypeAlias = int | float | Decimal

DOUBLE: Final = bson.DOUBLE
STRING: Final = bson.STRING
OBJECT: Final = bson.OBJECT
ARRAY: Final = bson.ARRAY
BINARY: Final = bson.BINARY
UNDEFINED: Final = bson.UNDEFINED
OBJECT_ID: Final = bson.OBJECT_ID
BOOL: Final = bson.BOOL
DATE: Final = bson.DATE
NULL_TYPE: Final = bson.NULL
REGEX: Final = bson.REGEX
DB_POINTER: Final = bson.DB_POINTER
CODE: Final = bson.CODE
SYMBOL: Final = bson.SYMBOL
CODE_WITH_SCOPE: Final = bson.CODE_WITH_SCOPE
INT32: Final = bson.INT32
TIMESTAMP: Final = bson.TIMESTAMP
INT64: Final = bson.INT64
DECIMAL: Final = bson.DECIMAL128
MIN_KEY: Final = bson.MIN_KEY
MAX_KEY: Final = bson.MAX_KEY

NUMERIC: Final = frozenset({DOUBLE, INT32, INT64, DECIMAL})
NULLISH: Final = frozenset({NULL_TYPE, UNDEFINED})
NESTED: Final = frozenset({OBJECT, ARRAY})

NULL: Final[Value] = (NULL_TYPE, b"")
TRUE: Final[Value] = (BOOL, b"\x01")
FALSE: Final[Value] = (BOOL, b"\x00")
EMPTY_OBJECT: Final[Value] = (OBJECT, bson.EMPTY_DOCUMENT)
EMPTY_ARRAY: Final[Value] = (ARRAY, bson.EMPTY_DOCUMENT)
EMPTY_STRING: Final[Value] = (STRING, b"\x01\x00\x00\x00\x00")

INT32_MIN: Final = -(1 << 31)
INT32_MAX: Final = (1 << 31) - 1
INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1

#: The server makes no string of this size (16 MB), and no buffer of matches of more than this size (64 MB).
STRING_LIMIT: Final = 16 * 1024 * 1024
BUFFER_LIMIT: Final = 64 * 1024 * 1024
#: The most bytes of a document or an array while it is computed. The server sets no such limit and runs out of memory;
#: its longest ``$range`` takes 78 MB here.
CONTAINER_LIMIT: Final = 128 * 1024 * 1024

#: Inside a pipeline only: a field that went but keeps its place (see ``object_with_places``). No BSON type has it.
GONE: Final = 0x16

#: The server's alias of each type, as ``$type`` gives it and error messages name it.
TYPE_NAMES: Final = bson.TYPE_NAMES

_F64 = struct.Struct("<d")
_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
#: Lengths as they are read here are not negative, and ``index`` fails where ``find`` would lead back to the beginning:
#: so each walk over a damaged document ends, with an error that ``raw_bson.explained`` turns into the right one.
_LENGTH = struct.Struct("<I").unpack_from
_SIZES: Final = bson.FIXED_SIZES
_EXTRAS: Final = bson.LENGTH_EXTRAS
#: The same by type, -1 where there is none: a list is quicker to ask than a dictionary.
_SIZE_OF: Final = [_SIZES.get(kind, -1) for kind in range(256)]
_EXTRA_OF: Final = [_EXTRAS.get(kind, -1) for kind in range(256)]

#: 34 digits, round half to even, the exponents of IEEE 754 decimal128.
DECIMAL_CONTEXT: Final = create_decimal128_context()
DECIMAL_CONTEXT.clear_traps()


def type_name(value: Maybe) -> str:
    """The server's name of the value's type; ``missing`` for a field that is not there."""
    return "missing" if value is None else TYPE_NAMES[value[0]]


def is_nan(number: Number) -> bool:
    return number != number  # noqa: PLR0124  true of NaN alone, whatever its type


def nullish(value: Maybe) -> bool:
    """Missing, null or undefined: what most operators turn into null."""
    return value is None or value[0] in NULLISH


# ── construction ─────────────────────────────────────────────────────────────────────────────────────────────────────


def int32(number: int) -> Value:
    return (INT32, _I32.pack(number))


def int64(number: int) -> Value:
    return (INT64, _I64.pack(number))


def integer(number: int) -> Value:
    """An int where it fits, else a long (the server's rule for results of integer arithmetic on ints)."""
    return (INT32, _I32.pack(number)) if INT32_MIN <= number <= INT32_MAX else (INT64, _I64.pack(number))


def double(number: float) -> Value:
    return (DOUBLE, _F64.pack(number * 1.0))  # no operator of the server gives a signalling NaN


_DECIMAL_NAN: Final = 0x7C << 120


def decimal(number: Decimal) -> Value:
    """A decimal128, rounded to 34 digits. NaN keeps its sign and payload."""
    if number.is_nan():
        payload = int("".join(map(str, number.as_tuple().digits)) or "0")
        return (DECIMAL, (_DECIMAL_NAN | number.is_signed() << 127 | payload).to_bytes(16, "little"))
    return (DECIMAL, Decimal128(DECIMAL_CONTEXT.create_decimal(number)).bid)


def boolean(truth: bool) -> Value:
    return TRUE if truth else FALSE


def date(milliseconds: int) -> Value:
    return (DATE, _I64.pack(milliseconds))


def string(text: str) -> Value:
    return string_of(text.encode("utf-8", "surrogateescape"))


def string_of(data: bytes) -> Value:
    """A string from its UTF-8 bytes. Raises 16493 for one that is too long."""
    if len(data) >= STRING_LIMIT:
        raise ServerError(f"Tried to create string longer than {STRING_LIMIT // 1024 // 1024}MB", code=16493)
    return (STRING, _I32.pack(len(data) + 1) + data + b"\x00")


def timestamp(seconds: int, increment: int) -> Value:
    return (TIMESTAMP, _U64.pack(seconds << 32 | increment))


def object_of(fields: Iterable[tuple[bytes, Value]]) -> Value:
    """A document from its fields, in order."""
    return document_of(b"%c%b\x00%b" % (value[0], name, value[1]) for name, value in fields)


def document_of(elements: Iterable[bytes]) -> Value:
    """A document from the bytes of its elements."""
    if isinstance(elements, list):
        whole = b"".join(elements)
        if len(whole) > CONTAINER_LIMIT:
            too_large()
        return (OBJECT, _I32.pack(len(whole) + 5) + whole + b"\x00")
    body = bytearray(4)
    for element in elements:
        body += element
        if len(body) > CONTAINER_LIMIT:
            too_large()
    return (OBJECT, _closed(body))


def _closed(body: bytearray) -> bytes:
    body.append(0)
    _I32.pack_into(body, 0, len(body))
    return bytes(body)


def too_large() -> NoReturn:
    """What the server would hold in memory, and would fail on only when it writes it out."""
    raise ServerError(
        f"an array or a document grew past {CONTAINER_LIMIT // 1024 // 1024} MB while it was computed", code=13548
    )


#: A type as the byte that it is in a document.
BYTES: Final = [bytes([kind]) for kind in range(256)]
_INDEX: Final = [b"%d\x00" % index for index in range(1000)]


def array_of(values: Iterable[Maybe]) -> Value:
    """An array from its elements; a missing element becomes null, as on the server."""
    if isinstance(values, list) and len(values) <= len(_INDEX):
        parts: list[bytes] = []
        for name, value in zip(_INDEX, values, strict=False):
            kind, data = NULL if value is None else value
            parts += (BYTES[kind], name, data)
        whole = b"".join(parts)
        if len(whole) > CONTAINER_LIMIT:
            too_large()
        return (ARRAY, _I32.pack(len(whole) + 5) + whole + b"\x00")
    body = bytearray(4)
    for index, value in enumerate(values):
        name = _INDEX[index] if index < 1000 else b"%d\x00" % index
        kind, data = NULL if value is None else value
        body += b"%c%b%b" % (kind, name, data)
        if len(body) > CONTAINER_LIMIT:
            too_large()
    return (ARRAY, _closed(body))


def array_with_places(values: Iterable[Maybe]) -> Value:
    """An array whose missing elements keep their places inside the pipeline."""
    kind, data = object_with_places([(b"%d" % index, value) for index, value in enumerate(values)])
    return (ARRAY, data) if kind == OBJECT else EMPTY_ARRAY


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


# The walks below are written out each: one of them built on another costs 30 to 45 percent more (measured on
# documents of two and of seven fields).
def fields_of(document: bytes) -> list[tuple[bytes, int, bytes]]:
    """``(name, type, value bytes)`` of a document's fields, in order, duplicates included."""
    result = []
    pos, limit = 4, len(document) - 1
    index = document.index
    while pos < limit:
        kind = document[pos]
        name_end = index(0, pos + 1)
        start = name_end + 1
        size = _SIZES.get(kind)
        if size is None:
            if kind == GONE:
                pos = start
                continue
            end = _end(document, kind, start, limit)
        else:
            end = start + size
        result.append((document[pos + 1 : name_end], kind, document[start:end]))
        pos = end
    if pos != limit:
        _corrupt()
    return result


def count_of(document: bytes) -> int:
    """How many fields a document has, or elements an array."""
    count, pos, limit = 0, 4, len(document) - 1
    while pos < limit:
        kind = document[pos]
        start = document.index(0, pos + 1) + 1
        size = 0 if kind == GONE else _SIZES.get(kind)
        pos = _end(document, kind, start, limit) if size is None else start + size
        count += kind != GONE
    return count


def elements_by_name(document: bytes) -> dict[bytes, bytes]:
    """The elements of a document (type, name and value) by their names; of a name that comes twice the last one, in the
    place of the first."""
    result: dict[bytes, bytes] = {}
    pos, limit = 4, len(document) - 1
    index = document.index
    sizes, extras = _SIZE_OF, _EXTRA_OF
    while pos < limit:
        kind = document[pos]
        name_end = index(0, pos + 1)
        size = sizes[kind]
        if size >= 0:
            end = name_end + 1 + size
        elif (extra := extras[kind]) >= 0:
            end = name_end + 1 + extra + _LENGTH(document, name_end + 1)[0]
        elif kind == GONE:
            pos = name_end + 1
            continue
        else:
            end = bson.value_end(document, kind, name_end + 1, limit)
        result[document[pos + 1 : name_end]] = document[pos:end]
        pos = end
    if pos != limit:
        _corrupt()
    return result


def nested_of(document: bytes) -> list[Value]:
    """The documents and arrays among a document's fields, in order."""
    if document.find(OBJECT, 4) < 0 and document.find(ARRAY, 4) < 0:
        return []
    result = []
    pos, limit = 4, len(document) - 1
    index = document.index
    while pos < limit:
        kind = document[pos]
        start = index(0, pos + 1) + 1
        size = 0 if kind == GONE else _SIZES.get(kind)
        end = _end(document, kind, start, limit) if size is None else start + size
        if kind in NESTED:
            result.append((kind, document[start:end]))
        pos = end
    if pos != limit:
        _corrupt()
    return result


def numbers_its_arrays(document: bytes) -> bool:
    """Whether the elements of every array in a document are called 0, 1, 2, as they are when it is rewritten."""
    if document.find(ARRAY, 4) < 0:  # at C speed, and most innermost documents end here
        return True
    index = document.index
    waiting = [(4, len(document) - 1, False)]
    while waiting:
        pos, limit, is_array = waiting.pop()
        number = 0
        while pos < limit:
            kind = document[pos]
            start = index(0, pos + 1) + 1
            if is_array:
                if document[pos + 1 : start] != (_INDEX[number] if number < len(_INDEX) else b"%d\x00" % number):
                    return False
                number += 1
            size = _SIZES.get(kind)
            if size is not None:
                pos = start + size
            elif kind == GONE:
                return False
            else:
                pos = _end(document, kind, start, limit)
                if kind == ARRAY or (kind == OBJECT and document.find(ARRAY, start + 4, pos) >= 0):
                    waiting.append((start + 4, pos - 1, kind == ARRAY))
        if pos != limit:
            _corrupt()
    return True


def spans_of(document: bytes) -> list[tuple[bytes, int, int, int]]:
    """``(name, start, value start, end)`` of a document's fields, in order: for callers that copy most of them as they
    are."""
    result = []
    pos, limit = 4, len(document) - 1
    index = document.index
    while pos < limit:
        kind = document[pos]
        name_end = index(0, pos + 1)
        start = name_end + 1
        size = _SIZES.get(kind)
        if size is None:
            if kind == GONE:
                pos = start
                continue
            end = _end(document, kind, start, limit)
        else:
            end = start + size
        result.append((document[pos + 1 : name_end], pos, start, end))
        pos = end
    if pos != limit:
        _corrupt()
    return result


def elements_of(array: Value) -> list[Value]:
    """The elements of an array value (or the values of a document's bytes), in order."""
    document = array[1]
    result = []
    pos, limit = 4, len(document) - 1
    index = document.index
    while pos < limit:
        kind = document[pos]
        start = index(0, pos + 1) + 1
        size = _SIZE_OF[kind]
        if size >= 0:
            pos = start + size
        elif (extra := _EXTRA_OF[kind]) >= 0:
            pos = start + extra + _LENGTH(document, start)[0]
        elif kind == GONE:
            pos = start
            continue
        else:
            pos = bson.value_end(document, kind, start, limit)
        result.append((kind, document[start:pos]))
    if pos != limit:
        _corrupt()
    return result


def field(document: bytes, name: bytes) -> Maybe:
    """The value of the first field called ``name``, or ``None``."""
    if name not in document:  # at C speed, and most look-ups of absent fields end here
        return None
    pos, limit = 4, len(document) - 1
    index = document.index
    wanted = len(name) + 2
    sizes, extras = _SIZE_OF, _EXTRA_OF
    while pos < limit:
        kind = document[pos]
        start = index(0, pos + 1) + 1
        size = sizes[kind]
        if size >= 0:
            end = start + size
        elif (extra := extras[kind]) >= 0:
            end = start + extra + _LENGTH(document, start)[0]
        else:
            end = start if kind == GONE else bson.value_end(document, kind, start, limit)
        if start - pos == wanted and document.startswith(name, pos + 1):
            return None if kind == GONE else (kind, document[start:end])
        pos = end
    return None


def _end(document: bytes, kind: int, start: int, limit: int) -> int:
    """Where a value of variable size ends."""
    extra = _EXTRAS.get(kind)
    if extra is None:
        return bson.value_end(document, kind, start, limit)
    length: int = _LENGTH(document, start)[0]
    return start + extra + length


# ── fields that went ─────────────────────────────────────────────────────────────────────────────────────────────────


def object_with_places(fields: Iterable[tuple[bytes, Maybe]]) -> Value:
    """A document in which a field without value keeps its place: the server puts it there again if a later stage sets
    it. Readers do not see such a field; ``stripped`` takes them out at the end of the pipeline."""
    return document_of(
        b"%c%b\x00" % (GONE, name) if value is None else b"%c%b\x00%b" % (value[0], name, value[1])
        for name, value in fields
    )


def places_of(document: bytes) -> list[tuple[bytes, Maybe]]:
    """The fields of a document, with ``None`` for those that went."""
    result: list[tuple[bytes, Maybe]] = []
    pos, limit = 4, len(document) - 1
    while pos < limit:
        kind = document[pos]
        name_end = document.index(0, pos + 1)
        name = document[pos + 1 : name_end]
        size = 0 if kind == GONE else _SIZES.get(kind)
        end = _end(document, kind, name_end + 1, limit) if size is None else name_end + 1 + size
        result.append((name, None if kind == GONE else (kind, document[name_end + 1 : end])))
        pos = end
    return result


def stripped(document: bytes) -> bytes:
    """A document without the places of fields that went, at every depth."""
    if GONE not in document:
        return document
    return _stripped((OBJECT, document))[1]


def _stripped(value: Value) -> Value:
    kind, data = value
    if kind not in (OBJECT, ARRAY) or GONE not in data:
        return value
    fields = fields_of(data)
    if kind == ARRAY:
        return array_of([_stripped((k, inner)) for _, k, inner in fields])
    parts = [b"%c%b\x00%b" % (k, name, _stripped((k, inner))[1]) for name, k, inner in fields]
    body = b"".join(parts)
    return (kind, _I32.pack(len(body) + 5) + body + b"\x00")


def _corrupt() -> NoReturn:
    raise InternalError("a document's fields do not end where it ends; it should have been checked before")


#: What reads the bytes of a number that is no decimal.
PLAIN_NUMBERS: Final[dict[int, Callable[[bytes], tuple[Any, ...]]]] = {
    INT32: _I32.unpack,
    DOUBLE: _F64.unpack,
    INT64: _I64.unpack,
}


def number_of(value: Value) -> Number:
    """The Python number of a numeric value: int, float or Decimal. A decimal NaN comes as the float: Python's decimals
    raise where a NaN is compared."""
    kind, data = value
    if kind in PLAIN_NUMBERS:
        plain: int | float = PLAIN_NUMBERS[kind](data)[0]
        return plain
    number = Decimal128.from_bid(data).to_decimal()
    return number if not number.is_nan() else _double_nan(data)


def integer_of(value: Value) -> int:
    """The integer of an int, long, date (milliseconds since 1970)."""
    return int((_I32 if value[0] == INT32 else _I64).unpack(value[1])[0])


def unsigned_of(value: Value) -> int:
    """The 64 bits of a timestamp."""
    return int(_U64.unpack(value[1])[0])


def bytes_of(value: Value) -> bytes:
    """The UTF-8 bytes of a string, symbol or code."""
    return value[1][4:-1]


def text_of(value: Value) -> str:
    """The text of a string, symbol or code. Bytes that are not UTF-8 are kept as lone surrogates."""
    return value[1][4:-1].decode("utf-8", "surrogateescape")


def decimal_of(value: Value) -> Decimal:
    """A numeric value as decimal; a double is converted as the server converts it: to 15 digits."""
    if value[0] == DECIMAL:
        number_or_nan = Decimal128.from_bid(value[1]).to_decimal()
        return _with_payload(value[1]) if number_or_nan.is_nan() else number_or_nan
    number = number_of(value)
    if isinstance(number, float):
        return decimal_of_double(number)
    return number if isinstance(number, Decimal) else Decimal(number)


def decimal_of_double(number: float) -> Decimal:
    """The server's conversion of a double: its 15 significant digits, with all their zeros. NaN keeps its sign, and its
    payload at the other end of a decimal's longer one."""
    if is_nan(number):
        bits = _U64.unpack(_F64.pack(number))[0]
        return _nan(bits >> 63, (bits & (1 << 51) - 1) << 59)
    if number == 0:
        return Decimal("-0" if math.copysign(1.0, number) < 0 else "0")
    if math.isinf(number):
        return Decimal(number)
    return Decimal(f"{number:.14e}")


def _nan(negative: int, payload: int) -> Decimal:
    """A decimal NaN; a payload that is no number of 33 digits counts as 0."""
    digits = str(payload) if 0 < payload < 10**33 else ""
    return Decimal(f"{'-' if negative else ''}NaN{digits}")


def _double_nan(bid: bytes) -> float:
    """The double of a decimal NaN: with its sign, and of its payload what a double has room for."""
    negative, digits, _ = _with_payload(bid).as_tuple()
    payload = int("".join(map(str, digits)) or "0")
    number: float = _F64.unpack(_U64.pack(negative << 63 | 0x7FF8 << 48 | payload >> 59))[0]
    return number


def _with_payload(bid: bytes) -> Decimal:
    bits = int.from_bytes(bid, "little")
    return _nan(bits >> 127, bits & (1 << 110) - 1)


def truthy(value: Maybe) -> bool:
    """The server's truth: everything except missing, null, undefined, false and numeric zero."""
    if value is TRUE:
        return True
    if value is None:
        return False
    kind, data = value
    if kind == BOOL:
        return data != b"\x00"
    if kind in NUMERIC:
        return number_of(value) != 0
    return kind not in NULLISH
