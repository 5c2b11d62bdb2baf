"""The lake on real Spark and a real MongoDB: killed at random moments and inside a commit.

Each driver costs 12 s of CPU time, most of it Java's. ``make test-landing`` has the kills at each step of a commit in
test_lake_lookups.py, and a Spark process that is killed while it writes a lake: the demo in test_run_command.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.demo.comparison import lake_events
from tailrace.demo.shop import Shop, work
from tailrace.embedded import ReplicaSet
from tailrace.lake import verify
from tailrace.lake.store.commit_log import CommitLog
from tests.spark.lake_driving import PATIENCE_S, driver, options_for
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod, pytest.mark.slow]


@contextmanager
def at_work(uri: str, database: str) -> Iterator[None]:
    """The demo's shop, running beside the test: about 200 events a second of all kinds, including transactions."""
    stop = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            with pymongo.MongoClient[dict[str, Any]](uri) as client:
                shop = Shop(client[database], seed=1)
                shop.open()
                work(shop, seconds=None, rate=100, stopped=stop.is_set)
        except Exception as error:  # noqa: BLE001  told by the test's own thread
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert failures == []


def commits(lake: Path) -> int:
    return max(0, CommitLog(lake).head().number) if (lake / "_tailrace" / "lake.json").exists() else 0


def wait_for_commits(process: subprocess.Popen[bytes], lake: Path, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while commits(lake) < number:
        assert process.poll() is None, (lake.parent / "driver.log").read_text()[-3000:]
        assert time.monotonic() < deadline, (lake.parent / "driver.log").read_text()[-3000:]
        time.sleep(0.05)


def test_after_kills_at_random_moments_and_inside_a_commit_the_lake_is_the_servers_stream(
    replica_set: ReplicaSet, tmp_path: Path
) -> None:
    seed = int(os.environ.get("TAILRACE_SEED", time.time_ns() % 10**6))
    print(f"TAILRACE_SEED={seed}")
    moments = random.Random(seed)
    database, lake = "lakecrash", tmp_path / "lake"
    start = newest(replica_set.uri)
    options = options_for(replica_set.uri, database, start, columns="event,token", maxEventsPerTrigger="400")
    with at_work(replica_set.uri, database):
        for _ in range(5):
            with driver(options, lake) as process:
                wait_for_commits(process, lake, commits(lake) + 1)
                time.sleep(moments.uniform(0, 0.8))
                os.killpg(process.pid, signal.SIGKILL)
        for step in ("commit.log", "commit.head"):
            with driver(options, lake, "--die-at", step, "1") as process:
                assert process.wait(PATIENCE_S) == -signal.SIGKILL, (tmp_path / "driver.log").read_text()[-3000:]
    until = newest(replica_set.uri)
    with driver({**options, "maxEventsPerTrigger": "20000"}, lake, "--available-now") as process:
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "driver.log").read_text()[-3000:]

    found = list(lake_events(lake))
    expected = server_events(replica_set.uri, (database, None), start, until)
    assert len(found) == len(expected) > 500
    assert found == expected, f"seed {seed}"
    assert verify(lake).problems == []
    assert list((lake / "_staging").iterdir()) == []
