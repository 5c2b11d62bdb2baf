"""Tokens can be exchanged between the server and the gateway, both ways: those of expanded events, of events that end a
stream, and of times at which nothing happened. (``test_cursors`` has those of ordinary events.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import bson
import pymongo
import pytest
from bson.timestamp import Timestamp

from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.side_by_side import VERSIONS, SideBySide, drained, side_by_side

pytestmark = pytest.mark.mongod

EXPANDED = frozenset({"create", "createIndexes", "dropIndexes", "modify", "rename", "drop", "dropDatabase"})


@pytest.fixture(scope="module", params=VERSIONS)
def sides(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    with side_by_side(request.param) as made:
        yield made


class Written(NamedTuple):
    client: pymongo.MongoClient[dict[str, Any]]

    def now(self) -> Timestamp:
        time: Timestamp = self.client.admin.command("ping")["operationTime"]
        return time


@pytest.fixture(scope="module")
def written(sides: SideBySide) -> Iterator[Written]:
    with pymongo.MongoClient[dict[str, Any]](sides.deployment.uri, w="majority") as client:
        yield Written(client)


def stream(collection: Any = 1, **options: Any) -> dict[str, Any]:
    return {"aggregate": collection, "pipeline": [{"$changeStream": options}], "cursor": {}}


def both_ways(sides: SideBySide) -> tuple[tuple[Wire, Wire], ...]:
    """Where a token is taken from, and where it is used."""
    return (sides.gateway, sides.server), (sides.server, sides.gateway)


def test_tokens_of_expanded_events(sides: SideBySide, written: Written) -> None:
    client = written.client
    is_new = sides.running.gateway.engine.version >= (6, 0)
    before, database = written.now(), client.expanded
    # 5.0 and 4.4 have neither these images nor these events: there only the others are exchanged.
    database.create_collection("c", **({"changeStreamPreAndPostImages": {"enabled": True}} if is_new else {}))
    database.c.create_index("n")
    database.c.create_index("e", expireAfterSeconds=3600)
    database.c.insert_many([{"_id": number, "a": {"0": 1}} for number in range(2)])
    database.c.create_index("x")
    database.command({"collMod": "c", "index": {"name": "e_1", "expireAfterSeconds": 7200}})
    database.c.update_one({"_id": 0}, {"$set": {"a.0": 2}})
    if is_new:  # a name with a dot in it
        named = {"$setField": {"field": "a.b", "input": "$$ROOT", "value": 1}}
        database.c.update_one({"_id": 0}, [{"$replaceWith": named}])
    database.c.replace_one({"_id": 1}, {"b": 1})
    database.c.delete_one({"_id": 1})
    database.create_collection("v", viewOn="c")
    if sides.running.gateway.engine.version >= (5, 0):
        database.create_collection("t", timeseries={"timeField": "t"})
    with client.start_session() as session, session.start_transaction():
        for number in range(3):
            database.c.insert_one({"_id": 10 + number}, session=session)
        database.c.update_one({"_id": 10}, {"$set": {"x": 1}}, session=session)
    database.c.drop_index("n_1")
    database.drop_collection("v")
    database.c.rename("d")
    database.o.insert_one({})
    database.d.rename("o", dropTarget=True)
    database.o.drop()
    client.drop_database("expanded")
    whole: dict[str, Any] = {"allChangesForCluster": True, **({"showExpandedEvents": True} if is_new else {})}
    events = {
        wire: drained(wire, "admin", stream(**whole, startAtOperationTime=before))[0] for wire, _ in both_ways(sides)
    }
    native = events[sides.server]
    assert events[sides.gateway] == native
    kinds = {bson.decode(event)["operationType"] for event in native}
    assert kinds >= {"insert", "update", "replace", "delete", "rename", "drop", "dropDatabase"}
    assert not is_new or kinds >= EXPANDED
    for taken_from, resumed_at in both_ways(sides):
        for number, event in enumerate(events[taken_from]):
            option = ("resumeAfter", "startAfter")[number % 2]
            again = drained(resumed_at, "admin", stream(**whole, **{option: bson.decode(event)["_id"]}))[0]
            assert again == native[number + 1 :], bson.decode(event)["operationType"]


def refusal(wire: Wire, database: str, command: Mapping[str, Any]) -> dict[str, Any]:
    reply = bson.decode(wire.exchange(bson.encode({**command, "$db": database})), ANY_VALUE)
    return {name: value for name, value in reply.items() if name not in ("$clusterTime", "operationTime")}


ENDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "drop": ("c", lambda database: database.c.drop()),
    "rename": ("c", lambda database: database.c.rename("other")),
    "dropDatabase": (1, lambda database: database.client.drop_database(database.name)),
}


@pytest.mark.parametrize("end", ENDS)
def test_tokens_of_what_ends_a_stream(sides: SideBySide, written: Written, end: str) -> None:
    collection, do = ENDS[end]
    name = f"ended{end}"
    database, before = written.client[name], written.now()
    database.c.insert_one({"_id": 1})
    do(database)
    database.c.insert_one({"_id": 2})
    found = {
        wire: drained(wire, name, stream(collection, startAtOperationTime=before))[0] for wire, _ in both_ways(sides)
    }
    assert found[sides.gateway] == found[sides.server]
    last = bson.decode(found[sides.server][-1])
    assert last["operationType"] == "invalidate"
    native = drained(sides.server, name, stream(collection, startAfter=last["_id"]))[0]
    assert [bson.decode(event)["documentKey"] for event in native] == [{"_id": 2}]
    for taken_from, resumed_at in both_ways(sides):
        token = bson.decode(found[taken_from][-1])["_id"]
        assert drained(resumed_at, name, stream(collection, startAfter=token))[0] == native
        refused = [refusal(wire, name, stream(collection, resumeAfter=token)) for wire in (sides.server, resumed_at)]
        assert refused[0] == refused[1]
        assert refused[0]["code"] == 260


def test_tokens_of_times_at_which_nothing_happened(sides: SideBySide, written: Written) -> None:
    database = written.client.quiet
    database.c.insert_one({"_id": 0})
    tokens = {}
    for taken_from, _ in both_ways(sides):
        events, token = drained(taken_from, "quiet", stream("c"))
        assert events == []
        tokens[taken_from] = bson.decode(token)
    database.c.insert_one({"_id": 1})
    for taken_from, resumed_at in both_ways(sides):
        for option in ("resumeAfter", "startAfter"):
            again = drained(resumed_at, "quiet", stream("c", **{option: tokens[taken_from]}))[0]
            assert [bson.decode(event)["documentKey"]["_id"] for event in again] == [1]
