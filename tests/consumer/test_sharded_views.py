"""Views whose target and source are sharded, by keys other than ``_id``, written through a mongos while chunks move."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from bson.decimal128 import Decimal128
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure

import tailrace
from tailrace.consumer import MongoLeaseStore
from tailrace.consumer.views import Totals, View, ViewKeeper, ViewUpkeep
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import UsageError
from tests.amounts import amount
from tests.server_in_use import SERVER_VERSION
from tests.sharded.mongos import Mongos

pytestmark = pytest.mark.mongod

FIELDS = {"buyer.name": "name", "buyer.tier": "account.tier"}
CUSTOMERS = ["ann", "bob", "cyd", 4]
#: Target collections by their shard keys: one that has nothing to do with the view, one that is what the view joins on.
TARGETS = {"orders": {"region": 1, "_id": 1}, "carts": {"customer_id": 1}, "hashed": {"_id": "hashed"}}


@pytest.fixture(
    scope="module",
    params=[SERVER_VERSION, *(pytest.param(older, marks=pytest.mark.slow) for older in ("5.0.4", "4.4.2"))],
)
def shop(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A cluster with the collections, and a client that is connected to its mongos."""
    with ShardedCluster(2, version=request.param) as cluster:
        first, second = cluster.shards
        router = cluster.router
        router.create_database("shop", first)
        for name, key in {**TARGETS, "customers": {"country": 1}}.items():
            router.shard_collection(f"shop.{name}", key)
        router.shard_collection("shop.people", {"_id": "hashed"})
        router.move_chunk("shop.people", {"_id": 0.5}, to=second)
        router.split("shop.orders", {"region": "m", "_id": 0})
        router.split("shop.carts", {"customer_id": "b"})
        router.split("shop.customers", {"country": "m"})
        router.move_chunk("shop.orders", {"region": "z", "_id": 0}, to=second)
        router.move_chunk("shop.carts", {"customer_id": "c"}, to=second)
        router.move_chunk("shop.customers", {"country": "z"}, to=second)
        with Mongos(cluster) as mongos, tailrace.connect(mongos.uri) as client:
            yield cluster, client


def country(customer: Any) -> str:
    return "de" if customer in ("ann", 4) else "us"


def act(database: Any, chosen: random.Random) -> None:
    """One random write of a user, by a mongos' rules: with the shard key where one document is meant."""
    customer, number = chosen.choice(CUSTOMERS), chosen.randrange(30)
    whose = {"_id": customer, "country": country(customer)}
    region = "a" if number % 2 else "z"
    match chosen.randrange(9):
        case 0 | 1:
            change = {"$set": {"name": chosen.randrange(99), "token": 1}}
            database.customers.update_one(whose, change, upsert=True)
        case 2:
            tier = {"account": {"tier": chosen.randrange(5)}}
            database.customers.replace_one(whose, {"country": country(customer), **tier}, upsert=True)
        case 3:
            database.customers.delete_one(whose)
        case 4 | 5:
            change = {"$set": {"customer_id": chosen.choice([*CUSTOMERS, 4.0, "nobody", None]), "version": 1}}
            database.orders.update_one({"_id": number, "region": region}, change, upsert=True)
        case 6:
            database.orders.delete_one({"_id": number, "region": region})
        case 7:
            name = chosen.choice([*CUSTOMERS, "nobody"])
            database.carts.update_one({"_id": f"{name} {number}", "customer_id": name}, {"$inc": {"n": 1}}, upsert=True)
        case 8:
            change = {"$set": {"customer_id": customer}}
            database.hashed.update_one({"_id": number}, change, upsert=True)


def settle(upkeep: ViewUpkeep, keeper: ViewKeeper | None = None) -> None:
    deadline = time.monotonic() + 300
    while found := list(upkeep.verify(grace_s=0)):
        assert keeper is None or not keeper.join(0), "the keeper has ended"
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_views_on_shard_keys_of_all_kinds_are_kept_while_chunks_move(shop: Any, replica_set: ReplicaSet) -> None:
    """No view had been written through a mongos. An update of many documents goes to the shards without a version of
    the routing table, so it can miss a document that is moving; and a filter that named the shard key twice lost a
    condition."""
    cluster, client = shop
    views = [View(f"shop.{name}", "shop.customers", "customer_id", FIELDS) for name in TARGETS]
    chosen = random.Random(5)
    for _ in range(30):
        act(client["shop"], chosen)
    moved, turns = 0, amount(2, 4)
    with tailrace.connect(replica_set.uri) as leases:
        store = MongoLeaseStore(leases["sharded_views"][cluster.version.replace(".", "_")])
        keepers = [ViewKeeper(client, view, store=store, lease_seconds=10) for view in views]
        for keeper in keepers:
            keeper.start()
        try:
            for turn in range(turns):
                to = list(cluster.shards)[turn % 2]
                cluster.router.move_chunk("shop.orders", {"region": "a", "_id": 0}, to=to, wait=False)
                cluster.router.move_chunk("shop.carts", {"customer_id": "a"}, to=to, wait=False)
                moved += 2
                for _ in range(amount(15, 40)):
                    act(client["shop"], chosen)
            for keeper in keepers:
                settle(keeper.upkeep)
        finally:
            for keeper in keepers:
                keeper.stop()
            assert all(keeper.join(300) for keeper in keepers)
        leases.drop_database("sharded_views")
    assert moved == 2 * turns
    for name in TARGETS:
        found = list(client["shop"][name].find({"buyer": {"$exists": True}}))
        assert found, name
        assert {"name", "tier"} & found[0]["buyer"].keys()


def test_totals_of_a_sharded_source_are_kept_while_chunks_and_documents_move(
    shop: Any, replica_set: ReplicaSet
) -> None:
    cluster, client = shop
    database, chosen = client["shop"], random.Random(7)
    totals = Totals("shop.customers", "shop.orders", "customer_id", "stats.orders", {"stats.total": "amount"})

    def change_orders() -> None:
        for _ in range(25):
            act(database, chosen)
            number, region, amount = chosen.randrange(100, 110), chosen.choice("az"), chosen.randrange(9)
            found = database.orders.find_one({"_id": number})
            if found is not None and (found["region"] != region or chosen.random() < 0.2):
                database.orders.delete_one({"_id": number, "region": found["region"]})
            change = {"$set": {"customer_id": chosen.choice(CUSTOMERS), "amount": amount}}
            database.orders.update_one({"_id": number, "region": region}, change, upsert=True)

    change_orders()
    with tailrace.connect(replica_set.uri) as leases:
        store = MongoLeaseStore(leases["sharded_totals"][cluster.version.replace(".", "_")])
        keeper = ViewKeeper(client, totals, store=store, lease_seconds=10)
        with keeper:
            for turn in range(3):
                to = list(cluster.shards)[turn % 2]
                cluster.router.move_chunk("shop.orders", {"region": "a", "_id": 0}, to=to, wait=False)
                cluster.router.move_chunk("shop.customers", {"country": "a"}, to=to, wait=False)
                change_orders()
            assert not keeper.join(0)
            settle(keeper.upkeep, keeper)
        leases.drop_database("sharded_totals")
    group = {"_id": "$customer_id", "orders": {"$sum": 1}, "total": {"$sum": "$amount"}}
    wanted = {one.pop("_id"): one for one in database.orders.aggregate([{"$group": group}])}
    found = {one["_id"]: one["stats"] for one in database.customers.find()}
    assert found
    assert found == {key: wanted.get(key, {"orders": 0, "total": 0}) for key in found}


def test_a_rebuild_and_a_verification_of_sharded_targets(shop: Any) -> None:
    _, client = shop
    database = client["shop"]
    database.customers.update_one({"_id": "ann", "country": "de"}, {"$set": {"name": "Ann"}}, upsert=True)
    for name, key in (("orders", {"region": "z"}), ("carts", {}), ("hashed", {})):
        for number in range(1000, 1020):
            document = {"_id": number, "customer_id": "ann", **key}
            database[name].update_one({**document, **key}, {"$set": {"n": 1}}, upsert=True)
        upkeep = ViewUpkeep(client, View(f"shop.{name}", "shop.customers", "customer_id", FIELDS))
        assert len(list(upkeep.verify(grace_s=0))) >= 20
        assert upkeep.rebuild() >= 20
        assert list(upkeep.verify(grace_s=0)) == []
        # Later than every shard's clock.
        database[name].update_many({"_id": 1000}, {"$set": {"_views.customer_id": Timestamp(0xFFFFFFFF, 1)}})
        assert [(one.document_key, one.path) for one in upkeep.verify(grace_s=0)] == [(1000, "_views.customer_id")]
        assert upkeep.rebuild() == 1
        assert list(upkeep.verify(grace_s=0)) == []


def test_a_number_names_its_source_in_whatever_type_it_is_written(shop: Any) -> None:
    """A hashed shard key has another hash for a decimal with a fraction than for the equal double: a mongos asked the
    wrong shard, so a change of the source gave a target its fields and a change of the target took them away."""
    _, client = shop
    database = client["shop"]
    for number in range(12):
        database.people.update_one({"_id": number + 0.5}, {"$set": {"name": number}}, upsert=True)
        name = Decimal128(f"{number}.5")
        database.hashed.update_one({"_id": f"person {number}"}, {"$set": {"person": name}}, upsert=True)
    upkeep = ViewUpkeep(client, View("shop.hashed", "shop.people", "person", {"person_name": "name"}))
    upkeep.rebuild()
    found = list(database.hashed.find({"person": {"$exists": True}}))
    assert {one["_id"]: one.get("person_name") for one in found} == {f"person {n}": n for n in range(12)}
    assert list(upkeep.verify(grace_s=0)) == []


def test_what_cannot_be_written_is_refused_at_the_start(shop: Any, replica_set: ReplicaSet) -> None:
    """A view that wrote a field of the shard key ended at its first order, with the server's words; through a config
    server it wrote into the config server's own collections, found nothing, and said nothing."""
    cluster, client = shop
    view = View("shop.orders", "shop.customers", "customer_id", {"region": "country"})
    with tailrace.connect(replica_set.uri) as leases, tailrace.connect(cluster.uri) as config:
        store = MongoLeaseStore(leases["sharded_views"]["refused"])
        with pytest.raises(UsageError, match="'region' is part of its shard key"):
            ViewKeeper(client, view, store=store).start()
        with pytest.raises(UsageError, match="through a mongos"):
            ViewKeeper(config, View("shop.orders", "shop.customers", "customer_id", FIELDS), store=store).start()
        with pytest.raises(UsageError, match="through a mongos"):
            ViewUpkeep(config, View("shop.orders", "shop.customers", "customer_id", FIELDS)).rebuild()
        assert store.read("view customer_id of shop.orders/source") is None


def test_the_mongos_of_these_tests_refuses_what_a_mongos_refuses(shop: Any) -> None:
    """Otherwise the tests above would show nothing."""
    cluster, client = shop
    for region, shard in zip("az", cluster.shards, strict=True):
        cluster.router.move_chunk("shop.orders", {"region": region, "_id": 0}, to=shard)
    with pytest.raises(OperationFailure) as refused:
        client["shop"].orders.update_one({"customer_id": "ann"}, {"$set": {"x": 1}})
    assert refused.value.code == 72
    with pytest.raises(OperationFailure):
        client["shop"].orders.update_one({"_id": 10**9}, {"$set": {"x": 1}}, upsert=True)
