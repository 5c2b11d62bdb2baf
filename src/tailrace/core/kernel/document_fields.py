"""Where the fields of many documents are, by name, in compiled code.

The documents have been read whole before (``encode_json`` took them), so they are valid and no name occurs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.kernel.arrays import Part
from tailrace.core.kernel.batch import address, as_bytes
from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.memory import load8, load32, load64, store64
from tailrace.core.kernel.scan import INVALID, NULL, equal, name_word, read_element

# Slots of the job, as byte offsets.
_BASE = 0
_STARTS = 8  # int64[count]: the documents
_TYPES = 16  # int64[count]: 0 for a document that is left out
_COUNT = 24
_NAMES = 32  # int64[fields, 3]: first eight bytes, size, address
_FIELDS = 40
_RESULT = 48  # int64[fields, 3, count]: start, end, type
_STOPS = 56  # 1: stop at the first document with a field of another name, and at one that is left out
_SLOTS = 8
_NAME = 24


@inner
def _field(names: int, fields: int, first: int, name: int, size: int) -> int:
    """The number of the field with a name, or -1. ``first`` is where to look first: documents mostly have their fields
    in one order."""
    word = name_word(name, size)
    for step in range(fields):
        at = first + step
        if at >= fields:
            at -= fields
        one = names + _NAME * at
        if load64(one) == word and load64(one + 8) == size and (size <= 8 or equal(load64(one + 16), name, size)):
            return at
    return INVALID


@inner
def _scan_one(job: int, row: int) -> bool:
    """Note the fields of one document. False: it has one of another name."""
    names, fields, count = load64(job + _NAMES), load64(job + _FIELDS), load64(job + _COUNT)
    base, result, stops = load64(job + _BASE), load64(job + _RESULT), load64(job + _STOPS)
    document = base + load64(load64(job + _STARTS) + 8 * row)
    pos, limit, following = document + 4, document + load32(document) - 1, 0
    while pos < limit:
        type_ = load8(pos)
        nul, after = read_element(pos, limit)
        if after < 0:
            return True
        found = _field(names, fields, following, pos + 1, nul - pos - 1)
        if found >= 0:
            place = result + 8 * (3 * count * found + row)
            store64(place, nul + 1 - base)
            store64(place + 8 * count, after - base)
            store64(place + 16 * count, type_)
            following = found + 1
        elif stops != 0 and type_ != NULL:
            return False
        pos = after
    return True


def _make_scan(sources: int) -> Callable[[int, int], int]:
    @entry_point("int64(int64, int64)")
    def scan(job: int, first: int) -> int:
        """Note the fields of the documents from ``first`` on. Returns the number of the one where it stopped."""
        if sources == 0:
            return 0
        for row in range(first, load64(job + _COUNT)):
            if load64(load64(job + _TYPES) + 8 * row) == 0:
                if load64(job + _STOPS) != 0:
                    return row
            elif not _scan_one(job, row):
                return row
        return load64(job + _COUNT)

    return scan


_scan = _make_scan(fingerprint(__name__))
_ROOM: Final = 16


class FieldScan:
    """The fields of the documents that ``documents`` has in ``buffer``; those of type 0 are left out."""

    def __init__(self, buffer: bytes | Bytes, documents: Part) -> None:
        self._buffer = as_bytes(buffer)
        self._starts = np.ascontiguousarray(documents.start, np.int64)
        self._types = np.ascontiguousarray(documents.type, np.int64)
        self._kept: list[Bytes] = []
        self._names = np.empty((_ROOM, 3), np.int64)
        self._found = np.zeros((_ROOM, 3, self._starts.size), np.int64)

    @property
    def fields(self) -> int:
        """How many names are searched for."""
        return len(self._kept)

    def look_for(self, names: Sequence[bytes]) -> None:
        """Look for more names."""
        for name in names:
            if self.fields == len(self._found):
                self._names = np.concatenate((self._names, np.empty_like(self._names)))
                self._found = np.concatenate((self._found, np.zeros_like(self._found)))
            kept = np.frombuffer(name + bytes(8), np.uint8)
            word = int.from_bytes(name[:8].ljust(8, b"\0"), "little", signed=True)
            self._names[self.fields] = word, len(name), address(kept)
            self._kept.append(kept)

    def run(self, first: int = 0, *, stops: bool = False) -> int:
        """Scan the documents from ``first`` on, all of them or, with ``stops``, up to the first one that is left out or
        has a field of another name that is not null. Returns where it stopped."""
        job = np.empty(_SLOTS, np.int64)
        job[:] = [
            address(self._buffer),
            address(self._starts),
            address(self._types),
            self._starts.size,
            address(self._names),
            self.fields,
            address(self._found),
            int(stops),
        ]
        return int(_scan(address(job), first))

    def part(self, field: int) -> Part:
        """Where the values of a field are; type 0 where it is not there."""
        return Part(*self._found[field])


def words(buffer: Bytes, starts: Offsets, size: int) -> Bytes:
    """The ``size`` bytes at each of ``starts``: uint8[n, size]."""
    found: Bytes = buffer[starts[:, None] + np.arange(size)]
    return found
