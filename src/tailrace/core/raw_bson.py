"""Views on BSON bytes: find, cut and join elements without decoding them.

What may live here: functions from bytes to bytes and offsets. What may not: Python values for users' data (that is the
``bson`` codec's work), any I/O. Every function takes a buffer and absolute offsets into it, checks the lengths that it
follows, and raises ``OplogFormatError`` with the offset when they lead outside the document.

An *element* is a type byte, a NUL-terminated name and a value (bsonspec.org, version 1.1).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from tailrace.errors import OplogFormatError

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument

DOUBLE: Final = 0x01
STRING: Final = 0x02
OBJECT: Final = 0x03
ARRAY: Final = 0x04
BINARY: Final = 0x05
UNDEFINED: Final = 0x06
OBJECT_ID: Final = 0x07
BOOL: Final = 0x08
DATE: Final = 0x09
NULL: Final = 0x0A
REGEX: Final = 0x0B
DB_POINTER: Final = 0x0C
CODE: Final = 0x0D
SYMBOL: Final = 0x0E
CODE_WITH_SCOPE: Final = 0x0F
INT32: Final = 0x10
TIMESTAMP: Final = 0x11
INT64: Final = 0x12
DECIMAL128: Final = 0x13
MIN_KEY: Final = 0xFF
MAX_KEY: Final = 0x7F

#: The server nests documents no deeper.
DEPTH_MAX: Final = 200

EMPTY_DOCUMENT: Final = b"\x05\x00\x00\x00\x00"

_INT32 = struct.Struct("<i")
_INT64 = struct.Struct("<q")

#: Value sizes of the types whose size is fixed.
FIXED_SIZES: Final[dict[int, int]] = {
    DOUBLE: 8,
    UNDEFINED: 0,
    OBJECT_ID: 12,
    BOOL: 1,
    DATE: 8,
    NULL: 0,
    INT32: 4,
    TIMESTAMP: 8,
    INT64: 8,
    DECIMAL128: 16,
    MIN_KEY: 0,
    MAX_KEY: 0,
}
#: Types that begin with an int32 length: what to add to that length to get the value's size.
LENGTH_EXTRAS: Final[dict[int, int]] = {
    STRING: 4,
    CODE: 4,
    SYMBOL: 4,
    OBJECT: 0,
    ARRAY: 0,
    CODE_WITH_SCOPE: 0,
    BINARY: 5,
    DB_POINTER: 16,
}


#: The least sizes of their values: a string has its NUL, code with scope a string and a document.
_LEAST_SIZES: Final[dict[int, int]] = {
    STRING: 5,
    CODE: 5,
    SYMBOL: 5,
    OBJECT: 5,
    ARRAY: 5,
    CODE_WITH_SCOPE: 14,
    BINARY: 5,
    DB_POINTER: 17,
}


#: The server's words for BSON types, for its messages.
TYPE_NAMES: Final[dict[int, str]] = {
    DOUBLE: "double",
    STRING: "string",
    OBJECT: "object",
    ARRAY: "array",
    BINARY: "binData",
    UNDEFINED: "undefined",
    OBJECT_ID: "objectId",
    BOOL: "bool",
    DATE: "date",
    NULL: "null",
    REGEX: "regex",
    DB_POINTER: "dbPointer",
    CODE: "javascript",
    SYMBOL: "symbol",
    CODE_WITH_SCOPE: "javascriptWithScope",
    INT32: "int",
    TIMESTAMP: "timestamp",
    INT64: "long",
    DECIMAL128: "decimal",
    MAX_KEY: "maxKey",
    MIN_KEY: "minKey",
}


class Element(NamedTuple):
    """One element of a document: its type byte, name (without NUL), and where it and its value lie in the buffer."""

    type: int
    name: bytes
    start: int
    value_start: int
    end: int


def _bad(message: str, offset: int) -> OplogFormatError:
    return OplogFormatError(f"corrupt BSON: {message}", position=f"byte {offset} of the document")


def value_end(buf: bytes, type_: int, start: int, limit: int) -> int:
    """Where the value of type ``type_`` that starts at ``start`` ends; ``limit`` is where its document's NUL lies."""
    size = FIXED_SIZES.get(type_)
    if size is None:
        extra = LENGTH_EXTRAS.get(type_)
        if extra is not None:
            if start + 4 > limit:
                raise _bad("truncated length", start)
            length = _INT32.unpack_from(buf, start)[0]
            if length < 0:
                raise _bad("negative length", start)
            size = length + extra
            if size < _LEAST_SIZES[type_]:
                raise _bad("length too small", start)
        elif type_ == REGEX:
            first = buf.find(0, start, limit)
            second = buf.find(0, first + 1, limit) if first >= 0 else -1
            if second < 0:
                raise _bad("unterminated regular expression", start)
            return second + 1
        else:
            raise _bad(f"unknown element type 0x{type_:02x}", start)
    end = start + size
    if end > limit:
        raise _bad("a value leads outside its document", start)
    return end


def document_end(buf: bytes, start: int = 0, limit: int | None = None) -> int:
    """Where the document that starts at ``start`` ends (after its final NUL), its own length checked."""
    limit = len(buf) if limit is None else limit
    if start + 5 > limit:
        raise _bad("truncated document", start)
    length: int = _INT32.unpack_from(buf, start)[0]
    end = start + length
    if length < 5 or end > limit:
        raise _bad(f"document length {length} leads outside the buffer", start)
    if buf[end - 1] != 0:
        raise _bad("document does not end with NUL", end - 1)
    return end


def elements(buf: bytes, start: int = 0) -> Iterator[Element]:
    """The elements of the document at ``start``, in order. Duplicate names are given as often as they stand there."""
    limit = document_end(buf, start) - 1
    fixed = FIXED_SIZES
    pos = start + 4
    while pos < limit:
        name_end = buf.find(0, pos + 1, limit)
        if name_end < 0:
            raise _bad("unterminated field name", pos)
        type_ = buf[pos]
        size = fixed.get(type_)
        end = value_end(buf, type_, name_end + 1, limit) if size is None else name_end + 1 + size
        if end > limit:
            raise _bad("a value leads outside its document", name_end + 1)
        yield Element(type_, buf[pos + 1 : name_end], pos, name_end + 1, end)
        pos = end


def find(buf: bytes, name: bytes, start: int = 0) -> Element | None:
    """The first element called ``name`` of the document at ``start``."""
    # As ``elements``, written out: it is called for every message and every event, and makes no object on the way.
    limit = document_end(buf, start) - 1
    fixed = FIXED_SIZES
    pos = start + 4
    while pos < limit:
        name_end = buf.find(0, pos + 1, limit)
        if name_end < 0:
            raise _bad("unterminated field name", pos)
        type_ = buf[pos]
        size = fixed.get(type_)
        end = value_end(buf, type_, name_end + 1, limit) if size is None else name_end + 1 + size
        if end > limit:
            raise _bad("a value leads outside its document", name_end + 1)
        if buf[pos + 1 : name_end] == name:
            return Element(type_, name, pos, name_end + 1, end)
        pos = end
    return None


def value(buf: bytes, element: Element) -> bytes:
    """The bytes of the element's value."""
    return buf[element.value_start : element.end]


def type_name(type_: int) -> str:
    """The server's word for a BSON type."""
    return TYPE_NAMES.get(type_, "unknown")


def encode_element(type_: int, name: bytes, value_bytes: bytes) -> bytes:
    """One element from its parts. ``name`` must hold no NUL."""
    return b"%c%b\x00%b" % (type_, name, value_bytes)


def encode_document(*parts: bytes) -> bytes:
    """A document from encoded elements."""
    body = b"".join(parts)
    return _INT32.pack(len(body) + 5) + body + b"\x00"


def encode_string(text: str | bytes) -> bytes:
    """A string value: length, UTF-8 bytes, NUL."""
    data = text.encode() if isinstance(text, str) else text
    return _INT32.pack(len(data) + 1) + data + b"\x00"


def encode_int32(number: int) -> bytes:
    return _INT32.pack(number)


def encode_int64(number: int) -> bytes:
    return _INT64.pack(number)


def read_int32(buf: bytes, start: int) -> int:
    result: int = _INT32.unpack_from(buf, start)[0]
    return result


def read_int64(buf: bytes, start: int) -> int:
    result: int = _INT64.unpack_from(buf, start)[0]
    return result


def read_string(buf: bytes, start: int) -> bytes:
    """The bytes of the string value at ``start`` without length and NUL (UTF-8 is not checked)."""
    return buf[start + 4 : start + 3 + _INT32.unpack_from(buf, start)[0]]


def bytes_of(document: RawBSONDocument) -> bytes:
    """The bytes of a document of PyMongo's: its ``raw`` is a view of the whole reply where the document has 4 kB or
    more, although its type says otherwise. ``tests/tidy/test_raw_documents.py`` sees that nobody takes ``raw``."""
    return bytes(document.raw)


def split(buf: bytes) -> Iterator[bytes]:
    """The documents of a buffer that holds them one after another, each checked for its outer length only."""
    pos, size = 0, len(buf)
    while pos < size:
        end = document_end(buf, pos)
        yield buf[pos:end]
        pos = end


def array_documents(buf: bytes, start: int) -> bytes:
    """The documents of the array at ``start``, one after another without their keys.

    The server numbers an array's elements from 0 on, so where a value begins is known without a look at its key.
    """
    limit = document_end(buf, start) - 1
    size_at = _INT32.unpack_from
    only = start + 7
    if only + 5 <= limit and only + size_at(buf, only)[0] == limit and buf[start + 4] == OBJECT and not buf[only - 1]:
        return buf[only:limit]
    view = memoryview(buf)
    pieces: list[memoryview] = []
    pos, digits, count, next_length = start + 4, 1, 0, 10
    while pos < limit:
        value = pos + digits + 2
        end = value + size_at(buf, value)[0] if value + 5 <= limit else limit + 1
        if not value + 5 <= end <= limit or buf[pos] != OBJECT or buf[value - 1]:
            raise OplogFormatError("a reply's batch is no array of documents", position=f"byte {pos} of the reply")
        pieces.append(view[value:end])
        pos = end
        count += 1
        if count == next_length:
            digits, next_length = digits + 1, next_length * 10
    return b"".join(pieces)


def check_structure(raw: bytes) -> None:
    """Follow every length of a document, the nested ones too. Raises OplogFormatError at the first that is wrong.

    ``elements`` says the same with more words; this loop is most of a dump's cost (16 against 32 µs an entry).
    """
    document_end(raw)
    fixed, unpack, find = FIXED_SIZES, _INT32.unpack_from, raw.find
    pending = [(4, len(raw) - 1, 1)]
    while pending:
        pos, limit, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise _bad("documents nested too deeply", pos)
        while pos < limit:
            type_ = raw[pos]
            start = find(0, pos + 1, limit) + 1
            if start == 0:
                raise _bad("unterminated field name", pos)
            size = fixed.get(type_)
            if size is not None:
                end = start + size
            elif type_ == STRING and start + 4 < limit:
                length = unpack(raw, start)[0]
                end = start + 4 + length
                if length < 1 or end > limit or raw[end - 1] != 0:
                    raise _bad("string without its end", pos)
            else:
                end = value_end(raw, type_, start, limit)
                if type_ in (OBJECT, ARRAY):
                    if raw[end - 1] != 0:
                        raise _bad("nested document without its end", pos)
                    pending.append((start + 4, end - 1, depth + 1))
            if end > limit:
                raise _bad("value leads outside its document", pos)
            pos = end


def explained(documents: Iterable[bytes], error: Exception) -> Exception:
    """What ``error``, which work on ``documents`` has raised, means: an ``OplogFormatError`` where one of them is
    damaged. Who works on documents follows their lengths without a look at each, since servers write sound ones; what
    then goes wrong is an index, a number or a recursion that says nothing of its cause. A want of memory does."""
    if isinstance(error, MemoryError):
        return error
    for document in documents:
        try:
            check_structure(document)
        except OplogFormatError as damage:
            return damage
    return error
