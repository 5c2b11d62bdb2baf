"""The user's own stages in both runners: the in-process stream and Spark, batch and stream, give the same bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.database import Database
from pyspark.sql import SparkSession

import tailrace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tests.differential.icu import needs_icu
from tests.golden.recording import token_time
from tests.spark.streams import available_now, newest

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

NAME = "spark_user_pipelines"
SPLIT: dict[str, Any] = {"$changeStreamSplitLargeEvent": {}}
PIPELINES: dict[str, list[dict[str, Any]]] = {
    "match": [{"$match": {"operationType": {"$in": ["insert", "update"]}, "fullDocument.n": {"$gte": 5}}}],
    "project and add": [
        {
            "$project": {
                "operationType": 1,
                "documentKey": 1,
                "size": {"$size": {"$ifNull": ["$fullDocument.tags", []]}},
            }
        },
        {"$addFields": {"documentKey.twice": {"$multiply": ["$size", 2]}, "when": {"$year": "$$ROOT.wallTime"}}},
        {"$match": {"size": {"$ne": 1}}},
    ],
    "redact": [{"$redact": {"$cond": [{"$eq": ["$secret", True]}, "$$PRUNE", "$$DESCEND"]}}],
    "replace and unset": [
        {"$match": {"operationType": {"$ne": "delete"}}},
        {"$unset": ["wallTime", "fullDocument.tags"]},
        {"$replaceRoot": {"newRoot": {"$mergeObjects": [{"op": "$operationType"}, "$fullDocument", {"_id": "$_id"}]}}},
    ],
    "split": [{"$match": {"operationType": "update"}}, SPLIT],
}


@pytest.fixture(scope="module")
def written(replica_set: ReplicaSet) -> Iterator[tuple[ClusterTime, ClusterTime]]:
    """The span of a workload with images, a transaction and two events too large for one document."""
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        database = client[NAME]
        for collection in ("c", "large"):
            database.create_collection(collection, changeStreamPreAndPostImages={"enabled": True})
        start = newest(replica_set.uri)
        _write(database)
        until = newest(replica_set.uri)
        yield start, until
        client.drop_database(NAME)


def _write(database: Database[dict[str, Any]]) -> None:
    documents = [{"_id": i, "n": i, "tags": ["a", "B"][: i % 3], "in": {"secret": i % 2 == 0}} for i in range(12)]
    database.c.insert_many(documents)
    database.c.update_many({"n": {"$lt": 4}}, {"$set": {"in.more": [{"secret": True}, {"secret": False}]}})
    with database.client.start_session() as session, session.start_transaction():
        database.c.delete_one({"_id": 7}, session=session)
        database.c.insert_one({"_id": "t", "n": 50}, session=session)
    database.c.replace_one({"_id": 3}, {"n": 60, "tags": ["b"]})
    database.large.insert_one({"_id": 1, "text": "x" * 9_000_000})
    for n in (1, 2):
        database.large.update_one({"_id": 1}, {"$set": {"n": n}})


def _collection(stages: list[dict[str, Any]]) -> str:
    """Without the split stage the events of the other collection would end a stream."""
    return "large" if SPLIT in stages else "c"


def in_process(
    uri: str, stages: list[dict[str, Any]], span: tuple[ClusterTime, ClusterTime], **more: Any
) -> list[bytes]:
    """The events of ``watch`` after the first time, up to the second."""
    raw = CodecOptions(document_class=RawBSONDocument)
    found: list[bytes] = []
    deadline = time.monotonic() + 300
    with (
        tailrace.connect(uri) as client,
        client[NAME][_collection(stages)].watch(
            stages,
            full_document="whenAvailable",
            full_document_before_change="whenAvailable",
            start_at_operation_time=span[0].tick().to_timestamp(),
            max_await_time_ms=50,
            codec_options=raw,
            **more,
        ) as stream,
    ):
        while time.monotonic() < deadline:
            event = stream.try_next()
            if event is not None:
                found.append(bytes(event.raw))
            elif token_time(bytes(stream.resume_token.raw)) >= span[1]:
                return found
    raise TimeoutError("the stream did not come to the end of the span")


def _options(
    uri: str, stages: list[dict[str, Any]], span: tuple[ClusterTime, ClusterTime], **more: str
) -> dict[str, str]:
    start = span[0].tick()
    return {
        "uri": uri,
        "database": NAME,
        "collection": _collection(stages),
        "pipeline": json.dumps(stages),
        "fullDocument": "whenAvailable",
        "fullDocumentBeforeChange": "whenAvailable",
        "startAtOperationTime": f"{start.seconds},{start.increment}",
        "partitions": "2",
        **more,
    }


def _batch(spark: SparkSession, options: dict[str, str], until: ClusterTime) -> list[bytes]:
    closed = {**options, "columns": "event", "endAtOperationTime": f"{until.seconds},{until.increment}"}
    return [bytes(row.event) for row in spark.read.format("tailrace").options(**closed).load().collect()]


@pytest.mark.parametrize("case", PIPELINES)
def test_both_runners_give_the_same_bytes(
    spark: SparkSession, replica_set: ReplicaSet, written: Any, tmp_path: Path, case: str
) -> None:
    stages = PIPELINES[case]
    ours = in_process(replica_set.uri, stages, written)
    options = _options(replica_set.uri, stages, written)
    assert len(ours) >= 4
    assert any(b"splitEvent" in event for event in ours) == (case == "split")
    assert _batch(spark, options, written[1]) == ours
    assert available_now(spark, options, tmp_path / "checkpoint").events == ours


@needs_icu
def test_both_runners_compare_under_a_collation_in_the_same_way(
    spark: SparkSession, replica_set: ReplicaSet, written: Any
) -> None:
    collation = {"locale": "en", "strength": 1}
    stages = [{"$match": {"fullDocument.tags": "b", "operationType": {"$lt": "REPLACE"}}}]
    ours = in_process(replica_set.uri, stages, written, collation=collation)
    options = _options(replica_set.uri, stages, written, collation=json.dumps(collation))
    assert len(ours) == 4
    assert _batch(spark, options, written[1]) == ours
