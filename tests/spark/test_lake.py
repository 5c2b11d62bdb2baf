"""The lake on real Spark and a real MongoDB: filled, used with the wrong stream, read by other programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson import json_util
from pyspark.sql import SparkSession

from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamFatal, SinkError, UsageError
from tailrace.lake import read, verify
from tailrace.lake.spark.store.failure import query_error
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.erasure import erase
from tests.small_disk import small_disk
from tests.spark.lake_driving import options_for
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


def change(uri: str, database: str, first: int, count: int, *, pad: int = 60) -> ClusterTime:
    """Some inserts, updates and a transaction; gives the cluster time after them."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        orders = client[database]["orders"]
        # Fields that a transaction's commit also has, here a user's.
        named: list[dict[str, Any]] = [{"count": "three"}, {"count": -(10**9)}, {"prepare": True}, {"applyOps": [{}]}]
        orders.insert_many(
            [{"_id": float(n), "n": n, "pad": os.urandom(pad), **named[n % 4]} for n in range(first, first + count)]
        )
        orders.update_many({"n": {"$gte": first, "$lt": first + count // 2}}, {"$inc": {"times": 1}})
        with client.start_session() as session, session.start_transaction():
            orders.delete_one({"_id": float(first)}, session=session)
            orders.insert_one({"_id": f"t{first}"}, session=session)
    return newest(uri)


def fill(spark: SparkSession, options: dict[str, str], lake: Path, **more: Any) -> None:
    query = write_stream(spark, options, lake, available_now=True, **more)
    try:
        query.awaitTermination()
    finally:
        query.stop()


def test_a_stream_is_written_from_any_thread(spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path) -> None:
    """Spark looks up the sink in the calling thread's active session, but a thread that is started later than a query
    has none, or the query's own. All earlier tests called it in the thread that made the session."""
    database = "lakethread"
    start = newest(replica_set.uri)
    until = change(replica_set.uri, database, 0, 20)
    options = options_for(replica_set.uri, database, start)
    fill(spark, options, tmp_path / "first")
    thread = CheckedThread(lambda: fill(spark, options, tmp_path / "lake"), "fill")
    thread.start()
    thread.join()
    thread.check()
    assert list(lake_events(tmp_path / "lake")) == server_events(replica_set.uri, (database, None), start, until)


@pytest.fixture(scope="module")
def filled(spark: SparkSession, replica_set: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A lake with all columns, in the default form, from several micro-batches, and what the server says."""
    database, lake = "lakeread", tmp_path_factory.mktemp("read") / "lake"
    start = newest(replica_set.uri)
    until = change(replica_set.uri, database, 0, 300)
    fill(spark, options_for(replica_set.uri, database, start, maxEventsPerTrigger="100"), lake)
    return {
        "lake": lake,
        "database": database,
        "start": start,
        "events": server_events(replica_set.uri, (database, None), start, until),
    }


def test_every_reader_reads_the_same_events_by_the_call_that_the_page_recommends(
    spark: SparkSession, filled: dict[str, Any]
) -> None:
    import duckdb
    import polars
    from deltalake import DeltaTable

    path, expected = filled["lake"], filled["events"]
    assert len(expected) == 300 + 150 + 2
    assert list(lake_events(path)) == expected
    lake = DeltaTable(path).to_pyarrow_dataset()
    by_duckdb = duckdb.sql("SELECT event FROM lake ORDER BY token").fetchall()
    assert [row[0] for row in by_duckdb] == expected
    by_arrow = lake.to_table(columns=["event", "token"]).sort_by("token")
    assert by_arrow.column("event").to_pylist() == expected
    by_pandas = DeltaTable(path).to_pandas().sort_values("token")
    assert list(by_pandas["event"]) == expected
    by_polars = polars.scan_delta(str(path)).sort("token").collect()
    assert by_polars["event"].to_list() == expected
    by_spark = read(spark, path).orderBy("token").collect()
    assert [bytes(row.event) for row in by_spark] == expected
    days = {name.name.partition("=")[2] for name in path.glob("day=*")}
    assert {str(row.day) for row in by_spark} == {str(day) for day in by_pandas["day"]} == days
    last = by_arrow.column("token")[-1].as_py()
    for name, found in (
        ("duckdb", len(duckdb.sql(f"SELECT 1 FROM lake WHERE token >= '{last}'").fetchall())),
        ("polars", polars.scan_delta(str(path)).filter(polars.col("token") >= last).collect().height),
        ("pandas", len(DeltaTable(path).to_pandas(filters=[("token", ">=", last)]))),
    ):
        assert found == 1, f"{name} prunes by the log's bounds of a file"


def test_the_queries_of_the_page_give_values_on_a_lake_of_the_default_form(filled: dict[str, Any]) -> None:
    """The documented DuckDB query gave NULL in every row of a default lake, whose documents were VARIANT, which only
    Spark can read. The existing test used JSON."""
    import duckdb
    import pandas
    import polars
    from deltalake import DeltaTable

    lake = DeltaTable(filled["lake"]).to_pyarrow_dataset()
    assert lake is not None  # DuckDB finds it by its name
    query = "SELECT collection, operation_type, count(*) AS n FROM lake GROUP BY ALL ORDER BY ALL"
    kinds = [("delete", 1), ("insert", 301), ("update", 150)]
    assert duckdb.sql(query).fetchall() == [("orders", *kind) for kind in kinds]
    for column in ("operation_type", "database", "collection", "document_key", "event", "wall_time"):
        assert duckdb.sql(f"SELECT count(*) FROM lake WHERE {column} IS NOT NULL").fetchall() == [(452,)], column
    inserts = "SELECT full_document->>'$.pad', full_document->>'$.n' FROM lake WHERE operation_type = 'insert'"
    rows = [row for row in duckdb.sql(inserts).fetchall() if row[1] is not None]
    assert len(rows) == 300
    assert None not in {row[0] for row in rows}
    numbers = (
        polars.scan_delta(str(filled["lake"]))
        .filter(polars.col("operation_type") == "insert")
        .select(polars.col("full_document").str.json_path_match("$.n").cast(polars.Float64))
        .collect()
        .to_series()
    )
    assert sorted(number for number in numbers if number is not None) == [*range(300)]
    frame = DeltaTable(filled["lake"]).to_pandas()
    documents = frame.loc[frame["operation_type"] == "insert", "full_document"].map(json.loads)
    assert sorted(d["n"] for d in documents if "n" in d) == [*range(300)]
    assert not pandas.isna(frame["document_key"]).any()


def test_spark_reads_variant_columns_back_as_such_also_after_compaction(
    spark: SparkSession, replica_set: ReplicaSet, filled: dict[str, Any], tmp_path: Path
) -> None:
    from deltalake import DeltaTable

    from tailrace.lake import compact, files

    lake = tmp_path / "lake"
    options = options_for(
        replica_set.uri, filled["database"], filled["start"], maxEventsPerTrigger="100", documents="variant"
    )
    fill(spark, options, lake)
    for _ in range(2):
        frame = read(spark, lake)
        assert dict(frame.dtypes)["full_document"] == "variant"
        sums = frame.selectExpr("sum(variant_get(full_document, '$.n', 'int')) AS n", "count(*) AS c").collect()[0]
        assert (sums.n, sums.c) == (sum(range(300)), 452)
        others = DeltaTable(lake).to_pyarrow_dataset().to_table(columns=["full_document"])
        assert [field.name for field in others.schema.field("full_document").type] == ["value", "metadata"]
        assert others.num_rows == 452
        compact(lake)
    assert len(files(lake)) == len(list(lake.glob("day=*")))


def test_a_lake_without_events_has_its_columns(
    spark: SparkSession, replica_set: ReplicaSet, filled: dict[str, Any], tmp_path: Path
) -> None:
    from deltalake import DeltaTable

    options = options_for(replica_set.uri, "nothingever", filled["start"])
    fill(spark, options, tmp_path / "lake")
    empty = read(spark, tmp_path / "lake")
    assert empty.count() == 0
    assert empty.columns == read(spark, filled["lake"]).columns
    assert empty.dtypes == read(spark, filled["lake"]).dtypes
    assert DeltaTable(tmp_path / "lake").to_pyarrow_table().num_rows == 0


def test_a_lake_divided_by_hour_and_collection_holds_the_servers_stream(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """With VARIANT columns, since Spark finds their type in the files. The lake goes on without being told its
    partitioning, and with its checkpoint after an erasure."""
    database, lake = "lakedivided", tmp_path / "lake"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        start = newest(replica_set.uri)
        for number in range(60):
            client[database][f"n{number % 7}"].insert_one({"_id": number})
        client[database]["2024"].drop()
        client[database]["2024"].insert_one({"_id": 1})
    options = options_for(replica_set.uri, database, start, maxEventsPerTrigger="25", documents="variant")
    fill(spark, options, lake, partition_by=["hour", "collection"])
    assert erase(lake, {"ns.coll": "n5", "documentKey._id": 5}, vacuum=True).rows == 1
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database]["2024"].insert_one({"_id": 2})
    until = newest(replica_set.uri)
    fill(spark, options, lake)
    expected = server_events(replica_set.uri, (database, None), start, until)
    expected = [event for event in expected if bson.decode(event).get("documentKey") != {"_id": 5}]
    ordered = read(spark, lake).orderBy("token")
    rows = ordered.selectExpr("*", "variant_get(document_key, '$._id', 'int') AS id").collect()
    assert [bytes(row.event) for row in rows] == expected
    assert {row.collection for row in rows} == {*(f"n{number}" for number in range(7)), "2024"}
    assert {row.hour for row in rows} <= {row.cluster_time.t // 3600 % 24 for row in rows}
    assert sorted(row.id for row in rows if row.operation_type == "insert") == sorted([*range(5), *range(6, 60), 1, 2])
    report = verify(lake, full=True)
    assert (report.problems, report.rows) == ([], len(expected))
    with pytest.raises(UsageError, match="is partitioned by day, hour, collection, not by day"):
        fill(spark, options, lake, partition_by=["day"])
    with pytest.raises(UsageError, match="have no 'collection'"):
        fill(spark, {**options, "columns": "token"}, tmp_path / "other", partition_by=["collection"])


def test_progress_counts_events(
    spark: SparkSession, replica_set: ReplicaSet, filled: dict[str, Any], tmp_path: Path
) -> None:
    """Spark's ``numInputRows`` counts the source's rows, and the lake's source gives one for each file."""
    options = options_for(replica_set.uri, filled["database"], filled["start"], maxEventsPerTrigger="100")
    query = write_stream(spark, options, tmp_path / "lake", available_now=True)
    query.awaitTermination()
    counted = [progress.observedMetrics["tailrace"].events for progress in query.recentProgress]
    assert sum(counted) == 452
    assert len(counted) > 3
    assert not (tmp_path / "lake" / "_checkpoint").exists()
    assert (tmp_path / "lake.checkpoint" / "metadata").exists(), "readers that take every file must not find it"


def test_another_streams_lake_is_refused_and_the_difference_named(
    spark: SparkSession, replica_set: ReplicaSet, filled: dict[str, Any]
) -> None:
    lake, start = filled["lake"], filled["start"]
    before = sorted(lake.rglob("*"))
    for other, named in (
        (options_for(replica_set.uri, "elsewhere", start), r"settings\.scope"),
        (options_for(replica_set.uri, filled["database"], start, documents="bson"), "documents"),
        (options_for(replica_set.uri, filled["database"], start, columns="event,token"), "columns"),
    ):
        with pytest.raises(UsageError, match=f"belongs to another stream: {named} is .* there and .* here"):
            write_stream(spark, other, lake)
    assert sorted(lake.rglob("*")) == before


def test_a_fresh_checkpoint_goes_on_after_the_last_event_without_loss_or_repetition(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    database, lake = "lakefresh", tmp_path / "lake"
    start = newest(replica_set.uri)
    change(replica_set.uri, database, 0, 50)
    options = options_for(replica_set.uri, database, start, columns="event,token")
    fill(spark, options, lake, checkpoint=tmp_path / "one")
    first = len(list(lake_events(lake)))
    until = change(replica_set.uri, database, 100, 50)
    fill(spark, {**options, "partitions": "3"}, lake, checkpoint=tmp_path / "two")
    found = list(lake_events(lake))
    assert first == 50 + 25 + 2
    assert found == server_events(replica_set.uri, (database, None), start, until)
    assert verify(lake).problems == []
    with pytest.raises(UsageError, match="was superseded"):
        write_stream(spark, options, lake, checkpoint=tmp_path / "one")


def test_a_lake_put_back_from_a_backup_under_its_newer_checkpoint_is_refused_and_a_fresh_one_loses_nothing(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """Ten documents, a copy of the lake, ten more, the copy restored, ten more: ten were missing for good, with exit
    status 0, and ``verify`` called the lake sound. No test had restored a lake."""
    database, lake, good = "lakeback", tmp_path / "lake", tmp_path / "good"
    start = newest(replica_set.uri)
    options = options_for(replica_set.uri, database, start, columns="event,token")
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        orders = client[database]["orders"]
        for number in range(2):
            orders.insert_many([{"_id": number * 10 + n} for n in range(10)])
            fill(spark, options, lake)
            if number == 0:
                shutil.copytree(lake, tmp_path / "copy")
        lake.rename(good)
        (tmp_path / "copy").rename(lake)
        orders.insert_many([{"_id": 20 + n} for n in range(10)])
        until = newest(replica_set.uri)
        with pytest.raises(SinkError, match="is older than its checkpoint"):
            write_stream(spark, options, lake, available_now=True)
        assert any("is older than its checkpoint" in problem for problem in verify(lake, full=True).problems)
        expected = server_events(replica_set.uri, (database, None), start, until)
        # The good lake goes on under the checkpoint, and the old copy with a fresh one.
        fill(spark, options, good, checkpoint=tmp_path / "lake.checkpoint")
        fill(spark, options, lake, checkpoint=tmp_path / "fresh")
        for path in (good, lake):
            assert list(lake_events(path)) == expected
            assert verify(path, full=True, checkpoint=tmp_path / "none").problems == []


def test_a_full_disk_is_told_in_a_sentence_harms_nothing_and_the_stream_goes_on_when_there_is_room(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    database = "lakefull"
    start = newest(replica_set.uri)
    until = change(replica_set.uri, database, 0, 4000, pad=400)
    options = options_for(replica_set.uri, database, start, columns="event,token", maxEventsPerTrigger="1000")
    with small_disk(tmp_path / "disk", "700k") as disk:
        with pytest.raises(Exception, match="No space left on device") as caught:
            fill(spark, options, disk.path / "lake", checkpoint=tmp_path / "checkpoint")
        told = query_error(caught.value)
        assert "no room left to write" in str(told)
        assert "make room and start again" in str(told)
        held = list(lake_events(disk.path / "lake"))
        expected = server_events(replica_set.uri, (database, None), start, until)
        assert 0 < len(held) < len(expected)
        assert held == expected[: len(held)]
        assert verify(disk.path / "lake").problems == []
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk.path)], check=True)
        fill(spark, options, disk.path / "lake", checkpoint=tmp_path / "checkpoint")
        assert list(lake_events(disk.path / "lake")) == expected
        assert verify(disk.path / "lake").problems == []


def test_an_error_of_the_source_reaches_the_caller_as_one_sentence(
    spark: SparkSession, replica_set: ReplicaSet, filled: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere = json_util.dumps(bson.decode(filled["events"][7])["_id"])
    change(replica_set.uri, "lakelost", 0, 10)
    options = {"uri": replica_set.uri, "database": "lakelost", "resumeAfter": elsewhere}
    with pytest.raises(Exception, match="280 ChangeStreamFatalError") as caught:
        fill(spark, options, tmp_path / "lake")
    told = query_error(caught.value)
    assert isinstance(told, ChangeStreamFatal)
    assert told.code == 280
    assert "\n" not in str(told)
    assert "Traceback" not in str(told)
