"""Current documents of a sharded cluster: read from the shard that owns them now, never from one that keeps an orphan.

A chunk that moved leaves documents behind on its old shard until they are deleted. The server tells them apart by the
version that its router sends along; here ownership is looked up in the config database (majority) before *and* after
the document was read: if the chunk is the same by both looks, the shard owned it all the while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.errors import SourceError
from tailrace.pipeline.request import DocumentLookup
from tailrace.source.connection import Connection
from tailrace.source.lookup import current_documents
from tailrace.source.shard_key import shard_key
from tailrace.source.topology import Cluster

#: Chunks that move away again and again between two looks.
_TRIES: Final = 20

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)

_log = logging.getLogger("tailrace.source")
_T = TypeVar("_T")


class _Placement(NamedTuple):
    """Where a collection lives. ``collection`` is its document in ``config.collections``, ``None`` for one that is not
    sharded and lives on its database's ``primary`` (``None``: there is no such database)."""

    primary: str | None
    version: bytes
    collection: dict[str, Any] | None


class _Chunk(NamedTuple):
    identity: bytes
    shard: str


class OwnerLookup:
    """Answers ``NeedDocuments`` and ``NeedShardKeys`` for a cluster. Belongs to one thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def documents(self, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
        """The current document of each lookup, ``None`` where there is none. Raises as ``current_documents`` does."""
        answer: list[bytes | None] = [None] * len(lookups)
        order = sorted(range(len(lookups)), key=lambda index: lookups[index][:2])
        for (database, collection), indexes in groupby(order, key=lambda index: lookups[index][:2]):
            wanted = list(indexes)
            found = self._of_namespace(database, collection, [lookups[index] for index in wanted])
            for index, document in zip(wanted, found, strict=True):
                answer[index] = document
        return answer

    def shard_keys(self, uuids: Iterable[bytes]) -> list[bytes | None]:
        """The key patterns of collections, ``None`` for one that is not sharded or is no more."""
        collections = self._cluster.config_collection("collections").with_options(codec_options=_RAW)
        found = []
        for uuid in uuids:
            query = {"uuid": Binary(uuid, 4), "dropped": {"$ne": True}}
            document = self._retrying(partial(collections.find_one, query, {"key": 1}))
            # As it stands there: encoding a dict would move _id to the front.
            found.append(None if document is None else bytes(document["key"].raw))
        return found

    def primary(self, database: str) -> str | None:
        """The shard that holds what is not sharded of a database; ``None`` where there is no such database."""
        document = self._retrying(
            lambda: self._cluster.config_collection("databases").find_one({"_id": database}, {"primary": 1})
        )
        return None if document is None else str(document["primary"])

    def _retrying(self, read: Callable[[], _T]) -> _T:
        return Connection(self._cluster.config_client()).retrying(read)

    def _of_namespace(self, database: str, name: str, lookups: list[DocumentLookup]) -> list[bytes | None]:
        namespace = f"{database}.{name}"
        for _ in range(_TRIES):
            placement = self._placement(database, namespace)
            if placement.primary is None:
                return [None] * len(lookups)
            if placement.collection is None:
                found = self._read(placement.primary, lookups)
                if self._placement(database, namespace) == placement:
                    return found
            else:
                owned = [self._owned(placement.collection, lookup) for lookup in lookups]
                if all(settled for settled, _ in owned) and self._placement(database, namespace) == placement:
                    return [document for _, document in owned]
            _log.debug("%s: chunks have moved while documents were looked up; once more", namespace)
        raise SourceError(
            f"the chunks of {namespace} moved at each of {_TRIES} attempts to look up a document",
            hint="Resume the stream when the balancer is done",
        )

    def _placement(self, database: str, namespace: str) -> _Placement:
        def read() -> _Placement:
            found = self._cluster.config_collection("databases").find_one({"_id": database})
            collection = self._cluster.config_collection("collections").find_one(
                {"_id": namespace, "dropped": {"$ne": True}}
            )
            primary = None if found is None else str(found["primary"])
            if collection is not None and primary is None:  # the config database itself
                primary = ""
            # What changes as chunks split and move is looked at chunk by chunk.
            kept = None if collection is None else {name: collection.get(name) for name in ("_id", "uuid", "key")}
            return _Placement(primary, bson.encode(found or {}), kept)

        return self._retrying(read)

    def _read(self, shard: str, lookups: list[DocumentLookup]) -> list[bytes | None]:
        return current_documents(Connection(self._cluster.client(shard)), lookups)

    def _owned(self, collection: dict[str, Any], lookup: DocumentLookup) -> tuple[bool, bytes | None]:
        """Whether the chunk stayed where it is, and the document of its owner."""
        key = shard_key(lookup.document_key, collection["key"], whole=True)
        if key is not None:
            chunk = self._chunk(collection, key)
            if chunk is None:
                return False, None
            document = self._read(chunk.shard, [lookup])[0]
            return self._chunk(collection, key) == chunk, document
        # The event is older than the shard key: every shard is asked, and the document says whose it is.
        for shard in self._cluster.shards():
            document = self._read(shard.name, [lookup])[0]
            if document is None:
                continue
            key = shard_key(document, collection["key"], whole=False)
            chunk = None if key is None else self._chunk(collection, key)
            if chunk is not None and chunk.shard == shard.name:
                return True, document
        return True, None

    def _chunk(self, collection: dict[str, Any], key: bytes) -> _Chunk | None:
        """The chunk of a shard key's value. The server compares, by an index of its own."""
        chunks = self._cluster.config_collection("chunks").with_options(codec_options=_RAW)
        for whose in ({"uuid": collection["uuid"]}, {"ns": collection["_id"]}):  # the second: before 5.0
            query = {**whose, "min": {"$lte": RawBSONDocument(key)}}
            found = self._retrying(partial(chunks.find_one, query, sort=[("min", -1)]))
            if found is not None:
                identity = bson.encode({name: found[name] for name in ("min", "max", "lastmod", "shard")})
                return _Chunk(identity, str(found["shard"]))
        return None
