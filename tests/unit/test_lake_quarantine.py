"""Events that a lake puts aside: in the commit of their micro-batch, once, whenever its process is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import bson
import pyarrow.parquet as pq
import pytest

from tailrace.cli.main import main
from tailrace.errors import SinkError
from tailrace.event.quarantined import QuarantinedEvent
from tailrace.lake import quarantine
from tailrace.lake.commit_log import CommitLog
from tailrace.lake.committer import abort_batch, commit_batch
from tailrace.lake.compaction import compact
from tailrace.lake.erasure import drop_days, erase
from tailrace.lake.identity import open_lake
from tailrace.lake.manifest import Commit, PlannedRange, StagedFile
from tailrace.lake.progress import GrowthWatch
from tailrace.lake.status import lake_status
from tailrace.lake.verification import verify
from tailrace.oplog.cluster_time import ClusterTime
from tests.unit.lake_events import MIDNIGHT, STREAM, begin, make, numbers_in, token
from tests.unit.test_lake_commits import die_at
from tests.unit.test_lake_erasure import LAKE_COLUMNS, event
from tests.unit.test_lake_erasure import stage as stage_rows

STEPS = ("commit.files", "commit.log", "commit.head", "commit.quarantine")


def aside(numbers: Sequence[int]) -> list[QuarantinedEvent]:
    return [QuarantinedEvent.of_document(event(number), f"reason {number}", 10334) for number in numbers]


def stage(root: Path, rows: Sequence[int], put_aside: Sequence[int]) -> tuple[StagedFile, ...]:
    files = stage_rows(root, rows) if rows else ()
    return (*files, quarantine.stage(root, aside(put_aside))) if put_aside else files


def planned(first: int, last: int) -> PlannedRange:
    return PlannedRange(ClusterTime.of(MIDNIGHT + first, 0), ClusterTime.of(MIDNIGHT + last, 9))


def put(root: Path, claim: str, batch: int, rows: Sequence[int], put_aside: Sequence[int]) -> Commit | None:
    every = [*rows, *put_aside]
    return commit_batch(root, claim, batch, planned(min(every), max(every)), stage(root, rows, put_aside))


def held(root: Path) -> list[int]:
    """The numbers of the events in quarantine, by reading the directory as anybody can."""
    paths = sorted((root / "_quarantine").glob("*.parquet"))
    return sorted(int(row["reason"].split()[1]) for path in paths for row in pq.read_table(path).to_pylist())


def begun(root: Path) -> str:
    checkpoint = root.with_name("checkpoint")
    claim = open_lake(root, checkpoint, STREAM, LAKE_COLUMNS).claim
    begin(checkpoint)
    return claim


def test_a_commit_brings_rows_and_what_was_put_aside(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = begun(root)
    watch = GrowthWatch(root)
    assert put(root, claim, 0, range(1, 5), [2_000, 5]) is not None
    assert held(root) == [5, 2_000]
    assert numbers_in(root) == [1, 2, 3, 4]
    (path,) = (root / "_quarantine").iterdir()
    row = pq.read_table(path).to_pylist()[0]
    assert row["event"] == event(5)
    assert (row["token"], row["code"], row["namespace"]) == (token(5), 10334, bson_namespace(event(5)))
    assert (row["cluster_time"]["t"], row["cluster_time"]["i"]) == (MIDNIGHT + 5, 1)
    (growth,) = watch.look()
    assert (growth.batch_events, growth.quarantined) == (4, 2)
    assert "2 in quarantine" in str(growth)
    found = verify(root, full=True)
    assert (found.problems, found.quarantined, found.rows) == ([], 2, 4)
    assert lake_status(root).quarantined == 2
    # The lake has come to the last event, although that was put aside: a fresh checkpoint begins behind it.
    assert open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS).after == token(2_000)


def bson_namespace(raw: bytes) -> str:
    ns = bson.decode(raw)["ns"]
    return f"{ns['db']}.{ns['coll']}"


def test_a_micro_batch_may_consist_of_what_was_put_aside(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = begun(root)
    watch = GrowthWatch(root)
    commit = put(root, claim, 0, [], [7, 8])
    assert commit is not None
    assert (commit.first_token, commit.last_token, commit.rows) == (token(7), token(8), 0)
    assert [growth.quarantined for growth in watch.look()] == [2]
    assert put(root, claim, 0, [], [7, 8]) is None, "the same micro-batch again"
    assert put(root, claim, 1, [9], []) is not None
    assert (held(root), numbers_in(root)) == ([7, 8], [9])
    assert verify(root, full=True).problems == []
    with pytest.raises(SinkError, match="behind the lake"):
        put(root, claim, 2, [], [6])
    compact(root)
    assert (held(root), verify(root).leftovers) == ([7, 8], 0)
    make_fresh = open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS)
    assert make_fresh.after == token(9)
    assert (held(root), verify(root).leftovers) == ([7, 8], 0)
    assert list((root / "_staging").iterdir()) == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("goes_on", ["replay", "fresh checkpoint", "abort"])
def test_killed_at_any_step_of_a_commit_an_event_is_there_once(step: str, goes_on: str, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, [1, 2], [3]) is not None
    files = stage(root, [4, 6], [5])
    assert die_at(step, 1, lambda: commit_batch(root, claim, 1, planned(4, 6), files)) == -signal.SIGKILL
    committed = step != "commit.files"
    assert lake_status(root).quarantined == (2 if committed else 1)
    assert verify(root).problems == []
    if goes_on == "abort":  # Spark calls it also where the commit has happened
        abort_batch(root, files)
        assert held(root) == ([3, 5] if committed else [3])
    elif goes_on == "fresh checkpoint":
        opening = open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS)
        assert opening.after == (token(6) if committed else token(3))
        begin(tmp_path / "fresh")
        claim = opening.claim
    if not (goes_on == "fresh checkpoint" and committed):
        put(root, claim, 1, [4, 6], [5])  # Spark gives the micro-batch again
    assert put(root, claim, 2, [7], [8]) is not None
    assert (held(root), numbers_in(root)) == ([3, 5, 8], [1, 2, 4, 6, 7])
    assert verify(root, full=True).problems == []
    open_lake(root, tmp_path / "last", STREAM, LAKE_COLUMNS)
    assert (held(root), list((root / "_staging").iterdir())) == ([3, 5, 8], [])


def test_a_commit_that_names_something_else_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, [1], [2]) is not None
    path = CommitLog(root).layout.commit(1)
    (name,) = (p.name for p in (root / "_quarantine").iterdir())
    path.write_text(path.read_text().replace(f"_quarantine/{name}", "_quarantine/../../x.parquet"))
    (root / "_tailrace" / "head.json").unlink()
    with pytest.raises(SinkError, match="cannot be a file of the quarantine"):
        lake_status(root)
    staged = stage(root, [], [3])
    quarantine.waiting(CommitLog(root).layout, staged[0].name).unlink()


def test_events_are_erased_from_the_quarantine_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, range(1, 9), [10, 11, 20]) is not None
    assert put(root, claim, 1, range(86_400, 86_409), [86_410]) is not None
    match = json.dumps({"fullDocument.who": "anna@example.com"})
    assert main(["lake", "erase", str(root), "--match", match]) == 0
    assert "3 events erased from the quarantine" in capsys.readouterr().out
    assert held(root) == [11]
    assert drop_days(root, date(2026, 11, 22)).quarantined == 1
    assert held(root) == []
    assert verify(root, full=True).problems == []
    assert main(["lake", "status", str(root)]) == 0
    assert "quarantine" not in capsys.readouterr().out
    assert put(root, claim, 2, [], [86_500]) is not None
    assert main(["lake", "status", str(root)]) == 0
    assert "1 event in quarantine" in capsys.readouterr().out
    assert main(["lake", "verify", str(root)]) == 0
    assert "1 event in quarantine" in capsys.readouterr().out
    assert erase(root, {"documentKey._id": 86_500}).quarantined == 1


def test_what_is_in_quarantine_alone_is_shown_and_erased(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lake without rows was taken for one of which everything was selected. Every test of the quarantine had rows
    beside it, and every test of a dry run had no quarantine."""
    root = tmp_path / "lake"
    claim = begun(root)
    assert erase(root, {"documentKey._id": 7}).quarantined == 0
    assert put(root, claim, 0, [], [7, 8]) is not None
    match = json.dumps({"documentKey._id": 7})
    assert main(["lake", "erase", str(root), "--match", match, "--dry-run"]) == 0
    assert "1 event would be erased from the quarantine" in capsys.readouterr().out
    assert held(root) == [7, 8]
    assert main(["lake", "erase", str(root), "--match", match]) == 0
    assert held(root) == [8]
    assert verify(root, full=True).problems == []


def test_a_lake_without_a_quarantine_is_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    make(root, tmp_path / "checkpoint")
    content: dict[str, Any] = lake_status(root).to_json()
    assert content["quarantined"] == 0
    assert not (root / "_quarantine").exists()
