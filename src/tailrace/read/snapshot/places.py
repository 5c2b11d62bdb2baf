"""Where a collection's documents are at the moment: one replica set, or the shards that own its chunks.

A placement is looked up before something is read and compared afterwards. If it is still the same, then everything was
read where it belonged all along: from the collection that was meant, although names change, and from the owners of its
chunks, although chunks move. Nothing of this depends on a router or on a server's version.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.event.keystring import encode_object
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import NamespaceFilter, Scope
from tailrace.core.oplog.selection import Selection
from tailrace.errors import ServerError, SourceError
from tailrace.read.source.connection import Connection
from tailrace.read.source.listing import (
    INTERNAL_DATABASES,
    UnreadableNameError,
    check_name,
    database_names,
    list_collections,
    readable,
)
from tailrace.read.source.shard_key import shard_key
from tailrace.read.source.topology import Cluster

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)
_TABLE_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class Found:
    """A collection that exists now: its namespace and UUID (16 bytes)."""

    namespace: str
    uuid: bytes


@dataclass(frozen=True)
class Placement:
    """A collection's place. Two that compare equal mean that nothing has moved between the looks.

    ``namespace``  what it is called now
    ``members``    the replica sets to read, by name
    ``after``      read everything up to this time
    ``key``        the shard key's pattern; ``None`` where documents need not be asked whose they are
    """

    namespace: str
    uuid: bytes
    version: bytes
    members: Mapping[str, MongoClient[Any]] = field(compare=False)
    after: ClusterTime = field(compare=False, default=ClusterTime(0))
    key: Mapping[str, Any] | None = field(compare=False, default=None)
    chunks: ChunkTable | None = field(compare=False, default=None)

    def owns(self, member: str, document: bytes) -> bool:
        """Whether a document that was read from a member belongs there, and is no orphan."""
        return self.chunks is None or self.key is None or self.chunks.owner(document, self.key) == member


class ChunkTable:
    """Which shard owns which values of the shard key."""

    def __init__(self, chunks: list[tuple[bytes, str]]) -> None:
        chunks.sort()
        self._firsts = [first for first, _ in chunks]
        self._shards = [shard for _, shard in chunks]

    @property
    def shards(self) -> set[str]:
        """Those that own anything."""
        return set(self._shards)

    def owner(self, document: bytes, pattern: Mapping[str, Any]) -> str | None:
        """The shard that owns a document."""
        key = shard_key(document, pattern, whole=False)
        place = bisect_right(self._firsts, encode_object(key)[0]) - 1 if key is not None else -1
        return self._shards[place] if place >= 0 else None


class Places(Protocol):
    """A deployment's collections. Not for several threads at a time: each has its own."""

    def now(self) -> ClusterTime:
        """A cluster time that everything acknowledged before is at or before."""

    def collections(self, scope: Scope, selection: Selection | None = None) -> list[Found]:
        """The collections of a scope that are selected; ``None``: all. Those whose names no driver can read are left
        out with a warning. Raises ServerError 166 where the scope names a view or a time-series collection, SourceError
        where there may be others that the user is not shown."""

    def placement(self, uuid: bytes, database: str) -> Placement | None:
        """Where a collection is, whatever it is called by now; ``None`` where it is gone. Raises UnreadableNameError
        where nobody can read it under its new name."""

    def named(self, namespace: str) -> Found | None:
        """The collection that has this name now."""


class ReplicaSetPlaces:
    """A replica set: one place for all. ``after`` is a time that every read has to have reached."""

    def __init__(self, client: MongoClient[Any], *, retry_seconds: float) -> None:
        self.connection = Connection(client, retry_seconds=retry_seconds)

    def now(self) -> ClusterTime:
        """See ``Places``. The primary's: a member that is late knows nothing of what was acknowledged just now, and a
        client that may read secondaries would take the time from one and documents from another."""
        client = self.connection.client
        reply = self.connection.retrying(lambda: client.admin.command("ping"))
        return ClusterTime.from_timestamp(reply["operationTime"])

    def collections(self, scope: Scope, selection: Selection | None = None) -> list[Found]:
        """See ``Places``."""
        names = [scope.database] if scope.database else database_names(self.connection)
        query = {"name": scope.collection} if scope.collection else {}
        chosen = _chosen_databases(names, selection)
        return _chosen((found for name in chosen for found in listed(self.connection, scope, name, query)), selection)

    def placement(self, uuid: bytes, database: str) -> Placement | None:
        """See ``Places``."""
        found = by_uuid(self.connection, database, uuid)
        if found is None:
            return None
        return Placement(found.namespace, uuid, b"", {self.connection.name: self.connection.client})

    def named(self, namespace: str) -> Found | None:
        """See ``Places``."""
        database, _, name = namespace.partition(".")
        return next(iter(listed(self.connection, Scope.cluster(), database, {"name": name})), None)


class ClusterPlaces:
    """A sharded cluster: chunks where ``config.chunks`` says, everything else on its database's primary shard."""

    def __init__(self, cluster: Cluster, *, retry_seconds: float) -> None:
        self._cluster = cluster
        self._retry_seconds = retry_seconds
        self._config = Connection(cluster.config_client(), retry_seconds=retry_seconds)
        self._to: dict[str, Connection] = {}
        self._table: tuple[Placement, bytes] | None = None
        self._primaries: dict[bytes, tuple[str, ClusterTime]] = {}

    def now(self) -> ClusterTime:
        """See ``Places``."""
        return self._cluster.open_view().time

    def collections(self, scope: Scope, selection: Selection | None = None) -> list[Found]:
        """See ``Places``."""
        found: dict[str, Found] = {}
        for database in _chosen_databases(self._databases(scope), selection):
            primary = self._primary(database)
            if primary is not None:
                query = {"name": scope.collection} if scope.collection else {}
                found |= {one.namespace: one for one in listed(self._connection(primary), scope, database, query)}
        # What is sharded need not be on the primary shard; what is there may be a remainder.
        sees = NamespaceFilter(scope, show_system_events=False).namespace
        for one in self._config_find({"dropped": {"$ne": True}}):
            if sees(_judged(one["_id"])):
                found[one["_id"]] = Found(one["_id"], _uuid(one["uuid"]))
        return _chosen((found[name] for name in sorted(found)), selection)

    def _databases(self, scope: Scope) -> list[str]:
        if scope.database:
            return [scope.database]
        databases = self._cluster.config_collection("databases")
        names = self._config.retrying(lambda: [str(one["_id"]) for one in databases.find({}, {"_id": 1})])
        return sorted(set(names) - INTERNAL_DATABASES)

    def placement(self, uuid: bytes, database: str) -> Placement | None:
        """See ``Places``."""
        for _ in range(_TABLE_TRIES):
            sharded = next(iter(self._config_find({"uuid": Binary(uuid, 4), "dropped": {"$ne": True}})), None)
            if sharded is None:
                return self._unsharded(uuid, database)
            version = self._version(sharded)
            if self._table is not None:
                placement, of = self._table
                if (placement.namespace, placement.uuid, of) == (sharded["_id"], uuid, version):
                    return placement
            made = self._placed(sharded, uuid, version)
            if made is not None:
                self._table = made, version
                return made
        raise SourceError(
            f"the chunks of a collection of {database} moved during each of {_TABLE_TRIES} attempts to find them",
            hint="Continue the snapshot when the balancer has finished",
        )

    def named(self, namespace: str) -> Found | None:
        """See ``Places``."""
        for one in self._config_find({"_id": namespace, "dropped": {"$ne": True}}):
            return Found(namespace, _uuid(one["uuid"]))
        database, _, name = namespace.partition(".")
        primary = self._primary(database)
        if primary is None:
            return None
        return next(iter(listed(self._connection(primary), Scope.cluster(), database, {"name": name})), None)

    def _unsharded(self, uuid: bytes, database: str) -> Placement | None:
        primary = self._primary(database)
        found = None if primary is None else by_uuid(self._connection(primary), database, uuid)
        if found is None or primary is None:
            return None
        if self._primaries.get(uuid, ("",))[0] != primary:
            # As with chunks: what came along with the database has arrived by then.
            self._primaries[uuid] = primary, self.now()
        client = self._connection(primary).client
        return Placement(found.namespace, uuid, primary.encode(), {primary: client}, self._primaries[uuid][1])

    def _placed(self, sharded: Mapping[str, Any], uuid: bytes, version: bytes) -> Placement | None:
        """The placement; ``None`` where chunks moved while it was read."""
        raw = self._cluster.config_collection("chunks").with_options(codec_options=_RAW)
        query = self._of(sharded)
        chunks = self._config.retrying(
            lambda: [(raw_bson.bytes_of(one["min"]), str(one["shard"])) for one in raw.find(query)]
        )
        # Every shard learns of the time at which this was so, and has what a chunk brought along when it answers.
        after = self.now()
        if self._version(sharded) != version:
            return None
        table = ChunkTable([(encode_object(first)[0], shard) for first, shard in chunks])
        members = {name: self._connection(name).client for name in sorted(table.shards)}
        return Placement(str(sharded["_id"]), uuid, version, members, after, dict(sharded["key"]), table)

    def _of(self, sharded: Mapping[str, Any]) -> dict[str, Any]:
        chunks = self._cluster.config_collection("chunks")
        query = {"uuid": sharded["uuid"]}
        if self._config.retrying(lambda: chunks.find_one(query, {"_id": 1})) is None:
            return {"ns": sharded["_id"]}  # before 5.0
        return query

    def _version(self, sharded: Mapping[str, Any]) -> bytes:
        """What changes whenever a chunk of the collection moves."""
        chunks = self._cluster.config_collection("chunks")
        query = self._of(sharded)
        document = self._config.retrying(lambda: chunks.find_one(query, {"lastmod": 1}, sort=[("lastmod", -1)]))
        return bson.encode({"lastmod": None if document is None else document["lastmod"], "key": sharded["key"]})

    def _primary(self, database: str) -> str | None:
        databases = self._cluster.config_collection("databases")
        document = self._config.retrying(lambda: databases.find_one({"_id": database}, {"primary": 1}))
        return None if document is None else str(document["primary"])

    def _config_find(self, query: Mapping[str, Any]) -> list[dict[str, Any]]:
        collections = self._cluster.config_collection("collections")
        return self._config.retrying(lambda: list(collections.find(query)))

    def _connection(self, shard: str) -> Connection:
        client = self._cluster.current_client(shard)
        if client is None:
            raise SourceError(f"the cluster has no shard {shard}", hint="Continue the snapshot: chunks have moved")
        known = self._to.get(shard)
        if known is None or known.client is not client:
            known = self._to[shard] = Connection(client, retry_seconds=self._retry_seconds)
            known.wait_for_hello()
        return known


def _chosen_databases(names: Iterable[str], selection: Selection | None) -> list[str]:
    return readable((name for name in names if name and (selection is None or selection.may_cover(name))), str)


def _chosen(found: Iterable[Found], selection: Selection | None) -> list[Found]:
    return readable(
        (one for one in found if selection is None or selection.covers(one.namespace)), lambda one: one.namespace
    )


def _uuid(value: Any) -> bytes:
    return bytes(getattr(value, "bytes", value))


def listed(connection: Connection, scope: Scope, database: str, query: Mapping[str, Any]) -> list[Found]:
    """The collections of a database that a stream of the scope would show. Raises ServerError 166 where the scope is
    one collection and that is none."""
    # A database stream shows no system collections; the names of views are among those too.
    sees = NamespaceFilter(scope, show_system_events=False).namespace
    found = []
    connection.wait_for_hello()
    for one in list_collections(connection, database, query):
        if one.kind != "collection":
            if scope.kind == "collection":
                text = "a timeseries collection" if one.kind == "timeseries" else "a view, not a collection"
                raise ServerError(
                    f"Namespace {one.namespace} is {text}",
                    code=166,
                    hint="A snapshot copies collections, as streams watch them",
                )
        elif sees(_judged(one.namespace)):
            found.append(Found(one.namespace, one.uuid))
    return sorted(found, key=lambda one: one.namespace)


def _judged(namespace: str) -> bytes:
    """The namespace as a filter sees it. A name that is not UTF-8 is judged as though it were: streams do not show it,
    and a copy says that it has left it out."""
    return namespace.encode("utf-8", "replace")


def by_uuid(connection: Connection, database: str, uuid: bytes) -> Found | None:
    """The collection of a database that has this UUID, whatever it is called. Raises UnreadableNameError."""
    connection.wait_for_hello()
    for one in list_collections(connection, database, {"info.uuid": Binary(uuid, 4)}):
        try:
            check_name(one.namespace)
        except UnreadableNameError as error:  # it may come back, and then be without what was not copied
            hint = "The collection got this name while it was copied: begin the copy again, which leaves it out"
            raise UnreadableNameError(error.message, hint=hint) from None
        return Found(one.namespace, uuid)
    return None
