"""Databases, sharded collections and chunks: the internal commands that a mongos sends for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from bson.int64 import Int64
from pymongo.errors import OperationFailure

from tailrace.embedded.sharding.catalog import Catalog, Chunk, Table, filled, key_values
from tailrace.embedded.sharding.connections import CONFIG, MAJORITY, STALE, Connections
from tailrace.embedded.sharding.dialect import Dialect
from tailrace.errors import UsageError

_MOVE_ATTEMPTS = 6
_MOVE_PAUSE_S = 0.25
#: LockTimeout, LockBusy, OperationFailed, ConflictingOperationInProgress, CommandFailed: a transaction held a lock, or
#: another migration or definition was under way.
_MOVE_AGAIN = STALE | {24, 46, 96, 117, 125}
#: BalancerInterrupted, and for how long to wait then: the config servers' new primary has not started its balancer yet.
_NO_BALANCER = 194
_BALANCER_PAUSE_S = 3.0


class Definitions:
    """What a mongos does besides reads and writes. Namespaces are ``database.collection``; shards go by name. The
    server's refusals come as PyMongo's OperationFailure, with its code."""

    def __init__(self, connections: Connections, dialect: Dialect) -> None:
        self.connections = connections
        self.dialect = dialect
        self.catalog = Catalog(connections)

    def create_database(self, name: str, primary: str) -> None:
        """Create a database with its primary shard: where what is not sharded lives."""
        self.connections.run(CONFIG, "admin", self.dialect.create_database(name, primary))

    def shard_collection(
        self,
        namespace: str,
        key: Mapping[str, Any],
        *,
        unique: bool = False,
        initial_chunks: int | None = None,
    ) -> None:
        """Create a collection sharded by ``key``: ``{"region": 1, "_id": 1}`` by ranges, ``{"sku": "hashed"}`` by hash.
        All of it is on the primary shard, except the chunks of a hashed key, which are spread over all shards
        (``initial_chunks``: how many)."""
        database, _, collection = namespace.partition(".")
        if self.dialect.coordinated:
            command: dict[str, Any] = {"_shardsvrCreateCollection": collection, "shardKey": key}
            if unique:
                command["unique"] = True
            if initial_chunks is not None:
                command["numInitialChunks"] = Int64(initial_chunks)
            self._on_primary(database, command)
        else:
            command = {"_configsvrShardCollection": namespace, "key": key, "unique": unique}
            command |= {"numInitialChunks": initial_chunks or 0, "getUUIDfromPrimaryShard": True}
            self.connections.run(CONFIG, "admin", {**command, "writeConcern": MAJORITY})
        self.catalog.forget(namespace)

    def split(self, namespace: str, at: Mapping[str, Any]) -> None:
        """Split the chunk that holds the shard key ``at`` there. Fields left out at the end are the least value."""
        table = self._sharded(namespace)
        whole = filled(table.key, at)
        chunk = table.chunk(whole)
        self.connections.run(chunk.shard, "admin", self.dialect.split(table, chunk, whole))
        self.catalog.forget(namespace)

    def move_chunk(
        self,
        namespace: str,
        find: Mapping[str, Any] | None = None,
        *,
        to: str,
        bounds: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
        wait: bool = True,
    ) -> None:
        """Move the chunk of the document ``find`` (its shard key; fields left out at the end are the least value), or
        the one with these ``bounds``, to another shard. ``wait`` until the old owner has deleted its copy too. A move
        that other work got in the way of is tried a few times, as the balancer would do it."""
        for attempt in range(_MOVE_ATTEMPTS):
            table = self._sharded(namespace)
            chunk = self._chunk(table, find, bounds)
            if chunk.shard == to:
                break
            try:
                self.connections.run(CONFIG, "admin", self.dialect.move(table, chunk, to, wait=wait))
            except OperationFailure as error:
                if error.code not in _MOVE_AGAIN | {_NO_BALANCER} or attempt == _MOVE_ATTEMPTS - 1:
                    raise
                time.sleep(_BALANCER_PAUSE_S if error.code == _NO_BALANCER else _MOVE_PAUSE_S)
        self.catalog.forget(namespace)

    def drop_collection(self, namespace: str) -> None:
        """Drop a collection, sharded or not, on every shard."""
        database, _, collection = namespace.partition(".")
        if self.dialect.coordinated:
            self._on_primary(database, {"_shardsvrDropCollection": collection})
        else:
            self.connections.run(CONFIG, "admin", {"_configsvrDropCollection": namespace, "writeConcern": MAJORITY})
        self.catalog.forget(namespace)

    def drop_database(self, name: str) -> None:
        """Drop a database on every shard."""
        if self.dialect.coordinated:
            self._on_primary(name, {"_shardsvrDropDatabase": 1})
        else:
            self.connections.run(CONFIG, "admin", {"_configsvrDropDatabase": name, "writeConcern": MAJORITY})
        self.catalog.forget_all()

    def rename(self, namespace: str, to: str, *, drop_target: bool = False) -> None:
        """Rename a collection, sharded or not, within its database (5.0 and later). ``to`` is a whole namespace."""
        self.dialect.need((5, 0), "Renaming a collection")
        database, _, collection = namespace.partition(".")
        command = {"_shardsvrRenameCollection": collection, "to": to, "dropTarget": drop_target, "stayTemp": False}
        self._on_primary(database, command)
        self.catalog.forget(namespace)
        self.catalog.forget(to)

    def refine_shard_key(self, namespace: str, key: Mapping[str, Any]) -> None:
        """Add fields to the shard key (5.0 and later). An index on the new key has to be there: ``create_index``."""
        self.dialect.need((5, 0), "Refining a shard key")
        database, _, collection = namespace.partition(".")
        self._on_primary(database, {"_shardsvrRefineCollectionShardKey": collection, "newShardKey": key})
        self.catalog.forget(namespace)

    def reshard(self, namespace: str, key: Mapping[str, Any], *, chunks: int = 2) -> None:
        """Distribute a collection again by another key, in ``chunks`` chunks (6.0). Writes may continue meanwhile."""
        self.dialect.need((6, 0), "Resharding a collection")
        command = {"_shardsvrReshardCollection": namespace, "key": key, "numInitialChunks": Int64(chunks)}
        self._on_primary(namespace.partition(".")[0], command, admin=True)
        self.catalog.forget(namespace)

    def move_primary(self, name: str, to: str) -> None:
        """Make another shard the primary of a database: what is not sharded moves there."""
        if self.dialect.series >= (6, 0):
            self._on_primary(name, {"_shardsvrMovePrimary": name, "to": to}, admin=True)
        else:
            self.connections.run(CONFIG, "admin", {"_configsvrMovePrimary": name, "to": to, "writeConcern": MAJORITY})
        self.catalog.forget_all()

    def drain(self, shard: str, others: Sequence[str]) -> None:
        """Move all that a shard owns to ``others`` in turn: its chunks, and the databases whose primary it is."""
        targets = cycle(others)
        for found in self.connections.find(CONFIG, "config.collections", {"dropped": {"$ne": True}}):
            for chunk in self.catalog.reload(found["_id"]).chunks:
                if chunk.shard == shard:
                    bounds = (chunk.minimum, chunk.maximum)
                    self.move_chunk(found["_id"], bounds=bounds, to=next(targets))
        for found in self.connections.find(CONFIG, "config.databases", {"primary": shard}):
            self.move_primary(found["_id"], next(targets))

    def coll_mod(self, namespace: str, **changes: Any) -> None:
        """``collMod`` on every shard, such as ``changeStreamPreAndPostImages={"enabled": True}`` (6.0)."""
        self.dialect.need((6, 0), "collMod")
        database, _, collection = namespace.partition(".")
        self._on_primary(database, {"_shardsvrCollMod": collection, **changes})

    def create_index(self, namespace: str, key: Mapping[str, Any], name: str) -> None:
        """Create an index on every shard that owns a part of the collection."""
        self._on_owners(namespace, "createIndexes", {"indexes": [{"key": key, "name": name}]})

    def drop_index(self, namespace: str, name: str) -> None:
        """Drop an index on every shard that owns a part of the collection."""
        self._on_owners(namespace, "dropIndexes", {"index": name})

    # --- inside ---

    def versions(self, table: Table, shard: str) -> dict[str, Any]:
        """The fields by which a shard knows whether the sender's table is out of date."""
        fields = {"shardVersion": self.dialect.shard_version(table, shard)}
        return fields if table.chunks else {**fields, "databaseVersion": table.database["version"]}

    def _on_primary(self, database: str, command: dict[str, Any], *, admin: bool = False) -> None:
        found = self.catalog.database(database)
        fields = {"databaseVersion": found["version"], "writeConcern": MAJORITY}
        self.connections.run(found["primary"], "admin" if admin else database, {**command, **fields})

    def _on_owners(self, namespace: str, name: str, fields: dict[str, Any]) -> None:
        database, _, collection = namespace.partition(".")
        table = self.catalog.reload(namespace)
        for shard in table.owners:
            command = {name: collection, **fields, **self.versions(table, shard), "writeConcern": MAJORITY}
            self.connections.run(shard, database, command)

    def _sharded(self, namespace: str) -> Table:
        table = self.catalog.reload(namespace)
        if not table.chunks:
            raise UsageError(f"{namespace} is not sharded", hint="Call shard_collection first")
        return table

    def _chunk(
        self,
        table: Table,
        find: Mapping[str, Any] | None,
        bounds: tuple[Mapping[str, Any], Mapping[str, Any]] | None,
    ) -> Chunk:
        if (find is None) == (bounds is None):
            raise UsageError("Name a chunk either by a document or by its bounds")
        if find is not None:
            return table.chunk(filled(table.key, key_values({p: k for p, k in table.key.items() if p in find}, find)))
        for chunk in table.chunks:
            if bounds == (chunk.minimum, chunk.maximum):
                return chunk
        raise UsageError(
            f"{table.namespace} has no chunk with these bounds", hint="router.table(...).chunks lists them"
        )
