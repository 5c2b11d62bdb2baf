"""Current documents of a sharded cluster: read from the shard that owns them now, never from one that keeps an orphan.

A chunk that moved leaves documents behind on its old shard until they are deleted. The server recognises them by the
version that its router sends along; here ownership is looked up in the config database (majority) before *and* after
the document was read: if the chunk is the same both times, the shard owned it all along.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.event.image import CollectionLookups
from tailrace.core.event.keystring import encode_object
from tailrace.core.plan.request import DocumentLookup
from tailrace.errors import RESUMABLE_LABEL, SourceError
from tailrace.read.source.connection import RETRY_SECONDS, Connection
from tailrace.read.source.lookup import by_collection, current_documents
from tailrace.read.source.shard_key import shard_key
from tailrace.read.source.topology import Cluster

#: Chunks that move away again and again between two looks.
_TRIES: Final = 20
#: Waited before the next look, and as much more each time.
_PAUSE_S: Final = 0.01
#: How long an unreachable shard is waited for before the chunk's owner is looked up again.
_LOOK_AGAIN_S: Final = 5.0

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
    """``first`` and ``end`` bound it, the end excluded, in an order of bytes."""

    minimum: bytes
    first: bytes
    end: bytes
    shard: str
    version: Timestamp


class OwnerLookup:
    """Answers ``NeedDocuments`` and ``NeedShardKeys`` for a cluster. Belongs to one thread at a time.

    ``retry_seconds``  how long an unreachable shard is waited for
    """

    def __init__(self, cluster: Cluster, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._cluster = cluster
        self._retry_seconds = retry_seconds
        self._connections: dict[int, Connection] = {}
        self._interrupted = False
        #: The shard that is being read from at the moment.
        self.asking: str | None = None

    def interrupt(self) -> None:
        """Stop waiting, from any thread: what is under way ends in a SourceError."""
        self._interrupted = True
        for connection in list(self._connections.values()):
            connection.interrupted = True

    def _to(self, client: MongoClient[Any], retry_seconds: float) -> Connection:
        connection = self._connections.get(id(client))
        if connection is None:
            connection = self._connections[id(client)] = Connection(client, retry_seconds=retry_seconds)
        if self._interrupted:
            connection.interrupted = True
        connection.wait_for_hello()
        return connection

    def documents(self, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
        """The current document of each lookup, ``None`` where there is none. Raises as ``current_documents`` does."""
        answer: list[bytes | None] = [None] * len(lookups)
        for wanted in by_collection(lookups):
            of_one = CollectionLookups.of(_chosen(lookups, wanted))
            first = of_one[0]
            named: dict[str, Any] = {"_id": f"{first.database}.{first.collection}"}
            query = {"uuid": Binary(first.collection_uuid or b"", 4)} if first.by_uuid else named
            found = self._of_collection(first.database, query, of_one)
            for index, document in zip(wanted, found, strict=True):
                answer[index] = document
        return answer

    def shard_keys(self, uuids: Iterable[bytes]) -> list[bytes | None]:
        """The key patterns of collections, ``None`` for one that is not sharded or no longer exists."""
        collections = self._cluster.config_collection("collections").with_options(codec_options=_RAW)
        found = []
        for uuid in uuids:
            query = {"uuid": Binary(uuid, 4), "dropped": {"$ne": True}}
            document = self._retrying(partial(collections.find_one, query, {"key": 1}))
            # As it stands there: encoding a dict would move _id to the front.
            found.append(None if document is None else raw_bson.bytes_of(document["key"]))
        return found

    def primary(self, database: str) -> str | None:
        """The shard that holds the collections of a database that are not sharded; ``None`` where there is no such
        database."""
        document = self._retrying(
            lambda: self._cluster.config_collection("databases").find_one({"_id": database}, {"primary": 1})
        )
        return None if document is None else str(document["primary"])

    def _retrying(self, read: Callable[[], _T]) -> _T:
        return self._config().retrying(read)

    def _config(self) -> Connection:
        return self._to(self._cluster.config_client(), self._retry_seconds)

    def _of_collection(
        self, database: str, query: dict[str, Any], lookups: CollectionLookups
    ) -> Sequence[bytes | None]:
        """The documents of one collection, which ``query`` finds in ``config.collections`` where it is sharded."""
        namespace = f"{database}.{lookups.collection}"
        deadline = time.monotonic() + self._retry_seconds
        moved = 0
        while True:
            try:
                found = self._once(database, query, lookups)
            except SourceError as error:
                # The shard is away. It may never be back: its chunks may lie elsewhere by now.
                if RESUMABLE_LABEL not in error.labels or self._interrupted or time.monotonic() >= deadline:
                    raise
                continue
            if found is not None:
                return found
            moved += 1
            if moved == _TRIES:
                raise SourceError(
                    f"the chunks of {namespace} moved during each of {_TRIES} attempts to look up a document",
                    hint="Resume the stream when the balancer has finished",
                    labels=(RESUMABLE_LABEL,),
                )
            _log.debug("%s: chunks have moved while documents were looked up; they are looked up again", namespace)
            time.sleep(_PAUSE_S * moved)

    def _once(self, database: str, query: dict[str, Any], lookups: CollectionLookups) -> Sequence[bytes | None] | None:
        """The documents; ``None`` where what they were read by changed meanwhile."""
        placement = self._placement(database, query)
        if placement.primary is None:
            return [None] * len(lookups)
        if placement.collection is None:
            found: Sequence[bytes | None] | None = self._read(placement.primary, lookups)
        else:
            found = self._of_owners(placement.collection, lookups)
        return found if self._placement(database, query) == placement else None

    def _placement(self, database: str, query: dict[str, Any]) -> _Placement:
        def read() -> _Placement:
            document = self._cluster.config_collection("databases").find_one({"_id": database})
            collection = self._cluster.config_collection("collections").find_one({**query, "dropped": {"$ne": True}})
            primary = None if document is None else str(document["primary"])
            if collection is not None and primary is None:  # the config database itself
                primary = ""
            # What changes as chunks split and move is compared chunk by chunk.
            kept = None if collection is None else {name: collection.get(name) for name in ("_id", "uuid", "key")}
            return _Placement(primary, bson.encode(document or {}), kept)

        return self._retrying(read)

    def _read(self, shard: str, lookups: CollectionLookups) -> Sequence[bytes | None] | None:
        """The documents that a shard holds; ``None`` where no shard has the name any more. Raises SourceError, with the
        label of what a resume heals, where it cannot be asked at the moment."""
        self.asking = shard
        # config.shards is read again: a chunk may lie on a shard that was added since, and another replica set may have
        # come under the name of one that was removed.
        client = self._cluster.current_client(shard, self._config())
        if client is None:
            return None
        found = current_documents(self._to(client, min(_LOOK_AGAIN_S, self._retry_seconds)), lookups)
        self.asking = None
        return found

    def _of_owners(self, collection: dict[str, Any], lookups: CollectionLookups) -> list[bytes | None] | None:
        """The documents, read from the chunks' owners; ``None`` where a chunk did not stay where it was."""
        answer: list[bytes | None] = [None] * len(lookups)
        chunks = _Chunks(self._cluster, collection, self._config())
        by_shard: dict[str, list[int]] = {}
        for index, lookup in enumerate(lookups):
            key = shard_key(lookup.document_key, collection["key"], whole=True)
            if key is not None:
                chunk = chunks.of(key)
                if chunk is None:
                    return None
                by_shard.setdefault(chunk.shard, []).append(index)
                continue
            settled, answer[index] = self._found_anywhere(chunks, collection, lookup)
            if not settled:
                return None
        for shard, indexes in by_shard.items():
            found = self._read(shard, lookups.chosen(indexes))
            if found is None:
                return None
            for index, document in zip(indexes, found, strict=True):
                answer[index] = document
        return answer if chunks.stayed() else None

    def _found_anywhere(
        self, chunks: _Chunks, collection: dict[str, Any], lookup: DocumentLookup
    ) -> tuple[bool, bytes | None]:
        """The document of an event that is older than the shard key, and whether that is settled: every shard is asked,
        and the document says whose it is."""
        version = chunks.version()
        # They have to learn of the event's time first, for they refuse to read after one that they do not know.
        for shard in self._cluster.open_view().shards:
            found = self._read(shard, CollectionLookups.of([lookup]))
            document = None if found is None else found[0]
            key = None if document is None else shard_key(document, collection["key"], whole=False)
            chunk = None if key is None else chunks.of(key)
            if chunk is not None and chunk.shard == shard:
                return True, document
        return chunks.version() == version, None


def _chosen(lookups: Sequence[DocumentLookup], indexes: list[int]) -> Sequence[DocumentLookup]:
    return lookups if len(indexes) == len(lookups) else [lookups[index] for index in indexes]


class _Chunks:
    """The chunks of one collection that were asked for, each read once."""

    def __init__(self, cluster: Cluster, collection: dict[str, Any], config: Connection) -> None:
        self._cluster = cluster
        self._collection = collection
        self._config = config
        self._known: list[_Chunk] = []

    def of(self, key: bytes) -> _Chunk | None:
        """The chunk of a shard key's value; ``None`` where there is none at the moment."""
        place = encode_object(key)[0]
        for chunk in self._known:
            if chunk.first <= place < chunk.end:
                return chunk
        found = self._read(key)
        if found is not None:
            self._known.append(found)
        return found

    def stayed(self) -> bool:
        """Whether all chunks that were given are still as they were, with their owners."""
        return all(self._read(chunk.minimum) == chunk for chunk in self._known)

    def version(self) -> bytes:
        """What changes whenever any chunk of the collection moves."""
        return bson.encode(self._find({}, "lastmod") or {})

    def _read(self, key: bytes) -> _Chunk | None:
        found = self._find({"min": {"$lte": RawBSONDocument(key)}}, "min")
        if found is None:
            return None
        minimum, maximum = raw_bson.bytes_of(found["min"]), raw_bson.bytes_of(found["max"])
        first, end = encode_object(minimum)[0], encode_object(maximum)[0]
        return _Chunk(minimum, first, end, str(found["shard"]), found["lastmod"])

    def _find(self, query: dict[str, Any], last_of: str) -> RawBSONDocument | None:
        """The last chunk that matches. The server compares, by an index of its own."""
        chunks = self._cluster.config_collection("chunks").with_options(codec_options=_RAW)
        for whose in ({"uuid": self._collection["uuid"]}, {"ns": self._collection["_id"]}):  # the second: before 5.0
            document = self._config.retrying(partial(chunks.find_one, {**whose, **query}, sort=[(last_of, -1)]))
            if document is not None:
                return document
        return None
