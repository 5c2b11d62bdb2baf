"""A lake whose events depend on when they are read: ``$match`` on documents that are looked up, and Spark killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest

from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.spark.lake import verify
from tests.spark.lake_driving import PATIENCE_S, driver, options_for
from tests.spark.streams import newest

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

STEPS = ["commit.head", "commit.log", "commit.files"]
PAID = '[{"$match": {"fullDocument.status": "paid"}}]'


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_stream_with_lookups_goes_on_after_a_kill_at_each_step_of_a_commit(
    replica_set: ReplicaSet, tmp_path: Path, kills: int
) -> None:
    """A crash between the lake's commit and Spark's stopped the stream for good, since a replay was known by its rows,
    and those had changed: documents were changed between the crash and the replay. No crash test had a pipeline that
    looks anything up."""
    database, lake = f"lookups{kills}", tmp_path / "lake"
    start = newest(replica_set.uri)
    options = options_for(
        replica_set.uri, database, start, columns="event,token", fullDocument="updateLookup", pipeline=PAID
    )
    held: list[bytes] = []
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        orders = client[database]["orders"]
        for number in range(kills):
            orders.insert_many([{"_id": f"{number}-{n}", "n": n, "status": "paid"} for n in range(20)])
            orders.update_many({"_id": {"$regex": f"^{number}-"}}, {"$set": {"seen": True}})
            with driver(options, lake, "--die-at", STEPS[number % len(STEPS)], "1") as process:
                assert process.wait(PATIENCE_S) == -signal.SIGKILL, (tmp_path / "driver.log").read_text()[-3000:]
            orders.update_many({"_id": {"$regex": f"^{number}-"}, "n": {"$lt": 7}}, {"$set": {"status": "void"}})
            orders.delete_many({"_id": {"$regex": f"^{number}-"}, "n": {"$gt": 15}})
            now = list(lake_events(lake))
            assert now[: len(held)] == held, "what was committed stays"
            held = now
        orders.insert_one({"_id": "last", "status": "paid"})
    with driver(options, lake, "--available-now") as process:
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "driver.log").read_text()[-3000:]
    found = list(lake_events(lake))
    assert found[: len(held)] == held
    assert bson.decode(found[-1])["documentKey"] == {"_id": "last"}
    inserted = [bson.decode(event)["documentKey"]["_id"] for event in found if b"insert\0" in event]
    assert inserted == [f"{number}-{n}" for number in range(kills) for n in range(20)] + ["last"], "each of them once"
    assert verify(lake, full=True).problems == []
