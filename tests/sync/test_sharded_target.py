"""A sharded cluster as the target of a sync, written through a stand-in for a mongos (``mongos.py``)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import UsageError
from tailrace.sync import Sync
from tests.amounts import amount
from tests.lending import Lender
from tests.sync.both import STATE_DB, beside, is_users, normal
from tests.sync.equality import differences, held
from tests.sync.mongos import WritingMongos

pytestmark = pytest.mark.mongod

REGIONS = ("east", "north", "south", "west")
BY_REGION = {"region": 1, "_id": 1}


@pytest.fixture(scope="module")
def source(lender: Lender) -> Iterator[ReplicaSet]:
    with lender.lent() as running:
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
    """Every kind of change, including changes of shard keys, and transactions over documents of both shards."""
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
            client.shop.plain.update_one(
                {"_id": number % 25}, {"$set": {"u": number, "t": Timestamp(0, 0)}}, upsert=True
            )
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
        for seed in range(amount(1, 3)):
            change(client, seed)
            assert sync.run(to_present=True).is_consistent
            assert unlike(source, mongos) == []
        assert len(cluster.router.table("shop.orders").owners) == 2
        found = sync.verify()
        assert found.good, found.differences
        assert found.documents > 100


def test_definitions_reach_the_cluster_in_order(
    client: MongoClient[Any], source: ReplicaSet, cluster: ShardedCluster, mongos: WritingMongos
) -> None:
    with made(source, mongos) as sync:
        sync.run(to_present=True)
        spread(cluster)
        shop = client.shop
        shop.orders.create_index("tags", name="tags")
        shop.orders.create_index("at", expireAfterSeconds=10**6)
        shop.orders.drop_index("n_1")
        shop.command("collMod", "orders", validator={"_id": {"$exists": True}}, validationLevel="off")
        shop.made.insert_many([{"_id": number, "n": number} for number in range(10)])
        shop.made.create_index("n", unique=True)
        shop.plain.rename("renamed")
        shop.other.insert_one({"_id": 1})
        shop.other.rename("made", dropTarget=True)
        shop.command("collMod", "shown", viewOn="made", pipeline=[])
        shop.command("create", "second", viewOn="renamed", pipeline=[])
        client.more.one.insert_one({"_id": 1})
        sync.run(to_present=True)
        assert unlike(source, mongos) == []
        shop.orders.rename("sold")
        shop.sold.update_many({}, {"$set": {"sold": True}})
        shop.drop_collection("second")
        client.drop_database("more")
        sync.run(to_present=True)
        assert unlike(source, mongos) == []
        assert len(cluster.router.table("shop.sold").owners) == 2
        found = sync.verify()
        assert found.good, found.differences


def test_lanes_and_moving_chunks(
    client: MongoClient[Any], source: ReplicaSet, cluster: ShardedCluster, mongos: WritingMongos
) -> None:
    with made(source, mongos, lanes=3) as sync:
        sync.run(to_present=True)
        spread(cluster)
        for seed in range(2):
            change(client, 10 + seed)
            with beside(lambda seed=seed: move(cluster, seed)):
                sync.run(to_present=True)
            assert unlike(source, mongos) == []


def move(cluster: ShardedCluster, seed: int) -> None:
    for number, region in enumerate(REGIONS):
        to = f"shard{(number + seed) % 2}"
        cluster.router.move_chunk("shop.orders", {"region": region, "_id": 0}, to=to)


def test_a_cut_over_to_a_cluster_and_the_way_back(
    client: MongoClient[Any], source: ReplicaSet, cluster: ShardedCluster, mongos: WritingMongos
) -> None:
    client.shop.orders.create_index("at", expireAfterSeconds=10**6)
    with made(source, mongos) as sync:
        sync.run(to_present=True)
        spread(cluster)
        change(client, 5)
        sync.run(to_present=True)
        stop = threading.Event()
        with beside(lambda: run_until(made(source, mongos), stop)):
            try:
                done = sync.cutover(sample=None)
            finally:
                stop.set()
        assert done.verified > 100
        assert unlike(source, mongos, held_back=False) == []
        with MongoClient[Any](mongos.uri) as there:
            there.shop.orders.update_one({"_id": 1}, {"$set": {"back": 1}})
            there.shop.plain.insert_one({"_id": "back"})
        with sync.reverse(unblock=True) as back:
            back.run(to_present=True)
            assert unlike(source, mongos) == []
            found = back.verify()
            assert found.good, found.differences


def run_until(sync: Sync, stop: threading.Event) -> None:
    with sync:
        beside_it = threading.Thread(target=lambda: (stop.wait(), sync.stop()), daemon=True)
        beside_it.start()
        sync.run()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard_keys": {"shop.orders": {"n": 1, "_id": 1}}}, "it has no index for that"),
        ({"shard_keys": {"shop.none": {"_id": 1}}}, "the source has no shop.none"),
        ({"shard_keys": {"shop.plain": {"_id": "hashed"}}}, "it has no index for that"),
        ({"shard_keys": {"shop.plain": {"_id": 1}}}, "its unique index u_1 does not begin with the key"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    client: MongoClient[Any], source: ReplicaSet, mongos: WritingMongos, options: dict[str, Any], said: str
) -> None:
    with made(source, mongos, **options) as sync:
        assert said in "\n".join(sync.plan().refusals)
        with pytest.raises(UsageError, match="cannot be sharded" if "none" not in said else "has no"):
            sync.run(to_present=True)


def test_capped_collections_and_shards_are_refused(
    client: MongoClient[Any], source: ReplicaSet, cluster: ShardedCluster, mongos: WritingMongos
) -> None:
    client.shop.create_collection("ring", capped=True, size=4096)
    with made(source, mongos) as sync:
        assert "shop.ring is capped, and a mongos does not let a sync write to it" in "\n".join(sync.plan().refusals)
    for uri in (cluster.uri, cluster.shards["shard0"].uri):
        with Sync(source.uri, uri) as sync:
            assert "Name a mongos of the cluster" in "\n".join(sync.plan().refusals)
    with Sync(source.uri, source.uri, shard_keys={"shop.orders": BY_REGION}) as sync:
        assert sync.plan().refusals
