"""The batch reader: a closed range of the oplog, its columns and their forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import bson
import pymongo
import pytest
from pymongo.database import Database
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.query.options import COLUMNS
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


@pytest.fixture(scope="module")
def written(replica_set: ReplicaSet) -> Iterator[tuple[dict[str, str], list[bytes], Database[dict[str, Any]]]]:
    """Options for a range of the oplog, and the server's own events of it."""
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        database = client["spark_batch"]
        database.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
        start = newest(replica_set.uri)
        database.c.insert_many([{"_id": i, "customer": {"city": f"city {i % 7}"}, "n": i} for i in range(300)])
        database.c.update_many({"_id": {"$lt": 50}}, {"$set": {"customer.city": "Oslo"}})
        with client.start_session() as session, session.start_transaction():
            database.c.delete_one({"_id": 7}, session=session)
            database.c.insert_one({"_id": "t"}, session=session)
        until = newest(replica_set.uri)
        database.c.insert_one({"_id": "later"})
        options = {
            "uri": replica_set.uri,
            "database": "spark_batch",
            "fullDocument": "whenAvailable",
            "fullDocumentBeforeChange": "whenAvailable",
            "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
            "endAtOperationTime": f"{until.seconds},{until.increment}",
        }
        stage = {name: options[name] for name in ("fullDocument", "fullDocumentBeforeChange")}
        yield options, server_events(replica_set.uri, ("spark_batch", None), start, until, stage=stage), database
        client.drop_database("spark_batch")


def test_a_range_gives_the_servers_events_of_that_range(spark: SparkSession, written: Any) -> None:
    options, native, _ = written
    rows = spark.read.format("tailrace").options(**options, columns="event").load().collect()
    assert [bytes(row.event) for row in rows] == native
    assert len(native) == 352


def test_without_a_range_it_reads_from_the_oldest_entry_to_now(spark: SparkSession, written: Any) -> None:
    options, native, _ = written
    whole = {name: value for name, value in options.items() if not name.endswith("OperationTime")}
    rows = spark.read.format("tailrace").options(**whole, columns="event,token").load().collect()
    events = [bytes(row.event) for row in rows]
    assert events[-1 - len(native) : -1] == native
    assert bson.decode(events[-1])["documentKey"] == {"_id": "later"}


def test_the_order_of_tokens_and_of_cluster_times_is_the_order_of_the_stream(spark: SparkSession, written: Any) -> None:
    options, native, _ = written
    frame = spark.read.format("tailrace").options(**options, columns="token,cluster_time,event").load()
    by_token = [bytes(row.event) for row in frame.orderBy("token").collect()]
    assert by_token == native
    times = [tuple(row.cluster_time) for row in frame.orderBy("cluster_time").collect()]
    assert times == [(time.time, time.inc) for time in (bson.decode(event)["clusterTime"] for event in native)]


def test_columns_come_in_the_order_asked_for_and_can_be_queried(spark: SparkSession, written: Any) -> None:
    options, _, _ = written
    frame = spark.read.format("tailrace").options(**options, columns="operation_type,full_document").load()
    assert frame.columns == ["operation_type", "full_document"]
    found = frame.where("operation_type = 'update' and full_document:customer.city::string = 'Oslo'")
    assert found.count() == 50
    every = spark.read.format("tailrace").options(**options).load()
    assert tuple(every.columns) == COLUMNS
    rows = every.where("transaction_id is not null").selectExpr("transaction_id.*", "collection", "wall_time").collect()
    assert len(rows) == 2
    assert len({(row.lsid, row.txn_number) for row in rows}) == 1
    before = every.where("operation_type = 'delete'").selectExpr("full_document_before_change:n::int as n").collect()
    assert [row.n for row in before] == [7]


@pytest.mark.parametrize("form", ["json", "bson"])
def test_documents_come_in_the_form_asked_for(spark: SparkSession, written: Any, form: str) -> None:
    options, native, _ = written
    frame = spark.read.format("tailrace").options(**options, columns="document_key,update_description", documents=form)
    rows = frame.load().collect()
    decode = json.loads if form == "json" else lambda value: bson.decode(bytes(value))
    events = [bson.decode(event) for event in native]
    assert [decode(row.document_key) for row in rows] == [event["documentKey"] for event in events]
    updates = [None if row.update_description is None else decode(row.update_description) for row in rows]
    assert updates == [event.get("updateDescription") for event in events]


def test_a_plan_hides_the_uri(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"uri": "mongodb://user:s3cret@localhost/?replicaSet=rs0", "columns": "event"}
    for reader in (spark.read, spark.readStream):
        reader.format("tailrace").options(**options).load().explain(True)
    shown = capsys.readouterr().out
    assert "tailrace" in shown
    assert "s3cret" not in shown


def test_a_schema_of_ones_own_is_refused(spark: SparkSession, replica_set: ReplicaSet) -> None:
    reader = spark.read.format("tailrace").option("uri", replica_set.uri).schema("event string")
    with pytest.raises(Exception, match="has its own schema"):
        reader.load().count()
