"""Memory that compiled code reads programs from."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from tailrace.core.event.event_block import Bytes
from tailrace.core.kernel.batch import address


class Pool:
    """Bytes that compiled code reads at addresses; places in the pool become addresses at the end."""

    def __init__(self) -> None:
        self._data = bytearray(8)
        self._pointers: list[int] = []

    def bytes(self, data: bytes) -> int:
        """Keep a name or a value; gives its place in the pool."""
        place = len(self._data)
        # Names are compared by eight bytes at a time, so that many must be there.
        self._data += data + bytes(-len(data) % 8 + 8)
        return place

    def words(self, words: Sequence[int], pointers: Sequence[int]) -> int:
        """Words, of which those numbered in ``pointers`` are places in this pool."""
        place = len(self._data)
        self._data += struct.pack(f"<{len(words)}q", *words)
        self._pointers += [place + 8 * number for number in pointers]
        return place

    def table(self, rows: Sequence[Sequence[int]], pointers: Sequence[int]) -> int:
        """Rows of words one after another, with the same places in each."""
        width = len(rows[0]) if rows else 0
        flat = [word for row in rows for word in row]
        return self.words(flat, [width * row + one for row in range(len(rows)) for one in pointers])

    def placed(self) -> Bytes:
        """The pool as one array, whose pointers are addresses in it."""
        array: Bytes = np.frombuffer(bytearray(self._data), np.uint8)
        base = address(array)
        for place in self._pointers:
            word = array[place : place + 8].view(np.int64)
            word += base
        return array
