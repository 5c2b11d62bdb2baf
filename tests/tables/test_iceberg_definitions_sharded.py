"""Databases that get another primary shard, collections that get another shard key, drops, renames and ``$out`` on a
cluster, with tables and a lake that have an Iceberg catalogue, also while a snapshot is made.

Earlier only the random workload of the products had tried these with catalogues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bson
import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ShardedCluster
from tailrace.lake import verify
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.writer import TablesWriter
from tests.sharded import native
from tests.spark.sparkless_lake import fill
from tests.tables.iceberg import compared, iceberg_table, newest_is_shown, sql_settings
from tests.tables.test_iceberg_followed import shown_tables
from tests.tables.test_primary_shards import database
from tests.tables.test_sharded_equality import truth
from tests.unit.lake_iceberg import mirror_of, newest_rows, versions_shown

pytestmark = [
    pytest.mark.mongod,
    pytest.mark.slow,  # test_primary_shards.py makes most of these changes without a catalogue
    pytest.mark.filterwarnings("ignore:Iceberg scan planning"),
]

_NAME = "shown_moved"
_ALL = ("plain", "spread", "made", "again", "renamed")


def changes(cluster: ShardedCluster) -> Iterator[Callable[[], None]]:
    """One change of definitions after the other, each with writes before and after it."""
    router = cluster.router

    def put(name: str, number: int) -> None:
        router.update_one(f"{_NAME}.{name}", {"_id": number}, {"$inc": {"n": 1}}, upsert=True)

    def moved(to: str) -> None:
        put("plain", 3)
        router.move_primary(_NAME, to)
        put("plain", 4)
        put("again", 5)

    def out(shard: str) -> None:
        with MongoClient[Any](cluster.shards[shard].uri) as client:
            client[_NAME]["plain"].aggregate([{"$set": {"out": True}}, {"$out": "made"}])

    def reshard() -> None:
        router.create_index(f"{_NAME}.spread", {"k": 1, "_id": 1}, "k_1__id_1")
        router.update_one(f"{_NAME}.spread", {"_id": 2}, {"$set": {"v": 1}})
        router.reshard(f"{_NAME}.spread", {"k": 1, "_id": 1})
        router.update_one(f"{_NAME}.spread", {"k": 1, "_id": 4}, {"$set": {"v": 2}})

    def drop() -> None:
        router.drop_collection(f"{_NAME}.again")
        router.insert_one(f"{_NAME}.again", {"_id": "anew"})

    def rename() -> None:
        router.rename(f"{_NAME}.again", f"{_NAME}.renamed")
        put("again", 1)
        router.rename(f"{_NAME}.again", f"{_NAME}.renamed", drop_target=True)
        put("renamed", 2)

    def drop_all() -> None:
        router.drop_collection(f"{_NAME}.spread")
        router.drop_collection(f"{_NAME}.plain")
        put("plain", 100)

    yield lambda: out("shard0")
    yield lambda: moved("shard1")
    yield lambda: out("shard1")
    yield reshard
    yield drop
    yield lambda: moved("shard2")
    yield rename
    yield lambda: out("shard2")
    yield lambda: moved("shard0")
    yield drop_all


@contextmanager
def beside(step: str, change: Callable[[], None]) -> Iterator[None]:
    """Make a change when this step is met for the first time."""
    left = [change]

    def at(name: str) -> None:
        if name == step and left:
            left.pop()()

    durable.observe_steps(at)
    try:
        yield
    finally:
        durable.observe_steps(None)
        for one in left:  # nothing was to be shown
            one()


def begun(cluster: ShardedCluster) -> None:
    router = cluster.router
    router.insert_many(f"{_NAME}.plain", [{"_id": number, "n": 0} for number in range(10)])
    router.insert_one(f"{_NAME}.again", {"_id": 1})
    router.shard_collection(f"{_NAME}.spread", {"_id": 1})
    router.split(f"{_NAME}.spread", {"_id": 15})
    router.insert_many(f"{_NAME}.spread", [{"_id": number, "k": number % 3} for number in range(30)])
    router.move_chunk(f"{_NAME}.spread", {"_id": 20}, to="shard1")


def test_tables(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    cluster, root = sharded_cluster, tmp_path / "t"
    settings = shown_tables(root, f"{_NAME}.*", iceberg=sql_settings(tmp_path))

    def brought_up() -> None:
        with TablesWriter(cluster.uri, settings) as writer:
            writer.run_to_present(ClusterTime.from_timestamp(cluster.router.fence()))

    def check(*names: str, exists: bool = True) -> None:
        for name in names:
            folder, found = root / folder_of(f"{_NAME}.{name}"), iceberg_table(tmp_path, f"{_NAME}.{name}")
            compared(folder, found)
            assert newest_is_shown(folder, found), name
            rows = found.scan(selected_fields=("_key", "_bson")).to_arrow().to_pylist()
            there = truth(cluster, f"{_NAME}.{name}") if exists else {}
            assert {row["_key"]: row["_bson"] for row in rows} == there, name

    with database(cluster, _NAME):
        begun(cluster)
        brought_up()
        for turn, change in enumerate(changes(cluster)):
            cluster.router.insert_one(f"{_NAME}.plain", {"_id": f"turn {turn}"})
            with beside(("iceberg.written", "iceberg.shown", "table.commit")[turn % 3], change):
                brought_up()
            brought_up()
            check("plain", "spread", "made" if turn else "plain", "again")
        check(*_ALL)
    brought_up()
    check(*_ALL, exists=False)


def test_a_lake(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    cluster, lake = sharded_cluster, tmp_path / "lake"
    with database(cluster, _NAME):
        start = cluster.router.fence()
        source = {
            "uri": cluster.uri,
            "startAtOperationTime": f"{start.time},{start.inc}",
            "pipeline": json.dumps([{"$match": {"ns.db": _NAME}}]),
            "showExpandedEvents": "true",
            "maxEventsPerTrigger": "30",
        }
        begun(cluster)
        mirror = mirror_of(lake)
        for turn, change in enumerate(changes(cluster)):
            cluster.router.insert_one(f"{_NAME}.plain", {"_id": f"turn {turn}"})
            with beside(("iceberg.written", "commit.log", "iceberg.shown")[turn % 3], change):
                until = ClusterTime.from_timestamp(cluster.router.fence())
                fill(source, lake, until, checkpoint=tmp_path / f"checkpoint {turn}")
                mirror.follow()
    end = cluster.router.fence()
    fill(source, lake, ClusterTime.from_timestamp(end), checkpoint=tmp_path / "last")
    mirror.follow()
    assert mirror.fault() is None
    assert versions_shown(lake)
    options = {"allChangesForCluster": True, "showExpandedEvents": True}
    union = native.union(cluster, "admin", 1, start, end, **options)
    expected = [event for event in union if bson.decode(event)["ns"].get("db") == _NAME]
    assert list(lake_events(lake)) == expected
    assert sorted(row["event"] for row in newest_rows(lake)) == sorted(expected)
    assert len(expected) > 100
    assert verify(lake, full=True).sound
