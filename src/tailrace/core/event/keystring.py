"""KeyString V1: BSON values as bytes whose order is MongoDB's order of values, and back.

What may live here: values to key bytes and type bits, and back. Numbers are in ``keystring_number``; what a resume
token puts into a key is in ``resume_token``. Values are read from raw BSON; a user's document is never decoded to
Python objects. The layout is described in ``docs/reference/resume-tokens.md``.

*Type bits* are kept as text of ``0`` and ``1`` while a key is built: appended in value order, so that they only have to
be joined, in linear time for keys of any size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.event import keystring_number as number
from tailrace.core.event.keystring_number import malformed
from tailrace.errors import InvalidResumeToken, OplogFormatError

END: Final = 0x04

MIN_KEY: Final = 0x0A
UNDEFINED: Final = 0x0F
NULL: Final = 0x14
NUMERIC: Final = 0x1E
STRING: Final = 0x3C
OBJECT: Final = 0x46
ARRAY: Final = 0x50
BINARY: Final = 0x5A
OBJECT_ID: Final = 0x64
FALSE: Final = 0x6E
TRUE: Final = 0x6F
DATE: Final = 0x78
TIMESTAMP: Final = 0x82
REGEX: Final = 0x8C
DB_POINTER: Final = 0x96
CODE: Final = 0xA0
CODE_WITH_SCOPE: Final = 0xAA
MAX_KEY: Final = 0xF0

#: The byte that stands for a field's type in front of its name inside an object: coarser than the value's own byte,
#: so that fields of different numeric types are ordered by name before they are ordered by value.
_GENERIC: Final[dict[int, bytes]] = {
    raw_bson.DOUBLE: b"\x1e",
    raw_bson.STRING: b"\x3c",
    raw_bson.OBJECT: b"\x46",
    raw_bson.ARRAY: b"\x50",
    raw_bson.BINARY: b"\x5a",
    raw_bson.UNDEFINED: b"\x0f",
    raw_bson.OBJECT_ID: b"\x64",
    raw_bson.BOOL: b"\x6e",
    raw_bson.DATE: b"\x78",
    raw_bson.NULL: b"\x14",
    raw_bson.REGEX: b"\x8c",
    raw_bson.DB_POINTER: b"\x96",
    raw_bson.CODE: b"\xa0",
    raw_bson.SYMBOL: b"\x3c",
    raw_bson.CODE_WITH_SCOPE: b"\xaa",
    raw_bson.INT32: b"\x1e",
    raw_bson.TIMESTAMP: b"\x82",
    raw_bson.INT64: b"\x1e",
    raw_bson.DECIMAL128: b"\x1e",
    raw_bson.MIN_KEY: b"\x0a",
    raw_bson.MAX_KEY: b"\xf0",
}
_CONTAINERS: Final = frozenset((raw_bson.OBJECT, raw_bson.ARRAY, raw_bson.CODE_WITH_SCOPE))
_LARGEST_TYPE_BITS: Final = 64 * 1024 * 1024
_DATE_SIGN: Final = 1 << 63
_DOUBLE = struct.Struct("<d")
_INT32 = struct.Struct("<i")
_INT64 = struct.Struct("<q")

#: Deepest nesting of objects and arrays in a key, as in every document that the server stores or sends.
MAX_DEPTH: Final = 200


# --- values to keys --------------------------------------------------------------------------------------------------


def encode(type_: int, value: bytes) -> tuple[bytes, str]:
    """The key bytes (without end byte) and type bits of one BSON value of type ``type_``.

    ``value`` is the value exactly as it stands in a document. Raises ``OplogFormatError`` on corrupt BSON.
    """
    out = bytearray()
    bits: list[str] = []
    if raw_bson.value_end(value, type_, 0, len(value)) != len(value):
        raise OplogFormatError("corrupt BSON: a value ends before its bytes do", position="the value of a key")
    if type_ in _CONTAINERS:
        _append_container(out, bits, type_, value, 0)
    else:
        _SCALARS[type_](out, bits, value, 0, len(value))
    return bytes(out), "".join(bits)


def encode_object(document: bytes) -> tuple[bytes, str]:
    """The key bytes (without end byte) and type bits of a document."""
    out = bytearray()
    bits: list[str] = []
    _append_container(out, bits, raw_bson.OBJECT, document, 0)
    return bytes(out), "".join(bits)


def _append_container(out: bytearray, bits: list[str], type_: int, buf: bytes, start: int) -> None:
    """Objects, arrays and code with scope, nested to any depth: the stack is our own, so that none can overflow."""
    stack: list[tuple[int, int, bool]] = []
    pos, limit, is_array = _enter(out, type_, buf, start)
    while True:
        while pos < limit:
            type_ = buf[pos]
            name_end = buf.find(0, pos + 1, limit)
            if name_end < 0:
                raise OplogFormatError("corrupt BSON: unterminated field name", position=f"byte {pos} of the document")
            end = raw_bson.value_end(buf, type_, name_end + 1, limit)
            if not is_array:
                out += _GENERIC[type_]
                out += buf[pos + 1 : name_end + 1]
            if type_ in _CONTAINERS:
                stack.append((end, limit, is_array))
                pos, limit, is_array = _enter(out, type_, buf, name_end + 1)
            else:
                _SCALARS[type_](out, bits, buf, name_end + 1, end)
                pos = end
        out.append(0)
        if not stack:
            return
        pos, limit, is_array = stack.pop()


def _enter(out: bytearray, type_: int, buf: bytes, start: int) -> tuple[int, int, bool]:
    """Append what stands in front of a container's elements; where these begin and end, and whether it is an array."""
    if type_ == raw_bson.CODE_WITH_SCOPE:
        limit = start + raw_bson.read_int32(buf, start)
        end = raw_bson.value_end(buf, raw_bson.CODE, start + 4, limit)
        out.append(CODE_WITH_SCOPE)
        _append_text(out, buf, start + 4, end)
        start = end
        return start + 4, raw_bson.document_end(buf, start, limit) - 1, False
    out.append(OBJECT if type_ == raw_bson.OBJECT else ARRAY)
    return start + 4, raw_bson.document_end(buf, start) - 1, type_ == raw_bson.ARRAY


def _append_text(out: bytearray, buf: bytes, start: int, end: int) -> None:
    """A string's bytes: NUL inside becomes ``00 FF``, which sorts above the terminating ``00``."""
    text = buf[start + 4 : end - 1]
    out += text.replace(b"\0", b"\0\xff") if 0 in text else text
    out.append(0)


def _append_string(out: bytearray, bits: list[str], buf: bytes, start: int, end: int) -> None:
    bits.append("0")
    out.append(STRING)
    _append_text(out, buf, start, end)


def _append_symbol(out: bytearray, bits: list[str], buf: bytes, start: int, end: int) -> None:
    bits.append("1")
    out.append(STRING)
    _append_text(out, buf, start, end)


def _append_code(out: bytearray, _bits: list[str], buf: bytes, start: int, end: int) -> None:
    out.append(CODE)
    _append_text(out, buf, start, end)


def _append_double(out: bytearray, bits: list[str], buf: bytes, start: int, _end: int) -> None:
    value: float = _DOUBLE.unpack_from(buf, start)[0]
    bits.append(number.double_type_bits(value))
    out += number.encode_double(value)


def _append_int32(out: bytearray, bits: list[str], buf: bytes, start: int, _end: int) -> None:
    bits.append("00")
    out += number.encode_int(_INT32.unpack_from(buf, start)[0])


def _append_int64(out: bytearray, bits: list[str], buf: bytes, start: int, _end: int) -> None:
    bits.append("01")
    out += number.encode_int(_INT64.unpack_from(buf, start)[0])


def _append_decimal(out: bytearray, bits: list[str], buf: bytes, start: int, end: int) -> None:
    key, code = number.encode_decimal(buf[start:end])
    bits.append(code)
    out += key


def _append_binary(out: bytearray, _bits: list[str], buf: bytes, start: int, end: int) -> None:
    size = end - start - 5
    out.append(BINARY)
    out += b"%c" % size if size < 0xFF else b"\xff" + size.to_bytes(4, "big")
    out += buf[start + 4 : end]


def _append_object_id(out: bytearray, _bits: list[str], buf: bytes, start: int, end: int) -> None:
    out.append(OBJECT_ID)
    out += buf[start:end]


def _append_bool(out: bytearray, _bits: list[str], buf: bytes, start: int, _end: int) -> None:
    out.append(TRUE if buf[start] else FALSE)


def _append_date(out: bytearray, _bits: list[str], buf: bytes, start: int, end: int) -> None:
    out.append(DATE)
    out += (int.from_bytes(buf[start:end], "little") ^ _DATE_SIGN).to_bytes(8, "big")


def _append_timestamp(out: bytearray, _bits: list[str], buf: bytes, start: int, end: int) -> None:
    out.append(TIMESTAMP)
    out += buf[start:end][::-1]


def _append_regex(out: bytearray, _bits: list[str], buf: bytes, start: int, end: int) -> None:
    out.append(REGEX)
    out += buf[start:end]


def _append_db_pointer(out: bytearray, _bits: list[str], buf: bytes, start: int, end: int) -> None:
    namespace = buf[start + 4 : end - 13].partition(b"\0")[0]  # the server takes it for a C string
    out.append(DB_POINTER)
    out += len(namespace).to_bytes(4, "big")
    out += namespace
    out += buf[end - 12 : end]


def _append_byte(byte: int) -> Callable[[bytearray, list[str], bytes, int, int], None]:
    def append(out: bytearray, _bits: list[str], _buf: bytes, _start: int, _end: int) -> None:
        out.append(byte)

    return append


_SCALARS: Final[dict[int, Callable[[bytearray, list[str], bytes, int, int], None]]] = {
    raw_bson.DOUBLE: _append_double,
    raw_bson.STRING: _append_string,
    raw_bson.BINARY: _append_binary,
    raw_bson.UNDEFINED: _append_byte(UNDEFINED),
    raw_bson.OBJECT_ID: _append_object_id,
    raw_bson.BOOL: _append_bool,
    raw_bson.DATE: _append_date,
    raw_bson.NULL: _append_byte(NULL),
    raw_bson.REGEX: _append_regex,
    raw_bson.DB_POINTER: _append_db_pointer,
    raw_bson.CODE: _append_code,
    raw_bson.SYMBOL: _append_symbol,
    raw_bson.INT32: _append_int32,
    raw_bson.TIMESTAMP: _append_timestamp,
    raw_bson.INT64: _append_int64,
    raw_bson.DECIMAL128: _append_decimal,
    raw_bson.MIN_KEY: _append_byte(MIN_KEY),
    raw_bson.MAX_KEY: _append_byte(MAX_KEY),
}


# --- type bits -------------------------------------------------------------------------------------------------------


def pack_type_bits(bits: str) -> bytes | None:
    """The stored form of type bits; ``None`` when all are zero, which the server stores as nothing."""
    if "1" not in bits:
        return None
    size = (len(bits) + 7) >> 3
    # The first bit is the lowest of the first byte.
    data = int(bits[::-1], 2).to_bytes(size, "little")
    if size == 1 and data[0] < 0x80:
        return data
    if size < 0x80:
        return b"%c%b" % (0x80 | size, data)
    return b"\x80" + _INT32.pack(size) + data


def unpack_type_bits(stored: bytes) -> bytes:
    """The bare bytes of stored type bits. Raises ``InvalidResumeToken`` when sizes do not fit."""
    if not stored:
        return b""
    first = stored[0]
    if first == 0:  # "all zero": never used up, however many bits the values need
        return b""
    if first < 0x80:
        return stored[:1]
    rest = len(stored) - 1
    if first > 0x80:
        size, start = first & 0x7F, 1
        if size > rest:
            raise _past_end(size, rest)
        return stored[start : start + size]
    if rest < 4:
        raise InvalidResumeToken(f"buffer size too small to read (4) bytes out of buffer[{rest}] at offset: 0", code=15)
    size, start = int.from_bytes(stored[1:5], "little"), 5
    if size <= 0x7F:
        raise malformed(50910, "Invalid overlong encoding.")
    if size + start > _LARGEST_TYPE_BITS:
        raise InvalidResumeToken(
            f"BufBuilder attempted to grow() to {size + start} bytes, past the 64MB limit.", code=13548
        )
    if size > rest - 4:
        raise _past_end(size, rest - 4)
    return stored[start : start + size]


# --- keys to values --------------------------------------------------------------------------------------------------


def _past_end(count: int, remaining: int) -> InvalidResumeToken:
    # The server's reader moves the start of its view: its offset is 0 wherever it stands.
    return InvalidResumeToken(f"Invalid advance ({count}) past end of buffer[{remaining}] at offset: 0", code=15)


class KeyReader:
    """Reads values from key bytes and type bits, in order.

    ``pos`` is the offset of the next value's type byte. Every method raises ``InvalidResumeToken`` with the server's
    code if the bytes are not a key.
    """

    __slots__ = ("_bit", "_bits", "key", "pos")

    def __init__(self, key: bytes, type_bits: bytes = b"") -> None:
        self.key = key
        self.pos = 0
        self._bits = unpack_type_bits(type_bits)
        self._bit = 0

    def take(self, count: int) -> bytes:
        start, remaining = self.pos, len(self.key) - self.pos
        if count > remaining:
            raise _past_end(count, remaining)
        self.pos = start + count
        return self.key[start : self.pos]

    def take_each(self, count: int) -> bytes:
        """As ``take``; the server reads these one at a time, which shows in its error only."""
        if count > len(self.key) - self.pos:
            raise _past_end(1, 0)
        return self.take(count)

    def take_byte(self) -> int:
        return self.take(1)[0]

    def take_bits(self, count: int) -> int:
        """The next ``count`` type bits, the first one highest; zeros from a key that has none."""
        bits = self._bits
        if not bits:
            return 0
        result = 0
        for bit in range(self._bit, self._bit + count):
            byte = bit >> 3
            if byte >= len(bits):
                raise malformed(50615, "Invalid size byte(s).")
            result = result << 1 | (bits[byte] >> (bit & 7) & 1)
        self._bit += count
        return result

    def value(self, ctype: int, depth: int = 1) -> tuple[int, bytes]:
        """BSON type and value bytes of the value whose type byte was ``ctype`` (read already)."""
        if number.NAN <= ctype <= number.POSITIVE_LARGE:
            return number.decode_number(ctype, self)
        reader = _READERS.get(ctype)
        if reader is not None:
            return reader(self)
        simple = _WITHOUT_BODY.get(ctype)
        if simple is not None:
            return simple
        if depth > MAX_DEPTH:
            raise malformed(15, "KeyString encoding exceeded maximum allowable BSON nesting depth")
        if ctype == OBJECT:
            return raw_bson.OBJECT, self._fields(depth)
        if ctype == ARRAY:
            return raw_bson.ARRAY, self._items(depth)
        if ctype == CODE_WITH_SCOPE:
            body = raw_bson.encode_string(self.text()) + self._fields(depth)
            return raw_bson.CODE_WITH_SCOPE, _INT32.pack(len(body) + 4) + body
        raise malformed(50811, f"Unknown type: {ctype}")

    def _fields(self, depth: int) -> bytes:
        parts: list[bytes] = []
        while self.take_byte():
            name = self.c_string()
            parts.append(self._element(name, depth))
        return raw_bson.encode_document(*parts)

    def _items(self, depth: int) -> bytes:
        parts: list[bytes] = []
        while ctype := self.take_byte():
            type_, value = self.value(ctype, depth + 1)
            parts.append(raw_bson.encode_element(type_, b"%d" % len(parts), value))
        return raw_bson.encode_document(*parts)

    def _element(self, name: bytes, depth: int) -> bytes:
        type_, value = self.value(self.take_byte(), depth + 1)
        return raw_bson.encode_element(type_, name, value)

    def c_string(self) -> bytes:
        end = self.key.find(0, self.pos)
        if end < 0:
            raise malformed(50816, "Failed to find null terminator in string.")
        start, self.pos = self.pos, end + 1
        return self.key[start:end]

    def text(self) -> bytes:
        """A string's bytes, its escaped NULs restored."""
        parts = [self.c_string()]
        while self.pos < len(self.key) and self.key[self.pos] == 0xFF:
            self.pos += 1
            parts.append(self.c_string())
        return b"\0".join(parts)


def _read_string(reader: KeyReader) -> tuple[int, bytes]:
    type_ = raw_bson.SYMBOL if reader.take_bits(1) else raw_bson.STRING
    return type_, raw_bson.encode_string(reader.text())


def _read_code(reader: KeyReader) -> tuple[int, bytes]:
    return raw_bson.CODE, raw_bson.encode_string(reader.text())


def _read_binary(reader: KeyReader) -> tuple[int, bytes]:
    size = reader.take_byte()
    if size == 0xFF:
        size = int.from_bytes(reader.take(4), "big")
    return raw_bson.BINARY, size.to_bytes(4, "little") + reader.take(1) + reader.take(size)


def _read_object_id(reader: KeyReader) -> tuple[int, bytes]:
    return raw_bson.OBJECT_ID, reader.take(12)


def _read_date(reader: KeyReader) -> tuple[int, bytes]:
    return raw_bson.DATE, (int.from_bytes(reader.take(8), "big") ^ _DATE_SIGN).to_bytes(8, "little")


def _read_timestamp(reader: KeyReader) -> tuple[int, bytes]:
    return raw_bson.TIMESTAMP, reader.take(8)[::-1]


def _read_regex(reader: KeyReader) -> tuple[int, bytes]:
    return raw_bson.REGEX, b"%b\0%b\0" % (reader.c_string(), reader.c_string())


def _read_db_pointer(reader: KeyReader) -> tuple[int, bytes]:
    namespace = reader.take(int.from_bytes(reader.take(4), "big"))
    return raw_bson.DB_POINTER, raw_bson.encode_string(namespace) + reader.take(12)


_READERS: Final[dict[int, Callable[[KeyReader], tuple[int, bytes]]]] = {
    STRING: _read_string,
    BINARY: _read_binary,
    OBJECT_ID: _read_object_id,
    DATE: _read_date,
    TIMESTAMP: _read_timestamp,
    REGEX: _read_regex,
    DB_POINTER: _read_db_pointer,
    CODE: _read_code,
}
_WITHOUT_BODY: Final[dict[int, tuple[int, bytes]]] = {
    MIN_KEY: (raw_bson.MIN_KEY, b""),
    UNDEFINED: (raw_bson.UNDEFINED, b""),
    NULL: (raw_bson.NULL, b""),
    FALSE: (raw_bson.BOOL, b"\x00"),
    TRUE: (raw_bson.BOOL, b"\x01"),
    MAX_KEY: (raw_bson.MAX_KEY, b""),
}
