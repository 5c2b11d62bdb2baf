"""What goes into one reply: how many documents, and how many bytes (measured on 6.0.27 to the byte)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tailrace.core.event.event_block import EventBlock, Offsets
from tailrace.core.raw_bson import ARRAY, encode_document, encode_element

#: A reply takes another document only while it stays within this.
REPLY_BYTES_MAX: Final = 16 * 1024 * 1024
#: What the reply's buffer holds before the array's first document: the message's header and flags, and the reply's own
#: elements up to the array's. "firstBatch" has a letter more than "nextBatch".
_HEAD_BYTES: Final = {"firstBatch": 53, "nextBatch": 52}


class ReplyEvents:
    """The documents of one reply. ``field`` is "firstBatch" or "nextBatch"; ``documents_max`` ``None`` is no limit.

    The first document always fits. A nextBatch keeps room for the resume token of the document asked about; a
    firstBatch does not.
    """

    def __init__(self, field: str, documents_max: int | None) -> None:
        self.field = field
        self._documents_max = documents_max
        self._elements: list[bytes] = []
        self._used = _HEAD_BYTES[field]
        self._token_counts = field == "nextBatch"
        #: The token of the last document.
        self.last_token: bytes | None = None

    def __len__(self) -> int:
        return len(self._elements)

    @property
    def is_full(self) -> bool:
        """Whether it holds as many documents as it may."""
        return self._documents_max is not None and len(self._elements) >= self._documents_max

    def add(self, block: EventBlock) -> int:
        """Take in as many of the events as there is room for. Returns how many; the others must wait for the next
        reply."""
        count, held = len(block), len(self._elements)
        if count == 1:
            return self._add_one(block, held)
        if self._documents_max is not None:
            count = min(count, self._documents_max - held)
        sizes = np.diff(block.offsets[: count + 1])
        numbers = [b"\x03%d\x00" % number for number in range(held, held + count)]
        ends = self._used + np.cumsum(sizes + _sizes(numbers))
        tokens = block.token_end[:count] - block.token_start[:count] if self._token_counts else 0
        # What an event must leave room for is itself and its token, not the name of its element.
        fits = np.append(self._used, ends[:-1])[:count] + sizes + tokens <= REPLY_BYTES_MAX
        if count and not held:
            fits[0] = True
        taken = count if fits.all() else int(np.argmin(fits))
        if taken:
            documents = block.cut(0, taken).events()
            self._elements += [name + document for name, document in zip(numbers, documents, strict=False)]
            self._used = int(ends[taken - 1])
            self.last_token = block.token(taken - 1)
        return taken

    def _add_one(self, block: EventBlock, held: int) -> int:
        """``add`` for a single event, without arrays: most replies have one."""
        if self.is_full:
            return 0
        document, token = block.event(0), block.token(0)
        if held and self._used + len(document) + (len(token) if self._token_counts else 0) > REPLY_BYTES_MAX:
            return 0
        self._elements.append(b"\x03%d\x00%b" % (held, document))
        self._used += len(self._elements[-1])
        self.last_token = token
        return 1

    def to_element(self) -> bytes:
        """The array as an element of the reply."""
        return encode_element(ARRAY, self.field.encode(), encode_document(*self._elements))


def _sizes(parts: list[bytes]) -> Offsets:
    return np.fromiter(map(len, parts), np.int64, len(parts))
