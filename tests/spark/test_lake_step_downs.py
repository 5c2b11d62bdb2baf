"""A lake of a sharded cluster whose micro-batches are divided among several tasks, while shards get other primaries.

Lakes of a cluster had only been tried without faults, and step-downs only on a stream that a single program reads.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from tailrace.demo.comparison import lake_events
from tailrace.embedded import ShardedCluster
from tailrace.lake import CompactionPolicy, verify
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.commit_log import CommitLog
from tests.server_in_use import IN_BETWEEN
from tests.sharded import native
from tests.sharded.workload import REGIONS, spread, writers
from tests.spark.test_sharded import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.mongod, pytest.mark.slow]

_DATABASE = "elections"
_TASKS = 4
#: Enough events for a micro-batch that is divided among all tasks, since a slice has 2 MB of oplog or more.
_EVENTS = 6000
_PAD = 1800
_BATCHES = 4


def fill(cluster: ShardedCluster, namespace: str, first: int, count: int) -> Timestamp:
    """Write documents for both shards in turn, and change some of them again. Returns a time before the last event."""
    router = cluster.router
    for start in range(first, first + count, 500):
        for place, region in enumerate(REGIONS):
            numbers = range(start + place * 125, start + (place + 1) * 125)
            router.insert_many(namespace, [{"_id": n, "region": region, "pad": os.urandom(_PAD)} for n in numbers])
            router.update_one(namespace, {"_id": numbers[0], "region": region}, {"$set": {"pad": None}})
            router.delete_one(namespace, {"_id": numbers[1], "region": region})
    return end_of(cluster, namespace, f"end of {first}")


def end_of(cluster: ShardedCluster, namespace: str, mark: str) -> Timestamp:
    end = cluster.router.fence()
    cluster.router.insert_one(namespace, {"_id": mark, "region": "z"})
    return end


def next_commit_begun(query: StreamingQuery, lake: Path) -> int:
    """Wait until a task of a micro-batch writes, after one that this query has committed. Gives the number that its
    commit will have. (The lake is committed by a process of its own, so nothing can be hooked here.)"""
    log = CommitLog(lake)
    known = log.head().number if (lake / "_tailrace" / "lake.json").exists() else 0
    wait_until(lambda: log.head().number > known and any((lake / "_staging").iterdir()), query)
    return log.head().number + 1


@contextmanager
def cut_off_reads(cluster: ShardedCluster) -> Iterator[None]:
    """Make a few of the second shard's replies to getMores look as during a step-down. (Slices are read so quickly that
    a real one seldom hits a cursor.)"""
    name = {"configureFailPoint": "failCommand"}
    data = {"failCommands": ["getMore"], "errorCode": 189}  # PrimarySteppedDown
    with MongoClient[Any](cluster.shards["shard1"].uri) as client:
        client.admin.command({**name, "mode": {"times": 4}, "data": data})
        try:
            yield
        finally:
            found = client.admin.command({**name, "mode": "off"})
    assert found["count"] > 0, "no read was cut off"


def holds(lake: Path, until: Timestamp) -> bool:
    newest = CommitLog(lake).head().newest
    return newest is not None and newest.planned.until.to_timestamp() >= until


@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2"])
def test_a_divided_lake_of_a_cluster_whose_shards_elect_again_holds_what_the_shards_give(
    spark: SparkSession, start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, version: str
) -> None:
    cluster = start_sharded_cluster(2, members=[3, 1], version=version, enable_test_commands=True)
    namespace, lake = spread(cluster, _DATABASE), tmp_path / "lake"
    start = cluster.router.fence()
    options = {"uri": cluster.uri, "database": _DATABASE, "collection": "orders", "columns": "event,token"}
    options |= {"startAtOperationTime": f"{start.time},{start.inc}", "partitions": str(_TASKS)}
    options["maxEventsPerTrigger"] = str(_EVENTS)
    hit = []
    for turn, (fault, shard) in enumerate(
        (("step down", "shard0"), ("step down", "shard1"), ("step down", "shard0"), ("kill", "shard0"))
    ):
        # What is there before the query starts can be divided.
        until = fill(cluster, namespace, turn * 50_000, _EVENTS * _BATCHES)
        query = write_stream(spark, options, lake, compaction=CompactionPolicy(every=0))
        try:
            hit.append(next_commit_begun(query, lake))
            time.sleep(random.uniform(0, 0.5))
            with writers(cluster, namespace, first_id=10_000_000 * (turn + 1)), cut_off_reads(cluster):
                if fault == "kill":
                    cluster.restart(shard, cluster.kill(shard))
                else:
                    cluster.step_down(shard)
                wait_until(partial(holds, lake, until), query)
            until = end_of(cluster, namespace, f"end of turn {turn}")
            wait_until(partial(holds, lake, until), query)
        finally:
            query.stop()
    write_stream(spark, options, lake, available_now=True).awaitTermination()
    expected = native.union(cluster, _DATABASE, "orders", start, cluster.router.fence())
    found = list(lake_events(lake))
    assert len(found) == len(expected) > 4 * _EVENTS * _BATCHES
    assert found == expected
    assert verify(lake, full=True).problems == []
    files = {commit.number: len(commit.files) for commit in CommitLog(lake).commits()}
    assert all(files[number] > 1 for number in hit), "a step-down met a micro-batch of one task"
