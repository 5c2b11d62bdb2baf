"""Which entries of a batch have which namespace, in compiled code: the index by which many streams get their entries.

The plain form is ``tailrace.read.tail.entry_index``. Only an entry's length is read, and its fields up to the operation
and the namespace; of a no-op also whether it announces something, in ``o2``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.memory import load8, load32, load64, store64
from tailrace.core.kernel.scan import STRING, document_end, equal, name_word, read_element, word_of

#: In place of a group's number: a command, a no-op with an ``o2``, or another entry that the plain form has to decide.
COMMAND: Final = -1

_OP = word_of(b"op")
_NS = word_of(b"ns")
_O2 = word_of(b"o2")
_LETTER_C = 0x63
_LETTER_N = 0x6E
#: Servers' entries are longer. If there are shorter ones, room is made for the largest possible number.
_ENTRY_MIN: Final = 64
_DOCUMENT_MIN: Final = 5
_MIXER = 0x61C8864680B583EB


@inner
def _hash(start: int, size: int) -> int:
    mixed = size
    pos = 0
    while pos + 8 <= size:
        mixed = (mixed ^ load64(start + pos)) * _MIXER
        mixed ^= mixed >> 29
        pos += 8
    if pos < size:
        mixed = (mixed ^ name_word(start + pos, size - pos)) * _MIXER
        mixed ^= mixed >> 29
    return mixed


@inner
def _namespace(start: int, end: int) -> int:
    """The address of the namespace's value; 0 where there is none, -1 where the plain form decides."""
    limit = end - 1
    pos = start + 4
    operation = namespace = 0
    is_no_op = False
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return -1
        if nul - pos == 3:
            word = name_word(pos + 1, 2)
            if word == _OP and operation == 0:
                letter = load8(nul + 5) if load8(pos) == STRING and load32(nul + 1) == 2 else 0
                if load8(pos) != STRING or letter == _LETTER_C:
                    return -1
                operation, is_no_op = nul + 1, letter == _LETTER_N
            elif word == _NS and namespace == 0:
                if load8(pos) != STRING:
                    return -1
                namespace = nul + 1
            elif word == _O2 and is_no_op:
                return -1
            if operation != 0 and namespace != 0 and not is_no_op:
                return namespace
        pos = after
    return namespace if operation != 0 else -1


@inner
def _group_of(namespace: int, table: int, mask: int, groups: int, count: int) -> int:
    """The number of the group with this namespace, or ``count`` for a new one, which is added."""
    start, size = (namespace + 4, load32(namespace) - 1) if namespace != 0 else (namespace, 0)
    slot = _hash(start, size) & mask
    while True:
        found = load64(table + 8 * slot) - 1
        if found < 0:
            store64(table + 8 * slot, count + 1)
            store64(groups + 16 * count, start)
            store64(groups + 16 * count + 8, size)
            return count
        if load64(groups + 16 * found + 8) == size and equal(load64(groups + 16 * found), start, size):
            return found
        slot = (slot + 1) & mask


def _make_index(sources: int) -> Callable[..., int]:
    @entry_point("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
    def index(  # noqa: PLR0917
        raw: int, size: int, starts: int, numbers: int, room: int, table: int, mask: int, groups: int
    ) -> int:
        """Write each entry's place to ``starts`` and the number of its group to ``numbers``, and for each group the
        place and length of its namespace. Returns the number of entries; -1: more than ``room``, -2: a length leads
        astray."""
        if sources == 0:
            return 0
        pos, end, count, named = raw, raw + size, 0, 0
        while pos < end:
            after = document_end(pos, end)
            if after < 0:
                return -2
            if count == room:
                return -1
            store64(starts + 8 * count, pos - raw)
            namespace = _namespace(pos, after)
            number = COMMAND
            if namespace >= 0:
                number = _group_of(namespace, table, mask, groups, named)
                if number == named:
                    named += 1
            store64(numbers + 8 * count, number)
            count += 1
            pos = after
        return count

    return index


_index = _make_index(fingerprint(__name__))


def index_entries(raw: bytes) -> tuple[Any, Any, list[bytes]] | None:
    """Where each entry begins (int64[n + 1], the last one is the end), the number of its group (int64[n]: ``COMMAND``,
    or the place of its namespace in the list), and the namespaces; ``None`` where a length leads astray."""
    size = len(raw)
    address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0] if raw else 0
    for entry_min in (_ENTRY_MIN, _DOCUMENT_MIN):
        room = size // entry_min + 1
        starts, numbers = np.empty(room + 1, np.int64), np.empty(room, np.int64)
        slots = 1 << (2 * room).bit_length()
        table, groups = np.zeros(slots, np.int64), np.zeros((room, 2), np.int64)
        places = (array.__array_interface__["data"][0] for array in (starts, numbers, table, groups))
        starts_at, numbers_at, table_at, groups_at = places
        count = _index(address, size, starts_at, numbers_at, room, table_at, slots - 1, groups_at)
        if count != -1:
            break
    if count < 0:
        return None
    starts[count] = size
    numbers = numbers[:count].copy()
    named = int(numbers.max(initial=-1)) + 1
    # A group without a namespace has no address.
    where = [(start - address, length) for start, length in groups[:named].tolist()]
    return starts[: count + 1].copy(), numbers, [raw[at : at + length] if length else b"" for at, length in where]
