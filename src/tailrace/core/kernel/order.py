"""MongoDB's order over BSON values, in compiled code. ``tailrace.core.expression.values.compare`` is the reference.

A value is its type, where its bytes begin and where they end; type 0 is a missing value. What this order cannot say
exactly (a double beside a decimal, bytes that do not hold together, values nested too deep) is ``INVALID``.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.decimal128 import ABOVE, BELOW, KEY_SIZE, SAME, order, order_decimals
from tailrace.core.kernel.memory import as_double, load8, load32, load64, store64
from tailrace.core.kernel.scan import (
    ARRAY,
    BINARY,
    BOOL,
    CODE_WITH_SCOPE,
    DATE,
    DB_POINTER,
    DECIMAL128,
    DOUBLE,
    INT32,
    INVALID,
    MAX_KEY,
    MIN_KEY,
    OBJECT,
    OBJECT_ID,
    REGEX,
    TIMESTAMP,
    document_end,
    find_nul,
    load_signed32,
    signed32,
    value_end,
)

#: The ranks of the type classes; a missing value ranks with undefined.
NUMBER = 3
TEXT = 4
_MAX_KEY_RANK = 16
#: The ranks of the types 0 to 15, four bits each, and of 16 to 19.
_RANKS = 0xF4ED_C2A9_8176_5431 - (1 << 64)
_LATER_RANKS = 0x33B3

_DEPTH_MAX = 128
_LEVEL = 40
#: Memory that a comparison needs: two keys of decimals, then the open documents and arrays of both sides.
ORDER_SIZE = 2 * KEY_SIZE + _LEVEL * _DEPTH_MAX

_SIGN = -(1 << 63)
_INT64_EDGE = float(1 << 63)


@inner
def rank(type_: int) -> int:
    """The place of the type's class in the order."""
    if type_ < 16:
        return _RANKS >> (4 * type_) & 15
    if type_ == MIN_KEY:
        return 0
    return _MAX_KEY_RANK if type_ == MAX_KEY else _LATER_RANKS >> (4 * (type_ - 16)) & 15


@inner
def order_bytes(left: int, left_size: int, right: int, right_size: int) -> int:
    """The order of two runs of bytes; the shorter one first where it begins the other."""
    shared = min(left_size, right_size)
    for i in range(shared):
        if load8(left + i) != load8(right + i):
            return order(load8(left + i), load8(right + i))
    return order(left_size, right_size)


@inner
def is_nan(type_: int, value: int) -> bool:
    """Whether a number is NaN."""
    if type_ == DOUBLE:
        number = as_double(load64(value))
        return number != number  # noqa: PLR0124 - NaN
    return type_ == DECIMAL128 and load64(value + 8) >> 58 & 0x1F == 0x1F


@inner
def _order_mixed(whole: int, number: float) -> int:
    """The order of an integer and a double that is no NaN, exactly."""
    if number >= _INT64_EDGE:
        return BELOW
    if number < -_INT64_EDGE:
        return ABOVE
    cut = int(number)
    if whole != cut:
        return order(whole, cut)
    rest = number - float(cut)
    if rest == 0.0:
        return SAME
    return BELOW if rest > 0.0 else ABOVE


@inner
def _order_numbers(type_: int, value: int, other_type: int, other: int, memory: int) -> int:
    if is_nan(type_, value) or is_nan(other_type, other):
        return order(1 - int(is_nan(type_, value)), 1 - int(is_nan(other_type, other)))
    if DECIMAL128 in (type_, other_type):
        return order_decimals(type_, value, other_type, other, memory)
    if type_ == DOUBLE:
        number = as_double(load64(value))
        if other_type == DOUBLE:
            if number == as_double(load64(other)):
                return SAME
            return BELOW if number < as_double(load64(other)) else ABOVE
        whole = load_signed32(other) if other_type == INT32 else load64(other)
        return 2 - _order_mixed(whole, number)
    whole = load_signed32(value) if type_ == INT32 else load64(value)
    if other_type == DOUBLE:
        return _order_mixed(whole, as_double(load64(other)))
    return order(whole, load_signed32(other) if other_type == INT32 else load64(other))


@inner
def _order_patterns(value: int, end: int, other: int, other_end: int) -> int:
    nul, other_nul = find_nul(value, end), find_nul(other, other_end)
    result = order_bytes(value, nul - value, other, other_nul - other)
    if result != SAME:
        return result
    return order_bytes(nul, end - nul, other_nul, other_end - other_nul)


@inner
def _order_plain(type_: int, value: int, end: int, other: int, other_end: int) -> int:
    """The order of two values of one class that is neither of numbers nor of containers."""
    if type_ in (OBJECT_ID, BOOL):
        return order_bytes(value, end - value, other, other_end - other)
    if type_ == DATE:
        return order(load64(value), load64(other))
    if type_ == TIMESTAMP:
        return order(load64(value) ^ _SIGN, load64(other) ^ _SIGN)
    if type_ == REGEX:
        return _order_patterns(value, end, other, other_end)
    if end - value < 4 or other_end - other < 4:
        return SAME  # values without bytes: null, undefined, missing, MinKey, MaxKey
    if type_ in (BINARY, DB_POINTER) and end - value != other_end - other:
        return order(end - value, other_end - other)
    return order_bytes(value + 4, end - value - 4, other + 4, other_end - other - 4)


@inner
def _open(level: int, value: int, end: int, other: int, other_end: int, named: int) -> None:  # noqa: PLR0917
    store64(level, value + 4)
    store64(level + 8, end - 1)
    store64(level + 16, other + 4)
    store64(level + 24, other_end - 1)
    store64(level + 32, named)


@inner
def _scope(value: int, end: int) -> int:
    """Where the scope of a JavaScript value begins; -1 where its bytes do not hold together."""
    if end - value < 14:
        return INVALID
    size = signed32(load32(value + 4))
    if size < 1 or size > end - value - 13:
        return INVALID
    return value + 8 + size if document_end(value + 8 + size, end) == end else INVALID


@inner
def _open_containers(level: int, type_: int, value: int, end: int, other: int, other_end: int) -> int:  # noqa: PLR0917
    """Open two containers of one class; of two JavaScript values, compare the code before."""
    if type_ != CODE_WITH_SCOPE:
        _open(level, value, end, other, other_end, 1 if type_ == OBJECT else 0)
        return SAME
    scope, other_scope = _scope(value, end), _scope(other, other_end)
    if scope < 0 or other_scope < 0:
        return INVALID
    _open(level, scope, end, other_scope, other_end, 1)
    return order_bytes(value + 8, scope - value - 9, other + 8, other_scope - other - 9)


@inner
def order_values(type_: int, value: int, end: int, other_type: int, other: int, other_end: int, memory: int) -> int:  # noqa: PLR0917
    """``BELOW``, ``SAME``, ``ABOVE`` or ``INVALID``. ``memory`` has ``ORDER_SIZE`` bytes."""
    depth = 0
    while True:
        class_ = rank(type_)
        result = order(class_, rank(other_type))
        level = memory + 2 * KEY_SIZE + _LEVEL * depth
        if result == SAME:
            if class_ == NUMBER:
                result = _order_numbers(type_, value, other_type, other, memory)
            elif type_ in (OBJECT, ARRAY, CODE_WITH_SCOPE):
                if depth == _DEPTH_MAX:
                    return INVALID
                result = _open_containers(level, type_, value, end, other, other_end)
                depth += 1
            else:
                result = _order_plain(type_, value, end, other, other_end)
        if result != SAME:
            return result
        while True:
            if depth == 0:
                return SAME
            level = memory + 2 * KEY_SIZE + _LEVEL * (depth - 1)
            pos, limit = load64(level), load64(level + 8)
            other_pos, other_limit = load64(level + 16), load64(level + 24)
            if pos < limit and other_pos < other_limit:
                break
            if pos < limit or other_pos < other_limit:
                return ABOVE if pos < limit else BELOW
            depth -= 1
        nul, other_nul = find_nul(pos + 1, limit), find_nul(other_pos + 1, other_limit)
        if nul < 0 or other_nul < 0:
            return INVALID
        type_, other_type = load8(pos), load8(other_pos)
        value, other = nul + 1, other_nul + 1
        end, other_end = value_end(type_, value, limit), value_end(other_type, other, other_limit)
        if end < 0 or other_end < 0:
            return INVALID
        store64(level, end)
        store64(level + 16, other_end)
        if load64(level + 32) != 0:
            result = order(rank(type_), rank(other_type))
            if result == SAME:
                result = order_bytes(pos + 1, nul - pos - 1, other_pos + 1, other_nul - other_pos - 1)
            if result != SAME:
                return result
