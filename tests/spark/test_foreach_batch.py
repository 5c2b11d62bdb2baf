"""``foreach_batch``: users' own sinks hold every event once, whatever dies between their commit and Spark's."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import bson
import duckdb
import pymongo
import pytest
from bson import json_util
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import DataFrame, Row, SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.lake.spark.batch import document_of
from tailrace.spark import AppliedBatches, MicroBatch, foreach_batch
from tests.spark.lake_driving import options_for
from tests.spark.sinks import Index, example, postgresql, search_index
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
COLUMNS = "token,operation_type,cluster_time,collection,document_key,full_document,event"


def change(uri: str, database: str, *, rounds: int = 3) -> None:
    """Every kind of change of a document, also several of one document in a transaction, and ids that are equal."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        orders = client[database]["orders"]
        for first in range(0, 40 * rounds, 40):
            orders.insert_many(
                [{"_id": n, "n": n, "odd": "a\0b" if n % 7 == 0 else "c"} for n in range(first, first + 40)]
            )
            orders.update_many({"_id": {"$lt": first + 10}}, {"$inc": {"times": 1}})
            orders.delete_many({"_id": {"$gte": first + 30}})
            orders.insert_one({"_id": float(first + 30)})
            with client.start_session() as session, session.start_transaction():
                orders.update_one({"_id": first}, {"$set": {"a": 1}}, session=session)
                orders.update_one({"_id": first}, {"$set": {"a": 2}}, session=session)
                orders.delete_one({"_id": first + 1}, session=session)
                orders.insert_one({"_id": f"t{first}"}, session=session)


@pytest.fixture(scope="module")
def changed(replica_set: ReplicaSet) -> dict[str, Any]:
    return changes_of(replica_set, "foreachbatch")


def changes_of(replica_set: ReplicaSet, database: str) -> dict[str, Any]:
    """A database with changes, how to read them, and what the server's own stream says."""
    start = newest(replica_set.uri)
    change(replica_set.uri, database)
    until = newest(replica_set.uri)
    more = {"columns": COLUMNS, "documents": "json", "fullDocument": "updateLookup", "collection": "orders"}
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        documents = list(client[database]["orders"].find())
    return {
        "options": options_for(replica_set.uri, database, start, maxEventsPerTrigger="90", **more),
        "events": server_events(replica_set.uri, (database, "orders"), start, until),
        "documents": documents,
        "uri": replica_set.uri,
    }


def run(
    spark: SparkSession,
    options: dict[str, str],
    checkpoint: Path,
    write: Callable[[MicroBatch], object],
    *,
    select: Callable[[DataFrame], DataFrame] = lambda frame: frame,
) -> None:
    frame = select(spark.readStream.format("tailrace").options(**options).load())
    writer = frame.writeStream.foreachBatch(foreach_batch(write)).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


@contextmanager
def failing(
    where: str, number: int
) -> Iterator[Callable[[Callable[[MicroBatch], object]], Callable[[MicroBatch], object]]]:
    """A handler that fails once at batch ``number``: with the sink's note written but not committed, or at its end."""
    with pytest.MonkeyPatch.context() as patch:
        record, left = AppliedBatches._record, [1]

        def recorded(self: Any, found: Any, new: Any) -> None:
            record(self, found, new)
            if where == "note" and new.batch == number and left.pop():
                raise OSError("the network is gone")

        patch.setattr(AppliedBatches, "_record", recorded)

        def wrapped(write: Callable[[MicroBatch], object]) -> Callable[[MicroBatch], object]:
            def handler(batch: MicroBatch) -> None:
                write(batch)
                if where == "end" and batch.number == number and left:
                    left.clear()
                    raise OSError("the machine is gone")

            return handler

        yield wrapped


def run_with_failures(
    spark: SparkSession, options: dict[str, str], checkpoint: Path, write: Callable[[MicroBatch], object], *moments: str
) -> None:
    for number, where in enumerate(moments):
        with failing(where, number) as wrapped, pytest.raises(Exception, match="is gone"):
            run(spark, options, checkpoint, wrapped(write))
    run(spark, options, checkpoint, write)


def tokens_of(events: list[bytes]) -> list[str]:
    return [str(bson.decode(event)["_id"]["_data"]) for event in events]


def canonical(key: Any) -> str:
    return json_util.dumps(key, json_options=json_util.CANONICAL_JSON_OPTIONS)


# -- the handler -----------------------------------------------------------------------------------------------------


def test_a_batch_keeps_its_identity_and_its_order_when_it_is_given_again(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    seen: list[tuple[str, list[str]]] = []
    fail = [True]

    def write(batch: MicroBatch) -> None:
        seen.append((batch.identity, [row.token for row in batch.rows()]))
        assert batch.arrow().column("token").to_pylist() == seen[-1][1]
        assert batch.last_token() == seen[-1][1][-1]
        if batch.number == 1 and fail.pop():
            raise OSError("the handler's own error")

    with pytest.raises(Exception, match="the handler's own error"):
        run(spark, changed["options"], tmp_path / "checkpoint", write)
    fail.append(False)
    run(spark, changed["options"], tmp_path / "checkpoint", write)
    assert [identity for identity, _ in seen[1:3]] == [seen[1][0]] * 2
    assert seen[1] == seen[2]
    once = [seen[0], *seen[2:]]
    query = once[0][0].partition("/")[0]
    assert [identity for identity, _ in once] == [f"{query}/{number}" for number in range(len(once))]
    assert [token for _, tokens in once for token in tokens] == tokens_of(changed["events"])


def test_the_rows_of_a_document_are_in_one_partition_in_their_order(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    found: list[tuple[int, bytes, str]] = []

    def write(batch: MicroBatch) -> None:
        rows = batch.by_document(3).selectExpr("spark_partition_id() AS part", "event", "token").collect()
        found.extend((row.part + 3 * batch.number, document_of(row.event), row.token) for row in rows)

    run(spark, changed["options"], tmp_path / "checkpoint", write)
    assert sorted(token for _, _, token in found) == tokens_of(changed["events"])
    for number in range(max(part for part, _, _ in found) // 3 + 1):
        mine = [(part, key, token) for part, key, token in found if part // 3 == number]
        for document in {key for _, key, _ in mine}:
            assert len({part for part, key, _ in mine if key == document}) == 1
        for part in {part for part, _, _ in mine}:
            tokens = [token for other, _, token in mine if other == part]
            assert tokens == sorted(tokens)
    assert len({part for part, _, _ in found}) > 3
    ids = [
        {"_id": {"_data": ""}, "ns": {"db": "a", "coll": "b"}, "documentKey": {"_id": n, "s": n}} for n in (30, 30.0)
    ]
    one, other = (document_of(bson.encode(event)) for event in ids)
    assert one == other != b"", "the server's equality, not the text's: 30 and 30.0 are one document"


def test_a_frame_that_is_shuffled_or_has_no_tokens_is_refused(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    def write(batch: MicroBatch) -> None:
        list(batch.rows())

    with pytest.raises(Exception, match="do not ascend by token"):
        run(
            spark,
            changed["options"],
            tmp_path / "a",
            write,
            select=lambda frame: frame.selectExpr("reverse(token) AS token"),
        )
    with pytest.raises(Exception, match="needs the column 'token'"):
        run(spark, changed["options"], tmp_path / "b", write, select=lambda frame: frame.select("event"))
    with pytest.raises(Exception, match="needs the column 'event'"):
        run(
            spark,
            changed["options"],
            tmp_path / "c",
            lambda batch: batch.by_document(),
            select=lambda frame: frame.select("token"),
        )
    with pytest.raises(UsageError, match="needs a function"):
        foreach_batch("write")  # type: ignore[arg-type]


# -- the sink's note of it -------------------------------------------------------------------------------------------


@pytest.fixture
def rows(spark: SparkSession) -> Callable[..., DataFrame]:
    """Frames of tokens, as a batch has them."""
    tokens = {n: f"82{1_700_000_000 + n:08X}000000012B" for n in range(10)}
    return lambda *numbers: spark.createDataFrame(
        [Row(token=tokens[n], n=n) for n in numbers], "token string, n int"
    ).coalesce(1)


def applied(connection: Any, batch: MicroBatch, *, sink: str = "mine") -> list[int]:
    with AppliedBatches(connection, sink).transaction(batch) as new:
        taken = [row.n for row in new.rows()]
        connection.execute("CREATE TABLE IF NOT EXISTS taken (sink TEXT, n INTEGER)")
        for n in taken:
            connection.execute(f"INSERT INTO taken VALUES ('{sink}', {n})")
    return taken


@pytest.mark.parametrize("connect", [sqlite3.connect, duckdb.connect])
def test_a_sink_takes_each_batch_once_and_each_event_once(
    connect: Callable[[str], Any], rows: Callable[..., DataFrame], tmp_path: Path
) -> None:
    with closing(connect(str(tmp_path / "file"))) as connection:
        assert AppliedBatches(connection, "mine").start() == {}
        assert applied(connection, MicroBatch("one", 0, rows(0, 1))) == [0, 1]
        assert applied(connection, MicroBatch("one", 0, rows(0, 1))) == [], "given again"
        assert applied(connection, MicroBatch("one", 1, rows())) == []
        assert applied(connection, MicroBatch("one", 2, rows(2, 3))) == [2, 3]
        assert applied(connection, MicroBatch("one", 0, rows(0)), sink="other") == [0]
        assert AppliedBatches(connection, "mine").start() == {"startAtOperationTime": "1700000003,1"}
        # A fresh checkpoint that begins earlier writes what is new, and locks the older one out.
        assert applied(connection, MicroBatch("two", 0, rows(1, 2))) == []
        assert applied(connection, MicroBatch("two", 1, rows(3, 4))) == [4]
        with pytest.raises(SinkError, match="taken over by query two"):
            applied(connection, MicroBatch("one", 3, rows(4, 5)))
        with pytest.raises(SinkError, match="has batch 1, and the checkpoint goes on with 3"):
            applied(connection, MicroBatch("two", 3, rows(6)))
        found = connection.execute("SELECT n FROM taken WHERE sink = 'mine' ORDER BY n").fetchall()
        assert [n for (n,) in found] == [0, 1, 2, 3, 4]


def give_up(connection: Any, batch: MicroBatch, then: Callable[[], object]) -> None:
    """Write the first row of ``batch`` alone."""
    with AppliedBatches(connection, "mine").transaction(batch) as new:
        connection.execute(f"INSERT INTO taken VALUES ('mine', {next(new.rows()).n})")
        then()


@pytest.mark.parametrize("connect", [sqlite3.connect, duckdb.connect])
def test_a_handler_that_raises_or_leaves_rows_behind_changes_nothing(
    connect: Callable[[str], Any], rows: Callable[..., DataFrame], tmp_path: Path
) -> None:
    with closing(connect(str(tmp_path / "file"))) as connection:
        applied(connection, MicroBatch("one", 0, rows(0)))
        with pytest.raises(ZeroDivisionError):
            give_up(connection, MicroBatch("one", 1, rows(1, 2)), lambda: 1 / 0)
        with pytest.raises(SinkError, match="has not taken all rows"):
            give_up(connection, MicroBatch("one", 1, rows(1, 2)), lambda: None)
        assert connection.execute("SELECT count(*) FROM taken").fetchone() == (1,)
        assert applied(connection, MicroBatch("one", 1, rows(1, 2))) == [1, 2]
        for sink in ("", "a'b", "x" * 200, None):
            with pytest.raises(UsageError, match="cannot be the name of a sink"):
                AppliedBatches(connection, sink)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="cannot be the name of a table"):
            AppliedBatches(connection, "mine", table="x; DROP TABLE taken")
        connection.execute("UPDATE tailrace_applied SET token = 'none' WHERE sink = 'mine'")
        connection.commit()
        with pytest.raises(SinkError, match="damaged"):
            applied(connection, MicroBatch("one", 2, rows(3)))


# -- the examples ----------------------------------------------------------------------------------------------------


def test_duckdb_and_postgresql_hold_every_event_once_after_failures(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    to_duckdb, file = example("to_duckdb"), str(tmp_path / "file.duckdb")
    run_with_failures(
        spark, changed["options"], tmp_path / "a", lambda batch: to_duckdb.write(batch, file), "end", "note"
    )
    with duckdb.connect(file) as connection:
        found = connection.execute("SELECT token FROM changes ORDER BY rowid").fetchall()
        assert [token for (token,) in found] == tokens_of(changed["events"])


def test_postgresql_equals_the_collection_and_counts_each_change_once(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    psycopg2 = pytest.importorskip("psycopg2")
    with postgresql() as dsn:
        to_postgresql = example("to_postgresql")
        moments = ("note", "end", "note")
        run_with_failures(
            spark, changed["options"], tmp_path / "a", lambda batch: to_postgresql.write(batch, dsn), *moments
        )
        assert_in_postgresql(dsn, changed)
        with closing(psycopg2.connect(dsn)) as first, closing(psycopg2.connect(dsn)) as second:
            frame = spark.createDataFrame([], "token string")
            with (
                pytest.raises(SinkError, match="another process has written"),
                AppliedBatches(first, "documents").transaction(MicroBatch("new", 0, frame)),
                AppliedBatches(second, "documents").transaction(MicroBatch("new", 0, frame)),
            ):
                pass
            first.autocommit = True
            with pytest.raises(UsageError, match="autocommit"):
                AppliedBatches(first, "documents")


def assert_in_postgresql(dsn: str, changed: dict[str, Any]) -> None:
    import psycopg2

    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT document::text FROM documents")
        found = [json_util.loads(text) for (text,) in cursor.fetchall()]
        cursor.execute("SELECT operation, sum(n) FROM changes GROUP BY operation")
        counts = {operation: int(n) for operation, n in cursor.fetchall()}
    assert sorted(found, key=canonical) == sorted(changed["documents"], key=canonical)
    assert counts == Counter(bson.decode(event)["operationType"] for event in changed["events"])


def test_kafka_has_every_event_once_and_each_documents_in_order(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    """When the handler fails, the first half of batch 1 is in the topic; when Spark's commit fails, all of batch 2
    is."""
    to_kafka = example("to_kafka")
    mock = Producer({"test.mock.num.brokers": 2, "bootstrap.servers": "any"})
    broker = next(iter(mock.list_topics(timeout=300).brokers.values()))
    servers = f"{broker.host}:{broker.port}"
    mock.produce("changes", b"made by its first message", partition=3)  # the mock makes topics when they are used
    assert mock.flush(60) == 0
    with pytest.raises(Exception, match="somebody else has written to partition 3"):
        run(spark, changed["options"], tmp_path / "no", to_kafka.Topic(servers, "changes").write)
    mock.list_topics("events", timeout=300)
    moments = ["half", "end", ""]
    options = {name: value for name, value in changed["options"].items() if name != "fullDocument"}
    for number, where in enumerate(moments):
        topic = to_kafka.Topic(servers, "events")

        def write(batch: MicroBatch, topic: Any = topic, number: int = number, where: str = where) -> None:
            failing_now = batch.number == number + 1
            if failing_now and where == "half":
                half = batch.frame.orderBy("token").limit(batch.frame.count() // 2).coalesce(1)
                topic.write(MicroBatch(batch.query, batch.number, half))
                raise OSError("the network is gone")
            topic.write(batch)
            if failing_now and where == "end":
                raise OSError("the machine is gone")

        if where:
            with pytest.raises(Exception, match="is gone"):
                run(spark, options, tmp_path / "checkpoint", write)
        else:
            run(spark, options, tmp_path / "checkpoint", write)
    messages = taken_from(servers, "events")
    assert len(messages) > 1, "more than one partition"
    everything = sorted(event for partition in messages for event in partition)
    assert everything == sorted(changed["events"])
    for partition in messages:
        assert tokens_of(partition) == sorted(tokens_of(partition))
    homes = [{document_of(event) for event in partition} for partition in messages]
    assert sum(map(len, homes)) == len(set().union(*homes)), "a document's events are in one partition"


def taken_from(servers: str, topic: str) -> list[list[bytes]]:
    config = {"bootstrap.servers": servers, "group.id": "test", "enable.auto.commit": False}
    found = []
    consumer = Consumer(config)
    try:
        for number in consumer.list_topics(topic, 60).topics[topic].partitions:
            first, end = consumer.get_watermark_offsets(TopicPartition(topic, number), 60)
            consumer.assign([TopicPartition(topic, number, first)])
            taken = []
            while len(taken) < end - first:
                message = consumer.poll(60)
                assert message is not None
                assert message.error() is None
                taken.append(message.value())
            found.append(taken)
    finally:
        consumer.close()
    return found


def assert_in_index(index: Index, changed: dict[str, Any]) -> None:
    assert index.faults == []
    found = [json_util.loads(json.dumps(one["document"])) for one in index.documents.values()]
    assert sorted(found, key=canonical) == sorted(changed["documents"], key=canonical)


def test_an_index_equals_the_collection_whatever_is_sent_again(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    to_elasticsearch = example("to_elasticsearch")
    with search_index() as index:
        index.busy = 7
        moments = ("end", "end")

        def write(batch: MicroBatch) -> None:
            to_elasticsearch.write(batch, index.url, "orders")

        run_with_failures(spark, changed["options"], tmp_path / "a", write, *moments)
        assert_in_index(index, changed)
        before = dict(index.documents)
        run(spark, changed["options"], tmp_path / "again", write)
        assert index.documents == before, "older versions do not come back"
        times = [ClusterTime.of(1, 2), ClusterTime.of(1, 3), ClusterTime.of(2, 0), ClusterTime.of(2**32 - 1, 1)]
        versions = [to_elasticsearch.version(Row(t=time.seconds, i=time.increment)) for time in times]
        assert versions == sorted(versions)
        assert versions[-1] < 1 << 63
        assert len(to_elasticsearch.index_id("x" * 10_000).encode()) <= 512
