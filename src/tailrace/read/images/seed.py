"""Seeds a new image state: copies the documents as they were at one cluster time, before the first change.

Servers have no snapshot reads of capped collections (6.0.27, 5.0.4), and before 5.0 none at all. Such collections are
copied piece by piece, each as it is when it is read, and what the oplog holds from that one time on is then applied to
the copy: a piece may have some of it already, and has it once in the end, since oplog entries can be applied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import SourceError
from tailrace.read.images.fold import ImageFolder
from tailrace.read.images.key import state_key
from tailrace.read.images.state import ImageState
from tailrace.read.source.connection import Connection
from tailrace.read.source.failure import source_error
from tailrace.read.source.listing import ListedCollection, database_names, list_collections, readable
from tailrace.read.source.live import LiveSource

#: How many documents, at most, a batch of the copy holds, and about how many bytes.
_DOCUMENTS: Final = 5_000
_BYTES: Final = 4 << 20
#: Batches of an unfinished copy have numbers below this one. No cluster time is as small.
SEED_BATCHES: Final = 1 << 32
_TOO_OLD: Final = 239
_UNAVAILABLE: Final = 246
_BY_ID: Final = {"_id": 1}
#: How often the collections may change while a copy is about to begin.
_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class SeededFrom:
    """What a state is seeded from: a replica set's ``client``, and its ``source`` for entries of the oplog; ``folder``
    applies these to the state. ``snapshots``: whether the servers have snapshot reads."""

    client: MongoClient[Any]
    source: LiveSource
    folder: ImageFolder
    snapshots: bool

    def moves(self, collection: ListedCollection) -> bool:
        """Whether a collection goes on changing while it is copied."""
        return collection.capped or not self.snapshots


def seed(
    state: ImageState, given: SeededFrom, scope: Scope, *, witness: Callable[[], bytes | None] = lambda: None
) -> ClusterTime:
    """Copy every document of the scope's collections as it is at one cluster time. This time becomes the state's
    position and is returned. A state with part of an earlier copy is emptied first. ``witness`` as of
    ``ImageState.next_witness``.

    The server must keep its history for as long as the copy takes (``minSnapshotHistoryWindowInSeconds``, 5 minutes by
    default). Raises SourceError if it does not, and where a collection was dropped or renamed before it was copied, or
    one that is copied without a snapshot before all of them were; ChangeStreamHistoryLost if the oplog no longer
    reaches back to the beginning of such a copy.
    """
    state.clear()
    state.next_witness = witness
    connection = Connection(given.client)
    try:
        time, found = _beginning(given.client, connection, scope)
        number = 0
        for collection in found:
            for documents in _documents(given, collection, time):
                with state.batch(number) as batch:
                    batch.put((state_key(collection.uuid, document), document) for document in documents)
                number += 1
            if not given.moves(collection):
                _check_there(connection, collection)
        moving = list(filter(given.moves, found))
        if moving:
            for collection in moving:
                _check_there(connection, collection)
            number, time = _made_exact(given, time, number)
    except PyMongoError as error:
        raise source_error(error, given.client) from error
    with state.batch(int(time)):
        pass
    state.settle()
    return time


def _now(client: MongoClient[Any]) -> ClusterTime:
    return ClusterTime.from_timestamp(client["admin"].command("ping")["operationTime"])


def _beginning(
    client: MongoClient[Any], connection: Connection, scope: Scope
) -> tuple[ClusterTime, list[ListedCollection]]:
    """A time, and the collections that there are then, by the names that they have then: 7.0 reads what a name stood
    for at a time, and others what it stands for."""
    found = _collections(connection, scope)
    for _ in range(_LOOKS):
        time = _now(client)
        again = _collections(connection, scope, tells=False)
        if set(again) == set(found):
            return time, found
        found = again
    raise SourceError(
        f"collections were created, dropped or renamed during each of {_LOOKS} attempts to find a time to copy them at",
        hint="Open the stream again when that is over, or on fewer collections",
    )


def _made_exact(given: SeededFrom, after: ClusterTime, number: int) -> tuple[int, ClusterTime]:
    """Apply what the oplog holds from ``after`` until now, in batches from ``number`` on: until the last of them the
    state is an unfinished copy. Returns the number of the next batch, and the time that the state is at."""
    until = _now(given.client)
    for batch in given.source.read(after, until, batch_bytes_max=_BYTES):
        if batch.raw:
            numbered = batch._replace(high_water=ClusterTime(number))
            given.folder.fold(numbered, given.source.entries, again=True)
            number += 1
    return number, until


def _collections(connection: Connection, scope: Scope, *, tells: bool = True) -> list[ListedCollection]:
    """Those of the scope that can be read; the others are left out with a warning, the first time (``tells``)."""
    databases = [scope.database] if scope.database is not None else database_names(connection)
    query = {} if scope.collection is None else {"name": scope.collection}
    shown = [
        found
        for database in readable(databases, str, tells=tells)
        for found in list_collections(connection, database, query)
        if found.kind == "collection"
        and (scope.collection is not None or not found.namespace.partition(".")[2].startswith("system."))
    ]
    return readable(shown, lambda one: one.namespace, tells=tells)


def _check_there(connection: Connection, collection: ListedCollection) -> None:
    """A collection was read by its name, so that name must have meant it to the end."""
    database, _, name = collection.namespace.partition(".")
    if collection not in list_collections(connection, database, {"name": name}):
        raise SourceError(
            f"{collection.namespace} was dropped, renamed or converted while it was copied",
            hint="Open the stream again: it begins another copy",
        )


def _documents(given: SeededFrom, collection: ListedCollection, time: ClusterTime) -> Iterator[list[bytes]]:
    """The documents of a collection at ``time``, a batch at a time; of one that moves, as they are then or later."""
    database, _, name = collection.namespace.partition(".")
    command: dict[str, Any] = {"find": name, "batchSize": _DOCUMENTS}
    if given.moves(collection):
        # In the order of the index: a scan of a capped collection dies where the document that it stands at is removed.
        command["hint"] = _BY_ID
        command["readConcern"] = {"level": "majority", "afterClusterTime": time.to_timestamp()}
    else:
        command["readConcern"] = {"level": "snapshot", "atClusterTime": time.to_timestamp()}
    batch: list[bytes] = []
    size = 0
    try:
        with Connection(given.client).raw_cursor(database, command) as cursor:
            for document in cursor:
                batch.append(raw_bson.bytes_of(document))  # PyMongo gives a view of the whole reply from 4 kB on
                size += len(batch[-1])
                if len(batch) >= _DOCUMENTS or size >= _BYTES:
                    yield batch
                    batch, size = [], 0
    except OperationFailure as error:
        refused = _refused(collection, error)
        if refused is None:
            raise
        raise refused from error
    yield batch


def _refused(collection: ListedCollection, error: OperationFailure) -> SourceError | None:
    """The error for a copy that the server's history does not allow; ``None`` for any other."""
    hint = {
        _TOO_OLD: "Raise minSnapshotHistoryWindowInSeconds, so that the server keeps its history for the whole copy",
        _UNAVAILABLE: "Open the stream again: an index or the collection itself was changed just then",
    }.get(error.code or 0)
    if hint is None:
        return None
    text = (error.details or {}).get("errmsg", error)
    return SourceError(
        f"{collection.namespace} cannot be copied as it was at one time: {text}", code=error.code, hint=hint
    )
