"""Where the parts of change events lie, and how parts are gathered into columns, in compiled code.

It reads finished events, whatever made them: this kernel, the plain stages, a user's ``$project``. So there is one way
from events to columns. If the parts of an event were noted when it was written (``event_parts``), the places are taken
from there: they are those that would be found.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.event_parts import (
    CLUSTER_TIME,
    COLLECTION,
    DATABASE,
    DOCUMENT_KEY,
    FULL_DOCUMENT,
    FULL_DOCUMENT_BEFORE_CHANGE,
    OPERATION_TYPE,
    PARTS,
    ROW,
    SESSION,
    TO_DATABASE,
    TOKEN,
    TXN_NUMBER,
    UPDATE_DESCRIPTION,
    WALL_TIME,
)
from tailrace.core.kernel.memory import copy, load8, load32, load64, store32, store64
from tailrace.core.kernel.scan import (
    BINARY,
    DATE,
    INT64,
    INVALID,
    NULL,
    OBJECT,
    STRING,
    TIMESTAMP,
    document_end,
    name_word,
    read_element,
    word_of,
)
from tailrace.core.kernel.utf8 import valid_utf8

# Slots of the job of ``locate``, as byte offsets.
BASE = 0  # the events' buffer
OFFSETS = 8  # int64[count + 1]: where each event begins
COUNT = 16
WANTED = 24  # a bit for each part
RESULT = 32  # int64[PARTS, 3, count]: start, end, type
NOTED = 40  # rows of noted places (``event_parts``); 0: there are none
JOB_SLOTS = 6

_ID = word_of(b"_id")
_NS = word_of(b"ns")
_TO = word_of(b"to")
_DB = word_of(b"db")
_COLL = word_of(b"coll")
_DATA = word_of(b"_data")
_LSID = word_of(b"lsid")
_INNER_ID = word_of(b"id")
_OPERATION = word_of(b"operatio")
_CLUSTER = word_of(b"clusterT")
_WALL = word_of(b"wallTime")
_DOCUMENT = word_of(b"document")
_FULL = word_of(b"fullDocu")
_UPDATE = word_of(b"updateDe")
_TXN = word_of(b"txnNumbe")
# The rest of the longer names, as little-endian numbers.
_N_TYPE = int.from_bytes(b"Type", "little")  # operatio|nType, of which the last four
_IME = int.from_bytes(b"Time", "little")
_TKEY = int.from_bytes(b"tKey", "little")
_MENT = int.from_bytes(b"ment", "little")
_MBER = int.from_bytes(b"mber", "little")
_TAIL_MENT_BEFORE = word_of(b"mentBefo")
_TAIL_RE_CHANGE = word_of(b"reChange")
_TAIL_SCRIPTION = word_of(b"cription")


@inner
def _part_of(name: int, size: int) -> int:
    """The part that a top-level field of an event is, or contains (``_id`` has the token, ``ns`` and ``to`` a
    database); or -1."""
    word = name_word(name, size)
    if size < 8:
        if word == _ID:
            return TOKEN
        if word == _NS:
            return DATABASE
        if word == _TO:
            return TO_DATABASE
        return SESSION if word == _LSID else INVALID
    tail = load32(name + size - 4)
    if size == 8:
        return WALL_TIME if word == _WALL else INVALID
    if size == 9:
        return TXN_NUMBER if word == _TXN and tail == _MBER else INVALID
    if size == 11:
        if word == _CLUSTER and tail == _IME:
            return CLUSTER_TIME
        return DOCUMENT_KEY if word == _DOCUMENT and tail == _TKEY else INVALID
    if size == 12:
        return FULL_DOCUMENT if word == _FULL and tail == _MENT else INVALID
    if size == 13:
        fits = word == _OPERATION and tail == _N_TYPE and load8(name + 8) == 0x6E
        return OPERATION_TYPE if fits else INVALID
    if size == 17:
        fits = word == _UPDATE and load64(name + 9) == _TAIL_SCRIPTION and load8(name + 8) == 0x73
        return UPDATE_DESCRIPTION if fits else INVALID
    if size == 24 and word == _FULL and load64(name + 8) == _TAIL_MENT_BEFORE and load64(name + 16) == _TAIL_RE_CHANGE:
        return FULL_DOCUMENT_BEFORE_CHANGE
    return INVALID


@inner
def _put(row: int, stride: int, part: int, type_: int, start: int, end: int) -> None:  # noqa: PLR0917
    place = row + 3 * stride * part
    store64(place, start)
    store64(place + stride, end)
    store64(place + 2 * stride, type_)


@inner
def _put_field(row: int, stride: int, part: int, base: int, type_: int, value: int, end: int) -> None:  # noqa: PLR0917
    """One field that is a part itself."""
    if part == OPERATION_TYPE:
        if type_ == STRING:
            _put(row, stride, part, type_, value + 4 - base, end - 1 - base)
    elif part == CLUSTER_TIME:
        if type_ == TIMESTAMP:
            _put(row, stride, part, type_, load64(value), 0)
    elif part == WALL_TIME:
        if type_ == DATE:
            _put(row, stride, part, type_, load64(value), 0)
    elif part == TXN_NUMBER:
        if type_ == INT64:
            _put(row, stride, part, type_, load64(value), 0)
    else:
        _put(row, stride, part, type_, value - base, end - base)


@inner
def _put_inner(row: int, stride: int, part: int, base: int, document: int) -> bool:
    """The parts inside ``_id``, ``ns``, ``to`` and ``lsid``: the first field of each name. False: corrupt."""
    limit = document + load32(document) - 1
    pos = document + 4
    while pos < limit:
        nul, end = read_element(pos, limit)
        if end < 0:
            return False
        type_, size, value = load8(pos), nul - pos - 1, nul + 1
        word = name_word(pos + 1, size)
        inner_part = INVALID
        if size > 5:
            inner_part = INVALID
        elif part == TOKEN:
            inner_part = TOKEN if word == _DATA else INVALID
        elif part in (DATABASE, TO_DATABASE):
            inner_part = part if word == _DB else (part + COLLECTION - DATABASE if word == _COLL else INVALID)
        elif word == _INNER_ID and type_ == BINARY and load32(value) == 16:
            _put(row, stride, SESSION, type_, value + 5 - base, end - base)
        if inner_part >= 0 and type_ == STRING:
            _put(row, stride, inner_part, type_, value + 4 - base, end - 1 - base)
        pos = end
    return True


@inner
def _locate_one(row: int, stride: int, base: int, start: int, end: int, wanted: int) -> bool:  # noqa: PLR0917
    for part in range(PARTS):
        _put(row, stride, part, 0, 0, 0)
    if document_end(start, end) != end:
        return False
    limit = end - 1
    pos = start + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return False
        part = _part_of(pos + 1, nul - pos - 1)
        if part >= 0 and (wanted >> part) & 1 == 1:
            type_ = load8(pos)
            if part in (TOKEN, DATABASE, TO_DATABASE, SESSION):
                if type_ == OBJECT and not _put_inner(row, stride, part, base, nul + 1):
                    return False
            else:
                _put_field(row, stride, part, base, type_, nul + 1, after)
        pos = after
    return True


@inner
def _type_of(part: int) -> int:
    """The BSON type that a part has in an event of the kernel's, unless it is null."""
    if part == CLUSTER_TIME:
        return TIMESTAMP
    if part == WALL_TIME:
        return DATE
    if part == TXN_NUMBER:
        return INT64
    return OBJECT if DOCUMENT_KEY <= part <= UPDATE_DESCRIPTION else STRING


@inner
def _put_noted(job: int, part: int, first: int, last: int) -> None:
    """The column of one part for the events [first, last), all of which are noted."""
    base, offsets, stride = load64(job + BASE), load64(job + OFFSETS), 8 * load64(job + COUNT)
    words, result, type_ = load64(job + NOTED) + 8 * part, load64(job + RESULT), _type_of(part)
    is_number = part in (CLUSTER_TIME, WALL_TIME, TXN_NUMBER)
    for i in range(first, last):
        word, row, event = load64(words + ROW * i), result + 8 * i, load64(offsets + 8 * i)
        start, end = event + (word & 0xFFFFFFFF), event + (word >> 32)
        if word == 0:
            _put(row, stride, part, 0, 0, 0)
        elif is_number:
            _put(row, stride, part, type_, load64(base + start), 0)
        else:
            _put(row, stride, part, NULL if start == end and type_ == OBJECT else type_, start, end)


@inner
def _put_sessions(job: int, first: int, last: int) -> int:
    """The same for ``SESSION``; gives -1, or the first event whose ``lsid`` is corrupt: it is an entry's own."""
    base, offsets, stride = load64(job + BASE), load64(job + OFFSETS), 8 * load64(job + COUNT)
    words, result = load64(job + NOTED) + 8 * SESSION, load64(job + RESULT)
    for i in range(first, last):
        word, row = load64(words + ROW * i), result + 8 * i
        _put(row, stride, SESSION, 0, 0, 0)
        session = base + load64(offsets + 8 * i) + (word & 0xFFFFFFFF)
        if word != 0 and not _put_inner(row, stride, SESSION, base, session):
            return i
    return INVALID


@inner
def _take_noted(job: int, first: int) -> int:
    """The parts of the noted events from ``first`` on, column by column; gives where these end, or minus the number of
    a corrupt one, less one."""
    noted, last = load64(job + NOTED), first
    while last < load64(job + COUNT) and load64(noted + ROW * last + 8 * TOKEN) != 0:
        last += 1
    for part in range(PARTS):
        if (load64(job + WANTED) >> part) & 1 == 0:
            continue
        if part == SESSION:
            failed = _put_sessions(job, first, last)
            if failed >= 0:
                return -failed - 1
        else:
            _put_noted(job, part, first, last)
    return last


def _make_locate(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def locate(job: int) -> int:
        """Fill ``RESULT`` for the wanted parts. Gives -1, or the index of the first event that is no BSON document."""
        if sources == 0:
            return 0
        base, offsets, noted = load64(job + BASE), load64(job + OFFSETS), load64(job + NOTED)
        count, wanted, result = load64(job + COUNT), load64(job + WANTED), load64(job + RESULT)
        i = 0
        while i < count:
            if noted != 0 and load64(noted + ROW * i + 8 * TOKEN) != 0:
                i = _take_noted(job, i)
                if i < 0:
                    return -i - 1
                continue
            start, end = base + load64(offsets + 8 * i), base + load64(offsets + 8 * i + 8)
            if not _locate_one(result + 8 * i, 8 * count, base, start, end, wanted):
                return i
            i += 1
        return INVALID

    return locate


def _make_gather(sources: int) -> Callable[[int], None]:
    @entry_point("void(int64)")
    def gather(job: int) -> None:
        """Copy runs one after another. ``job`` is int64[6]: base, starts, ends, count; then the targets: data,
        offsets (int32)."""
        if sources == 0:
            return
        base, starts, ends = load64(job), load64(job + 8), load64(job + 16)
        data, offsets = load64(job + 32), load64(job + 40)
        out = data
        store32(offsets, 0)
        for i in range(load64(job + 24)):
            start = load64(starts + 8 * i)
            size = load64(ends + 8 * i) - start
            copy(out, base + start, size)
            out += size
            store32(offsets + 4 * i + 4, out - data)

    return gather


def _make_is_utf8(sources: int) -> Callable[[int, int], int]:
    @entry_point("int64(int64, int64)")
    def is_utf8(start: int, end: int) -> int:
        """1 where the bytes are valid UTF-8 (Unicode table 3-7: no surrogates, nothing overlong), else 0."""
        if sources == 0:
            return 0
        return 1 if valid_utf8(start, end) else 0

    return is_utf8


locate = _make_locate(fingerprint(__name__))
gather = _make_gather(fingerprint(__name__))
is_utf8 = _make_is_utf8(fingerprint(__name__))
