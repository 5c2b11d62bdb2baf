"""The user's ``$project``, ``$set``, ``$unset`` and ``$replaceWith`` on many events at once, in compiled code.

``tailrace.core.expression.stages`` is the reference. If this module cannot give an event to the last byte (invalid
bytes, nesting near the server's limit, a result that is no document), it is ``UNKNOWN``, and the plain stages process
it.

A *node* is one level of a projection: a table of names, those first that are set or descended into, in the order of the
specification. An *expression* is a row of instructions that write a value: constants, paths, and documents and arrays
of these. Both lie in a pool that the Python side keeps alive; ``project_program`` writes it. No function here calls
itself, since numba cannot cache those that do: nested values have frames in the state.

Functions write at an address and give the address after it, or ``UNKNOWN`` or ``NO_ROOM``, which are negative. The
function that writes a value leaves its type in the state; ``MISSING`` where there is none and nothing was written. A
removed field may keep its place inside a pipeline (``GONE``, as in ``tailrace.core.expression.values.value``).
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import copy, load8, load64, store8, store32, store64
from tailrace.core.kernel.scan import ARRAY, INVALID, NULL, OBJECT, equal, find_nul, value_end

UNKNOWN = -1
NO_ROOM = -2

MISSING = 0
GONE = 0x16

# A state's slots, as byte offsets.
OUT_END = 0
ROOT = 8  # the document that expressions read: the event before this stage
ROOT_END = 16
TYPE = 24  # of the value written last
_CHILD = 32  # the node to go on with, 0 for none; and the value that it gets
CHILD_TYPE = 40
CHILD_START = 48
CHILD_END = 56
_TOP = 64  # the frame of a path that has another document to look into
EXTERNALS = 72  # of this event: the values that the plain code has computed, each (type, address, size)
FRAMES = 80  # of documents and arrays that are being written
FRAME_SIZE = 72
#: What nests deeper is left to the plain stages. A projection, a literal inside it and a path inside that need frames.
DEPTH_MAX = 95
STATE_SLOTS = (FRAMES + FRAME_SIZE * 300) // 8

# A frame's slots.
_POS = 0  # what comes next of the document or the array that is read
_LIMIT = 8
_DOCUMENT = 16  # where the result begins
_KIND = 24  # OBJECT or ARRAY
_COUNT = 32  # elements of the array that are written
_ELEMENT = 40  # the element whose value is being written
_NODE = 48
_DONE = 56  # a bit for each name of the node that has its field
_REST = 64  # of the names without a field: the next to look at
# Of a frame of ``_follow``: the names below the array, instead of a node.
_NAMES_LEFT = 48
_NAMES = 56

# A node's slots.
KEEPS = 0  # 1 for an inclusion: what is not named goes
PLACES = 8  # 1 where a field that goes keeps its place, 2 where an element of an array does so too
COMPUTES = 16  # 1 where something is set at this level or below
SET = 24  # how many of the names, the first ones, are set or descended into
NAMES = 32  # how many names there are
TABLE = 40
EMPTY = 48  # the address of an empty document
NODE_SLOTS = 7

# A name's slots.
NAME = 0
NAME_SIZE = 8
WHAT = 16
TARGET = 24  # the child node, or the expression
ENTRY_SIZE = 32

# What a name is.
OTHER = 0  # not named
NAMED = 1  # kept by an inclusion, dropped by an exclusion
CHILD = 2
EXPRESSION = 3

# An instruction's slots.
CODE = 0
FIRST = 8
SECOND = 16
THIRD = 24
INSTRUCTION_SIZE = 32

# Instructions.
END = 0
CONSTANT = 1  # a value: type (MISSING for none), address and size of the data
PATH = 2  # a value: how many names, and the address of a table of (address, size)
OPEN = 3  # a document or an array begins
PART = 4  # an element of it begins: address and size of its name
SETTLE = 5  # its value is written; whether it keeps its place without one, whether it becomes null
CLOSE = 6  # the document or the array ends: its type
EXTERNAL = 7  # a value that the plain code has computed: its number
EXTERNAL_SIZE = 24
PATH_ENTRY = 16

_GONE_BYTES = 0x1616161616161616
_ONES = 0x0101010101010101
_HIGH_BITS = -0x7F7F7F7F7F7F7F80


@inner
def element_end(type_: int, start: int, limit: int) -> int:
    """As ``value_end``, for fields that keep their place too."""
    return start if type_ == GONE else value_end(type_, start, limit)


@inner
def find_element(name: int, size: int, pos: int, limit: int) -> int:
    """The address of the first element of that name in [pos, limit); 0 where there is none, -1 for bytes that do not
    hold."""
    while pos < limit:
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return INVALID
        if nul - pos - 1 == size and equal(pos + 1, name, size):
            return pos
        pos = element_end(load8(pos), nul + 1, limit)
        if pos < 0:
            return INVALID
    return 0


@inner
def holds_gone(start: int, end: int) -> bool:
    """Whether any byte in [start, end) is the mark of a removed field."""
    pos = start
    while pos + 8 <= end:
        word = load64(pos) ^ _GONE_BYTES
        if (word - _ONES) & ~word & _HIGH_BITS != 0:
            return True
        pos += 8
    while pos < end:
        if load8(pos) == GONE:
            return True
        pos += 1
    return False


@inner
def put_run(state: int, out: int, start: int, end: int) -> int:
    """The bytes in [start, end)."""
    if end - start > load64(state + OUT_END) - out:
        return NO_ROOM
    copy(out, start, end - start)
    return out + end - start


@inner
def put_name(state: int, out: int, type_: int, name: int, size: int) -> int:
    """An element up to its value."""
    if size + 2 > load64(state + OUT_END) - out:
        return NO_ROOM
    store8(out, type_)
    copy(out + 1, name, size)
    store8(out + 1 + size, 0)
    return out + 2 + size


@inner
def put_index(state: int, out: int, index: int) -> int:
    """An element of an array up to its value; its type is still to be written."""
    size, rest = 1, index // 10
    while rest > 0:
        size, rest = size + 1, rest // 10
    if size + 2 > load64(state + OUT_END) - out:
        return NO_ROOM
    pos = out + size
    rest = index
    while pos > out:
        store8(pos, 0x30 + rest % 10)
        rest //= 10
        pos -= 1
    store8(out + 1 + size, 0)
    return out + 2 + size


@inner
def open_document(state: int, out: int) -> int:
    """Leave room for a document's length; gives where its elements begin, or ``NO_ROOM``."""
    return NO_ROOM if load64(state + OUT_END) - out < 8 else out + 4


@inner
def close_document(state: int, document: int, out: int, type_: int) -> int:
    """The length and the final NUL of what was written since ``document``, which becomes the value of ``type_``."""
    if out >= load64(state + OUT_END):
        return NO_ROOM
    store8(out, 0)
    store32(document, out + 1 - document)
    store64(state + TYPE, type_)
    return out + 1


@inner
def _settled(state: int, element: int, out: int, keeps_place: bool) -> int:
    """An element whose value was just written, from its type on; without a value it goes, or only its place stays."""
    if out < 0:
        return out
    type_ = load64(state + TYPE)
    if type_ != MISSING:
        store8(element, type_)
        return out
    if not keeps_place:
        return element
    store8(element, GONE)
    return out


# ── expressions ──────────────────────────────────────────────────────────────────────────────────────────────────────


@inner
def _put_found(state: int, out: int, type_: int, start: int, end: int) -> int:
    """A value that a path has found. The reference refuses an array out of which an earlier stage took elements."""
    if type_ == ARRAY and holds_gone(start, end):
        pos = start + 4
        while pos < end - 1:
            nul = find_nul(pos + 1, end - 1)
            if nul < 0 or load8(pos) == GONE:
                return UNKNOWN
            pos = value_end(load8(pos), nul + 1, end - 1)
            if pos < 0:
                return UNKNOWN
    store64(state + TYPE, type_)
    return put_run(state, out, start, end)


@inner
def _next_item(frame: int, state: int, out: int) -> int:
    """The head of the next element of a path's array, for the next document in the array that is read. ``_ELEMENT`` is
    0 where there is none."""
    pos, limit = load64(frame + _POS), load64(frame + _LIMIT)
    store64(frame + _ELEMENT, 0)
    while pos < limit:
        type_ = load8(pos)
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return UNKNOWN
        pos = element_end(type_, nul + 1, limit)
        if pos < 0:
            return UNKNOWN
        if type_ == OBJECT:
            store64(frame + _POS, pos)
            store64(frame + _ELEMENT, out)
            store64(state + CHILD_START, nul + 1)
            store64(state + CHILD_END, pos)
            return put_index(state, out, load64(frame + _COUNT))
    return out


@inner
def _finish_items(frame: int, base: int, state: int, out: int) -> int:
    """A value of a path is written, and with it perhaps arrays around it. The frame that has another document to look
    into goes to ``_TOP``; it is before ``base`` where there is none."""
    while frame >= base and out >= 0:
        element = load64(frame + _ELEMENT)
        if element != 0:
            out = _settled(state, element, out, False)
            if out > element:
                store64(frame + _COUNT, load64(frame + _COUNT) + 1)
        out = _next_item(frame, state, out)
        if out < 0 or load64(frame + _ELEMENT) != 0:
            break
        out = close_document(state, load64(frame + _DOCUMENT), out, ARRAY)
        frame -= FRAME_SIZE
    store64(state + _TOP, frame)
    return out


@inner
def follow_documents(names: int, left: int, state: int, start: int, end: int) -> int:
    """Go down from a document along names while documents come. Gives how many names are left, and leaves the value in
    the state's ``_CHILD_`` slots: of the type ``MISSING`` where there is none."""
    type_ = OBJECT
    while left > 0 and type_ == OBJECT:
        size = load64(names + 8)
        element = find_element(load64(names), size, start + 4, end - 1)
        if element < 0:
            return UNKNOWN
        type_ = MISSING if element == 0 or load8(element) == GONE else load8(element)
        if type_ == MISSING:
            break
        start, limit = element + size + 2, end - 1
        end = value_end(type_, start, limit)
        if end < 0:
            return UNKNOWN
        left -= 1
        names += PATH_ENTRY
    store64(state + CHILD_TYPE, MISSING if left > 0 and type_ != ARRAY else type_)
    store64(state + CHILD_START, start)
    store64(state + CHILD_END, end)
    return left


@inner
def _follow(names: int, count: int, state: int, out: int, base: int) -> int:
    """The value at the names below the root. An array gives the array of what its documents hold there."""
    frame = base - FRAME_SIZE
    left, path = count, names
    store64(state + CHILD_START, load64(state + ROOT))
    store64(state + CHILD_END, load64(state + ROOT_END))
    while True:
        left = follow_documents(path, left, state, load64(state + CHILD_START), load64(state + CHILD_END))
        type_, start, end = load64(state + CHILD_TYPE), load64(state + CHILD_START), load64(state + CHILD_END)
        if left < 0 or frame - base > FRAME_SIZE * DEPTH_MAX:
            return UNKNOWN
        if left > 0 and type_ == ARRAY:
            frame += FRAME_SIZE
            store64(frame + _POS, start + 4)
            store64(frame + _LIMIT, end - 1)
            store64(frame + _DOCUMENT, out)
            store64(frame + _COUNT, 0)
            store64(frame + _ELEMENT, 0)
            store64(frame + _NAMES_LEFT, left)
            store64(frame + _NAMES, names + PATH_ENTRY * (count - left))
            out = open_document(state, out)
        elif type_ == MISSING:
            store64(state + TYPE, MISSING)
        else:
            out = _put_found(state, out, type_, start, end)
        out = _finish_items(frame, base, state, out)
        frame = load64(state + _TOP)
        if out < 0 or frame < base:
            return out
        left, path = load64(frame + _NAMES_LEFT), load64(frame + _NAMES)


@inner
def put_expression(expression: int, state: int, out: int, base: int) -> int:
    """The value of an expression; ``base`` is free memory for its frames."""
    row, stack = expression, base
    while out >= 0 and load64(row + CODE) != END:
        code, first, second = load64(row + CODE), load64(row + FIRST), load64(row + SECOND)
        if code == CONSTANT:
            store64(state + TYPE, first)
            out = put_run(state, out, second, second + load64(row + THIRD))
        elif code == PATH:
            out = _follow(second, first, state, out, stack)
        elif code == EXTERNAL:
            value = load64(state + EXTERNALS) + EXTERNAL_SIZE * first
            store64(state + TYPE, load64(value))
            out = put_run(state, out, load64(value + 8), load64(value + 8) + load64(value + 16))
        elif code == OPEN:
            store64(stack, out)
            stack += 8
            out = open_document(state, out)
        elif code == PART:
            store64(stack, out)
            stack += 8
            out = put_name(state, out, MISSING, first, second)
        elif code == SETTLE:
            stack -= 8
            if second != 0 and load64(state + TYPE) == MISSING:
                store64(state + TYPE, NULL)
            out = _settled(state, load64(stack), out, first != 0)
        else:
            stack -= 8
            out = close_document(state, load64(stack), out, first)
        row += INSTRUCTION_SIZE
    return out


# ── projections ──────────────────────────────────────────────────────────────────────────────────────────────────────


@inner
def _entry(node: int, name: int, size: int) -> int:
    """The number of a name in the node's table, or -1."""
    entry = load64(node + TABLE)
    for i in range(load64(node + NAMES)):
        if load64(entry + NAME_SIZE) == size and equal(load64(entry + NAME), name, size):
            return i
        entry += ENTRY_SIZE
    return -1


@inner
def _settle_in(frame: int, state: int, out: int) -> int:
    """The value of the element that a frame is at is written."""
    element = load64(frame + _ELEMENT)
    of_fields_alone = 1 if load64(frame + _KIND) == ARRAY else 0
    out = _settled(state, element, out, load64(load64(frame + _NODE) + PLACES) > of_fields_alone)
    if out > element:
        store64(frame + _COUNT, load64(frame + _COUNT) + 1)
    return out


@inner
def _descend(frame: int, node: int, state: int, out: int, type_: int, start: int, end: int) -> int:  # noqa: PLR0917
    """The value of an element: what a node makes of the old one. A document or an array is left to the next frame."""
    if type_ in (OBJECT, ARRAY):
        store64(state + _CHILD, node)
    elif load64(node + COMPUTES) != 0:
        store64(state + _CHILD, node)
        type_, start = OBJECT, load64(node + EMPTY)
        end = start + 5
    else:
        keeps = type_ == MISSING or load64(node + KEEPS) != 0
        store64(state + TYPE, MISSING if keeps else type_)
        return _settle_in(frame, state, out if keeps else put_run(state, out, start, end))
    store64(state + CHILD_TYPE, type_)
    store64(state + CHILD_START, start)
    store64(state + CHILD_END, end)
    return out


@inner
def _put_set(frame: int, place: int, state: int, out: int, type_: int, start: int, end: int) -> int:  # noqa: PLR0917
    """The element of a name that is set or descended into; its old value is given, ``MISSING`` for none."""
    entry = load64(load64(frame + _NODE) + TABLE) + ENTRY_SIZE * place
    store64(frame + _DONE, load64(frame + _DONE) | 1 << place)
    store64(frame + _ELEMENT, out)
    out = put_name(state, out, MISSING, load64(entry + NAME), load64(entry + NAME_SIZE))
    if out < 0:
        return out
    if load64(entry + WHAT) == EXPRESSION:
        return _settle_in(frame, state, put_expression(load64(entry + TARGET), state, out, frame + FRAME_SIZE))
    return _descend(frame, load64(entry + TARGET), state, out, type_, start, end)


@inner
def _is_set_here(frame: int, place: int, type_: int) -> bool:
    """Whether a field whose name is set or descended into is worked on where it stands: where something is computed,
    of equal names only the first; where not, every field that has a value."""
    entry = load64(load64(frame + _NODE) + TABLE) + ENTRY_SIZE * place
    if load64(entry + WHAT) == EXPRESSION or load64(load64(entry + TARGET) + COMPUTES) != 0:
        return load64(frame + _DONE) >> place & 1 == 0
    return type_ != GONE


@inner
def _is_set_anew(node: int, place: int) -> bool:
    """Whether an inclusion sets this name at the end of the document, whatever the old field."""
    entry = load64(node + TABLE) + ENTRY_SIZE * place
    return load64(node + KEEPS) != 0 and load64(entry + WHAT) == EXPRESSION


@inner
def _put_kept(node: int, is_named: bool, state: int, out: int, element: int, value: int, end: int) -> int:  # noqa: PLR0917
    """A field that is neither set nor descended into: as it stands, or its place, or nothing."""
    keeps, places = load64(node + KEEPS) != 0, load64(node + PLACES) != 0
    if is_named == keeps:
        return put_run(state, out, element, end) if load8(element) != GONE or (places and not keeps) else out
    if keeps or not places:
        return out
    return put_name(state, out, GONE, element + 1, value - element - 2)


@inner
def _put_fields(frame: int, state: int, out: int) -> int:
    """The fields of a document, up to its end or to one that needs a frame of its own."""
    node, limit, pos = load64(frame + _NODE), load64(frame + _LIMIT), load64(frame + _POS)
    set_ = load64(node + SET)
    while pos < limit and out >= 0:
        element, type_ = pos, load8(pos)
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return UNKNOWN
        pos = element_end(type_, nul + 1, limit)
        if pos < 0:
            return UNKNOWN
        place = _entry(node, element + 1, nul - element - 1)
        if place < 0 or place >= set_:
            out = _put_kept(node, place >= set_, state, out, element, nul + 1, pos)
        elif load64(node + KEEPS) != 0 and (type_ == GONE or _is_set_anew(node, place)):
            continue
        elif _is_set_here(frame, place, type_):
            store64(frame + _POS, pos)
            out = _put_set(frame, place, state, out, MISSING if type_ == GONE else type_, nul + 1, pos)
            if load64(state + _CHILD) != 0:
                return out
        elif type_ != GONE or load64(node + PLACES) != 0:
            out = put_run(state, out, element, pos)
    store64(frame + _POS, pos)
    if out < 0 or pos != limit:
        return min(out, UNKNOWN)
    return out if load64(node + COMPUTES) == 0 else _put_rest(frame, state, out)


@inner
def _put_rest(frame: int, state: int, out: int) -> int:
    """What is set and had no field yet."""
    for place in range(load64(frame + _REST), load64(load64(frame + _NODE) + SET)):
        if out < 0:
            return out
        if load64(frame + _DONE) >> place & 1 == 0:
            out = _put_set(frame, place, state, out, MISSING, 0, 0)
            if load64(state + _CHILD) != 0:
                store64(frame + _REST, place + 1)
                return out
    store64(frame + _REST, load64(load64(frame + _NODE) + SET))
    return out


@inner
def _put_items(frame: int, state: int, out: int) -> int:
    """The elements of an array, up to its end or to one that needs a frame of its own."""
    limit, pos = load64(frame + _LIMIT), load64(frame + _POS)
    while pos < limit and out >= 0:
        type_ = load8(pos)
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return UNKNOWN
        pos = element_end(type_, nul + 1, limit)
        if pos < 0:
            return UNKNOWN
        store64(frame + _POS, pos)
        store64(frame + _ELEMENT, out)
        out = put_index(state, out, load64(frame + _COUNT))
        if out >= 0:
            old = MISSING if type_ == GONE else type_
            out = _descend(frame, load64(frame + _NODE), state, out, old, nul + 1, pos)
            if load64(state + _CHILD) != 0:
                return out
    return out if pos == limit or out < 0 else UNKNOWN


@inner
def _enter(frame: int, node: int, state: int, out: int, type_: int, start: int, end: int) -> int:  # noqa: PLR0917
    store64(frame + _NODE, node)
    store64(frame + _KIND, type_)
    store64(frame + _POS, start + 4)
    store64(frame + _LIMIT, end - 1)
    store64(frame + _DOCUMENT, out)
    store64(frame + _COUNT, 0)
    store64(frame + _DONE, 0)
    store64(frame + _REST, 0)
    return open_document(state, out)


@inner
def put_projected(node: int, state: int, out: int, start: int, end: int) -> int:
    """What a projection makes of a document."""
    base = state + FRAMES
    frame = base
    out = _enter(frame, node, state, out, OBJECT, start, end)
    while out >= 0:
        store64(state + _CHILD, 0)
        kind = load64(frame + _KIND)
        out = _put_fields(frame, state, out) if kind == OBJECT else _put_items(frame, state, out)
        if out < 0:
            return out
        child = load64(state + _CHILD)
        if child != 0:
            frame += FRAME_SIZE
            # The frames of expressions are after those of the projection.
            if frame - base > FRAME_SIZE * DEPTH_MAX:
                return UNKNOWN
            type_, start = load64(state + CHILD_TYPE), load64(state + CHILD_START)
            out = _enter(frame, child, state, out, type_, start, load64(state + CHILD_END))
            continue
        out = close_document(state, load64(frame + _DOCUMENT), out, kind)
        if frame == base:
            return out
        frame -= FRAME_SIZE
        out = _settle_in(frame, state, out)
    return out
