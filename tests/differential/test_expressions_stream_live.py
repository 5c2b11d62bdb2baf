"""The user's pipeline on real change streams: the server's own stream with the stages, and ours on the events of the
plain stream, byte for byte."""

from __future__ import annotations

from typing import Any

import bson
import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core.expression import compile_stages
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tests.server_in_use import LANGUAGE

pytestmark = pytest.mark.mongod

_RAW = CodecOptions(document_class=RawBSONDocument)

#: PyMongo resumes a stream that ended with an invalidate which the stages filtered out; the server refuses that.
RESUMED_AFTER_INVALIDATE = 260

PIPELINES: list[list[dict[str, Any]]] = [
    [{"$match": {"operationType": "update"}}],
    [{"$match": {"operationType": {"$in": ["insert", "delete"]}, "fullDocument.n": {"$gte": 2}}}],
    [{"$match": {"$expr": {"$gt": ["$fullDocument.n", 1]}}}],
    [{"$match": {"updateDescription.updatedFields.a.b": {"$exists": True}}}],
    [{"$match": {"fullDocument.tags": {"$elemMatch": {"$in": ["x", "y"]}}}}],
    [
        {
            "$project": {
                "operationType": 1,
                "fullDocument.tags": 1,
                "size": {"$size": {"$ifNull": ["$fullDocument.tags", []]}},
            }
        }
    ],
    [{"$project": {"wallTime": 0, "fullDocument.a": 0, "ns.db": 0}}],
    [{"$unset": ["wallTime", "clusterTime"]}, {"$set": {"wallTime": "gone", "added.deep": "$ns.coll"}}],
    [{"$set": {"when": {"$dateToString": {"date": "$wallTime", "timezone": "Europe/Berlin"}}, "fullDocument.k": 1}}],
    [{"$replaceWith": {"_id": "$_id", "op": {"$toUpper": "$operationType"}, "key": "$documentKey", "no": "$nope"}}],
    [{"$redact": {"$cond": [{"$eq": ["$n", 2]}, "$$PRUNE", "$$DESCEND"]}}],
    [
        {
            "$set": dict.fromkeys(
                ("updateDescription", "fullDocument.k", "documentKey", "to", "stateBeforeChange", "lsid"), 1
            )
        }
    ],
    [{"$set": {"half": {"$divide": [1, {"$subtract": ["$fullDocument.n", 2]}]}}}],
]


def _write(collection: Any) -> None:
    collection.insert_one({"_id": 1, "n": 1, "tags": ["x", "z"], "a": {"b": 1}})
    collection.insert_one({"_id": 2, "n": 2, "tags": [], "a": {"b": bson.Int64(2)}})
    collection.update_one({"_id": 1}, {"$set": {"a.b": 3, "tags.1": "y"}, "$unset": {"n": ""}})
    collection.replace_one({"_id": 2}, {"n": bson.Decimal128("2.0"), "list": [{"n": 2}, {"n": 3}]})
    collection.delete_one({"_id": 1})


def _events(cursor: Any, count: int) -> list[bytes]:
    """The next events, up to an empty batch after the last write, or up to an error, which is given by its code."""
    found: list[bytes] = []
    for _ in range(count + 2):
        if not cursor.alive:
            break
        try:
            event = cursor.try_next()
        except pymongo.errors.OperationFailure as error:
            if error.code != RESUMED_AFTER_INVALIDATE:
                raise
            break
        if event is not None:
            found.append(event.raw)
    return found


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("place", range(len(PIPELINES)))
def test_our_stages_give_the_bytes_of_the_servers_own_stream(
    replica_set: ReplicaSet, place: int, *, expanded: bool
) -> None:
    stages = PIPELINES[place]
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        collection = client["expressions_live"].get_collection(f"c{place}{expanded}", codec_options=_RAW)
        start = client.admin.command("ping")["operationTime"]
        _write(collection)
        collection.drop()
        begun: dict[str, Any] = {
            "start_at_operation_time": bson.Timestamp(start.time, start.inc + 1),
            "max_await_time_ms": 200,
        }
        begun["show_expanded_events"] = expanded
        with collection.watch(**begun) as plain:
            events = _events(plain, 9)
        assert len(events) >= 6
        compiled = compile_stages(
            [bson.encode(stage) for stage in stages], show_expanded_events=expanded, version=LANGUAGE
        )
        ours: list[bytes] = []
        code = None
        for event in events:
            try:
                out = compiled.apply(event)
            except TailraceError as error:
                code = error.code
                break
            ours += [] if out is None else [out]
        if code is None:
            with collection.watch(stages, **begun) as native:
                assert _events(native, 9) == ours
        else:
            with pytest.raises(pymongo.errors.OperationFailure) as raised, collection.watch(stages, **begun) as native:
                _events(native, 9)
            assert raised.value.code == code
