"""``tailrace run`` and ``tailrace demo`` as a user starts them: processes, signals, exit codes, what they print."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.archive.verification import verify as verify_archive
from tailrace.cli.main import main
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.spark.lake import files, verify
from tests.spark.streams import newest, server_events

PATIENCE_S = 300
#: Java's own options are left as they are: with the archive of classes a session costs half as much.
SPARK = "spark: {cores: 2, config: {spark.sql.shuffle.partitions: 2}}\n"


def tailrace(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from tailrace.cli.main import main; raise SystemExit(main())", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def pipeline_file(directory: Path, database: str, more: str = SPARK) -> Path:
    path = directory / "pipeline.yaml"
    path.write_text(
        f"source: {{uri: '${{TEST_URI}}', database: {database}, startingFrom: oldest}}\n"
        f"lake: {{path: lake, columns: [event, token, wall_time]}}\n{more}"
    )
    return path


@pytest.mark.spark
@pytest.mark.mongod
def test_run_follows_the_stream_until_sigterm_and_goes_on_with_available_now(
    replica_set: ReplicaSet, tmp_path: Path
) -> None:
    start = newest(replica_set.uri)
    path, database = pipeline_file(tmp_path, "runcommand", f"{SPARK}archive: {{path: kept}}\n"), "runcommand"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database].orders.insert_many([{"n": n} for n in range(100)])
        flags = ("--progress", "json", "--partition-by", "hour")
        process = tailrace("run", str(path), *flags, TEST_URI=replica_set.uri)
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        watchdog.cancel()
        process.send_signal(signal.SIGTERM)
        code, _, err = finished(process)
        assert (code, first["events"]) == (0, 100), err
        assert first["lagMs"] >= 0
        assert err.startswith("Stopped. 100 events in 1 micro-batches came into"), err

        client[database].orders.update_many({}, {"$set": {"seen": True}})
    until = newest(replica_set.uri)
    # The flag wins over the file's trigger; no test had given both.
    pipeline_file(tmp_path, database, f"{SPARK}archive: {{path: kept}}\ntrigger: {{every: 1 second}}\n")
    code, out, err = finished(
        tailrace("run", str(path), "--available-now", "--progress", "none", TEST_URI=replica_set.uri)
    )
    assert (code, out) == (0, ""), err
    assert all("/hour=" in name for name in files(tmp_path / "lake")), "a lake keeps its partitions"
    assert "The end of the oplog is reached. 100 events" in err
    lake = tmp_path / "lake"
    assert list(lake_events(lake)) == server_events(replica_set.uri, (database, None), start, until)
    # The section archive has kept the oplog meanwhile, in both runs, and the second one could read it.
    (archived,) = verify_archive(tmp_path / "kept")
    assert archived.faults == []
    assert archived.until is not None
    assert archived.until >= until
    code, out, _ = finished(tailrace("run", str(path), "--verify", TEST_URI=replica_set.uri))
    assert code == 0
    assert "200 events in 2 files of 1 day: sound (order, counts and tokens; --full compares every byte)" in out
    code, out, _ = finished(tailrace("run", str(path), "--verify", "--full", TEST_URI=replica_set.uri))
    assert (code, out.rstrip().endswith(": sound")) == (0, True), out
    code, out, _ = finished(tailrace("run", str(path), "--compact", TEST_URI=replica_set.uri))
    assert (code, out.startswith("2 files became 1")) == (0, True)
    assert len(list(lake_events(lake))) == 200
    assert_no_other_stream_is_taken(pipeline_file(tmp_path, "second"), replica_set.uri)
    assert verify(lake).sound
    pipeline_file(tmp_path, database)
    for file in files(lake):
        Path(file).unlink()
    code, out, _ = finished(tailrace("run", str(path), "--verify", TEST_URI=replica_set.uri))
    assert code == 1
    assert "missing in the directory" in out


def assert_no_other_stream_is_taken(path: Path, uri: str) -> None:
    """A lake of another stream is told in one sentence."""
    code, _, err = finished(tailrace("run", str(path), "--available-now", TEST_URI=uri))
    assert code == 1
    assert "belongs to another stream" in err
    assert "Traceback" not in err


@pytest.mark.spark
@pytest.mark.mongod
def test_that_java_has_died_is_told_in_one_sentence(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """No test had killed the JVM alone, which PySpark's own threads tell in tracebacks."""
    path = pipeline_file(tmp_path, "javadies")
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.javadies.orders.insert_one({})
    process = tailrace("run", str(path), "--progress", "json", TEST_URI=replica_set.uri)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["events"] > 0
    for java in child_processes(process.pid, "java"):
        os.kill(java, signal.SIGKILL)
    code, _, err = finished(process)
    assert code == 1
    assert err.startswith("tailrace: Java, which runs Spark, has died, killed by SIGKILL."), err
    assert err.count("\n") == 1, err


def child_processes(parent: int, name: str) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command, _, rest = status.read_text().rpartition(")")
            if command.endswith(f"({name}") and int(rest.split()[1]) == parent:
                found.append(int(status.parent.name))
    assert found, f"{name} is no child of {parent}"
    return found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--compact", "--verify"), "--compact and --verify exclude each other"),
        (("--verify", "--available-now"), "--verify and --available-now exclude each other"),
        (("--compact", "--accept-gap"), "--compact and --accept-gap exclude each other"),
        (("--full",), "--full says how --verify works, and --verify is not given"),
    ],
)
def test_flags_that_say_different_things_are_told_before_anything_is_read(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No test had given two of them: the first one won in silence."""
    assert main(["run", "missing.yaml", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"tailrace: {message}")


@pytest.mark.mongod
def test_what_is_wrong_is_told_in_one_sentence_without_starting_spark(replica_set: ReplicaSet, tmp_path: Path) -> None:
    good = pipeline_file(tmp_path, "nothing")
    cases = [
        (good, "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300&replicaSet=rs0", "127.0.0.1:1"),
        (good, "http://user:verysecret@host", "tailrace:"),
        (tmp_path / "missing.yaml", replica_set.uri, "cannot read"),
    ]
    (tmp_path / "wrong").mkdir()
    wrong = pipeline_file(tmp_path / "wrong", "nothing", "lakes: {}\n")
    cases.append((wrong, replica_set.uri, "unknown key 'lakes'. Did you mean 'lake'?"))
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    java.chmod(0o755)
    for path, uri, expected in cases:
        code, out, err = finished(tailrace("run", str(path), TEST_URI=uri, JAVA_HOME=str(tmp_path)))
        assert (code, out) == (1, "")
        assert expected in err
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        assert "verysecret" not in err
        assert not (tmp_path / "started").exists()


@pytest.mark.spark
@pytest.mark.mongod
def test_the_demo_crashes_goes_on_and_finds_no_difference(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    process = tailrace("demo", "--seconds", "8", "--rate", "150", "--directory", str(directory))
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, out + err
    assert "Killed the Spark process (SIGKILL)" in out
    assert "went on from the checkpoint with micro-batch" in out
    assert "differences: 0 in " in out
    assert "differences: 0 between the tables and their collections" in out
    assert "shop.orders held 20 documents, as the server had then" in out
    assert f"lake = deltalake.DeltaTable('{directory}/lake').to_pyarrow_dataset()" in out
    assert verify(directory / "lake").problems == []
    query = out[out.index("SELECT") :].partition(";")[0]
    import deltalake
    import duckdb

    lake = deltalake.DeltaTable(str(directory / "lake")).to_pyarrow_dataset()
    assert lake is not None  # DuckDB finds it by its name
    # Python's client of DuckDB wants pytz for moments, so they stay in there.
    counted = duckdb.sql(f"SELECT collection, events FROM ({query})").fetchall()
    assert {row[0] for row in counted} == {"customers", "days", "orders", "stock"}
    assert sum(row[1] for row in counted) == len(list(lake_events(directory / "lake")))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.mongod
def test_the_demo_that_keeps_running_ends_well_when_it_is_interrupted(tmp_path: Path) -> None:
    """It was never run so; the shop got a second signal when its interpreter had given up its handlers, and the demo
    called that a failure."""
    directory = tmp_path / "demo"
    process = tailrace("demo", "--keep-running", "--no-crash", "--rate", "150", "--directory", str(directory))
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not list((directory / "lake").glob("day=*/*.parquet")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(5)  # some of the shop's day
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, out + err
    assert "Killed" not in out
    assert "differences: 0 in " in out
