"""The embedded sharded cluster: real config server, real shards, and our router in place of a mongos."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure, WriteError

from tailrace.embedded import ShardedCluster
from tailrace.embedded.sharding import Router, Transaction
from tailrace.embedded.sharding.catalog import key_values
from tailrace.errors import UsageError
from tests.embedded.test_replica_set import is_alive, wait_until
from tests.pace import BETWEEN_WRITES_S
from tests.server_in_use import IN_BETWEEN

pytestmark = pytest.mark.mongod
Start = Callable[..., ShardedCluster]
KEY = {"region": 1, "_id": 1}

PARENT = """
import sys, time
from tailrace.embedded import ShardedCluster
from tests.pace import BETWEEN_WRITES_S
cluster = ShardedCluster(1)
cluster.start()
parts = [cluster.config, *cluster.shards.values()]
print(cluster.data_dir, *(member.pid for part in parts for member in part.members), flush=True)
time.sleep(600)
"""


def spread(router: Router, database: str, collection: str = "orders") -> str:
    """A collection sharded by region: up to ``m`` on shard0, from there on shard1."""
    router.create_database(database, "shard0")
    namespace = f"{database}.{collection}"
    router.shard_collection(namespace, KEY)
    router.split(namespace, {"region": "m"})
    router.move_chunk(namespace, {"region": "m"}, to="shard1")
    return namespace


def on_shard(cluster: ShardedCluster, shard: str, namespace: str) -> list[dict[str, Any]]:
    """What one shard holds, whether it owns it or not."""
    database, _, collection = namespace.partition(".")
    with pymongo.MongoClient(cluster.shards[shard].uri) as client:
        return list(client[database][collection].find({}, sort=[("_id", 1)]))


@contextmanager
def writer(router: Router, namespace: str, region: str) -> Iterator[list[int]]:
    """Insert, update and now and then delete in one region until the block is left; the ids that must be there."""
    kept: list[int] = []
    failures: list[BaseException] = []
    ended = threading.Event()
    begun = threading.Event()

    def write() -> None:
        try:
            number = 0
            while not ended.wait(BETWEEN_WRITES_S):
                key = {"region": region, "_id": number}
                router.insert_one(namespace, {"_id": number, "region": region, "v": 0})
                assert router.update_one(namespace, key, {"$inc": {"v": 1}}).count == 1
                if number % 3 == 0:
                    assert router.delete_one(namespace, key).count == 1
                else:
                    kept.append(number)
                number += 1
                begun.set()
        except BaseException as error:  # noqa: BLE001  (handed to the test below)
            failures.append(error)
            begun.set()

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait(300)
    try:
        yield kept
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


def regions_found(router: Router, namespace: str) -> list[tuple[int, int]]:
    return sorted((found["_id"], found["v"]) for found in router.find(namespace))


def test_documents_go_to_the_shard_that_owns_their_key(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    namespace = spread(router, "routed")
    regions = ["eu", "us", "de", "uk", "fr", "jp", "pl"]
    assert router.insert_many(namespace, [{"_id": i, "region": r} for i, r in enumerate(regions)]) == 7
    assert [found["region"] for found in on_shard(sharded_cluster, "shard0", namespace)] == ["eu", "de", "fr", "jp"]
    assert [found["region"] for found in on_shard(sharded_cluster, "shard1", namespace)] == ["us", "uk", "pl"]
    assert router.update_one(namespace, {"region": "us", "_id": 1}, {"$set": {"v": 1}}).shard == "shard1"
    assert router.replace_one(namespace, {"region": "eu", "_id": 0}, {"_id": 0, "region": "eu", "w": 2}).count == 1
    upserted = router.update_one(namespace, {"region": "zz", "_id": 9}, {"$set": {"v": 1}}, upsert=True)
    assert (upserted.shard, upserted.count) == ("shard1", 1)
    assert router.delete_one(namespace, {"region": "de", "_id": 2}).shard == "shard0"
    assert router.find_one(namespace, {"region": "eu", "_id": 0}) == {"_id": 0, "region": "eu", "w": 2}
    assert router.find_one(namespace, {"region": "de", "_id": 2}) is None
    assert sorted(found["_id"] for found in router.find(namespace)) == [0, 1, 3, 4, 5, 6, 9]
    router.insert_one("routed.plain", {"_id": 1})
    assert on_shard(sharded_cluster, "shard0", "routed.plain") == [{"_id": 1}]
    with pytest.raises(WriteError, match="E11000"):
        router.insert_one("routed.plain", {"_id": 1})
    with pytest.raises(UsageError, match=r"The filter lacks region of the shard key of routed\.orders"):
        router.update_one(namespace, {"_id": 1}, {"$set": {"v": 1}})


def test_chunks_move_under_writes_and_nothing_is_lost(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    namespace = spread(router, "moved")
    with writer(router, namespace, "us") as kept:
        for to in ("shard2", "shard0", "shard1", "shard2"):
            before = len(kept)
            router.move_chunk(namespace, {"region": "m"}, to=to)
            assert router.owner(namespace, {"region": "us", "_id": 0}) == to
            wait_until(lambda before=before: len(kept) > before + 2)  # type: ignore[misc]
    assert regions_found(router, namespace) == [(number, 1) for number in kept]
    assert on_shard(sharded_cluster, "shard0", namespace) == on_shard(sharded_cluster, "shard1", namespace) == []
    (chunk,) = [chunk for chunk in router.table(namespace).chunks if chunk.shard == "shard2"]
    router.move_chunk(namespace, bounds=(chunk.minimum, chunk.maximum), to="shard1", wait=False)
    assert router.owner(namespace, {"region": "us", "_id": 0}) == "shard1"


def test_a_hashed_key_is_spread_over_all_shards_by_the_server_s_own_hash(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    router.create_database("hashed", "shard1")
    router.shard_collection("hashed.items", {"sku": "hashed"}, initial_chunks=6)
    # The router once had a hash of its own, which cut the fraction of a decimal off. No test had a decimal whose
    # fraction matters: 12.5 is 12 either way.
    decimals = [Decimal128(f"{whole}.{tenths}") for whole in (0, 1, -1, 7) for tenths in (4, 5, 6, 9)]
    skus = [*(f"s{i}" for i in range(60)), *decimals]
    assert router.insert_many("hashed.items", [{"_id": i, "sku": sku} for i, sku in enumerate(skus)]) == 76
    assert len(router.find("hashed.items")) == 76  # each is on its owner, whose filter of orphans lets it through
    assert all(on_shard(sharded_cluster, shard, "hashed.items") for shard in sharded_cluster.shards)
    values: list[Any] = [
        *decimals,
        {"a": 1},
        None,
        True,
        False,
        0,
        -1,
        3.9,
        -3.9,
        1e300,
        float("nan"),
        Int64(1 << 62),
        Decimal128("12.5"),
        "",
        "ä b",
    ]
    values += [Decimal128("NaN"), b"bytes", ObjectId("0123456789abcdef01234567"), Timestamp(7, 8)]
    with pymongo.MongoClient(sharded_cluster.config.uri) as client:
        for value in values:
            assert (
                key_values({"sku": "hashed"}, {"sku": value})["sku"]
                == client.admin.command("_hashBSONElement", value, seed=0)["out"]
            ), value


def test_a_transaction_over_shards_is_seen_whole_or_not_at_all(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    namespace = spread(router, "paid")
    both = [{"_id": 1, "region": "eu"}, {"_id": 2, "region": "us"}]
    with router.transaction() as transaction:
        for document in both:
            transaction.insert_one(namespace, document)
        assert transaction.find_one(namespace, {"region": "us", "_id": 2}) == both[1]
        assert router.find(namespace) == []
    assert transaction.shards == ["shard0", "shard1"]
    assert sorted(router.find(namespace), key=lambda found: int(found["_id"])) == both

    with router.transaction() as single:
        single.update_one(namespace, {"region": "us", "_id": 2}, {"$set": {"v": 1}})
    assert single.shards == ["shard1"]

    aborted = router.transaction()
    aborted.delete_one(namespace, both[0])
    aborted.delete_one(namespace, {"region": "us", "_id": 2})
    aborted.prepare()
    aborted.abort()
    prepared = router.transaction()
    prepared.delete_one(namespace, {"region": "eu", "_id": 1})
    prepared.replace_one(namespace, {"region": "us", "_id": 2}, {"_id": 2, "region": "us", "v": 2})
    prepared.prepare()
    prepared.commit()
    assert router.find(namespace) == [{"_id": 2, "region": "us", "v": 2}]
    with pytest.raises(UsageError, match="takes no further statement"):
        prepared.delete_one(namespace, {"region": "us", "_id": 2})

    def fail() -> None:
        with router.transaction() as failing:
            failing.delete_one(namespace, {"region": "us", "_id": 2})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(router.find(namespace)) == 1


def test_transactions_are_repeated_until_chunks_hold_still(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    namespace = spread(router, "restless")
    # Ids are unique in the whole collection: a chunk with an id that its new owner has already could not move there.
    router.insert_many(namespace, [{"_id": 1, "region": "eu", "v": 0}, {"_id": 2, "region": "us", "v": 0}])
    ended = threading.Event()
    committed: list[list[str]] = []

    def body(transaction: Transaction) -> None:
        for number, region in ((1, "eu"), (2, "us")):
            transaction.update_one(namespace, {"region": region, "_id": number}, {"$inc": {"v": 1}})

    def transact() -> None:
        while not ended.wait(BETWEEN_WRITES_S):
            committed.append(router.run_transaction(body).shards)

    thread = threading.Thread(target=transact)
    thread.start()
    try:
        for to in ("shard2", "shard0", "shard1"):
            before = len(committed)
            router.move_chunk(namespace, {"region": "m"}, to=to)
            wait_until(lambda before=before: len(committed) > before + 1 or not thread.is_alive())  # type: ignore[misc]
    finally:
        ended.set()
        thread.join()
    assert {tuple(shards) for shards in committed} >= {("shard0", "shard1"), ("shard0", "shard2")}
    assert [found["v"] for found in router.find(namespace)] == [len(committed)] * 2


def test_collections_are_renamed_refined_resharded_and_dropped(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    namespace = spread(router, "defined")
    router.insert_many(namespace, [{"_id": i, "region": r, "v": i} for i, r in enumerate(["eu", "us", "de", "uk"])])
    router.rename(namespace, "defined.renamed")
    assert len(router.find("defined.renamed")) == 4
    assert router.find(namespace) == []
    router.create_index("defined.renamed", {**KEY, "v": 1}, "whole")
    router.refine_shard_key("defined.renamed", {**KEY, "v": 1})
    assert router.update_one("defined.renamed", {"region": "eu", "_id": 0, "v": 0}, {"$set": {"w": 1}}).count == 1
    router.reshard("defined.renamed", {"_id": 1})
    assert router.table("defined.renamed").key == {"_id": 1}
    router.insert_one("defined.renamed", {"_id": 900})
    router.drop_index("defined.renamed", "whole")
    router.coll_mod("defined.renamed", changeStreamPreAndPostImages={"enabled": True})
    assert sorted(found["_id"] for found in router.find("defined.renamed")) == [0, 1, 2, 3, 900]
    router.insert_one("defined.plain", {"_id": 1})
    router.move_primary("defined", "shard2")
    router.insert_one("defined.plain", {"_id": 2})
    assert len(on_shard(sharded_cluster, "shard2", "defined.plain")) == 2
    router.drop_collection("defined.renamed")
    assert router.find("defined.renamed") == []
    router.drop_database("defined")
    with pytest.raises(UsageError, match="There is no database defined"):
        router.find("defined.plain")


def test_the_cluster_s_time_is_carried_from_shard_to_shard(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    namespace = spread(router, "clocked")
    times = []
    for number in range(20):
        written = router.insert_one(namespace, {"_id": number, "region": ["eu", "us"][number % 2]})
        times.append(written.reply["opTime"]["ts"])
    assert times == sorted(set(times))
    fence = router.fence()
    assert fence >= times[-1]
    for part in (sharded_cluster.config, *sharded_cluster.shards.values()):
        with pymongo.MongoClient(part.uri) as client:
            assert client.local["oplog.rs"].find_one({}, sort=[("$natural", -1)])["ts"] > fence  # type: ignore[index]


def test_a_shard_is_added_at_run_time_and_its_only_member_survives_a_kill(start_sharded_cluster: Start) -> None:
    cluster = start_sharded_cluster(1)
    router = cluster.router
    router.create_database("grown", "shard0")
    router.shard_collection("grown.orders", KEY)
    assert cluster.add_shard() == "shard1"
    with pymongo.MongoClient(cluster.uri) as client:
        assert [found["_id"] for found in client.config.shards.find(sort=[("_id", 1)])] == ["shard0", "shard1"]
    with writer(router, "grown.orders", "us") as kept:
        router.move_chunk("grown.orders", {"region": "us"}, to="shard1")
        wait_until(lambda: len(kept) > 5)
        assert cluster.kill("shard1") == 0
        before = len(kept)
        cluster.restart("shard1")
        wait_until(lambda: len(kept) > before + 5)
    assert regions_found(router, "grown.orders") == [(number, 1) for number in kept]
    with pytest.raises(UsageError, match="There is no shard other: they are shard0, shard1"):
        cluster.kill("other")
    with pytest.raises(UsageError, match="There is a shard shard1 already"):
        cluster.add_shard("shard1")


def test_a_shard_of_three_members_steps_down_under_writes(start_sharded_cluster: Start) -> None:
    cluster = start_sharded_cluster(1, members=3)
    router = cluster.router
    router.create_database("stepped", "shard0")
    router.shard_collection("stepped.orders", KEY)
    first = cluster.shards["shard0"].primary
    with writer(router, "stepped.orders", "us") as kept:
        assert cluster.step_down("shard0") != first
        before = len(kept)
        wait_until(lambda: len(kept) > before + 5)
    assert regions_found(router, "stepped.orders") == [(number, 1) for number in kept]


def test_a_given_directory_keeps_the_cluster_with_its_added_shard(tmp_path: Path) -> None:
    with ShardedCluster(1, data_dir=tmp_path) as cluster:
        cluster.add_shard()
        namespace = spread(cluster.router, "kept")
        cluster.router.insert_many(namespace, [{"_id": 1, "region": "eu"}, {"_id": 2, "region": "us"}])
        uri = cluster.uri
    with ShardedCluster(1, data_dir=tmp_path) as again:
        assert again.uri == uri
        assert list(again.shards) == ["shard0", "shard1"]
        assert len(again.router.find(namespace)) == 2


def test_with_a_password_only_its_owner_may_read_and_the_router_still_routes(start_sharded_cluster: Start) -> None:
    cluster = start_sharded_cluster(2, root_password="p@ss/word")
    namespace = spread(cluster.router, "locked")
    with cluster.router.transaction() as transaction:
        transaction.insert_one(namespace, {"_id": 1, "region": "eu"})
        transaction.insert_one(namespace, {"_id": 2, "region": "us"})
    for part in (cluster.config, *cluster.shards.values()):
        with pymongo.MongoClient(part.members[0].uri) as stranger, pytest.raises(OperationFailure) as caught:
            stranger.local["oplog.rs"].find_one()
        assert caught.value.code == 13
        with pymongo.MongoClient(part.uri) as owner:
            assert owner.local["oplog.rs"].find_one() is not None


@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_older_versions_route_move_and_transact_too(start_sharded_cluster: Start, version: str) -> None:
    cluster = start_sharded_cluster(2, version=version)
    router = cluster.router
    namespace = spread(router, "older")
    with writer(router, namespace, "us") as kept:
        for to in ("shard0", "shard1"):
            before = len(kept)
            router.move_chunk(namespace, {"region": "m"}, to=to)
            wait_until(lambda before=before: len(kept) > before + 2)  # type: ignore[misc]
    assert regions_found(router, namespace) == [(number, 1) for number in kept]
    with router.transaction() as transaction:
        transaction.insert_one(namespace, {"_id": -1, "region": "eu"})
        transaction.delete_one(namespace, {"_id": kept[0], "region": "us"})
    assert transaction.shards == ["shard0", "shard1"]
    assert len(router.find(namespace)) == len(kept)
    if version == "4.4.2":
        with pytest.raises(UsageError, match=r"Renaming a collection in an embedded cluster needs mongod 5\.0"):
            router.rename(namespace, "older.renamed")
    else:
        router.rename(namespace, "older.renamed")
        namespace = "older.renamed"
    router.drop_collection(namespace)
    router.drop_database("older")


def test_nothing_is_left_of_a_cluster_whose_process_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    directory, *numbers = parent.stdout.readline().split()
    assert len(numbers) == 2
    assert all(is_alive(int(number)) for number in numbers)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(is_alive(int(number)) for number in numbers))
    wait_until(lambda: not Path(directory).exists())


def test_nothing_is_left_when_the_block_is_left() -> None:
    with ShardedCluster(1, noop_interval_s=3) as cluster:
        parts = [cluster.config, *cluster.shards.values()]
        pids = [member.pid for part in parts for member in part.members]
        with pymongo.MongoClient(cluster.shards["shard0"].uri) as client:
            assert client.admin.command("getParameter", 1, periodicNoopIntervalSecs=1)["periodicNoopIntervalSecs"] == 3
    assert [pid for pid in pids if pid is None or is_alive(pid)] == []
    assert not cluster.data_dir.exists()
    cluster.close()
    with pytest.raises(UsageError, match="at least one shard"):
        ShardedCluster(0)
