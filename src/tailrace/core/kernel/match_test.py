"""What a ``$match`` tests of one value, in compiled code. ``tailrace.core.expression.match.test`` is the reference.

Every test answers ``PASSES``, ``FAILS`` or ``UNKNOWN``, the last where the reference has to say.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.decimal128 import KEY_SIZE, SAME, cut, order_decimals, put_key
from tailrace.core.kernel.match_path import (
    ABSENT,
    BROKEN,
    DONE,
    FOUND,
    FOUND_END,
    FOUND_TYPE,
    FOUND_VALUE,
    first_value,
    next_value,
)
from tailrace.core.kernel.memory import as_double, load8, load64, store64
from tailrace.core.kernel.order import NUMBER, is_nan, order_values, rank
from tailrace.core.kernel.scan import (
    ARRAY,
    BINARY,
    DECIMAL128,
    DOUBLE,
    INT32,
    INVALID,
    MAX_KEY,
    MIN_KEY,
    NULL,
    REGEX,
    STRING,
    SYMBOL,
    UNDEFINED,
    equal,
    load_signed32,
    read_element,
)
from tailrace.core.kernel.utf8 import valid_utf8

# The answers; what a test of one event gives.
FAILS = 0
PASSES = 1
UNKNOWN = 2

# A row's slots.
ROW = 64
OPERATION = 0
TARGET = 8  # of a jump: the number of the row
PATH = 16  # of a test: the address of its path; 0: it tests the current value itself
CHAIN = 24  # the address of the path's look-ups in the event; 0: it is a path in the current value
ARGUMENT = 32
CONSTANT = 40
EXTRA = 48
WALK = 56  # of a test with a path: where its walk is in the working memory

# The operations that test a value. What each holds in _ARGUMENT, _CONSTANT and _EXTRA:
COMPARE = 32  # operator; the constant
IS_NULL = 33
IS_EXTREME = 34  # MinKey or MaxKey; whether that passes; whether everything else does
IS_IN = 35  # how many; the constants in order; whether null is among them
EXISTS = 36
IS_OF_TYPE = 37  # a bit for each type
HAS_SIZE = 38  # the size
HAS_REST = 39  # divisor; the rest of the division
HAS_BITS = 40  # the mask for numbers; positions for binary data; 4 * their number + 2 if all + 1 if clear
CONTAINS = (
    41  # 1 if at the beginning, 2 at the end; the text; its size, and address and size of the pattern's own bytes
)

#: A constant in the pool: type, where it begins and ends, and 0 or the address of what a double and a decimal are
#: compared by: of a double, the decimal that it is taken for; of a decimal, the largest double below, the least above.
CONSTANT_SIZE = 32

# Operators of COMPARE: bits of the orders that pass (below, equal, above).
LESS = 1
EQUAL = 2
GREATER = 4

_NUMBER = 2 * KEY_SIZE
_TWO_TO_63 = 9223372036854775808.0


@inner
def is_constant_order(type_: int, value: int, end: int, constant: int, memory: int) -> int:
    """The order of a value and a constant, or -1."""
    kind, other, special = load64(constant), load64(constant + 8), load64(constant + 24)
    if special != 0 and not is_nan(type_, value):
        if kind == DOUBLE and type_ == DECIMAL128:
            return order_decimals(DECIMAL128, value, DECIMAL128, special, memory)
        if kind == DECIMAL128 and type_ == DOUBLE:
            number = as_double(load64(value))
            if number <= as_double(load64(special)):
                return 0
            return 2 if number >= as_double(load64(special + 8)) else 1
    return order_values(type_, value, end, kind, other, load64(constant + 16), memory)


@inner
def _compare(type_: int, value: int, end: int, row: int, memory: int) -> int:
    constant, operator = load64(row + CONSTANT), load64(row + ARGUMENT)
    kind = load64(constant)
    if type_ == STRING and kind == STRING and operator == EQUAL:
        other = load64(constant + 8)
        size = load64(constant + 16) - other
        return PASSES if end - value == size and equal(value, other, size) else FAILS
    class_ = rank(kind)
    if rank(type_) != class_:
        return FAILS
    if class_ == NUMBER and is_nan(type_, value) != is_nan(kind, load64(constant + 8)):
        return FAILS
    order = is_constant_order(type_, value, end, constant, memory)
    if order < 0:
        return UNKNOWN
    return operator >> order & 1


@inner
def _is_in(type_: int, value: int, end: int, row: int, memory: int) -> int:
    """Whether a value is among the constants, which are sorted. Equality is exact here: a double that a decimal is only
    rounded to is left to the reference."""
    if type_ == UNDEFINED and load64(row + EXTRA) != 0:
        return PASSES
    constants = load64(row + CONSTANT)
    low, high = 0, load64(row + ARGUMENT)
    while low < high:
        middle = (low + high) >> 1
        constant = constants + CONSTANT_SIZE * middle
        order = is_constant_order(type_, value, end, constant, memory)
        if order < 0:
            return UNKNOWN
        if order == SAME:
            kind = load64(constant)
            mixed = kind != type_ and DECIMAL128 in (kind, type_) and DOUBLE in (kind, type_)
            return UNKNOWN if mixed else PASSES
        if order == 0:
            high = middle
        else:
            low = middle + 1
    return FAILS


@inner
def _has_size(value: int, end: int, row: int) -> int:
    wanted = load64(row + ARGUMENT)
    pos, limit = value + 4, end - 1
    count = 0
    while pos < limit:
        _, pos = read_element(pos, limit)
        if pos < 0:
            return UNKNOWN
        count += 1
    return PASSES if count == wanted else FAILS


@inner
def _cut_to_integer(type_: int, value: int, memory: int) -> int:
    """A number cut to an integer, which ``_NUMBER`` then holds: 1 where nothing was cut off, 0 where something was, -1
    where there is none, -2 where the reference has to say."""
    if type_ == DECIMAL128:
        return cut(memory, memory + _NUMBER) if put_key(memory, type_, value) else -2
    if type_ == DOUBLE:
        number = as_double(load64(value))
        if not -_TWO_TO_63 <= number < _TWO_TO_63:
            return INVALID
        store64(memory + _NUMBER, int(number))
        return 1 if float(int(number)) == number else 0
    store64(memory + _NUMBER, load_signed32(value) if type_ == INT32 else load64(value))
    return 1


@inner
def _has_rest(type_: int, value: int, row: int, memory: int) -> int:
    if rank(type_) != NUMBER:
        return FAILS
    status = _cut_to_integer(type_, value, memory)
    if status < 0:
        return FAILS if status == INVALID else UNKNOWN
    number, divisor = load64(memory + _NUMBER), load64(row + ARGUMENT)
    rest = 0
    if divisor not in (1, -1, 0):
        rest = number % divisor
        if rest != 0 and (rest < 0) != (number < 0):
            rest -= divisor  # the server's rest has the number's sign
    return PASSES if rest == load64(row + EXTRA) else FAILS


@inner
def _binary_has_bits(value: int, end: int, row: int) -> int:
    positions, options = load64(row + CONSTANT), load64(row + EXTRA)
    every = options >> 1 & 1
    for i in range(options >> 2):
        position = load64(positions + 8 * i)
        place = value + 5 + (position >> 3)
        bit = load8(place) >> (position & 7) & 1 if place < end else 0
        if (bit ^ (options & 1)) != every:
            return FAILS if every == 1 else PASSES
    return PASSES if every == 1 else FAILS


@inner
def _has_bits(type_: int, value: int, end: int, row: int, memory: int) -> int:
    if type_ == BINARY:
        return _binary_has_bits(value, end, row)
    if rank(type_) != NUMBER:
        return FAILS
    status = _cut_to_integer(type_, value, memory)
    if status != 1:
        return UNKNOWN if status < INVALID else FAILS
    number, mask, options = load64(memory + _NUMBER), load64(row + ARGUMENT), load64(row + EXTRA)
    common = (~number if options & 1 == 1 else number) & mask
    if options & 2 == 2:
        return PASSES if common == mask else FAILS
    return PASSES if common != 0 else FAILS


@inner
def _contains(type_: int, value: int, end: int, row: int) -> int:
    extra = load64(row + EXTRA)
    if type_ == REGEX:
        size = load64(extra + 16)
        return PASSES if end - value == size and equal(value, load64(extra + 8), size) else FAILS
    if type_ not in (STRING, SYMBOL):
        return FAILS
    text, size = load64(row + CONSTANT), load64(extra)
    pos = value + 4
    last = end - 1 - size
    where = load64(row + ARGUMENT)
    if where & 2 == 2:  # at the end, or before a line's end that ends the text
        pos = max(pos, last - 1)
    if where & 1 == 1:
        if pos > value + 4:
            return FAILS
        last = min(last, pos)
    while pos <= last:
        ends = where & 2 == 0 or pos + size == end - 1 or load8(pos + size) == 0x0A
        if ends and equal(pos, text, size):
            return PASSES if valid_utf8(value + 4, end - 1) else FAILS
        pos += 1
    return FAILS


@inner
def _type_bit(type_: int) -> int:
    if type_ == MIN_KEY:
        return 32
    return 33 if type_ == MAX_KEY else type_


@inner
def test_value(type_: int, value: int, end: int, row: int, memory: int) -> int:
    """A row's test of a value that is there; an array is tested as a whole."""
    operation = load64(row + OPERATION)
    if operation == COMPARE:
        return _compare(type_, value, end, row, memory)
    if operation == IS_IN:
        return _is_in(type_, value, end, row, memory)
    if operation == EXISTS:
        return PASSES
    if operation == IS_NULL:
        return PASSES if type_ in (NULL, UNDEFINED) else FAILS
    if operation == IS_EXTREME:
        return load64(row + CONSTANT) if type_ == load64(row + ARGUMENT) else load64(row + EXTRA)
    if operation == IS_OF_TYPE:
        return load64(row + ARGUMENT) >> _type_bit(type_) & 1
    if operation == HAS_SIZE:
        return _has_size(value, end, row) if type_ == ARRAY else FAILS
    if operation == HAS_REST:
        return _has_rest(type_, value, row, memory)
    if operation == HAS_BITS:
        return _has_bits(type_, value, end, row, memory)
    return _contains(type_, value, end, row)


@inner
def test_absent(row: int) -> int:
    """A row's test where nothing is."""
    operation = load64(row + OPERATION)
    if operation == IS_NULL or (operation == IS_IN and load64(row + EXTRA) != 0):
        return PASSES
    return load64(row + EXTRA) if operation == IS_EXTREME else FAILS


@inner
def _test_elements(row: int, value: int, end: int, memory: int) -> int:
    """A row's test of the elements of an array: whether one of them passes."""
    pos, limit = value + 4, end - 1
    answer = FAILS
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return UNKNOWN
        one = test_value(load8(pos), nul + 1, after, row, memory)
        if one == PASSES:
            return PASSES
        answer = max(answer, one)
        pos = after
    return answer


@inner
def test_row(row: int, memory: int, lookups: int, type_: int, value: int, end: int) -> int:  # noqa: PLR0917
    """A row's test of whatever its path stands for, in the event or in the current value."""
    path = load64(row + PATH)
    if path == 0:
        return test_value(type_, value, end, row, memory)
    walk = memory + load64(row + WALK)
    found = first_value(memory, lookups, path, load64(row + CHAIN), walk, type_, value)
    answer = FAILS
    while found != DONE:
        one = UNKNOWN
        if found == ABSENT:
            one = test_absent(row)
        elif found != BROKEN:
            kind, start, stop = load64(walk + FOUND_TYPE), load64(walk + FOUND_VALUE), load64(walk + FOUND_END)
            one = test_value(kind, start, stop, row, memory)
            if one != PASSES and kind == ARRAY and found == FOUND and load64(row + OPERATION) != HAS_SIZE:
                inside = _test_elements(row, start, stop, memory)
                one = inside if inside == PASSES else max(one, inside)
        if one == PASSES or found == BROKEN:
            return one
        answer = max(answer, one)
        found = next_value(path, walk)
    return answer
