"""The source in SQL: a view with options, and what is refused. No test had used SQL: CREATE TABLE was refused because
of an option that the user had not written, and INSERT with names of PySpark's own classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


@pytest.fixture
def events(replica_set: ReplicaSet) -> Iterator[tuple[dict[str, str], list[bytes]]]:
    """Options for a range that ends before the last insert, and the server's events of it."""
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        start = newest(replica_set.uri)
        client["spark_sql"]["c"].insert_many([{"_id": number, "n": number % 3} for number in range(30)])
        client["spark_sql"]["c"].delete_one({"_id": 7})
        until = newest(replica_set.uri)
        client["spark_sql"]["c"].insert_one({"_id": "later"})
        options = {
            "uri": replica_set.uri,
            "database": "spark_sql",
            "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
            "endAtOperationTime": f"{until.seconds},{until.increment}",
            "columns": "event,operation_type,full_document",
            "documents": "variant",
        }
        yield options, server_events(replica_set.uri, ("spark_sql", None), start, until)
        client.drop_database("spark_sql")


def clause(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name} '{text}'" for name, text in options.items())


def test_a_temporary_view_gives_the_servers_events_up_to_a_time(
    spark: SparkSession, events: Any, tmp_path: Path
) -> None:
    options, native = events
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW sql_events USING tailrace OPTIONS ({clause(options)})")
    assert [bytes(row.event) for row in spark.sql("SELECT event FROM sql_events").collect()] == native
    counted = spark.sql(
        "SELECT full_document:n::int AS n, count(*) AS c FROM sql_events WHERE operation_type = 'insert' GROUP BY 1"
    )
    assert {row.n: row.c for row in counted.collect()} == {0: 10, 1: 10, 2: 10}
    place = f"USING parquet LOCATION '{tmp_path / 'copy'}'"
    spark.sql(f"CREATE TABLE sql_copy {place} AS SELECT event FROM sql_events WHERE operation_type = 'delete'")
    spark.sql("INSERT INTO sql_copy SELECT event FROM sql_events WHERE operation_type = 'insert'")
    assert sorted(bytes(row.event) for row in spark.table("sql_copy").collect()) == sorted(native)
    spark.sql("DROP TABLE sql_copy")
    with pytest.raises(AnalysisException, match="nothing can be written to it"):
        spark.sql("INSERT INTO sql_events SELECT * FROM sql_events").collect()
    spark.catalog.dropTempView("sql_events")


def test_create_table_names_the_view_that_takes_the_same_options(spark: SparkSession, events: Any) -> None:
    options, _ = events
    with pytest.raises(AnalysisException, match="CREATE TEMPORARY VIEW events USING tailrace OPTIONS"):
        spark.sql(f"CREATE TABLE sql_table USING tailrace OPTIONS ({clause(options)})").collect()
    assert not spark.catalog.tableExists("sql_table")
