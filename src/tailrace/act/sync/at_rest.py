"""The catalogue of a source as it was at one time, so that all later entries of the oplogs go on from it.

A collection that is being made under one of the server's own names becomes a user's later: ``$out``, a rename to
another database, ``convertToCapped`` and resharding fill one and rename it at their end. The same holds for a database
that is getting another primary shard: its collections are copied there before they count. The entry of the creation
comes before the catalogue's time then, and what was filled in so far is in no list and in no later entry. So nothing
begins in the middle of such work: it is waited for. So is a rename that some shards have carried out while the config
server still has the former name.

A primary lists what it has, whether a majority has it or not. If another member is elected meanwhile, what was listed
may have been rolled back, and no entry says so. So a list counts if the primary is the same before and after it, and a
majority has had all of its entries in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from pymongo import MongoClient

from tailrace.act.sync.catalog import DeploymentCatalog, OnSource, definitions_changed, read_catalog
from tailrace.act.sync.folded_catalog import is_in_the_making
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.printable import in_a_line
from tailrace.errors import SourceError
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import RETRY_SECONDS, Connection
from tailrace.read.source.listing import (
    INTERNAL_DATABASES,
    ListedCollection,
    database_names,
    list_collections,
    readable,
)
from tailrace.read.source.topology import Cluster

#: How long work that turns one collection into another may go on.
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.5
#: How many attempts to list the catalogue follow one another at once, and for how long others follow. On a busy machine
#: one takes seconds, and on an idle one fifty took one second.
_TRIES: Final = 10
_LISTED_S: Final = 300.0
_log = logging.getLogger("tailrace.sync")


def catalog_at_rest(
    deployment: MongoClient[Any] | Cluster,
    selection: OnSource,
    *,
    listed_s: float = _LISTED_S,
    patience_s: float = _PATIENCE_S,
    wait: Callable[[float], object] = time.sleep,
) -> tuple[DeploymentCatalog, ClusterTime]:
    """A time, and the catalogue exactly as it was then: no definition changed between that time and the end of
    reading, no member was elected, and no collection was in the making. Raises SourceError where definitions or
    primaries change during each attempt of ``listed_s`` seconds, or where one thing is in the making for ``patience_s``
    seconds; what ``wait`` raises comes through."""
    places, waited, before = places_of(deployment, RETRY_SECONDS), 0.0, ""
    tries, end = 0, time.monotonic() + listed_s
    while tries < _TRIES or time.monotonic() < end:
        elected = _elections(deployment)
        begun = places.now()
        making = next(in_the_making(deployment, selection), None)
        if making is not None:
            if making != before:
                waited, before = 0.0, making
            if waited >= patience_s:
                raise SourceError(making, hint=_HINT)
            if not waited:
                _log.warning("%s: waiting until that is done", making)
            wait(_PAUSE_S)
            waited += _PAUSE_S
            continue
        catalog = read_catalog(deployment, selection)
        if not definitions_changed(deployment, begun, places.now()) and _elections(deployment) == elected:
            return catalog, begun
        tries += 1
        if tries == _TRIES:
            _log.warning("collections and indexes of the source change all the time: waiting for a moment without that")
        if tries >= _TRIES:
            wait(_PAUSE_S)
    raise SourceError(
        "collections, views, indexes or primaries of the source changed during each attempt to list the collections",
        hint="Begin when collections and indexes are not being created, renamed or dropped all the time",
    )


_HINT: Final = (
    "A sync cannot begin in the middle of $out, mapReduce, convertToCapped, a rename to another database or of a "
    "sharded collection, a resharding or a change of a database's primary shard. Begin it when that is done; drop what "
    "an abandoned attempt has left behind"
)


def _elections(deployment: MongoClient[Any] | Cluster) -> list[Any]:
    """What tells the primaries, and the elections that made them, from others. A member that is no primary tells
    nothing: a client that leads to a secondary alone sees what a majority has, or what is going to have one."""
    clients = deployment.clients if isinstance(deployment, Cluster) else [deployment]
    return [_election(Connection(client, retry_seconds=RETRY_SECONDS)) for client in clients]


def _election(connection: Connection) -> Any:
    return connection.retrying(lambda: connection.client.admin.command("hello")).get("electionId")


def in_the_making(deployment: MongoClient[Any] | Cluster, selection: OnSource) -> Iterator[str]:
    """What keeps a copy from beginning now: a sentence for each collection that may become another one of the sync."""
    if isinstance(deployment, Cluster):
        yield from _on_shards(deployment, selection)
        return
    connection = Connection(deployment, retry_seconds=RETRY_SECONDS)
    connection.wait_for_hello()
    names = database_names(connection) if selection.databases is None else selection.databases
    for one in _listed(connection, names, selection):
        if is_in_the_making(one.namespace):
            yield f"{in_a_line(one.namespace)} is still being made into another collection"


def _on_shards(cluster: Cluster, selection: OnSource) -> Iterator[str]:
    config = Connection(cluster.config_client(), retry_seconds=RETRY_SECONDS)
    databases, collections = (cluster.config_collection(name) for name in ("databases", "collections"))
    primaries = config.retrying(lambda: {str(one["_id"]): str(one["primary"]) for one in databases.find()})
    found = config.retrying(lambda: list(collections.find({"dropped": {"$ne": True}}, {"uuid": 1})))
    sharded = {str(one["_id"]) for one in found}
    names = {bytes(one["uuid"]): str(one["_id"]) for one in found if "uuid" in one}
    wanted = primaries.keys() if selection.databases is None else primaries.keys() & set(selection.databases)
    for shard in cluster.shards():
        connection = Connection(cluster.client(shard.name), retry_seconds=RETRY_SECONDS)
        connection.wait_for_hello()
        for one in _listed(connection, sorted(wanted - INTERNAL_DATABASES), selection):
            namespace, named = one.namespace, names.get(one.uuid, one.namespace)
            database = namespace.partition(".")[0]
            if named != namespace and (selection.has(named) or selection.has(namespace)):
                yield f"{in_a_line(namespace)} on {shard.name} is {in_a_line(named)} on the config server"
            elif is_in_the_making(namespace):
                yield f"{in_a_line(namespace)} on {shard.name} is still being made into another collection"
            elif primaries[database] != shard.name and namespace not in sharded and selection.has(namespace):
                yield (
                    f"{in_a_line(namespace)}, which is not sharded, is on {shard.name}, while the primary shard of its "
                    f"database is {primaries[database]}"
                )


def _listed(connection: Connection, databases: Iterable[str], selection: OnSource) -> Iterator[ListedCollection]:
    for database in readable(databases, str, tells=False):
        if selection.may_cover(database):
            yield from list_collections(connection, database, {"type": "collection"})
