"""A ``$match`` on many events at once, in compiled code. ``tailrace.core.expression.match`` is the reference.

The answer has three values: an event passes, it fails, or the reference has to say (``UNKNOWN``). The last is for a
double compared with a decimal inside documents, for invalid bytes, and for anything for which ``match_program`` has no
instruction. ``$and``, ``$or`` and ``$nor`` work on three values, so an unknown answer matters only if the others do not
decide.

A *program* is rows of eight int64, run one after another by a small machine with two stacks: answers, and the values
of expressions. ``match_test`` tests values, ``match_path`` finds them, ``match_expression`` evaluates. Paths and
constants are addresses into a pool, and what a run remembers is in a working memory; the Python side keeps both alive.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.event_parts import ROW as NOTED_ROW
from tailrace.core.kernel.event_parts import TOKEN
from tailrace.core.kernel.match_expression import GATHERED, VALUE_SIZE, is_nullish, push_result, truth
from tailrace.core.kernel.match_noted import find_noted
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
    reset_lookups,
)
from tailrace.core.kernel.match_test import (
    ARGUMENT,
    CHAIN,
    EXTRA,
    FAILS,
    OPERATION,
    PASSES,
    PATH,
    ROW,
    TARGET,
    UNKNOWN,
    WALK,
    test_row,
)
from tailrace.core.kernel.memory import load8, load64, store8, store64
from tailrace.core.kernel.scan import ARRAY, OBJECT, document_end, read_element

__all__ = ["FAILS", "PASSES", "UNKNOWN", "match"]

# The operations; those that test a value are in ``match_test``, those that push one in ``match_expression``.
ANSWER = 0  # push ARGUMENT
EACH = 1  # push FAILS and begin with the arrays at a path; with ARGUMENT only their documents and arrays count
MERGE = 2  # take an answer into the one below; go to TARGET where it is ARGUMENT, which decides
NEGATE = 3
STOP = 4  # only the reference may go on: it could fail here
EACH_NEXT = 5  # make the next element the current value; at the end go to TARGET
EACH_MERGE = 6  # take its answer; go on at EXTRA, or after the loop at TARGET where it passes
JUMP = 7
JUMP_IF = 8  # pop a value; go to TARGET where its truth is ARGUMENT
JUMP_NOT_NULL = 9  # pop a value, or go to TARGET where it is neither missing, null nor undefined
TRUTH = 10  # pop a value and push the answer that it is
END = 11

_FIRST_TEST = 32
_FIRST_VALUE = 64

# The memory of EACH: the value that was the current one, the array that it is in, what the walk has found and not given
# yet, the element that it gave; then the walk.
_POS = 24
_LIMIT = 32
_PENDING = 40
_ELEMENT = 48
EACH_SIZE = 72
_NOTHING = -2
_AGAIN = -3


@inner
def _merge(answers: int, answer: int, decides: int) -> bool:
    """Take an answer into the one at ``answers``; gives whether it decides."""
    if answer == decides:
        store64(answers, answer)
        return True
    if answer == UNKNOWN:
        store64(answers, UNKNOWN)
    return False


@inner
def _open_each(row: int, memory: int, lookups: int, type_: int, value: int, end: int) -> None:  # noqa: PLR0917
    each = memory + load64(row + WALK)
    walk = each + EACH_SIZE
    store64(each, type_)
    store64(each + 8, value)
    store64(each + 16, end)
    store64(each + _POS, 0)
    store64(each + _LIMIT, 0)
    path = load64(row + PATH)
    if path != 0:
        found = first_value(memory, lookups, path, load64(row + CHAIN), walk, type_, value)
    else:
        found = FOUND
        store64(walk + FOUND_TYPE, type_)
        store64(walk + FOUND_VALUE, value)
        store64(walk + FOUND_END, end)
    store64(each + _PENDING, found)


@inner
def _next_element(row: int, memory: int) -> int:
    """``FOUND`` with the next element in the loop's memory, ``DONE`` or ``BROKEN``."""
    each = memory + load64(row + WALK)
    walk = each + EACH_SIZE
    while True:
        pos, limit = load64(each + _POS), load64(each + _LIMIT)
        if pos < limit:
            nul, end = read_element(pos, limit)
            if end < 0:
                return BROKEN
            store64(each + _POS, end)
            type_ = load8(pos)
            if load64(row + ARGUMENT) == 0 or type_ in (OBJECT, ARRAY):
                store64(each + _ELEMENT, type_)
                store64(each + _ELEMENT + 8, nul + 1)
                store64(each + _ELEMENT + 16, end)
                return FOUND
            continue
        found = load64(each + _PENDING)
        store64(each + _PENDING, _NOTHING)
        if found == _NOTHING:
            found = next_value(load64(row + PATH), walk) if load64(row + PATH) != 0 else DONE
        if found in (DONE, BROKEN):
            return found
        if found != ABSENT and load64(walk + FOUND_TYPE) == ARRAY:
            store64(each + _POS, load64(walk + FOUND_VALUE) + 4)
            store64(each + _LIMIT, load64(walk + FOUND_END) - 1)


@inner
def _answer(row: int, memory: int, lookups: int, type_: int, value: int, end: int) -> int:  # noqa: PLR0917
    """The answer that an operation pushes."""
    operation = load64(row + OPERATION)
    if operation == EACH:
        _open_each(row, memory, lookups, type_, value, end)
        return FAILS
    return load64(row + ARGUMENT) if operation == ANSWER else test_row(row, memory, lookups, type_, value, end)


@inner
def _step(row: int, memory: int, answers: int) -> int:
    """Go on in a loop: ``FOUND`` where there is an element, ``DONE`` at its end. After an element's answer ``_AGAIN``
    or, where it passes, ``DONE``. ``answers`` is the end of the stack whose last answer is the loop's."""
    if load64(row + OPERATION) == EACH_MERGE:
        return DONE if _merge(answers - 8, load64(answers), PASSES) else _AGAIN
    found = _next_element(row, memory)
    if found == BROKEN:
        store64(answers - 8, UNKNOWN)
        return DONE
    return found


@inner
def _jumps(row: int, value: int, memory: int) -> int:
    """Whether a jump is made: 1 or 0, or -1 where the reference has to say."""
    operation = load64(row + OPERATION)
    if operation == JUMP:
        return 1
    if operation == JUMP_NOT_NULL:
        return 0 if is_nullish(value) else 1
    true = truth(value, memory)
    return true if true < 0 else int(true == load64(row + ARGUMENT))


@inner
def _run(  # noqa: PLR0917
    program: int, memory: int, lookups: int, answers: int, values: int, event: int, end: int
) -> int:
    """The program's answer for the event in [event, end)."""
    first = answers
    type_, value = OBJECT, event
    pc = 0
    while True:
        row = program + ROW * pc
        operation = load64(row + OPERATION)
        pc += 1
        if operation >= _FIRST_VALUE:
            values = push_result(row, memory, lookups, values)
            if values < 0:
                return UNKNOWN
        elif operation >= _FIRST_TEST or operation <= EACH:
            store64(answers, _answer(row, memory, lookups, type_, value, end))
            answers += 8
        elif operation == MERGE:
            answers -= 8
            if _merge(answers - 8, load64(answers), load64(row + ARGUMENT)):
                pc = load64(row + TARGET)
        elif operation == NEGATE:
            answer = load64(answers - 8)
            store64(answers - 8, answer if answer == UNKNOWN else 1 - answer)
        elif operation in (EACH_NEXT, EACH_MERGE):
            answers -= 8 if operation == EACH_MERGE else 0
            went = _step(row, memory, answers)
            if went == _AGAIN:
                pc = load64(row + EXTRA)
                continue
            place = memory + load64(row + WALK)
            if went == FOUND:
                place += _ELEMENT
            else:
                pc = load64(row + TARGET)
            type_, value, end = load64(place), load64(place + 8), load64(place + 16)
        elif operation == TRUTH:
            values -= VALUE_SIZE
            answer = truth(values, memory)
            if answer < 0:
                return UNKNOWN
            store64(answers, answer)
            answers += 8
        elif operation in (JUMP, JUMP_IF, JUMP_NOT_NULL):
            jumps = _jumps(row, values - VALUE_SIZE, memory)
            if jumps < 0:
                return UNKNOWN
            if operation == JUMP_IF or (operation == JUMP_NOT_NULL and jumps == 0):
                values -= VALUE_SIZE
            if jumps == 1:
                pc = load64(row + TARGET)
        else:
            return UNKNOWN if operation == STOP else load64(first)


def _make_match(sources: int) -> Callable[[int], None]:
    @entry_point("void(int64)")
    def match(job: int) -> None:
        """Ask a program of events. ``job`` is int64[14]: program, working memory, offset of its look-ups, their number,
        offsets of the two stacks, room for gathered arrays, base, offsets, count; then the target (uint8): ``FAILS``,
        ``PASSES`` or ``UNKNOWN`` for each event, ``FAILS`` for one of no bytes; then a row for each event of what is
        noted of it, or 0, the program's noted fields, and their number."""
        if sources == 0:
            return
        program, memory, lookups, count = load64(job), load64(job + 8), load64(job + 16), load64(job + 24)
        answers, values = memory + load64(job + 32), memory + load64(job + 40)
        base, offsets, target = load64(job + 56), load64(job + 64), load64(job + 80)
        noted, fields, noted_count = load64(job + 88), load64(job + 96), load64(job + 104)
        for i in range(load64(job + 72)):
            start, end = base + load64(offsets + 8 * i), base + load64(offsets + 8 * i + 8)
            answer = FAILS
            if start != end:
                answer = UNKNOWN
                row = noted + NOTED_ROW * i
                is_noted = noted != 0 and load64(row + 8 * TOKEN) != 0
                if is_noted or document_end(start, end) == end:
                    store64(memory + GATHERED, load64(job + 48))
                    reset_lookups(memory, lookups, count, start, end)
                    if is_noted:
                        find_noted(memory, fields, noted_count, start, row)
                    answer = _run(program, memory, lookups, answers, values, start, end)
            store8(target + i, answer)

    return match


match = _make_match(fingerprint(__name__))
