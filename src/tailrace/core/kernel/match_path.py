"""Which values of an event a dotted path stands for, in compiled code. ``expression.match.traverse`` is the reference.

The fields that a program asks for are kept in a tree of *look-ups*, one for each name on a path. A look-up remembers
what it found in the event, and its fields are walked through once however many paths lead through it: a request for a
field continues the walk where it stands, and notes the other fields that are asked for on the way. Where a path
meets an array, a *walk* of its own gives the values inside it one after another, since functions that call themselves
cannot be cached.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import load8, load32, load64, store64
from tailrace.core.kernel.scan import ARRAY, INVALID, OBJECT, equal, find_nul, read_element, value_end

# A path in the pool: how many names, then for each its address, its size, and whether it is a number.
PATH_NAME = 24
_NUMERIC = 16

# A look-up in the working memory. Other look-ups are named by their offset in it; 0 is none.
LOOKUP_SIZE = 72
NAME = 0
NAME_SIZE = 8
CHILD = 16  # the first look-up inside this one's value
NEXT = 24  # the next look-up inside the same value
_STATUS = 32
_TYPE = 40
LOOKUP_VALUE = 48
LOOKUP_END = 56
_SCAN = 64  # how far the walk through the value's fields has come

_UNASKED = 0
_THERE = 1
_ABSENT = 2
_BROKEN = 3

# A walk in the working memory: what it found last, how many arrays are open, then for each the next element, where the
# array ends, the place in the path, and an element that is to be visited again (as what an index names). A walk that
# gathers an array has there where that array begins, and how many elements it has.
FOUND_TYPE = 0
FOUND_VALUE = 8
FOUND_END = 16
DEPTH = 24
LEVELS = 32
LEVEL = 40
LEVEL_LIMIT = 8
LEVEL_INDEX = 16
LEVEL_AGAIN = 24
LEVEL_COUNT = 32

# What a walk gives.
DONE = 0
FOUND = 1
ABSENT = 2  # nothing is there
AS_IT_IS = 3  # found by an index at the end of a path: an array stands for itself alone
ENTERED = 4
BROKEN = INVALID


def walk_size(names: int) -> int:
    """The bytes of a walk along a path of ``names`` names."""
    return LEVELS + LEVEL * names


@inner
def reset_lookups(memory: int, first: int, count: int, document: int, end: int) -> None:
    """Forget what was found; the first look-up is the event itself."""
    for i in range(count):
        store64(memory + first + LOOKUP_SIZE * i + _STATUS, _UNASKED)
    found_lookup(memory + first, OBJECT, document, end)


@inner
def found_lookup(lookup: int, type_: int, value: int, end: int) -> None:
    """Note that the path leads to a value of ``type_``, from ``value`` to ``end``."""
    store64(lookup + _STATUS, _THERE)
    store64(lookup + _TYPE, type_)
    store64(lookup + LOOKUP_VALUE, value)
    store64(lookup + LOOKUP_END, end)
    store64(lookup + _SCAN, value + 4)


@inner
def _note(memory: int, parent: int, name: int, size: int, type_: int, value: int, end: int) -> int:  # noqa: PLR0917
    """Note a field if it is asked for. Returns its look-up, or 0 if it is not asked for (or the name occurred
    before)."""
    child = load64(parent + CHILD)
    while child != 0:
        lookup = memory + child
        if load64(lookup + NAME_SIZE) == size and equal(name, load64(lookup + NAME), size):
            if load64(lookup + _STATUS) != _UNASKED:
                return 0
            found_lookup(lookup, type_, value, end)
            return lookup
        child = load64(lookup + NEXT)
    return 0


@inner
def _seek(memory: int, parent: int, wanted: int) -> None:
    """Go on through the fields of a document up to the wanted one."""
    pos, limit = load64(parent + _SCAN), load64(parent + LOOKUP_END) - 1
    status = _ABSENT
    while pos < limit:
        type_ = load8(pos)
        nul, end = read_element(pos, limit)
        if end < 0:
            status = _BROKEN
            break
        lookup = _note(memory, parent, pos + 1, nul - pos - 1, type_, nul + 1, end)
        pos = end
        if lookup == wanted:
            status = _THERE
            break
    store64(parent + _SCAN, pos)
    if status != _THERE:
        store64(wanted + _STATUS, status)


@inner
def _is_last(path: int, index: int) -> bool:
    """Whether an array at this place of a path ends it: nothing follows, or one name without characters."""
    names = load64(path)
    if index == names - 1:
        return True
    return index == names - 2 and load64(path + 8 + PATH_NAME * (index + 1) + 8) == 0


@inner
def _found(walk: int, type_: int, value: int, end: int) -> int:
    store64(walk + FOUND_TYPE, type_)
    store64(walk + FOUND_VALUE, value)
    store64(walk + FOUND_END, end)
    return FOUND


@inner
def _enter(walk: int, value: int, end: int, index: int) -> int:
    depth = load64(walk + DEPTH)
    level = walk + LEVELS + LEVEL * depth
    store64(level, value + 4)
    store64(level + LEVEL_LIMIT, end - 1)
    store64(level + LEVEL_INDEX, index)
    store64(level + LEVEL_AGAIN, 0)
    store64(level + LEVEL_COUNT, 0)
    store64(walk + DEPTH, depth + 1)
    return ENTERED


@inner
def find_field(name: int, size: int, pos: int, limit: int) -> int:
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
def descend(path: int, document: int, index: int, walk: int) -> int:
    """What a path's names from ``index`` on lead to in a document: ``FOUND``, ``ABSENT``, ``BROKEN``, or ``ENTERED``
    where an array in the middle is opened."""
    pos, limit = document + 4, document + load32(document) - 1
    while True:
        entry = path + 8 + PATH_NAME * index
        size = load64(entry + 8)
        element = find_field(load64(entry), size, pos, limit)
        if element <= 0:
            return ABSENT if element == 0 else BROKEN
        type_, value = load8(element), element + size + 2
        end = value_end(type_, value, limit)
        if end < 0:
            return BROKEN
        if index == load64(path) - 1 or (type_ == ARRAY and _is_last(path, index)):
            return _found(walk, type_, value, end)
        if type_ == ARRAY:
            return _enter(walk, value, end, index + 1)
        if type_ != OBJECT:
            return ABSENT
        pos, limit = value + 4, end - 1
        index += 1


@inner
def lookup_path(memory: int, root: int, path: int, chain: int, walk: int) -> int:
    """The same from the event itself, by its look-ups; ``chain`` has one for each name."""
    parent = memory + root
    names = load64(path)
    for index in range(names):
        lookup = memory + load64(chain + 8 * index)
        if load64(lookup + _STATUS) == _UNASKED:
            _seek(memory, parent, lookup)
        status = load64(lookup + _STATUS)
        if status != _THERE:
            return ABSENT if status == _ABSENT else BROKEN
        if index == 0 and load64(lookup + NAME_SIZE) == 0:
            return BROKEN  # the server takes such a field out, but only where a query names it and is no schema
        type_ = load64(lookup + _TYPE)
        if index == names - 1 or (type_ == ARRAY and _is_last(path, index)):
            return _found(walk, type_, load64(lookup + LOOKUP_VALUE), load64(lookup + LOOKUP_END))
        if type_ == ARRAY:
            return _enter(walk, load64(lookup + LOOKUP_VALUE), load64(lookup + LOOKUP_END), index + 1)
        if type_ != OBJECT:
            return ABSENT
        parent = lookup
    return BROKEN


@inner
def first_value(memory: int, root: int, path: int, chain: int, walk: int, type_: int, document: int) -> int:  # noqa: PLR0917
    """Begin a walk: from the event where the path has look-ups, else from a document (or array) in it."""
    store64(walk + DEPTH, 0)
    if chain != 0:
        result = lookup_path(memory, root, path, chain, walk)
    elif type_ in (OBJECT, ARRAY):
        result = descend(path, document, 0, walk)
    else:
        result = ABSENT
    return next_value(path, walk) if result == ENTERED else result


@inner
def _look_into(path: int, walk: int, level: int) -> int:
    """The next element of the innermost open array: ``ENTERED`` where it has nothing on its own."""
    pos, limit, index = load64(level), load64(level + LEVEL_LIMIT), load64(level + LEVEL_INDEX)
    type_ = load8(pos)
    nul, end = read_element(pos, limit)
    if end < 0:
        return BROKEN
    store64(level, end)
    entry = path + 8 + PATH_NAME * index
    size = load64(entry + 8)
    hit = load64(entry + _NUMERIC) != 0 and nul - pos - 1 == size and equal(pos + 1, load64(entry), size)
    if type_ == OBJECT:
        store64(level + LEVEL_AGAIN, nul + 1 if hit else 0)
        return descend(path, nul + 1, index, walk)
    if hit and index == load64(path) - 1:
        _found(walk, type_, nul + 1, end)
        return AS_IT_IS
    return _enter(walk, nul + 1, end, index + 1) if hit and type_ == ARRAY else ENTERED


@inner
def next_value(path: int, walk: int) -> int:
    """``FOUND`` (``FOUND_TYPE`` and the others say what), ``AS_IT_IS``, ``ABSENT``, ``BROKEN``, or ``DONE``."""
    while True:
        depth = load64(walk + DEPTH)
        if depth == 0:
            return DONE
        level = walk + LEVELS + LEVEL * (depth - 1)
        again, index = load64(level + LEVEL_AGAIN), load64(level + LEVEL_INDEX)
        if again != 0:
            store64(level + LEVEL_AGAIN, 0)
            if index == load64(path) - 1:
                return _found(walk, OBJECT, again, again + load32(again))
            result = descend(path, again, index + 1, walk)
        elif load64(level) >= load64(level + LEVEL_LIMIT):
            store64(walk + DEPTH, depth - 1)
            result = ENTERED
        else:
            result = _look_into(path, walk, level)
        if result != ENTERED:
            return result
