"""The lake in an object store, on real Spark and a real MongoDB, killed at random moments and inside a commit.

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
from tailrace.lake import change_lake, verify
from tailrace.lake.store.commit_log import CommitLog
from tests.spark.lake_driving import PATIENCE_S, driver, options_for
from tests.spark.sparkless_lake import fill
from tests.spark.streams import newest, server_events
from tests.spark.test_lake_crash import at_work
from tests.tables.object_server import ObjectServer, as_given

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

    found = polars.scan_delta(root.as_uri(), storage_options=as_given(root)).sort("token").collect()
    expected = server_events(replica_set.uri, (database, None), start, until)
    assert len(found) == len(expected) > 200
    assert found["event"].to_list() == expected, f"seed {seed}"
    assert verify(root, full=True).problems == []
    held = {one.name for one in root.objects() if one.name.startswith("day=")}
    live = CommitLog(root).state()
    assert held <= set(live.files) | set(live.removed)


_READ = """
import sys
from tailrace.lake import read
from tailrace.spark import local_session

spark = local_session("reads", cores=2, fast_start=True)
one, other, empty = (read(spark, place) for place in sys.argv[1:])
assert one.dtypes == other.dtypes == empty.dtypes, (one.dtypes, other.dtypes, empty.dtypes)
assert dict(other.dtypes)["full_document"] == "variant" and dict(other.dtypes)["hour"] == "int", other.dtypes
wanted = [name if kind != "variant" else f"to_json({name})" for name, kind in one.dtypes]
rows = [frame.orderBy("token").selectExpr(*wanted).collect() for frame in (one, other)]
assert rows[0] == rows[1] and len(rows[0]) == 60, (len(rows[0]), len(rows[1]))
assert other.where("hour >= 0 AND operation_type = 'insert'").count() == 60 and empty.count() == 0
print("the same")
"""


def test_spark_reads_the_rows_of_a_lake_in_a_directory(
    replica_set: ReplicaSet, object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    """The reader without Spark: tests/tables/test_lake_in_store.py."""
    environment = {("AWS_ENDPOINT_URL" if n == "AWS_ENDPOINT" else n): v for n, v in object_store.environment().items()}
    database = "lakestoreread"
    with pymongo.MongoClient[Any](replica_set.uri, w="majority") as client:
        client.drop_database(database)
        start = newest(replica_set.uri)
        for number in range(60):
            client[database][f"n{number % 3}"].insert_one({"_id": number, "v": {"x": [number, None, "é"]}})
    options = options_for(replica_set.uri, database, start, maxEventsPerTrigger="25", documents="variant")
    places: list[Any] = [tmp_path / "lake", object_store.place(prefix, tmp_path / "s")]
    for place in places:
        fill(options, place, newest(replica_set.uri), partition_by=("day", "hour", "collection"))
    empty = object_store.place(f"{prefix}/empty", tmp_path / "e")
    nothing = options_for(replica_set.uri, "nothingever", start, documents="variant")
    fill(nothing, empty, newest(replica_set.uri), partition_by=("day", "hour", "collection"))
    done = subprocess.run(
        [sys.executable, "-c", _READ, *map(str, [*places, empty])],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr[-3000:]


_READ_CHANGED = """
import sys
from tailrace.lake import read
from tailrace.spark import local_session

spark = local_session("reads", cores=2, fast_start=True)
for version, count in ((int(sys.argv[3]), 20), (None, 60)):
    one, other = (read(spark, place, version=version) for place in sys.argv[1:3])
    kinds = dict(one.dtypes)
    assert kinds == dict(other.dtypes), (one.dtypes, other.dtypes)
    assert kinds["full_document"] == ("variant" if version is None else "string"), kinds
    wanted = [name if kind != "variant" else f"to_json({name})" for name, kind in sorted(one.dtypes)]
    rows = [frame.orderBy("token").selectExpr(*wanted).collect() for frame in (one, other)]
    assert rows[0] == rows[1] and len(rows[0]) == count, (version, len(rows[0]), len(rows[1]))
print("the same")
"""


def test_spark_reads_a_changed_lake_before_and_after(
    replica_set: ReplicaSet, object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    """As Spark's tasks read it, without Spark: tests/tables/test_lake_changed_in_store.py."""
    environment = {("AWS_ENDPOINT_URL" if n == "AWS_ENDPOINT" else n): v for n, v in object_store.environment().items()}
    database = "lakestorechanged"
    with pymongo.MongoClient[Any](replica_set.uri, w="majority") as client:
        client.drop_database(database)
        start = newest(replica_set.uri)
        for number in range(60):
            client[database][f"n{number % 3}"].insert_one({"_id": number, "v": {"x": [number, None, "é"]}})
    options = options_for(replica_set.uri, database, start, maxEventsPerTrigger="25")
    until, places = newest(replica_set.uri), [tmp_path / "lake", object_store.place(prefix, tmp_path / "s")]
    versions = set()
    for place in places:
        fill({**options, "collection": "n0"}, place, until)  # type: ignore[arg-type]
        versions.add(CommitLog(place).head().number)
        change_lake({**options, "documents": "variant"}, place)
    (version,) = versions
    done = subprocess.run(
        [sys.executable, "-c", _READ_CHANGED, *map(str, [*places, version])],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr[-3000:]


def test_a_pipeline_file_and_every_flag_that_reads_it(
    replica_set: ReplicaSet, object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    environment = {("AWS_ENDPOINT_URL" if n == "AWS_ENDPOINT" else n): v for n, v in object_store.environment().items()}
    uri, file = object_store.uri(prefix), tmp_path / "pipeline.yaml"
    file.write_text(
        f"source: {{uri: '{replica_set.uri}', database: lakestorefile, startingFrom: snapshot,\n"
        "  pipeline: [{$addFields: {fullDocument.q: {$divide: [1, $fullDocument.d]}}}]}\n"
        f"lake: {{path: '{uri}', state: ./state, partitionBy: [day, collection], onError: quarantine}}\n"
        "trigger: {availableNow: true}\n"
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
        client["lakestorefile"]["a"].insert_one({"_id": 99, "d": 0})  # it is put aside
        client["lakestorefile"]["a"].delete_one({"_id": 3})
    assert f"the lake at {uri}, which has 30 events" in run("--dry-run")
    run()
    run("--compact")
    found = run("--verify", "--full")
    assert "31 events" in found
    assert "1 event in quarantine" in found
    options = dict(object_store.place(prefix, tmp_path / "x").bucket.options)
    rows = polars.scan_delta(uri, storage_options=options).sort("token").collect()
    assert rows["operation_type"].to_list() == ["snapshot"] * 30 + ["delete"]
    assert set(rows["collection"].to_list()) == {"a", "b"}
