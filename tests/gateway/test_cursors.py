"""Streams through the gateway beside the server's own, on 6.0, 5.0 and 4.4: events, tokens, replies and errors."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import bson
import pymongo
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.side_by_side import VERSIONS, SideBySide, drained, side_by_side

pytestmark = pytest.mark.mongod

_LIMIT_S = 300.0
SCOPES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("shop", "orders", {}),
    ("shop", 1, {}),
    ("admin", 1, {"allChangesForCluster": True}),
)


@pytest.fixture(scope="module", params=VERSIONS)
def sides(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    with side_by_side(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def written(sides: SideBySide) -> Timestamp:
    """Some of everything, majority-committed (4.4 does not wait for that by itself); the time before it."""
    with pymongo.MongoClient[dict[str, Any]](sides.running.uri(), w="majority") as client:
        client.shop.orders.insert_one({"_id": 0})
        before: Timestamp = client.admin.command("ping")["operationTime"]
        orders = client.shop.orders
        orders.insert_many({"_id": number, "n": number / 3, "text": "x" * number} for number in range(1, 8))
        orders.update_one({"_id": 1}, {"$set": {"a": [1, 2, 3]}})
        orders.update_one({"_id": 1}, {"$unset": {"text": 1}, "$push": {"a": 4}})
        orders.replace_one({"_id": 2}, {"whole": True})
        orders.delete_one({"_id": 3})
        with client.start_session() as session, session.start_transaction():
            orders.insert_one({"_id": 8}, session=session)
            client.shop.items.insert_one({"_id": 8}, session=session)
            orders.update_one({"_id": 8}, {"$inc": {"n": 1}}, session=session)
        orders.create_index("n")
        client.shop.items.rename("things")
        client.blog.posts.insert_one({"_id": "one"})
        client.shop.things.drop()
        orders.drop()
        client.drop_database("blog")
    return before


def stage(before: Timestamp, **options: Any) -> list[dict[str, Any]]:
    return [{"$changeStream": {**options, "startAtOperationTime": before}}]


@pytest.mark.parametrize(("database", "collection", "options"), SCOPES)
@pytest.mark.parametrize("more", [{}, {"fullDocument": "updateLookup"}])
def test_the_same_events_come_as_from_the_server(
    sides: SideBySide,
    written: Timestamp,
    *,
    database: str,
    collection: Any,
    options: dict[str, Any],
    more: dict[str, Any],
) -> None:
    command = {"aggregate": collection, "pipeline": stage(written, **options, **more), "cursor": {"batchSize": 3}}
    native, through = drained(sides.server, database, command), drained(sides.gateway, database, command)
    assert through == native
    assert len(native[0]) > 10


def test_tokens_of_every_event_cross_both_ways(sides: SideBySide, written: Timestamp) -> None:
    whole = {"aggregate": 1, "pipeline": stage(written, allChangesForCluster=True), "cursor": {}}
    tokens = {
        name: drained(wire, "admin", whole)[0] for name, wire in (("ours", sides.gateway), ("their", sides.server))
    }
    for taken_from, resumed_at in (("ours", sides.server), ("their", sides.gateway)):
        for number, event in enumerate(tokens[taken_from]):
            token = bson.decode(event)["_id"]
            pipeline = [{"$changeStream": {"allChangesForCluster": True, "resumeAfter": token}}]
            command = {"aggregate": 1, "pipeline": pipeline, "cursor": {}}
            assert drained(resumed_at, "admin", command)[0] == tokens["their"][number + 1 :]


WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("shop", {"pipeline": [{"$changeStream": {"fullDocument": "bad"}}], "cursor": {}}),
    ("shop", {"pipeline": [{"$changeStream": {}}, {"$nothing": 1}], "cursor": {}}),
    ("shop", {"pipeline": [{"$changeStream": {}}, {"$out": "x"}], "cursor": {}}),
    ("shop", {"pipeline": [{"$changeStream": {"resumeAfter": {"_data": "zz"}}}], "cursor": {}}),
    (
        "shop",
        {"pipeline": [{"$changeStream": {"startAtOperationTime": Timestamp(1, 1), "resumeAfter": {"_data": "82"}}}]},
    ),
    ("shop", {"pipeline": [{"$changeStream": {}}]}),
    ("shop", {"pipeline": [{"$changeStream": {}}], "cursor": {"batchSize": -1}}),
    ("shop", {"pipeline": [{"$changeStream": {}}], "cursor": {}, "readConcern": {"level": "local"}}),
    ("local", {"pipeline": [{"$changeStream": {}}], "cursor": {}}),
)


@pytest.mark.parametrize(("database", "fields"), WRONG)
def test_errors_of_an_aggregate_are_the_server_s(sides: SideBySide, database: str, fields: dict[str, Any]) -> None:
    theirs, _ = sides.both(database, {"aggregate": "orders", **fields})
    assert theirs["ok"] == 0


def opened(sides: SideBySide, **more: Any) -> tuple[Int64, Int64]:
    """A stream on both sides; the ids of their cursors."""
    command = {"aggregate": "quiet", "pipeline": [{"$changeStream": {}}], "cursor": {}, **more}
    native, through = sides.server.run("shop", command), sides.gateway.run("shop", command)
    assert list(native) == list(through)
    return Int64(native["cursor"]["id"]), Int64(through["cursor"]["id"])


def test_a_cursor_is_killed_once(sides: SideBySide) -> None:
    theirs, ours = opened(sides)
    for _ in range(2):
        native, through = (
            bson.decode(wire.exchange(bson.encode({"killCursors": "quiet", "cursors": [one], "$db": "shop"})))
            for wire, one in ((sides.server, theirs), (sides.gateway, ours))
        )
        assert list(native) == list(through)
        lists = [[len(reply[name]) for name in ("cursorsKilled", "cursorsNotFound")] for reply in (native, through)]
        assert lists[0] == lists[1]
    native, through = (
        bson.decode(wire.exchange(bson.encode({"getMore": one, "collection": "quiet", "$db": "shop"})))
        for wire, one in ((sides.server, theirs), (sides.gateway, ours))
    )
    assert through["code"] == native["code"] == 43
    assert through["errmsg"] == f"cursor id {ours} not found"


def test_one_command_kills_our_cursors_and_the_server_s(sides: SideBySide) -> None:
    _, ours = opened(sides)
    sides.server.run("shop", {"insert": "many", "documents": [{} for _ in range(5)]})
    theirs = sides.gateway.run("shop", {"find": "many", "batchSize": 2})["cursor"]["id"]
    assert theirs
    reply = sides.gateway.run("shop", {"killCursors": "many", "cursors": [Int64(77), Int64(theirs), Int64(ours)]})
    assert reply["cursorsKilled"] == [theirs, ours]
    assert reply["cursorsNotFound"] == [77]
    assert list(reply)[-2:] == ["$clusterTime", "operationTime"]


@pytest.mark.parametrize(
    ("opening", "reading"),
    [
        ({}, {"lsid": {"id": Binary(uuid.uuid4().bytes, 4)}}),
        ({"lsid": {"id": Binary(uuid.uuid4().bytes, 4)}}, {}),
        ({"lsid": {"id": Binary(uuid.uuid4().bytes, 4)}}, {"lsid": {"id": Binary(uuid.uuid4().bytes, 4)}}),
        ({}, {"collection": "other"}),
        ({}, {"maxTimeMS": -1}),
        ({}, {"batchSize": "many"}),
        ({}, {"unknown": 1}),
    ],
)
def test_errors_of_a_get_more_are_the_server_s(
    sides: SideBySide, opening: dict[str, Any], reading: dict[str, Any]
) -> None:
    ids = opened(sides, **opening)
    native, through = (
        bson.decode(wire.exchange(bson.encode({"getMore": one, "collection": "quiet", **reading, "$db": "shop"})))
        for wire, one in zip((sides.server, sides.gateway), ids, strict=True)
    )
    for reply, one in ((native, ids[0]), (through, ids[1])):
        del reply["$clusterTime"], reply["operationTime"]
        reply["errmsg"] = reply["errmsg"].replace(str(one), "<the id>")
    assert through == native
    assert native["ok"] == 0


def test_a_get_more_that_waits_is_killed_from_another_connection(sides: SideBySide) -> None:
    _, ours = opened(sides)
    with Wire.to(sides.running.uri()) as waiting:
        replies: list[dict[str, Any]] = []
        command = bson.encode({"getMore": ours, "collection": "quiet", "maxTimeMS": 600_000, "$db": "shop"})
        thread = threading.Thread(target=lambda: replies.append(bson.decode(waiting.exchange(command), ANY_VALUE)))
        thread.start()
        until(lambda: sides.running.call(lambda: sides.running.gateway.engine.streams[ours].is_busy))
        killed = sides.gateway.run("shop", {"killCursors": "quiet", "cursors": [ours]})
        assert killed["cursorsKilled"] == [ours]
        thread.join(_LIMIT_S)
    assert [reply["code"] for reply in replies] == [237]
    assert "errorLabels" not in replies[0]


def test_a_get_more_that_comes_with_a_kill_does_not_hold_up_the_one_that_waits(sides: SideBySide) -> None:
    """The gateway let the first one wait again, to its end. No test had sent both at the same moment."""
    _, ours = opened(sides)
    engine = sides.running.gateway.engine
    read = bson.encode({"getMore": ours, "collection": "quiet", "maxTimeMS": 600_000, "$db": "shop"})
    tasks: list[asyncio.Task[bytes]] = []
    with Wire.to(sides.running.uri()) as waiting:
        replies: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: replies.append(bson.decode(waiting.exchange(read), ANY_VALUE)))
        thread.start()
        until(lambda: sides.running.call(lambda: engine.streams[ours].is_busy))

        def kill_and_read() -> None:
            stream = engine.streams[ours]
            engine.kill([stream])
            tasks.append(asyncio.ensure_future(engine.get_more(stream, "shop", read)))

        sides.running.call(kill_and_read)
        thread.join(_LIMIT_S)
    assert [reply["code"] for reply in replies] == [237]
    until(lambda: sides.running.call(tasks[0].done))
    assert bson.decode(tasks[0].result())["code"] == 43


def test_a_client_that_leaves_a_get_more_leaves_no_cursor(sides: SideBySide) -> None:
    _, ours = opened(sides)
    engine = sides.running.gateway.engine
    with Wire.to(sides.running.uri()) as waiting:
        command = bson.encode({"getMore": ours, "collection": "quiet", "maxTimeMS": 600_000, "$db": "shop"})

        def wait() -> None:
            with pytest.raises(OSError):  # noqa: PT011  whatever a closed socket raises
                waiting.exchange(command)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: sides.running.call(lambda: engine.streams[ours].is_busy))
        waiting._socket.shutdown(2)
        thread.join(_LIMIT_S)
    until(lambda: sides.running.call(lambda: ours not in engine.streams))


def test_a_get_more_may_come_on_another_connection(sides: SideBySide) -> None:
    _, ours = opened(sides)
    sides.server.run("shop", {"insert": "quiet", "documents": [{"_id": 1}]})
    with Wire.to(sides.running.uri()) as other:
        reply = other.run("shop", {"getMore": ours, "collection": "quiet", "maxTimeMS": 60_000})
        assert [event["documentKey"]["_id"] for event in reply["cursor"]["nextBatch"]] == [1]
        other.run("shop", {"killCursors": "quiet", "cursors": [ours]})


def until(holds: Any) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
