"""BSON as the texts that MongoDB's Java driver writes, which Debezium passes on: ``legacy`` and ``relaxed``.

They are made from the bytes, not from decoded values: PyMongo's codec gives a symbol as a string, undefined as
``None``, and what looks like a reference as a ``DBRef``, whose fields have an order of their own.

``legacy`` is the driver's mode "strict", from before Extended JSON 2. It tells integers of 32 and 64 bits apart, and
writes NaN and the infinities bare, which JSON does not know, though most readers of it do.
"""

from __future__ import annotations

import base64
import re
import sys
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache, lru_cache
from json.encoder import encode_basestring
from math import isfinite
from struct import Struct
from typing import Final

from bson.decimal128 import Decimal128

from tailrace.act.consumer.messages.publisher import MessageRefused
from tailrace.core import raw_bson
from tailrace.errors import OplogFormatError

_INT32: Final = Struct("<i")
_INT64: Final = Struct("<q")
_DOUBLE: Final = Struct("<d")
_TIMESTAMP: Final = Struct("<II")
_OLD_BINARY: Final = 2
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The last millisecond of the year 9999: dates after it, and before 1970, are numbers in relaxed texts.
_LAST_DATE: Final = 253_402_300_799_999
#: What Java's driver writes as it is; all else is escaped: marks that combine, formats, private and unassigned ones.
_PLAIN: Final = frozenset(
    ("Lu", "Ll", "Lt", "Lo", "Nd", "Nl", "No", "Zs", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So")
)
#: Names up to this many bytes are remembered with their texts: collections have few, and their documents many.
_SHORT_NAME: Final = 64
_SHORT: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

#: Text of the value of a type that starts at an offset of the buffer.
_ValueWriter = Callable[[bytes, int], str]


def legacy(document: bytes, start: int = 0) -> str:
    """The text of the document at ``start``, as of Debezium's ``before`` and ``after``: a comma without a space after
    it. Raises MessageRefused where a text cannot be equal to it: a string is not UTF-8, or a field is there twice."""
    return _LEGACY.document(document, start)


def relaxed(document: bytes, start: int = 0) -> str:
    """The text of the document at ``start`` as relaxed Extended JSON. Raises MessageRefused as ``legacy`` does."""
    return _RELAXED.document(document, start)


def relaxed_value(document: bytes, element: raw_bson.Element) -> str:
    """The text of one value, as of Debezium's keys: relaxed Extended JSON with commas without spaces. Raises
    MessageRefused as ``legacy`` does."""
    return _RELAXED_CLOSE.value(document, element.type, element.value_start)


def quoted(text: str) -> str:
    """A string of JSON."""
    # The codec of the standard library does the same to ASCII, but for DEL.
    if text.isascii() and "\x7f" not in text:
        return encode_basestring(text)
    return '"' + _escaped_characters().sub(_escape, text) + '"'


@cache
def _escaped_characters() -> re.Pattern[str]:
    """One character that is not written as it is."""
    ranges: list[list[int]] = []
    for code in range(0x10000):
        character = chr(code)
        if character in _SHORT or unicodedata.category(character) not in _PLAIN:
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    ranges.append([0x10000, sys.maxunicode])
    return re.compile("[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]")


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    short = _SHORT.get(character)
    if short is not None:
        return short
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def double_text(number: float) -> str:
    """A finite number as Java writes it: at least one digit after the point, an exponent outside of 0.001 to 10^7."""
    if 1e-3 <= abs(number) < 1e7 or number == 0:
        return repr(number)  # Python's text is the same in this range
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    shown = "".join(map(str, digits)).rstrip("0")
    power = len(digits) - 1 + int(exponent)
    if len(shown) == 1:
        # Java writes two digits at least, and of those that stand for the number the nearest.
        two, _, its_power = f"{abs(number):.1e}".partition("e")
        if float(f"{two}e{its_power}") == abs(number):
            shown, power = two.replace(".", ""), int(its_power)
    return f"{'-' if sign else ''}{shown[0]}.{shown[1:] or '0'}E{'+' if power >= 0 else ''}{power}"


def _date_text(milliseconds: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=milliseconds)
    fraction = f".{moment.microsecond // 1000:03}".rstrip("0") if moment.microsecond else ""
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def _length(buf: bytes, start: int) -> int:
    return int(_INT32.unpack_from(buf, start)[0])


def _string(buf: bytes, start: int) -> str:
    return quoted(decoded(buf[start + 4 : start + 3 + _length(buf, start)]))


def decoded(text: bytes) -> str:
    """A string of an event. Raises MessageRefused where it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise MessageRefused(
            f"the string {_shortened(text)} is not UTF-8, as strings in JSON, Avro and Protobuf must be"
        ) from None


def _shortened(text: bytes) -> str:
    shown = text[:40].decode("utf-8", "backslashreplace")
    return repr(shown) + ("..." if len(text) > 40 else "")


def _label(name: bytes) -> str:
    return f"{quoted(decoded(name))}: "


_short_label = lru_cache(maxsize=4096)(_label)


class _DriverText:
    """A mode of the driver's writer: its ways to write a value, by type, and what stands between two values."""

    def __init__(self, separator: str, *, is_legacy: bool) -> None:
        self._separator = separator
        self._is_legacy = is_legacy
        pair = self._pair
        self._writers: dict[int, _ValueWriter] = {
            raw_bson.DOUBLE: self._double,
            raw_bson.STRING: _string,
            raw_bson.OBJECT: self.document,
            raw_bson.ARRAY: self._array,
            raw_bson.BINARY: self._binary,
            raw_bson.UNDEFINED: lambda buf, start: '{"$undefined": true}',
            raw_bson.OBJECT_ID: lambda buf, start: f'{{"$oid": "{buf[start : start + 12].hex()}"}}',
            raw_bson.BOOL: lambda buf, start: "true" if buf[start] else "false",
            raw_bson.DATE: self._date,
            raw_bson.NULL: lambda buf, start: "null",
            raw_bson.REGEX: self._regex,
            raw_bson.DB_POINTER: self._db_pointer,
            raw_bson.CODE: lambda buf, start: f'{{"$code": {_string(buf, start)}}}',
            raw_bson.SYMBOL: lambda buf, start: f'{{"$symbol": {_string(buf, start)}}}',
            raw_bson.CODE_WITH_SCOPE: lambda buf, start: pair(
                "$code", _string(buf, start + 4), "$scope", self.document(buf, start + 8 + _length(buf, start + 4))
            ),
            raw_bson.INT32: lambda buf, start: str(_INT32.unpack_from(buf, start)[0]),
            raw_bson.TIMESTAMP: self._timestamp,
            raw_bson.INT64: self._int64,
            raw_bson.DECIMAL128: lambda buf, start: (
                f'{{"$numberDecimal": "{Decimal128.from_bid(buf[start : start + 16])}"}}'
            ),
            raw_bson.MIN_KEY: lambda buf, start: '{"$minKey": 1}',
            raw_bson.MAX_KEY: lambda buf, start: '{"$maxKey": 1}',
        }

    def value(self, buf: bytes, type_: int, start: int) -> str:
        """The text of the value of a type that starts at ``start``."""
        return self._writers[type_](buf, start)

    def document(self, buf: bytes, start: int) -> str:
        """The text of a document."""
        parts = []
        names = set()
        for name, value in self._inside(buf, start):
            parts.append((_short_label(name) if len(name) <= _SHORT_NAME else _label(name)) + value)
            names.add(name)
        if len(names) < len(parts):
            raise MessageRefused(
                "a document has two fields with the same name, and readers of JSON keep only one of them"
            )
        return "{" + self._separator.join(parts) + "}"

    def _inside(self, buf: bytes, start: int) -> list[tuple[bytes, str]]:
        """Names and texts of what is in the document or array at ``start``."""
        # As ``raw_bson.elements``, written out: it is called for everything that is nested.
        limit = raw_bson.document_end(buf, start) - 1
        writers, fixed, value_end = self._writers, raw_bson.FIXED_SIZES, raw_bson.value_end
        found = []
        at = start + 4
        while at < limit:
            type_ = buf[at]
            name_end = buf.index(0, at + 1)
            size = fixed.get(type_)
            end = value_end(buf, type_, name_end + 1, limit) if size is None else name_end + 1 + size
            if end > limit:
                raise OplogFormatError("corrupt BSON: a value leads outside its document", position=f"byte {at}")
            found.append((buf[at + 1 : name_end], writers[type_](buf, name_end + 1)))
            at = end
        return found

    def _array(self, buf: bytes, start: int) -> str:
        return "[" + self._separator.join([text for _, text in self._inside(buf, start)]) + "]"

    def _pair(self, name: str, value: str, second: str, second_value: str) -> str:
        return f'{{"{name}": {value}{self._separator}"{second}": {second_value}}}'

    def _double(self, buf: bytes, start: int) -> str:
        number = _DOUBLE.unpack_from(buf, start)[0]
        if isfinite(number):
            return double_text(number)
        shown = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(number)]
        return shown if self._is_legacy else f'{{"$numberDouble": "{shown}"}}'

    def _int64(self, buf: bytes, start: int) -> str:
        number = str(_INT64.unpack_from(buf, start)[0])
        return f'{{"$numberLong": "{number}"}}' if self._is_legacy else number

    def _binary(self, buf: bytes, start: int) -> str:
        subtype, data = buf[start + 4], buf[start + 5 : start + 5 + _length(buf, start)]
        if subtype == _OLD_BINARY:
            data = data[4:]  # its own length, once more
        shown, kind = f'"{base64.b64encode(data).decode()}"', f'"{subtype:02x}"'
        if self._is_legacy:
            return self._pair("$binary", shown, "$type", kind)
        return f'{{"$binary": {self._pair("base64", shown, "subType", kind)}}}'

    def _date(self, buf: bytes, start: int) -> str:
        number = _INT64.unpack_from(buf, start)[0]
        if self._is_legacy:
            return f'{{"$date": {number}}}'
        if 0 <= number <= _LAST_DATE:
            return f'{{"$date": "{_date_text(number)}"}}'
        return f'{{"$date": {{"$numberLong": "{number}"}}}}'

    def _timestamp(self, buf: bytes, start: int) -> str:
        increment, seconds = _TIMESTAMP.unpack_from(buf, start)
        return f'{{"$timestamp": {self._pair("t", seconds, "i", increment)}}}'

    def _regex(self, buf: bytes, start: int) -> str:
        middle = buf.index(0, start)
        pattern = quoted(decoded(buf[start:middle]))
        options = quoted("".join(sorted(decoded(buf[middle + 1 : buf.index(0, middle + 1)]))))
        if self._is_legacy:
            return self._pair("$regex", pattern, "$options", options)
        return f'{{"$regularExpression": {self._pair("pattern", pattern, "options", options)}}}'

    def _db_pointer(self, buf: bytes, start: int) -> str:
        end = start + 4 + _length(buf, start)
        return self._pair("$ref", _string(buf, start), "$id", f'{{"$oid": "{buf[end : end + 12].hex()}"}}')


_LEGACY: Final = _DriverText(",", is_legacy=True)
_RELAXED: Final = _DriverText(", ", is_legacy=False)
_RELAXED_CLOSE: Final = _DriverText(",", is_legacy=False)
