"""What the progress of a query says about its stream: lag, the oplog that is left, rows by operation; and
Prometheus."""

from __future__ import annotations

import json
import logging
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pyspark.sql import SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.monitoring import MetricsListener, backlog_of, counted, rows_by_operation
from tailrace.lake.spark.planning.backlog import Backlog, backlog_in, worst
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.store.stream import write_stream
from tests.spark.streams import newest


def write(uri: str, database: str) -> None:
    with pymongo.MongoClient[Any](uri) as client:
        orders = client[database]["orders"]
        orders.insert_many([{"_id": number, "pad": "x" * 1000} for number in range(30)])
        orders.update_many({"_id": {"$lt": 10}}, {"$set": {"paid": True}})
        orders.delete_many({"_id": {"$gte": 25}})


def options_of(uri: str, database: str, after: ClusterTime, **more: str) -> dict[str, str]:
    start = after.tick()
    return {"uri": uri, "database": database, "startAtOperationTime": f"{start.seconds},{start.increment}", **more}


def summed(query: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for progress in query.recentProgress:
        for kind, count in rows_by_operation(progress).items():
            found[kind] = found.get(kind, 0) + count
    return found


EXPECTED = {"insert": 30, "update": 10, "delete": 5}


@pytest.mark.spark
@pytest.mark.mongod
def test_progress_says_lag_and_rows_by_operation(spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path) -> None:
    database = "monitored"
    start = newest(replica_set.uri)
    write(replica_set.uri, database)
    listener = MetricsListener()
    spark.streams.addListener(listener)
    try:
        options = options_of(replica_set.uri, database, start, maxEventsPerTrigger="20")
        rows = counted(spark.readStream.format("tailrace").options(**options).load())
        query = (
            rows.writeStream.format("noop")
            .queryName("orders")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert summed(query) == EXPECTED
        found = [backlog_of(progress) for progress in query.recentProgress]
        known = [one for one in found if one is not None]
        assert known
        assert all(one.bytes is not None and one.seconds >= 0 for one in known)
        lake = write_stream(spark, options, tmp_path / "lake", available_now=True)
        lake.awaitTermination()
        assert summed(lake) == EXPECTED
        with listener.serve("127.0.0.1", 0) as url:
            text = scraped(url, lambda said: len(re.findall(r'operation="delete",query="[^"]+"} 5.0', said)) == 2)
        assert 'tailrace_query_rows_total{operation="insert",query="orders"} 30.0' in text
        assert 'tailrace_query_lag_seconds{query="orders"}' in text
        assert 'tailrace_query_lag_bytes{query="orders"}' in text
    finally:
        spark.streams.removeListener(listener)
        with pymongo.MongoClient[Any](replica_set.uri) as client:
            client.drop_database(database)


def scraped(url: str, done: Callable[[str], bool]) -> str:
    """Spark tells its listeners a little later."""
    deadline = time.monotonic() + 300
    while True:
        with urllib.request.urlopen(url) as answer:
            text: str = answer.read().decode()
        if done(text):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.1)


@pytest.mark.mongod
def test_a_deployment_says_how_much_is_unread_and_left(replica_set: ReplicaSet) -> None:
    deployment = open_deployment(parse({"uri": replica_set.uri, "database": "any"}))
    try:
        present = deployment.newest()
        now = deployment.backlog(present)
        assert now.seconds <= 5
        assert now.seconds_left is None, "nothing was removed from the oplog of a young replica set"
        assert not now.in_danger
        behind = deployment.backlog(ClusterTime.of(deployment.oldest().seconds, 0))
        assert behind.bytes is not None
        assert now.bytes is not None
        assert behind.bytes >= now.bytes
        oplog = deployment.oplogs[0]
        oldest = ClusterTime.of(present.seconds - 100, 1)
        oplog.source = _Cut(oldest, present)  # type: ignore[assignment]
        late = deployment.backlog(ClusterTime.of(present.seconds - 60, 0))
        assert late.seconds_left == 40
        assert late.seconds >= 60
        assert late.in_danger
        assert "Keep an archive" in late.warning()
    finally:
        deployment.close()


class _Cut:
    """An oplog whose old entries are gone."""

    def __init__(self, oldest: ClusterTime, newest: ClusterTime) -> None:
        self._oldest, self._newest = oldest, newest

    def newest(self) -> ClusterTime:
        return self._newest

    def oldest(self) -> tuple[ClusterTime, bool]:
        return self._oldest, False


class _Progress:
    """Spark's report, as far as it is used."""

    def __init__(self, backlog: Backlog | None, count: int = 0, number: int = 1, name: str | None = None) -> None:
        text = json.dumps({"clusterTime": {}, **({} if backlog is None else backlog.to_json())})
        self.id, self.runId, self.name, self.batchDuration = str(number), f"run {number}", name, 1500
        self.sources = [type("Source", (), {"latestOffset": text})()]
        self.observedMetrics = {"tailrace": type("Row", (), {"asDict": lambda _: {"insert": count, "events": count}})()}


def test_a_query_that_the_oplog_is_about_to_overtake_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    listener = MetricsListener()
    with caplog.at_level(logging.WARNING, "tailrace.spark"):
        for backlog in (Backlog(5, 10, 100), Backlog(80, 10, 20), Backlog(81, 10, 19), None, Backlog(3, 1, 97)):
            listener.add(_Progress(backlog, 2))  # type: ignore[arg-type]
        assert len(caplog.records) == 1
        listener.add(_Progress(Backlog(80, 10, 20)))  # type: ignore[arg-type]
    assert len(caplog.records) == 2
    (query,) = listener.snapshot()
    assert (query.batches, query.rows["insert"], query.seconds) == (6, 10, 1.5)


class _Event:
    """The beginning or the end of a run, as far as it is used."""

    def __init__(self, id_: str, run: str, name: str | None = None) -> None:
        self.id, self.runId, self.name = id_, run, name


def test_queries_that_follow_one_another_under_one_name_are_one_series() -> None:
    """A second checkpoint has a second id, which led to two series of the same name, for which Prometheus refuses the
    whole answer. One query after another had not been tried. Spark may also report a run's end after the next one has
    begun."""
    listener = MetricsListener()
    listener.onQueryStarted(_Event("1", "run 1", "orders"))  # type: ignore[arg-type]
    listener.add(_Progress(Backlog(5, 10, 100), 2, name="orders"))  # type: ignore[arg-type]
    listener.onQueryStarted(_Event("2", "run 2", "orders"))  # type: ignore[arg-type]
    listener.onQueryTerminated(_Event("1", "run 1"))  # type: ignore[arg-type]
    listener.add(_Progress(Backlog(5, 10, 100), 3, number=2, name="orders"))  # type: ignore[arg-type]
    (query,) = listener.snapshot()
    assert (query.name, query.batches, query.rows["insert"], query.active) == ("orders", 2, 5, True)
    listener.onQueryTerminated(_Event("2", "run 2"))  # type: ignore[arg-type]
    (query,) = listener.snapshot()
    assert not query.active


def test_what_is_not_said_is_not_known() -> None:
    assert backlog_in("null") is None
    assert backlog_in('{"clusterTime": 5}') is None
    assert backlog_in(None) is None
    assert worst([]) is None
    found = worst([Backlog(5, None, None), Backlog(3, 10, 50)])
    assert found == Backlog(5, 10, 50)
    assert not Backlog(10**6, None, None).in_danger
