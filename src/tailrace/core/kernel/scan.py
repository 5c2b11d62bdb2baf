"""BSON by address, in compiled code: the same cuts as ``tailrace.core.raw_bson``, with -1 in place of an exception.

Every function takes the address where its document's final NUL lies (``limit``) and reads nothing at or after it before
it has compared. -1 means "not valid BSON"; the caller gives the entry to the plain stages, which raise the proper
error. Where this module is stricter than ``tailrace.core.raw_bson``, the plain stages decide in the same way.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import load8, load32, load64, trailing_zeros

INVALID = -1

DOUBLE = 0x01
STRING = 0x02
OBJECT = 0x03
ARRAY = 0x04
BINARY = 0x05
UNDEFINED = 0x06
OBJECT_ID = 0x07
BOOL = 0x08
DATE = 0x09
NULL = 0x0A
REGEX = 0x0B
DB_POINTER = 0x0C
CODE = 0x0D
SYMBOL = 0x0E
CODE_WITH_SCOPE = 0x0F
INT32 = 0x10
TIMESTAMP = 0x11
INT64 = 0x12
DECIMAL128 = 0x13
MIN_KEY = 0xFF
MAX_KEY = 0x7F

_ONES = 0x0101010101010101
_HIGH_BITS = -0x7F7F7F7F7F7F7F80  # 0x8080808080808080 as a signed number


@inner
def find_nul(start: int, limit: int) -> int:
    """The address of the first NUL in [start, limit), or -1. Eight bytes at a step while at least eight are left."""
    pos = start
    while pos + 8 <= limit:
        word = load64(pos)
        found = (word - _ONES) & ~word & _HIGH_BITS
        if found != 0:
            return pos + (trailing_zeros(found) >> 3)
        pos += 8
    while pos < limit:
        if load8(pos) == 0:
            return pos
        pos += 1
    return INVALID


@inner
def signed32(value: int) -> int:
    """The int32 that the low 32 bits of ``value`` hold."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@inner
def load_signed32(address: int) -> int:
    """The signed 32-bit number at an address."""
    return signed32(load32(address))


@inner
def document_end(start: int, limit: int) -> int:
    """After the final NUL of the document at ``start``, which must end at or before ``limit``; or -1."""
    if limit - start < 5:
        return INVALID
    length = load_signed32(start)
    if length < 5 or length > limit - start or load8(start + length - 1) != 0:
        return INVALID
    return start + length


@inner
def fixed_size(type_: int) -> int:
    """The size of a value whose type alone tells it, or -1."""
    if type_ in (DOUBLE, DATE, TIMESTAMP, INT64):
        return 8
    if type_ == OBJECT_ID:
        return 12
    if type_ == INT32:
        return 4
    if type_ == BOOL:
        return 1
    if type_ in (NULL, UNDEFINED, MIN_KEY, MAX_KEY):
        return 0
    if type_ == DECIMAL128:
        return 16
    return INVALID


@inner
def value_end(type_: int, start: int, limit: int) -> int:
    """After the value of type ``type_`` at ``start``, at most ``limit``; or -1."""
    size = fixed_size(type_)
    if size < 0:
        if type_ == REGEX:
            nul = find_nul(start, limit)
            nul = INVALID if nul < 0 else find_nul(nul + 1, limit)
            return INVALID if nul < 0 else nul + 1
        if limit - start < 5:
            return INVALID
        length = load_signed32(start)
        if type_ in (OBJECT, ARRAY):
            return document_end(start, limit)
        if type_ in (STRING, CODE, SYMBOL):
            if length < 1 or length > limit - start - 4 or load8(start + 3 + length) != 0:
                return INVALID
            return start + 4 + length
        if type_ == BINARY:
            size = length + 5
        elif type_ == CODE_WITH_SCOPE:
            size = length
        elif type_ == DB_POINTER:
            size = length + 16
        else:
            return INVALID
        if length < 0 or size < 5:
            return INVALID
    return INVALID if size > limit - start else start + size


@inner
def read_element(start: int, limit: int) -> tuple[int, int]:
    """The element at ``start``: the address of the NUL that ends its name, and after its value, at most ``limit``; this
    one is -1 where it is not as BSON has it."""
    nul = find_nul(start + 1, limit)
    return nul, INVALID if nul < 0 else value_end(load8(start), nul + 1, limit)


@inner
def name_word(name: int, length: int) -> int:
    """The first eight bytes of a name as a little-endian number: names are compared as numbers."""
    if length >= 8:
        return load64(name)
    word = 0
    for i in range(length):
        word |= load8(name + i) << (8 * i)
    return word


@inner
def equal(left: int, right: int, size: int) -> bool:
    """Whether two runs of bytes are the same."""
    i = 0
    while i + 8 <= size:
        if load64(left + i) != load64(right + i):
            return False
        i += 8
    while i < size:
        if load8(left + i) != load8(right + i):
            return False
        i += 1
    return True


def word_of(name: bytes) -> int:
    """What ``name_word`` gives for ``name``, for use as a constant."""
    return int.from_bytes(name[:8].ljust(8, b"\0"), "little", signed=True)
