"""BSON documents to Spark's VARIANT, in compiled code, byte for byte as ``tailrace.lake.spark.reading.variant`` does
it.

What it leaves to the reference (``ok`` false): types other than the usual ones, names that are not ASCII or occur
twice, text that is not UTF-8, very wide or deep documents. Values are written in the order of the document; when a
container closes, they are sorted and put after its header.

A *state* is a block of int64 slots. *Records* are a stack: one for each field or array element whose container is still
open: name, name size, place and size of the value, sort key, rank.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.fragments import LOWER_HEX
from tailrace.core.kernel.memory import (
    copy,
    load8,
    load16,
    load32,
    load64,
    load64_big_endian,
    move,
    store8,
    store16,
    store32,
    store64,
)
from tailrace.core.kernel.scan import (
    ARRAY,
    BINARY,
    BOOL,
    DATE,
    DECIMAL128,
    DOUBLE,
    INT32,
    INT64,
    INVALID,
    NULL,
    OBJECT,
    OBJECT_ID,
    STRING,
    equal,
    find_nul,
    name_word,
    read_element,
)
from tailrace.core.kernel.utf8 import valid_utf8

# Slots of a state, as byte offsets.
FRAGMENTS = 0
OUT = 8  # where the next value goes
RECORDS = 16
NAMES = 24  # the dictionary: address and size of each name
_NAME_COUNT = 32
TABLE = 40  # hash table: generation << 16 | (number + 1)
GENERATION = 48
FRAMES = 56
SORTED = 64  # scratch for values in their order
STATE_SIZE = 72

_NAMES_MAX = 512
NAMES_SIZE = 16 * _NAMES_MAX
_TABLE_SLOTS = 1024
TABLE_SIZE = 8 * _TABLE_SLOTS
_DEPTH_MAX = 100
_FRAME = 32
FRAMES_SIZE = _FRAME * (_DEPTH_MAX + 1)
_RECORD = 48
_RECORDS_MAX = 1 << 16
RECORDS_SIZE = _RECORD * _RECORDS_MAX
#: Wider objects are left to the reference: their sort is quadratic here.
_FIELDS_MAX = 200

# Slots of a record.
_NAME = 0
_NAME_SIZE = 8
_PLACE = 16
_SIZE = 24
_SORT_KEY = 32
_NUMBER = 40

# Headers (Parquet Variant encoding, version 1).
_OBJECT_HEADER = 2
_ARRAY_HEADER = 3
_NULL_VALUE = 0x00
_TRUE = 0x04
_FALSE = 0x08
_INT4 = 0x14
_INT8 = 0x18
_DOUBLE_VALUE = 0x1C
_TIMESTAMP_VALUE = 0x30
_DECIMAL4 = 0x20
_DECIMAL8 = 0x24
_DECIMAL16 = 0x28
_BINARY_VALUE = 0x3C
_LONG_STRING = 0x40
_SHORT_STRING_MAX = 63

#: The years 1 to 9999, as in the reference.
_FIRST_MS = -62135596800000
_LAST_MS = 253402300799999
_DECIMAL_BIAS = 6176


@inner
def _width(largest: int) -> int:
    if largest < 1 << 8:
        return 1
    if largest < 1 << 16:
        return 2
    return 3 if largest < 1 << 24 else 4


@inner
def _put_number(out: int, number: int, width: int) -> int:
    """``width`` bytes of a number, little-endian. May write up to four bytes; what follows overwrites them."""
    store32(out, number)
    return out + width


@inner
def _put_hex(out: int, source: int, size: int, digits: int) -> int:
    for i in range(size):
        store16(out + 2 * i, load16(digits + 2 * load8(source + i)))
    return out + 2 * size


@inner
def _put_uuid(out: int, source: int, digits: int) -> int:
    """The 36 characters of a UUID."""
    out = _put_hex(out, source, 4, digits)
    for start in (4, 6, 8):
        store8(out, 0x2D)
        out = _put_hex(out + 1, source + start, 2, digits)
    store8(out, 0x2D)
    return _put_hex(out + 1, source + 10, 6, digits)


@inner
def _put_string(out: int, start: int, size: int) -> int:
    if size <= _SHORT_STRING_MAX:
        store8(out, size << 2 | 1)
        out += 1
    else:
        store8(out, _LONG_STRING)
        store32(out + 1, size)
        out += 5
    copy(out, start, size)
    return out + size


@inner
def _put_binary(out: int, value: int, end: int, digits: int) -> int:
    subtype, data = load8(value + 4), value + 5
    if subtype == 4 and end - data == 16:
        store8(out, 36 << 2 | 1)
        return _put_uuid(out + 1, data, digits)
    if subtype not in (0, 2):
        return INVALID
    if subtype == 2 and end - data >= 4:
        data += 4
    store8(out, _BINARY_VALUE)
    store32(out + 1, end - data)
    copy(out + 5, data, end - data)
    return out + 5 + end - data


@inner
def _put_decimal(out: int, value: int) -> int:
    """A decimal128 (binary integer form) whose coefficient fits 63 bits and whose scale is 0 to 38; else -1."""
    coefficient, high = load64(value), load64(value + 8)
    scale = _DECIMAL_BIAS - (high >> 49 & 0x3FFF)
    # The bits above the exponent's tell infinities, NaN and the form for coefficients that are never in use.
    if coefficient < 0 or high & 0x1FFFFFFFFFFFF != 0 or high >> 61 & 3 == 3 or scale < 0 or scale > 38:
        return INVALID
    unscaled = -coefficient if high < 0 else coefficient
    store8(out + 1, scale)
    store64(out + 2, unscaled)
    if coefficient < 10**9 and scale <= 9:
        store8(out, _DECIMAL4)
        return out + 6
    if coefficient < 10**18 and scale <= 18:
        store8(out, _DECIMAL8)
        return out + 10
    store8(out, _DECIMAL16)
    store64(out + 10, unscaled >> 63)
    return out + 18


@inner
def _put_scalar(state: int, type_: int, value: int, end: int) -> int:
    """A value that holds no other; gives the address after it, or -1 for what is left to the reference."""
    out = load64(state + OUT)
    digits = load64(state + FRAGMENTS) + LOWER_HEX[0]
    if type_ == STRING:
        size = end - value - 5
        return _put_string(out, value + 4, size) if valid_utf8(value + 4, end - 1) else INVALID
    if type_ == INT32:
        store8(out, _INT4)
        store32(out + 1, load32(value))
        return out + 5
    if type_ == BOOL:
        store8(out, _FALSE if load8(value) == 0 else _TRUE)
        return out + 1
    if type_ == NULL:
        store8(out, _NULL_VALUE)
        return out + 1
    if type_ == OBJECT_ID:
        store8(out, 24 << 2 | 1)
        return _put_hex(out + 1, value, 12, digits)
    if type_ == BINARY:
        return _put_binary(out, value, end, digits)
    if type_ == DATE:
        milliseconds = load64(value)
        if milliseconds > _LAST_MS or milliseconds < _FIRST_MS:
            return INVALID
        store8(out, _TIMESTAMP_VALUE)
        store64(out + 1, milliseconds * 1000)
        return out + 9
    if type_ in (INT64, DOUBLE):
        store8(out, _INT8 if type_ == INT64 else _DOUBLE_VALUE)
        store64(out + 1, load64(value))
        return out + 9
    return _put_decimal(out, value) if type_ == DECIMAL128 else INVALID


@inner
def _name_number(state: int, name: int, size: int) -> int:
    """The number of a name in the dictionary, which takes it in when it is new; -1 when the dictionary is full."""
    table, names, generation = load64(state + TABLE), load64(state + NAMES), load64(state + GENERATION)
    word = name_word(name, size)
    mixed = (word + size) * 0x9E3779B97F4A7C1
    slot = (mixed >> 40) & (_TABLE_SLOTS - 1)
    while True:
        found = load64(table + 8 * slot)
        if found >> 16 != generation:
            break
        number = (found & 0xFFFF) - 1
        known = names + 16 * number
        if load64(known + 8) == size and equal(load64(known), name, size):
            return number
        slot = (slot + 1) & (_TABLE_SLOTS - 1)
    number = load64(state + _NAME_COUNT)
    if number == _NAMES_MAX:
        return INVALID
    store64(state + _NAME_COUNT, number + 1)
    store64(table + 8 * slot, generation << 16 | (number + 1))
    store64(names + 16 * number, name)
    store64(names + 16 * number + 8, size)
    return number


@inner
def _sort_key(name: int, size: int) -> int:
    """The first eight bytes of an ASCII name as a big-endian number, or -1 for other names."""
    for i in range(8, size):
        if load8(name + i) >= 0x80:
            return INVALID
    if size >= 8:
        key = load64_big_endian(name)
    else:
        key = 0
        for i in range(size):
            key |= load8(name + i) << (56 - 8 * i)
    return INVALID if key & -0x7F7F7F7F7F7F7F80 != 0 else key


@inner
def _compare(left: int, right: int) -> int:
    """The order of two records' names: negative, 0, positive."""
    difference = load64(left + _SORT_KEY) - load64(right + _SORT_KEY)
    if difference != 0:
        return difference
    left_size, right_size = load64(left + _NAME_SIZE), load64(right + _NAME_SIZE)
    shared = min(left_size, right_size)
    for i in range(8, shared):
        difference = load8(load64(left + _NAME) + i) - load8(load64(right + _NAME) + i)
        if difference != 0:
            return difference
    return left_size - right_size


@inner
def _sort(records: int, count: int) -> int:
    """Bring records into the order of their names. 0: they were in order; 1: not; -1: a name occurs twice."""
    moved = 0
    spare = records + _RECORD * count
    for i in range(1, count):
        record = records + _RECORD * i
        order = _compare(record - _RECORD, record)
        if order == 0:
            return INVALID
        if order < 0:
            continue
        moved = 1
        copy(spare, record, _RECORD)
        place = record - _RECORD
        while place >= records and order > 0:
            copy(place + _RECORD, place, _RECORD)
            place -= _RECORD
            if place >= records:
                order = _compare(place, spare)
        if order == 0:
            return INVALID
        copy(place + _RECORD, spare, _RECORD)
    return moved


@inner
def _close(state: int, records: int, count: int, start: int, is_object: bool) -> int:
    """Make the ``count`` values from ``start`` on a container; gives the address after it, or -1."""
    total = load64(state + OUT) - start
    largest, moved = 0, 0
    if is_object:
        for i in range(count):
            record = records + _RECORD * i
            number = _name_number(state, load64(record + _NAME), load64(record + _NAME_SIZE))
            if number < 0:
                return INVALID
            store64(record + _NUMBER, number)
            largest = max(largest, number)
        moved = _sort(records, count)
        if moved < 0:
            return INVALID
    offset_width, id_width = _width(total), _width(largest)
    large = 1 if count > 0xFF else 0
    header_size = 1 + (4 if large else 1) + (count + 1) * offset_width + (count * id_width if is_object else 0)
    values = start + header_size
    if moved == 0:
        move(values, start, total)
    else:
        scratch = load64(state + SORTED)
        out = scratch
        for i in range(count):
            record = records + _RECORD * i
            copy(out, load64(record + _PLACE), load64(record + _SIZE))
            out += load64(record + _SIZE)
        copy(values, scratch, total)
    # The header is made after the values first: its numbers are written four bytes at a time.
    draft = values + total
    if is_object:
        store8(draft, _OBJECT_HEADER | (offset_width - 1) << 2 | (id_width - 1) << 4 | large << 6)
    else:
        store8(draft, _ARRAY_HEADER | (offset_width - 1) << 2 | large << 4)
    out = _put_number(draft + 1, count, 4 if large else 1)
    if is_object:
        for i in range(count):
            out = _put_number(out, load64(records + _RECORD * i + _NUMBER), id_width)
    offset = 0
    for i in range(count):
        out = _put_number(out, offset, offset_width)
        offset += load64(records + _RECORD * i + _SIZE)
    _put_number(out, offset, offset_width)
    copy(start, draft, header_size)
    return draft


@inner
def _add_record(state: int, record: int, name: int, size: int, place: int, is_object: bool) -> bool:  # noqa: PLR0917
    """A record for the value between ``place`` and ``OUT``; false where its name is not ASCII."""
    store64(record + _PLACE, place)
    store64(record + _SIZE, load64(state + OUT) - place)
    if not is_object:
        return True
    key = _sort_key(name, size)
    store64(record + _NAME, name)
    store64(record + _NAME_SIZE, size)
    store64(record + _SORT_KEY, key)
    return key >= 0


@inner
def _document(state: int, document: int, is_object: bool) -> bool:
    """A whole document at ``OUT``, which is moved after it; false: left to the reference."""
    frames, records = load64(state + FRAMES), load64(state + RECORDS)
    depth, count = 0, 0
    start = load64(state + OUT)
    pos, limit = document + 4, document + load32(document) - 1
    while True:
        if pos < limit:
            type_ = load8(pos)
            nul, after = read_element(pos, limit)
            record = records + _RECORD * count
            if after < 0 or record >= load64(state + RECORDS) + RECORDS_SIZE - 2 * _RECORD:
                return False
            if type_ in (OBJECT, ARRAY):
                if depth == _DEPTH_MAX:
                    return False
                frame = frames + _FRAME * depth
                store64(frame, pos)
                store64(frame + 8, limit)
                store64(frame + 16, start)
                store64(frame + 24, count << 1 | is_object)
                depth += 1
                records, count, start, is_object = record, 0, load64(state + OUT), type_ == OBJECT
                pos, limit = nul + 5, after - 1
                continue
            place = load64(state + OUT)
            out = _put_scalar(state, type_, nul + 1, after)
            if out < 0:
                return False
            store64(state + OUT, out)
        else:
            if is_object and count > _FIELDS_MAX:
                return False
            out = _close(state, records, count, start, is_object)
            if out < 0:
                return False
            store64(state + OUT, out)
            if depth == 0:
                return True
            depth -= 1
            frame = frames + _FRAME * depth
            place, after = start, limit + 1
            pos, limit, start = load64(frame), load64(frame + 8), load64(frame + 16)
            is_object = load64(frame + 24) & 1 == 1
            count = load64(frame + 24) >> 1
            record = records
            records = record - _RECORD * count
            nul = find_nul(pos + 1, limit)
        if not _add_record(state, record, pos + 1, nul - pos - 1, place, is_object):
            return False
        count += 1
        pos = after


@inner
def _metadata(state: int, out: int) -> int:
    """The dictionary of names; gives the address after it."""
    names, count = load64(state + NAMES), load64(state + _NAME_COUNT)
    total = 0
    for i in range(count):
        total += load64(names + 16 * i + 8)
    width = _width(max(total, count))
    store8(out, 1 | (width - 1) << 6)
    out = _put_number(out + 1, count, width)
    offset = 0
    for i in range(count):
        out = _put_number(out, offset, width)
        offset += load64(names + 16 * i + 8)
    out = _put_number(out, offset, width)
    for i in range(count):
        size = load64(names + 16 * i + 8)
        copy(out, load64(names + 16 * i), size)
        out += size
    return out


def _make_encode(sources: int) -> Callable[[int], None]:
    @entry_point("void(int64)")
    def encode(job: int) -> None:
        """Encode a column. ``job`` is int64[11]: state, base, starts, ends, types, count; then the targets: values,
        value offsets (int32), metadata, metadata offsets (int32), ok (uint8).

        A row's targets have room for four times its size and ``ROW_ROOM`` bytes; rows follow each other closely.
        """
        if sources == 0:
            return
        state, base = load64(job), load64(job + 8)
        values, metadata = load64(job + 48), load64(job + 64)
        value_out, metadata_out = values, metadata
        store32(load64(job + 56), 0)
        store32(load64(job + 72), 0)
        for i in range(load64(job + 40)):
            start, end = load64(load64(job + 16) + 8 * i), load64(load64(job + 24) + 8 * i)
            type_ = load64(load64(job + 32) + 8 * i)
            store64(state + OUT, value_out)
            store64(state + _NAME_COUNT, 0)
            store64(state + GENERATION, load64(state + GENERATION) + 1)
            ok = False
            if type_ in (OBJECT, ARRAY):
                ok = _document(state, base + start, type_ == OBJECT)
            elif type_ != 0:
                out = _put_scalar(state, type_, base + start, base + end)
                ok = out >= 0
                store64(state + OUT, max(out, value_out))
            if not ok:
                # An absent value, or one for the reference: a VARIANT null holds its place.
                store8(value_out, _NULL_VALUE)
                store64(state + OUT, value_out + 1)
                store64(state + _NAME_COUNT, 0)
            value_out = load64(state + OUT)
            metadata_out = _metadata(state, metadata_out)
            store32(load64(job + 56) + 4 * i + 4, value_out - values)
            store32(load64(job + 72) + 4 * i + 4, metadata_out - metadata)
            store8(load64(job + 80) + i, 1 if ok or type_ == 0 else 0)

    return encode


#: What a row's targets hold beyond four times the row's size.
ROW_ROOM = 64

encode = _make_encode(fingerprint(__name__))
