"""Spark over a live sharded cluster, compared with the streams of its shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import UsageError
from tailrace.lake import verify
from tailrace.lake.spark.planning import planner
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.offset import StreamIdentity
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.reading import merged_slice
from tailrace.lake.spark.reading.merged_slice import merged_slice_events
from tailrace.lake.spark.reading.slice_plan import slice_plan
from tailrace.lake.spark.store.stream import write_stream
from tests.sharded import native
from tests.sharded.workload import spread, writers
from tests.spark.streams import Batches, available_now, offsets

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

_PATIENCE_S = 300


@dataclass
class Run:
    """What happened on a cluster between two cluster times, and what a query got that ran meanwhile."""

    cluster: ShardedCluster
    start: Timestamp
    end: Timestamp
    live: Batches
    checkpoint: Path
    added: str
    unions: dict[str | int, list[bytes]] = field(default_factory=dict)

    def union(self, collection: str | int = "orders") -> list[bytes]:
        """What the shards' own streams say, in the order of their tokens."""
        if collection not in self.unions:
            self.unions[collection] = native.union(self.cluster, "live", collection, self.start, self.end)
        return self.unions[collection]

    def options(self, **more: str) -> dict[str, str]:
        """A stream from the beginning to the end of the run."""
        start = {"startAtOperationTime": f"{self.start.time},{self.start.inc}"}
        return {"uri": self.cluster.uri, "database": "live", "collection": "orders", **start, **more}


def wait_until(done: Callable[[], bool], query: StreamingQuery) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not done():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def run(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A query runs while documents and transactions are written, chunks move, and a third shard is added. During the
    test the shards write no no-ops by themselves: nothing comes unless it is asked for."""
    checkpoint = tmp_path_factory.mktemp("sharded")
    live = Batches()
    with ShardedCluster(2, parameters={"writePeriodicNoops": False}) as cluster:
        namespace = spread(cluster, "live")
        start = cluster.router.fence()
        query = (
            spark.readStream.format("tailrace")
            .options(uri=cluster.uri, database="live", collection="orders", columns="event")
            .option("startAtOperationTime", f"{start.time},{start.inc}")
            .load()
            .writeStream.foreachBatch(live.take)
            .option("checkpointLocation", str(checkpoint))
            .start()
        )
        try:
            with writers(cluster, namespace) as running:
                cluster.router.move_chunk(namespace, {"region": "a"}, to="shard1")
                wait_until(lambda: len(live.events) > 20, query)
                added = cluster.add_shard()
                for region, to in (("n", added), ("a", "shard0"), ("g", added)):
                    cluster.router.move_chunk(namespace, {"region": region}, to=to)
                wait_until(lambda: sum(len(writer.written) for writer in running) > 150, query)
            cluster.router.insert_one(namespace, {"_id": "the mark", "region": "z"})
            wait_until(lambda: bool(live.events) and b"the mark" in live.events[-1], query)
        finally:
            query.stop()
        yield Run(cluster, start, cluster.router.fence(), live, checkpoint, added)


def test_a_running_query_gives_what_the_shards_give_and_takes_the_added_shard_in(run: Run) -> None:
    assert run.live.events == run.union()
    written = offsets(run.checkpoint)
    assert set(written[0]["shards"]) == {"shard0", "shard1"}
    assert set(written[-1]["shards"]) == {"shard0", "shard1", run.added}
    (opened,) = [offset["opened"] for offset in written if "opened" in offset]
    assert set(opened) == {run.added}
    for offset in written:
        time_ = offset["clusterTime"]
        assert all(reached == [time_["t"], time_["i"]] for reached in offset["shards"].values())
    times = [(offset["clusterTime"]["t"], offset["clusterTime"]["i"]) for offset in written]
    assert times == sorted(times)


@pytest.mark.slow  # test_lake_equal_tokens.py has a lake of three shards
def test_a_lake_holds_what_the_shards_give(spark: SparkSession, run: Run, tmp_path: Path) -> None:
    union = run.union()
    options = run.options(maxEventsPerTrigger=str(len(union) // 4))
    assert write_stream(spark, options, tmp_path / "lake", available_now=True).awaitTermination(_PATIENCE_S)
    # Writes of other tests since then come after it.
    assert list(lake_events(tmp_path / "lake"))[: len(union)] == union
    assert verify(tmp_path / "lake").sound


def test_small_micro_batches_and_a_restart_lose_and_repeat_nothing(
    spark: SparkSession, run: Run, tmp_path: Path
) -> None:
    union = run.union()
    half = native.token(union[len(union) // 2]).cluster_time

    class Failing(Batches):
        def take(self, frame: Any, batch_id: int) -> None:
            super().take(frame, batch_id)
            if self.events and native.token(self.events[-1]).cluster_time > half:
                raise RuntimeError("the sink fails")

    options = run.options(maxEventsPerTrigger=str(len(union) // 8))
    first = Failing()
    with pytest.raises(StreamingQueryException):
        available_now(spark, options, tmp_path, batches=first)
    rest = available_now(spark, options, tmp_path)
    # The micro-batch that failed comes again, the same.
    assert rest.ids[0] == first.ids[-1]
    assert [event for _, event in rest.rows[0]] == [event for _, event in first.rows[-1]]
    assert [event for rows in first.rows[:-1] for _, event in rows] + rest.events == union
    assert len(first.sizes) + len(rest.sizes) > 6


def test_a_batch_read_gives_the_same_events(spark: SparkSession, run: Run) -> None:
    rows = spark.read.format("tailrace").options(**run.options(columns="event")).load().collect()
    assert [bytes(row.event) for row in rows] == run.union()


@pytest.fixture
def connected(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[merged_slice.Connected]:
    """What a worker's process keeps, for slices that are read in this process."""
    monkeypatch.setattr(merged_slice, "_connected", {})
    at = merged_slice.connect(run.cluster.uri)
    yield at
    at.cluster.close()
    at.client.close()


@pytest.mark.usefixtures("connected")
def test_slices_that_are_read_apart_give_the_same_events(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "SLICE_BYTES_MIN", 1)
    options = parse(run.options(partitions="5"))
    with closing(open_deployment(options)) as deployment:
        until = deployment.newest()
        deployment.settle(until)
        start = deployment.start("oldest")
        slices = deployment.slices(start, deployment.end(start, until, None))
    # How many of the five there are depends on when the random run wrote: a busy second is not cut.
    assert 1 < len(slices) <= 5
    assert all({shard.name for shard in slice_.shards} == set(run.cluster.shards) for slice_ in slices)
    blocks = [block for slice_ in slices for block in merged_slice_events(options, slice_)]
    assert EventBlock.join(blocks).events() == run.union()


def test_the_kernels_events_are_merged_as_the_stages_are(
    run: Run, connected: merged_slice.Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_slice, "_BATCH_BYTES", 2_000)
    options = parse(run.options())
    with closing(open_deployment(options)) as deployment:
        until = deployment.newest()
        deployment.settle(until)
        start = deployment.start("oldest")
        slices = deployment.slices(start, deployment.end(start, until, None))
    uses: tuple[KernelUse, ...] = ("never", "always")
    for use in uses:
        blocks = [
            block
            for slice_ in slices  # one, or more where a slow machine has made the run long
            for block in merged_slice.stream_of_slice(slice_plan(options, slice_), slice_, connected, kernel=use)
        ]
        assert len(blocks) > 10
        assert EventBlock.join(blocks).events() == run.union()


def test_a_database_is_read_too(spark: SparkSession, run: Run) -> None:
    options = run.options(columns="event")
    del options["collection"]
    rows = spark.read.format("tailrace").options(**options).load().collect()
    assert [bytes(row.event) for row in rows] == run.union(1)


def test_a_stream_resumes_at_an_event_of_any_shard(spark: SparkSession, run: Run, tmp_path: Path) -> None:
    union = run.union()
    options = run.options()
    del options["startAtOperationTime"]
    for place in (len(union) // 3, len(union) * 2 // 3):
        token = native.token(union[place]).data
        got = available_now(spark, {**options, "resumeAfter": token}, tmp_path / str(place))
        assert got.events == union[place + 1 :]


def test_pipelines_and_current_documents_go_through_the_merge(spark: SparkSession, run: Run) -> None:
    rest = run.union()[-40:]
    first = native.token(rest[0]).cluster_time
    options = run.options(
        columns="event",
        fullDocument="updateLookup",
        pipeline='[{"$match": {"operationType": {"$ne": "delete"}}}]',
        startAtOperationTime=f"{first.seconds},{first.increment}",
    )
    rows = spark.read.format("tailrace").options(**options).load().collect()
    assert all("fullDocument" in bson.decode(row.event) for row in rows)
    kept = [event for event in run.union() if native.token(event).cluster_time >= first]
    tokens = [native.token(event).data for event in kept if bson.decode(event)["operationType"] != "delete"]
    assert [native.token(bytes(row.event)).data for row in rows] == tokens


def test_the_checkpoint_of_a_replica_set_is_refused_on_a_cluster_and_the_other_way_round(
    spark: SparkSession, run: Run, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    of_replica_set = {"uri": replica_set.uri, "database": "live", "collection": "orders"}
    available_now(spark, of_replica_set, tmp_path / "replica set")
    with pytest.raises(StreamingQueryException, match="made on the replica set 'rs0' and the uri leads to the sharded"):
        available_now(spark, {**of_replica_set, "uri": run.cluster.uri}, tmp_path / "replica set")
    available_now(spark, run.options(), tmp_path / "cluster")
    with pytest.raises(StreamingQueryException, match=r"made on the sharded cluster .* leads to the replica set"):
        available_now(spark, run.options(uri=replica_set.uri), tmp_path / "cluster")


def test_a_shard_that_is_read_alone_says_which_cluster_it_is_in(run: Run, replica_set: ReplicaSet) -> None:
    def identity(uri: str) -> StreamIdentity:
        with closing(open_deployment(parse({"uri": uri}))) as deployment:
            return deployment.identity

    shard, cluster = identity(run.cluster.shards["shard0"].uri), identity(run.cluster.uri)
    assert shard.cluster == cluster.cluster
    assert not identity(replica_set.uri).cluster
    before = StreamIdentity(shard.settings, shard.replica_sets)
    with pytest.raises(UsageError, match="'shard0' has become a shard of cluster"):
        shard.require_same(before)


def test_the_end_of_a_collection_on_several_shards_ends_the_stream_at_its_first_invalidate(
    spark: SparkSession, run: Run, tmp_path: Path
) -> None:
    """The last test of the module: it drops the collection."""
    cluster = run.cluster
    spread(cluster, "ending")
    start = cluster.router.fence()
    for region in ("a", "n"):
        cluster.router.insert_one("ending.orders", {"_id": region, "region": region})
    cluster.router.drop_collection("ending.orders")
    end = cluster.router.fence()
    union = native.union(cluster, "ending", "orders", start, end)
    keys = {native.token(event).sort_key: b"\x0b\x00\x00\x00invalidate\x00" in event for event in union}
    first = min(key for key, is_invalidate in keys.items() if is_invalidate)
    expected = [event for event in union if native.token(event).sort_key <= first]
    options = {"uri": cluster.uri, "database": "ending", "collection": "orders"}
    at = {"startAtOperationTime": f"{start.time},{start.inc}"}
    got = available_now(spark, {**options, **at}, tmp_path / "ended")
    assert got.events == expected
    assert offsets(tmp_path / "ended")[-1]["invalidated"] is True
    after = native.token(got.events[-1])
    assert after.from_invalidate
    assert ClusterTime.from_timestamp(end) > after.cluster_time
    # Another shard may have logged the same drop later: that is seen, and does not end the stream.
    again = available_now(spark, {**options, "startAfter": after.data}, tmp_path / "after")
    later = [event for event in union if native.token(event).sort_key > first]
    assert again.events == [event for event in later if not keys[native.token(event).sort_key]]
