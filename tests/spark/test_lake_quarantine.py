"""Events that cannot be written, from real servers: each ends a lake's stream, or is put aside while the others are
written as usual."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import bson.json_util
import pyarrow.parquet as pq
import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pyspark.sql import SparkSession

from tailrace.core import raw_bson
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, TailraceError
from tailrace.lake import verify
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.reading.slice_reader import read_slice
from tailrace.lake.spark.source.batch_reader import TailraceBatchReader
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.status import lake_status
from tests.server_in_use import IN_BETWEEN
from tests.spark.lake_driving import PATIENCE_S, driver, options_for
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
DIVIDE: list[dict[str, Any]] = [{"$set": {"x": {"$divide": [12, "$fullDocument.n"]}}}]
REMOVE_ID: list[dict[str, Any]] = [{"$set": {"_id": {"$cond": [{"$eq": ["$fullDocument.n", 0]}, 1, "$_id"]}}}]
#: It stands ahead of the other stages, in a stage of its own.
MATCH: list[dict[str, Any]] = [{"$match": {"$expr": {"$ne": [{"$divide": [12, "$fullDocument.n"]}, 0]}}}]
#: A binary of the old subtype 2 whose inner length is wrong: every server stores it, and no driver decodes it.
BROKEN = raw_bson.encode_document(
    raw_bson.encode_element(0x10, b"_id", b"\x07\0\0\0"),
    raw_bson.encode_element(0x05, b"b", b"\x08\0\0\0\x02\x09\0\0\0abcd"),
)


def read(options: dict[str, Any], *, aside: list[QuarantinedEvent] | None) -> list[dict[str, Any]]:
    """A batch read as a lake's tasks do it."""
    parsed = parse(options)
    slices: Any = TailraceBatchReader(parsed).partitions()
    return [row for one in slices for batch in read_slice(parsed, one, aside=aside) for row in batch.to_pylist()]


def span(uri: str, start: ClusterTime, until: ClusterTime, **more: Any) -> dict[str, str]:
    pipeline = more.pop("pipeline", None)
    return {
        "uri": uri,
        "columns": "event,token,full_document",
        "documents": "json",
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "endAtOperationTime": f"{until.seconds},{until.increment}",
        **({} if pipeline is None else {"pipeline": bson.json_util.dumps(pipeline)}),
        **more,
    }


@pytest.fixture(params=["6.0", IN_BETWEEN, "4.4.2"], scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "6.0":
        yield request.getfixturevalue("replica_set").uri
        return
    with ReplicaSet(1, version=request.param) as older:
        yield older.uri


def check(options: dict[str, Any], every: list[bytes], bad: list[bytes], *, code: int | None) -> list[QuarantinedEvent]:
    """Without a quarantine the read fails with ``code``; with one, the ``bad`` events of ``every`` are in it, and the
    rows are the others."""
    with pytest.raises(TailraceError) as failed:
        read(options, aside=None)
    assert failed.value.code == code
    aside: list[QuarantinedEvent] = []
    rows = read(options, aside=aside)
    assert [bytes(row["event"]) for row in rows] == every
    assert sorted(one.event for one in aside) == sorted(bad)
    assert {one.code for one in aside} == {code}
    assert all(one.reason for one in aside)
    tokens = {one.token for one in aside}
    assert tokens == {RawBSONDocument(one)["_id"]["_data"] for one in bad}
    assert tokens.isdisjoint(row["token"] for row in rows)
    return aside


@pytest.mark.parametrize(
    ("stages", "code"),
    [(DIVIDE, 2), (REMOVE_ID, 280), (MATCH, 2), ([MATCH[0], *DIVIDE], 2)],
    ids=["expression", "identifier", "match", "match-and-expression"],
)
def test_events_at_which_a_stage_of_the_pipeline_fails(server: str, stages: list[Any], code: int) -> None:
    with pymongo.MongoClient[dict[str, Any]](server) as client:
        db = client["quarantined"]
        db.c.drop()
        start = newest(server)
        db.c.insert_many([{"_id": number, "n": number % 3} for number in range(30)])
        with client.start_session() as session, session.start_transaction():
            db.c.insert_many([{"_id": 100 + number, "n": number} for number in range(3)], session=session)
        until = newest(server)
        client.drop_database("quarantined")
    failing = {"$match": {"fullDocument.n": {"$ne": 0}}}
    scope = ("quarantined", None)
    every = server_events(server, scope, start, until, pipeline=(failing, *stages))
    bad = server_events(server, scope, start, until, pipeline=({"$match": {"fullDocument.n": 0}},))
    assert len(bad) == 11
    options = span(server, start, until, database="quarantined", pipeline=stages)
    found = check(options, every, bad, code=code)
    assert {one.namespace for one in found} == {"quarantined.c"}
    assert all(start < one.cluster_time <= until for one in found)


def test_documents_that_a_column_cannot_take(server: str) -> None:
    """The read ended with PyMongo's own InvalidBSON, which named no event. Earlier tests had only written documents
    that drivers can decode."""
    with pymongo.MongoClient[dict[str, Any]](server) as client:
        db = client["quarantined"]
        db.c.drop()
        start = newest(server)
        db.c.insert_many([{"_id": number} for number in range(5)])
        db.c.with_options(codec_options=RAW).insert_one(RawBSONDocument(BROKEN, RAW))
        db.c.insert_many([{"_id": number} for number in range(10, 15)])
        until = newest(server)
        client.drop_database("quarantined")
    every = server_events(server, ("quarantined", None), start, until)
    (bad,) = (event for event in every if BROKEN in event)
    options = span(server, start, until, database="quarantined")
    (found,) = check(options, [event for event in every if event != bad], [bad], code=None)
    assert found.reason.startswith("a column cannot take it: ")
    with pytest.raises(
        SinkError, match=rf"the event of quarantined\.c with the token {found.token} does not fit the columns"
    ):
        read(options, aside=None)
    for more in ({"documents": "bson"}, {"columns": "event,token"}):
        assert [bytes(row["event"]) for row in read({**options, **more}, aside=None)] == every


def test_events_that_are_too_large_and_images_that_are_missing(replica_set: ReplicaSet) -> None:
    uri = replica_set.uri
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        db = client["quarantined"]
        db.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
        start = newest(uri)
        db.c.insert_many([{"_id": number, "text": "x" * 9_000_000} for number in range(2)])
        db.c.update_one({"_id": 0}, {"$set": {"n": 1}})
        db.c.replace_one({"_id": 1}, {"text": "y" * 9_000_000})
        db.c.insert_one({"_id": "small"})
        middle = newest(uri)
        db.plain.insert_many([{"_id": number} for number in range(3)])
        db.plain.update_one({"_id": 1}, {"$set": {"n": 1}})
        db.plain.delete_one({"_id": 2})
        until = newest(uri)
        stage = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}
        small = {"$match": {"operationType": "insert"}}
        every = server_events(uri, ("quarantined", None), start, middle, stage=stage, pipeline=(small,))
        options = span(uri, start, middle, database="quarantined", columns="event,token", **stage)
        with pytest.raises(TailraceError) as failed:
            read(options, aside=None)
        assert failed.value.code == 10334
        aside: list[QuarantinedEvent] = []
        assert [bytes(row["event"]) for row in read(options, aside=aside)] == every
        assert [one.code for one in aside] == [10334, 10334]
        for one, kind in zip(aside, ("update", "replace"), strict=True):
            assert len(one.event) > 17_000_000
            event = RawBSONDocument(one.event)
            assert (event["operationType"], len(event["fullDocument"]["text"])) == (kind, 9_000_000)
            assert len(event["fullDocumentBeforeChange"]["text"]) == 9_000_000
        inserts = server_events(uri, ("quarantined", None), middle, until, pipeline=(small,))
        changes = server_events(
            uri, ("quarantined", None), middle, until, pipeline=({"$match": {"operationType": {"$ne": "insert"}}},)
        )
        required = {"fullDocumentBeforeChange": "required"}
        check(span(uri, middle, until, database="quarantined", **required), inserts, changes, code=47)
        client.drop_database("quarantined")


def in_quarantine(lake: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((lake / "_quarantine").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_a_lake_goes_on_after_what_it_cannot_write(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    uri, lake = replica_set.uri, tmp_path / "lake"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        db = client["quarantined"]
        start = newest(uri)
        db.c.insert_many([{"_id": number, "n": number} for number in range(1, 6)])
        db.c.insert_one({"_id": 0, "n": 0})
        pipeline = bson.json_util.dumps(DIVIDE)
        options = options_for(uri, "quarantined", start, pipeline=pipeline, columns="event,token,operation_type")
        failing = write_stream(spark, options, lake, available_now=True)
        with pytest.raises(Exception, match="divide by zero"):
            failing.awaitTermination(PATIENCE_S)
        assert lake_status(lake).rows == 0
        query = write_stream(spark, options, lake, available_now=True, on_error="quarantine")
        assert query.awaitTermination(PATIENCE_S)
        observed = [one.observedMetrics["tailrace"].asDict() for one in query.recentProgress if one.observedMetrics]
        assert (sum(one["events"] for one in observed), sum(one["quarantined"] for one in observed)) == (5, 1)
        assert sum(one["insert"] for one in observed) == 5
        db.c.insert_many([{"_id": 10, "n": 0}, {"_id": 11, "n": 1}, {"_id": 12, "n": 0}])
        again = write_stream(spark, options, lake, available_now=True, on_error="quarantine")
        assert again.awaitTermination(PATIENCE_S)
        # A fresh checkpoint begins after the last event, which was put aside, and gives none of them again.
        fresh = tmp_path / "fresh"
        last = write_stream(spark, options, lake, checkpoint=fresh, available_now=True, on_error="quarantine")
        assert last.awaitTermination(PATIENCE_S)
        until = newest(uri)
        match = {"$match": {"fullDocument.n": {"$ne": 0}}}
        expected = server_events(uri, ("quarantined", None), start, until, pipeline=(match, *DIVIDE))
        assert list(lake_events(lake)) == expected
        rows = in_quarantine(lake)
        assert [bson.decode(row["event"])["documentKey"]["_id"] for row in rows] == [0, 10, 12]
        assert {(row["code"], row["namespace"]) for row in rows} == {(2, "quarantined.c")}
        assert lake_status(lake).quarantined == 3
        assert verify(lake, full=True).problems == []
        client.drop_database("quarantined")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["commit.files", "commit.log", "commit.quarantine"])
def test_a_driver_killed_within_the_commit_loses_nothing_and_writes_nothing_twice(
    replica_set: ReplicaSet, tmp_path: Path, step: str
) -> None:
    uri, lake = replica_set.uri, tmp_path / "lake"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client.drop_database("quarantined")
        start = newest(uri)
        client["quarantined"].c.insert_many([{"_id": number, "n": number % 3} for number in range(300)])
        options = options_for(
            uri, "quarantined", start, pipeline=bson.json_util.dumps(DIVIDE), maxEventsPerTrigger="60"
        )
        arguments = ("--available-now", "--on-error", "quarantine")
        with driver(options, lake, "--die-at", step, "1", *arguments) as process:
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
        with driver(options, lake, *arguments) as process:
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "driver.log").read_text()[-3000:]
        match = {"$match": {"fullDocument.n": {"$ne": 0}}}
        expected = server_events(uri, ("quarantined", None), start, newest(uri), pipeline=(match, *DIVIDE))
        assert list(lake_events(lake)) == expected
        rows = in_quarantine(lake)
        assert sorted(bson.decode(row["event"])["documentKey"]["_id"] for row in rows) == list(range(0, 300, 3))
        assert verify(lake, full=True).problems == []
        client.drop_database("quarantined")


def test_an_image_that_required_asks_for_is_missing_on_an_older_server(server: str) -> None:
    """5.0 and 4.4 say 51770 where 6.0 says 47; only 47 had been tested."""
    older = not server_is_new(server)
    with pymongo.MongoClient[dict[str, Any]](server) as client:
        db = client["quarantined"]
        db.plain.drop()
        start = newest(server)
        db.plain.insert_many([{"_id": number} for number in range(3)])
        db.plain.update_one({"_id": 1}, {"$set": {"n": 1}})
        db.plain.delete_one({"_id": 2})
        until = newest(server)
        client.drop_database("quarantined")
    scope = ("quarantined", None)
    inserts = server_events(server, scope, start, until, pipeline=({"$match": {"operationType": "insert"}},))
    changes = server_events(
        server, scope, start, until, pipeline=({"$match": {"operationType": {"$in": ["update", "delete"]}}},)
    )
    options = span(server, start, until, database="quarantined", collection="plain", columns="event,token")
    check({**options, "fullDocumentBeforeChange": "required"}, inserts, changes, code=51770 if older else 47)


def test_a_look_up_that_meets_a_view_by_now(server: str) -> None:
    """166 on 6.0: the collection is gone, and a view has its name. Older servers find nothing, and so do we."""
    with pymongo.MongoClient[dict[str, Any]](server) as client:
        db = client["quarantined"]
        db.c.drop()
        start = newest(server)
        db.c.insert_many([{"_id": number} for number in range(4)])
        db.c.update_many({"_id": {"$lt": 2}}, {"$set": {"n": 1}})
        db.other.insert_one({"_id": 1})
        until = newest(server)
        db.c.drop()
        db.create_collection("c", viewOn="other", pipeline=[])
        scope = ("quarantined", None)
        inserts = server_events(server, scope, start, until, pipeline=({"$match": {"operationType": "insert"}},))
        updates = server_events(server, scope, start, until, pipeline=({"$match": {"operationType": "update"}},))
        assert (len(inserts), len(updates)) == (5, 2)
        options = span(server, start, until, database="quarantined", columns="event,token", fullDocument="updateLookup")
        try:
            if server_is_new(server):
                check(options, inserts, updates, code=166)
                with pytest.raises(AssertionError, match="166"):  # the server's own stream ends there
                    server_events(server, scope, start, until, stage={"fullDocument": "updateLookup"})
            else:
                every = server_events(server, scope, start, until, stage={"fullDocument": "updateLookup"})
                aside: list[QuarantinedEvent] = []
                assert [bytes(row["event"]) for row in read(options, aside=aside)] == every
                assert (len(every), aside) == (7, [])
        finally:
            client.drop_database("quarantined")


def server_is_new(uri: str) -> bool:
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        return bool(client.server_info()["versionArray"][0] >= 6)
