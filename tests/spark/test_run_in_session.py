"""``tailrace run`` with the tests' session: how it uses its flags and its file. Processes: test_run_command.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.lake import files, verify
from tailrace.read.archive.verification import verify as verify_archive
from tests.consumer.brokers import KafkaBrokers
from tests.consumer.test_brokers import stored_in_kafka
from tests.spark.streams import newest, server_events
from tests.spark.test_run_command import pipeline_file

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
ARCHIVE = "archive: {path: kept}\n"
MESSAGES = (
    "messages:\n  runinsession: {{to: 'kafka://{servers}', collections: [runinsession.orders], topic: orders, "
    "startingFrom: oldest, pipeline: [{{$match: {{operationType: insert}}}}]}}\n"
)


def test_run_goes_on_with_available_now_and_says_what_the_lake_holds(
    replica_set: ReplicaSet, tailrace_run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    run = partial(tailrace_run, uri=replica_set.uri)
    start = newest(replica_set.uri)
    database, lake = "runinsession", tmp_path / "lake"
    brokers = KafkaBrokers("orders")
    path = pipeline_file(tmp_path, database, ARCHIVE + MESSAGES.format(servers=brokers.servers))
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database].orders.insert_many([{"n": n} for n in range(100)])
        code, out, err = run(path, "--available-now", "--partition-by", "hour")
        assert (code, out) == (0, ""), err
        assert "The end of the oplog is reached. 100 events" in err
        assert "100 changes became messages of runinsession" in err
        assert len(stored_in_kafka(brokers.servers, "orders", 100)) == 100
        # An error that ends the messages ends the run.
        elsewhere = {"position.deployment": "rs0/0123456789abcdef01234567"}
        client.tailrace.leases.update_one({"_id": "runinsession"}, {"$set": elsewhere})
        code, out, err = run(path)
        assert (code, out) == (1, "")
        assert "tailrace: messages.runinsession: the committed position is of another deployment" in err
        client.tailrace.leases.delete_one({"_id": "runinsession"})
        brokers.close()
        client[database].orders.update_many({}, {"$set": {"seen": True}})
    until = newest(replica_set.uri)
    # The flag wins over the file's trigger; no test had given both.
    pipeline_file(tmp_path, database, f"{ARCHIVE}trigger: {{every: 1 second}}\n")
    code, out, err = run(path, "--available-now")
    assert (code, out) == (0, ""), err
    assert all("/hour=" in name for name in files(lake)), "a lake keeps its partitions"
    hours = {Path(name).parent for name in files(lake)}  # two if an hour ended meanwhile
    assert "The end of the oplog is reached. 100 events" in err
    assert list(lake_events(lake)) == server_events(replica_set.uri, (database, None), start, until)
    # In both runs the section ``archive`` archived the oplog meanwhile, and the second one could read it.
    (archived,) = verify_archive(tmp_path / "kept")
    assert archived.faults == []
    assert archived.until is not None
    assert archived.until >= until
    code, out, _ = run(path, "--verify")
    assert code == 0
    assert re.search(r"200 events in 2 files of \d days?: sound \(order, counts and tokens; --full compares every", out)
    code, out, _ = run(path, "--verify", "--full")
    assert (code, out.rstrip().endswith(": sound")) == (0, True), out
    code, out, _ = run(path, "--compact")
    assert (code, len(hours) == 2 or out.startswith("2 files became 1")) == (0, True), out
    assert len(list(lake_events(lake))) == 200
    # A lake of another stream is reported in one sentence.
    code, _, err = run(pipeline_file(tmp_path, "second"), "--available-now")
    assert code == 1
    assert "belongs to another stream" in err
    assert "Traceback" not in err
    assert verify(lake).sound
    pipeline_file(tmp_path, database)
    for file in files(lake):
        Path(file).unlink()
    code, out, _ = run(path, "--verify")
    assert code == 1
    assert "missing in the directory" in out


def test_a_lake_is_changed_by_its_pipeline_file_and_its_stream_goes_on(
    replica_set: ReplicaSet,
    tailrace_run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start, database, lake = newest(replica_set.uri), "runchanged", tmp_path / "lake"
    path = pipeline_file(tmp_path, database)
    whole = path.read_text()
    narrow = whole.replace(f"database: {database},", f"database: {database}, collection: orders,")
    assert narrow != whole
    path.write_text(narrow)
    change = ["lake", "change", str(path)]
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database].orders.insert_many([{"n": n} for n in range(20)])
        client[database].other.insert_many([{"n": n} for n in range(30)])
        code, _, err = tailrace_run(path, "--available-now", uri=replica_set.uri)
        assert code == 0, err
        assert main(change) == 0
        assert "nothing to change" in capsys.readouterr().out
        path.write_text(whole.replace("wall_time]", "wall_time, document_key]"))
        code, _, err = tailrace_run(path, "--available-now", uri=replica_set.uri)
        assert code == 1
        assert "or change the lake: tailrace lake change" in err
        assert main([*change, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert f'settings.scope: "{database}.orders" becomes "{database}"\n' in out
        assert out.endswith("Nothing was changed.\n")
        with durable.locked(tmp_path / "lake.checkpoint" / "tailrace-run.lock"):
            assert main(change) == 1
        assert "another process writes the lake" in capsys.readouterr().err
        assert main(change) == 0
        out = capsys.readouterr().out
        assert "30 events added; 1 files took the place of 1\n" in out
        assert "lake.checkpoint.superseded-" in out
        client[database].other.delete_many({})
        until = newest(replica_set.uri)
    code, _, err = tailrace_run(path, "--available-now", uri=replica_set.uri)
    assert code == 0, err
    assert "30 events" in err
    assert list(lake_events(lake)) == server_events(replica_set.uri, (database, None), start, until)
    assert main(["lake", "verify", str(lake), "--full"]) == 0
    assert "change: columns, settings.scope, settings.scopeKind, on " in capsys.readouterr().out
