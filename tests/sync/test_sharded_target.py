"""A sharded cluster as the target of a sync, written through a stand-in for a mongos (``mongos.py``)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.sync import Sync
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held
from tests.sync.mongos import WritingMongos

pytestmark = pytest.mark.mongod

REGIONS = ("east", "north", "south", "west")
BY_REGION = {"region": 1, "_id": 1}


@pytest.fixture(scope="module")
def source() -> Iterator[ReplicaSet]:
    with ReplicaSet() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[ShardedCluster]:
    with ShardedCluster(2) as running:
        yield running


@pytest.fixture(scope="module")
def mongos(cluster: ShardedCluster) -> Iterator[WritingMongos]:
    with WritingMongos(cluster) as running:
        yield running


@pytest.fixture
def client(source: ReplicaSet, mongos: WritingMongos) -> Iterator[MongoClient[Any]]:
    """The source, with a few collections; the target is empty."""
    for uri in (mongos.uri, source.uri):
        with MongoClient[Any](uri) as there:
            for name in there.list_database_names():
                if name not in ("admin", "config", "local"):
                    there.drop_database(name)
    with MongoClient[Any](source.uri) as there:
        there.shop.orders.insert_many([order(number) for number in range(200)])
        there.shop.orders.create_index([("region", 1), ("_id", 1)])
        there.shop.orders.create_index("n")
        there.shop.plain.insert_many([{"_id": number, "t": Timestamp(0, 0)} for number in range(20)])
        there.shop.plain.create_index("u", unique=True, sparse=True)
        there.shop.command("create", "shown", viewOn="orders", pipeline=[{"$match": {"n": {"$gt": 3}}}])
        yield there


def order(number: int) -> dict[str, Any]:
    region = REGIONS[number % 4]
    found: dict[str, Any] = {"_id": number, "region": region, "n": number, "tags": [1, 2, 3]}
    if number % 7 == 0:
        found["t"] = Timestamp(0, 0)
    if number % 11 == 0:
        del found["region"]
    return found


def made(source: ReplicaSet, mongos: WritingMongos, **options: Any) -> Sync:
    options = {"shard_keys": {"shop.orders": BY_REGION}, "lease_s": 4.0, **options}
    return Sync(source.uri, mongos.uri, **options)


def unlike(source: ReplicaSet, mongos: WritingMongos, *, held_back: bool = True) -> list[str]:
    sides = [held(uri, but=[STATE_DB], selected=is_users) for uri in (source.uri, mongos.uri)]
    assert sum(len(one.documents) for one in sides[0].values()) > 100
    return differences(*sides, uuids=False, known=normal("", "", ages=not held_back))


def spread(cluster: ShardedCluster) -> None:
    """Give each shard two of four regions."""
    router = cluster.router
    for number, region in enumerate(REGIONS):
        router.split("shop.orders", {"region": region})
        to = f"shard{number % 2}"
        if router.owner("shop.orders", {"region": region, "_id": 0}) != to:
            router.move_chunk("shop.orders", {"region": region, "_id": 0}, to=to)
    assert len(router.table("shop.orders").owners) == 2


def change(client: MongoClient[Any], seed: int) -> None:
    """Every kind of change, shard keys among what changes, and transactions over documents of both shards."""
    rng = random.Random(seed)
    orders = client.shop.orders
    for _ in range(60):
        number = rng.randrange(220)
        kind = rng.randrange(7)
        if kind == 0:
            orders.replace_one({"_id": number}, order(number), upsert=True)
        elif kind == 1:
            orders.update_one({"_id": number}, {"$inc": {"n": 1}, "$push": {"tags": rng.random()}})
        elif kind == 2:
            orders.update_one({"_id": number}, {"$set": {"region": rng.choice([*REGIONS, None, 3, {"a": 1}])}})
        elif kind == 3:
            orders.delete_one({"_id": number})
        elif kind == 4:
            orders.update_one({"_id": number}, {"$unset": {"region": 1, "n": 1}})
        elif kind == 5:
            client.shop.plain.update_one({"_id": number % 25}, {"$set": {"u": number, "t": Timestamp(0, 0)}}, upsert=True)
        else:
            with client.start_session() as session, session.start_transaction():
                for one in range(300, 304):
                    orders.replace_one({"_id": one}, {**order(one), "r": rng.random()}, upsert=True, session=session)


def test_a_replica_set_is_copied_to_a_cluster_and_followed(
    client: MongoClient[Any], source: ReplicaSet, cluster: ShardedCluster, mongos: WritingMongos
) -> None:
    with made(source, mongos) as sync:
        assert not sync.plan().refusals
        assert sync.run(to_present=True).is_consistent
        assert cluster.router.table("shop.orders").key == BY_REGION
        assert unlike(source, mongos) == []
        spread(cluster)
        for seed in range(3):
            change(client, seed)
            assert sync.run(to_present=True).is_consistent
            assert unlike(source, mongos) == []
        assert len(cluster.router.table("shop.orders").owners) == 2
        found = sync.verify()
        assert found.good, found.differences
        assert found.documents > 100
