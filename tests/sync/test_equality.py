"""The oracle of the sync tests finds what it is meant to find, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.server_in_use import major
from tests.sync.equality import differences, held, id_of
from tests.sync.workload import Kinds, writing

pytestmark = pytest.mark.mongod

LEFT, RIGHT = "oracle_left", "oracle_right"


def _fill(database: Any) -> None:
    database.create_collection("plain", validator={"n": {"$gte": 0}}, validationAction="warn")
    database.plain.insert_many([{"_id": n, "n": n, "a": 1, "b": 2} for n in range(5)])
    database.plain.create_index([("n", -1), ("a", 1)], name="n_a", sparse=True)
    database.plain.create_index("at", name="ttl", expireAfterSeconds=3600)
    database.create_collection("ring", capped=True, size=4096, max=3)
    database.ring.insert_many([{"_id": n} for n in range(3)])
    database.create_collection("view", viewOn="plain", pipeline=[{"$match": {"n": 1}}])


@pytest.fixture
def client(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](replica_set.uri) as client:
        for name in (LEFT, RIGHT):
            client.drop_database(name)
            _fill(client[name])
        yield client
        for name in (LEFT, RIGHT):
            client.drop_database(name)


def found(uri: str, **options: Any) -> list[str]:
    def side(database: str) -> Any:
        return held(uri, selected=lambda namespace: namespace.startswith(f"{database}."))

    return differences(side(LEFT), side(RIGHT), renames={LEFT: RIGHT}, **{"uuids": False, **options})


def test_what_is_equal_is_equal(client: MongoClient[Any], replica_set: ReplicaSet) -> None:
    assert found(replica_set.uri) == []


def _reordered(there: Any) -> None:
    there.plain.replace_one({"_id": 1}, RawBSONDocument(bson.encode({"_id": 1, "n": 1, "b": 2, "a": 1})))


def _other_number(there: Any) -> None:
    there.plain.update_one({"_id": 1}, {"$set": {"a": Int64(1)}})


def _other_id(there: Any) -> None:
    there.plain.delete_one({"_id": 1})
    there.plain.insert_one({"_id": 1.0, "n": 1, "a": 1, "b": 2})


def _ring_again(there: Any) -> None:
    there.ring.drop()
    there.create_collection("ring", capped=True, size=4096, max=3)
    there.ring.insert_many([{"_id": n} for n in (1, 0, 2)])


def _index_again(*keys: tuple[str, Any], **options: Any) -> Callable[[Any], None]:
    def plant(there: Any) -> None:
        there.plain.drop_index("n_a")
        there.command("createIndexes", "plain", indexes=[{"key": dict(keys), "name": "n_a", **options}])

    return plant


PLANTED: dict[str, Callable[[Any], Any]] = {
    "a value": lambda there: there.plain.update_one({"_id": 1}, {"$inc": {"n": 1}}),
    "the order of fields": _reordered,
    "int against long": _other_number,
    "int against double in the _id": _other_id,
    "a document lost": lambda there: there.plain.delete_one({"_id": 4}),
    "a document too much": lambda there: there.plain.insert_one({"_id": 9}),
    "the order of a ring": _ring_again,
    "a collection lost": lambda there: there.plain.drop(),
    "a collection too much": lambda there: there.create_collection("more"),
    "a validator": lambda there: there.command("collMod", "plain", validator={}),
    "a view's pipeline": lambda there: there.command("collMod", "view", viewOn="plain", pipeline=[]),
    "a view that is a collection": lambda there: (there.view.drop(), there.create_collection("view")),
    "an index lost": lambda there: there.plain.drop_index("n_a"),
    "an index too much": lambda there: there.plain.create_index("b"),
    "an index's direction": _index_again(("n", 1), ("a", 1), sparse=True),
    "an index's type of number": _index_again(("n", -1.0), ("a", 1), sparse=True),
    "an index's order of keys": _index_again(("a", 1), ("n", -1), sparse=True),
    "an index's option": _index_again(("n", -1), ("a", 1)),
    "a time to live": lambda there: there.command("collMod", "plain", index={"name": "ttl", "expireAfterSeconds": 9}),
    "a hidden index": lambda there: there.command("collMod", "plain", index={"name": "n_a", "hidden": True}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_difference_is_found(client: MongoClient[Any], replica_set: ReplicaSet, what: str) -> None:
    PLANTED[what](client[RIGHT])
    assert found(replica_set.uri)


def test_another_uuid_is_found(client: MongoClient[Any], replica_set: ReplicaSet) -> None:
    assert [one for one in found(replica_set.uri, uuids=True) if one.endswith("another UUID")]


@pytest.mark.parametrize(
    "document",
    [
        {"_id": 1, "a": 2},
        {"a": "text", "_id": 1},
        {"r": bson.Regex("a", "i"), "c": bson.Code("f"), "s": bson.Code("f", {"a": 1}), "_id": 1},
        {"b": b"123", "d": bson.Decimal128("1"), "m": bson.MinKey(), "l": [1, {"_id": 7}], "_id": 1},
        {"p": bson.DBRef("a", 1), "t": bson.Timestamp(1, 2), "u": None, "f": True, "o": {"_id": 2}, "_id": 1},
    ],
)
def test_the_id_is_the_one_at_the_top(document: dict[str, Any]) -> None:
    assert id_of(bson.encode(document)) == b"\x10\x01\0\0\0"


def test_a_workload_of_a_seed_is_carried_out(replica_set: ReplicaSet) -> None:
    kinds = Kinds(capped=major(replica_set.version) >= 5, large=False)
    with writing(replica_set.uri, 9000, replica_set.version, kinds=kinds) as writes:
        writes.run(400)
        there = held(replica_set.uri, selected=lambda name: name.partition(".")[0] in writes.databases)
        assert sum(len(one.documents) for one in there.values()) > 100
        assert {one.kind for one in there.values()} == {"collection", "view"}
        assert writes.refused < writes.sent / 2
        assert differences(there, there) == []
        writes.clear()
