"""The element ``_id`` of an event: its resume token, in compiled code."""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.fragments import DATA, HEX, ID, TYPE_BITS
from tailrace.core.kernel.key_string import type_bits, writer_next
from tailrace.core.kernel.memory import copy, load8, load16, store8, store16, store32


@inner
def put_constant(out: int, fragments: int, fragment: tuple[int, int]) -> int:
    """A constant of ``tailrace.core.kernel.fragments``, whose texts lie at ``fragments``."""
    copy(out, fragments + fragment[0], fragment[1])
    return out + fragment[1]


@inner
def put_token_element(out: int, fragments: int, writer: int, key_string: int) -> int:
    """The element from the key string that the writer has written, which begins at ``key_string``."""
    size = writer_next(writer) - key_string
    out = put_constant(out, fragments, ID)
    document = out
    out = put_constant(out + 4, fragments, DATA)
    store32(out, 2 * size + 1)
    out += 4
    digits = fragments + HEX[0]
    for i in range(size):
        store16(out + 2 * i, load16(digits + 2 * load8(key_string + i)))
    out += 2 * size
    store8(out, 0)
    out += 1
    bits = writer_next(writer)
    bits_size = type_bits(writer, bits)
    if bits_size > 0:
        out = put_constant(out, fragments, TYPE_BITS)
        store32(out, bits_size)
        store8(out + 4, 0)
        copy(out + 5, bits, bits_size)
        out += 5 + bits_size
    store8(out, 0)
    store32(document, out + 1 - document)
    return out + 1
