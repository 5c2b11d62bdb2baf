"""Document keys as KeyString bytes, in compiled code (semantics 1.3-1.5). ``tailrace.core.event`` has the reference.

A *writer* is a block of int64 slots: where the next byte goes, and the type bits so far. The bytes go to scratch memory
that is at least ``2 * size + 64`` long for a document of ``size`` bytes, which no encoding below exceeds.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import (
    as_bits,
    as_double,
    copy,
    leading_zeros,
    load8,
    load32,
    load64,
    store8,
    store32_big_endian,
    store64,
    store64_big_endian,
)
from tailrace.core.kernel.scan import (
    ARRAY,
    BINARY,
    BOOL,
    DATE,
    DOUBLE,
    INT32,
    INT64,
    NULL,
    OBJECT,
    OBJECT_ID,
    STRING,
    SYMBOL,
    TIMESTAMP,
    read_element,
    signed32,
)

# Slots of a writer, as byte offsets.
_NEXT = 0
_BITS = 8  # type bits, the first one lowest
_BIT_COUNT = 16
WRITER_SIZE = 24

#: How many type bits a document key may hold; the plain stages take those with more.
_BIT_COUNT_MAX = 56
_DEPTH_MAX = 16
#: The stack of open objects: the address of each one's end, the type of what encloses it.
STACK_SIZE = 16 * _DEPTH_MAX

_LOWEST_LONG = -0x8000000000000000
_TWO_TO_63 = 9223372036854775808.0
_TWO_TO_MINUS_255 = 2.0**-255
_TWO_TO_256 = 2.0**256


@inner
def writer_open(writer: int, target: int) -> None:
    """Begin a key string at ``target``, with no bits of types yet."""
    store64(writer + _NEXT, target)
    store64(writer + _BITS, 0)
    store64(writer + _BIT_COUNT, 0)


@inner
def writer_next(writer: int) -> int:
    """The address that the next byte goes to."""
    return load64(writer + _NEXT)


@inner
def put_byte(writer: int, value: int) -> None:
    """Append one byte."""
    target = load64(writer + _NEXT)
    store8(target, value)
    store64(writer + _NEXT, target + 1)


@inner
def put_bits(writer: int, bits: int, count: int) -> None:
    """Append type bits; ``bits`` has the first one lowest."""
    before = load64(writer + _BIT_COUNT)
    store64(writer + _BITS, load64(writer + _BITS) | (bits << before))
    store64(writer + _BIT_COUNT, before + count)


@inner
def put_bytes(writer: int, source: int, size: int) -> None:
    """Append ``size`` bytes from ``source``."""
    target = load64(writer + _NEXT)
    copy(target, source, size)
    store64(writer + _NEXT, target + size)


@inner
def _put_escaped(writer: int, source: int, size: int) -> None:
    """A string's bytes, each NUL as 00 FF, then 00."""
    target = load64(writer + _NEXT)
    for i in range(size):
        byte = load8(source + i)
        store8(target, byte)
        target += 1
        if byte == 0:
            store8(target, 0xFF)
            target += 1
    store8(target, 0)
    store64(writer + _NEXT, target + 1)


@inner
def _put_words(writer: int, type_: int, body: int, size: int, negative: bool) -> None:
    """A number: its type byte and the low ``size`` bytes of ``body``, inverted when it is negative."""
    target = load64(writer + _NEXT)
    store8(target, type_)
    word = ~body if negative else body
    # Shifted to the top, so that the wanted bytes come first; the rest is overwritten by what follows.
    store64_big_endian(target + 1, word << (64 - 8 * size))
    store64(writer + _NEXT, target + 1 + size)


@inner
def put_integer(writer: int, number: int) -> None:
    """An integer other than -2^63: the magnitude shifted left by one, in as few bytes as hold it."""
    if number == 0:
        put_byte(writer, 0x29)
        return
    negative = number < 0
    body = (-number if negative else number) << 1
    size = (71 - leading_zeros(body)) >> 3
    _put_words(writer, 0x28 - size if negative else 0x2A + size, body, size, negative)


@inner
def _put_double(writer: int, bits: int) -> None:
    """A double, its type bits included (1.4: by magnitude; DCM is 0 for all doubles)."""
    number = as_double(bits)
    negative = bits < 0
    size = abs(number)
    if number == 0.0:
        put_byte(writer, 0x29)
        if negative:
            put_bits(writer, 0b00011, 5)
            return
    elif number != number:  # noqa: PLR0124 - NaN
        put_byte(writer, 0x1E)
    elif size >= _TWO_TO_63:
        body = -1 if size - size != 0.0 else (as_bits(size) << 1) & 0x7FFFFFFFFFFFFFFF
        _put_words(writer, 0x1F if negative else 0x33, body, 8, negative)
    elif size < 1.0:
        if size >= _TWO_TO_MINUS_255:
            body = as_bits(size) << 2
        else:
            body = (as_bits(size * _TWO_TO_256) << 1) + 0x4000000000000000
        _put_words(writer, 0x28 if negative else 0x2A, body, 8, negative)
    else:
        whole = int(size)
        if float(whole) == size:
            put_integer(writer, -whole if negative else whole)
        else:
            free = leading_zeros(whole << 1) >> 3
            scaled = size
            for _ in range(free):
                scaled *= 256.0
            body = int(scaled) + ((whole + 1) << (8 * free))
            _put_words(writer, 0x20 + free if negative else 0x32 - free, body, 8, negative)
    put_bits(writer, 0b01, 2)


@inner
def _put_number(writer: int, type_: int, value: int) -> None:
    if type_ == INT32:
        put_integer(writer, signed32(load32(value)))
        put_bits(writer, 0b00, 2)
    elif type_ == INT64:
        number = load64(value)
        if number == _LOWEST_LONG:
            _put_words(writer, 0x1F, as_bits(_TWO_TO_63) << 1 & 0x7FFFFFFFFFFFFFFF, 8, True)
        else:
            put_integer(writer, number)
        put_bits(writer, 0b10, 2)
    else:
        _put_double(writer, load64(value))


@inner
def _put_binary(writer: int, value: int) -> None:
    length = signed32(load32(value))
    put_byte(writer, 0x5A)
    if length < 255:
        put_byte(writer, length)
    else:
        put_byte(writer, 0xFF)
        store32_big_endian(writer_next(writer), length)
        store64(writer + _NEXT, writer_next(writer) + 4)
    put_bytes(writer, value + 4, length + 1)


@inner
def generic_type(type_: int) -> int:
    """The byte that stands before a field's name, by BSON type; 0 for the types that are left to the plain stages."""
    if type_ in (INT32, INT64, DOUBLE):
        return 0x1E
    if type_ == OBJECT_ID:
        return 0x64
    if type_ in (STRING, SYMBOL):
        return 0x3C
    if type_ == BINARY:
        return 0x5A
    if type_ == OBJECT:
        return 0x46
    if type_ == ARRAY:
        return 0x50
    if type_ == DATE:
        return 0x78
    if type_ == BOOL:
        return 0x6E
    if type_ == TIMESTAMP:
        return 0x82
    return 0x14 if type_ == NULL else 0


@inner
def _put_scalar(writer: int, type_: int, value: int, end: int) -> bool:
    """A value that holds no other; false where its bytes are not as they should be."""
    if type_ in (INT32, INT64, DOUBLE):
        _put_number(writer, type_, value)
    elif type_ == OBJECT_ID:
        put_byte(writer, 0x64)
        put_bytes(writer, value, 12)
    elif type_ in (STRING, SYMBOL):
        put_byte(writer, 0x3C)
        _put_escaped(writer, value + 4, end - value - 5)
        put_bits(writer, 1 if type_ == SYMBOL else 0, 1)
    elif type_ == BINARY:
        _put_binary(writer, value)
    elif type_ == BOOL:
        byte = load8(value)
        put_byte(writer, 0x6E + byte)
        return byte <= 1
    elif type_ == NULL:
        put_byte(writer, 0x14)
    else:
        is_date = type_ == DATE
        put_byte(writer, 0x78 if is_date else 0x82)
        word = load64(value)
        store64_big_endian(writer_next(writer), word ^ _LOWEST_LONG if is_date else word)
        store64(writer + _NEXT, writer_next(writer) + 8)
    return True


@inner
def put_document(writer: int, document: int, end: int, stack: int) -> bool:
    """The fields of a checked document and the closing 00 (its own type byte is the caller's). False: left undone."""
    depth = 0
    enclosing = OBJECT
    limit = end - 1
    pos = document + 4
    while True:
        if pos == limit:
            put_byte(writer, 0)
            if depth == 0:
                return True
            depth -= 1
            pos = limit + 1
            limit = load64(stack + 16 * depth)
            enclosing = load64(stack + 16 * depth + 8)
            continue
        type_ = load8(pos)
        generic = generic_type(type_)
        nul, after = read_element(pos, limit)
        if generic == 0 or after < 0 or load64(writer + _BIT_COUNT) > _BIT_COUNT_MAX:
            return False
        if enclosing == OBJECT:
            put_byte(writer, generic)
            put_bytes(writer, pos + 1, nul - pos)
        if type_ in (OBJECT, ARRAY):
            if depth == _DEPTH_MAX:
                return False
            store64(stack + 16 * depth, limit)
            store64(stack + 16 * depth + 8, enclosing)
            depth += 1
            enclosing, limit, pos = type_, after - 1, nul + 5
            put_byte(writer, generic)
        else:
            if not _put_scalar(writer, type_, nul + 1, after):
                return False
            pos = after


@inner
def type_bits(writer: int, target: int) -> int:
    """The stored form of the type bits at ``target``; its size, 0 when all bits are zero (then nothing is stored)."""
    bits = load64(writer + _BITS)
    if bits == 0:
        return 0
    size = (load64(writer + _BIT_COUNT) + 7) >> 3
    if size == 1 and bits < 0x80:
        store8(target, bits)
        return 1
    store8(target, 0x80 | size)
    store64(target + 1, bits)
    return 1 + size
