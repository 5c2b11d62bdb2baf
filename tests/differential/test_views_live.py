"""Definitions of views: whether their events pass a ``$match``, beside the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import bson
import pymongo
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tests.differential.execute import note
from tests.differential.native import aggregate, read
from tests.differential.ours import read_into_memory
from tests.differential.wire import Wire
from tests.golden.replay import MemoryOplog, OurStream
from tests.server_in_use import SERVER_VERSION, major

pytestmark = pytest.mark.mongod

#: A match, and whether the drop of a view passes it if only showSystemEvents shows the event.
_MATCHES: dict[str, tuple[dict[str, Any], bool]] = {
    "no key": ({"documentKey._id": {"$exists": False}}, False),
    "an empty key": ({"documentKey._id": None}, False),
    "the whole key is null": ({"documentKey": None}, False),
    "no whole key": ({"documentKey": {"$exists": False}}, major(SERVER_VERSION) < 7),
    "another key": ({"documentKey._id": {"$ne": 5}}, True),
    "a drop": ({"operationType": "drop"}, False),
    "no delete": ({"operationType": {"$ne": "delete"}}, False),
    "the view by name": ({"ns.coll": "v"}, False),
    "not the collection of views": ({"ns.coll": {"$ne": "system.views"}}, False),
    "the view by a pattern, or the key": (
        {"$or": [{"ns.coll": {"$regex": "^v"}}, {"documentKey._id": "views.v"}]},
        True,
    ),
    "no document": ({"fullDocument": None}, True),
    "no description": ({"updateDescription": None}, True),
    "an expression": ({"$expr": {"$ne": ["$operationType", "delete"]}}, False),
}
_SHOWN: tuple[dict[str, Any], ...] = (
    {},
    {"showSystemEvents": True},
    {"showSystemEvents": True, "showExpandedEvents": True},
    {"showExpandedEvents": True},
)


@pytest.fixture(scope="module")
def written(replica_set: ReplicaSet) -> Iterator[tuple[Wire, MemoryOplog, ClusterTime, ClusterTime]]:
    """A view that is made, changed and dropped, and the times before and after."""
    with (
        Wire.to(replica_set.uri) as wire,
        pymongo.MongoClient[Any](replica_set.uri) as client,
        closing(MongodSource(replica_set.uri)) as source,
    ):
        start = note(wire, "start")
        client.views.c.insert_one({"_id": 1})
        client.views.create_collection("v", viewOn="c", pipeline=[])
        client.views.command("collMod", "v", viewOn="c", pipeline=[{"$match": {}}])
        client.views.drop_collection("v")
        client.views.c.update_one({"_id": 1}, {"$set": {"a": 1}})
        client.views.c.delete_one({"_id": 1})
        end = note(wire, "end")
        yield wire, read_into_memory(wire, source, ClusterTime(start - 1), end), start, end
        client.drop_database("views")


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize("name", _MATCHES)
def test_a_match_is_asked_of_a_views_definition_where_the_server_asks_it(
    written: tuple[Wire, MemoryOplog, ClusterTime, ClusterTime], replica_set: ReplicaSet, name: str, kernel: Any
) -> None:
    """Without showExpandedEvents the server tests the entry like that of any other delete. We let every one pass; one
    seed in thirty of random predicates showed it."""
    wire, memory, start, end = written
    predicate, passes = _MATCHES[name]
    for shown in _SHOWN:
        for before in ((), ({"$unset": ["wallTime"]},)):
            stage = {"startAtOperationTime": start.to_timestamp(), **shown}
            pipeline = (*before, {"$match": predicate})
            database, command = aggregate(("views", None), stage, server=replica_set.version, pipeline=pipeline)
            native = read(wire, database, command, end)
            assert native.error is None
            for pushes_down in (True, False):
                ours = OurStream(
                    memory, database, command, server=replica_set.version, pushes_down=pushes_down, kernel=kernel
                )
                ours.advance(end)
                assert (ours.error, ours.events) == (None, native.events), (shown, before, pushes_down)
            if shown == {"showSystemEvents": True}:
                types = [bson.decode(event)["operationType"] for event in native.events]
                assert ("drop" in types) == passes
