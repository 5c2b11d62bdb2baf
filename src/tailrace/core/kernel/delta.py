"""Update descriptions from the oplog's ``o``, in compiled code (semantics 3). ``tailrace.core.stage`` holds the
reference.

A *delta* is a block of int64 slots: the output (``updatedFields`` goes straight into the event) and four areas of
scratch memory: the path of the nested diff that is being read, the names for ``removedFields``, the documents for
``truncatedArrays`` and the arrays for ``disambiguatedPaths``. ``FALL_BACK`` leaves the entry to the plain stages,
``NO_ROOM`` asks for a larger event buffer.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.fragments import (
    DISAMBIGUATED_PATHS,
    FIELD,
    NEW_SIZE,
    REMOVED_FIELDS,
    TRUNCATED_ARRAYS,
    UPDATED_FIELDS,
)
from tailrace.core.kernel.memory import copy, load8, load32, load64, store8, store32, store64
from tailrace.core.kernel.scan import ARRAY, BOOL, INT32, OBJECT, STRING, read_element

FALL_BACK = -1
NO_ROOM = -2

# Slots of a delta, as byte offsets.
TEXT = 0
OUT = 8
OUT_END = 16
_REMOVED = 24
_REMOVED_COUNT = 32
_TRUNCATED = 40
_TRUNCATED_COUNT = 48
AREAS = 56  # start of the scratch areas
_TOO_LONG = 64  # what is longer than an event may be is left to the plain stages, however much room there is
DISAMBIGUATES = 72  # whether there is a ``disambiguatedPaths``
_PATHS = 80
_FIELDS_LEFT = 88
DELTA_SIZE = 96
_DESCRIPTION_MAX = 16_793_600
#: The server's document of the updated fields is limited to 64 MB in the making (``event.update_description``). With at
#: most this many fields in at most 16 MB it is well below that; if there are more, the plain stages count.
_FIELDS_MAX = 500_000

#: Each of the four areas of scratch memory; what does not fit is left to the plain stages.
_AREA = 1 << 16
_DEPTH_MAX = 200
_FRAME = 40
_STACK = 4 * _AREA
AREAS_SIZE = _STACK + _FRAME * _DEPTH_MAX

# Slots of a frame of the stack: where the enclosing diff goes on.
_POS = 0
_LIMIT = 8
_PREFIX = 16
_RANK = 24
_AMBIGUOUS = 32

_ARRAY_DIFF = -2  # in place of a rank: the frame reads an array's diff
_NO_SECTION = -1
_SUB_DIFF = 3
_LETTER_S = 0x73


@inner
def put_decimal(target: int, number: int) -> int:
    """The decimal digits of a number that is not negative, and NUL; gives the address after them."""
    size = 1
    rest = number // 10
    while rest > 0:
        size += 1
        rest //= 10
    rest = number
    for i in range(size - 1, -1, -1):
        store8(target + i, 0x30 + rest % 10)
        rest //= 10
    store8(target + size, 0)
    return target + size + 1


@inner
def _updated(delta: int, prefix: int, type_: int, name: int, end: int) -> int:
    """One field of ``updatedFields``: its name begins at ``name``, and name, NUL and value end at ``end``."""
    out = load64(delta + OUT)
    left = load64(delta + _FIELDS_LEFT)
    store64(delta + _FIELDS_LEFT, left - 1)
    if left == 0 or 1 + prefix + end - name > load64(delta + _TOO_LONG) - out:
        return FALL_BACK
    if 1 + prefix + end - name > load64(delta + OUT_END) - out:
        return NO_ROOM
    store8(out, type_)
    copy(out + 1, load64(delta + AREAS), prefix)
    copy(out + 1 + prefix, name, end - name)
    store64(delta + OUT, out + 1 + prefix + end - name)
    return 0


@inner
def _removed(delta: int, prefix: int, name: int, size: int) -> int:
    """One name of ``removedFields``."""
    out = load64(delta + _REMOVED)
    count = load64(delta + _REMOVED_COUNT)
    if out + prefix + size + 32 > load64(delta + AREAS) + 2 * _AREA:
        return FALL_BACK
    store8(out, STRING)
    out = put_decimal(out + 1, count)
    store32(out, prefix + size + 1)
    copy(out + 4, load64(delta + AREAS), prefix)
    copy(out + 4 + prefix, name, size)
    store8(out + 4 + prefix + size, 0)
    store64(delta + _REMOVED, out + 5 + prefix + size)
    store64(delta + _REMOVED_COUNT, count + 1)
    return 0


@inner
def _truncated(delta: int, prefix: int, value: int) -> int:
    """One document of ``truncatedArrays``. The prefix ends with the dot that would lead to an element."""
    out = load64(delta + _TRUNCATED)
    count = load64(delta + _TRUNCATED_COUNT)
    if prefix == 0 or out + prefix + 64 > load64(delta + AREAS) + 3 * _AREA:
        return FALL_BACK
    text = load64(delta + TEXT)
    store8(out, OBJECT)
    out = put_decimal(out + 1, count)
    size = 4 + FIELD[1] + 4 + prefix + NEW_SIZE[1] + 4 + 1
    store32(out, size)
    out += 4
    copy(out, text + FIELD[0], FIELD[1])
    out += FIELD[1]
    store32(out, prefix)
    copy(out + 4, load64(delta + AREAS), prefix - 1)
    store8(out + 3 + prefix, 0)
    out += 4 + prefix
    copy(out, text + NEW_SIZE[0], NEW_SIZE[1])
    out += NEW_SIZE[1]
    store32(out, load32(value))
    store8(out + 4, 0)
    store64(delta + _TRUNCATED, out + 5)
    store64(delta + _TRUNCATED_COUNT, count + 1)
    return 0


@inner
def _is_ambiguous(name: int, end: int, depth: int) -> bool:
    """Whether a field's name contains a dot or, below the first level, looks like an array index (semantics 3.3)."""
    digits = depth > 0 and end > name and (end - name == 1 or load8(name) != 0x30)
    for i in range(name, end):
        byte = load8(i)
        if byte == 0x2E:
            return True
        digits = digits and 0x30 <= byte <= 0x39
    return digits


@inner
def _put_component(out: int, number: int, name: int, size: int, is_index: bool) -> int:
    """One component of a path as element ``number`` of an array: a string, or an int32 for an array index."""
    store8(out, INT32 if is_index else STRING)
    out = put_decimal(out + 1, number)
    if is_index:
        index = 0
        for i in range(name, name + size):
            index = 10 * index + load8(i) - 0x30
        store32(out, index)
        return out + 4
    store32(out, size + 1)
    copy(out + 4, name, size)
    store8(out + 4 + size, 0)
    return out + 5 + size


@inner
def _note(delta: int, depth: int, prefix: int, name: int, end: int, last: int) -> int:  # noqa: PLR0917
    """One path of ``disambiguatedPaths``: the names of the frames, then that in [name, end). ``last`` says whether that
    is an array index (1), a field (0) or not there (-1; the prefix then ends with a dot too many).

    The prefixes of the frames say where each frame's name lies in the path.
    """
    path = load64(delta + AREAS)
    out = load64(delta + _PATHS)
    size = prefix - 1 if last < 0 else prefix + end - name
    if out + 2 * size + 16 * (depth + 2) > path + 4 * _AREA:
        return FALL_BACK
    store8(out, ARRAY)
    copy(out + 1, path, size if last < 0 else prefix)
    if last >= 0:
        copy(out + 1 + prefix, name, end - name)
    store8(out + 1 + size, 0)
    array = out + 2 + size
    out = array + 4
    for level in range(depth):
        frame = path + _STACK + _FRAME * level
        start = load64(frame + _PREFIX)
        behind = load64(frame + _FRAME + _PREFIX) if level + 1 < depth else prefix
        out = _put_component(out, level, path + start, behind - 1 - start, load64(frame + _RANK) == _ARRAY_DIFF)
    if last >= 0:
        out = _put_component(out, depth, name, end - name, last == 1)
    store8(out, 0)
    store32(array, out + 1 - array)
    store64(delta + _PATHS, out + 1)
    return 0


@inner
def _fields(  # noqa: PLR0917
    delta: int, depth: int, prefix: int, document: int, end: int, removed: bool, ambiguous: bool
) -> int:
    """All fields of a section: into ``updatedFields``, or their names into ``removedFields``."""
    notes = load64(delta + DISAMBIGUATES) != 0
    limit = end - 1
    pos = document + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return FALL_BACK
        if removed:
            status = _removed(delta, prefix, pos + 1, nul - pos - 1)
        else:
            status = _updated(delta, prefix, load8(pos), pos + 1, after)
        if status == 0 and notes and (ambiguous or _is_ambiguous(pos + 1, nul, depth)):
            status = _note(delta, depth, prefix, pos + 1, nul, 0)
        if status < 0:
            return status
        pos = after
    return 0


@inner
def _digits(name: int, end: int) -> bool:
    """Whether a name is an array index as the server writes it: digits, no leading zero."""
    if end == name or end - name > 9 or (load8(name) == 0x30 and end - name > 1):
        return False
    for i in range(name, end):  # noqa: SIM110
        if load8(i) < 0x30 or load8(i) > 0x39:
            return False
    return True


@inner
def _array_part(  # noqa: PLR0917
    delta: int, depth: int, prefix: int, pos: int, nul: int, after: int, is_first: bool, ambiguous: bool
) -> int:
    """A part of an array diff: 1 when it is a nested diff that is to be entered, else 0 or a negative status."""
    type_ = load8(pos)
    kind = load8(pos + 1)
    if kind == 0x6C and nul == pos + 2:  # "l"
        if not is_first or type_ != INT32:
            return FALL_BACK
        status = _truncated(delta, prefix, nul + 1)
        return _note(delta, depth, prefix, 0, 0, -1) if status == 0 and ambiguous else status
    if not _digits(pos + 2, nul):
        return FALL_BACK
    if kind == 0x75:  # "u"
        status = _updated(delta, prefix, type_, pos + 2, after)
        return _note(delta, depth, prefix, pos + 2, nul, 1) if status == 0 and ambiguous else status
    return 1 if kind == 0x73 and type_ == OBJECT else FALL_BACK


@inner
def _section_rank(pos: int, nul: int) -> int:
    """The place of a section in the order that a document diff keeps; -1 for anything else."""
    kind = load8(pos + 1)
    if load8(pos) != OBJECT:
        return FALL_BACK
    if kind == _LETTER_S:
        return _SUB_DIFF if nul > pos + 2 else FALL_BACK
    if nul != pos + 2:
        return FALL_BACK
    if kind == 0x64:  # "d"
        return 0
    if kind == 0x75:  # "u"
        return 1
    return 2 if kind == 0x69 else FALL_BACK  # "i"


@inner
def _enter(delta: int, prefix: int, name: int, size: int) -> int:
    """Append a name and a dot to the path; gives the new prefix's length."""
    path = load64(delta + AREAS)
    if prefix + size + 1 > _AREA:
        return FALL_BACK
    copy(path + prefix, name, size)
    store8(path + prefix + size, 0x2E)
    return prefix + size + 1


@inner
def _is_array_diff(document: int, limit: int) -> bool:
    """Whether the first element is ``a: true``; ``limit`` is where the document's NUL lies."""
    if limit - document < 8 or load8(document + 4) != BOOL:
        return False
    return load8(document + 5) == 0x61 and load8(document + 6) == 0 and load8(document + 7) == 1


@inner
def _push(frame: int, pos: int, limit: int, prefix: int, rank: int, ambiguous: bool) -> None:  # noqa: PLR0917
    store64(frame + _POS, pos)
    store64(frame + _LIMIT, limit)
    store64(frame + _PREFIX, prefix)
    store64(frame + _RANK, rank)
    store64(frame + _AMBIGUOUS, 1 if ambiguous else 0)


@inner
def _diff(delta: int, document: int, end: int) -> int:
    """Read a whole ``diff``, nested ones included, into the outputs."""
    stack = load64(delta + AREAS) + _STACK
    notes = load64(delta + DISAMBIGUATES) != 0
    depth = 0
    pos, limit, prefix, rank = document + 4, end - 1, 0, _NO_SECTION
    is_first, ambiguous = True, False
    # A level's deleted fields are reported after its updated and inserted ones, although they come before them.
    deleted, deleted_end = 0, 0
    while True:
        if deleted != 0 and (pos == limit or load8(pos + 1) == _LETTER_S):
            status = _fields(delta, depth, prefix, deleted, deleted_end, True, ambiguous)
            if status < 0:
                return status
            deleted = 0
        if pos == limit:
            if rank == _NO_SECTION:
                return FALL_BACK  # an empty diff
            if depth == 0:
                return 0
            depth -= 1
            frame = stack + _FRAME * depth
            pos, limit = load64(frame + _POS), load64(frame + _LIMIT)
            prefix, rank = load64(frame + _PREFIX), load64(frame + _RANK)
            ambiguous = load64(frame + _AMBIGUOUS) != 0
            is_first = False
            continue
        nul, after = read_element(pos, limit)
        if after < 0:
            return FALL_BACK
        if rank == _ARRAY_DIFF:
            status = _array_part(delta, depth, prefix, pos, nul, after, is_first, ambiguous)
        else:
            section = _section_rank(pos, nul)
            if section < 0 or section < rank or (section == rank and rank != _SUB_DIFF):
                return FALL_BACK
            rank = section
            status = 1
            if rank == 0:
                deleted, deleted_end, status = nul + 1, after, 0
            elif rank != _SUB_DIFF:
                status = _fields(delta, depth, prefix, nul + 1, after, False, ambiguous)
        is_first = False
        if status < 0:
            return status
        if status == 0:
            pos = after
            continue
        inner_prefix = _enter(delta, prefix, pos + 2, nul - pos - 2)
        if inner_prefix < 0 or depth == _DEPTH_MAX:
            return FALL_BACK
        frame = stack + _FRAME * depth
        _push(frame, after, limit, prefix, rank, ambiguous)
        ambiguous = ambiguous or (notes and rank != _ARRAY_DIFF and _is_ambiguous(pos + 2, nul, depth))
        depth += 1
        pos, limit, prefix, rank = nul + 5, after - 1, inner_prefix, _NO_SECTION
        if _is_array_diff(nul + 1, limit):
            rank, pos, is_first = _ARRAY_DIFF, pos + 4, True


@inner
def _put_array(delta: int, name: tuple[int, int], source: int, end: int) -> int:
    """An array element whose body lies in scratch memory."""
    out = load64(delta + OUT)
    size = end - source
    if name[1] + size + 5 > load64(delta + OUT_END) - out:
        return NO_ROOM
    copy(out, load64(delta + TEXT) + name[0], name[1])
    out += name[1]
    store32(out, size + 5)
    copy(out + 4, source, size)
    store8(out + 4 + size, 0)
    store64(delta + OUT, out + size + 5)
    return 0


@inner
def put_update_description(delta: int, diff: int, set_: int, unset: int) -> int:
    """The document of ``updateDescription`` at ``OUT``, which is moved after it.

    ``diff`` is the address of the ``$v: 2`` diff or 0; then ``set_`` and ``unset`` are those of the old form's
    documents or 0 (all checked for their outer length). Gives 0, ``FALL_BACK`` or ``NO_ROOM``.
    """
    areas = load64(delta + AREAS)
    store64(delta + _REMOVED, areas + _AREA)
    store64(delta + _REMOVED_COUNT, 0)
    store64(delta + _TRUNCATED, areas + 2 * _AREA)
    store64(delta + _TRUNCATED_COUNT, 0)
    store64(delta + _PATHS, areas + 3 * _AREA)
    store64(delta + _FIELDS_LEFT, _FIELDS_MAX)
    start = load64(delta + OUT)
    store64(delta + _TOO_LONG, start + _DESCRIPTION_MAX)
    fields = start + 4 + UPDATED_FIELDS[1]
    if load64(delta + OUT_END) - start < 128:
        return NO_ROOM
    copy(start + 4, load64(delta + TEXT) + UPDATED_FIELDS[0], UPDATED_FIELDS[1])
    store64(delta + OUT, fields + 4)
    status = 0
    if diff != 0:
        status = _diff(delta, diff, diff + load32(diff))
    if set_ != 0:
        status = _fields(delta, 0, 0, set_, set_ + load32(set_), False, False)
    if unset != 0 and status == 0:
        status = _fields(delta, 0, 0, unset, unset + load32(unset), True, False)
    if status < 0:
        return status
    out = load64(delta + OUT)
    if load64(delta + OUT_END) - out < 2:
        return NO_ROOM
    store8(out, 0)
    store32(fields, out + 1 - fields)
    store64(delta + OUT, out + 1)
    status = _put_array(delta, REMOVED_FIELDS, areas + _AREA, load64(delta + _REMOVED))
    if status == 0 and diff != 0:
        status = _put_array(delta, TRUNCATED_ARRAYS, areas + 2 * _AREA, load64(delta + _TRUNCATED))
    if status == 0 and diff != 0 and load64(delta + DISAMBIGUATES) != 0:
        status = _put_array(delta, DISAMBIGUATED_PATHS, areas + 3 * _AREA, load64(delta + _PATHS))
    out = load64(delta + OUT)
    if status == 0 and out == load64(delta + OUT_END):
        status = NO_ROOM
    if status == 0:
        store8(out, 0)
        store32(start, out + 1 - start)
        store64(delta + OUT, out + 1)
    return status
