"""A sharded cluster followed by a replica set, while chunks move, databases change their shard and shard keys
change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import bson
import pytest
from pymongo import MongoClient

from tailrace.act.sync.catalog import read_catalog
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.writer import TargetMismatchError
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import SourceError
from tailrace.read.source.topology import Cluster
from tests.amounts import amount
from tests.pace import BETWEEN_LOOKS_S
from tests.snapshot.test_snapshot_sharded import REGIONS, move, spread_over, write
from tests.sync.equality import held
from tests.sync.following import begun, following, now, without_limits
from tests.tables.test_sharded_equality import transact

pytestmark = [pytest.mark.mongod, pytest.mark.used_servers]
Start = Callable[..., ReplicaSet]


@contextmanager
def synced(cluster: ShardedCluster, target: ReplicaSet, database: str) -> Iterator[SyncSettings]:
    settings = SyncSettings(selection=Selection((f"{database}.*",)), name=database)
    begun(cluster.uri, target.uri, settings)
    cluster.router.create_database(database, "shard0")
    try:
        yield settings
    finally:
        cluster.router.drop_database(database)


def brought_up(cluster: ShardedCluster, target: ReplicaSet, settings: SyncSettings) -> None:
    with following(cluster.uri, target.uri, settings) as follower:
        follower.run_until(now(cluster.uri))
        assert follower.is_consistent


def equal(cluster: ShardedCluster, target: ReplicaSet, *namespaces: str) -> None:
    """Documents by their bytes, and the indexes of the shard that has most of them."""
    found = held(target.uri, but=["tailrace_sync"])
    database = namespaces[0].partition(".")[0]
    assert sorted(name for name in found if name.startswith(f"{database}.")) == sorted(namespaces)
    for namespace in namespaces:
        expected = sorted(bson.encode(one) for one in cluster.router.find(namespace))
        assert sorted(found[namespace].documents) == expected, namespace
        shards = [held(shard.uri, selected=namespace.__eq__) for shard in cluster.shards.values()]
        shown = [
            {name: without_limits("", raw) for name, raw in one[namespace].indexes.items()} for one in shards if one
        ]
        assert {name: without_limits("", raw) for name, raw in found[namespace].indexes.items()} in shown


def test_while_chunks_move_and_transactions_span_shards(
    sharded_cluster: ShardedCluster, start_replica_set: Start
) -> None:
    target, router = start_replica_set(), sharded_cluster.router
    with synced(sharded_cluster, target, "moving") as settings:
        namespace = spread_over(sharded_cluster, "moving", {"region": 1, "_id": 1})
        router.insert_many(
            namespace, [{"_id": number, "region": REGIONS[number % 6], "v": {"a": [1, 2]}} for number in range(200)]
        )
        router.insert_one("moving.plain", {"_id": 1})
        router.create_index(namespace, {"v": 1}, "v_1")
        for _ in range(2):
            stop, moved = threading.Event(), list[str]()
            work: list[Callable[[], None]] = [
                partial(move, sharded_cluster, namespace, stop, moved),
                partial(transact, sharded_cluster, namespace, stop),
                *(partial(write, sharded_cluster, namespace, seed, stop) for seed in range(2)),
            ]
            threads = [threading.Thread(target=one) for one in work]
            for thread in threads:
                thread.start()
            try:
                with following(sharded_cluster.uri, target.uri, settings) as follower:
                    while len(moved) < 2 or follower.changes < amount(100, 300):
                        follower.run_until(now(sharded_cluster.uri))
                        time.sleep(BETWEEN_LOOKS_S)  # asking for the cluster's time discovers the cluster
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            brought_up(sharded_cluster, target, settings)
            equal(sharded_cluster, target, namespace, "moving.plain")


def test_while_a_database_goes_from_shard_to_shard(sharded_cluster: ShardedCluster, start_replica_set: Start) -> None:
    target, router = start_replica_set(), sharded_cluster.router
    with synced(sharded_cluster, target, "primary") as settings:
        router.insert_many("primary.plain", [{"_id": number} for number in range(10)])
        router.create_index("primary.plain", {"n": 1}, "n_1")
        router.insert_many("primary.other", [{"_id": number, "v": "x" * number} for number in range(20)])
        router.shard_collection("primary.spread", {"_id": 1})
        router.split("primary.spread", {"_id": 5})
        router.insert_many("primary.spread", [{"_id": number} for number in range(10)])
        brought_up(sharded_cluster, target, settings)
        names = ("primary.plain", "primary.other", "primary.spread")
        equal(sharded_cluster, target, *names)
        for turn, to in enumerate(("shard1", "shard2", "shard0")):
            router.update_one("primary.plain", {"_id": 3}, {"$inc": {"n": 1}}, upsert=True)
            router.move_primary("primary", to)
            router.insert_one("primary.plain", {"_id": 100 + turn})
            router.delete_one("primary.other", {"_id": turn})
            router.insert_one("primary.spread", {"_id": 100 + turn})
            if turn != 1:
                brought_up(sharded_cluster, target, settings)
                equal(sharded_cluster, target, *names)
    brought_up(sharded_cluster, target, settings)
    with MongoClient[Any](target.uri) as there:
        assert there["primary"].list_collection_names() == []


def test_what_has_moved_is_sharded_then(sharded_cluster: ShardedCluster, start_replica_set: Start) -> None:
    target, router = start_replica_set(), sharded_cluster.router
    with synced(sharded_cluster, target, "moved_then") as settings:
        router.insert_many("moved_then.plain", [{"_id": number, "n": 0} for number in range(10)])
        router.move_primary("moved_then", "shard1")
        router.shard_collection("moved_then.plain", {"_id": 1})
        router.split("moved_then.plain", {"_id": 5})
        router.move_chunk("moved_then.plain", {"_id": 7}, to="shard2")
        router.update_one("moved_then.plain", {"_id": 7}, {"$inc": {"n": 1}})
        router.move_chunk("moved_then.plain", {"_id": 7}, to="shard1")
        router.update_one("moved_then.plain", {"_id": 7}, {"$inc": {"n": 1}})
        router.move_chunk("moved_then.plain", {"_id": 2}, to="shard0")
        brought_up(sharded_cluster, target, settings)
        equal(sharded_cluster, target, "moved_then.plain")


def test_while_a_collection_is_distributed_by_another_key(
    sharded_cluster: ShardedCluster, start_replica_set: Start
) -> None:
    target, router = start_replica_set(), sharded_cluster.router
    with synced(sharded_cluster, target, "resharded") as settings:
        router.shard_collection("resharded.things", {"_id": 1})
        router.insert_many("resharded.things", [{"_id": number, "k": number % 3} for number in range(30)])
        brought_up(sharded_cluster, target, settings)
        router.update_one("resharded.things", {"_id": 3}, {"$set": {"v": 1}})
        router.create_index("resharded.things", {"k": 1, "_id": 1}, "k_1__id_1")
        router.reshard("resharded.things", {"k": 1, "_id": 1})
        router.update_one("resharded.things", {"k": 1, "_id": 4}, {"$set": {"v": 2}})
        brought_up(sharded_cluster, target, settings)
        equal(sharded_cluster, target, "resharded.things")


def test_while_a_shard_key_is_refined(sharded_cluster: ShardedCluster, start_replica_set: Start) -> None:
    """In one window, and with the refinement between two: document keys in entries differ before and after it. A
    document may lack the new field."""
    target, router = start_replica_set(), sharded_cluster.router
    with synced(sharded_cluster, target, "refined") as settings:
        for name, apart in (("at_once", False), ("apart", True)):
            namespace = f"refined.{name}"
            router.shard_collection(namespace, {"k": 1})
            router.split(namespace, {"k": 5})
            router.insert_many(namespace, [{"_id": number, "k": number % 10, "m": number % 3} for number in range(40)])
            router.insert_one(namespace, {"_id": 100, "k": 7})
            router.move_chunk(namespace, {"k": 5}, to="shard1")
            if apart:
                brought_up(sharded_cluster, target, settings)
            router.update_one(namespace, {"_id": 3, "k": 3}, {"$set": {"v": 1}})
            router.delete_one(namespace, {"_id": 14, "k": 4})
            router.create_index(namespace, {"k": 1, "m": 1}, "k_1_m_1")
            router.refine_shard_key(namespace, {"k": 1, "m": 1})
            if apart:
                brought_up(sharded_cluster, target, settings)
            router.update_one(namespace, {"_id": 3, "k": 3, "m": 0}, {"$set": {"v": 2}})
            router.update_one(namespace, {"_id": 100, "k": 7, "m": None}, {"$set": {"v": 3}})
            router.delete_one(namespace, {"_id": 13, "k": 3, "m": 1})
            router.insert_one(namespace, {"_id": 14, "k": 4, "m": 9})
            router.split(namespace, {"k": 7, "m": 1})
            router.move_chunk(namespace, {"k": 7, "m": 1}, to="shard2")
            router.update_one(namespace, {"_id": 37, "k": 7, "m": 1}, {"$set": {"v": 4}})
        brought_up(sharded_cluster, target, settings)
        equal(sharded_cluster, target, "refined.at_once", "refined.apart")


def test_one_id_on_two_shards_is_refused(sharded_cluster: ShardedCluster, start_replica_set: Start) -> None:
    """Written in one segment, the later one would have stood for both."""
    target, router = start_replica_set(), sharded_cluster.router
    with synced(sharded_cluster, target, "twice") as settings:
        namespace = spread_over(sharded_cluster, "twice", {"region": 1, "_id": 1})
        router.insert_one(namespace, {"_id": 1, "region": REGIONS[0]})
        router.insert_one(namespace, {"_id": 1, "region": REGIONS[1]})
        with pytest.raises(SourceError, match="two documents with the _id 1 "):
            brought_up(sharded_cluster, target, settings)
        router.delete_one(namespace, {"_id": 1, "region": REGIONS[1]})


def test_one_id_on_two_shards_is_refused_however_late(
    sharded_cluster: ShardedCluster, start_replica_set: Start
) -> None:
    target, router = start_replica_set(), sharded_cluster.router
    with synced(sharded_cluster, target, "twice_late") as settings:
        namespace = spread_over(sharded_cluster, "twice_late", {"region": 1, "_id": 1})
        router.insert_one(namespace, {"_id": 1, "region": REGIONS[0]})
        brought_up(sharded_cluster, target, settings)
        router.insert_one(namespace, {"_id": 1, "region": REGIONS[1]})
        with pytest.raises(TargetMismatchError, match="is already on the target"):
            brought_up(sharded_cluster, target, settings)


def test_a_shard_that_is_removed_while_the_catalogue_is_read(
    sharded_cluster: ShardedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removed shard's databases were read as its own, and the sync ended with "the cluster has no shard". In tests
    chunks had moved, but no shard had left between two reads."""
    router, asked, gone = sharded_cluster.router, Cluster.current_client, list[str]()
    router.create_database("left", "shard1")
    router.insert_one("left.things", {"_id": 1})

    def is_gone_once(cluster: Cluster, name: str, config: Any = None) -> Any:
        if name != "shard1" or config is None:  # others ask too, for chunks that this shard has
            return asked(cluster, name, config)
        router.move_primary("left", "shard0")
        gone.append(name)
        return None

    monkeypatch.setattr(Cluster, "current_client", is_gone_once)
    try:
        with MongoClient[Any](sharded_cluster.uri) as client:
            cluster = Cluster.discover(client, sharded_cluster.uri, {})
            assert cluster is not None
            with closing(cluster):
                found = read_catalog(cluster, Selection(("left.*",)))
    finally:
        router.drop_database("left")
    assert (gone, list(found.collections)) == (["shard1"], ["left.things"])
