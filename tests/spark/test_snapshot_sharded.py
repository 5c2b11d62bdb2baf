"""``startingFrom=snapshot`` over a cluster: without orphans, while chunks move, through crashes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.watch.client.client import operation_time
from tests.snapshot.copies import Target
from tests.snapshot.test_snapshot_sharded import REGIONS, held, move, put_orphan, spread_over, truth, write
from tests.spark.readers import CrashingQuery
from tests.spark.test_snapshot import PATIENCE_S, kind_of, run_to

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


def options_of(cluster: ShardedCluster, database: str) -> dict[str, str]:
    return {
        "uri": cluster.uri,
        "database": database,
        "startingFrom": "snapshot",
        "fullDocument": "updateLookup",
        "maxEventsPerTrigger": "60",
        "partitions": "2",
    }


def copied(cluster: ShardedCluster, query: CrashingQuery, namespace: str) -> Target:
    """Run the query to the present: its rows ascend and lead to what the cluster holds."""
    with tailrace.connect(cluster.uri) as client:
        until = operation_time(client)
    run_to(query, until)
    query.close()
    tokens = [row["token"] for row in query.rows]
    assert all(left < right for left, right in pairwise(tokens))
    target = Target()
    for row in query.rows:
        target.apply(row["event"])
    assert held(target, namespace) == truth(cluster, namespace)
    return target


def test_orphans_are_left_out_and_rows_ascend_in_every_chunk(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    namespace = spread_over(sharded_cluster, "sparkcopy", {"region": 1, "_id": 1})
    for number in range(200):
        router.insert_one(namespace, {"_id": number, "region": REGIONS[number % 6]})
    for number in range(6):
        owner = router.owner(namespace, {"region": REGIONS[number], "_id": number})
        other = next(name for name in sharded_cluster.shards if name != owner)
        put_orphan(sharded_cluster, other, namespace, {"_id": number, "region": REGIONS[number], "orphan": True})
    router.insert_one("sparkcopy.plain", {"_id": 1})
    query = CrashingQuery(options_of(sharded_cluster, "sparkcopy"))
    try:
        target = copied(sharded_cluster, query, namespace)
        assert target.snapshots == 201
        assert [kind_of(row) for row in query.rows] == ["snapshot"] * 201
    finally:
        router.drop_database("sparkcopy")


def beside_moves(cluster: ShardedCluster, database: str, seed: int) -> None:
    namespace = spread_over(cluster, database, {"region": 1, "_id": 1})
    for number in range(400):
        cluster.router.insert_one(namespace, {"_id": number, "region": REGIONS[number % 6]})
    stop = threading.Event()
    moved: list[str] = []
    work: list[Callable[[], None]] = [
        lambda: move(cluster, namespace, stop, moved),
        *(lambda seed=seed: write(cluster, namespace, seed, stop) for seed in range(2)),  # type: ignore[misc]
    ]
    threads = [threading.Thread(target=one) for one in work]
    query = CrashingQuery(options_of(cluster, database), seed=seed, chance=0.1)
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not query.checkpoint.planned or "snapshot" in query.offset or len(moved) < 3:
            query.step()
            assert time.monotonic() < deadline
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    copied(cluster, query, namespace)
    cluster.router.drop_database(database)


@pytest.mark.slow  # the copy: tests/snapshot/test_snapshot_sharded.py; its rows: the test above
def test_beside_writers_and_moving_chunks_nothing_is_lost_or_twice(sharded_cluster: ShardedCluster) -> None:
    beside_moves(sharded_cluster, "sparkmoves", 3)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.0.4", "4.4.2"])
def test_the_same_on_older_servers(start_sharded_cluster: Callable[..., ShardedCluster], version: str) -> None:
    beside_moves(start_sharded_cluster(2, version=version), "sparkmoves", 4)
