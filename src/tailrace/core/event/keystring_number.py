"""Numbers in KeyString V1: one order for int32, int64, double and decimal128, exact in both directions.

What may live here: number values to key bytes with their type bits, and back. Layout and examples are in
``docs/reference/resume-tokens.md``; every case was compared with mongod 6.0.27 (``tests/differential``).

A key holds a number's *value*; the type bits hold what the value does not show: its BSON type, the sign of zero, a
decimal's exponent. A decimal that no double equals is stored as the double below it plus a *decimal continuation
marker* (DCM, the constants below) and, where needed, eight more bytes for the difference.
"""

from __future__ import annotations

import math
import struct
from typing import Final, NamedTuple, Protocol

from tailrace.core import raw_bson
from tailrace.errors import InvalidResumeToken

NAN: Final = 0x1E
NEGATIVE_LARGE: Final = 0x1F
NEGATIVE_SMALL: Final = 0x28
ZERO: Final = 0x29
POSITIVE_SMALL: Final = 0x2A
POSITIVE_LARGE: Final = 0x33

DCM_EQUAL: Final = 0  # equal to the double
DCM_BELOW: Final = 1  # continuation follows; below the double rounded up to 15 digits
DCM_ROUNDED: Final = 2  # equal to the double rounded up to 15 digits
DCM_ABOVE: Final = 3  # continuation follows; above that

_DOUBLE_BITS: Final = "10"
_DECIMAL_BITS: Final = "11"
_NEGATIVE_ZERO_BITS: Final = "11000"
_IS_INT32, _IS_INT64, _IS_DOUBLE, _IS_DECIMAL = range(4)

_DOUBLE = struct.Struct("<d")
_BITS_OF_DOUBLE = struct.Struct(">d")
_ALL_ONES: Final = (1 << 64) - 1
_TWO_63: Final = 1 << 63
_SMALLEST_NORMAL: Final = 2.0**-1022
_SMALLEST_NORMAL_SCALED: Final = 2.0**-766
_LARGEST: Final = math.ldexp(1 - 2.0**-53, 1024)
_SMALL_LIMIT: Final = 2.0**-255
_SMALL_MARK: Final = 1 << 62
_LARGE_MIN_INT64: Final = 0x43E << 53 & _TWO_63 - 1  # the body of 2^63
_INEXACT: Final = "Unexpected signaling flag for Decimal quantization."
_NO_DIGITS: Final = "Expected non-zero number for decimal."
_CONTINUATION_MISMATCH: Final = "Decimal contuation mismatch."  # the server's spelling

_BIAS: Final = 6176
_MAX_COEFFICIENT: Final = 10**34 - 1
_DIGITS: Final = 34
_FIFTEEN_DIGITS: Final = 10**15
_DECIMAL_NAN: Final = (0x7C << 120).to_bytes(16, "little")
_DECIMAL_INFINITY: Final = (0x78 << 120).to_bytes(16, "little")
_DECIMAL_NEGATIVE_INFINITY: Final = (0xF8 << 120).to_bytes(16, "little")
_DOUBLE_NAN: Final = b"\x00\x00\x00\x00\x00\x00\xf8\x7f"


class Scaled(NamedTuple):
    """The non-negative decimal ``coefficient * 10 ** exponent``."""

    coefficient: int
    exponent: int


class NumberSource(Protocol):
    """What decoding reads from: key bytes, and type bits as numbers of ``count`` bits, first bit highest."""

    def take(self, count: int) -> bytes: ...

    def take_each(self, count: int) -> bytes: ...

    def take_bits(self, count: int) -> int: ...


# 2^256 and 2^-256, both cut to 34 digits: the factors that carry tiny decimals into the range of normal doubles.
_UP_256: Final = Scaled(1157920892373161954235709850086879, 44)
_DOWN_256: Final = Scaled(8636168555094444625386351862800399, -111)


def encode_int(number: int) -> bytes:
    """The key bytes of an int32 or int64, type byte included."""
    if number > 0:
        if number < 0x80:
            return b"\x2b%c" % (number << 1)
        doubled = number << 1
        size = (doubled.bit_length() + 7) >> 3
        return b"%c%b" % (0x2A + size, doubled.to_bytes(size, "big"))
    if number == 0:
        return b"\x29"
    if number == -_TWO_63:  # its magnitude needs 65 bits when doubled: kept as the double that equals it
        return encode_double(-(2.0**63))
    doubled = -number << 1
    size = (doubled.bit_length() + 7) >> 3
    return b"%c%b" % (0x28 - size, (doubled ^ ((1 << (8 * size)) - 1)).to_bytes(size, "big"))


def encode_double(number: float) -> bytes:
    """The key bytes of a double, type byte included."""
    return b"\x1e" if math.isnan(number) else _encode_binary(number, DCM_EQUAL)


def double_type_bits(number: float) -> str:
    return _NEGATIVE_ZERO_BITS if number == 0 and math.copysign(1.0, number) < 0 else _DOUBLE_BITS


def _signed(negative: bool, positive_type: int, body: bytes) -> bytes:
    """Type byte and body of a number; the negative type mirrors the positive one and its body is inverted."""
    if not negative:
        return b"%c%b" % (positive_type, body)
    return b"%c%b" % (0x52 - positive_type, _inverted(body))


def _inverted(body: bytes) -> bytes:
    size = len(body)
    return (int.from_bytes(body, "big") ^ ((1 << (8 * size)) - 1)).to_bytes(size, "big")


def _bits(magnitude: float) -> int:
    return int.from_bytes(_BITS_OF_DOUBLE.pack(magnitude), "big")


def _from_bits(bits: int) -> float:
    result: float = _BITS_OF_DOUBLE.unpack(bits.to_bytes(8, "big"))[0]
    return result


def _encode_binary(number: float, dcm: int, continuation: bytes = b"") -> bytes:
    """A double's value with a decimal continuation marker; an integral double carries no marker other than 0."""
    negative = math.copysign(1.0, number) < 0
    size = abs(number)
    if size == 0:
        return b"\x29"
    if size >= 2.0**63:
        word = _ALL_ONES if math.isinf(size) else (_bits(size) << 1 & _TWO_63 - 1) | (dcm != 0)
        body = word.to_bytes(8, "big")
        return _signed(negative, POSITIVE_LARGE, body + continuation)
    if size < 1:
        if size >= _SMALL_LIMIT:
            word = (_bits(size) << 2) | dcm
        else:
            word = ((_bits(math.ldexp(size, 256)) << 1) | (dcm != 0)) + _SMALL_MARK
        return _signed(negative, POSITIVE_SMALL, word.to_bytes(8, "big") + continuation)
    whole = int(size)
    if whole == size and dcm == DCM_EQUAL:
        return encode_int(-whole if negative else whole)
    fraction_bytes = 8 - (((whole << 1).bit_length() + 7) >> 3)
    numerator, denominator = size.as_integer_ratio()
    shift = 8 * fraction_bytes
    word = (numerator << shift) // denominator + ((whole + 1) << shift) | dcm
    return _signed(negative, 0x32 - fraction_bytes, word.to_bytes(8, "big") + continuation)


# --- decimal128 ------------------------------------------------------------------------------------------------------


def encode_decimal(raw: bytes) -> tuple[bytes, str]:
    """The key bytes (type byte included) and type bits of a decimal128 given as its 16 BSON bytes."""
    word = int.from_bytes(raw, "little")
    negative = bool(word >> 127)
    combination = word >> 122 & 0x1F
    if combination == 0x1F:
        return b"\x1e", _DECIMAL_BITS
    if combination == 0x1E:
        return _encode_binary(-math.inf if negative else math.inf, DCM_EQUAL), _DECIMAL_BITS
    coefficient, biased = _unpack(word)
    if coefficient == 0:
        z = biased + (12288 if negative else 0)
        return b"\x29", f"{0b11010 + (z >> 12):05b}{z & 0xFFF:012b}"
    bits = f"{_DECIMAL_BITS}{biased & 0x3F:06b}"
    return _encode_finite(negative, Scaled(coefficient, biased - _BIAS)), bits


def _unpack(word: int) -> tuple[int, int]:
    """Coefficient and biased exponent. A coefficient of more than 34 digits counts as zero (IEEE 754-2008, 3.5.2)."""
    if word >> 125 & 3 == 3:
        return 0, word >> 111 & 0x3FFF
    coefficient = word & ((1 << 113) - 1)
    biased = word >> 113 & 0x3FFF
    return (coefficient if coefficient <= _MAX_COEFFICIENT else 0), biased


def _encode_finite(negative: bool, number: Scaled) -> bytes:
    numerator, denominator = _ratio(number)
    below = _truncated_double(numerator, denominator)
    below_numerator, below_denominator = below.as_integer_ratio()
    sign = -1.0 if negative else 1.0
    if below_numerator * denominator == numerator * below_denominator:
        return _encode_binary(sign * below, DCM_EQUAL)
    if below < _SMALLEST_NORMAL:
        return _encode_tiny(negative, number, below)
    if below == _LARGEST:
        return _signed(negative, POSITIVE_LARGE, (_pack_normalized(number) | 1 << 127).to_bytes(16, "big"))
    if below >= 2.0**63 or below < _SMALL_LIMIT:
        return _encode_binary(sign * below, DCM_ABOVE, _continuation(number, below_numerator, below_denominator))
    if below >= 2.0**53:
        return _encode_long_integer(negative, number, numerator // denominator)
    rounded = _round_away(below_numerator, below_denominator, 15)
    order = _compare(number, rounded)
    if number.coefficient < _FIFTEEN_DIGITS or order == 0:
        return _encode_binary(sign * below, DCM_ROUNDED)
    marker = DCM_BELOW if order < 0 else DCM_ABOVE
    return _encode_binary(sign * below, marker, _continuation(number, below_numerator, below_denominator))


def _encode_long_integer(negative: bool, number: Scaled, whole: int) -> bytes:
    """A decimal from 2^53 up to 2^63: doubles get coarser than integers there, so the integer part is exact."""
    if _compare(number, Scaled(whole, 0)) == 0:
        return encode_int(-whole if negative else whole)
    doubled = whole << 1 | 1
    size = (doubled.bit_length() + 7) >> 3
    filler = b"\x03" if size < 8 else b""  # a fraction fills eight bytes, and its last bits hold the marker
    body = doubled.to_bytes(size, "big") + filler + _continuation(number, whole, 1)
    return _signed(negative, 0x2A + size, body)


def _encode_tiny(negative: bool, number: Scaled, below: float) -> bytes:
    """A decimal below the normal doubles: scaled by 2^256, or as it is where even subnormal doubles end."""
    if below == 0:
        return _signed(negative, POSITIVE_SMALL, _pack_normalized(number).to_bytes(16, "big"))
    product = _truncate(Scaled(number.coefficient * _UP_256.coefficient, number.exponent + _UP_256.exponent))
    scaled = max(_truncated_double(*_ratio(product)), math.ldexp(below, 256))
    stored = _unscaled(scaled)
    difference = _units(number, stored.exponent) - stored.coefficient
    word = (_bits(scaled) << 1 | 1) + _SMALL_MARK
    return _signed(negative, POSITIVE_SMALL, word.to_bytes(8, "big") + difference.to_bytes(8, "big"))


def _unscaled(scaled: float) -> Scaled:
    """The 34-digit decimal that a tiny decimal's continuation counts from: ``scaled`` times 2^-256, each step cut."""
    start = _truncate_ratio(*scaled.as_integer_ratio())
    return _truncate(Scaled(start.coefficient * _DOWN_256.coefficient, start.exponent + _DOWN_256.exponent))


def _continuation(number: Scaled, numerator: int, denominator: int) -> bytes:
    stored = _round_away(numerator, denominator, _DIGITS)
    return (_units(number, stored.exponent) - stored.coefficient).to_bytes(8, "big")


def _ratio(number: Scaled) -> tuple[int, int]:
    if number.exponent >= 0:
        return number.coefficient * 10**number.exponent, 1
    return number.coefficient, 10**-number.exponent


def _truncated_double(numerator: int, denominator: int) -> float:
    """The double nearest to the ratio on the side of zero; the largest double for everything above it."""
    try:
        nearest = numerator / denominator
    except OverflowError:
        return _LARGEST
    top, bottom = nearest.as_integer_ratio()
    return math.nextafter(nearest, 0.0) if top * denominator > numerator * bottom else nearest


def _decimal_exponent(numerator: int, denominator: int, digits: int) -> int:
    """The exponent at which the ratio's integer part has exactly ``digits`` digits."""
    estimate = int((numerator.bit_length() - denominator.bit_length()) * 0.30102999566398120) - digits
    while _floor(numerator, denominator, estimate) >= 10**digits:
        estimate += 1
    while _floor(numerator, denominator, estimate - 1) < 10**digits:
        estimate -= 1
    return estimate


def _floor(numerator: int, denominator: int, exponent: int) -> int:
    if exponent < 0:
        return numerator * int(10**-exponent) // denominator
    return numerator // (denominator * int(10**exponent))


def _truncate_ratio(numerator: int, denominator: int) -> Scaled:
    exponent = _decimal_exponent(numerator, denominator, _DIGITS)
    return Scaled(_floor(numerator, denominator, exponent), exponent)


def _truncate(number: Scaled) -> Scaled:
    return _truncate_ratio(*_ratio(number))


def _round_away(numerator: int, denominator: int, digits: int) -> Scaled:
    """The ratio rounded up to ``digits`` digits, written with exactly that many."""
    exponent = _decimal_exponent(numerator, denominator, digits)
    coefficient = -_floor(-numerator, denominator, exponent)
    if coefficient == 10**digits:
        return Scaled(coefficient // 10, exponent + 1)
    return Scaled(coefficient, exponent)


def _units(number: Scaled, exponent: int) -> int:
    """``number`` counted in units of ``10 ** exponent``, which it must be a multiple of."""
    shift = number.exponent - exponent
    power = int(10 ** abs(shift))
    return number.coefficient * power if shift >= 0 else number.coefficient // power


def _compare(left: Scaled, right: Scaled) -> int:
    exponent = min(left.exponent, right.exponent)
    difference = _units(left, exponent) - _units(right, exponent)
    return (difference > 0) - (difference < 0)


def _normalized(number: Scaled) -> Scaled:
    """With as many digits as fit into 34, and no exponent below decimal128's smallest."""
    coefficient, exponent = number
    shift = min(_DIGITS - len(str(coefficient)), exponent + _BIAS)
    return Scaled(coefficient * 10**shift, exponent - shift) if shift > 0 else number


def _pack_normalized(number: Scaled) -> int:
    coefficient, exponent = _normalized(number)
    return (exponent + _BIAS) << 113 | coefficient


# --- back to BSON ----------------------------------------------------------------------------------------------------


def decode_number(ctype: int, source: NumberSource) -> tuple[int, bytes]:
    """The BSON type and value bytes of the number whose type byte is ``ctype`` and whose body follows in ``source``.

    Raises ``InvalidResumeToken`` with the server's code where body and type bits do not fit each other.
    """
    if ctype == ZERO:
        return _decode_zero(source)
    kind = source.take_bits(2)
    if ctype == NAN:
        if kind == _IS_DECIMAL:
            return raw_bson.DECIMAL128, _DECIMAL_NAN
        _expect(kind == _IS_DOUBLE, 50819, "Invalid type bits for numeric NaN")
        return raw_bson.DOUBLE, _DOUBLE_NAN
    negative = ctype <= NEGATIVE_SMALL
    body = _Body(source, negative)
    positive = 0x52 - ctype if negative else ctype
    if positive == POSITIVE_LARGE:
        return _decode_large(body, kind)
    if positive == POSITIVE_SMALL:
        return _decode_small(body, kind)
    return _decode_middle(body, kind, positive - POSITIVE_SMALL)


class _Body:
    """A number's key bytes: inverted for negative numbers."""

    __slots__ = ("_source", "negative")

    def __init__(self, source: NumberSource, negative: bool) -> None:
        self._source = source
        self.negative = negative

    def take(self, count: int) -> int:
        return self._plain(self._source.take(count), count)

    def take_each(self, count: int) -> int:
        return self._plain(self._source.take_each(count), count)

    def _plain(self, data: bytes, count: int) -> int:
        word = int.from_bytes(data, "big")
        return word ^ ((1 << (8 * count)) - 1) if self.negative else word

    def exponent_bits(self) -> int:
        return self._source.take_bits(6)


def _decode_zero(source: NumberSource) -> tuple[int, bytes]:
    kind = source.take_bits(2)
    if kind == 0:
        return raw_bson.INT32, bytes(4)
    if kind == 1:
        return raw_bson.INT64, bytes(8)
    if kind == 2:
        return raw_bson.DOUBLE, bytes(8)
    special = source.take_bits(3)
    if special == 0:
        return raw_bson.DOUBLE, b"\x00\x00\x00\x00\x00\x00\x00\x80"
    z = ((special - 2) << 12) + source.take_bits(12)
    _expect(0 <= z < 2 * 12288, 50846, "Invalid numeric zero decimal.")
    negative, biased = divmod(z, 12288)
    return raw_bson.DECIMAL128, ((negative << 127) | biased << 113).to_bytes(16, "little")


def _double(body: _Body, size: float) -> tuple[int, bytes]:
    return raw_bson.DOUBLE, _DOUBLE.pack(-size if body.negative else size)


def _decimal(body: _Body, number: Scaled) -> tuple[int, bytes]:
    """The decimal with the exponent that its type bits ask for: as many trailing zeros less as they say."""
    _expect(number.coefficient > 0, 50829, _NO_DIGITS)
    low = body.exponent_bits()
    coefficient, exponent = _normalized(_without_excess_zeros(number))
    shift = (low - (exponent + _BIAS)) & 0x3F
    whole, rest = divmod(coefficient, 10**shift)
    # The server has four codes for an exponent that the number cannot have, by the step that finds out; we have two.
    _expect(shift < _DIGITS and exponent + shift + _BIAS <= 12287, 50830, "Unexpected biased exponent in decimal.")
    _expect(not rest and coefficient <= _MAX_COEFFICIENT, 50813, _INEXACT)
    word = (int(body.negative) << 127) | (exponent + shift + _BIAS) << 113 | whole
    return raw_bson.DECIMAL128, word.to_bytes(16, "little")


def _without_excess_zeros(number: Scaled) -> Scaled:
    """Digits beyond 34 dropped while they are zeros: a sum with a continuation can carry into a 35th digit."""
    coefficient, exponent = number
    while coefficient > _MAX_COEFFICIENT and coefficient % 10 == 0:
        coefficient, exponent = coefficient // 10, exponent + 1
    return Scaled(coefficient, exponent)


def malformed(code: int, detail: str) -> InvalidResumeToken:
    """The server's error for bytes that are not a key."""
    return InvalidResumeToken(f"KeyString format error: {detail}", code=code)


def _expect(condition: bool, code: int, detail: str) -> None:
    if not condition:
        raise malformed(code, detail)


def _exact(numerator: int, denominator: int) -> Scaled:
    """A ratio whose denominator is a power of two, as a decimal; all its digits, which may be more than 34."""
    power = denominator.bit_length() - 1
    return Scaled(numerator * 5**power, -power)


def _continued(body: _Body, numerator: int, denominator: int) -> Scaled:
    stored = _round_away(numerator, denominator, _DIGITS)
    return Scaled(stored.coefficient + body.take(8), stored.exponent)


def _decode_large(body: _Body, kind: int) -> tuple[int, bytes]:
    word = body.take(8)
    if word >> 63 and word != _ALL_ONES:
        _expect(kind == _IS_DECIMAL, 50818, "Invalid type bits for decimal number.")
        return _decimal_of_raw(body, (word << 64 | body.take(8)) & ~(1 << 127))
    if kind == _IS_INT64:
        _expect(body.negative and word | 1 == _LARGE_MIN_INT64 | 1, 50821, "Unexpected value for large number.")
        return raw_bson.INT64, raw_bson.encode_int64(-_TWO_63)
    _expect(kind != _IS_INT32, 50826, "Unexpected type of large number.")
    size = math.inf if word == _ALL_ONES else _from_bits(word >> 1 | _SMALL_MARK)
    if kind == _IS_DOUBLE:
        return _double(body, size)
    if math.isfinite(size):
        return _decimal(body, _continued(body, int(size), 1) if word & 1 else _exact(int(size), 1))
    _expect(word == _ALL_ONES or not word & 1, 50850, "Invalid decimal continuation.")
    if math.isnan(size):
        return raw_bson.DECIMAL128, _DECIMAL_NAN
    return raw_bson.DECIMAL128, _DECIMAL_NEGATIVE_INFINITY if body.negative else _DECIMAL_INFINITY


def _decimal_of_raw(body: _Body, raw: int) -> tuple[int, bytes]:
    coefficient, biased = _unpack(raw)
    return _decimal(body, Scaled(coefficient, biased - _BIAS))


def _decode_small(body: _Body, kind: int) -> tuple[int, bytes]:
    word = body.take(8)
    mark = word >> 62
    if mark == 0:  # only decimals are that small: the type bits are not asked
        return _decimal_of_raw(body, word << 64 | body.take(8))
    if mark == 3:
        return _decode_fraction(body, kind, _from_bits(word >> 2), word & 3)
    scaled = _from_bits((word - _SMALL_MARK) >> 1)
    size = math.ldexp(scaled, -256)
    if kind == _IS_DOUBLE:
        _expect(not word & 1, 50822, "Unexpected decimal continuation.")
        return _double(body, size)
    _expect(kind == _IS_DECIMAL and bool(word & 1), 50823, "Expected decimal continuation.")
    if scaled >= _SMALLEST_NORMAL_SCALED:  # size itself may have been rounded up to it
        return _decimal(body, _continued(body, *size.as_integer_ratio()))
    stored = _unscaled(scaled) if scaled else Scaled(0, -_BIAS)
    return _decimal(body, Scaled(stored.coefficient + body.take(8), stored.exponent))


def _decode_fraction(body: _Body, kind: int, size: float, dcm: int) -> tuple[int, bytes]:
    """A number from 2^-255 up to 1."""
    if kind == _IS_DOUBLE:
        _expect(dcm == DCM_EQUAL, 50824, _CONTINUATION_MISMATCH)
        return _double(body, size)
    _expect(kind == _IS_DECIMAL, 50825, "Unexpected type for small number, expected decimal.")
    return _decimal(body, _marked(body, *size.as_integer_ratio(), dcm))


def _marked(body: _Body, numerator: int, denominator: int, dcm: int) -> Scaled:
    _expect(numerator > 0, 50829, _NO_DIGITS)  # rounding would look for its first digit
    if dcm == DCM_EQUAL:
        return _exact(numerator, denominator)
    if dcm == DCM_ROUNDED:
        return _round_away(numerator, denominator, 15)
    return _continued(body, numerator, denominator)


def _decode_middle(body: _Body, kind: int, size: int) -> tuple[int, bytes]:
    """A number from 1 up to 2^63 whose integer part takes ``size`` bytes."""
    doubled = body.take_each(size)
    whole = doubled >> 1
    if not doubled & 1:
        return _decode_whole(body, kind, whole)
    shift = 8 * (8 - size)
    fraction = body.take_each(8 - size)
    # The stored word is |x| * 256^f plus (whole + 1) * 256^f: its upper bytes are 2 * whole + 1.
    stored = ((whole << shift) + (fraction & ~3)) / (1 << shift)
    if kind == _IS_DOUBLE:  # the server does not look at the marker here
        return _double(body, stored)
    _expect(kind == _IS_DECIMAL, 50810, "Expected type Decimal.")
    marker = fraction & 3 if size < 8 else DCM_ABOVE
    # Counted from the integer, as it was encoded. The server takes 2^53 + 1 for a double here, and so reads it as 2^53.
    if whole >= 1 << 53 and marker in (DCM_BELOW, DCM_ABOVE):
        return _decimal(body, _continued(body, whole, 1))
    # In a key that somebody made up, more bits than a double has: the server rounds them as a cast in C does.
    return _decimal(body, _marked(body, *stored.as_integer_ratio(), marker))


def _decode_whole(body: _Body, kind: int, whole: int) -> tuple[int, bytes]:
    if kind == _IS_DOUBLE:
        return _double(body, float(whole))
    if kind == _IS_DECIMAL:
        return _decimal(body, Scaled(whole, 0))
    number = -whole if body.negative else whole
    if kind == _IS_INT64:
        return raw_bson.INT64, raw_bson.encode_int64(number)
    # An integer beyond int32 loses its upper bits, as a cast in C does.
    return raw_bson.INT32, raw_bson.encode_int32((number + (1 << 31)) % (1 << 32) - (1 << 31))
