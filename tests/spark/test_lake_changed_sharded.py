"""A lake of a sharded cluster that is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.lake import verify
from tailrace.lake.spark.store.change import change_lake
from tailrace.lake.store.lake_root import LakeRoot
from tests.spark.lake_driving import options_for
from tests.spark.sparkless_lake import fill
from tests.tables.object_server import ObjectServer
from tests.tables.test_lake_changed_in_store import rows

pytestmark = [pytest.mark.mongod]


@pytest.mark.slow  # the same as below; a store: tests/tables/test_lake_changed_in_store.py
def test_a_lake_of_a_cluster_in_a_store_is_changed(
    sharded_cluster: ShardedCluster, object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    changed(sharded_cluster, object_store.place(prefix, tmp_path / "state"), tmp_path, "lakewidenedstored")


def test_a_lake_of_a_cluster_is_changed(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    changed(sharded_cluster, tmp_path / "lake", tmp_path, "lakewidened")


def events_of(lake: LakeRoot) -> list[bytes]:
    return [row["event"] for row in rows(lake)]


def changed(sharded_cluster: ShardedCluster, lake: LakeRoot, tmp_path: Path, database: str) -> None:
    router = sharded_cluster.router
    first, second, *_ = sharded_cluster.shards
    router.create_database(database, first)
    router.shard_collection(f"{database}.c", {"_id": 1})
    router.split(f"{database}.c", {"_id": 10})
    router.move_chunk(f"{database}.c", {"_id": 10}, to=second)
    start = router.fence()
    router.insert_many(f"{database}.c", [{"_id": number, "n": number % 4} for number in range(20)])
    router.insert_many(f"{database}.other", [{"_id": number} for number in range(5)])
    until = ClusterTime.from_timestamp(router.fence())
    wider = options_for(sharded_cluster.uri, database, ClusterTime.from_timestamp(start), maxEventsPerTrigger="7")
    narrow = {**wider, "pipeline": json.dumps([{"$match": {"documentKey._id": {"$gt": 6}}}])}
    fresh = tmp_path / "fresh"
    fill(narrow, lake, until)
    assert len(events_of(lake)) == 13
    report = change_lake(wider, lake)
    fill(wider, fresh, until)
    assert events_of(lake) == events_of(fresh)
    assert len(events_of(lake)) == 13 + report.rows
    assert report.rows >= 7 + 5
    assert verify(lake, full=True).problems == []
    later = ClusterTime.from_timestamp(router.fence())
    router.drop_database(database)
    fill(wider, lake, later)
    fill(wider, fresh, later, checkpoint=tmp_path / "another")
    assert events_of(lake) == events_of(fresh)
