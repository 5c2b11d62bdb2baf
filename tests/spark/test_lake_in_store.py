"""The lake in an object store on real Spark and a real MongoDB, killed at moments and inside a commit.

Each driver costs 12 s of CPU time. Without Spark the same kills are in tests/tables/test_lake_in_store.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars
import pymongo
import pytest

from tailrace.embedded import ReplicaSet
from tailrace.lake import verify
from tailrace.lake.store.commit_log import CommitLog
from tests.spark.lake_driving import PATIENCE_S, driver, options_for
from tests.spark.streams import newest, server_events
from tests.spark.test_lake_crash import at_work
from tests.tables.object_server import ObjectServer

pytestmark = [pytest.mark.spark, pytest.mark.mongod, pytest.mark.slow]


def test_after_kills_the_lake_is_the_servers_stream(
    replica_set: ReplicaSet, object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    seed = int(os.environ.get("TAILRACE_SEED", time.time_ns() % 10**6))
    print(f"TAILRACE_SEED={seed}")
    moments = random.Random(seed)
    database, state, log = "lakestorecrash", tmp_path / "state", tmp_path / "driver.log"
    root = object_store.place(prefix, state)
    environment = {("AWS_ENDPOINT_URL" if n == "AWS_ENDPOINT" else n): v for n, v in object_store.environment().items()}
    start = newest(replica_set.uri)
    options = options_for(replica_set.uri, database, start, columns="event,token", maxEventsPerTrigger="400")

    def commits() -> int:
        return max(0, CommitLog(root).head().number) if (root / "_tailrace" / "lake.json").exists() else 0

    def begun(*arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        uri = object_store.uri(prefix)
        return driver(options, tmp_path / "lake", "--state", str(state), *arguments, uri=uri, **environment)

    with at_work(replica_set.uri, database):
        for _ in range(2):
            with begun() as process:
                wanted, deadline = commits() + 3, time.monotonic() + PATIENCE_S
                while commits() < wanted:
                    assert process.poll() is None, log.read_text()[-3000:]
                    assert time.monotonic() < deadline, log.read_text()[-3000:]
                    time.sleep(0.05)
                time.sleep(moments.uniform(0, 0.8))
                os.killpg(process.pid, signal.SIGKILL)
        with begun("--die-at", "commit.log", "2") as process:
            assert process.wait(PATIENCE_S) == -signal.SIGKILL, log.read_text()[-3000:]
    until = newest(replica_set.uri)
    options["maxEventsPerTrigger"] = "20000"
    with begun("--available-now") as process:
        assert process.wait(PATIENCE_S) == 0, log.read_text()[-3000:]

    found = polars.scan_delta(root.as_uri(), storage_options=dict(root.bucket.options)).sort("token").collect()
    expected = server_events(replica_set.uri, (database, None), start, until)
    assert len(found) == len(expected) > 200
    assert found["event"].to_list() == expected, f"seed {seed}"
    assert verify(root, full=True).problems == []
    held = {one.name for one in root.objects() if one.name.startswith("day=")}
    live = CommitLog(root).state()
    assert held <= set(live.files) | set(live.removed)


def test_a_pipeline_file_and_every_flag_that_reads_it(
    replica_set: ReplicaSet, object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    environment = {("AWS_ENDPOINT_URL" if n == "AWS_ENDPOINT" else n): v for n, v in object_store.environment().items()}
    uri, file = object_store.uri(prefix), tmp_path / "pipeline.yaml"
    file.write_text(
        f"source: {{uri: '{replica_set.uri}', database: lakestorefile, startingFrom: snapshot}}\n"
        f"lake: {{path: '{uri}', state: ./state, partitionBy: [day, collection]}}\ntrigger: {{availableNow: true}}\n"
    )

    def run(*flags: str) -> str:
        command = [sys.executable, "-m", "tailrace", "run", str(file), *flags]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    with pymongo.MongoClient[Any](replica_set.uri, w="majority") as client:
        client.drop_database("lakestorefile")
        client["lakestorefile"]["a"].insert_many([{"_id": number} for number in range(20)])
        client["lakestorefile"]["b"].insert_many([{"_id": number} for number in range(10)])
        assert f"a new lake at {uri}" in run("--dry-run")
        run()
        assert "30 events" in run("--verify", "--full")
        client["lakestorefile"]["a"].delete_one({"_id": 3})
    assert f"the lake at {uri}, which has 30 events" in run("--dry-run")
    run()
    run("--compact")
    assert "31 events" in run("--verify", "--full")
    options = dict(object_store.place(prefix, tmp_path / "x").bucket.options)
    rows = polars.scan_delta(uri, storage_options=options).sort("token").collect()
    assert rows["operation_type"].to_list() == ["snapshot"] * 30 + ["delete"]
    assert set(rows["collection"].to_list()) == {"a", "b"}
