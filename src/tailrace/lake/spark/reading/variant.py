"""BSON to Spark's VARIANT binary, straight from the bytes: no JSON text between, no type lost that VARIANT has.

VARIANT is two byte strings: ``metadata`` (a dictionary of field names) and ``value``. The layout is that of the Parquet
Variant encoding, version 1, as Spark 4.3 reads it. What becomes of each BSON type:

    double                  double, bit for bit (NaN and infinities too)
    string                  string
    document                object; of a name that occurs twice the last one counts, as for ``bson.decode``
    array                   array
    binary, subtype 0, 2    binary
    binary, subtype 4, 16 bytes (UUID)     its text, ``"00112233-4455-6677-8899-aabbccddeeff"``
    ObjectId                its 24 hexadecimal digits as a string
    bool, null              boolean, null
    date                    timestamp (with time zone), exact milliseconds
    int32, int64            4-byte and 8-byte integer
    decimal128              decimal with the same scale where VARIANT can hold it (scale 0..38, 38 digits)
    all others              an object in the form of Extended JSON v2: ``{"$regularExpression": ..}``,
                            ``{"$timestamp": {"t", "i"}}``, ``{"$minKey": 1}``, ``{"$maxKey": 1}``, ``{"$code": ..}``,
                            ``{"$symbol": ..}``, ``{"$undefined": true}``, ``{"$dbPointer": ..}``,
                            ``{"$binary": {"base64", "subType"}}``; also ``{"$numberDecimal": ".."}`` for a decimal
                            that VARIANT cannot hold (NaN, infinities, exponents out of range) and
                            ``{"$date": {"$numberLong": ".."}}`` for a date of a year outside 1 to 9999

The last group keeps value and type; ObjectId and UUID trade the type for paths that everybody expects to work
(``document_key:_id::string``). Text that is not UTF-8 gets U+FFFD in place of what is wrong; the column ``event`` keeps
the bytes themselves.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Final
from uuid import UUID

from bson.decimal128 import Decimal128

from tailrace.core import raw_bson
from tailrace.errors import OplogFormatError

VERSION: Final = 1
_OBJECT: Final = 2
_ARRAY: Final = 3
_SHORT_STRING_MAX: Final = 63
#: The years 1 to 9999. A date of another year is no date for PySpark, which fails on the whole row, nor for pyarrow and
#: Polars.
FIRST_MS: Final = -62_135_596_800_000
LAST_MS: Final = 253_402_300_799_999

#: Primitive headers: type number << 2.
_NULL: Final = b"\x00"
_TRUE: Final = b"\x04"
_FALSE: Final = b"\x08"
_INT4: Final = b"\x14"
_INT8: Final = b"\x18"
_DOUBLE: Final = b"\x1c"
_TIMESTAMP: Final = b"\x30"
_BINARY: Final = b"\x3c"
_LONG_STRING: Final = b"\x40"

#: (largest precision and scale, primitive header, bytes) of VARIANT's three decimals.
_DECIMALS: Final = ((9, b"\x20", 4), (18, b"\x24", 8), (38, b"\x28", 16))

#: Documents nested deeper than the server allows (100 levels, some more inside an event) are damaged, not deep.
_DEPTH_MAX: Final = 250

Variant = tuple[bytes, bytes]


class _Names:
    """The dictionary of one value: field names by number, in the order of their first appearance."""

    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}

    def id(self, name: bytes) -> int:
        return self.ids.setdefault(name, len(self.ids))

    def metadata(self) -> bytes:
        names = b"".join(self.ids)
        size = _width(max(len(names), len(self.ids)))
        offsets = bytearray()
        position = 0
        for name in self.ids:
            offsets += position.to_bytes(size, "little")
            position += len(name)
        offsets += position.to_bytes(size, "little")
        header = VERSION | (size - 1) << 6
        return b"%c%b%b%b" % (header, len(self.ids).to_bytes(size, "little"), bytes(offsets), names)


def from_value(type_: int, value: bytes) -> Variant:
    """One BSON value of element type ``type_`` as ``(value, metadata)``."""
    names = _Names()
    encoded = _value(type_, value, names, 0)
    return encoded, names.metadata()


#: What stands for BSON null: a VARIANT null, which is not SQL's NULL (``is_variant_null`` tells them apart).
NULL_VARIANT: Final[Variant] = (b"\x00", b"\x01\x00\x00")


def _width(largest: int) -> int:
    """The bytes that an unsigned ``largest`` needs."""
    if largest < 1 << 8:
        return 1
    if largest < 1 << 16:
        return 2
    return 3 if largest < 1 << 24 else 4


def _text(data: bytes) -> bytes:
    """``data`` as valid UTF-8."""
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode(errors="replace").encode()
    return data


def _string(text: bytes) -> bytes:
    if len(text) <= _SHORT_STRING_MAX:
        return b"%c%b" % (len(text) << 2 | 1, text)
    return _LONG_STRING + len(text).to_bytes(4, "little") + text


def _utf16_order(name: bytes) -> bytes:
    """Spark searches objects of 32 fields and more by bisection, in the order of Java strings: UTF-16 code units."""
    return name.decode().encode("utf-16-be")


def _container(header: int, count: int, ids: list[int] | None, values: list[bytes]) -> bytes:
    total = sum(map(len, values))
    offset_size = _width(total)
    large = count > 0xFF
    parts = [b"", count.to_bytes(4 if large else 1, "little")]
    if ids is None:
        parts[0] = b"%c" % (header | (offset_size - 1) << 2 | large << 4)
    else:
        id_size = _width(max(ids, default=0))
        parts[0] = b"%c" % (header | (offset_size - 1) << 2 | (id_size - 1) << 4 | large << 6)
        parts += [number.to_bytes(id_size, "little") for number in ids]
    position = 0
    for value in values:
        parts.append(position.to_bytes(offset_size, "little"))
        position += len(value)
    parts.append(position.to_bytes(offset_size, "little"))
    return b"".join(parts + values)


def _object_of(fields: dict[bytes, bytes], names: _Names) -> bytes:
    """An object from encoded values by name."""
    ids = {name: names.id(name) for name in fields}
    order = sorted(fields) if all(map(bytes.isascii, fields)) else sorted(fields, key=_utf16_order)
    return _container(_OBJECT, len(order), [ids[name] for name in order], [fields[name] for name in order])


def _object(document: bytes, names: _Names, depth: int) -> bytes:
    if depth > _DEPTH_MAX:
        raise OplogFormatError("corrupt BSON: documents are nested too deeply")
    fields = {
        _text(element.name): _value(element.type, document[element.value_start : element.end], names, depth + 1)
        for element in raw_bson.elements(document)
    }
    return _object_of(fields, names)


def _array(document: bytes, names: _Names, depth: int) -> bytes:
    if depth > _DEPTH_MAX:
        raise OplogFormatError("corrupt BSON: documents are nested too deeply")
    values = [
        _value(element.type, document[element.value_start : element.end], names, depth + 1)
        for element in raw_bson.elements(document)
    ]
    return _container(_ARRAY, len(values), None, values)


def _date(value: bytes, names: _Names) -> bytes:
    milliseconds = raw_bson.read_int64(value, 0)
    if FIRST_MS <= milliseconds <= LAST_MS:
        return _TIMESTAMP + (milliseconds * 1000).to_bytes(8, "little", signed=True)
    number = _object_of({b"$numberLong": _string(str(milliseconds).encode())}, names)
    return _object_of({b"$date": number}, names)


def _decimal(value: bytes, names: _Names) -> bytes:
    number = Decimal128.from_bid(value)
    decimal = number.to_decimal()
    if decimal.is_finite():
        sign, digits, exponent = decimal.as_tuple()
        coefficient = int("".join(map(str, digits)))
        scale = -int(exponent)
        if scale < 0 and len(digits) - scale <= 38:
            coefficient, scale = coefficient * 10**-scale, 0
        if coefficient == 0:
            # The sign of a zero has no place in a VARIANT decimal, and an exponent only up to 38.
            scale = min(max(scale, 0), 38)
        precision = len(str(coefficient))
        for largest, header, size in _DECIMALS:
            if 0 <= scale <= largest and precision <= largest:
                unscaled = -coefficient if sign else coefficient
                return header + bytes((scale,)) + unscaled.to_bytes(size, "little", signed=True)
    return _object_of({b"$numberDecimal": _string(str(number).encode())}, names)


def _binary(value: bytes, names: _Names) -> bytes:
    subtype, data = value[4], value[5:]
    if subtype == 2 and len(data) >= 4:
        data = data[4:]  # the old subtype repeats the length inside
    if subtype in {0, 2}:
        return _BINARY + len(data).to_bytes(4, "little") + data
    if subtype == 4 and len(data) == 16:
        return _string(str(UUID(bytes=data)).encode())
    fields = {b"base64": _string(base64.b64encode(data)), b"subType": _string(b"%02x" % subtype)}
    return _object_of({b"$binary": _object_of(fields, names)}, names)


def _timestamp(value: bytes, names: _Names) -> bytes:
    increment, seconds = struct.unpack("<II", value)
    fields = {b"t": _unsigned(seconds), b"i": _unsigned(increment)}
    return _object_of({b"$timestamp": _object_of(fields, names)}, names)


def _unsigned(number: int) -> bytes:
    return _INT8 + number.to_bytes(8, "little")


def _regex(value: bytes, names: _Names) -> bytes:
    pattern, options, _ = value.split(b"\x00")
    fields = {b"pattern": _string(_text(pattern)), b"options": _string(_text(options))}
    return _object_of({b"$regularExpression": _object_of(fields, names)}, names)


def _db_pointer(value: bytes, names: _Names) -> bytes:
    identifier = _object_of({b"$oid": _string(value[-12:].hex().encode())}, names)
    fields = {b"$ref": _string(_text(raw_bson.read_string(value, 0))), b"$id": identifier}
    return _object_of({b"$dbPointer": _object_of(fields, names)}, names)


def _code_with_scope(value: bytes, names: _Names, depth: int) -> bytes:
    code_end = 4 + raw_bson.value_end(value[4:], raw_bson.STRING, 0, len(value) - 4)
    code = raw_bson.read_string(value, 4)
    scope = value[code_end:]
    return _object_of({b"$code": _string(_text(code)), b"$scope": _object(scope, names, depth + 1)}, names)


def _wrapped_string(name: bytes) -> Callable[[bytes, _Names], bytes]:
    return lambda value, names: _object_of({name: _string(_text(raw_bson.read_string(value, 0)))}, names)


def _constant(name: bytes, encoded: bytes) -> Callable[[bytes, _Names], bytes]:
    return lambda value, names: _object_of({name: encoded}, names)


_ONE: Final = _INT4 + (1).to_bytes(4, "little")

_BY_TYPE: Final[dict[int, Callable[[bytes, _Names], bytes]]] = {
    raw_bson.STRING: lambda value, names: _string(_text(raw_bson.read_string(value, 0))),
    raw_bson.INT32: lambda value, names: _INT4 + value,
    raw_bson.INT64: lambda value, names: _INT8 + value,
    raw_bson.DOUBLE: lambda value, names: _DOUBLE + value,
    raw_bson.OBJECT_ID: lambda value, names: _string(value.hex().encode()),
    raw_bson.BOOL: lambda value, names: _FALSE if value == b"\x00" else _TRUE,
    raw_bson.NULL: lambda value, names: _NULL,
    raw_bson.DATE: _date,
    raw_bson.DECIMAL128: _decimal,
    raw_bson.BINARY: _binary,
    raw_bson.TIMESTAMP: _timestamp,
    raw_bson.REGEX: _regex,
    raw_bson.DB_POINTER: _db_pointer,
    raw_bson.CODE: _wrapped_string(b"$code"),
    raw_bson.SYMBOL: _wrapped_string(b"$symbol"),
    raw_bson.UNDEFINED: _constant(b"$undefined", _TRUE),
    raw_bson.MIN_KEY: _constant(b"$minKey", _ONE),
    raw_bson.MAX_KEY: _constant(b"$maxKey", _ONE),
}


def _value(type_: int, value: bytes, names: _Names, depth: int) -> bytes:
    if type_ == raw_bson.OBJECT:
        return _object(value, names, depth)
    if type_ == raw_bson.ARRAY:
        return _array(value, names, depth)
    if type_ == raw_bson.CODE_WITH_SCOPE:
        return _code_with_scope(value, names, depth)
    encoder = _BY_TYPE.get(type_)
    if encoder is None:
        raise OplogFormatError(f"corrupt BSON: unknown element type 0x{type_:02x}")
    return encoder(value, names)
