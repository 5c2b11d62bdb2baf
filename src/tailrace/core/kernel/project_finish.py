"""What the user's stages leave of an event, made ready to be given: the places of removed fields are taken out, and an
event that may no longer be given (its ``_id`` changed, too large, nested too deep) is found. Also the places that are
put into an event before stages that may set them. The references are ``stripped`` and ``with_places`` and
``check_event`` of ``tailrace.core.expression``, and ``check_id`` of ``tailrace.core.stage.user_stages``."""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import load8, load64, store8, store64
from tailrace.core.kernel.project import (
    FRAME_SIZE,
    FRAMES,
    GONE,
    UNKNOWN,
    close_document,
    element_end,
    find_element,
    holds_gone,
    open_document,
    put_index,
    put_name,
    put_run,
)
from tailrace.core.kernel.scan import (
    ARRAY,
    OBJECT,
    STRING,
    equal,
    find_nul,
    load_signed32,
    name_word,
    value_end,
    word_of,
)

#: Near the server's limits for an event, and beyond them, the plain stages decide: they split it, or they raise.
GIVEN_MAX = 16 * 1024 * 1024 - (1 << 16)
_DEPTH_MAX = 200

#: Bits of the flags of ``put_places``: the stream shows expanded events; only ``fullDocument`` and ``documentKey`` have
#: places.
EXPANDED = 1
DOCUMENTS_ONLY = 2

# The order of the names in the table that ``put_places`` gets: nine names (address, size).
_NS, _OPERATION_TYPE, _WALL_TIME, _FULL_DOCUMENT, _COLLECTION_UUID = 0, 1, 2, 3, 4
_AFTER = _DOCUMENT_KEY = 5  # the four that follow ``ns``, in their order
_OPERATION_DESCRIPTION = 6
PLACE_NAMES = (
    b"ns",
    b"operationType",
    b"wallTime",
    b"fullDocument",
    b"collectionUUID",
    b"documentKey",
    b"operationDescription",
    b"updateDescription",
    b"stateBeforeChange",
)
_CREATE = word_of(b"create\0")
_MODIFY = word_of(b"modify\0")
_DROP = word_of(b"drop\0")
_ID_NAME = word_of(b"_id\0")
_NS_NAME = word_of(b"ns\0")


# Slots of a frame of ``put_stripped`` and ``_may_nest``.
_POS = 0
_LIMIT = 8
_DOCUMENT = 16
_KIND = 24
_COUNT = 32


@inner
def _open(frame: int, state: int, out: int, kind: int, start: int, end: int) -> int:  # noqa: PLR0917
    store64(frame + _POS, start + 4)
    store64(frame + _LIMIT, end - 1)
    store64(frame + _DOCUMENT, out)
    store64(frame + _KIND, kind)
    store64(frame + _COUNT, 0)
    return open_document(state, out)


@inner
def _put_head(frame: int, state: int, out: int, element: int, value: int) -> int:
    """An element up to its value: as it stands, or with the next number in an array."""
    if load64(frame + _KIND) != ARRAY:
        return put_run(state, out, element, value)
    after = put_index(state, out, load64(frame + _COUNT))
    store64(frame + _COUNT, load64(frame + _COUNT) + 1)
    if after >= 0:
        store8(out, load8(element))
    return after


@inner
def put_stripped(state: int, out: int, start: int, end: int) -> int:
    """A document without the places of fields that went, at every depth; what cannot hold any is copied."""
    if not holds_gone(start, end):
        return put_run(state, out, start, end)
    base = frame = state + FRAMES
    out = _open(frame, state, out, OBJECT, start, end)
    while out >= 0:
        pos, limit = load64(frame + _POS), load64(frame + _LIMIT)
        if pos == limit:
            out = close_document(state, load64(frame + _DOCUMENT), out, load64(frame + _KIND))
            if frame == base:
                break
            frame -= FRAME_SIZE
            continue
        element, kind, nul = pos, load8(pos), find_nul(pos + 1, limit)
        pos = UNKNOWN if nul < 0 else element_end(kind, nul + 1, limit)
        if pos < 0 or frame - base > FRAME_SIZE * _DEPTH_MAX:
            return UNKNOWN
        store64(frame + _POS, pos)
        if kind == GONE:
            continue
        out = _put_head(frame, state, out, element, nul + 1)
        if out >= 0 and kind in (OBJECT, ARRAY) and holds_gone(nul + 1, pos):
            frame += FRAME_SIZE
            out = _open(frame, state, out, kind, nul + 1, pos)
        elif out >= 0:
            out = put_run(state, out, nul + 1, pos)
    return out


@inner
def _may_nest(state: int, start: int, end: int) -> bool:
    """Whether a document surely nests no deeper than the server takes. A level takes seven bytes at least, so most
    documents are not looked into."""
    base = frame = state + FRAMES
    left = _DEPTH_MAX
    if (end - start - 5) // 7 < left:
        return True
    store64(frame + _POS, start + 4)
    store64(frame + _LIMIT, end - 1)
    while frame >= base:
        pos, limit = load64(frame + _POS), load64(frame + _LIMIT)
        if pos == limit:
            frame -= FRAME_SIZE
            left += 1
            continue
        kind, nul = load8(pos), find_nul(pos + 1, limit)
        after = UNKNOWN if nul < 0 else value_end(kind, nul + 1, limit)
        if after < 0:
            return False
        store64(frame + _POS, after)
        if kind in (OBJECT, ARRAY) and (after - nul - 6) // 7 >= left - 1:
            if left == 1:
                return False
            frame += FRAME_SIZE
            left -= 1
            store64(frame + _POS, nul + 5)
            store64(frame + _LIMIT, after - 1)
    return True


@inner
def _named_place(names: int, place: int, start: int, end: int) -> int:
    return find_element(load64(names + 16 * place), load64(names + 16 * place + 8), start + 4, end - 1)


@inner
def _is_named(names: int, place: int, name: int, size: int) -> bool:
    return load64(names + 16 * place + 8) == size and equal(load64(names + 16 * place), name, size)


@inner
def _has_places(names: int, expanded: bool, start: int, end: int) -> int:
    """1 for an event that gets places, 0 for one that stays as it is, or ``UNKNOWN``."""
    operation = _named_place(names, _OPERATION_TYPE, start, end)
    found = _named_place(names, _NS, start, end)
    if operation < 0 or found < 0:
        return UNKNOWN
    if operation == 0 or found == 0 or load8(operation) != STRING:
        return 0
    if not expanded:
        return 1
    value = operation + load64(names + 16 * _OPERATION_TYPE + 8) + 2
    size = load_signed32(value)
    of_view = size == 5 and _starts(value + 4, _DROP, 5)
    if size == 7:
        of_view = _starts(value + 4, _CREATE, 7) or _starts(value + 4, _MODIFY, 7)
    return 0 if of_view and _named_place(names, _COLLECTION_UUID, start, end) == 0 else 1


@inner
def _starts(text: int, word: int, size: int) -> bool:
    """Whether ``size`` bytes at ``text`` are those of a number."""
    return name_word(text, size) == word & (1 << 8 * size) - 1


@inner
def _put_absent(names: int, place: int, state: int, out: int, start: int, end: int) -> int:  # noqa: PLR0917
    """The place of a field that the event does not have."""
    found = _named_place(names, place, start, end)
    if found != 0:
        return out if found > 0 else UNKNOWN
    return put_name(state, out, GONE, load64(names + 16 * place), load64(names + 16 * place + 8))


@inner
def _put_after(names: int, mode: int, state: int, out: int, start: int, end: int) -> int:  # noqa: PLR0917
    """What stands after ``ns``, from wherever it is in the event, or its place."""
    for place in range(_AFTER, _AFTER + 4):
        if out < 0:
            return out
        if place == _OPERATION_DESCRIPTION and mode & EXPANDED == 0:
            continue
        found = _named_place(names, place, start, end)
        if found < 0:
            return UNKNOWN
        if found == 0 or load8(found) == GONE:
            if place != _DOCUMENT_KEY and mode & DOCUMENTS_ONLY != 0:
                continue
            out = put_name(state, out, GONE, load64(names + 16 * place), load64(names + 16 * place + 8))
        else:
            value = found + load64(names + 16 * place + 8) + 2
            after = value_end(load8(found), value, end - 1)
            out = UNKNOWN if after < 0 else put_run(state, out, found, after)
    return out


@inner
def put_places(names: int, mode: int, state: int, out: int, start: int, end: int) -> int:  # noqa: PLR0917
    """An event with the places of the fields that its kind could have."""
    has_places = _has_places(names, mode & EXPANDED != 0, start, end)
    if has_places <= 0:
        return UNKNOWN if has_places < 0 else put_run(state, out, start, end)
    document = out
    out = open_document(state, out)
    pos, limit = start + 4, end - 1
    while pos < limit and out >= 0:
        element = pos
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return UNKNOWN
        size = nul - element - 1
        pos = element_end(load8(element), nul + 1, limit)
        if pos < 0:
            return UNKNOWN
        is_ns = _is_named(names, _NS, element + 1, size)
        if mode == EXPANDED and _is_named(names, _WALL_TIME, element + 1, size):
            out = _put_absent(names, _COLLECTION_UUID, state, out, start, end)
        elif is_ns:
            out = _put_absent(names, _FULL_DOCUMENT, state, out, start, end)
        is_after = False
        for place in range(_AFTER, _AFTER + 4):
            is_after |= _is_named(names, place, element + 1, size)
        if out >= 0 and not is_after:
            out = put_run(state, out, element, pos)
        if out >= 0 and is_ns:
            out = _put_after(names, mode, state, out, start, end)
    return out if out < 0 else close_document(state, document, out, OBJECT)


@inner
def _find_document(name: int, size: int, start: int, end: int) -> int:
    """The first element of a name, given as a number, whose value is a document; 0 where it is none."""
    pos, limit = start + 4, end - 1
    while pos < limit:
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return UNKNOWN
        if nul - pos - 1 == size and _starts(pos + 1, name, size):
            return pos if load8(pos) == OBJECT else 0
        pos = value_end(load8(pos), nul + 1, limit)
        if pos < 0:
            return UNKNOWN
    return 0


@inner
def check_given(state: int, start: int, end: int, token: int, token_size: int, base: int, places: int) -> bool:  # noqa: PLR0917
    """Whether an event may be given after the user's stages: its token is the one it had, byte for byte, and it keeps
    to the server's limits. Where its token and ``ns`` are goes to ``places``, int64[4] counted from ``base``."""
    if end - start > GIVEN_MAX or not _may_nest(state, start, end):
        return False
    found, namespace = _find_document(_ID_NAME, 3, start, end), _find_document(_NS_NAME, 2, start, end)
    if found <= 0 or namespace < 0:
        return False
    value = found + 5
    if value_end(OBJECT, value, end - 1) != value + token_size or not equal(value, token, token_size):
        return False
    store64(places, value - base)
    store64(places + 8, value + token_size - base)
    after = 0 if namespace == 0 else value_end(OBJECT, namespace + 4, end - 1)
    if after < 0:
        return False
    store64(places + 16, 0 if namespace == 0 else namespace + 4 - base)
    store64(places + 24, 0 if namespace == 0 else after - base)
    return True
