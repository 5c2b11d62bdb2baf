"""The last batches of an image state, which are in memory and not on disk yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

DocumentsByKey = Mapping[bytes, bytes | None]
#: About what Python needs for a document in addition to its bytes.
_OVERHEAD = 200


class RecentBatch(NamedTuple):
    """``before``: for each key that the batch changed, the document that was there."""

    number: int
    before: DocumentsByKey


class RecentBatches:
    """Batches and what they have changed.

    ``documents``  the newest document of each key that one of them changed; ``None``: there is none
    ``size``       about how much memory they take, in bytes
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.batches: list[RecentBatch] = []
        self.documents: dict[bytes, bytes | None] = {}
        self.size = 0
        self._since = 0.0

    def add(self, number: int, before: DocumentsByKey, after: DocumentsByKey) -> None:
        """Add a batch. ``before`` and ``after`` have the same keys."""
        size = sum(len(document) for part in (before, after) for document in part.values() if document is not None)
        if not self.batches:
            self._since = self._clock()
        self.batches.append(RecentBatch(number, before))
        self.documents.update(after)
        self.size += size + 2 * _OVERHEAD * len(after)

    @property
    def age(self) -> float:
        """Seconds since the oldest of them was added."""
        return self._clock() - self._since if self.batches else 0.0

    def undo_after(self, number: int) -> None:
        """Undo every batch after ``number``."""
        while self.batches and self.batches[-1].number > number:
            self.documents.update(self.batches.pop().before)
        if not self.batches:
            self.clear()

    def clear(self) -> None:
        """Forget them all."""
        self.batches, self.documents, self.size = [], {}, 0
