"""Decimal128 numbers in compiled code, exactly: as keys for comparison, and truncated to integers.

A *key* is four int64 slots: the class (NaN lowest, then -Infinity to Infinity), and for a number other than 0 the value
``(high * 10**18 + low) * 10**exponent`` with 36 digits. For numbers without a key the reference decides: coefficients
of more than 34 digits, and finite doubles that are not 64-bit integers.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import as_double, load32, load64, store64
from tailrace.core.kernel.scan import DECIMAL128, DOUBLE, INT32, INVALID, equal, signed32

KEY_SIZE = 32
_CLASS = 0
_EXPONENT = 8
_HIGH = 16
_LOW = 24

# Classes.
NAN = -3
MINUS_INFINITY = -2
NEGATIVE = -1
ZERO = 0
POSITIVE = 1
INFINITY = 2

#: The exponent of a key of which only the class is known.
_UNKNOWN_SIZE = 1 << 20
_BILLION = 10**9
_10_TO_18 = 10**18
_10_TO_17 = 10**17
_10_TO_16 = 10**16
_LOWEST_LONG = -0x8000000000000000
_TWO_TO_63 = 9223372036854775808.0
_HIGHEST_TENTH = 922337203685477580

BELOW = 0
SAME = 1
ABOVE = 2


@inner
def order(left: int, right: int) -> int:
    """The order of two integers: ``BELOW``, ``SAME`` or ``ABOVE``."""
    if left == right:
        return SAME
    return BELOW if left < right else ABOVE


@inner
def _put(key: int, class_: int, exponent: int, high: int, low: int) -> bool:
    store64(key + _CLASS, class_)
    store64(key + _EXPONENT, exponent)
    store64(key + _HIGH, high)
    store64(key + _LOW, low)
    return True


@inner
def _put_finite(key: int, negative: bool, exponent: int, high: int, low: int) -> bool:
    """The key of a number given in any 36 digits or fewer."""
    if high == 0 and low == 0:
        return _put(key, ZERO, 0, 0, 0)
    if high == 0:
        high, low, exponent = low, 0, exponent - 18
    while high < _10_TO_17:
        high = high * 10 + low // _10_TO_17
        low = low % _10_TO_17 * 10
        exponent -= 1
    return _put(key, NEGATIVE if negative else POSITIVE, exponent, high, low)


@inner
def _put_integer(key: int, number: int) -> bool:
    if number == _LOWEST_LONG:
        return _put_finite(key, True, 0, 9, 223372036854775808)
    size = abs(number)
    return _put_finite(key, number < 0, 0, size // _10_TO_18, size % _10_TO_18)


@inner
def _put_double(key: int, bits: int) -> bool:
    number = as_double(bits)
    negative = number < 0.0
    if number != number:  # noqa: PLR0124 - NaN
        return _put(key, NAN, 0, 0, 0)
    if number - number != 0.0:
        return _put(key, MINUS_INFINITY if negative else INFINITY, 0, 0, 0)
    if -_TWO_TO_63 <= number < _TWO_TO_63 and float(int(number)) == number:
        return _put_integer(key, int(number))
    return _put(key, NEGATIVE if negative else POSITIVE, _UNKNOWN_SIZE, 0, 0)


@inner
def _billions(limbs: int) -> int:
    """Divide a number of four 32-bit limbs, the highest first, by 10**9; gives the rest."""
    rest = 0
    for i in range(4):
        part = rest << 32 | load64(limbs + 8 * i)
        store64(limbs + 8 * i, part // _BILLION)
        rest = part % _BILLION
    return rest


@inner
def _put_decimal(key: int, value: int) -> bool:
    bits, upper = load64(value), load64(value + 8)
    negative = upper < 0
    if upper >> 58 & 0x1F == 0x1F:
        return _put(key, NAN, 0, 0, 0)
    if upper >> 58 & 0x1F == 0x1E:
        return _put(key, MINUS_INFINITY if negative else INFINITY, 0, 0, 0)
    if upper >> 61 & 3 == 3:
        return False
    store64(key, upper >> 32 & 0x1FFFF)
    store64(key + 8, upper & 0xFFFFFFFF)
    store64(key + 16, bits >> 32 & 0xFFFFFFFF)
    store64(key + 24, bits & 0xFFFFFFFF)
    low = _billions(key)
    low += _billions(key) * _BILLION
    high = _billions(key)
    high += load64(key + 24) * _BILLION
    if high >= _10_TO_16:
        return False
    return _put_finite(key, negative, (upper >> 49 & 0x3FFF) - 6176, high, low)


@inner
def put_key(key: int, type_: int, value: int) -> bool:
    """Write the key of a number of any type; false where it has none."""
    if type_ == DECIMAL128:
        return _put_decimal(key, value)
    if type_ == DOUBLE:
        return _put_double(key, load64(value))
    return _put_integer(key, signed32(load32(value)) if type_ == INT32 else load64(value))


@inner
def _order_keys(left: int, right: int) -> int:
    class_ = load64(left)
    if class_ != load64(right):
        return order(class_, load64(right))
    if class_ not in (NEGATIVE, POSITIVE):
        return SAME
    if load64(left + _EXPONENT) == _UNKNOWN_SIZE or load64(right + _EXPONENT) == _UNKNOWN_SIZE:
        return INVALID
    result = order(load64(left + _EXPONENT), load64(right + _EXPONENT))
    if result == SAME:
        result = order(load64(left + _HIGH), load64(right + _HIGH))
    if result == SAME:
        result = order(load64(left + _LOW), load64(right + _LOW))
    return 2 - result if class_ == NEGATIVE else result


@inner
def order_decimals(type_: int, value: int, other_type: int, other: int, keys: int) -> int:
    """The order of two numbers of which one is a decimal, or -1. ``keys`` has room for two keys."""
    if type_ == other_type and equal(value, other, 16):
        return SAME
    if not put_key(keys, type_, value) or not put_key(keys + KEY_SIZE, other_type, other):
        return INVALID
    return _order_keys(keys, keys + KEY_SIZE)


@inner
def class_of_decimal(value: int, key: int) -> int:
    """The class of a decimal, or -4 where it has no key."""
    return load64(key) if _put_decimal(key, value) else -4


@inner
def cut(key: int, number: int) -> int:
    """Truncate a key to a 64-bit integer, stored at ``number``. Returns 1 if nothing was cut off, 0 if something was,
    and -1 if there is no such integer (NaN, an infinity, too large)."""
    class_ = load64(key)
    store64(number, 0)
    if class_ == ZERO:
        return 1
    if class_ not in (NEGATIVE, POSITIVE):
        return INVALID
    high, low, digits = load64(key + _HIGH), load64(key + _LOW), load64(key + _EXPONENT) + 36
    if digits <= 0:
        return 0
    if digits > 19:
        return INVALID
    sign = 1 if class_ == POSITIVE else -1
    if digits == 19:
        last = low // _10_TO_17
        if high > _HIGHEST_TENTH or (high == _HIGHEST_TENTH and last > (7 if class_ == POSITIVE else 8)):
            return INVALID
        store64(number, sign * high * 10 + sign * last)
        return 1 if low % _10_TO_17 == 0 else 0
    unit = 1
    for _ in range(18 - digits):
        unit *= 10
    store64(number, sign * (high // unit))
    return 1 if high % unit == 0 and low == 0 else 0
