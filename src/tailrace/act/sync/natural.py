"""Capped collections in the order of their storage. No server reads them at a time of its past (246), so what came
meanwhile is recognised in another way: record ids only grow in them, and the oplog has their inserts in the order in
which they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple, cast

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, parse_entry
from tailrace.errors import SourceError
from tailrace.read.snapshot.chunk import id_alone
from tailrace.read.source.connection import RETRY_SECONDS, Connection, majority_after
from tailrace.read.source.failure import source_error
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.raw_reply import RawReplyCursor

#: The scan was overtaken by writers, or the collection is another one: CappedPositionLost, CursorNotFound,
#: NamespaceNotFound, QueryPlanKilled.
AGAIN: Final = frozenset({26, 43, 136, 175})
_TOGETHER: Final = 10_000
#: ``$recordId`` is put after a document's own fields.
_TAIL: Final = b"\x12$recordId\x00"
_TAIL_SIZE: Final = len(_TAIL) + 8
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)


class Lying(NamedTuple):
    """A document and its record id, which is larger than those before it."""

    record: int
    document: bytes


def in_natural_order(
    client: MongoClient[Any], database: str, uuid: bytes, after: ClusterTime | None = None, *, newest: bool = False
) -> Iterator[Lying]:
    """The documents that a majority has, from the first to the last, or ``newest`` alone; read when everything up to
    ``after`` was committed. Raises SourceError, with a code of ``AGAIN`` where another scan may do."""
    options: dict[str, Any] = {"limit": -1} if newest else {"batch_size": _TOGETHER}
    hint = [("$natural", -1 if newest else 1)]
    try:
        there = _by_uuid(client, database, uuid, after)
        with closing(RawReplyCursor(there, {}, hint=hint, show_record_id=True, **options)) as cursor:
            for reply in cursor:
                for found in raw_bson.split(reply):
                    yield _apart(found)
    except PyMongoError as error:
        raise source_error(error, client) from None


def last_inserted(client: MongoClient[Any], database: str, uuid: bytes, now: ClusterTime) -> tuple[int, ClusterTime]:
    """The record id of the last document, and a time, such that every document up to it was inserted up to that time,
    and every other after it. ``now``: a time that the collection's member has reached."""
    newest = next(in_natural_order(client, database, uuid, now, newest=True), None)
    if newest is None:
        return -1, now
    connection = Connection(client, retry_seconds=RETRY_SECONDS)
    reply = connection.retrying(lambda: client.admin.command("ping", read_preference=client.read_preference))
    until = ClusterTime.from_timestamp(reply["operationTime"])
    key = id_alone(newest.document)
    inserted = [one for one in changes(client, uuid, now, until) if one.operation == "i" and one.o is not None]
    of_it = [one.cluster_time for one in inserted if one.o is not None and id_alone(one.o) == key]
    return newest.record, max([now, *of_it])


def changes(client: MongoClient[Any], uuid: bytes, after: ClusterTime, until: ClusterTime) -> list[OplogEntry]:
    """What the oplog has of one collection between two times."""
    query = bson.encode({"ui": Binary(uuid, 4)})
    found = []
    for batch in MongodSource(client).read(after, until, oplog_filter=query):
        found += [parse_entry(one) for one in raw_bson.split(batch.raw)]
    return found


def _apart(found: bytes) -> Lying:
    at = len(found) - 1 - _TAIL_SIZE
    if found[at : at + len(_TAIL)] != _TAIL:
        raise SourceError("a document came without its record id")
    record = raw_bson.read_int64(found, at + len(_TAIL))
    return Lying(record, raw_bson.encode_document(found[4:at]))


def _by_uuid(client: MongoClient[Any], database: str, uuid: bytes, after: ClusterTime | None) -> Collection[Any]:
    there = client.get_database(database, codec_options=_RAW, read_concern=majority_after(after))
    found: Any = there.get_collection("_")
    found._name = Binary(uuid, 4)
    return cast(Collection[Any], found)
