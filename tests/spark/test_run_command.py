"""``tailrace run`` as a user starts it: processes, signals, exit codes, what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from tailrace.cli.main import main
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.read.archive.verification import verify as verify_archive
from tests.console.serving import ServedConsole, panel
from tests.spark.commands import PATIENCE_S, finished, tailrace
from tests.spark.streams import newest, server_events

#: Java's own options are left as they are: with the archive of classes a session costs half as much.
SPARK = "spark: {cores: 2, config: {spark.sql.shuffle.partitions: 2}}\n"
#: The panels of what a pipeline keeps, and the folders of its file below.
KEPT = {"lakes": "lake", "tables": "tables", "archives": "kept"}


def pipeline_file(directory: Path, database: str, more: str = SPARK) -> Path:
    path = directory / "pipeline.yaml"
    path.write_text(
        f"source: {{uri: '${{TEST_URI}}', database: {database}, startingFrom: oldest}}\n"
        f"lake: {{path: lake, columns: [event, token, wall_time]}}\n{more}"
    )
    return path


@pytest.mark.spark
@pytest.mark.mongod
def test_run_follows_the_stream_until_sigterm(replica_set: ReplicaSet, tmp_path: Path) -> None:
    start = newest(replica_set.uri)
    beside = "archive: {path: kept}\ntables: {path: tables, collections: runcommand.*}\n"
    path, database = pipeline_file(tmp_path, "runcommand", f"{SPARK}{beside}"), "runcommand"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database].orders.insert_many([{"n": n} for n in range(100)])
    until = newest(replica_set.uri)
    options = ("--progress", "json", "--metrics", address, "--console", "0")
    process = tailrace("run", str(path), *options, TEST_URI=replica_set.uri)
    watchdog = threading.Timer(PATIENCE_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    assert process.stderr is not None
    console = process.stderr.readline()
    first = json.loads(process.stdout.readline())
    watchdog.cancel()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as reply:
        served = reply.read().decode()
    shown = ServedConsole(console.removeprefix("tailrace: the console is at ").strip())
    places = {name: [(one["place"], one.get("error")) for one in panel(shown, name)["data"]] for name in KEPT}
    process.send_signal(signal.SIGTERM)
    code, _, err = finished(process)
    assert (code, first["events"]) == (0, 100), err
    for name in ("tailrace_query_active{", "tailrace_tables_tables ", 'tailrace_archive_segments_total{oplog="rs0"}'):
        assert name in served
    assert places == {name: [(str(tmp_path / folder), None)] for name, folder in KEPT.items()}
    assert first["lagMs"] >= 0
    assert err.startswith("Stopped. 100 events in 1 micro-batches were written to"), err
    assert list(lake_events(tmp_path / "lake")) == server_events(replica_set.uri, (database, None), start, until)
    (archived,) = verify_archive(tmp_path / "kept")
    assert archived.faults == []
    code, out, err = finished(tailrace("run", "--dry-run", str(path), TEST_URI=replica_set.uri))
    assert code == 0, err
    assert "continued from its checkpoint, at cluster time" in out
    assert "which has 100 events in 1 files" in out
    assert "1 tables are followed" in out
    pipeline_file(tmp_path, "otherdatabase")
    code, _, err = finished(tailrace("run", "--dry-run", str(path), TEST_URI=replica_set.uri))
    assert code != 0
    assert "belongs to another stream" in err


@pytest.mark.slow  # tests/unit/test_query_error.py: the sentence, and that PySpark's threads and Py4J add nothing to it
@pytest.mark.spark
@pytest.mark.mongod
def test_that_java_has_died_is_told_in_one_sentence(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """No test had killed only the JVM, which PySpark's own threads report in tracebacks."""
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
        (("--compact", "--verify"), "--compact and --verify cannot be used together"),
        (("--verify", "--available-now"), "--verify and --available-now cannot be used together"),
        (("--compact", "--accept-gap"), "--compact and --accept-gap cannot be used together"),
        (("--full",), "--full says how --verify works, but --verify is not given"),
    ],
)
def test_flags_that_say_different_things_are_told_before_anything_is_read(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one silently won: no test had given two of them."""
    assert main(["run", "missing.yaml", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"tailrace: {message}")


@pytest.mark.mongod
def test_what_is_wrong_is_told_in_one_sentence_without_starting_spark(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = pipeline_file(tmp_path, "nothing")
    cases = [
        (good, "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300&replicaSet=rs0", "127.0.0.1:1"),
        (good, "http://user:verysecret@host", "tailrace:"),
        (tmp_path / "missing.yaml", replica_set.uri, "cannot read"),
    ]
    (tmp_path / "wrong").mkdir()
    wrong = pipeline_file(tmp_path / "wrong", "nothing", "lakes: {}\n")
    cases.append((wrong, replica_set.uri, "unknown key 'lakes'. Did you mean 'lake'?"))
    started = []
    monkeypatch.setattr("tailrace.lake.spark.runtime.session.local_session", lambda *_, **__: started.append(True))
    for path, uri, expected in cases:
        monkeypatch.setenv("TEST_URI", uri)
        code = main(["run", str(path)])
        out, err = capsys.readouterr()
        assert (code, out) == (1, "")
        assert expected in err
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        assert "verysecret" not in err
        assert started == []


@pytest.mark.mongod
def test_the_seconds_that_spark_takes_to_start_are_told_of(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing was said for half a minute, and later the line went to Spark's log: here standard error is the file, as
    in a process of its own."""

    def no_java(*_: object, **__: object) -> None:
        raise UsageError("there is no Java")

    monkeypatch.setattr("tailrace.lake.spark.runtime.session.local_session", no_java)
    monkeypatch.setenv("TEST_URI", replica_set.uri)
    with open(2, "w", buffering=1, closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["run", str(pipeline_file(tmp_path, "nothing"))]) == 1
    begun, ended = capfd.readouterr().err.splitlines()
    assert begun == f"tailrace: starting Spark, to write {tmp_path / 'lake'}"
    assert ended == "tailrace: there is no Java."


@pytest.mark.mongod
def test_a_java_that_ends_at_once_is_a_sentence_with_the_place_of_its_log(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(builder: object) -> None:
        raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", ended)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TEST_URI", replica_set.uri)
    assert main(["run", str(pipeline_file(tmp_path, "nothing"))]) == 1
    said = capsys.readouterr().err
    assert said.startswith("tailrace: Spark's Java process has ended before it could be used. It needs memory")
    [log] = tmp_path.glob("tailrace-spark-*.log")
    assert said.endswith(f"Spark's log: {log}.\n")
