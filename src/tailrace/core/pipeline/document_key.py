"""Document keys of inserts from the catalog, for oplogs that do not hold them.

From 5.3 on a shard logs an insert's document key in ``o2``. 4.4 logs none and takes the collection's shard key from its
catalog when it makes the event: the same insert has the whole key while the collection exists, and ``_id`` alone after
it was dropped. 5.0.4 logs none and gives ``_id`` alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.entry import OplogEntry
from tailrace.core.plan.request import Answer, NeedShardKeys
from tailrace.core.raw_bson import OBJECT, encode_document, encode_element
from tailrace.errors import invariant

_ID_ALONE: Final = ((b"_id",),)


class CatalogKeys:
    """Gives inserts an ``o2`` by the shard keys of their collections. A shard key that was found is kept, as the server
    does; a collection without one is asked about again, because it may be sharded by then."""

    def __init__(self) -> None:
        self._paths: dict[bytes, tuple[tuple[bytes, ...], ...]] = {}

    def process(self, entries: Iterable[OplogEntry]) -> Generator[NeedShardKeys, Answer, None]:
        inserts = [entry for entry in entries if entry.operation == "i" and entry.o2 is None and entry.collection_uuid]
        if not inserts:
            return
        yield from self.ask(entry.collection_uuid for entry in inserts if entry.collection_uuid is not None)
        for entry in inserts:
            paths = self._paths.get(entry.collection_uuid or b"")
            if paths is not None and entry.o is not None:
                entry.o2 = document_key(entry.o, paths)

    def ask(self, uuids: Iterable[bytes]) -> Generator[NeedShardKeys, Answer, None]:
        """Find out the shard keys of those collections of which none is known."""
        unknown = tuple(dict.fromkeys(uuid for uuid in uuids if uuid not in self._paths))
        if not unknown:
            return
        answer = yield NeedShardKeys(unknown)
        invariant(answer is not None and len(answer) == len(unknown), "shard keys were not answered in full")
        for uuid, pattern in zip(unknown, answer or (), strict=True):
            if pattern is not None:
                self._paths[uuid] = _paths(pattern)

    def is_id_alone(self, uuid: bytes) -> bool:
        """Whether the document key of an insert into this collection is its ``_id``, as far as is known."""
        return self._paths.get(uuid, _ID_ALONE) == _ID_ALONE


def _paths(pattern: bytes) -> tuple[tuple[bytes, ...], ...]:
    """The fields of a document key: the shard key's, and ``_id`` where it is none of them."""
    names = [element.name for element in raw_bson.elements(pattern)]
    if b"_id" not in names:
        names.append(b"_id")
    return tuple(tuple(name.split(b".")) for name in names)


def document_key(document: bytes, paths: Iterable[tuple[bytes, ...]]) -> bytes:
    """The fields of ``document`` at ``paths``, in their order, as a document; a field that is missing is left out.

    A field's name is its whole path with the dots (4.4.2), as in the keys of updates and deletes.
    """
    parts = []
    for path in paths:
        found = _extract(document, path)
        if found is not None:
            parts.append(encode_element(found[0], b".".join(path), found[1]))
    return encode_document(*parts)


def _extract(document: bytes, path: tuple[bytes, ...]) -> tuple[int, bytes] | None:
    """Type and value of the field at ``path``, which leads through documents only."""
    element = raw_bson.find(document, path[0])
    if element is None:
        return None
    value = raw_bson.value(document, element)
    if len(path) == 1:
        return element.type, value
    return _extract(value, path[1:]) if element.type == OBJECT else None
