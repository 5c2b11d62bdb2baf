"""A lake of a live cluster whose shards log events with the same token at the same time, compared with its shards' own
streams.

Until this was fixed, the lake stopped for good at such a micro-batch. The tests without Spark are in
``tests/unit/test_lake_equal_tokens.py``."""

from __future__ import annotations

import json
from pathlib import Path

import bson
import pytest
from bson.timestamp import Timestamp
from pyspark.sql import SparkSession

from tailrace.demo.comparison import lake_events
from tailrace.embedded import ShardedCluster
from tailrace.lake import verify
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.compaction import compact
from tests.sharded import native
from tests.sharded.one_time import drop_at_one_time
from tests.spark.lake_driving import PATIENCE_S
from tests.spark.streams import available_now

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


def truth(cluster: ShardedCluster, start: Timestamp, prefix: str) -> list[bytes]:
    """What the shards' own streams give for the databases whose names begin with ``prefix``."""
    union = native.union(cluster, "admin", 1, start, cluster.router.fence(), allChangesForCluster=True)
    return [event for event in union if bson.decode(event)["ns"]["db"].startswith(prefix)]


def test_a_lake_holds_the_events_of_all_shards_that_have_one_token_and_goes_on(
    spark: SparkSession, sharded_cluster: ShardedCluster, tmp_path: Path
) -> None:
    cluster, prefix, lake = sharded_cluster, "at_one_time_", tmp_path / "lake"
    start = cluster.router.fence()
    options = {
        "uri": cluster.uri,
        "startAtOperationTime": f"{start.time},{start.inc}",
        "pipeline": json.dumps([{"$match": {"ns.db": {"$regex": f"^{prefix}"}}}]),
    }

    def go_on(checkpoint: str) -> list[bytes]:
        place = tmp_path / checkpoint
        query = write_stream(spark, options, lake, checkpoint=place, available_now=True)
        assert query.awaitTermination(PATIENCE_S)
        assert verify(lake, full=True).problems == []
        return list(lake_events(lake))

    drop_at_one_time(cluster, prefix)
    before = truth(cluster, start, prefix)
    tokens = [native.token(event).data for event in before]
    assert tokens[-3:] == [tokens[-1]] * 3, "the last events, which a checkpoint begins after, have one token"
    assert len(set(before[-3:])) == 3
    assert go_on("first") == before
    assert go_on("first") == before
    assert go_on("fresh") == before, "a fresh checkpoint begins after all events of the last token"
    drop_at_one_time(cluster, prefix)
    after = truth(cluster, start, prefix)
    assert go_on("fresh") == after
    assert after[: len(before)] == before
    assert len(after) > len(before) + 3
    assert compact(lake).files_after == 1
    assert verify(lake, full=True).problems == []
    assert list(lake_events(lake)) == after
    # The server skips all events of a token that it resumes after (tests/sharded/test_native_router.py), and so do we.
    del options["startAtOperationTime"]
    resumed = available_now(spark, {**options, "resumeAfter": tokens[-1]}, tmp_path / "resumed")
    assert resumed.events == after[len(before) :]
