"""Numbers as text, in compiled code: integers, and the shortest decimal of a double as Python's ``repr`` writes it.

The shortest decimal is found by Raffaello Giulietti's method ("The Schubfach way to render doubles", 2020): the bounds
of the interval that rounds to the double are scaled by one power of ten, held in 128 bits, and the decimals with one
digit less and with the same number of digits are searched for between them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import as_double, load16, load64, multiply_high, store8, store16, store64

# Powers of ten that scaling needs, and their places in the table: two words each, the high one first.
_POWER_MIN = -292
_POWER_MAX = 324

_EXPONENT_BITS = 0x7FF
_FRACTION = (1 << 52) - 1
_HIDDEN_BIT = 1 << 52
_BIAS = 1075
_SIGN = -(1 << 63)
#: Doubles of whole numbers below this are written by their integer.
_WHOLE_MAX = float(1 << 53)


def _powers() -> bytes:
    """10**k for each k, scaled to 128 bits and rounded up."""
    words = bytearray()
    for k in range(_POWER_MIN, _POWER_MAX + 1):
        # The numerator and denominator of 10**k; its binary exponent is exact in integers.
        top, bottom = (10**k, 1) if k >= 0 else (1, 10**-k)
        exponent = _floor_log2(top, bottom)
        shift = 127 - exponent
        scaled = -(-(top << shift) // bottom) if shift >= 0 else -(-top // (bottom << -shift))
        words += (scaled >> 64).to_bytes(8, "little") + (scaled & (1 << 64) - 1).to_bytes(8, "little")
    return bytes(words)


def _floor_log2(top: int, bottom: int) -> int:
    guess = top.bit_length() - bottom.bit_length()
    is_less = top < bottom << guess if guess >= 0 else top << -guess < bottom
    return guess - 1 if is_less else guess


#: What compiled code reads by address: ``POWERS`` and the two digits of each number below 100.
POWERS: Final = np.frombuffer(_powers(), np.uint8)
DIGIT_PAIRS: Final = np.frombuffer(b"".join(b"%02d" % number for number in range(100)), np.uint8)


@inner
def digit_count(number: int) -> int:
    """The decimal digits of a number that is not negative; 1 for 0."""
    count = 1
    while number >= 10_000:
        number //= 10_000
        count += 4
    if number >= 1_000:
        return count + 3
    if number >= 100:
        return count + 2
    return count + 1 if number >= 10 else count


@inner
def put_digits(out: int, number: int, count: int, pairs: int) -> int:
    """``count`` digits of a number that is not negative, with zeros in front; gives the address after them."""
    place = out + count
    while place - out >= 2:
        place -= 2
        store16(place, load16(pairs + 2 * (number % 100)))
        number //= 100
    if place > out:
        store8(out, 0x30 + number % 10)
    return out + count


@inner
def put_integer(out: int, number: int, pairs: int) -> int:
    """An int64, except the least one, which has no positive counterpart."""
    if number < 0:
        store8(out, 0x2D)
        out += 1
        number = -number
    return put_digits(out, number, digit_count(number), pairs)


@inner
def _scaled(power: int, value: int) -> int:
    """``value`` times a power of the table, the upper part of the product; its last bit is set where anything of it was
    cut off."""
    high, low = load64(power), load64(power + 8)
    carried = multiply_high(low, value)
    lower = high * value + carried
    upper = multiply_high(high, value)
    if lower ^ _SIGN < carried ^ _SIGN:
        upper += 1
    return upper if lower in (0, 1) else upper | 1


@inner
def _shortest(fraction: int, exponent: int, powers: int, ten: int) -> int:
    """The digits of the shortest decimal of a finite double that is not 0. Its exponent of ten is stored at ``ten``."""
    is_normal = exponent != 0
    whole = fraction | _HIDDEN_BIT if is_normal else fraction
    binary = (exponent if is_normal else 1) - _BIAS
    # Below a power of two the doubles lie twice as close.
    is_closer = 1 if fraction == 0 and exponent > 1 else 0
    # floor(log10(2**binary)), of three quarters of it where the lower bound is closer; floor(log2(10**-decimal)).
    decimal = (binary * 1262611 - 524031 * is_closer) >> 22
    shift = binary + ((-decimal * 1741647) >> 19) + 1
    power = powers + 16 * (-decimal - _POWER_MIN)
    middle = _scaled(power, 4 * whole << shift)
    # The bounds themselves round to the double where its last bit is 0.
    odd = whole & 1
    lower = _scaled(power, 4 * whole - 2 + is_closer << shift) + odd
    upper = _scaled(power, 4 * whole + 2 << shift) - odd
    digits = middle >> 2
    store64(ten, decimal)
    if digits >= 10:
        shorter = digits // 10
        low_fits, high_fits = lower <= 40 * shorter, 40 * shorter + 40 <= upper
        if low_fits != high_fits:
            store64(ten, decimal + 1)
            return shorter + 1 if high_fits else shorter
    low_fits, high_fits = lower <= 4 * digits, 4 * digits + 4 <= upper
    if low_fits != high_fits:
        return digits + 1 if high_fits else digits
    half = 4 * digits + 2
    return digits + 1 if middle > half or (middle == half and digits & 1 == 1) else digits


@inner
def put_double(out: int, bits: int, powers: int, pairs: int) -> int:
    """A finite double as Python's ``repr`` writes it: at most 24 characters."""
    if bits < 0:
        store8(out, 0x2D)
        out += 1
        bits &= ~_SIGN
    value = as_double(bits)
    if value < _WHOLE_MAX and value == np.floor(value):
        whole = int(value)
        out = put_digits(out, whole, digit_count(whole), pairs)
        store16(out, 0x302E)
        return out + 2
    # The text's own room holds the exponent for as long as nothing is written there.
    digits = _shortest(bits & _FRACTION, bits >> 52 & _EXPONENT_BITS, powers, out)
    exponent = load64(out)
    while digits % 10 == 0:
        digits //= 10
        exponent += 1
    return _put_decimal(out, digits, exponent, pairs)


@inner
def _put_zeros(out: int, count: int) -> int:
    for i in range(count):
        store8(out + i, 0x30)
    return out + count


@inner
def _put_decimal(out: int, digits: int, exponent: int, pairs: int) -> int:
    """``digits`` * 10**``exponent``, with an exponent where ``repr`` writes one."""
    count = digit_count(digits)
    point = count + exponent
    if point > 16 or point < -3:
        return _put_scientific(out, digits, point - 1, pairs)
    if exponent >= 0:
        out = _put_zeros(put_digits(out, digits, count, pairs), exponent)
        store16(out, 0x302E)
        return out + 2
    if point <= 0:
        store16(out, 0x2E30)
        return put_digits(_put_zeros(out + 2, -point), digits, count, pairs)
    unit = 1
    for _ in range(-exponent):
        unit *= 10
    out = put_digits(out, digits // unit, point, pairs)
    store8(out, 0x2E)
    return put_digits(out + 1, digits % unit, -exponent, pairs)


@inner
def _put_point(out: int, digits: int, pairs: int) -> int:
    """All digits of a number, with a point after the first one where there are more."""
    count = digit_count(digits)
    # They are written one place too far to the right; the first one then makes room for the point.
    put_digits(out + 1, digits, count, pairs)
    store8(out, load16(out + 1))
    if count == 1:
        return out + 1
    store8(out + 1, 0x2E)
    return out + 1 + count


@inner
def _put_scientific(out: int, digits: int, exponent: int, pairs: int) -> int:
    out = _put_point(out, digits, pairs)
    store16(out, 0x2D65 if exponent < 0 else 0x2B65)
    size = abs(exponent)
    return put_digits(out + 2, size, 3 if size >= 100 else 2, pairs)


@inner
def put_plain_decimal(out: int, coefficient: int, scale: int, pairs: int) -> int:
    """``coefficient`` / 10**``scale``, both not negative, without an exponent and with all of its digits."""
    count = digit_count(coefficient)
    if scale == 0:
        return put_digits(out, coefficient, count, pairs)
    if scale >= count:
        store16(out, 0x2E30)
        return put_digits(_put_zeros(out + 2, scale - count), coefficient, count, pairs)
    unit = 1
    for _ in range(scale):
        unit *= 10
    out = put_digits(out, coefficient // unit, count - scale, pairs)
    store8(out, 0x2E)
    return put_digits(out + 1, coefficient % unit, scale, pairs)


@inner
def put_scientific_decimal(out: int, coefficient: int, exponent: int, pairs: int) -> int:
    """All digits of a number that is not negative, the point after the first, and the exponent of that first digit."""
    out = _put_point(out, coefficient, pairs)
    store16(out, 0x2D45 if exponent < 0 else 0x2B45)
    size = abs(exponent)
    return put_digits(out + 2, size, digit_count(size), pairs)
