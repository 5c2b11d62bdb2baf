"""For a stream that is far behind, the next batch is read while the last one is processed: the events and their order
are the same, and what was read ahead is dropped when the stream ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pymongo
import pytest
from bson.raw_bson import RawBSONDocument

from tailrace.embedded import ReplicaSet
from tests.gateway.gateways import RunningGateway, running_gateway

pytestmark = pytest.mark.mongod

_LIMIT_S = 300.0
_DOCUMENTS = 400
_TEXT = "x" * 100_000  # a reply of the oplog holds 160 of them


class Behind(NamedTuple):
    running: RunningGateway
    server: str
    token: Any


@pytest.fixture(scope="module")
def behind(replica_set: ReplicaSet) -> Iterator[Behind]:
    """A gateway, and a token from before 40 MB of writes."""
    with pymongo.MongoClient[Any](replica_set.uri) as client, running_gateway(replica_set.uri) as running:
        database = client.gatewayAhead
        with database.c.watch() as stream:
            token = stream.resume_token
        for begin in range(0, _DOCUMENTS, 50):
            database.c.insert_many([{"_id": number, "text": _TEXT} for number in range(begin, begin + 50)])
        database.c.update_many({"_id": {"$gte": _DOCUMENTS - 20}}, {"$set": {"seen": True}})
        database.c.delete_many({"_id": {"$lt": 20}})
        yield Behind(running, replica_set.uri, token)
        client.drop_database("gatewayAhead")


def events(uri: str, token: Any, **options: Any) -> list[bytes]:
    with pymongo.MongoClient[RawBSONDocument](uri, document_class=RawBSONDocument) as client:
        collection = client.gatewayAhead.c
        with collection.watch(resume_after=token, full_document="updateLookup", **options) as stream:
            return [next(stream).raw for _ in range(_DOCUMENTS + 40)]


def room(running: RunningGateway) -> int:
    return running.call(lambda: running.gateway.engine._ahead_room.free)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("options", [{}, {"batch_size": 7}], ids=["large replies", "small replies"])
def test_the_events_are_the_server_s(behind: Behind, options: dict[str, Any]) -> None:
    native = events(behind.server, behind.token, **options)
    assert events(behind.running.uri(), behind.token, **options) == native
    until(lambda: room(behind.running) == 4)


def test_what_was_read_ahead_is_given_up_with_the_stream(behind: Behind) -> None:
    with pymongo.MongoClient[Any](behind.running.uri()) as client:
        streams = [client.gatewayAhead.c.watch(resume_after=behind.token, batch_size=3) for _ in range(6)]
        for stream in streams:
            assert next(stream)["operationType"] == "insert"
        assert room(behind.running) == 0  # and two streams go without
        for stream in streams:
            stream.close()
        until(lambda: room(behind.running) == 4)
    assert len(events(behind.running.uri(), behind.token)) == _DOCUMENTS + 40


def test_a_client_that_has_gone_keeps_nobody_from_reading_ahead_and_one_that_returns_has_lost_nothing(
    behind: Behind,
) -> None:
    """Such streams held the places until their cursors expired. No test had streams that stay open and ask for
    nothing."""
    native = events(behind.server, behind.token)
    room_of = behind.running.gateway.engine._ahead_room
    with pymongo.MongoClient[RawBSONDocument](behind.running.uri(), document_class=RawBSONDocument) as client:
        idle = [client.gatewayAhead.c.watch(resume_after=behind.token, batch_size=10) for _ in range(4)]
        seen = [[next(stream).raw] for stream in idle]
        holders = behind.running.call(lambda: set(room_of._holders))
        assert len(holders) == 4
        room_of._idle_s = 0.0
        try:
            with client.gatewayAhead.c.watch(resume_after=behind.token, batch_size=3) as another:
                next(another)
                assert len(behind.running.call(lambda: holders - set(room_of._holders))) == 1
        finally:
            room_of._idle_s = 10.0
        for stream, begun in zip(idle, seen, strict=True):
            with stream:
                begun += [next(stream).raw for _ in range(199)]  # more than was read ahead before it became idle
            assert begun == native[:200]
    until(lambda: room(behind.running) == 4)


def test_a_stream_that_wants_little_of_a_long_stretch_is_sent_little_of_it(replica_set: ReplicaSet) -> None:
    """The gateway read every entry for it, whatever the scope and the ``$match``, unlike ``watch()``. No test had
    looked at what the server sends for a stream that is far behind."""

    def seen(uri: str, token: Any) -> list[bytes]:
        found: list[bytes] = []
        with (
            pymongo.MongoClient[RawBSONDocument](uri, document_class=RawBSONDocument) as client,
            client.gatewayLittle.wanted.watch(resume_after=token, batch_size=10) as stream,
        ):
            while len(found) < 100:
                found.append(next(stream).raw)
        return found

    with pymongo.MongoClient[Any](replica_set.uri) as client, running_gateway(replica_set.uri) as running:
        database = client.gatewayLittle
        with database.wanted.watch() as stream:
            token = stream.resume_token
        for begin in range(0, 5000, 50):
            database.other.insert_many([{"_id": number, "text": "x" * 12_000} for number in range(begin, begin + 50)])
            database.wanted.insert_one({"_id": begin})
        native = seen(replica_set.uri, token)
        before = client.admin.command("serverStatus")["network"]["bytesOut"]
        assert seen(running.uri(), token) == native
        sent = client.admin.command("serverStatus")["network"]["bytesOut"] - before
        client.drop_database("gatewayLittle")
    # Two replies of 16 MB are already asked for before it is known that the filter pays.
    assert sent < 45_000_000, "the server has sent most of 60 MB"
