"""BSON documents to relaxed Extended JSON (v2), in compiled code: the text of PyMongo's ``json_util``, byte for byte.

What it leaves to ``json_util`` (``ok`` false): regular expressions, code, symbols, DBPointers, DBRefs, undefined
values, decimals of more than 18 digits, names that occur twice in a document, text that is not UTF-8, very wide or deep
documents. The text is ASCII: other characters are escaped, as ``json.dumps`` does.

A *state* is a block of int64 slots. The *table* holds the names of the row's documents, to see which occur twice: each
document has a number of its own, and numbers of earlier rows count as empty.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.fragments import (
    BASE64,
    JSON_BINARY,
    JSON_DATE,
    JSON_DECIMAL,
    JSON_DOUBLE,
    JSON_FALSE,
    JSON_INCREMENT,
    JSON_INFINITY,
    JSON_LONG_DATE,
    JSON_MAX_KEY,
    JSON_MIN_KEY,
    JSON_NAN,
    JSON_NULL,
    JSON_OBJECT_ID,
    JSON_SUBTYPE,
    JSON_TIMESTAMP,
    JSON_TRUE,
    LOWER_HEX,
)
from tailrace.core.kernel.memory import copy, load8, load16, load32, load64, store8, store16, store32, store64
from tailrace.core.kernel.number_text import (
    digit_count,
    put_digits,
    put_double,
    put_integer,
    put_plain_decimal,
    put_scientific_decimal,
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
    MAX_KEY,
    MIN_KEY,
    NULL,
    OBJECT,
    OBJECT_ID,
    STRING,
    TIMESTAMP,
    equal,
    load_signed32,
    name_word,
    read_element,
    word_of,
)
from tailrace.core.kernel.utf8 import sequence_size

# Slots of a state, as byte offsets.
FRAGMENTS = 0
OUT = 8  # where the next character goes
POWERS = 16
PAIRS = 24  # the digits of each number below 100
TABLE = 32
_DOCUMENT = 40  # the number of the newest document, counted over all rows
_FIRST = 48  # the number of the row's first document
_NAMES = 56  # names that the row has in the table
FRAMES = 64
STATE_SIZE = 72

_TABLE_SLOTS = 4096
_SLOT = 24  # number of the document, address and size of the name
TABLE_SIZE = _SLOT * _TABLE_SLOTS
_NAMES_MAX = 3000
_DEPTH_MAX = 100
_FRAME = 24  # limit, number of the document or 0 for an array, position after it
FRAMES_SIZE = _FRAME * (_DEPTH_MAX + 1)

#: A row's text has room for this many times its size (a MinKey of two bytes becomes 20), and this many bytes more.
GROWTH = 11
ROW_ROOM = 64

_REF = word_of(b"$ref")
_ONES = 0x0101010101010101
_HIGH_BITS = -0x7F7F7F7F7F7F7F80
_QUOTES = 0x2222222222222222
_BACKSLASHES = 0x5C5C5C5C5C5C5C5C
_SPACES = 0x2020202020202020

_QUOTE = 0x22
_SEPARATOR = 0x202C  # ", " as two bytes
_COLON = 0x203A  # ": "
_INT64_MIN = -(1 << 63)
_INFINITY = 0x7FF << 52
#: 9999-12-31T23:59:59.999Z, the last date that has a text.
_DATE_MAX = 253402300799999
_DAY_MS = 86_400_000
_DECIMAL_BIAS = 6176
_DECIMAL_MAX = 10**18


@inner
def _put(state: int, out: int, at: int, size: int) -> int:
    copy(out, load64(state + FRAGMENTS) + at, size)
    return out + size


@inner
def _put_escape(out: int, code: int, hexadecimal: int) -> int:
    """One UTF-16 code unit as six characters."""
    store16(out, 0x755C)
    store16(out + 2, load16(hexadecimal + 2 * (code >> 8)))
    store16(out + 4, load16(hexadecimal + 2 * (code & 0xFF)))
    return out + 6


@inner
def _short_escape(byte: int) -> int:
    """The letter after the backslash of a character that has a short escape, or 0."""
    if byte in (0x22, 0x5C):
        return byte
    if byte == 0x0A:
        return 0x6E
    if byte == 0x0D:
        return 0x72
    if byte == 0x09:
        return 0x74
    if byte == 0x08:
        return 0x62
    return 0x66 if byte == 0x0C else 0


@inner
def _put_wide(out: int, pos: int, size: int, hexadecimal: int) -> int:
    """A valid UTF-8 sequence of ``size`` bytes, 2 to 4."""
    if size == 2:
        return _put_escape(out, (load8(pos) & 0x1F) << 6 | load8(pos + 1) & 0x3F, hexadecimal)
    low = (load8(pos + 1) & 0x3F) << 6 | load8(pos + 2) & 0x3F
    if size == 3:
        return _put_escape(out, (load8(pos) & 0x0F) << 12 | low, hexadecimal)
    code = ((load8(pos) & 0x07) << 18 | low << 6 | load8(pos + 3) & 0x3F) - 0x10000
    out = _put_escape(out, 0xD800 | code >> 10, hexadecimal)
    return _put_escape(out, 0xDC00 | code & 0x3FF, hexadecimal)


@inner
def _put_text(out: int, pos: int, end: int, hexadecimal: int) -> int:
    """[pos, end) as a JSON string with its quotes; -1 where it is not UTF-8."""
    store8(out, _QUOTE)
    out += 1
    while pos < end:
        if pos + 8 <= end:
            word = load64(pos)
            quotes, slashes = word ^ _QUOTES, word ^ _BACKSLASHES
            # A high bit for each byte that needs care (0x7F among them), and now and then for one above it.
            care = word | (word + _ONES) | (word - _SPACES) | (quotes - _ONES) & ~quotes | (slashes - _ONES) & ~slashes
            if care & _HIGH_BITS == 0:
                store64(out, word)
                pos, out = pos + 8, out + 8
                continue
        byte = load8(pos)
        if byte >= 0x80:
            size = sequence_size(pos, end)
            if size < 0:
                return INVALID
            out = _put_wide(out, pos, size, hexadecimal)
            pos += size
            continue
        letter = _short_escape(byte)
        if letter != 0:
            store16(out, letter << 8 | 0x5C)
            out += 2
        elif byte < 0x20 or byte == 0x7F:
            out = _put_escape(out, byte, hexadecimal)
        else:
            store8(out, byte)
            out += 1
        pos += 1
    store8(out, _QUOTE)
    return out + 1


@inner
def _put_base64(out: int, pos: int, end: int, alphabet: int) -> int:
    while pos < end:
        size = min(end - pos, 3)
        bits = load8(pos) << 16
        if size > 1:
            bits |= load8(pos + 1) << 8
        if size > 2:
            bits |= load8(pos + 2)
        store8(out, load8(alphabet + (bits >> 18)))
        store8(out + 1, load8(alphabet + (bits >> 12 & 63)))
        store8(out + 2, load8(alphabet + (bits >> 6 & 63)) if size > 1 else 0x3D)
        store8(out + 3, load8(alphabet + (bits & 63)) if size > 2 else 0x3D)
        pos, out = pos + 3, out + 4
    return out


@inner
def _put_binary(state: int, out: int, value: int, end: int) -> int:
    subtype, data = load8(value + 4), value + 5
    if subtype == 2:
        # The old form holds its size twice.
        if end - data < 4 or load32(data) != end - data - 4:
            return INVALID
        data += 4
    fragments = load64(state + FRAGMENTS)
    out = _put(state, out, JSON_BINARY[0], JSON_BINARY[1])
    out = _put_base64(out, data, end, fragments + BASE64[0])
    out = _put(state, out, JSON_SUBTYPE[0], JSON_SUBTYPE[1])
    store16(out, load16(fragments + LOWER_HEX[0] + 2 * subtype))
    store32(out + 2, 0x7D7D22)
    return out + 5


@inner
def _put_date(state: int, out: int, milliseconds: int) -> int:
    pairs = load64(state + PAIRS)
    if milliseconds < 0 or milliseconds > _DATE_MAX:
        if milliseconds == _INT64_MIN:
            return INVALID
        out = _put(state, out, JSON_LONG_DATE[0], JSON_LONG_DATE[1])
        out = put_integer(out, milliseconds, pairs)
        store32(out, 0x7D7D22)
        return out + 3
    day, rest = milliseconds // _DAY_MS, milliseconds % _DAY_MS
    # The civil date, in eras of 400 years that begin in March.
    shifted = day + 719468
    era_day = shifted % 146097
    era_year = (era_day - era_day // 1460 + era_day // 36524 - era_day // 146096) // 365
    year_day = era_day - (365 * era_year + era_year // 4 - era_year // 100)
    month = (5 * year_day + 2) // 153
    day_of_month = year_day - (153 * month + 2) // 5 + 1
    year = era_year + shifted // 146097 * 400 + (1 if month >= 10 else 0)
    month = month - 9 if month >= 10 else month + 3
    out = _put(state, out, JSON_DATE[0], JSON_DATE[1])
    out = put_digits(out, year, 4, pairs)
    store8(out, 0x2D)
    put_digits(out + 1, month, 2, pairs)
    store8(out + 3, 0x2D)
    put_digits(out + 4, day_of_month, 2, pairs)
    store8(out + 6, 0x54)
    put_digits(out + 7, rest // 3_600_000, 2, pairs)
    store8(out + 9, 0x3A)
    put_digits(out + 10, rest // 60_000 % 60, 2, pairs)
    store8(out + 12, 0x3A)
    out = put_digits(out + 13, rest // 1000 % 60, 2, pairs)
    if rest % 1000 != 0:
        store8(out, 0x2E)
        out = put_digits(out + 1, rest % 1000, 3, pairs)
    store32(out, 0x7D225A)
    return out + 3


@inner
def _put_number(state: int, out: int, bits: int) -> int:
    """A double; what JSON has no number for is an object."""
    if bits & _INFINITY != _INFINITY:
        return put_double(out, bits, load64(state + POWERS), load64(state + PAIRS))
    out = _put(state, out, JSON_DOUBLE[0], JSON_DOUBLE[1])
    if bits & ~(_INFINITY | _INT64_MIN) != 0:
        return _put(state, out, JSON_NAN[0], JSON_NAN[1])
    if bits < 0:
        store8(out, 0x2D)
        out += 1
    return _put(state, out, JSON_INFINITY[0], JSON_INFINITY[1])


@inner
def _put_decimal(state: int, out: int, value: int) -> int:
    """A decimal128 (binary integer form) of at most 18 digits as Python's ``Decimal`` writes it; else -1."""
    coefficient, high = load64(value), load64(value + 8)
    scale = _DECIMAL_BIAS - (high >> 49 & 0x3FFF)
    # The bits above the exponent's tell infinities, NaN and the form for coefficients that are never in use.
    if coefficient < 0 or coefficient >= _DECIMAL_MAX or high & 0x1FFFFFFFFFFFF != 0 or high >> 61 & 3 == 3:
        return INVALID
    out = _put(state, out, JSON_DECIMAL[0], JSON_DECIMAL[1])
    if high < 0:
        store8(out, 0x2D)
        out += 1
    point = digit_count(coefficient) - scale
    if scale >= 0 and point > -6:
        out = put_plain_decimal(out, coefficient, scale, load64(state + PAIRS))
    else:
        out = put_scientific_decimal(out, coefficient, point - 1, load64(state + PAIRS))
    store16(out, 0x7D22)
    return out + 2


@inner
def _put_scalar(state: int, out: int, type_: int, value: int, end: int) -> int:
    """A value that holds no other; gives the address after its text, or -1 for what is left over."""
    fragments = load64(state + FRAGMENTS)
    if type_ == STRING:
        return _put_text(out, value + 4, end - 1, fragments + LOWER_HEX[0])
    if type_ == INT32:
        return put_integer(out, load_signed32(value), load64(state + PAIRS))
    if type_ == INT64:
        return INVALID if load64(value) == _INT64_MIN else put_integer(out, load64(value), load64(state + PAIRS))
    if type_ == DOUBLE:
        return _put_number(state, out, load64(value))
    if type_ == OBJECT_ID:
        out = _put(state, out, JSON_OBJECT_ID[0], JSON_OBJECT_ID[1])
        for i in range(12):
            store16(out + 2 * i, load16(fragments + LOWER_HEX[0] + 2 * load8(value + i)))
        store16(out + 24, 0x7D22)
        return out + 26
    if type_ == DATE:
        return _put_date(state, out, load64(value))
    if type_ == BOOL:
        if load8(value) > 1:
            return INVALID
        is_true = load8(value) == 1
        return _put(state, out, JSON_TRUE[0] if is_true else JSON_FALSE[0], JSON_TRUE[1] if is_true else JSON_FALSE[1])
    if type_ == NULL:
        return _put(state, out, JSON_NULL[0], JSON_NULL[1])
    return _put_rare(state, out, type_, value, end)


@inner
def _put_rare(state: int, out: int, type_: int, value: int, end: int) -> int:
    if type_ == BINARY:
        return _put_binary(state, out, value, end)
    if type_ == DECIMAL128:
        return _put_decimal(state, out, value)
    if type_ == TIMESTAMP:
        out = _put(state, out, JSON_TIMESTAMP[0], JSON_TIMESTAMP[1])
        out = put_integer(out, load32(value + 4), load64(state + PAIRS))
        out = _put(state, out, JSON_INCREMENT[0], JSON_INCREMENT[1])
        out = put_integer(out, load32(value), load64(state + PAIRS))
        store16(out, 0x7D7D)
        return out + 2
    if type_ == MIN_KEY:
        return _put(state, out, JSON_MIN_KEY[0], JSON_MIN_KEY[1])
    return _put(state, out, JSON_MAX_KEY[0], JSON_MAX_KEY[1]) if type_ == MAX_KEY else INVALID


@inner
def _is_new(state: int, document: int, name: int, size: int) -> bool:
    """Add a name. Returns whether the document did not have it yet; false also if the table is full."""
    count = load64(state + _NAMES)
    if count == _NAMES_MAX:
        return False
    store64(state + _NAMES, count + 1)
    table, first = load64(state + TABLE), load64(state + _FIRST)
    mixed = (name_word(name, size) + size + document * 0x1F35A7BD) * 0x9E3779B97F4A7C1
    place = (mixed >> 40) & (_TABLE_SLOTS - 1)
    while True:
        slot = table + _SLOT * place
        owner = load64(slot)
        if owner < first:
            break
        if owner == document and load64(slot + 16) == size and equal(load64(slot + 8), name, size):
            return False
        place = (place + 1) & (_TABLE_SLOTS - 1)
    store64(slot, document)
    store64(slot + 8, name)
    store64(slot + 16, size)
    return True


@inner
def _put_name(state: int, out: int, document: int, name: int, size: int) -> int:
    """A field's name and the colon; -1 for names that are left over."""
    if (size == 4 and name_word(name, size) == _REF) or not _is_new(state, document, name, size):
        return INVALID
    out = _put_text(out, name, name + size, load64(state + FRAGMENTS) + LOWER_HEX[0])
    if out < 0:
        return INVALID
    store16(out, _COLON)
    return out + 2


@inner
def _begin(state: int, is_object: bool) -> int:
    """The number of a document that begins; 0 for an array."""
    if not is_object:
        return 0
    number = load64(state + _DOCUMENT) + 1
    store64(state + _DOCUMENT, number)
    return number


@inner
def _put_document(state: int, out: int, start: int, is_object: bool) -> int:
    """A whole document or array; gives the address after its text, or -1."""
    frames, depth = load64(state + FRAMES), 0
    document = _begin(state, is_object)
    store8(out, 0x7B if is_object else 0x5B)
    out += 1
    pos, limit, is_first = start + 4, start + load32(start) - 1, True
    while True:
        if pos >= limit:
            store8(out, 0x7D if document != 0 else 0x5D)
            out += 1
            if depth == 0:
                return out
            depth -= 1
            frame = frames + _FRAME * depth
            limit, document, pos, is_first = load64(frame), load64(frame + 8), load64(frame + 16), False
            continue
        type_ = load8(pos)
        nul, after = read_element(pos, limit)
        if after < 0:
            return INVALID
        if not is_first:
            store16(out, _SEPARATOR)
            out += 2
        is_first = False
        if document != 0:
            out = _put_name(state, out, document, pos + 1, nul - pos - 1)
            if out < 0:
                return INVALID
        if type_ in (OBJECT, ARRAY):
            if depth == _DEPTH_MAX:
                return INVALID
            frame = frames + _FRAME * depth
            store64(frame, limit)
            store64(frame + 8, document)
            store64(frame + 16, after)
            depth += 1
            document = _begin(state, type_ == OBJECT)
            store8(out, 0x7B if document != 0 else 0x5B)
            out += 1
            pos, limit, is_first = nul + 5, after - 1, True
            continue
        out = _put_scalar(state, out, type_, nul + 1, after)
        if out < 0:
            return INVALID
        pos = after


def _make_encode(sources: int) -> Callable[[int], None]:
    @entry_point("void(int64)")
    def encode(job: int) -> None:
        """Write a column. ``job`` is int64[9]: state, base, starts, ends, types, count; then the targets: text, its
        offsets (int32), ok (uint8).

        The text has room for ``GROWTH`` times the size of each row and ``ROW_ROOM`` bytes; rows follow each other.
        """
        if sources == 0:
            return
        state, base, text = load64(job), load64(job + 8), load64(job + 48)
        out = text
        store32(load64(job + 56), 0)
        for i in range(load64(job + 40)):
            start, end = base + load64(load64(job + 16) + 8 * i), base + load64(load64(job + 24) + 8 * i)
            type_ = load64(load64(job + 32) + 8 * i)
            store64(state + _FIRST, load64(state + _DOCUMENT) + 1)
            store64(state + _NAMES, 0)
            after = out
            if type_ in (OBJECT, ARRAY):
                after = _put_document(state, out, start, type_ == OBJECT)
            elif type_ != 0:
                after = _put_scalar(state, out, type_, start, end)
            out = max(out, after)
            store32(load64(job + 56) + 4 * i + 4, out - text)
            store8(load64(job + 64) + i, 1 if after >= 0 else 0)

    return encode


encode = _make_encode(fingerprint(__name__))
