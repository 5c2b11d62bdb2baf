"""The streaming source against a live mongod: order, limits, positions, invalidation, refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from pymongo.database import Database
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.source.stream_reader import TailraceStreamReader
from tests.amounts import WHOLE, amount
from tests.differential import named_fields
from tests.spark.streams import Batches, available_now, newest, offsets, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


@pytest.fixture
def database(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Database[dict[str, Any]]]:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        name = f"spark_{abs(hash(request.node.name)) % 10**8}"
        yield client[name]
        client.drop_database(name)


def at(time_: ClusterTime) -> dict[str, str]:
    """Options to start right after a cluster time."""
    after = time_.tick()
    return {"startAtOperationTime": f"{after.seconds},{after.increment}"}


def fill(database: Database[dict[str, Any]], count: int, *, pad: int = 100, name: str = "c", first: int = 0) -> None:
    for start in range(first, first + count, 5000):
        end = min(start + 5000, first + count)
        database[name].insert_many([{"_id": i, "pad": "x" * pad} for i in range(start, end)])


def wait_until(done: Callable[[], bool], query: StreamingQuery, patience_s: float = 300) -> None:
    deadline = time.monotonic() + patience_s
    while not done():
        assert query.isActive
        assert time.monotonic() < deadline
        time.sleep(0.02)


def mixed(database: Database[dict[str, Any]]) -> None:
    """Some of every kind of write that gives events."""
    fill(database, 50)
    database.c.insert_many(named_fields.lookalikes("6.0"))
    database.c.update_many({"_id": {"$lt": 10}}, {"$set": {"a.b": 1}})
    database.c.replace_one({"_id": 11}, {"new": True})
    database.c.delete_many({"_id": {"$gt": 40}})
    with database.client.start_session() as session, session.start_transaction():
        database.c.insert_one({"_id": "in a transaction"}, session=session)
        database.other.insert_one({"_id": 1}, session=session)
        database.c.update_one({"_id": 12}, {"$set": {"t": 1}}, session=session)
    database.c.update_one({"_id": "like 3"}, {"$set": {"count": "three", "o.prepare": True}})
    database.other.insert_one({"_id": 2})


@pytest.mark.parametrize("scope", ["collection", "database", "cluster"])
def test_the_stream_is_the_servers_own_byte_for_byte(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path, scope: str
) -> None:
    start = newest(replica_set.uri)
    mixed(database)
    until = newest(replica_set.uri)
    names: dict[str, tuple[dict[str, str], tuple[str, str | None]]] = {
        "collection": ({"database": database.name, "collection": "c"}, (database.name, "c")),
        "database": ({"database": database.name}, (database.name, None)),
        "cluster": ({}, ("admin", None)),
    }
    options, native_scope = names[scope]
    got = available_now(spark, {"uri": replica_set.uri, **at(start), **options}, tmp_path)
    assert got.events == server_events(replica_set.uri, native_scope, start, until)
    assert got.events


def test_parallel_partitions_give_the_same_bytes_as_one_in_ascending_order(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    start = newest(replica_set.uri)
    fill(database, 6_000, pad=1_500)  # slices are of 2 MB at least
    database.c.update_many({}, {"$set": {"seen": True}})
    until = newest(replica_set.uri)
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c", **at(start)}
    one = available_now(spark, {**options, "partitions": "1"}, tmp_path / "one")
    four = available_now(spark, {**options, "partitions": "4"}, tmp_path / "four")
    assert four.events == one.events == server_events(replica_set.uri, (database.name, "c"), start, until)
    parts = [part for rows in four.rows for part, _ in rows]
    assert parts == sorted(parts), "slices ascend with the partition number"
    counts = [parts.count(part) for part in sorted(set(parts))]
    assert len(counts) == 4
    assert min(counts) > len(parts) / 8, "slices are of about the same weight"


def test_available_now_over_many_entries_takes_micro_batches_of_the_limit_exactly(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    start = newest(replica_set.uri)
    limit = amount(900, 9000)
    fill(database, 11 * limit + 100, pad=20)
    until = newest(replica_set.uri)
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c", **at(start)}
    got = available_now(spark, {**options, "maxEventsPerTrigger": str(limit)}, tmp_path)
    # The collection's creation is an entry that may give an event (it does with showExpandedEvents): it is counted.
    assert got.sizes == [limit - 1] + [limit] * 10 + [101]
    assert got.events == server_events(replica_set.uri, (database.name, "c"), start, until)


def test_a_transaction_larger_than_the_limit_is_not_split(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    database.create_collection("c")
    start = newest(replica_set.uri)
    fill(database, 25)
    with database.client.start_session() as session, session.start_transaction():
        database.c.insert_many([{"_id": 1000 + i} for i in range(40)], session=session)
    fill(database, 5, first=2000)
    until = newest(replica_set.uri)
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c", **at(start)}
    got = available_now(spark, {**options, "maxEventsPerTrigger": "10"}, tmp_path)
    assert got.sizes == [10, 10, 5, 40, 5]
    assert got.events == server_events(replica_set.uri, (database.name, "c"), start, until)


def test_a_micro_batch_holds_no_more_bytes_of_oplog_than_allowed(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    database.create_collection("c")
    start = newest(replica_set.uri)
    fill(database, 40, pad=9_800)  # about 10,000 bytes an entry
    until = newest(replica_set.uri)
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c", **at(start)}
    got = available_now(spark, {**options, "maxBytesPerTrigger": "100k"}, tmp_path)
    assert got.sizes == [10, 10, 10, 10]
    assert got.events == server_events(replica_set.uri, (database.name, "c"), start, until)


def test_a_crash_in_the_first_micro_batch_loses_nothing_although_the_start_is_now(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    # Spark never stores an initial offset, and asks for it again after a crash in the first micro-batch.
    database.create_collection("c")
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c", "columns": "event"}

    def fail(frame: DataFrame, batch_id: int) -> None:
        raise RuntimeError("the sink is down")

    with pytest.raises(StreamingQueryException, match="the sink is down"):
        available_now(spark, options, tmp_path, batches=type("Failing", (), {"take": staticmethod(fail)}))  # type: ignore[arg-type]
    fill(database, 30)
    got = available_now(spark, options, tmp_path)
    assert [bson.decode(event)["documentKey"]["_id"] for event in got.events] == list(range(30))


def test_the_first_micro_batch_is_empty_and_pins_the_start(replica_set: ReplicaSet) -> None:
    options = parse({"uri": replica_set.uri, "database": "nothing_happens_here"})
    reader = TailraceStreamReader(options)
    try:
        first = reader.initialOffset()
        newest(replica_set.uri)  # the oplog moves on
        assert reader.initialOffset() == first, "Spark asks twice"
        assert reader.latestOffset(first, ReadAllAvailable()) == first
        assert json.dumps(reader.latestOffset(first, ReadAllAvailable())) == json.dumps(first), "no entry in scope came"
        # After a crash in that micro-batch Spark asks again, and the answer is later than the stored end.
        again = TailraceStreamReader(options)
        later = again.initialOffset()
        assert later != first
        assert again.partitions(later, first) == []
        again.stop()
    finally:
        reader.stop()


def test_a_stream_with_nothing_to_read_makes_no_micro_batches(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    # Offsets are compared as texts: a source whose text varies makes hundreds of empty micro-batches.
    batches = Batches()
    query = (
        spark.readStream.format("tailrace")
        .options(uri=replica_set.uri, database=database.name, columns="event")
        .load()
        .writeStream.foreachBatch(batches.take)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        wait_until(lambda: batches.ids == [0], query)
        stop = time.monotonic() + 3
        while time.monotonic() < stop:
            database.client["elsewhere"].c.insert_one({})  # neither do other writes make one
            time.sleep(0.05)
        assert batches.ids == [0]
        database.c.insert_one({"_id": "wanted"})
        wait_until(lambda: bool(batches.events), query)
        wait_until(lambda: query.lastProgress is not None and query.lastProgress.batchId == 1, query)
        progress = query.lastProgress
        assert progress is not None
        assert json.loads(progress.sources[0].latestOffset)["clusterTime"]["t"] > 0, "the lag can be read"
    finally:
        query.stop()
        database.client.drop_database("elsewhere")
    assert [bson.decode(event)["documentKey"]["_id"] for event in batches.events] == ["wanted"]


def test_a_dropped_collection_ends_the_stream_at_the_right_event_with_partitions_in_parallel(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    start = newest(replica_set.uri)
    fill(database, 3_000, pad=1_500)
    database.c.drop()
    fill(database, 3_000, pad=1_500)
    database.c.drop()
    until = newest(replica_set.uri)
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c", "partitions": "4"}
    got = available_now(spark, {**options, **at(start)}, tmp_path / "first")
    native = server_events(replica_set.uri, (database.name, "c"), start, until)
    assert got.events == native
    assert bson.decode(got.events[-1])["operationType"] == "invalidate"
    assert offsets(tmp_path / "first")[-1]["invalidated"] is True
    again = available_now(spark, {**options, **at(start)}, tmp_path / "first")
    assert again.events == [], "an invalidated stream stays where it is"
    # startAfter goes on after the invalidation, to the next one.
    token = json.dumps(bson.decode(native[-1])["_id"])
    behind = available_now(spark, {**options, "startAfter": token}, tmp_path / "second")
    expected = server_events(
        replica_set.uri,
        (database.name, "c"),
        start,
        until,
        stage={"startAfter": bson.decode(native[-1])["_id"], "startAtOperationTime": None},
    )
    assert behind.events == expected
    assert len(expected) == 3_002


def test_a_stream_that_has_ended_fails_after_its_last_event_where_that_is_wanted(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    """Without availableNow the query idles for ever, without a message: no test had waited after an invalidate."""
    start = newest(replica_set.uri)
    fill(database, 3)
    database.c.drop()
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c", "failOnInvalidate": "true"}
    batches = Batches()
    for _ in range(2):  # the second time at once
        query = (
            spark.readStream.format("tailrace")
            .options(**options, **at(start), columns="event")
            .load()
            .writeStream.foreachBatch(batches.take)
            .option("checkpointLocation", str(tmp_path))
            .start()
        )
        with pytest.raises(Exception, match=r"StreamInvalidated: the stream has ended at .*\(invalidate\)"):
            query.awaitTermination(300)
        assert [bson.decode(event)["operationType"] for event in batches.events] == [
            *["insert"] * 3,
            "drop",
            "invalidate",
        ]


def test_a_stream_that_has_ended_says_so_once(
    replica_set: ReplicaSet, database: Database[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    start = newest(replica_set.uri)
    fill(database, 3)
    database.c.drop()
    reader = TailraceStreamReader(
        parse({"uri": replica_set.uri, "database": database.name, "collection": "c", **at(start)})
    )
    try:
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert end["invalidated"] is True
        assert caplog.messages == []
        assert [reader.latestOffset(end, ReadAllAvailable()) for _ in range(2)] == [end, end]
    finally:
        reader.stop()
    (message,) = caplog.messages
    assert message.startswith("the stream has ended at ")
    assert "dropped or renamed (invalidate). The query stays idle" in message


def test_a_dropped_database_ends_a_database_stream_and_leaves_a_cluster_stream(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    start = newest(replica_set.uri)
    mixed(database)
    database.client.drop_database(database.name)
    fill(database, 3)
    until = newest(replica_set.uri)
    got = available_now(spark, {"uri": replica_set.uri, "database": database.name, **at(start)}, tmp_path / "database")
    assert got.events == server_events(replica_set.uri, (database.name, None), start, until)
    assert bson.decode(got.events[-1])["operationType"] == "invalidate"
    whole = available_now(spark, {"uri": replica_set.uri, **at(start)}, tmp_path / "cluster")
    assert whole.events == server_events(replica_set.uri, ("admin", None), start, until)
    assert offsets(tmp_path / "cluster")[-1]["invalidated"] is False


@pytest.mark.parametrize("option", ["resumeAfter", "startAfter"])
def test_a_stream_goes_on_after_any_token(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path, option: str
) -> None:
    start = newest(replica_set.uri)
    mixed(database)
    until = newest(replica_set.uri)
    native = server_events(replica_set.uri, (database.name, None), start, until)
    in_transaction = next(i for i, event in enumerate(native) if "txnNumber" in bson.decode(event))
    positions = (0, len(native) // 2, in_transaction, in_transaction + 1, len(native) - 1)
    for position in positions if WHOLE else positions[option == "startAfter" :: 2]:
        token = bson.decode(native[position])["_id"]
        options = {"uri": replica_set.uri, "database": database.name, option: json.dumps(token)}
        got = available_now(spark, {**options, "maxEventsPerTrigger": "20"}, tmp_path / f"{option}{position}")
        assert got.events == native[position + 1 :]


def test_a_token_that_is_not_in_the_stream_is_280(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    start = newest(replica_set.uri)
    mixed(database)
    until = newest(replica_set.uri)
    native = server_events(replica_set.uri, (database.name, None), start, until)
    token = json.dumps(bson.decode(native[3])["_id"])
    options = {"uri": replica_set.uri, "database": database.name, "collection": "nothing", "resumeAfter": token}
    with pytest.raises(StreamingQueryException, match="the resume token was not found"):
        available_now(spark, options, tmp_path)


def test_the_users_pipeline_and_the_servers_options_shape_the_events(
    spark: SparkSession, replica_set: ReplicaSet, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    database.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
    start = newest(replica_set.uri)
    mixed(database)
    until = newest(replica_set.uri)
    stages = [{"$match": {"operationType": {"$in": ["update", "delete"]}}}, {"$project": {"documentKey": 0}}]
    stage = {"fullDocument": "required", "fullDocumentBeforeChange": "whenAvailable", "showExpandedEvents": True}
    options = {
        "uri": replica_set.uri,
        "database": database.name,
        "collection": "c",
        "pipeline": json.dumps(stages),
        **{name: value if isinstance(value, str) else str(value).lower() for name, value in stage.items()},
        **at(start),
    }
    got = available_now(spark, options, tmp_path)
    assert got.events == server_events(
        replica_set.uri, (database.name, "c"), start, until, stage=stage, pipeline=tuple(stages)
    )
    assert got.events


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fullDocument": "updateLookup"}, "fullDocument was not set and is 'updateLookup'"),
        ({"collection": "other"}, "belongs to another stream"),
        ({"pipeline": '[{"$match": {"operationType": "insert"}}]'}, "pipelineSha256"),
    ],
)
def test_a_checkpoint_of_another_stream_is_refused(
    spark: SparkSession,
    replica_set: ReplicaSet,
    database: Database[dict[str, Any]],
    *,
    tmp_path: Path,
    change: dict[str, str],
    said: str,
) -> None:
    fill(database, 3)
    options = {"uri": replica_set.uri, "database": database.name, "collection": "c"}
    available_now(spark, options, tmp_path)
    fill(database, 3, first=10)
    with pytest.raises(StreamingQueryException) as caught:
        available_now(spark, {**options, **change}, tmp_path)
    assert said in str(caught.value)
    assert len(available_now(spark, options, tmp_path).events) == 3, "and is not harmed by it"


def test_a_checkpoint_of_another_replica_set_of_the_same_name_is_refused(
    spark: SparkSession, replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    available_now(spark, {"uri": replica_set.uri}, tmp_path)
    other = start_replica_set(1)
    with pytest.raises(StreamingQueryException, match="a different one of the same name"):
        available_now(spark, {"uri": other.uri}, tmp_path)


def test_a_mistake_in_the_options_is_told_when_the_stream_is_loaded(spark: SparkSession) -> None:
    reader = (
        spark.readStream.format("tailrace").option("uri", "mongodb://user:s3cret@localhost").option("colums", "event")
    )
    with pytest.raises(Exception, match="Did you mean 'columns'") as caught:
        reader.load()
    assert "s3cret" not in str(caught.value)


def test_an_unreachable_host_is_one_clear_error_without_the_password(spark: SparkSession, tmp_path: Path) -> None:
    uri = "mongodb://user:s3cret@127.0.0.1:1/?serverSelectionTimeoutMS=300"
    with pytest.raises(StreamingQueryException) as caught:
        available_now(spark, {"uri": uri}, tmp_path)
    assert "SourceError" in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)
    assert "s3cret" not in str(caught.value)
