"""Exact images of the streaming source: the bytes of ``connect(images=)`` and of the server's own images, through
crashes, repeated micro-batches and lost commits; and what is refused."""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import UsageError
from tailrace.lake.spark.planning import exact, planner
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.reading import slice_reader
from tailrace.lake.spark.source.data_source import TailraceDataSource
from tailrace.lake.spark.source.stream_reader import TailraceStreamReader
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.images import source as images_source
from tailrace.read.images.bucket import ImagesInUseError, ImageStateError
from tailrace.read.images.state import ImageState
from tests.amounts import amount
from tests.differential import documents as docs
from tests.differential import image_writes
from tests.differential.image_writes import raw_events, write_lookalikes
from tests.sharded import native
from tests.sharded.random_workload import RandomWorkload
from tests.sharded.test_exact_images import differences, own_events
from tests.spark.readers import CrashingQuery
from tests.spark.streams import newest, server_events
from tests.spark.test_snapshot import kind_of, run_to

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

DATABASE = "spark_exact"
MODES = {"fullDocument": "exact", "fullDocumentBeforeChange": "exact"}
REQUIRED = {"fullDocument": "required", "fullDocumentBeforeChange": "required"}
OURS: dict[str, Any] = {"full_document": "exact", "full_document_before_change": "exact"}


write = functools.partial(image_writes.write, without=b"$v\x00")


class Query(CrashingQuery):
    """Also checks that a repeated micro-batch gives what it gave before, as far as it got before the crash."""

    def __init__(self, options: dict[str, str], **crashes: Any) -> None:
        super().__init__(options, **crashes)
        self.first_read: dict[str, list[bytes]] = {}
        self.repeated = 0

    def _read(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[dict[str, Any]]:
        slices = self._reader.partitions(start, end)
        assert len([one for one in slices if isinstance(one, OplogSlice)]) <= 1
        before = self.first_read.get(str(end), [])
        self.repeated += bool(before)
        now = self.first_read[str(end)] = []
        for place, row in enumerate(super()._read(start, end)):
            now.append(row["event"])
            assert place >= len(before) or row["event"] == before[place]
            yield row

    def events(self) -> list[bytes]:
        return [row["event"] for row in self.rows]


def options_of(uri: str, images: Path, **more: str) -> dict[str, str]:
    own = {"database": DATABASE, "collection": "orders", "partitions": "4", "maxEventsPerTrigger": "40"}
    return {"uri": uri, **own, "images": str(images), **MODES, **more}


def at(time_: ClusterTime) -> dict[str, str]:
    after = time_.tick()
    return {"startAtOperationTime": f"{after.seconds},{after.increment}"}


@pytest.fixture
def orders(replica_set: ReplicaSet) -> Iterator[Any]:
    with MongoClient[Any](replica_set.uri, document_class=RawBSONDocument) as client:
        client.drop_database(DATABASE)
        yield client[DATABASE].create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
        client.drop_database(DATABASE)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch is folded in several batches that go to the disk at once, and the state keeps only what it must.
    It is large enough for several slices."""
    monkeypatch.setattr(planner, "SLICE_BYTES_MIN", 500)
    monkeypatch.setattr(slice_reader, "_BATCH_BYTES", 3_000)
    monkeypatch.setattr(images_source, "_MEMORY_BYTES", 0)
    forgetful = functools.partial(ImageState.open, undo_bytes=1)
    monkeypatch.setattr(images_source, "ImageState", SimpleNamespace(open=forgetful))


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_images_are_the_server_s_own_through_crashes(
    replica_set: ReplicaSet, orders: Any, tmp_path: Path, seed: int
) -> None:
    """Read from the collection's beginning. Only what the last micro-batch needs is kept, and every crash repeats
    it."""
    start, rng = newest(replica_set.uri), docs.UniqueNames(seed)
    query = Query(options_of(replica_set.uri, tmp_path / "images", **at(start)), seed=seed, chance=0.25, crashes_max=40)
    write_lookalikes(orders, "6.0")
    for turn in range(6):
        write(orders, rng, 3, fresh=turn == 0)
        for _ in range(4):
            query.step()
    orders.insert_one({"_id": "end"})
    until = newest(replica_set.uri)
    run_to(query, until)
    query.close()
    assert query.crashes > 10
    assert query.repeated > 3
    expected = server_events(replica_set.uri, (DATABASE, "orders"), start, until, stage=REQUIRED)
    assert len(expected) > 300
    assert query.events() == expected
    with (
        tailrace.connect(replica_set.uri, document_class=RawBSONDocument, images=tmp_path / "other") as client,
        client[DATABASE]["orders"].watch(**OURS, start_at_operation_time=start.tick().to_timestamp()) as stream,
    ):
        assert raw_events(stream, "end") == expected


@pytest.mark.usefixtures("small_batches")
def test_only_the_last_micro_batch_can_be_read_again_for_sure(
    replica_set: ReplicaSet, orders: Any, tmp_path: Path
) -> None:
    start = newest(replica_set.uri)
    query = Query(options_of(replica_set.uri, tmp_path / "images", **at(start)))
    write(orders, docs.UniqueNames(3), 10)
    run_to(query, newest(replica_set.uri))
    orders.delete_many({})
    orders.insert_many([{"_id": number, "pad": "x" * 300} for number in range(10)])
    run_to(query, newest(replica_set.uri))
    orders.update_many({}, {"$set": {"count": "x" * 700}})  # in several batches
    run_to(query, newest(replica_set.uri))
    ends = query.checkpoint.planned
    assert len(ends) > 4
    assert len(query.batches[-1]) == 10
    for _ in range(2):  # a commit that was lost, twice
        assert [row["event"] for row in query._read(ends[-2], ends[-1])] == [row["event"] for row in query.batches[-1]]
    with pytest.raises(ImageStateError, match=r"can be taken back to \d+ and no further"):
        list(query._read(ends[0], ends[1]))
    # Nothing was harmed.
    assert [row["event"] for row in query._read(ends[-2], ends[-1])] == [row["event"] for row in query.batches[-1]]
    query.close()


@pytest.mark.parametrize("starting", ["now", "snapshot"])
def test_what_was_there_is_known(replica_set: ReplicaSet, orders: Any, tmp_path: Path, starting: str) -> None:
    """The driver copies the collection before the stream begins, also if the copy is given as rows."""
    rng = docs.UniqueNames(5)
    write(orders, rng, 4)
    query = Query(
        options_of(replica_set.uri, tmp_path / "images", startingFrom=starting), seed=5, chance=0.2, crashes_max=15
    )
    while not query.checkpoint.done:
        query.step()
    begun = Offset.from_json(query.checkpoint.planned[0]).cluster_time
    assert Offset.from_json(query.checkpoint.planned[0]).images is not None
    for _ in range(5):
        write(orders, rng, 2, fresh=False)
        query.step()
    until = newest(replica_set.uri)
    run_to(query, until)
    query.close()
    kinds = [kind_of(row) for row in query.rows]
    copied = kinds.count("snapshot")
    assert (copied > 10) == (starting == "snapshot")
    expected = server_events(replica_set.uri, (DATABASE, "orders"), begun, until, stage=REQUIRED)
    assert len(expected) > 80
    assert query.events()[copied:] == expected


def test_a_transaction_s_images_and_tokens_in_its_middle(replica_set: ReplicaSet, orders: Any, tmp_path: Path) -> None:
    """``resumeAfter`` an event of a transaction; stages of the user see the images."""
    start = newest(replica_set.uri)
    orders.insert_many([{"_id": number, "count": 0} for number in range(5)])
    with orders.database.client.start_session() as session, session.start_transaction():
        for number in (0, 1, 1, 2):
            orders.update_one({"_id": number}, {"$inc": {"count": 1}}, session=session)
        orders.delete_one({"_id": 3}, session=session)
    until = newest(replica_set.uri)
    stages = ({"$match": {"fullDocumentBeforeChange.count": {"$gte": 0}}},)
    expected = server_events(replica_set.uri, (DATABASE, "orders"), start, until, stage=REQUIRED, pipeline=stages)
    assert len(expected) == 5
    pipeline = '[{"$match": {"fullDocumentBeforeChange.count": {"$gte": 0}}}]'
    query = Query(options_of(replica_set.uri, tmp_path / "images", pipeline=pipeline, **at(start)))
    run_to(query, until)
    assert query.events() == expected
    query.close()
    token = str(RawBSONDocument(expected[1])["_id"]["_data"])
    again = Query(options_of(replica_set.uri, tmp_path / "images", pipeline=pipeline, resumeAfter=token))
    run_to(again, until)
    assert again.events() == expected[2:]
    again.close()


@pytest.mark.slow  # tests/sharded/test_exact_images.py has it; through crashes: the test above
@pytest.mark.parametrize("version", ["5.0.4", pytest.param("4.4.2", marks=pytest.mark.slow)])
def test_servers_without_images(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str) -> None:
    running = start_replica_set(version=version)
    with MongoClient[Any](running.uri, document_class=RawBSONDocument) as client:
        orders = client[DATABASE].create_collection("orders")
        start, rng = newest(running.uri), docs.UniqueNames(13)
        options = options_of(running.uri, tmp_path / "images", **at(start))
        query = Query(options, seed=13, chance=0.2, crashes_max=25)
        write_lookalikes(orders, version)
        for turn in range(4):
            write(orders, rng, 3, fresh=turn == 0)
            query.step()
        orders.insert_one({"_id": "end"})
    run_to(query, newest(running.uri))
    query.close()
    with (
        tailrace.connect(running.uri, document_class=RawBSONDocument, images=tmp_path / "other") as ours,
        ours[DATABASE]["orders"].watch(**OURS, start_at_operation_time=start.tick().to_timestamp()) as stream,
    ):
        expected = raw_events(stream, "end")
    assert len(expected) > 150
    assert query.events() == expected
    now = Query(options_of(running.uri, tmp_path / "seeded"))  # 4.4 has no snapshot reads: copied, and made exact
    now.step()
    now.close()


@pytest.mark.slow  # tests/sharded/test_exact_images.py; a cluster in slices: the tests below
def test_a_cluster_whose_chunks_move(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    workload = RandomWorkload(
        sharded_cluster, 41, amount(50, 100), adds_shard=False, removes_shard=False, database="spark_moving"
    )
    start = workload.prepare()
    ran = workload.run(start)
    until = ClusterTime.from_timestamp(ran.end)
    expected = own_events(sharded_cluster, workload.database, start, ran.end)
    assert len(expected) > amount(60, 120)
    named = {"database": workload.database, "startAtOperationTime": f"{start.time},{start.inc}"}
    query = Query(options_of(sharded_cluster.uri, tmp_path, **named), seed=41, chance=0.2, crashes_max=25)
    run_to(query, until)
    query.close()
    found = [event for event in query.events() if native.token(event).cluster_time <= until]
    assert query.crashes > amount(2, 5)
    assert not differences(found, expected)


@pytest.mark.slow  # tests/sharded/test_exact_images.py, from now on
def test_a_cluster_from_now_on(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    router, database = sharded_cluster.router, "spark_now"
    namespace, shards = f"{database}.orders", list(sharded_cluster.shards)
    router.create_database(database, shards[0])
    router.shard_collection(namespace, {"region": 1, "_id": 1})
    router.coll_mod(namespace, changeStreamPreAndPostImages={"enabled": True})
    for region in "gnt":
        router.split(namespace, {"region": region})
    documents = [{"_id": number, "region": "agnt"[number % 4], "n": 0} for number in range(60)]
    router.insert_many(namespace, documents)
    router.move_chunk(namespace, {"region": "g"}, to=shards[1])
    query = Query(options_of(sharded_cluster.uri, tmp_path, database=database), seed=3, chance=0.15, crashes_max=8)
    while not query.checkpoint.done:
        query.step()
    begun = Offset.from_json(query.checkpoint.planned[0]).cluster_time
    for turn, region in enumerate("gnt"):
        for document in documents:
            key = {"region": document["region"], "_id": document["_id"]}
            router.update_one(namespace, key, {"$set": {"count": turn}})
        router.move_chunk(namespace, {"region": region}, to=shards[turn])
        query.step()
    end = router.fence()
    run_to(query, ClusterTime.from_timestamp(end))
    query.close()
    expected = own_events(sharded_cluster, database, begun.tick().to_timestamp(), end)
    assert len(expected) == 180
    assert not differences(query.events(), expected)


def test_a_shard_that_joins_has_a_state_of_its_own(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path
) -> None:
    cluster = start_sharded_cluster(1)
    router, namespace = cluster.router, "spark_joins.orders"
    router.create_database("spark_joins", next(iter(cluster.shards)))
    router.shard_collection(namespace, {"_id": 1})
    router.coll_mod(namespace, changeStreamPreAndPostImages={"enabled": True})
    router.split(namespace, {"_id": 10})
    router.insert_many(namespace, [{"_id": number, "count": 0} for number in range(20)])
    query = Query(options_of(cluster.uri, tmp_path, database="spark_joins"), seed=8, chance=0.2, crashes_max=6)
    while not query.checkpoint.done:
        query.step()
    begun = Offset.from_json(query.checkpoint.planned[0]).cluster_time
    router.move_chunk(namespace, {"_id": 10}, to=cluster.add_shard())
    for number in range(20):
        router.update_one(namespace, {"_id": number}, {"$inc": {"count": 1}})
    end = router.fence()
    run_to(query, ClusterTime.from_timestamp(end))
    query.close()
    assert len(list(tmp_path.glob("shard-*"))) == 2
    expected = native.union(
        cluster, "spark_joins", "orders", begun.tick().to_timestamp(), end, for_merge=False, **REQUIRED
    )
    assert len(expected) == 20
    assert not differences(query.events(), expected)


# -- wrong uses --------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_micro_batches(replica_set: ReplicaSet, orders: Any, tmp_path: Path) -> Iterator[Query]:
    """A query that has read a micro-batch, and has planned another."""
    query = Query(options_of(replica_set.uri, tmp_path / "images", **at(newest(replica_set.uri))))
    orders.insert_many([{"_id": number, "n": 0} for number in range(5)])
    run_to(query, newest(replica_set.uri))
    orders.update_many({}, {"$inc": {"n": 1}})
    yield query
    query.close()


def test_a_state_in_use_is_waited_for_and_then_refused(
    replica_set: ReplicaSet, two_micro_batches: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is repeated while the first one still runs, or on another machine's behalf."""
    other = ImageState.open(tmp_path / "images")
    monkeypatch.setattr(exact, "WAIT_S", 0.2)
    with pytest.raises(ImagesInUseError, match="another process writes the images"):
        run_to(two_micro_batches, newest(replica_set.uri))
    monkeypatch.setattr(exact, "WAIT_S", 300)
    released = threading.Thread(target=lambda: (time.sleep(0.5), other.close()))
    released.start()
    run_to(two_micro_batches, newest(replica_set.uri))
    released.join()
    assert len(two_micro_batches.events()) == 10


def test_two_tasks_of_one_slice_give_the_same_one_after_the_other(
    replica_set: ReplicaSet, two_micro_batches: Query
) -> None:
    """Speculation, or an abandoned task that still runs. A task that is left in the middle releases the state."""
    reader = TailraceStreamReader(two_micro_batches._options)
    start = two_micro_batches.offset
    until = newest(replica_set.uri)
    while Offset.from_json(end := reader.latestOffset(start, reader.getDefaultReadLimit())).cluster_time < until:
        pass
    [slice_] = reader.partitions(start, end)

    def events() -> Iterator[bytes]:
        options = two_micro_batches._options
        assert isinstance(slice_, OplogSlice)
        for block in slice_reader.slice_events(options, slice_, slice_reader._source(options.uri, None)):
            yield from block.events()

    found: list[list[bytes]] = []
    first = events()
    one = [next(first)]
    second = threading.Thread(target=lambda: found.append(list(events())))
    second.start()
    second.join(1)
    assert second.is_alive()
    one += first
    second.join(300)
    assert found == [one]
    assert len(one) == 5
    left = events()
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert list(events()) == one
    reader.stop()


def test_a_directory_that_is_not_the_checkpoint_s_is_refused(
    replica_set: ReplicaSet, two_micro_batches: Query, tmp_path: Path
) -> None:
    images, kept = tmp_path / "images", tmp_path / "kept"
    images.rename(kept)
    with pytest.raises(UsageError, match="not those of this checkpoint: there are none"):
        two_micro_batches.step()
    another = Query(options_of(replica_set.uri, images, **at(newest(replica_set.uri))))
    another.step()
    another.close()
    with pytest.raises(UsageError, match="they belong to another stream"):
        two_micro_batches.step()
    shutil.rmtree(images)
    kept.rename(images)
    run_to(two_micro_batches, newest(replica_set.uri))
    assert len(two_micro_batches.events()) == 10


def test_a_task_that_sees_another_directory_is_refused(
    replica_set: ReplicaSet, two_micro_batches: Query, tmp_path: Path
) -> None:
    """An executor on another machine finds nothing under the path, or somebody else's files."""
    reader = TailraceStreamReader(two_micro_batches._options)
    start = two_micro_batches.offset
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    [slice_] = reader.partitions(start, end)
    images = tmp_path / "images"
    images.rename(tmp_path / "kept")
    with pytest.raises(UsageError, match="the task finds no images in"):
        list(reader.read(slice_))
    assert not images.exists()  # not begun there
    another = Query(options_of(replica_set.uri, images, **at(newest(replica_set.uri))))
    another.step()
    another.close()
    with pytest.raises(UsageError, match="the task finds other images in"):
        list(reader.read(slice_))
    reader.stop()


@pytest.mark.parametrize("chance", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_a_lost_directory_is_made_again_of_the_archive(
    replica_set: ReplicaSet, orders: Any, tmp_path: Path, chance: float
) -> None:
    def archive() -> None:
        policy = ArchivePolicy(from_oldest=False, once=True, limits=SegmentLimits(bytes=50_000))
        with MongoClient[Any](replica_set.uri) as plain:
            Recorder(plain, None, tmp_path / "archive", policy).run()

    archive()
    start = newest(replica_set.uri)
    options = options_of(replica_set.uri, tmp_path / "images", archive=str(tmp_path / "archive"), **at(start))
    # Without a crash, one reader loses its directory again and again.
    query = Query(options, seed=6, chance=chance, crashes_max=15)
    rng = docs.UniqueNames(6)
    for turn in range(4):
        write(orders, rng, 2, fresh=turn == 0)
        archive()
        run_to(query, newest(replica_set.uri))
        shutil.rmtree(tmp_path / "images")
    write(orders, rng, 2, fresh=False)
    until = newest(replica_set.uri)
    run_to(query, until)
    query.close()
    assert query.events() == server_events(replica_set.uri, (DATABASE, "orders"), start, until, stage=REQUIRED)


def test_what_does_not_go_together_is_refused(
    replica_set: ReplicaSet, sharded_cluster: ShardedCluster, tmp_path: Path
) -> None:
    options = options_of(replica_set.uri, tmp_path / "one")
    source = TailraceDataSource(options)
    with pytest.raises(UsageError, match="exact images are for streams"):
        source.reader(source.schema())
    with pytest.raises(UsageError, match="cannot be computed from an archive"):
        TailraceStreamReader(
            parse(options_of(sharded_cluster.uri, tmp_path / "two", archive=str(tmp_path / "archive")))
        ).initialOffset()
    TailraceStreamReader(parse(options)).initialOffset()
    with pytest.raises(UsageError, match="belong to a replica set, and this is a sharded cluster"):
        TailraceStreamReader(parse(options_of(sharded_cluster.uri, tmp_path / "one"))).initialOffset()
    with pytest.raises(UsageError, match="a directory of its own"):
        TailraceStreamReader(parse({**options, "collection": "others"})).initialOffset()
    kept = TailraceStreamReader(parse(options)).initialOffset()
    other = TailraceStreamReader(parse({name: options[name] for name in options if name != "images"} | REQUIRED))
    with pytest.raises(UsageError, match="fullDocument was 'exact' and is 'required'"):
        other.partitions(kept, kept)
