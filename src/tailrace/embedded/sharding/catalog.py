"""The routing tables: which shard owns which chunk, read from the config server, and the versions that writes carry."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import bson
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.event import keystring
from tailrace.embedded.sharding.connections import CONFIG, Connections
from tailrace.errors import UsageError
from tailrace.read.source.shard_key import shard_key

_NO_EPOCH = ObjectId("0" * 24)
_ZERO = Timestamp(0, 0)


@dataclass(frozen=True)
class Chunk:
    """One range of a collection's shard key: ``minimum`` belongs to it, ``maximum`` does not."""

    minimum: Mapping[str, Any]
    maximum: Mapping[str, Any]
    shard: str
    version: Timestamp


@dataclass(frozen=True)
class Table:
    """Where a collection lives, as the config server said at one time. ``collection`` is its document in
    ``config.collections``, or ``None`` where it is not sharded: then it lives on the database's primary shard."""

    namespace: str
    database: Mapping[str, Any]
    collection: Mapping[str, Any] | None
    chunks: tuple[Chunk, ...]

    @property
    def key(self) -> Mapping[str, Any]:
        """The shard key's pattern; empty where the collection is not sharded."""
        return {} if self.collection is None else self.collection["key"]

    @property
    def owners(self) -> list[str]:
        """The shards that hold a part of it, by name."""
        return sorted({chunk.shard for chunk in self.chunks}) or [self.database["primary"]]

    def owner(self, document: Mapping[str, Any]) -> str:
        """The shard for a document, or for a filter that names the whole shard key."""
        return self.chunk(key_values(self.key, document)).shard if self.chunks else str(self.database["primary"])

    def chunk(self, values: Mapping[str, Any]) -> Chunk:
        """The chunk that holds these values of the shard key (a hashed field's value being the hash)."""
        place = bisect_right(self._positions, position(values))
        return self.chunks[max(place - 1, 0)]

    @cached_property
    def _positions(self) -> list[bytes]:
        return [position(chunk.minimum) for chunk in self.chunks]

    def version_on(self, shard: str) -> tuple[Timestamp, ObjectId, Timestamp | None]:
        """The collection's version on one shard: its newest chunk there, the epoch, the timestamp."""
        if self.collection is None:
            return _ZERO, _NO_EPOCH, _ZERO
        newest = max((chunk.version for chunk in self.chunks if chunk.shard == shard), default=_ZERO)
        return newest, self.collection["lastmodEpoch"], self.collection.get("timestamp")


class Catalog:
    """The tables that were read so far. Safe for threads."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tables: dict[str, Table] = {}
        self._lock = threading.Lock()

    def table(self, namespace: str) -> Table:
        """The table as last read. Raises UsageError where the database was never created."""
        table = self._tables.get(namespace)
        return table if table is not None else self.reload(namespace)

    def reload(self, namespace: str) -> Table:
        """Read a table again."""
        database = self.database(namespace.partition(".")[0])
        documents = self._connections.find(CONFIG, "config.collections", {"_id": namespace, "dropped": {"$ne": True}})
        collection = documents[0] if documents else None
        chunks: list[Chunk] = []
        if collection is not None:
            query = {"$or": [{"ns": namespace}, {"uuid": collection["uuid"]}]}  # 5.0 and later keep the uuid alone
            for chunk in self._connections.find(CONFIG, "config.chunks", query):
                chunks.append(Chunk(chunk["min"], chunk["max"], chunk["shard"], chunk["lastmod"]))
            chunks.sort(key=lambda chunk: position(chunk.minimum))
            if not chunks:  # it is being dropped or resharded at this moment
                collection = None
        table = Table(namespace, database, collection, tuple(chunks))
        with self._lock:
            self._tables[namespace] = table
        return table

    def database(self, name: str) -> Mapping[str, Any]:
        """A database's document in ``config.databases``: ``primary`` and ``version``."""
        if name == "config":  # of which a sharded collection, that of the sessions, lies on shards
            return {"_id": name, "primary": CONFIG}
        documents = self._connections.find(CONFIG, "config.databases", {"_id": name})
        if not documents:
            raise UsageError(f"There is no database {name} in the cluster", hint="Call create_database first")
        return documents[0]

    def forget(self, namespace: str) -> None:
        """Read this table again when it is next needed."""
        with self._lock:
            self._tables.pop(namespace, None)

    def forget_all(self) -> None:
        """Read every table again when it is next needed."""
        with self._lock:
            self._tables.clear()


def position(values: Mapping[str, Any]) -> bytes:
    """Shard key values as bytes that sort as the server sorts the values."""
    whole = bson.encode({"": values})  # one level down, where _id is not moved to the front
    raw = raw_bson.value(whole, next(raw_bson.elements(whole)))
    return b"".join(
        keystring.encode(element.type, raw_bson.value(raw, element))[0] for element in raw_bson.elements(raw)
    )


def key_values(pattern: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """A document's values of the shard key: ``null`` for what it lacks, the hash for a hashed field."""
    key = shard_key(bson.encode(document), pattern, whole=False)
    return {} if key is None else bson.decode(key)


def filled(pattern: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The first fields of a shard key, made whole with the least values."""
    return {path: values.get(path, MinKey()) for path in pattern}
