"""The option ``archive`` over three shards: streams and lakes that begin before the oplogs do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ShardedCluster
from tailrace.lake import verify
from tailrace.lake.spark.store.stream import write_stream
from tailrace.read.archive.record import read_record, write_record
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.mongod import MongodSource
from tests.differential.test_archive_live import archive_now
from tests.differential.test_source_live import fill
from tests.sharded import native
from tests.sharded.workload import spread
from tests.spark.streams import available_now

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

_PATIENCE_S = 300


@dataclass
class Overtaken:
    """A cluster whose oplogs no longer hold ``start``, and its archive. ``events``: what the shards' own streams gave,
    the last of them after the archive's end. ``short``: an archive that ends before the oplogs begin."""

    cluster: ShardedCluster
    archive: Path
    short: Path
    start: ClusterTime
    events: list[bytes]

    def options(self, **more: str) -> dict[str, str]:
        start = {"startAtOperationTime": f"{self.start.seconds},{self.start.increment}"}
        return {"uri": self.cluster.uri, "database": "live", "archive": str(self.archive), **start, **more}


@pytest.fixture(scope="module")
def overtaken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overtaken]:
    folder = tmp_path_factory.mktemp("archived") / "archive"
    with ShardedCluster(3, oplog_size_mb=8, parameters={"syncdelay": 1}) as cluster:
        namespace = spread(cluster, "live")
        start = cluster.router.fence()
        write(cluster, namespace, 0)
        cluster.router.move_chunk(namespace, {"region": "a"}, to="shard2")
        write(cluster, namespace, 100)
        middle = cluster.router.fence()
        early = native.union(cluster, "live", 1, start, middle, for_merge=False)
        archive_now(cluster.uri, folder)
        archive_now(cluster.uri, folder.with_name("short"))
        overtake(cluster, folder, ClusterTime.from_timestamp(middle))
        later = cluster.router.fence()
        write(cluster, namespace, 200)
        late = native.union(cluster, "live", 1, later, cluster.router.fence(), for_merge=False)
        assert len(early) == 240
        assert len(late) == 120
        begun = ClusterTime.from_timestamp(start)
        yield Overtaken(cluster, folder, folder.with_name("short"), begun, early + late)


def write(cluster: ShardedCluster, namespace: str, first: int) -> None:
    for number in range(first, first + 60):
        key = {"region": "agnt"[number % 4], "_id": number}
        cluster.router.insert_one(namespace, {**key, "token": number})
        cluster.router.update_one(namespace, key, {"$set": {"seen": 1}})


def overtake(cluster: ShardedCluster, folder: Path, beyond: ClusterTime) -> None:
    """Write until no shard's oplog reaches back, and archive it all, a piece at a time."""
    deadline = time.monotonic() + _PATIENCE_S
    behind = dict(cluster.shards)
    while behind:
        assert time.monotonic() < deadline
        for name, shard in list(behind.items()):
            with closing(MongodSource(shard.uri)) as source:
                fill(source.client, 5)
                if source.oldest()[0] > beyond:
                    del behind[name]
        archive_now(cluster.uri, folder)
        time.sleep(0.3)


def test_a_stream_begins_in_the_archive_and_goes_on_in_the_oplogs(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path
) -> None:
    """The option was refused for clusters, although ``watch()`` accepted it."""
    without = overtaken.options()
    del without["archive"]
    with pytest.raises(Exception, match="286"):
        available_now(spark, without, tmp_path / "without")
    got = available_now(spark, overtaken.options(maxEventsPerTrigger="70"), tmp_path / "checkpoint")
    assert got.events == overtaken.events
    assert max(got.sizes) <= 70


@pytest.mark.slow  # test_archive.py has it over a replica set
def test_a_checkpoint_that_the_oplogs_have_overtaken_goes_on_in_the_archive(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path
) -> None:
    options = overtaken.options(maxEventsPerTrigger="100")
    assert available_now(spark, options, tmp_path / "checkpoint").events == overtaken.events
    for kind in ("offsets", "commits"):
        for path in (tmp_path / "checkpoint" / kind).iterdir():
            number = path.name.strip(".").partition(".")[0]
            if number.isdigit() and int(number) > 0:
                path.unlink()
    rest = available_now(spark, options, tmp_path / "checkpoint")
    assert overtaken.events[-len(rest.events) :] == rest.events
    assert 120 < len(rest.events) < len(overtaken.events)


@pytest.mark.slow  # test_archive.py has both over a replica set
def test_a_batch_read_and_a_lake_begin_there_too(spark: SparkSession, overtaken: Overtaken, tmp_path: Path) -> None:
    frame = spark.read.format("tailrace").options(**overtaken.options(columns="event,token", partitions="3")).load()
    assert [bytes(row.event) for row in frame.collect()] == overtaken.events
    write_stream(spark, overtaken.options(), tmp_path / "lake", available_now=True).awaitTermination()
    assert list(lake_events(tmp_path / "lake")) == overtaken.events
    assert verify(tmp_path / "lake").problems == []


def test_what_the_archive_cannot_tell_is_refused(spark: SparkSession, overtaken: Overtaken, tmp_path: Path) -> None:
    hole = overtaken.options(archive=str(overtaken.short))
    with pytest.raises(Exception, match="286") as caught:
        available_now(spark, hole, tmp_path / "hole")
    ends = [ArchiveSource(overtaken.short, name).newest() for name in overtaken.cluster.shards]
    assert any(str(end) in str(caught.value) for end in ends)
    del hole["startAtOperationTime"]
    assert available_now(spark, hole, tmp_path / "now").events == []  # what needs no archive is not refused
    description = overtaken.short / "archive.json"
    known = read_record(description)
    known["sharded"][min(known["sharded"])]["after"] = f"{int(overtaken.start) + (1 << 32):016x}"
    assert known is not None
    write_record(description, known)
    with pytest.raises(Exception, match="was added or removed"):
        available_now(spark, overtaken.options(archive=str(overtaken.short)), tmp_path / "members")
