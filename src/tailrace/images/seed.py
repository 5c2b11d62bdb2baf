"""Seeds a new image state: copies the documents as they were at one cluster time, before the first change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.errors import SourceError
from tailrace.images.key import state_key
from tailrace.images.state import ImageState
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.source.failure import source_error

_RAW: Final[CodecOptions[Any]] = CodecOptions(document_class=RawBSONDocument)
_DOCUMENTS: Final = 5_000
#: Batches of an unfinished copy have numbers below this one. No cluster time is as small.
SEED_BATCHES: Final = 1 << 32
_INTERNAL: Final = frozenset({"admin", "config", "local"})


def seed(state: ImageState, client: MongoClient[Any], scope: Scope) -> ClusterTime:
    """Copy every document of the scope's collections as it is at one cluster time. This time becomes the state's
    position and is returned. A state with part of an earlier copy is emptied first.

    The server must keep its history for as long as the copy takes (``minSnapshotHistoryWindowInSeconds``, 5 minutes by
    default). Raises SourceError if it does not, and if it is older than 5.0.
    """
    state.clear()
    try:
        with client.start_session() as session:
            time = client["admin"].command("ping", session=session)["operationTime"]
            number = 0
            for database, name, uuid in _collections(client, scope, session):
                for documents in _documents(client, database, name, time, session):
                    with state.batch(number) as batch:
                        batch.put((state_key(uuid, document), document) for document in documents)
                    number += 1
    except OperationFailure as error:
        if error.code in (239, 246, 72):  # SnapshotTooOld, SnapshotUnavailable, and 4.4's refusal
            raise SourceError(
                f"the collections cannot be copied as they were at one time: {error}",
                code=error.code,
                hint="Raise minSnapshotHistoryWindowInSeconds, or begin at a time when the collection was empty; "
                "servers before 5.0 have no snapshot reads",
            ) from error
        raise source_error(error, client) from error
    except PyMongoError as error:
        raise source_error(error, client) from error
    begun = ClusterTime((time.time << 32) | time.inc)
    with state.batch(int(begun)):
        pass
    state.settle()
    return begun


def _collections(client: MongoClient[Any], scope: Scope, session: Any) -> Iterator[tuple[str, str, bytes]]:
    databases = [scope.database] if scope.database is not None else client.list_database_names(session=session)
    for database in databases:
        if database in _INTERNAL:
            continue
        for found in client[database].list_collections(session=session):
            name = found["name"]
            wanted = name == scope.collection if scope.collection is not None else not name.startswith("system.")
            if wanted and found["type"] == "collection":
                uuid = found["info"]["uuid"]
                yield database, name, uuid if isinstance(uuid, bytes) else uuid.bytes


def _documents(client: MongoClient[Any], database: str, name: str, time: Any, session: Any) -> Iterator[list[bytes]]:
    """The documents of a collection at ``time``, a batch at a time."""
    source = client[database]
    concern = {"level": "snapshot", "atClusterTime": time}
    command = {"find": name, "readConcern": concern, "batchSize": _DOCUMENTS}
    reply = source.command(command, session=session, codec_options=_RAW)["cursor"]
    yield [document.raw for document in reply["firstBatch"]]
    while cursor := reply["id"]:
        more = {"getMore": cursor, "collection": name, "batchSize": _DOCUMENTS}
        reply = source.command(more, session=session, codec_options=_RAW)["cursor"]
        yield [document.raw for document in reply["nextBatch"]]
