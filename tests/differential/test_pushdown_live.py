"""Streams whose oplog query has a filter: what they promise, and that they give the same events as without it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import bson
import pymongo
import pytest
from bson.codec_options import CodecOptions

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tailrace.watch.client.change_stream import OplogChangeStream
from tailrace.watch.client.request import WatchRequest

pytestmark = pytest.mark.mongod

_DEADLINE_S = 300
_DELETES = {"$match": {"operationType": "delete"}}


@pytest.fixture(scope="module")
def client(replica_set: ReplicaSet) -> Iterator[pymongo.MongoClient[Any]]:
    with pymongo.MongoClient[Any](replica_set.uri) as connected:
        yield connected
        connected.drop_database("pushdown_live")


@pytest.fixture
def source(replica_set: ReplicaSet) -> Iterator[MongodSource]:
    with closing(MongodSource(replica_set.uri)) as opened:
        yield opened


def stream_of(
    source: MongodSource, *stages: dict[str, Any], pushes_down: bool = True, **more: Any
) -> OplogChangeStream:
    scope = Scope.of_collection("pushdown_live", "watched")
    options: CodecOptions[Any] = CodecOptions()
    request = WatchRequest(scope=scope, codec_options=options, pipeline=list(stages), max_await_time_ms=50, **more)
    return OplogChangeStream(source, request, pushes_down=pushes_down)


def time_of(token: Any) -> ClusterTime:
    return ResumeToken.parse(bson.encode(token)).cluster_time


def read_to(stream: OplogChangeStream, end: ClusterTime) -> list[Any]:
    """The events up to ``end``, which the resume token must reach."""
    found = []
    deadline = time.monotonic() + _DEADLINE_S
    while time_of(stream.resume_token) < end and stream.alive:
        assert time.monotonic() < deadline, "the resume token does not move"
        event = stream.try_next()
        if event is not None:
            found.append(event)
    return found


def test_a_stream_of_which_nothing_passes_moves_its_resume_token(
    client: pymongo.MongoClient[Any], source: MongodSource
) -> None:
    database = client["pushdown_live"]
    database.create_collection("watched")
    with closing(stream_of(source, _DELETES)) as stream:
        for number in range(3):
            database["other"].insert_many([{"n": each} for each in range(50)])
            database["watched"].insert_one({"n": number})
            newest = source.newest()
            assert read_to(stream, newest) == []
        token = stream.resume_token
    # A stream can go on from what the quiet stream promised.
    database["watched"].delete_one({"n": 1})
    with closing(stream_of(source, _DELETES, resume_after=token)) as stream:
        assert [event["operationType"] for event in read_to(stream, source.newest())] == ["delete"]


def test_events_among_many_that_do_not_pass_come_while_they_are_written(
    client: pymongo.MongoClient[Any], source: MongodSource
) -> None:
    database = client["pushdown_live"]
    with closing(stream_of(source, _DELETES)) as stream:
        assert stream.try_next() is None
        for number in range(5):
            database["watched"].insert_one({"_id": f"early {number}"})
            database["watched"].delete_one({"_id": f"early {number}"})
            event = stream.next()
            assert event["documentKey"] == {"_id": f"early {number}"}


@pytest.mark.parametrize(
    "stages",
    [
        (),
        (_DELETES,),
        ({"$match": {"documentKey._id": {"$in": ["same 1", "same 3"]}}},),
        ({"$set": {"x": 1}}, {"$match": {"fullDocument.n": {"$gte": 2}, "ns.coll": {"$regex": "^wat"}}}),
        ({"$match": {"updateDescription.updatedFields.n": 7}},),
        ({"$match": {"txnNumber": {"$exists": True}}},),
    ],
)
def test_a_stream_gives_the_same_events_and_tokens_with_and_without(
    client: pymongo.MongoClient[Any], source: MongodSource, stages: tuple[dict[str, Any], ...]
) -> None:
    collection = client["pushdown_live"]["watched"]
    start = source.newest().tick()
    collection.delete_many({})
    collection.insert_many([{"_id": f"same {number}", "n": number} for number in range(5)])
    collection.update_one({"_id": "same 1"}, {"$set": {"n": 7}})
    collection.replace_one({"_id": "same 3"}, {"n": 9})
    client["pushdown_live"]["other"].insert_many([{} for _ in range(200)])
    with client.start_session() as session, session.start_transaction():
        collection.insert_one({"_id": "in a transaction"}, session=session)
        collection.delete_one({"_id": "same 2"}, session=session)
    end = source.newest()
    both = []
    for pushes_down in (True, False):
        begun = {"start_at_operation_time": start.to_timestamp()}
        with closing(stream_of(source, *stages, pushes_down=pushes_down, **begun)) as stream:
            both.append(read_to(stream, end))
    assert both[0] == both[1]
    assert both[0]


def test_a_range_with_a_filter_ends_where_it_should_and_moves_in_windows(
    client: pymongo.MongoClient[Any], source: MongodSource
) -> None:
    with closing(stream_of(source, _DELETES)) as stream:
        asked = stream._stream.oplog_filter
    assert asked is not None
    collection = client["pushdown_live"]["watched"]
    start = source.newest()
    collection.insert_many([{"_id": f"range {number}"} for number in range(30)])
    collection.delete_one({"_id": "range 7"})
    end = source.newest()
    batches = list(source.read(start, end, oplog_filter=asked))
    assert batches[-1].high_water == end
    entries = [bson.decode(batch.raw) for batch in batches if batch.raw]
    assert [entry["op"] for entry in entries] == ["d"]
    assert [batch.high_water for batch in batches] == sorted(batch.high_water for batch in batches)
