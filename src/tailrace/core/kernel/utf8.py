"""UTF-8 by address, in compiled code."""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import load8, load64
from tailrace.core.kernel.scan import INVALID

_HIGH_BITS = -0x7F7F7F7F7F7F7F80


@inner
def sequence_size(pos: int, end: int) -> int:
    """The size of the valid UTF-8 sequence at ``pos`` that begins with a byte of 0x80 or more; or -1."""
    first = load8(pos)
    if first < 0xC2 or first > 0xF4:
        return INVALID
    size = 2 if first < 0xE0 else (3 if first < 0xF0 else 4)
    if pos + size > end:
        return INVALID
    lowest = 0xA0 if first == 0xE0 else (0x90 if first == 0xF0 else 0x80)
    highest = 0x9F if first == 0xED else (0x8F if first == 0xF4 else 0xBF)
    if load8(pos + 1) < lowest or load8(pos + 1) > highest:
        return INVALID
    for i in range(2, size):
        if load8(pos + i) & 0xC0 != 0x80:
            return INVALID
    return size


@inner
def valid_utf8(start: int, end: int) -> bool:
    """Whether [start, end) is valid UTF-8."""
    pos = start
    while pos < end:
        if pos + 8 <= end and load64(pos) & _HIGH_BITS == 0:
            pos += 8
        elif load8(pos) < 0x80:
            pos += 1
        else:
            size = sequence_size(pos, end)
            if size < 0:
                return False
            pos += size
    return True
