"""``tables_writer``: tables fed by a user's query equal the collections, whatever Spark repeats."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest
from deltalake import DeltaTable
from pymongo import MongoClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.spark import tables_writer
from tailrace.tables import TableRule, TableSettings
from tests.spark.streams import PATIENCE_S, newest
from tests.tables.equality import in_collection, in_table

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
WHOLE = {"showExpandedEvents": "true", "showRawUpdateDescription": "true"}


def run(
    spark: SparkSession,
    options: dict[str, str],
    checkpoint: Path,
    write: Callable[[DataFrame, int], None],
    *,
    select: Callable[[DataFrame], DataFrame] = lambda frame: frame,
) -> None:
    """Run the query over the existing events."""
    events = spark.readStream.format("tailrace").options(**options).load()
    writer = select(events).writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(PATIENCE_S), "the stream does not end"
    finally:
        query.stop()


def change(client: Any, database: str, chosen: random.Random) -> None:
    """Changes of several collections, one of which is dropped, made by ``$out`` and renamed."""
    there = client[database]
    for _ in range(60):
        number = chosen.randrange(30)
        match chosen.randrange(4):
            case 0:
                there.orders.delete_one({"_id": number})
            case 1:
                there.orders.replace_one({"_id": number}, {"v": chosen.random()}, upsert=True)
            case _:
                there.orders.update_one({"_id": number}, {"$inc": {"n": 1}, "$push": {"l": number}}, upsert=True)
    there.drop_collection("copied")
    there.orders.aggregate([{"$match": {"_id": {"$lt": 20}}}, {"$out": "copied"}])
    there.before.insert_one({"_id": 1})
    there.before.rename("after", dropTarget=True)
    with client.start_session() as session, session.start_transaction():
        there.orders.update_one({"_id": 1}, {"$set": {"a": 1}}, upsert=True, session=session)
        there.after.insert_one({"_id": 2}, session=session)


@pytest.mark.slow  # tests/unit/test_fed_tables.py without Spark, and with it the example in docs/how-to/tables.md
def test_tables_of_a_stream_with_its_copy_equal_the_collections(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """The rows are shuffled on their way. The tables are read with deltalake, Polars and DuckDB."""
    database, chosen = "fedbyspark", random.Random(1)
    root, uri = tmp_path / "tables", replica_set.uri
    options = {"uri": uri, "database": database, "startingFrom": "snapshot", "maxEventsPerTrigger": "40", **WHOLE}
    with MongoClient[Any](uri) as client:
        client.drop_database(database)
        client[database].orders.insert_many([{"_id": n, "n": n} for n in range(50)])
        client[database].rest.insert_one({"_id": "x"})
        for _ in range(2):
            write = tables_writer(root, collections=f"{database}.*", uri=uri)
            run(spark, options, tmp_path / "checkpoint", write, select=lambda one: one.repartition(3, f.rand()))
            change(client, database, chosen)
            newest(uri)
        run(spark, options, tmp_path / "checkpoint", tables_writer(root, collections=f"{database}.*", uri=uri))
        for name in ("orders", "rest", "copied", "after"):
            assert in_table(root, f"{database}.{name}") == in_collection(client[database][name]), name
        assert not in_table(root, f"{database}.before")
        count = client[database].orders.count_documents({})
        client.drop_database(database)
    path = str(root / f"{database}.orders")
    orders = DeltaTable(path).to_pyarrow_dataset()
    assert orders.count_rows() == polars.scan_delta(path).collect().height == count
    assert duckdb.sql("SELECT count(*) FROM orders").fetchall() == [(count,)]


@pytest.mark.slow  # each refusal, without Spark: tests/unit/test_fed_tables.py
def test_a_stream_without_what_tables_need_fails_with_what_to_set(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    database, uri = "fedpoorly", replica_set.uri
    start = newest(uri)
    with MongoClient[Any](uri) as client:
        client[database].orders.insert_one({"_id": 1})
        client[database].orders.update_one({"_id": 1}, {"$set": {"a": 1}})
        newest(uri)
    options = {"uri": uri, "database": database, "startAtOperationTime": f"{start.seconds},{start.increment}"}
    write = tables_writer(tmp_path / "tables", begins_empty=True)
    with pytest.raises(Exception, match=r"has no collectionUUID.*showExpandedEvents=true"):
        run(spark, options, tmp_path / "one", write)
    with pytest.raises(Exception, match=r"has no rawUpdateDescription.*showRawUpdateDescription=true"):
        run(spark, {**options, "showExpandedEvents": "true"}, tmp_path / "two", write)
    with pytest.raises(Exception, match="needs the column 'event', and there are only token"):
        run(spark, {**options, **WHOLE}, tmp_path / "three", write, select=lambda one: one.select("token"))
    with pytest.raises(Exception, match="does not begin with a copy"):
        run(spark, {**options, **WHOLE}, tmp_path / "four", tables_writer(tmp_path / "other"))
    run(spark, {**options, **WHOLE}, tmp_path / "five", write)
    assert in_table(tmp_path / "tables", f"{database}.orders")
    with MongoClient[Any](uri) as client:
        client.drop_database(database)
    with pytest.raises(UsageError, match="cannot be written with"):
        tables_writer(TableSettings(tmp_path / "t", [TableRule("a.b")], take_over=True))


@pytest.mark.slow  # what is asked of rows, without Spark: tests/unit/test_fed_tables.py
def test_rows_of_parquet_files(spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path) -> None:
    """The events were written by one query, and another feeds tables with the files."""
    database, uri = "fedbyfiles", replica_set.uri
    start = newest(uri)
    with MongoClient[Any](uri) as client:
        change(client, database, random.Random(3))
        newest(uri)
        options = {"uri": uri, "database": database, "startAtOperationTime": f"{start.seconds},{start.increment}"}
        events = spark.read.format("tailrace").options(**options, **WHOLE).load().select("event")
        events.repartition(3, f.rand()).write.parquet(str(tmp_path / "files"))
        rows = spark.readStream.schema("event binary").parquet(str(tmp_path / "files"))
        write = tables_writer(tmp_path / "tables", collections=[f"{database}.*"], begins_empty=True)
        writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(PATIENCE_S)
        for name in ("orders", "copied", "after"):
            assert in_table(tmp_path / "tables", f"{database}.{name}") == in_collection(client[database][name]), name
        client.drop_database(database)
