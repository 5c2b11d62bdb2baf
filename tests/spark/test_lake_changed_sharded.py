"""A lake of a sharded cluster that is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ShardedCluster
from tailrace.lake import verify
from tailrace.lake.spark.store.change import change_lake
from tests.spark.lake_driving import options_for
from tests.spark.sparkless_lake import fill

pytestmark = [pytest.mark.mongod]


def test_a_lake_of_a_cluster_is_changed(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    router, database = sharded_cluster.router, "lakewidened"
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
    lake, fresh = tmp_path / "lake", tmp_path / "fresh"
    fill(narrow, lake, until)
    assert len(list(lake_events(lake))) == 13
    report = change_lake(wider, lake)
    fill(wider, fresh, until)
    assert list(lake_events(lake)) == list(lake_events(fresh))
    assert len(list(lake_events(lake))) == 13 + report.rows
    assert report.rows >= 7 + 5
    assert verify(lake, full=True).problems == []
    later = ClusterTime.from_timestamp(router.fence())
    router.drop_database(database)
    fill(wider, lake, later)
    fill(wider, fresh, later, checkpoint=tmp_path / "another")
    assert list(lake_events(lake)) == list(lake_events(fresh))
