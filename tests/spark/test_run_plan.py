"""``tailrace run --dry-run``: what it says is true, and it leaves no trace. It does not start Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest

from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.consumer.test_run_messages import lose_history

pytestmark = pytest.mark.mongod
BESIDE = "archive: {path: kept, keep: 2 days}\ntables: {path: tables, collections: [DB.*]}\n"


def plan_of(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    uri: str,
    source: str,
    more: str = "",
    *arguments: str,
) -> list[dict[str, Any]]:
    path = directory / "pipeline.yaml"
    path.write_text(f"source: {{uri: '{uri}', {source}}}\nlake: {{path: lake}}\n{more}")
    code = main(["run", "--dry-run", "--progress", "json", str(path), *arguments])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert [one.name for one in directory.iterdir()] == ["pipeline.yaml"], "a plan writes nothing"
    return [json.loads(line) for line in printed.out.splitlines()]


def said(lines: list[dict[str, Any]], part: str) -> str:
    return "\n".join(line["what"] for line in lines if line["part"] == part)


def test_a_plan_names_what_is_read_and_written_and_what_it_costs(
    replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.runplan.orders.insert_many([{"n": n} for n in range(50)])
        before = client.admin.command("serverStatus")["opcounters"]
        source = "database: runplan, startingFrom: snapshot, fullDocument: updateLookup"
        lines = plan_of(tmp_path, capsys, replica_set.uri, source, BESIDE.replace("DB", "runplan"))
        after = client.admin.command("serverStatus")["opcounters"]
    assert all(after[name] == before[name] for name in ("insert", "update", "delete"))
    assert said(lines, "reads").startswith("runplan of mongodb://")
    assert "50 documents of 1 collections" in said(lines, "reads")
    written = said(lines, "writes")
    assert f"a new lake at {tmp_path / 'lake'}, by day" in written
    assert f"an archive of the whole oplog at {tmp_path / 'kept'}, kept for 48.0 hours" in written
    assert "there are none yet; runplan.orders is copied first: 50 documents" in written
    assert "each update costs a find by _id" in said(lines, "costs")
    [load] = [line for line in lines if "entriesBehind" in line]
    assert load["entriesBehind"] == 0, "a snapshot begins at the end of the oplog"


def test_the_whole_oplog_is_estimated_by_its_size(
    replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.runplan.counted.insert_one({})
        least = client.local.command("collStats", "oplog.rs")["count"]
        catalogue = ("--iceberg", f"sqlite:///{tmp_path / 'catalog.db'}")
        lines = plan_of(tmp_path, capsys, replica_set.uri, "startingFrom: oldest", "", *catalogue)
        most = client.local.command("collStats", "oplog.rs")["count"]
    [load] = [line for line in lines if "entriesBehind" in line]
    assert least <= load["entriesBehind"] <= most
    assert "from the oldest entry" in said(lines, "reads")
    assert "the Iceberg table lake.events in the catalogue 'tailrace'" in said(lines, "writes")


def test_a_pattern_that_matches_nothing_is_told(
    replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = BESIDE.replace("DB", "nosuchdatabase")
    lines = plan_of(tmp_path, capsys, replica_set.uri, "database: runplan", beside)
    assert said(lines, "warning") == "no collection matches nosuchdatabase.* now"


def test_what_the_run_would_refuse_the_plan_refuses(
    replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "other").touch()
    path = tmp_path / "pipeline.yaml"
    path.write_text("source: {uri: '" + replica_set.uri + "'}\nlake: {path: lake}\n")
    assert main(["run", "--dry-run", str(path)]) != 0
    assert "is not empty and not a lake of Tailrace" in capsys.readouterr().err
    path.write_text("source: {uri: '" + replica_set.uri + "', resumeAfter: 82ff}\nlake: {path: new}\n")
    assert main(["run", "--dry-run", str(path)]) != 0
    assert "15 Overflow" in capsys.readouterr().err
    assert main(["run", "--dry-run", "--compact", str(path)]) != 0
    assert "cannot be used together" in capsys.readouterr().err


def test_a_cluster_is_counted_shard_by_shard(
    sharded_cluster: ShardedCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    router = sharded_cluster.router
    router.create_database("runplan", "shard1")
    try:
        router.insert_many("runplan.orders", [{"_id": number} for number in range(20)])
        beside = BESIDE.replace("DB", "runplan")
        lines = plan_of(tmp_path, capsys, sharded_cluster.uri, "database: runplan", beside)
    finally:
        router.drop_database("runplan")
    assert lines[0]["oplogs"] == ["shard0", "shard1", "shard2"] or len(lines[0]["oplogs"]) == 3
    assert "runplan.orders is copied first: 20 documents" in said(lines, "writes")


def test_messages_are_planned_each_with_its_position_and_its_cost(
    replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = "{to: 'redis://u:s3cret@localhost:1', collections: [runplan.letters], topic: t, leases: runplan.leases"
    messages = f"messages:\n  copied: {entry}, startingFrom: snapshot}}\n  old: {entry}, startingFrom: oldest}}\n"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.runplan.letters.insert_many([{"n": n} for n in range(5)])
        lines = plan_of(tmp_path, capsys, replica_set.uri, "database: runplan", messages)
        text = json.dumps(lines)
        assert "s3cret" not in text
        assert "messages.copied: 5 documents of 1 collections" in said(lines, "reads")
        assert "messages.old: runplan.letters, a new position, from the oldest entry" in said(lines, "reads")
        written = (
            "messages.old: events as JSON, to redis://localhost:1, topic t; lease and position: 'old' in runplan.leases"
        )
        assert written in said(lines, "writes")
        [cost] = [line for line in lines if line.get("messages") == "old" and line["part"] == "costs"]
        assert cost["entriesBehind"] > 0
        assert "messages.copied: to catch up, 0 entries" in said(lines, "costs")
        assert client.runplan.list_collection_names(filter={"name": "leases"}) == [], "a plan writes nothing"
        lost = {"_id": "old", "owner": None, "version": 1, "position": {"at": bson.Timestamp(1_000_000_000, 1)}}
        client.runplan.leases.insert_one(lost)
        path = tmp_path / "pipeline.yaml"
        lose_history(monkeypatch)
        assert main(["run", "--dry-run", str(path)]) != 0
        refused = capsys.readouterr().err
        assert "messages.old: " in refused
        assert "onHistoryLost: snapshot publishes the documents again" in refused
        path.write_text(path.read_text().replace("startingFrom: oldest", "startingFrom: oldest, onHistoryLost: gap"))
        assert main(["run", "--dry-run", str(path)]) == 0
        assert "a gap is noted" in capsys.readouterr().out
        client.drop_database("runplan")
