"""What happens to the deployment under a stream: elections in the middle of it, and an oplog that moved on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.spark.streams import Batches, available_now, newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


class SteppingDown(Batches):
    """Makes the primary step down while micro-batches are read, which begins when the sink first touches one."""

    def __init__(self, replica_set: ReplicaSet) -> None:
        super().__init__()
        self._replica_set = replica_set
        self.steps = 0

    def take(self, frame: DataFrame, batch_id: int) -> None:
        if batch_id in (1, 3):
            thread = threading.Thread(target=self._replica_set.step_down)
            thread.start()
            super().take(frame, batch_id)
            thread.join()
            self.steps += 1
        else:
            super().take(frame, batch_id)


LIMIT = amount(1500, 5000)


def test_a_step_down_in_the_middle_of_a_micro_batch_changes_nothing(
    spark: SparkSession, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    running = start_replica_set(3)
    start = newest(running.uri)
    with pymongo.MongoClient[dict[str, Any]](running.uri, w="majority") as client:
        for first in range(0, 4 * LIMIT, LIMIT):
            client.d.c.insert_many([{"_id": i, "pad": "x" * 1000} for i in range(first, first + LIMIT)])
    until = newest(running.uri)
    options = {
        "uri": running.uri,
        "database": "d",
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "maxEventsPerTrigger": str(LIMIT),
        "partitions": "2",
    }
    batches = SteppingDown(running)
    available_now(spark, options, tmp_path, batches=batches)
    assert batches.steps == 2
    with pymongo.MongoClient[dict[str, Any]](running.uri) as client:
        client.admin.command("ping")
        host, port = client.primary or ("", 0)
    assert batches.events == server_events(f"mongodb://{host}:{port}", ("d", None), start, until)


def fill_until_truncated(uri: str, kept: ClusterTime) -> None:
    """Write until the oplog no longer holds the entry at ``kept``."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        oplog = client.local["oplog.rs"]
        for number in range(400):
            client.filler.c.insert_many([{"pad": "x" * 100_000} for _ in range(20)])
            oldest = oplog.find_one(sort=[("$natural", 1)])
            assert oldest is not None
            if ClusterTime.from_timestamp(oldest["ts"]) > kept:
                return
            if number % 10 == 9:
                client.admin.command("fsync")
    pytest.fail("the oplog was not truncated")


def test_a_start_or_a_checkpoint_before_the_oldest_entry_is_286_and_says_what_to_do(
    spark: SparkSession, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    running = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    start = newest(running.uri)
    options = {"uri": running.uri, "database": "d"}
    at_start = {"startAtOperationTime": f"{start.seconds},{start.increment}"}
    available_now(spark, {**options, **at_start}, tmp_path / "old")
    fill_until_truncated(running.uri, newest(running.uri))
    with pytest.raises(StreamingQueryException, match="286 ChangeStreamHistoryLost") as caught:
        available_now(spark, {**options, **at_start}, tmp_path / "new")
    assert "the oldest entry is" in str(caught.value)
    with pytest.raises(StreamingQueryException, match="286 ChangeStreamHistoryLost") as caught:
        available_now(spark, options, tmp_path / "old")
    assert "new checkpointLocation" in str(caught.value)
    with pytest.raises(Exception, match="286 ChangeStreamHistoryLost"):
        spark.read.format("tailrace").options(**options, **at_start).load().count()
