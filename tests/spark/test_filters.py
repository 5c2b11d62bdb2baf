"""Spark's filters on the columns of a batch read, pushed into the read of the oplog: the rows stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bson
import pymongo
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNull, LessThanOrEqual, StringStartsWith

from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.query.filters import match_of
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.source.batch_reader import TailraceFilteringReader
from tests.spark.streams import newest

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
_ENABLED = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def options(replica_set: ReplicaSet) -> Iterator[dict[str, str]]:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        start = newest(replica_set.uri)
        for name in ("spark_filters", "spark_filters_too"):
            for collection in ("a", "ab", "b"):
                client[name][collection].insert_many([{"_id": number} for number in range(5)])
                client[name][collection].delete_one({"_id": 3})
        until = newest(replica_set.uri)
        yield {
            "uri": replica_set.uri,
            "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
            "endAtOperationTime": f"{until.seconds},{until.increment}",
            "columns": "token,operation_type,database,collection,cluster_time",
            "partitions": "1",
        }
        for name in ("spark_filters", "spark_filters_too"):
            client.drop_database(name)


CONDITIONS = (
    ("operation_type = 'delete'", 6),
    ("database = 'spark_filters' and collection in ('a', 'b')", 12),
    ("collection like 'a%' and operation_type = 'insert'", 20),
    ("cluster_time.t > 0 and cluster_time.t <= 1", 0),
    ("operation_type = 'delete' or collection = 'b'", 16),
)


@pytest.mark.parametrize(("condition", "rows"), CONDITIONS)
def test_filtered_rows_are_the_same_with_and_without(
    spark: SparkSession, options: dict[str, str], condition: str, rows: int
) -> None:
    def read(**more: str) -> DataFrame:
        return spark.read.format("tailrace").options(**options, **more).load().where(condition)

    expected = read().collect()
    assert len(expected) == rows
    spark.conf.set(_ENABLED, "true")
    try:
        assert read(filterPushdown="true").collect() == expected
    finally:
        spark.conf.unset(_ENABLED)


def test_filters_become_a_match_and_come_back_to_spark() -> None:
    filters = [EqualTo(("operation_type",), "delete"), In(("collection",), ("a", "b", None)), IsNull(("database",))]
    assert bson.decode(match_of(filters) or b"") == {
        "$match": {"$and": [{"operationType": {"$eq": "delete"}}, {"ns.coll": {"$in": ["a", "b"]}}]}
    }
    reader = TailraceFilteringReader(parse({"uri": "mongodb://localhost"}))
    assert list(reader.pushFilters(filters)) == filters
    assert len(reader._options.pipeline) == 1


def test_what_cannot_be_said_is_left_to_spark() -> None:
    assert match_of([IsNull(("database",)), EqualTo(("wall_time",), 5), EqualTo(("operation_type",), None)]) is None
    times = [GreaterThan(("cluster_time", "t"), 5), LessThanOrEqual(("cluster_time", "t"), 9)]
    assert bson.decode(match_of(times) or b"")["$match"]["$and"] == [
        {"clusterTime": {"$gte": bson.Timestamp(6, 0)}},
        {"clusterTime": {"$lt": bson.Timestamp(10, 0)}},
    ]
    assert bson.decode(match_of([StringStartsWith(("collection",), "ab")]) or b"")["$match"]["$and"] == [
        {"ns.coll": {"$gte": "ab", "$lt": "ac"}}
    ]


@pytest.mark.parametrize(
    "more",
    [{"resumeAfter": "826B00D1ED0000003E2B022C0100296E04"}, {"pipeline": '[{"$changeStreamSplitLargeEvent": {}}]'}],
)
def test_a_filter_must_not_hide_the_event_resumed_from_nor_follow_the_split_stage(more: dict[str, str]) -> None:
    options = parse({"uri": "mongodb://localhost", **more})
    reader = TailraceFilteringReader(options)
    reader.pushFilters([EqualTo(("operation_type",), "delete")])
    assert reader._options.pipeline == options.pipeline
