"""Which version's events a lake holds: the log keeps for ever the server version with which each micro-batch was
planned. No test had looked at a lake across an upgrade: nothing in it said which version its events are of, and a new
checkpoint began at a whole token, which the two versions write differently."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import bson
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.cli.main import main
from tailrace.core.event.resume_token import EVENT, ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.spark.planning.input_partition import OplogSlice, SnapshotSlice
from tailrace.lake.spark.store.source import after_edge, edge_of
from tailrace.lake.store import commit_log
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.delta_log import versions_of
from tailrace.lake.store.erasure import drop_days
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.manifest import Gap, WrittenVersion
from tailrace.lake.store.status import lake_status
from tests.unit.lake_events import COLUMNS, STREAM, as_spark_plans, begin, make, numbers_in, planned_for, put, stage

#: The version with which each micro-batch of ten events is planned; "" stands for an earlier release of Tailrace.
UPGRADED = ("", "5.0.4", "5.0.4", "6.0.27", "6.0.27", "7.0.28")


def fill(root: Path, checkpoint: Path, versions: tuple[str, ...]) -> list[WrittenVersion]:
    """A lake with a micro-batch of each version; what it has to say of them."""
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    notes: list[WrittenVersion] = []
    for number, version in enumerate(versions):
        files = stage(root, range(number * 10, number * 10 + 10), stem=str(number))
        planned = replace(as_spark_plans(root, number, planned_for(files)), server_version=version)
        put(root, claim, number, files, planned)
        if version and (not notes or notes[-1].version != version):
            notes.append(WrittenVersion(version, planned.after))
    return notes


def test_the_log_and_the_status_say_whose_events_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "lake"
    notes = fill(root, tmp_path / "checkpoint", UPGRADED)
    assert [note.version for note in notes] == ["5.0.4", "6.0.27", "7.0.28"]
    assert list(lake_status(root).versions) == notes
    planned = [commit.planned.server_version for commit in CommitLog(root).commits() if commit.planned is not None]
    assert planned == list(UPGRADED)
    head = CommitLog(root).head().newest
    assert head is not None
    assert head.planned.server_version == "7.0.28"
    configuration = DeltaTable(str(root)).metadata().configuration
    assert list(versions_of(configuration, root)) == notes, "what other readers see"
    assert main(["lake", "status", str(root)]) == 0
    said = capsys.readouterr().out
    for note in notes:
        assert f"  events of MongoDB {note.version}: after cluster time {note.after}\n" in said
    assert main(["lake", "status", str(root), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["serverVersions"]
    assert found == [
        {"version": note.version, "after": {"t": note.after.seconds, "i": note.after.increment}} for note in notes
    ]
    assert main(["lake", "verify", str(root), "--full"]) == 0


def test_only_the_first_events_and_a_change_of_the_version_write_the_tables_metadata(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    fill(root, tmp_path / "checkpoint", UPGRADED)
    log = CommitLog(root)
    wrote = [b'"metaData"' in log.layout.commit(number).read_bytes() for number in range(len(UPGRADED) + 1)]
    assert wrote == [True, True, True, False, True, False, True]


def test_the_versions_outlive_the_commits_gaps_and_erasures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 3)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 1)
    root = tmp_path / "lake"
    notes = fill(root, tmp_path / "checkpoint", UPGRADED)
    assert not CommitLog(root).layout.commit(1).exists()
    assert list(lake_status(root).versions) == notes
    until = ClusterTime.of(1_900_000_000, 1)
    gap = Gap(None, ClusterTime(1), until)
    open_lake(root, tmp_path / "second", STREAM, COLUMNS, gap=gap)
    assert list(lake_status(root).versions) == notes
    assert drop_days(root, date(2026, 11, 22)).rows == 60
    assert numbers_in(root) == []
    assert list(lake_status(root).versions) == notes
    assert versions_of(DeltaTable(str(root)).metadata().configuration, root) == tuple(notes)


def test_a_note_that_is_none_is_damage(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="the table is damaged"):
        versions_of({"tailrace.serverVersions": '[{"version": 7, "after": [1, 1]}]'}, "the table")


def tokens_of(version: int, times: range, operations: int) -> list[str]:
    """The tokens of transactions, as a server of the version gives them."""
    key = bson.encode({"documentKey": {"_id": 1}} if version == 1 else {"operationType": "insert", "documentKey": {}})
    return [
        ResumeToken(
            ClusterTime.of(time, 1),
            version=version,
            token_type=EVENT,
            uuid=bytes(16),
            event_identifier=key,
            txn_op_index=number,
        ).data
        for time in times
        for number in range(operations)
    ]


@pytest.mark.parametrize(("older", "newer"), [(1, 1), (1, 2), (2, 1)])
def test_a_new_checkpoint_after_an_upgrade_gives_no_event_twice(older: int, newer: int) -> None:
    """The token of an event of 6.0 sorts before the one that 7.0 gives it: the last transaction came twice."""
    had = tokens_of(older, range(1, 5), 3)
    again = tokens_of(newer, range(3, 8), 3)
    part = OplogSlice(ClusterTime.of(2, 9), ClusterTime.of(9, 1), "7.0.28", newer)
    batches = [pa.record_batch({"token": pa.array(again[low : low + 4])}) for low in range(0, len(again), 4)]
    given = [row for batch in after_edge(edge_of(had[-1], part), iter(batches)) for row in batch.column(0).to_pylist()]
    assert given == tokens_of(newer, range(5, 8), 3)


def test_a_copy_whose_events_have_one_time_is_cut_by_token() -> None:
    tokens = tokens_of(2, range(1, 2), 6)
    part = SnapshotSlice(ClusterTime.of(1, 1), ())
    batch = pa.record_batch({"token": pa.array(tokens)})
    (given,) = after_edge(edge_of(tokens[2], part), iter([batch]))
    assert given.column(0).to_pylist() == tokens[3:]
    assert list(after_edge(edge_of(None, part), iter([batch]))) == [batch]
