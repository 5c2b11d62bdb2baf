"""The driver is killed again and again while it works; what arrives is the server's own stream, once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pymongo
import pytest
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet
from tests.spark.driver import follow
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
ROOT = Path(__file__).parents[2]
ROUNDS = 60  # of 28 events each
PATIENCE_S = 300


@contextmanager
def driver(options: dict[str, str], directory: Path, *, master: str = "local[2]") -> Iterator[subprocess.Popen[bytes]]:
    arguments = [json.dumps(options), str(directory / "checkpoint"), str(directory / "out"), master]
    log = directory / "driver.log"
    with log.open("ab") as output:
        # A group of its own, so that the JVM and the workers die with the driver as on a machine that loses power.
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.driver", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def batches(directory: Path) -> list[Path]:
    return sorted((directory / "out").glob("batch-*"))


def arrived(directory: Path) -> list[bytes]:
    """The events, by micro-batch and file: their names are in the stream's order."""
    files = [file for batch in batches(directory) for file in sorted(batch.glob("part-*.parquet"))]
    return [event for file in files for event in pq.read_table(file).column("event").to_pylist()]


def have_arrived(directory: Path, count: int) -> bool:
    """Whether so many events are there. A micro-batch that is written again takes its first files away meanwhile."""
    try:
        return len(arrived(directory)) >= count
    except FileNotFoundError:
        return False


def log_end(directory: Path) -> str:
    return (directory / "driver.log").read_text()[-3000:]


def wait_for(done: Callable[[], bool], process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert process.poll() is None, log_end(directory)
        assert time.monotonic() < deadline, log_end(directory)
        time.sleep(0.05)


class Burst(threading.Thread):
    """Inserts, updates, deletes and transactions, some four micro-batches of them."""

    def __init__(self, uri: str, database: str, first: int) -> None:
        super().__init__(daemon=True)
        self._uri, self._database, self._first = uri, database, first
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._write()
        except Exception as error:  # noqa: BLE001 - told by finish()
            self.error = error

    def _write(self) -> None:
        with pymongo.MongoClient[dict[str, Any]](self._uri) as client:
            collection = client[self._database]["orders"]
            for number in range(self._first, self._first + 20 * ROUNDS, 20):
                collection.insert_many([{"_id": number + i, "n": i, "pad": "x" * 200} for i in range(20)])
                collection.update_many({"_id": {"$gte": number, "$lt": number + 5}}, {"$inc": {"n": 1}})
                collection.delete_one({"_id": number + 6})
                with client.start_session() as session, session.start_transaction():
                    collection.insert_one({"_id": f"t{number}"}, session=session)
                    collection.replace_one({"_id": number + 7}, {"whole": True}, session=session)
                time.sleep(0.01)

    def finish(self) -> None:
        self.join()
        assert self.error is None, self.error


def check_through_kills(
    spark: SparkSession,
    replica_set: ReplicaSet,
    database: str,
    directory: Path,
    kills: int,
    *,
    more: dict[str, str],
    stage: dict[str, str],
) -> None:
    """Kill a query with the options ``more`` so many times while ``database`` is written to, and finish it in
    ``spark``. In the end its sink holds what the server's stream with the options ``stage`` gives."""
    rng = random.Random()
    start = newest(replica_set.uri)
    options = {
        "uri": replica_set.uri,
        "database": database,
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "columns": "event,token",
        "maxEventsPerTrigger": "400",
        **more,
    }
    for number in range(kills):
        before = len(batches(directory))
        burst = Burst(replica_set.uri, database, number * 20 * ROUNDS)
        burst.start()
        with driver(options, directory) as process:
            wait_for(lambda before=before: len(batches(directory)) > before, process, directory)
            time.sleep(rng.uniform(0, 1.5))
            os.killpg(process.pid, signal.SIGKILL)
        burst.finish()
    until = newest(replica_set.uri)
    expected = server_events(replica_set.uri, (database, None), start, until, stage=stage)
    query = follow(spark, options, directory / "checkpoint", directory / "out")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not have_arrived(directory, len(expected)):
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        query.stop()
    assert arrived(directory) == expected


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_after_kills_at_random_moments_the_sink_holds_the_servers_stream_once(
    spark: SparkSession, kills: int, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """With a sink of a user's own; the lake is also killed inside a commit."""
    database = f"crash{kills}"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database].create_collection("orders")
    check_through_kills(spark, replica_set, database, tmp_path, kills, more={}, stage={})
