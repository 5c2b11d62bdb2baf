"""The option ``archive``: streams, batch reads and lakes that begin before the oplog does, on real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pyspark.sql import SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost
from tailrace.lake import verify
from tailrace.lake.spark.store.change import change_lake
from tailrace.lake.spark.store.pipeline_file import load
from tailrace.lake.spark.store.stream import write_stream
from tailrace.read.archive.outline import ArchiveOutline
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.connection import Connection
from tailrace.read.source.outline import OplogOutline
from tests.differential.test_archive_live import archive_now, archiving, overtake, wait_for
from tests.spark.sparkless_lake import fill
from tests.spark.streams import available_now, newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


def work(client: MongoClient[dict[str, Any]], database: str, rounds: int) -> None:
    orders = client[database]["orders"]
    for number in range(rounds):
        orders.insert_many([{"_id": f"{number}.{n}", "n": n, "count": n, "ts": "x" * 300} for n in range(40)])
        orders.update_many({"n": {"$lt": 10}}, {"$inc": {"n": 1}})
        with client.start_session() as session, session.start_transaction():
            orders.delete_one({"_id": f"{number}.1"}, session=session)
            orders.insert_many([{"_id": f"t{number}.{n}"} for n in range(3)], session=session)
        client[database]["other"].insert_one({"_id": number})
    orders.rename("old_orders")
    orders.insert_one({"_id": "after the rename"})


@dataclass
class Overtaken:
    """A replica set whose oplog no longer holds ``start``, and the archive that does. ``events``: those of the server
    after ``start``, up to ``until``; some of them are only in the oplog. ``short`` is an archive that ends before the
    oplog begins."""

    uri: str
    archive: Path
    short: Path
    start: ClusterTime
    until: ClusterTime
    events: list[bytes]

    @property
    def options(self) -> dict[str, str]:
        start = self.start.tick()
        return {
            "uri": self.uri,
            "database": "shop",
            "archive": str(self.archive),
            "startAtOperationTime": f"{start.seconds},{start.increment}",
        }


@pytest.fixture(scope="module")
def overtaken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overtaken]:
    folder = tmp_path_factory.mktemp("archived") / "archive"
    with ReplicaSet(1, oplog_size_mb=8, arguments=("--syncdelay", "1")) as replica_set:
        with (
            archiving(replica_set.uri, folder) as recorder,
            MongoClient[dict[str, Any]](replica_set.uri) as client,
            MongoClient[RawBSONDocument](replica_set.uri, document_class=RawBSONDocument) as raw,
        ):
            start = newest(replica_set.uri)
            with raw.shop.watch(max_await_time_ms=200) as native:
                work(client, "shop", 5)
                early = drained(native)
            archive_now(replica_set.uri, folder.with_name("short"))
            overtake(replica_set.uri, start, recorder)
            wait_for(lambda: ArchiveSource(folder).newest() > start)
        middle = newest(replica_set.uri)
        with MongoClient[dict[str, Any]](replica_set.uri) as client:
            client.shop.late.insert_many([{"_id": number} for number in range(100)])
        until = newest(replica_set.uri)
        late = server_events(replica_set.uri, ("shop", None), middle, until)
        assert len(late) == 100
        assert len(early) > 250
        yield Overtaken(replica_set.uri, folder, folder.with_name("short"), start, until, early + late)


def drained(stream: Any) -> list[bytes]:
    events, quiet = [], 0
    while quiet < 3:
        event = stream.try_next()
        quiet = quiet + 1 if event is None else 0
        if event is not None:
            events.append(bytes(event.raw))
    return events


# Without a limit it begins in the archive in the tests of checkpoints and lakes below.
@pytest.mark.parametrize(
    "limit",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"maxEventsPerTrigger": "70"},
        pytest.param({"maxBytesPerTrigger": "50k"}, marks=pytest.mark.slow),
    ],
)
def test_a_stream_begins_in_the_archive_and_goes_on_in_the_oplog(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path, limit: dict[str, str]
) -> None:
    got = available_now(spark, {**overtaken.options, **limit}, tmp_path / "checkpoint")
    assert got.events == overtaken.events
    assert max(got.sizes) <= int(limit.get("maxEventsPerTrigger", "1000000"))
    assert len(got.sizes) > 2 or not limit


def test_a_checkpoint_that_the_oplog_has_overtaken_goes_on_with_the_archive(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path
) -> None:
    """The option is no part of the stream's identity: the archive is the way out of 286."""
    first = available_now(
        spark,
        {**overtaken.options, "maxEventsPerTrigger": "50"},
        tmp_path / "checkpoint",
    )
    assert first.events == overtaken.events
    for kind in ("offsets", "commits"):
        for path in (tmp_path / "checkpoint" / kind).iterdir():
            if path.name.strip(".").partition(".")[0].isdigit() and int(path.name.strip(".").partition(".")[0]) > 2:
                path.unlink()
    without = {name: value for name, value in overtaken.options.items() if name != "archive"}
    with pytest.raises(Exception, match="286"):
        available_now(spark, without, tmp_path / "checkpoint")
    rest = available_now(spark, overtaken.options, tmp_path / "checkpoint")
    assert overtaken.events[-len(rest.events) :] == rest.events
    assert 0 < len(rest.events) < len(overtaken.events)


def test_a_batch_read_takes_the_archive_too(spark: SparkSession, overtaken: Overtaken) -> None:
    frame = spark.read.format("tailrace").options(**overtaken.options, columns="event,token", partitions="3").load()
    assert [bytes(row.event) for row in frame.collect()] == overtaken.events


def test_an_invalidate_in_the_archive_ends_the_stream(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path
) -> None:
    options = {**overtaken.options, "collection": "orders"}
    got = available_now(spark, options, tmp_path / "checkpoint")
    kinds = [RawBSONDocument(event)["operationType"] for event in got.events]
    assert kinds[-2:] == ["rename", "invalidate"]
    assert kinds.count("rename") == 1


def test_a_lake_of_a_pipeline_file_begins_in_the_archive(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path
) -> None:
    (tmp_path / "archive").symlink_to(overtaken.archive)
    start = overtaken.start.tick()
    (tmp_path / "pipeline.yaml").write_text(
        f"source:\n  uri: {overtaken.uri}\n  database: shop\n  archive: archive\n"
        f"  startAtOperationTime: '{start.seconds},{start.increment}'\nlake:\n  path: lake\n"
    )
    settings = load(tmp_path / "pipeline.yaml")
    query = write_stream(spark, settings.source, settings.lake, available_now=True)
    query.awaitTermination()
    assert list(lake_events(settings.lake)) == overtaken.events


def test_a_lake_takes_a_collection_in_from_the_archive(overtaken: Overtaken, tmp_path: Path) -> None:
    wider = {**overtaken.options, "columns": "event,token"}
    old = {**wider, "pipeline": json.dumps([{"$match": {"ns.coll": "other"}}])}
    lake, fresh = tmp_path / "lake", tmp_path / "fresh"
    fill(old, lake, overtaken.until)
    without = {name: value for name, value in wider.items() if name != "archive"}
    for archive in ({}, {"archive": str(overtaken.short)}):
        with pytest.raises(ChangeStreamHistoryLost):
            change_lake({**without, **archive}, lake)
    assert 0 < len(list(lake_events(lake))) < len(overtaken.events)
    report = change_lake(wider, lake)
    assert (report.since, report.until) == (overtaken.start, overtaken.until)
    assert list(lake_events(lake)) == overtaken.events
    assert verify(lake, full=True).problems == []
    fill(wider, fresh, overtaken.until)
    assert list(lake_events(fresh)) == overtaken.events


def test_a_hole_between_archive_and_oplog_is_named_with_both_ends(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path
) -> None:
    options = {**overtaken.options, "archive": str(overtaken.short)}
    end = ArchiveSource(overtaken.short).newest()
    with pytest.raises(Exception, match="286") as caught:
        available_now(spark, options, tmp_path / "checkpoint")
    assert str(end) in str(caught.value)
    # What needs no archive is not refused.
    options.pop("startAtOperationTime")
    assert available_now(spark, options, tmp_path / "another").events == []


def test_what_is_no_archive_or_that_of_a_cluster_is_refused(
    spark: SparkSession, overtaken: Overtaken, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="there is no archive at"):
        available_now(spark, {**overtaken.options, "archive": str(tmp_path / "no")}, tmp_path / "checkpoint")


@pytest.mark.parametrize("scope", ["shop", "shop.orders", "shop.other", ""])
def test_an_archive_is_outlined_as_the_oplog_is(replica_set: ReplicaSet, tmp_path: Path, scope: str) -> None:
    """Events, entries and ends of the same range, counted by the server and in the archive."""
    start = newest(replica_set.uri)
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database("shop")
        work(client, "shop", 4)
        client.shop.command("applyOps", [{"op": "n", "ns": "", "o": {}}])
        client.shop.orders.drop()
        client.drop_database("shop")
        end = newest(replica_set.uri)
        archive_now(replica_set.uri, tmp_path / "archive")
        watched = Scope.parse(scope) if scope else Scope.cluster()
        live = OplogOutline(Connection(client), watched, (6, 0))
        archived = ArchiveOutline(ArchiveSource(tmp_path / "archive"), watched)
        counts = {}
        for name, outline in (("live", live), ("archive", archived)):
            buckets = list(outline.buckets(start, end))  # type: ignore[attr-defined]
            assert all(left.last < right.first for left, right in pairwise(buckets))
            single = [one for bucket in buckets for one in outline.entries(bucket)]  # type: ignore[attr-defined]
            assert sum(bucket.events for bucket in buckets) == sum(one.events for one in single)
            counts[name] = [(one.first, one.events) for one in single]
        assert counts["archive"] == counts["live"]
        assert len(counts["live"]) >= 4
        for after, until in [(start, end), *pairwise(time for time, _ in counts["live"])]:
            ends = [
                outline.first_invalidating(after, until, show_migration_events=False)  # type: ignore[attr-defined]
                for outline in (live, archived)
            ]
            assert ends[0] == ends[1]
