"""What goes into one reply: so many documents, and so many bytes (measured on 6.0.27 to the byte)."""

from __future__ import annotations

from typing import Final

from tailrace.raw_bson import ARRAY, encode_document, encode_element

#: A reply takes another document only while it stays within this.
REPLY_BYTES_MAX: Final = 16 * 1024 * 1024
#: What the reply's buffer holds before the array's first document: the message's header and flags, and the reply's own
#: elements up to the array's. "firstBatch" has a letter more than "nextBatch".
_HEAD_BYTES: Final = {"firstBatch": 53, "nextBatch": 52}


class Batch:
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

    def add(self, document: bytes, token: bytes) -> bool:
        """Take a document in, or say that it must wait for the next reply."""
        needed = len(document) + (len(token) if self._token_counts else 0)
        if self._elements and self._used + needed > REPLY_BYTES_MAX:
            return False
        element = b"\x03%d\x00%b" % (len(self._elements), document)
        self._elements.append(element)
        self._used += len(element)
        self.last_token = token
        return True

    def to_element(self) -> bytes:
        """The array as an element of the reply."""
        return encode_element(ARRAY, self.field.encode(), encode_document(*self._elements))
