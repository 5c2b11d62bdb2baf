"""Exact images through real Spark, killed with its workers: the sink has the server's own stream, once."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.embedded import ReplicaSet
from tests.spark.streams import newest, server_events
from tests.spark.test_crash import ROUNDS, Burst, arrived, batches, driver, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
REQUIRED = {"fullDocument": "required", "fullDocumentBeforeChange": "required"}


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_after_kills_the_sink_holds_the_servers_images_once(
    kills: int, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    rng, database = random.Random(), f"exact_crash{kills}"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database].create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    start = newest(replica_set.uri)
    options = {
        "uri": replica_set.uri,
        "database": database,
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "columns": "event,token",
        "maxEventsPerTrigger": "400",
        "fullDocument": "exact",
        "fullDocumentBeforeChange": "exact",
        "images": str(tmp_path / "images"),
    }
    for number in range(kills):
        before = len(batches(tmp_path))
        burst = Burst(replica_set.uri, database, number * 20 * ROUNDS)
        burst.start()
        with driver(options, tmp_path) as process:
            wait_for(lambda before=before: len(batches(tmp_path)) > before, process, tmp_path)
            time.sleep(rng.uniform(0, 1.5))
            os.killpg(process.pid, signal.SIGKILL)
        burst.finish()
    until = newest(replica_set.uri)
    expected = server_events(replica_set.uri, (database, None), start, until, stage=REQUIRED)
    with driver(options, tmp_path) as process:
        wait_for(lambda: len(arrived(tmp_path)) >= len(expected), process, tmp_path)
    assert arrived(tmp_path) == expected
