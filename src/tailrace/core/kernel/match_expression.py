"""The expressions of ``$expr`` in compiled code: what they push on the stack of values.

A value on the stack is three int64: its type (0: missing), where its bytes begin and where they end. They lie in the
event, in the program's pool, or in the working memory where an array had to be gathered. Whatever could fail is not
evaluated: the reference does it.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.decimal128 import SAME, ZERO, class_of_decimal
from tailrace.core.kernel.match_path import (
    ABSENT,
    BROKEN,
    DEPTH,
    ENTERED,
    FOUND,
    FOUND_END,
    FOUND_TYPE,
    FOUND_VALUE,
    LEVEL,
    LEVEL_AGAIN,
    LEVEL_COUNT,
    LEVEL_INDEX,
    LEVEL_LIMIT,
    LEVELS,
    LOOKUP_END,
    LOOKUP_VALUE,
    descend,
    lookup_path,
)
from tailrace.core.kernel.match_test import ARGUMENT, CHAIN, CONSTANT, EXTRA, OPERATION, PATH, WALK
from tailrace.core.kernel.memory import as_double, copy, load8, load32, load64, store8, store32, store64
from tailrace.core.kernel.order import ORDER_SIZE, order_values
from tailrace.core.kernel.scan import (
    ARRAY,
    BOOL,
    DECIMAL128,
    DOUBLE,
    INT32,
    INT64,
    INVALID,
    NULL,
    OBJECT,
    UNDEFINED,
    read_element,
)

VALUE_SIZE = 24

# What the working memory begins with, after the memory of comparisons.
GATHERED = ORDER_SIZE  # where the next gathered array goes
GATHERED_END = ORDER_SIZE + 8
ANSWERS = ORDER_SIZE + 16  # the bytes of false and true, then from ORDERS on those of -1, 0 and 1
ORDERS = ORDER_SIZE + 24
MEMORY_HEAD = ORDER_SIZE + 40

# The operations that push a value.
PUSH = 64  # a constant: type; where it begins; where it ends
FIELD = 65
IS_ORDER = 66  # pops two; the orders that give true
ORDER_OF = 67  # $cmp
IS_AMONG = 68  # $in
IS_NOT = 69  # $not

_LONGEST_HEAD = 32  # of an array's element: its type, its number, and the closing bytes of what holds it


@inner
def push(values: int, type_: int, value: int, end: int) -> int:
    """Put a value of ``type_``, from ``value`` to ``end``, on the stack; gives the new end of the stack."""
    store64(values, type_)
    store64(values + 8, value)
    store64(values + 16, end)
    return values + VALUE_SIZE


@inner
def is_nullish(value: int) -> bool:
    """Whether a value on the stack is missing, null or undefined."""
    return load64(value) in (0, NULL, UNDEFINED)


@inner
def truth(value: int, memory: int) -> int:
    """Whether a value on the stack counts as true: 1 or 0, or -1 where the reference has to say."""
    type_, start = load64(value), load64(value + 8)
    if type_ == BOOL:
        return 1 if load8(start) != 0 else 0
    if type_ == INT32:
        return 1 if load32(start) != 0 else 0
    if type_ == INT64:
        return 1 if load64(start) != 0 else 0
    if type_ == DOUBLE:
        return 0 if as_double(load64(start)) == 0.0 else 1
    if type_ == DECIMAL128:
        class_ = class_of_decimal(start, memory)
        if class_ < -3:
            return INVALID
        return 0 if class_ == ZERO else 1
    return 0 if is_nullish(value) else 1


@inner
def _put_head(out: int, type_: int, number: int) -> int:
    """An element's type and its number as name; gives where the value goes."""
    store8(out, type_)
    digits = 1
    rest = number // 10
    while rest > 0:
        digits += 1
        rest //= 10
    rest = number
    for i in range(digits):
        store8(out + digits - i, 0x30 + rest % 10)
        rest //= 10
    store8(out + digits + 1, 0)
    return out + digits + 2


@inner
def _gather_one(path: int, walk: int, out: int, room: int) -> int:
    """What the innermost open array's next element has at the path, appended at ``out``; gives the new end, or -1."""
    level = walk + LEVELS + LEVEL * (load64(walk + DEPTH) - 1)
    pos, limit = load64(level), load64(level + LEVEL_LIMIT)
    nul, end = read_element(pos, limit)
    if end < 0:
        return INVALID
    store64(level, end)
    if load8(pos) != OBJECT:
        return out
    result = descend(path, nul + 1, load64(level + LEVEL_INDEX), walk)
    if result in (BROKEN, ABSENT):
        return INVALID if result == BROKEN else out
    if room - out < _LONGEST_HEAD:
        return INVALID
    count = load64(level + LEVEL_COUNT)
    store64(level + LEVEL_COUNT, count + 1)
    if result == ENTERED:
        target = _put_head(out, ARRAY, count)
        store64(level + LEVEL + LEVEL_AGAIN, target)
        return target + 4
    target = _put_head(out, load64(walk + FOUND_TYPE), count)
    start = load64(walk + FOUND_VALUE)
    size = load64(walk + FOUND_END) - start
    if room - target < size + _LONGEST_HEAD:
        return INVALID
    copy(target, start, size)
    return target + size


@inner
def _gather(path: int, walk: int, memory: int, values: int) -> int:
    """Push the array of what the documents of an open array have at the path; -1 where there is no room for it."""
    out, room = load64(memory + GATHERED), load64(memory + GATHERED_END)
    if room - out < _LONGEST_HEAD:
        return INVALID
    first = out
    store64(walk + LEVELS + LEVEL_AGAIN, first)
    out += 4
    while load64(walk + DEPTH) > 0:
        level = walk + LEVELS + LEVEL * (load64(walk + DEPTH) - 1)
        if load64(level) < load64(level + LEVEL_LIMIT):
            out = _gather_one(path, walk, out, room)
            if out < 0:
                return INVALID
            continue
        if out == room:
            return INVALID
        store8(out, 0)
        out += 1
        store32(load64(level + LEVEL_AGAIN), out - load64(level + LEVEL_AGAIN))
        store64(walk + DEPTH, load64(walk + DEPTH) - 1)
    store64(memory + GATHERED, out)
    return push(values, ARRAY, first, out)


@inner
def _push_field(row: int, memory: int, lookups: int, values: int) -> int:
    path = load64(row + PATH)
    if path == 0:  # $$ROOT
        event = memory + lookups
        return push(values, OBJECT, load64(event + LOOKUP_VALUE), load64(event + LOOKUP_END))
    walk = memory + load64(row + WALK)
    store64(walk + DEPTH, 0)
    found = lookup_path(memory, lookups, path, load64(row + CHAIN), walk)
    if found == ENTERED:
        return _gather(path, walk, memory, values)
    if found == FOUND:
        return push(values, load64(walk + FOUND_TYPE), load64(walk + FOUND_VALUE), load64(walk + FOUND_END))
    return push(values, 0, 0, 0) if found == ABSENT else INVALID


@inner
def _order_of(left: int, right: int, memory: int) -> int:
    return order_values(
        load64(left),
        load64(left + 8),
        load64(left + 16),
        load64(right),
        load64(right + 8),
        load64(right + 16),
        memory,
    )


@inner
def _is_among(wanted: int, array: int, memory: int) -> int:
    """Whether an array has a value: 1 or 0, or -1 where the reference has to say (or to fail)."""
    if load64(array) != ARRAY:
        return INVALID
    pos, limit = load64(array + 8) + 4, load64(array + 16) - 1
    answer = 0
    while pos < limit:
        nul, end = read_element(pos, limit)
        if end < 0:
            return INVALID
        type_, start, stop = load64(wanted), load64(wanted + 8), load64(wanted + 16)
        order = order_values(type_, start, stop, load8(pos), nul + 1, end, memory)
        if order == SAME:
            return 1
        if order < 0:
            answer = INVALID
        pos = end
    return answer


@inner
def push_result(row: int, memory: int, lookups: int, values: int) -> int:
    """Do one operation of an expression; gives the new end of the stack, or -1 where the reference has to say."""
    operation, argument = load64(row + OPERATION), load64(row + ARGUMENT)
    if operation == PUSH:
        return push(values, argument, load64(row + CONSTANT), load64(row + EXTRA))
    if operation == FIELD:
        return _push_field(row, memory, lookups, values)
    last = values - VALUE_SIZE
    if operation == IS_NOT:
        answer = truth(last, memory)
        flag = memory + ANSWERS + 1 - answer
        return INVALID if answer < 0 else push(last, BOOL, flag, flag + 1)
    before = last - VALUE_SIZE
    answer = _is_among(before, last, memory) if operation == IS_AMONG else _order_of(before, last, memory)
    if answer < 0:
        return INVALID
    if operation == ORDER_OF:
        number = memory + ORDERS + 4 * answer
        return push(before, INT32, number, number + 4)
    if operation == IS_ORDER:
        answer = argument >> answer & 1
    flag = memory + ANSWERS + answer
    return push(before, BOOL, flag, flag + 1)
