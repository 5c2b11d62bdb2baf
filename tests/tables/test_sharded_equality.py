"""Tables of a sharded cluster, copied and followed while chunks move, equal their collections."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bson
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.amounts import amount
from tests.pace import BETWEEN_WRITES_S
from tests.snapshot.test_snapshot_sharded import REGIONS, move, spread_over, write
from tests.tables.equality import in_table, key_of
from tests.tables.test_as_of import rows_of

pytestmark = pytest.mark.mongod


def truth(cluster: ShardedCluster, namespace: str) -> dict[bytes, bytes]:
    found = [bson.encode(one) for one in cluster.router.find(namespace)]
    return {key_of(one): one for one in found}


def transact(cluster: ShardedCluster, namespace: str, stop: threading.Event) -> None:
    """Transactions over all shards on documents that no one else writes."""
    chosen = random.Random(7)
    while not stop.wait(BETWEEN_WRITES_S):

        def body(transaction: object) -> None:
            for number in (900, 901, 902):
                key = {"region": REGIONS[number % len(REGIONS)], "_id": number}
                transaction.update_one(namespace, key, {"$set": {"v": chosen.random()}}, upsert=True)  # type: ignore[attr-defined]

        cluster.router.run_transaction(body)


def test_tables_equal_their_collections_while_chunks_move(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    namespace = spread_over(sharded_cluster, "tabled", {"region": 1, "_id": 1})
    try:
        follow(sharded_cluster, namespace, tmp_path / "t")
    finally:
        sharded_cluster.router.drop_database("tabled")


def follow(cluster: ShardedCluster, namespace: str, root: Path) -> None:
    for number in range(amount(120, 300)):
        cluster.router.insert_one(namespace, {"_id": number, "region": REGIONS[number % 6], "v": {"a": [1, 2]}})
    cluster.router.insert_one("tabled.plain", {"_id": 1})
    settings = TableSettings(root, (TableRule("tabled.*"),), every_s=0.0)
    moved: list[str] = []
    for _ in range(2):  # the first round copies, the second goes on with a process of its own
        stop = threading.Event()
        work: list[Callable[[], None]] = [
            partial(move, cluster, namespace, stop, moved),
            partial(transact, cluster, namespace, stop),
            *(partial(write, cluster, namespace, seed, stop) for seed in range(3)),
        ]
        threads = [threading.Thread(target=one) for one in work]
        before = len(moved)
        for thread in threads:
            thread.start()
        try:
            with TablesWriter(cluster.uri, settings) as writer:
                writer.run_to_present()
                while len(moved) < before + 2 or writer.progress.batches < 4:
                    writer.run_to_present()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        with TablesWriter(cluster.uri, settings) as writer:
            writer.run_to_present()
        assert in_table(root, namespace) == truth(cluster, namespace)
        assert in_table(root, "tabled.plain") == truth(cluster, "tabled.plain")
    cluster.router.drop_collection("tabled.plain")
    with TablesWriter(cluster.uri, settings) as writer:
        writer.run_to_present()
    assert in_table(root, "tabled.plain") == {}
    assert in_table(root, namespace) == truth(cluster, namespace)


def test_as_of_equals_what_was_recorded_while_chunks_moved(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    """Ten copies, most of them between two micro-batches. Recorded copies had been those of a replica set."""
    chosen, router = random.Random(21), sharded_cluster.router
    namespace = spread_over(sharded_cluster, "tabled_as_of", {"region": 1, "_id": 1})
    settings = TableSettings(tmp_path / "t", (TableRule(namespace),), every_s=0.0)
    recorded: list[tuple[ClusterTime, dict[bytes, bytes]]] = []
    try:
        for turn in range(10):
            for _ in range(12):
                number = chosen.randrange(30)
                key = {"region": REGIONS[number % len(REGIONS)], "_id": number}
                match chosen.randrange(4):
                    case 0:
                        router.delete_one(namespace, key)
                    case 1:
                        router.update_one(namespace, key, {"$push": {"list": turn}, "$unset": {"n": 1}}, upsert=True)
                    case _:
                        router.update_one(namespace, key, {"$inc": {"n": 1}}, upsert=True)
            region, to = chosen.choice(REGIONS), chosen.choice(list(sharded_cluster.shards))
            if turn % 3 == 0 and router.owner(namespace, {"region": region, "_id": 1}) != to:
                router.move_chunk(namespace, {"region": region, "_id": 1}, to=to)
            if turn % 4 == 0:
                with TablesWriter(sharded_cluster.uri, settings) as writer:
                    writer.run_to_present()
            recorded.append((ClusterTime.from_timestamp(router.fence()), truth(sharded_cluster, namespace)))
        with TablesWriter(sharded_cluster.uri, settings) as writer:
            writer.run_to_present()
        found = [as_of(tmp_path / "t", namespace, time, uri=sharded_cluster.uri) for time, _ in recorded]
        assert [rows_of(one.rows) for one in found] == [documents for _, documents in recorded]
        assert sum(one.replayed > 0 for one in found) >= 5
    finally:
        router.drop_database("tabled_as_of")
