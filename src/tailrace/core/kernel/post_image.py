"""Post-images from pre-images and deltas, in compiled code: the counterpart of ``oplog.update_delta.apply_diff``.

A *level* is a document or an array that a diff changes. The parts of its diff stand in a table, one after another in
the order of the diff; levels nest, and so do their tables. Rare cases (a name twice in a diff, a deleted ``_id``, an
odd diff, an array that grows far) get no post-image here: ``apply_diff`` makes it.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.delta import put_decimal
from tailrace.core.kernel.memory import copy, load8, load32, load64, store8, store32, store64
from tailrace.core.kernel.scan import (
    ARRAY,
    BOOL,
    INT32,
    NULL,
    OBJECT,
    document_end,
    equal,
    find_nul,
    load_signed32,
    name_word,
    read_element,
    value_end,
    word_of,
)

# Slots of a job, as byte offsets.
COUNT = 0
IMAGES = 8
START = 16  # int64[count], and END: the pre-images, offsets from IMAGES; nothing is made where both are the same
END = 24
RAW = 32
OBJECTS = 40  # int64[count]: where the update's ``o`` is, an offset from RAW
OUT = 48
OUT_END = 56
OUT_START = 64  # int64[count], and OUT_ENDS: the post-images, offsets from OUT; -1 where apply_diff is needed
OUT_ENDS = 72
SCRATCH = 80
STRICT = 88  # 1: a delta that does not fit its document is left, and a field is not there twice
JOB_SIZE = 96

FALL_BACK = -1

# A part of a diff in the table.
_KIND = 0
_NAME = 8
_SIZE = 16
_WORD = 24
_ELEMENT = 32  # of a sub-diff: its value
_ELEMENT_END = 40
_SEEN = 48
_PART = 56

_DELETED = 0
_UPDATED = 1
_INSERTED = 2
_NESTED = 3

#: With more parts than this, on all open levels, Python's dictionaries are faster.
_PARTS_MAX = 1024
_DEPTH_MAX = 100

# A frame of the stack: a level that is under way ...
_IS_ARRAY = 0
_START = 8  # where it begins in the post-image
_OLD = 16  # where its old value goes on
_OLD_LIMIT = 24
_PART_TABLE = 32  # its part of the table, and for how many parts there is room
_ROOM = 40
_PARTS = 48
# ... an array's diff, which is read as it goes ...
_POS = 56
_LIMIT = 64
_INDEX = 72
_LENGTH = 80
# ... and the level inside it that comes next, or 0.
_SUB = 88
_SUB_END = 96
_SUB_VALUE = 104
_STRICT = 112
_FRAME = 120
SCRATCH_SIZE = _FRAME * _DEPTH_MAX + _PART * _PARTS_MAX

_LETTER_L = 0x6C
_LETTER_U = 0x75
#: Arrays are padded up to this many items; a post-image is not made longer than its parts and this.
_PADDING_MAX = 64
ROOM = 16 * _PADDING_MAX

_DIFF = word_of(b"diff")
_ID = word_of(b"_id")


@inner
def _add_parts(  # noqa: PLR0917
    table: int, room: int, parts: int, kind: int, section: int, section_end: int
) -> int:
    """The fields of a section as parts; gives how many the level has then."""
    limit = section_end - 1
    pos = section + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0 or parts == room:
            return FALL_BACK
        part = table + _PART * parts
        store64(part + _KIND, kind)
        store64(part + _NAME, pos + 1)
        store64(part + _SIZE, nul - pos - 1)
        store64(part + _WORD, name_word(pos + 1, nul - pos - 1))
        store64(part + _ELEMENT, pos)
        store64(part + _ELEMENT_END, after)
        store64(part + _SEEN, 0)
        parts += 1
        pos = after
    return parts


@inner
def _read_diff(table: int, room: int, diff: int, end: int) -> int:
    """The parts of a document's diff in the table, or ``FALL_BACK``; ``room`` is how many it holds."""
    limit = end - 1
    pos, parts, rank = diff + 4, 0, -1
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0 or load8(pos) != OBJECT or parts >= room:
            return FALL_BACK
        letter, size = load8(pos + 1), nul - pos - 1
        if letter == 0x73:  # "s"
            rank = _NESTED
            part = table + _PART * parts
            store64(part + _KIND, _NESTED)
            store64(part + _NAME, pos + 2)
            store64(part + _SIZE, size - 1)
            store64(part + _WORD, name_word(pos + 2, size - 1))
            store64(part + _ELEMENT, nul + 1)
            store64(part + _ELEMENT_END, after)
            store64(part + _SEEN, 0)
            parts += 1
        else:
            kind = _INSERTED
            if letter == 0x64:  # "d"
                kind = _DELETED
            elif letter == _LETTER_U:
                kind = _UPDATED
            elif letter != 0x69:  # "i"
                return FALL_BACK
            if size != 1 or kind <= rank:
                return FALL_BACK
            rank = kind
            parts = _add_parts(table, room, parts, kind, nul + 1, after)
            if parts < 0:
                return FALL_BACK
        pos = after
    return parts if rank >= 0 else FALL_BACK


@inner
def _named(part: int, word: int, name: int, size: int) -> bool:
    if load64(part + _WORD) != word or load64(part + _SIZE) != size:
        return False
    return size <= 8 or equal(load64(part + _NAME), name, size)


@inner
def _find_part(table: int, parts: int, name: int, size: int) -> int:
    """The part for a field of the document, marked as seen; 0: none, ``FALL_BACK``: two."""
    word = name_word(name, size)
    found = 0
    for i in range(parts):
        part = table + _PART * i
        if _named(part, word, name, size):
            if found != 0 or load64(part + _SEEN) != 0:
                return FALL_BACK
            store64(part + _SEEN, 1)
            found = part
    return found


@inner
def _put(out: int, room_end: int, start: int, end: int) -> int:
    if end - start > room_end - out:
        return FALL_BACK
    copy(out, start, end - start)
    return out + end - start


@inner
def _put_null(out: int, room_end: int, name: int, size: int) -> int:
    if size + 2 > room_end - out:
        return FALL_BACK
    store8(out, NULL)
    copy(out + 1, name, size)
    store8(out + 1 + size, 0)
    return out + size + 2


@inner
def _is_array_diff(diff: int, limit: int) -> bool:
    """Whether the first element is called ``a`` and a boolean; ``limit`` is where the diff's NUL lies."""
    return limit - diff >= 8 and load8(diff + 4) == BOOL and load8(diff + 5) == 0x61 and load8(diff + 6) == 0


@inner
def _put_rest(out: int, room_end: int, table: int, parts: int) -> int:
    """After a document's own fields: the updated ones that it does not have, then the inserted ones."""
    for kind in (_UPDATED, _INSERTED):
        for i in range(parts):
            part = table + _PART * i
            if load64(part + _KIND) != kind or (kind == _UPDATED and load64(part + _SEEN) != 0):
                continue
            if kind == _UPDATED:
                for j in range(i + 1, parts):
                    other = table + _PART * j
                    if _named(other, load64(part + _WORD), load64(part + _NAME), load64(part + _SIZE)):
                        return FALL_BACK
            out = _put(out, room_end, load64(part + _ELEMENT), load64(part + _ELEMENT_END))
            if out < 0:
                return FALL_BACK
    return out


@inner
def _inserts_alone(table: int, parts: int) -> bool:
    for i in range(parts):  # noqa: SIM110
        if load64(table + _PART * i + _KIND) != _INSERTED:
            return False
    return True


@inner
def _any_unseen(table: int, parts: int) -> bool:
    """Whether a field that is changed or deleted is not there."""
    for i in range(parts):
        part = table + _PART * i
        if load64(part + _KIND) != _INSERTED and load64(part + _SEEN) == 0:
            return True
    return False


@inner
def _closed(out: int, room_end: int, start: int) -> int:
    """The end of a document whose fields end at ``out``."""
    if out < 0 or out == room_end:
        return FALL_BACK
    store8(out, 0)
    store32(start, out + 1 - start)
    return out + 1


@inner
def _open(frame: int, out: int, room_end: int, value: int, diff: int, diff_end: int) -> int:  # noqa: PLR0917
    """Begin a level: the document or array ``value`` and its diff. Its table is in the frame already."""
    if room_end - out < 5:
        return FALL_BACK
    limit = value + load32(value) - 1
    store64(frame + _START, out)
    store64(frame + _OLD, value + 4)
    store64(frame + _OLD_LIMIT, limit)
    is_array = _is_array_diff(diff, diff_end - 1)
    store64(frame + _IS_ARRAY, 1 if is_array else 0)
    if is_array:
        length = _array_length(diff, diff_end - 1, value, limit)
        if load8(diff + 7) != 1 or length < 0:
            return FALL_BACK
        pos = diff + 8
        if pos < diff_end - 1 and load8(pos + 1) == _LETTER_L:
            pos += 7
        store64(frame + _PARTS, 0)
        store64(frame + _POS, pos)
        store64(frame + _LIMIT, diff_end - 1)
        store64(frame + _INDEX, 0)
        store64(frame + _LENGTH, length)
        return out + 4
    parts = _read_diff(load64(frame + _PART_TABLE), load64(frame + _ROOM), diff, diff_end)
    if parts < 0:
        return FALL_BACK
    store64(frame + _PARTS, parts)
    if load64(frame + _STRICT) == 0 and _inserts_alone(load64(frame + _PART_TABLE), parts):
        store64(frame + _OLD, limit)
        return _put(out + 4, room_end, value + 4, limit)
    return out + 4


@inner
def _begin_nested(  # noqa: PLR0917
    frame: int, out: int, room_end: int, old: int, old_nul: int, sub: int, sub_end: int
) -> int:
    """The element ``old`` up to its value, which is the next level then; null where its value is not of the kind that
    the diff is for."""
    if load8(old) != (ARRAY if _is_array_diff(sub, sub_end - 1) else OBJECT):
        if load64(frame + _STRICT) != 0:
            return FALL_BACK
        return _put_null(out, room_end, old + 1, old_nul - old - 1)
    store64(frame + _SUB, sub)
    store64(frame + _SUB_END, sub_end)
    store64(frame + _SUB_VALUE, old_nul + 1)
    return _put(out, room_end, old, old_nul + 1)


@inner
def _document_step(frame: int, out: int, room_end: int, depth: int) -> int:
    """Go on with a document up to its end, or to a field with a diff of its own."""
    table, parts = load64(frame + _PART_TABLE), load64(frame + _PARTS)
    pos, limit = load64(frame + _OLD), load64(frame + _OLD_LIMIT)
    while pos < limit:
        nul, after = read_element(pos, limit)
        part = FALL_BACK if after < 0 else _find_part(table, parts, pos + 1, nul - pos - 1)
        if part < 0:
            return FALL_BACK
        kind = load64(part + _KIND) if part != 0 else FALL_BACK
        if part == 0:
            out = _put(out, room_end, pos, after)
        elif kind == _UPDATED:
            out = _put(out, room_end, load64(part + _ELEMENT), load64(part + _ELEMENT_END))
        elif kind == _NESTED:
            sub, sub_end = load64(part + _ELEMENT), load64(part + _ELEMENT_END)
            out = _begin_nested(frame, out, room_end, pos, nul, sub, sub_end)
        elif depth == 0 and kind == _DELETED and nul - pos == 4 and name_word(pos + 1, 3) == _ID:
            return FALL_BACK
        if out < 0:
            return FALL_BACK
        pos = after
        if kind == _NESTED and load64(frame + _SUB) != 0:
            store64(frame + _OLD, pos)
            return out
    if load64(frame + _STRICT) != 0 and _any_unseen(table, parts):
        return FALL_BACK
    return _closed(_put_rest(out, room_end, table, parts), room_end, load64(frame + _START))


@inner
def _index(name: int, end: int) -> int:
    """The number that an array's part is for, written as the server does; or ``FALL_BACK``."""
    if end == name or end - name > 9 or (load8(name) == 0x30 and end - name > 1):
        return FALL_BACK
    number = 0
    for i in range(name, end):
        digit = load8(i) - 0x30
        if digit < 0 or digit > 9:
            return FALL_BACK
        number = 10 * number + digit
    return number


@inner
def _array_length(diff: int, limit: int, old: int, old_limit: int) -> int:
    """The length of the array after its diff, whose parts are checked; or ``FALL_BACK``."""
    pos, last, length = diff + 8, -1, 0
    has_length = False
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return FALL_BACK
        kind = load8(pos + 1)
        if kind == _LETTER_L and nul == pos + 2 and last < 0 and not has_length:
            if load8(pos) != INT32:
                return FALL_BACK
            has_length, length = True, load_signed32(nul + 1)
        else:
            index = _index(pos + 2, nul)
            nested = kind == 0x73 and load8(pos) == OBJECT  # "s"
            if index <= last or not (kind == _LETTER_U or nested):
                return FALL_BACK
            last = index
        pos = after
    pos, count = old + 4, 0
    while pos < old_limit:
        _, pos = read_element(pos, old_limit)
        if pos < 0:
            return FALL_BACK
        count += 1
    if not has_length:
        length = count
    length = max(length, last + 1)
    return FALL_BACK if length > count + _PADDING_MAX else length


@inner
def _put_item(out: int, room_end: int, index: int, type_: int, value: int, value_end_: int) -> int:  # noqa: PLR0917
    """An array's element with its number as its name."""
    if value_end_ - value + 16 > room_end - out:
        return FALL_BACK
    store8(out, type_)
    out = put_decimal(out + 1, index)
    copy(out, value, value_end_ - value)
    return out + value_end_ - value


@inner
def _array_step(frame: int, out: int, room_end: int) -> int:
    """Go on with an array up to its end, or to an item with a diff of its own."""
    old, old_limit = load64(frame + _OLD), load64(frame + _OLD_LIMIT)
    pos, limit = load64(frame + _POS), load64(frame + _LIMIT)
    for index in range(load64(frame + _INDEX), load64(frame + _LENGTH)):
        old_nul, old_end, nul = 0, 0, 0
        if old < old_limit:
            old_nul = find_nul(old + 1, old_limit)
            old_end = value_end(load8(old), old_nul + 1, old_limit)
        if pos < limit:
            nul = find_nul(pos + 1, limit)
        if nul == 0 or _index(pos + 2, nul) != index:
            kept = old_end != 0
            out = _put(out, room_end, old, old_end) if kept else _put_item(out, room_end, index, NULL, pos, pos)
        else:
            after = value_end(load8(pos), nul + 1, limit)
            if load8(pos + 1) == _LETTER_U:
                out = _put_item(out, room_end, index, load8(pos), nul + 1, after)
            elif old_end == 0 and load64(frame + _STRICT) != 0:
                return FALL_BACK
            elif old_end == 0:
                out = _put_item(out, room_end, index, NULL, pos, pos)
            else:
                out = _begin_nested(frame, out, room_end, old, old_nul, nul + 1, after)
            pos = after
        if out < 0:
            return FALL_BACK
        old = old_end if old_end != 0 else old_limit
        if load64(frame + _SUB) != 0:
            store64(frame + _OLD, old)
            store64(frame + _POS, pos)
            store64(frame + _INDEX, index + 1)
            return out
    return _closed(out, room_end, load64(frame + _START))


@inner
def _apply(out: int, room_end: int, frame: int, document: int, diff: int, diff_end: int) -> int:  # noqa: PLR0917
    """The document after its diff; gives the address after it, or ``FALL_BACK``. ``frame``: scratch memory."""
    depth = 0
    store64(frame + _PART_TABLE, frame + _FRAME * _DEPTH_MAX)
    store64(frame + _ROOM, _PARTS_MAX)
    if _is_array_diff(diff, diff_end - 1):
        return FALL_BACK
    out = _open(frame, out, room_end, document, diff, diff_end)
    while out >= 0:
        store64(frame + _SUB, 0)
        if load64(frame + _IS_ARRAY) != 0:
            out = _array_step(frame, out, room_end)
        else:
            out = _document_step(frame, out, room_end, depth)
        if out < 0:
            return FALL_BACK
        if load64(frame + _SUB) == 0:
            if depth == 0:
                return out
            depth -= 1
            frame -= _FRAME
            continue
        depth += 1
        if depth == _DEPTH_MAX:
            return FALL_BACK
        inside = frame + _FRAME
        parts = load64(frame + _PARTS)
        store64(inside + _PART_TABLE, load64(frame + _PART_TABLE) + _PART * parts)
        store64(inside + _STRICT, load64(frame + _STRICT))
        store64(inside + _ROOM, load64(frame + _ROOM) - parts)
        sub, sub_end = load64(frame + _SUB), load64(frame + _SUB_END)
        out = _open(inside, out, room_end, load64(frame + _SUB_VALUE), sub, sub_end)
        frame = inside
    return FALL_BACK


@inner
def _delta_of(update: int) -> int:
    """The address of the delta in an update's ``o``, or ``FALL_BACK``."""
    limit = update + load32(update) - 1
    pos = update + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return FALL_BACK
        if nul - pos == 5 and name_word(pos + 1, 4) == _DIFF:
            return nul + 1 if load8(pos) == OBJECT else FALL_BACK
        pos = after
    return FALL_BACK


def _make_apply_deltas(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def apply_deltas(job: int) -> int:
        """The post-images of a job's updates. The pre-images' outer lengths are checked here. Gives how many bytes were
        written."""
        if sources == 0:
            return 0
        images, raw, base = load64(job + IMAGES), load64(job + RAW), load64(job + OUT)
        out, room_end, frames = base, load64(job + OUT_END), load64(job + SCRATCH)
        store64(frames + _STRICT, load64(job + STRICT))
        for index in range(load64(job + COUNT)):
            slot = 8 * index
            start, end = load64(load64(job + START) + slot), load64(load64(job + END) + slot)
            after = out
            if start != end:
                delta = _delta_of(raw + load64(load64(job + OBJECTS) + slot))
                if delta < 0 or document_end(images + start, images + end) != images + end:
                    after = FALL_BACK
                else:
                    delta_end = delta + load32(delta)
                    after = _apply(out, room_end, frames, images + start, delta, delta_end)
            store64(load64(job + OUT_START) + slot, FALL_BACK if after < 0 else out - base)
            store64(load64(job + OUT_ENDS) + slot, FALL_BACK if after < 0 else after - base)
            out = out if after < 0 else after
        return out - base

    return apply_deltas


apply_deltas = _make_apply_deltas(fingerprint(__name__))
