"""Replacements for values: of the same type and length, equal for equal ones, drawn at random."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from bson.decimal128 import Decimal128

from tailrace.core import raw_bson as rb

_DOUBLE: Final = struct.Struct("<d")
_INT32: Final = struct.Struct("<i")
_INT64: Final = struct.Struct("<q")
_DIGITS: Final = b"abcdefghijklmnopqrstuvwxyz0123456789"
_HEX: Final = b"0123456789ABCDEF"
#: Dates between 1970 and 2100.
_DATE_MS_MAX: Final = 4_102_444_800_000
_OLD_BINARY: Final = 2
_INT_MAX: Final = {rb.INT32: (1 << 31) - 1, rb.INT64: (1 << 63) - 1}
#: Types of which there is one value.
_SINGLE: Final = frozenset((rb.NULL, rb.UNDEFINED, rb.MIN_KEY, rb.MAX_KEY))
_TRIES: Final = 20


class Values:
    """The values of one report. ``document`` masks a document: its names are not this class's matter."""

    def __init__(self, rng: random.Random, document: Callable[[bytes], bytes]) -> None:
        self._rng = rng
        self._document = document
        self._known: dict[tuple[int, bytes], bytes] = {}
        self._used: set[tuple[int, bytes]] = set()
        self._is_flipped = bool(rng.getrandbits(1))

    def mask(self, type_: int, value: bytes) -> bytes:
        """A value's bytes for those of another one."""
        if type_ in _SINGLE:
            return value
        if type_ == rb.OBJECT:
            return self._document(value)
        if type_ == rb.ARRAY:
            return rb.encode_document(
                *(
                    rb.encode_element(one.type, one.name, self.mask(one.type, rb.value(value, one)))
                    for one in rb.elements(value)
                )
            )
        if type_ == rb.BOOL:
            return bytes([value[0] ^ 1]) if self._is_flipped else value
        if type_ == rb.CODE_WITH_SCOPE:
            return self._code_with_scope(value)
        if type_ in (rb.INT32, rb.INT64, rb.DOUBLE, rb.DECIMAL128):
            # Equal numbers of different types are equal to a server: so are what they become.
            return self._number(type_, value)
        return self._remembered(type_, value, self._drawn)

    def hexadecimal(self, document: bytes) -> bytes:
        """A token of an unknown form: of its digits only those of the version and the time stay."""
        parts = []
        for element in rb.elements(document):
            value = rb.value(document, element)
            if element.type == rb.STRING:
                text = rb.read_string(value, 0)
                rest = self._remembered(-1, text[18:], lambda _, raw: bytes(self._rng.choices(_HEX, k=len(raw))))
                value = rb.encode_string(text[:18] + rest)
            else:
                value = self.mask(element.type, value)
            parts.append(rb.encode_element(element.type, element.name, value))
        return rb.encode_document(*parts)

    def _remembered(self, type_: int, value: bytes, draw: Callable[[int, bytes], bytes]) -> bytes:
        known = self._known.get((type_, value))
        if known is None:
            for _ in range(_TRIES):  # different values become different ones where there are that many
                known = draw(type_, value)
                if known != value and (type_, known) not in self._used:
                    break
            assert known is not None
            self._known[type_, value] = known
            self._used.add((type_, known))
        return known

    def _drawn(self, type_: int, value: bytes) -> bytes:
        if type_ in (rb.STRING, rb.CODE, rb.SYMBOL):
            return rb.encode_string(self._text(rb.read_string(value, 0)))
        if type_ == rb.BINARY:
            return self._binary(value)
        if type_ == rb.REGEX:
            pattern, _, options = value[:-1].partition(b"\x00")
            return self._text(pattern) + b"\x00" + options + b"\x00"
        if type_ == rb.DATE:
            return value if value == bytes(8) else _INT64.pack(self._rng.randrange(1, _DATE_MS_MAX))
        if type_ == rb.TIMESTAMP:  # two zeros are replaced by a server, which stores no others
            return value if value == bytes(8) else self._rng.randbytes(8)
        if type_ == rb.DB_POINTER:
            return rb.encode_string(self._text(rb.read_string(value, 0))) + self._rng.randbytes(12)
        return self._rng.randbytes(len(value))

    def _text(self, text: bytes) -> bytes:
        """Of as many bytes. That a text is no UTF-8, or not ASCII, or holds a NUL, stays so."""
        drawn = bytearray(self._rng.choices(_DIGITS, k=len(text)))
        if not text.isascii():
            try:
                text.decode()
                drawn[:2] = "é".encode()
            except UnicodeDecodeError:
                drawn[:1] = b"\xff"
        if b"\x00" in text:
            drawn[-1:] = b"\x00"
        return bytes(drawn)

    def _binary(self, value: bytes) -> bytes:
        subtype, data = value[4], value[5:]
        if subtype == _OLD_BINARY and len(data) >= 4:
            return value[:5] + data[:4] + self._rng.randbytes(len(data) - 4)
        return value[:5] + self._rng.randbytes(len(data))

    def _code_with_scope(self, value: bytes) -> bytes:
        size = rb.read_int32(value, 4)
        code = self._remembered(rb.CODE, value[4 : 8 + size], self._drawn)
        scope = self._document(value[8 + size :])
        return rb.encode_int32(4 + len(code) + len(scope)) + code + scope

    def _number(self, type_: int, value: bytes) -> bytes:
        """Of the same sign and as many digits before the point. Zero, infinity and what is no number stay."""
        if type_ == rb.DECIMAL128:
            return self._remembered(type_, value, self._decimal)
        if type_ == rb.DOUBLE:
            double: float = _DOUBLE.unpack(value)[0]
            if not math.isfinite(double) or double == 0:
                return value
            if double.is_integer() and abs(double) < _INT_MAX[rb.INT64]:
                return _DOUBLE.pack(float(self._integer(int(double), 1 << 53)))
            return self._remembered(type_, value, self._fraction)
        form = _INT32 if type_ == rb.INT32 else _INT64
        return form.pack(self._integer(form.unpack(value)[0], _INT_MAX[type_]))

    def _integer(self, number: int, most: int) -> int:
        if number == 0:
            return 0
        # An int32 and an int64 of one value are drawn once, within what the smaller one holds.
        least = 10 ** (len(str(abs(number))) - 1)
        most = min(most, max(least * 10 - 1, least))
        if abs(number) <= _INT_MAX[rb.INT32]:
            most = min(most, _INT_MAX[rb.INT32])
        least = min(least, most)
        key = _INT64.pack(min(abs(number), _INT_MAX[rb.INT64]))
        drawn = self._remembered(rb.INT64, key, lambda _, __: _INT64.pack(self._rng.randint(least, most)))
        found: int = _INT64.unpack(drawn)[0]
        return -found if number < 0 else found

    def _fraction(self, _: int, value: bytes) -> bytes:
        number: float = _DOUBLE.unpack(value)[0]
        exponent = math.frexp(number)[1]
        return _DOUBLE.pack(math.copysign(math.ldexp(self._rng.uniform(0.5, 0.999), exponent), number))

    def _decimal(self, _: int, value: bytes) -> bytes:
        decimal = Decimal128.from_bid(value).to_decimal()
        if not decimal.is_finite() or not decimal:
            return value
        sign, digits, exponent = decimal.as_tuple()
        assert isinstance(exponent, int)
        drawn = (self._rng.randint(1, 9), *(self._rng.randint(0, 9) for _ in digits[1:]))
        return Decimal128(Decimal((sign, drawn, exponent))).bid
