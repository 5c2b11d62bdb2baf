"""What one shard's part of a transaction over several shards did to each document.

Each shard commits its part at a time of its own, so the parts come in any order. A document whose shard key value such
a transaction changes is deleted on one shard and inserted on another one: if the insert comes first, the delete that
comes after it must not remove what was inserted. Documents are known by their ``_id`` here, so it is the document key
that tells the two apart (measured on 6.0.27: the two commits of such a transaction had times in either order).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tailrace.core import raw_bson
from tailrace.core.oplog.entry import OplogEntry

#: What the entry has that commits a part.
_COMMIT = b"commitTransaction\0"


def is_shard_commit(raw: bytes) -> bool:
    """Whether a command entry may commit a shard's part of a transaction over several shards."""
    return _COMMIT in raw


@dataclass(slots=True)
class _Document:
    """The operations of one document so far. ``first``: its document key when the transaction began; ``None`` if it was
    not there."""

    first: bytes | None
    places: list[int] = field(default_factory=list)


def net_operations(operations: Iterable[OplogEntry]) -> Iterator[tuple[OplogEntry, bytes | None]]:
    """The operations of a part, in order, without those that leave nothing behind: what the part inserts and deletes
    again, and updates before a delete. A delete comes with the document key that the document had before the part, by
    which it is known; other operations come with ``None``."""
    kept: list[tuple[OplogEntry, bytes | None] | None] = []
    documents: dict[tuple[bytes | None, bytes], _Document] = {}
    for operation in operations:
        identified = _identified(operation)
        if identified is None:
            kept.append((operation, None))
            continue
        document_key, key = identified
        found = documents.get(key)
        if operation.operation == "d":
            found = documents.pop(key, None) or _Document(document_key)
            for place in found.places:
                kept[place] = None
            if found.first is not None:
                kept.append((operation, found.first))
            continue
        if found is None:
            found = documents[key] = _Document(None if operation.operation == "i" else document_key)
        found.places.append(len(kept))
        kept.append((operation, None))
    yield from (one for one in kept if one is not None)


def _identified(operation: OplogEntry) -> tuple[bytes, tuple[bytes | None, bytes]] | None:
    """The document key of an insert, an update or a delete (of an insert the whole document), and what tells the
    document from others of this shard."""
    if operation.operation not in ("i", "u", "d") or operation.o is None:
        return None
    document = operation.o2 if operation.operation == "u" and operation.o2 is not None else operation.o
    element = raw_bson.find(document, b"_id")
    if element is None:
        return None
    return document, (operation.collection_uuid, document[element.start : element.end])
