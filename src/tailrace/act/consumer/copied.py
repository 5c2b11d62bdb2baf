"""The event of a document that a copy gives, made when somebody looks at it.

Code that passes on the documents of a copy, such as the keeper of a view, needs only the document. The event around it,
with a token that names it, takes longer to make and to take apart than the document takes to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.snapshot.event import document_key, snapshot_event
from tailrace.read.snapshot.reader import SnapshotChunk


class LateDocument(Mapping[str, Any]):
    """A document of which ``make`` gives the bytes. It is called once, at the first access."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: RawBSONDocument | None = None

    @property
    def _document(self) -> RawBSONDocument:
        if self._made is None:
            self._made = RawBSONDocument(self._make())
        return self._made

    @property
    def raw(self) -> bytes:
        """Its BSON."""
        return raw_bson.bytes_of(self._document)

    def __getitem__(self, name: str) -> Any:
        return self._document[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._document)

    def __len__(self) -> int:
        return len(self._document)


class CopiedDocument(LateDocument):
    """The event of one document of a chunk.

    ``document``  as it was read
    """

    __slots__ = ("_chunk", "document")

    def __init__(self, document: bytes, chunk: SnapshotChunk) -> None:
        super().__init__(self._event)
        self.document = document
        self._chunk = chunk

    def _event(self) -> bytes:
        chunk = self._chunk
        return snapshot_event(self.document, chunk.namespace, chunk.uuid, chunk.start, chunk.key)

    @property
    def token(self) -> Mapping[str, Any]:
        """The event's ``_id``."""
        return LateDocument(self._token)

    def _token(self) -> bytes:
        event = self.raw
        element = raw_bson.find(event, b"_id")
        assert element is not None
        return raw_bson.value(event, element)

    @property
    def key(self) -> bytes:
        """Its ``documentKey``."""
        return document_key(self.document, self._chunk.key)

    @property
    def time(self) -> ClusterTime:
        """Its ``clusterTime``: when the copy began."""
        return self._chunk.start
