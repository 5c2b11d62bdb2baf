"""A ``$match`` on many events at once, in compiled code. ``tailrace.expression.match`` is the reference.

The answer has three values: an event passes, it fails, or the reference has to say (``UNKNOWN``): an array on a path, a
decimal or NaN where a number is compared, bytes that do not hold together, and whatever ``match_program`` has no
instruction for. ``$and``, ``$or`` and ``$nor`` go on with three values, so what is unknown matters only where the rest
does not decide.

A *program* is int64 rows of ``ROW`` bytes in postfix order: the tests of paths put their answers on a stack, the logic
takes them off. Paths and constants are addresses into a pool that the Python side keeps alive.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.kernel.compiled import entry_point, fingerprint, inner
from tailrace.kernel.memory import as_double, load8, load32, load64, store8, store64
from tailrace.kernel.scan import (
    ARRAY,
    BOOL,
    DATE,
    DECIMAL128,
    DOUBLE,
    INT32,
    INT64,
    INVALID,
    MAX_KEY,
    MIN_KEY,
    NULL,
    OBJECT,
    OBJECT_ID,
    STRING,
    SYMBOL,
    TIMESTAMP,
    UNDEFINED,
    document_end,
    equal,
    find_nul,
    load_signed32,
    value_end,
)

# The answers; what a test of one event gives.
FAILS = 0
PASSES = 1
UNKNOWN = 2

# A row's slots.
ROW = 48
_OPERATION = 0
_PATH = 8  # of a test: the address of its names (count, then address and size of each)
_COUNT = 8  # of logic: how many answers it takes
_ARGUMENT = 16  # COMPARE: the operator; IS_IN: how many constants; IS_OF_TYPE: a bit for each type
_CONSTANT = 24  # COMPARE: the constant; IS_IN: the first one; each (type class, address of its data, size)
_WITH_NULL = 32  # IS_IN: whether null is among the values
CONSTANT_SIZE = 24

# Operations.
AND = 0
OR = 1
NOR = 2
ANSWER = 3  # _ARGUMENT itself
COMPARE = 4
IS_NULL = 5
IS_IN = 6
EXISTS = 7
IS_OF_TYPE = 8

# Operators of COMPARE: bits of the orders that pass (below, equal, above).
LESS = 1
EQUAL = 2
GREATER = 4

_SIGN = -(1 << 63)
_EXPONENT = 0x7FF << 52
_INT64_EDGE = float(1 << 63)
_BELOW = 0
_SAME = 1
_ABOVE = 2


@inner
def _order(left: int, right: int) -> int:
    if left == right:
        return _SAME
    return _BELOW if left < right else _ABOVE


@inner
def _order_bytes(left: int, left_size: int, right: int, right_size: int) -> int:
    shared = min(left_size, right_size)
    for i in range(shared):
        if load8(left + i) != load8(right + i):
            return _order(load8(left + i), load8(right + i))
    return _order(left_size, right_size)


@inner
def _is_nan(bits: int) -> bool:
    return bits & _EXPONENT == _EXPONENT and bits & ((1 << 52) - 1) != 0


@inner
def _order_mixed(whole: int, number: float) -> int:
    """The order of an integer and a double that is no NaN, exactly."""
    if number >= _INT64_EDGE:
        return _BELOW
    if number < -_INT64_EDGE:
        return _ABOVE
    cut = int(number)
    if whole != cut:
        return _order(whole, cut)
    rest = number - float(cut)
    if rest == 0.0:
        return _SAME
    return _BELOW if rest > 0.0 else _ABOVE


@inner
def _order_numbers(type_: int, value: int, constant: int) -> int:
    """The order of a number at ``value`` and a constant, or -1 where the reference has to say."""
    bits = load64(load64(constant + 8))
    if type_ == DOUBLE:
        found = load64(value)
        if _is_nan(found):
            return INVALID
        number = as_double(found)
        if load64(constant) == DOUBLE:
            if number == as_double(bits):
                return _SAME
            return _BELOW if number < as_double(bits) else _ABOVE
        return 2 - _order_mixed(bits, number)
    whole = load_signed32(value) if type_ == INT32 else load64(value)
    if load64(constant) == DOUBLE:
        return _order_mixed(whole, as_double(bits))
    return _order(whole, bits)


@inner
def _compare(type_: int, value: int, end: int, constant: int, operator: int) -> int:
    """Whether a value that is there stands in one of the operator's orders to the constant."""
    kind, data, size = load64(constant), load64(constant + 8), load64(constant + 16)
    order = INVALID
    if kind in (INT64, DOUBLE):
        if type_ == DECIMAL128:
            return UNKNOWN
        if type_ not in (INT32, INT64, DOUBLE):
            return FAILS
        order = _order_numbers(type_, value, constant)
    elif kind == STRING:
        if type_ not in (STRING, SYMBOL):
            return FAILS
        if operator == EQUAL:
            same = end - value - 4 == size and equal(value + 4, data, size)
            return PASSES if same else FAILS
        order = _order_bytes(value + 4, end - value - 4, data, size)
    elif kind != type_:
        return FAILS
    elif kind in (OBJECT_ID, BOOL):
        order = _order_bytes(value, end - value, data, size)
    elif kind == DATE:
        order = _order(load64(value), load64(data))
    elif kind == TIMESTAMP:
        order = _order(load64(value) ^ _SIGN, load64(data) ^ _SIGN)
    if order < 0:
        return UNKNOWN
    return PASSES if operator >> order & 1 == 1 else FAILS


@inner
def _is_in(type_: int, value: int, end: int, row: int) -> int:
    answer = FAILS
    constant = load64(row + _CONSTANT)
    for _ in range(load64(row + _ARGUMENT)):
        one = _compare(type_, value, end, constant, EQUAL)
        if one == PASSES:
            return PASSES
        answer = max(answer, one)
        constant += CONSTANT_SIZE
    return answer


@inner
def _type_bit(type_: int) -> int:
    if type_ == MIN_KEY:
        return 32
    return 33 if type_ == MAX_KEY else type_


@inner
def _test(operation: int, type_: int, value: int, end: int, row: int) -> int:
    """A test of a value that is there and no array."""
    if operation == COMPARE:
        return _compare(type_, value, end, load64(row + _CONSTANT), load64(row + _ARGUMENT))
    if operation == IS_NULL:
        return PASSES if type_ in (NULL, UNDEFINED) else FAILS
    if operation == IS_IN:
        if load64(row + _WITH_NULL) != 0 and type_ in (NULL, UNDEFINED):
            return PASSES
        return _is_in(type_, value, end, row)
    return PASSES if load64(row + _ARGUMENT) >> _type_bit(type_) & 1 == 1 else FAILS


@inner
def _test_missing(operation: int, row: int) -> int:
    if operation == IS_NULL or (operation == IS_IN and load64(row + _WITH_NULL) != 0):
        return PASSES
    return FAILS


@inner
def _find(name: int, size: int, pos: int, limit: int) -> int:
    """The address of the element of that name in [pos, limit); 0 where there is none, -1 for bytes that do not hold."""
    while pos < limit:
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return INVALID
        if nul - pos - 1 == size and equal(pos + 1, name, size):
            return pos
        pos = value_end(load8(pos), nul + 1, limit)
        if pos < 0:
            return INVALID
    return 0


@inner
def _test_path(row: int, document: int) -> int:
    operation, path = load64(row + _OPERATION), load64(row + _PATH)
    names = load64(path)
    limit = document + load32(document) - 1
    pos = document + 4
    for i in range(names):
        name, size = load64(path + 8 + 16 * i), load64(path + 16 + 16 * i)
        element = _find(name, size, pos, limit)
        if element == 0:
            return _test_missing(operation, row)
        value = element + size + 2
        end = INVALID if element < 0 else value_end(load8(element), value, limit)
        if end < 0:
            return UNKNOWN
        type_ = load8(element)
        if i == names - 1:
            if operation == EXISTS:
                return PASSES
            return UNKNOWN if type_ == ARRAY else _test(operation, type_, value, end, row)
        if type_ == ARRAY:
            return UNKNOWN
        if type_ != OBJECT:
            return _test_missing(operation, row)
        pos, limit = value + 4, end - 1
    return UNKNOWN


@inner
def _join(operation: int, answers: int, count: int) -> int:
    """The answer of ``$and``, ``$or`` or ``$nor`` to those of its parts."""
    decides = FAILS if operation == AND else PASSES
    unknown = False
    for i in range(count):
        answer = load64(answers + 8 * i)
        if answer == decides:
            return FAILS if operation == NOR else decides
        unknown |= answer == UNKNOWN
    if unknown:
        return UNKNOWN
    return FAILS if operation == OR else PASSES


@inner
def _run(program: int, rows: int, stack: int, document: int) -> int:
    top = stack
    for i in range(rows):
        row = program + ROW * i
        operation = load64(row + _OPERATION)
        if operation <= NOR:
            count = load64(row + _COUNT)
            top -= 8 * count
            answer = _join(operation, top, count)
        elif operation == ANSWER:
            answer = load64(row + _ARGUMENT)
        else:
            answer = _test_path(row, document)
        store64(top, answer)
        top += 8
    return load64(stack)


def _make_match(sources: int) -> Callable[[int], None]:
    @entry_point("void(int64)")
    def match(job: int) -> None:
        """Ask a program of events. ``job`` is int64[7]: program, its rows, stack, base, offsets, count; then the target
        (uint8): ``FAILS``, ``PASSES`` or ``UNKNOWN`` for each event, ``FAILS`` for one of no bytes."""
        if sources == 0:
            return
        program, rows, stack = load64(job), load64(job + 8), load64(job + 16)
        base, offsets, target = load64(job + 24), load64(job + 32), load64(job + 48)
        for i in range(load64(job + 40)):
            start, end = base + load64(offsets + 8 * i), base + load64(offsets + 8 * i + 8)
            answer = FAILS
            if start != end:
                whole = document_end(start, end) == end
                answer = _run(program, rows, stack, start) if whole else UNKNOWN
            store8(target + i, answer)

    return match


match = _make_match(fingerprint(__name__))
