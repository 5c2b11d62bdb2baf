"""Spark checkpoints across a shard's removal, and across another shard under its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import bson
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tailrace.embedded import ShardedCluster
from tests.sharded.workload import spread
from tests.spark.streams import Batches, available_now, offsets

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


def ids(events: list[bytes]) -> list[int]:
    return [bson.decode(event)["documentKey"]["_id"] for event in events]


@pytest.mark.parametrize(
    "version", ["6.0.27", *(pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2"))]
)
def test_a_checkpoint_from_before_a_removal_goes_on_with_the_servers_that_were_the_shard(
    spark: SparkSession, start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, version: str
) -> None:
    """A shard was identified only by its name: the events of the removed one were missing, and what the new one had
    written before it was a shard would have been given. No test had removed a shard during a query."""
    cluster = start_sharded_cluster(3, version=version)
    router, namespace = cluster.router, spread(cluster, "removed")
    router.move_chunk(namespace, {"region": "a"}, to="shard2")
    begin = router.fence()
    written = 0

    def write(*regions: str) -> None:
        nonlocal written
        for region in regions:
            written += 1
            router.insert_one(namespace, {"_id": written, "region": region})

    options = {"uri": f"{cluster.uri}&serverSelectionTimeoutMS=2000", "database": "removed", "collection": "orders"}
    options["startAtOperationTime"] = f"{begin.time},{begin.inc}"
    write("a", "z")
    checkpoint = tmp_path / "checkpoint"
    assert ids(available_now(spark, options, checkpoint).events) == [1, 2]
    shutil.copytree(checkpoint, tmp_path / "kept")
    shutil.copytree(checkpoint, tmp_path / "ignoring")

    write("a", "z", "a")
    former = cluster.remove_shard("shard2")
    write("a")
    cluster.add_shard("shard2")
    router.move_chunk(namespace, {"region": "a"}, to="shard2")
    write("a", "z")
    router.fence()
    assert ids(available_now(spark, options, checkpoint).events) == [3, 4, 5, 6, 7, 8]
    named = [set(offset["shards"]) for offset in offsets(checkpoint)]
    without = named.index({"shard0", "shard1"})
    assert named[0] == named[-1] == {"shard0", "shard1", "shard2"}
    (opened,) = [offset["opened"] for offset in offsets(checkpoint) if "opened" in offset]
    assert set(opened) == {"shard2"}
    assert all("opened" not in offset for offset in offsets(checkpoint)[: without + 1])
    rows = spark.read.format("tailrace").options(**options, columns="event").load().collect()
    assert ids([bytes(row.event) for row in rows]) == list(range(1, 9))

    former.close()
    with pytest.raises(StreamingQueryException, match=r"shard2 was removed from the cluster at .* cannot be read"):
        available_now(spark, options, tmp_path / "kept")
    batches = Batches()
    available_now(spark, {**options, "ignoreRemovedShards": "true"}, tmp_path / "ignoring", batches=batches)
    assert ids(batches.events) == [4, 6, 7, 8]
