"""Documents that lie one after another in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import overload

from tailrace.core import raw_bson


class RunOfDocuments(Sequence[bytes]):
    """The documents of a buffer; none of them is an object of its own before it is asked for.

    ``buffer``  BSON documents, one after another. Raises OplogFormatError at first use where it is something else
    """

    def __init__(self, buffer: bytes) -> None:
        self.buffer = buffer

    @cached_property
    def _bounds(self) -> list[int]:
        """Where each document begins, and where the last one ends."""
        bounds, size = [0], len(self.buffer)
        while bounds[-1] < size:
            bounds.append(raw_bson.document_end(self.buffer, bounds[-1]))
        return bounds

    def __bool__(self) -> bool:
        return bool(self.buffer)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[bytes]:
        return (self.buffer[start:end] for start, end in pairwise(self._bounds))

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self.buffer[start:end] for start, end in list(pairwise(self._bounds))[index]]
        place = range(len(self))[index]
        return self.buffer[self._bounds[place] : self._bounds[place + 1]]
