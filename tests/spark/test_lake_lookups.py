"""A lake whose events depend on when they are read, with ``$match`` on looked-up documents, and whose writer is
killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.lake import verify
from tailrace.lake.spark.store.stream import write_stream
from tests.spark.dying_sink import dying_sink
from tests.spark.lake_driving import PATIENCE_S, driver, options_for
from tests.spark.streams import newest

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

STEPS = ["commit.head", "commit.log", "commit.files"]
PAID = '[{"$match": {"fullDocument.status": "paid"}}]'


class Lookups:
    """A collection of which a stream looks up the documents, and its lake."""

    def __init__(self, uri: str, database: str, lake: Path) -> None:
        self.lake, self._uri, self._database = lake, uri, database
        self.options = options_for(
            uri, database, newest(uri), columns="event,token", fullDocument="updateLookup", pipeline=PAID
        )

    def through(self, kills: int, die: Callable[[str], None], go_on: Callable[[], None]) -> None:
        """Documents change after each ``die``, before the next run. In the end each insert is there once, and what was
        committed stays."""
        held: list[bytes] = []
        with pymongo.MongoClient[dict[str, Any]](self._uri) as client:
            orders = client[self._database]["orders"]
            for number in range(kills):
                orders.insert_many([{"_id": f"{number}-{n}", "n": n, "status": "paid"} for n in range(20)])
                orders.update_many({"_id": {"$regex": f"^{number}-"}}, {"$set": {"seen": True}})
                die(STEPS[number % len(STEPS)])
                orders.update_many({"_id": {"$regex": f"^{number}-"}, "n": {"$lt": 7}}, {"$set": {"status": "void"}})
                orders.delete_many({"_id": {"$regex": f"^{number}-"}, "n": {"$gt": 15}})
                now = list(lake_events(self.lake))
                assert now[: len(held)] == held, "what was committed stays"
                held = now
            orders.insert_one({"_id": "last", "status": "paid"})
        go_on()
        found = list(lake_events(self.lake))
        assert found[: len(held)] == held
        assert bson.decode(found[-1])["documentKey"] == {"_id": "last"}
        inserted = [bson.decode(event)["documentKey"]["_id"] for event in found if b"insert\0" in event]
        assert inserted == [f"{number}-{n}" for number in range(kills) for n in range(20)] + ["last"], "each once"
        assert verify(self.lake, full=True).problems == []


def test_a_stream_with_lookups_goes_on_after_its_commit_was_killed_at_each_step(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """A crash between the lake's commit and Spark's stopped the stream for good: a replay was recognised by its rows,
    which differed if documents changed between the crash and the replay. No crash test had a pipeline with look-ups."""
    lookups = Lookups(replica_set.uri, "lookups", tmp_path / "lake")

    def die(step: str) -> None:
        query = write_stream(spark, lookups.options, lookups.lake, sink=dying_sink(step, 1))
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(PATIENCE_S)
        assert not query.isActive

    def go_on() -> None:
        assert write_stream(spark, lookups.options, lookups.lake, available_now=True).awaitTermination(PATIENCE_S)

    lookups.through(len(STEPS), die, go_on)


@pytest.mark.slow
def test_a_stream_with_lookups_goes_on_after_its_driver_was_killed_at_each_step_of_a_commit(
    replica_set: ReplicaSet, tmp_path: Path
) -> None:
    lookups = Lookups(replica_set.uri, "lookupsdriver", tmp_path / "lake")

    def die(step: str) -> None:
        with driver(lookups.options, lookups.lake, "--die-at", step, "1") as process:
            assert process.wait(PATIENCE_S) == -signal.SIGKILL, (tmp_path / "driver.log").read_text()[-3000:]

    def go_on() -> None:
        with driver(lookups.options, lookups.lake, "--available-now") as process:
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "driver.log").read_text()[-3000:]

    lookups.through(20, die, go_on)
