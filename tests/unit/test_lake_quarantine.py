"""Events that a lake puts aside: in the commit of their micro-batch, once, whenever the process is killed."""

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

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, UsageError
from tailrace.lake import quarantine_files
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import abort_batch, commit_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import drop_days, erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.layout import LakeLayout
from tailrace.lake.store.manifest import Commit, PlannedRange, StagedFile
from tailrace.lake.store.progress import GrowthWatch
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tests.unit.lake_events import MIDNIGHT, STREAM, as_spark_plans, begin, make, numbers_in, token
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
    return PlannedRange(ClusterTime.of(MIDNIGHT + first - 1, 9), ClusterTime.of(MIDNIGHT + last, 9))


def put(root: Path, claim: str, batch: int, rows: Sequence[int], put_aside: Sequence[int]) -> Commit | None:
    every = [*rows, *put_aside]
    range_ = as_spark_plans(root, batch, planned(min(every), max(every)))
    return commit_batch(root, claim, batch, range_, stage(root, rows, put_aside))


def held(root: Path) -> list[int]:
    """The numbers of the events in quarantine, read from the directory as anybody could."""
    paths = sorted((root / "_quarantine").glob("*.parquet"))
    return sorted(int(row["reason"].split()[1]) for path in paths for row in pq.read_table(path).to_pylist())


def listed(root: Path) -> list[int]:
    """The same by the list of what counts, which has an order."""
    paths = quarantine_files(root)
    return [int(row["reason"].split()[1]) for path in paths for row in pq.read_table(path).to_pylist()]


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
    # The lake has reached the last event, although that was put aside: a fresh checkpoint begins after it.
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


@pytest.mark.long
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
    assert listed(root) == ([3, 5] if committed else [3])
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


def test_only_files_that_count_are_listed_also_while_they_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was moved to its place between two looks was in neither: no test had a program that commits come
    between. ``lake status`` then told too few."""
    root = tmp_path / "lake"
    with pytest.raises(UsageError, match="is not a lake"):
        quarantine_files(root)
    claim = begun(root)
    assert quarantine_files(root) == []
    assert put(root, claim, 0, [1], [2, 3]) is not None
    (root / "_quarantine" / "x.txt").write_bytes(b"")
    stage(root, [], [4])
    assert listed(root) == [2, 3]
    assert die_at("commit.log", 1, lambda: put(root, claim, 1, [5], [6])) == -signal.SIGKILL
    log = CommitLog(root)
    newest = log.newest_batch(log.head())
    find = quarantine.waiting

    def late(layout: LakeLayout, name: str) -> Any:
        """The next program to commit comes first."""
        monkeypatch.setattr(quarantine, "waiting", find)
        quarantine.settle(log.layout, newest)
        return find(layout, name)

    monkeypatch.setattr(quarantine, "waiting", late)
    assert quarantine.rows_in(quarantine.files_of(log.layout, newest)) == 3
    assert listed(root) == held(root) == [2, 3, 6]


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
    """A lake without rows was taken for one in which everything was selected. Every test of the quarantine had rows
    too, and no test of a dry run had a quarantine."""
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


def files_of(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "_quarantine").iterdir())


def many(root: Path) -> str:
    """Six micro-batches of one row and two events put aside. Gives the claim."""
    claim = begun(root)
    for number in range(6):
        first = 3 * number
        assert put(root, claim, number, [first], [first + 1, first + 2]) is not None
    return claim


MANY = [n for n in range(18) if n % 3]


def test_compaction_merges_the_quarantines_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were never merged: no test had compacted a lake with more than one."""
    root = tmp_path / "lake"
    claim = many(root)
    names = files_of(root)
    rows = [row for name in names for row in pq.read_table(root / "_quarantine" / name).to_pylist()]
    assert main(["lake", "compact", str(root)]) == 0
    assert "in the quarantine, 6 files became 1" in capsys.readouterr().out
    (merged,) = files_of(root)
    assert merged[:16] == names[0][:16], "it sorts where the first did"
    assert pq.read_table(root / "_quarantine" / merged).to_pylist() == rows
    assert (held(root), lake_status(root).quarantined) == (MANY, 12)
    assert verify(root, full=True).problems == []
    assert main(["lake", "compact", str(root)]) == 0
    assert "quarantine" not in capsys.readouterr().out
    assert put(root, claim, 6, [18], [19]) is not None
    assert compact(root).aside_before == 2
    assert erase(root, {"documentKey._id": 4}).quarantined == 1
    assert held(root) == [n for n in (*MANY, 19) if n != 4]
    large = (root / "_quarantine" / files_of(root)[0]).stat().st_size
    assert put(root, claim, 7, [20], [21]) is not None
    assert compact(root, target_bytes=large).aside_before == 0, "a large file is not merged again and again"
    assert list((root / "_staging").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("step", ["merged", "noted", "placed", "replaced"])
@pytest.mark.parametrize("goes_on", ["compact", "commit", "fresh checkpoint", "erase"])
def test_killed_at_any_step_of_a_merge_an_event_is_there_once(step: str, goes_on: str, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = many(root)
    assert die_at(f"quarantine.{step}", 1, lambda: compact(root)) == -signal.SIGKILL
    assert lake_status(root).quarantined == 12
    assert listed(root) == MANY
    assert verify(root).quarantined == 12
    expected = MANY
    if goes_on == "compact":
        compact(root)
    elif goes_on == "commit":
        assert put(root, claim, 6, [18], [19]) is not None
        expected = [*MANY, 19]
    elif goes_on == "fresh checkpoint":
        open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS)
    else:
        assert erase(root, {"documentKey._id": 4}).quarantined == 1
        expected = [n for n in MANY if n != 4]
    assert (held(root), lake_status(root).quarantined) == (expected, len(expected))
    open_lake(root, tmp_path / "last", STREAM, LAKE_COLUMNS)
    assert verify(root, full=True).problems == []
    assert (held(root), list((root / "_staging").iterdir())) == (expected, [])
    assert not (root / "_tailrace" / "quarantine.json").exists()


@pytest.mark.parametrize(
    "note", ['{"name": "../x", "staged": "s", "replaces": []}', "[]", "{", '{"name": 1, "staged": 2, "replaces": 3}']
)
def test_a_damaged_note_of_a_merge_touches_nothing(note: str, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    many(root)
    path = root / "_tailrace" / "quarantine.json"
    if note.endswith("}"):
        durable.write_sealed(path, json.loads(note))  # a forged one, whose digest is right
    else:
        path.write_text(note)
    for run in (lambda: compact(root), lambda: erase(root, {"documentKey._id": 4}), lambda: lake_status(root)):
        with pytest.raises(SinkError, match=r"quarantine\.json is damaged"):
            run()
    (root / "_tailrace" / "quarantine.json").unlink()
    assert held(root) == MANY


ANNAS = json.dumps({"fullDocument.who": "anna@example.com"})


@pytest.mark.parametrize("what", ["erase", "expire"])
def test_an_erasure_that_fails_half_way_says_so_and_is_finished_by_the_same_command(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the lake's commit, an error of the quarantine did not say what had already been erased. In every test of a
    failing erasure, it failed before the commit."""
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, range(1, 12), [20, 21]) is not None
    assert put(root, claim, 1, range(30, 33), [40, 41]) is not None
    command = ["lake", "erase", str(root), "--match", ANNAS]
    if what == "expire":
        command = ["lake", "expire", str(root), "--older-than", "0s"]

    def fail(name: str) -> None:
        if name == "quarantine.removed":
            raise OSError(5, "Input/output error", "the disk")

    durable.observe_steps(fail)
    try:
        assert main(command) == 1
    finally:
        durable.observe_steps(None)
    said = capsys.readouterr().err
    rows = 2 if what == "erase" else 14
    assert f"{rows} events were erased from the lake, but not all selected ones from _quarantine" in said
    assert "repeat the erasure: it does the rest" in said
    assert "Input/output error" in said
    left = [n for n in [*range(1, 12), 30, 31, 32] if n % 10]
    assert numbers_in(root) == (left if what == "erase" else [])
    assert held(root) == ([21, 40, 41] if what == "erase" else [40, 41])
    assert main(command) == 0
    assert held(root) == ([21, 41] if what == "erase" else [])
    assert verify(root, full=True).problems == []
    assert list((root / "_staging").iterdir()) == []


def test_a_damaged_quarantine_stops_an_erasure_before_anything_goes(tmp_path: Path) -> None:
    """It was found only after the lake's commit."""
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, range(1, 12), [20, 21]) is not None
    (path,) = (root / "_quarantine").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(SinkError, match="cannot be read"):
        erase(root, json.loads(ANNAS))
    assert numbers_in(root) == list(range(1, 12))
    path.write_bytes(content)
    assert (erase(root, json.loads(ANNAS)).quarantined, held(root)) == (1, [21])


def test_a_match_that_selects_all_of_the_quarantine_is_refused_where_there_is_nothing_else(tmp_path: Path) -> None:
    """The check counted only rows."""
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, [], [7, 8]) is not None
    with pytest.raises(UsageError, match="selects all 2 of them"):
        erase(root, {"operationType": "insert"})
    assert (held(root), list((root / "_staging").iterdir())) == ([7, 8], [])
    assert erase(root, {"operationType": "insert"}, everything=True).quarantined == 2
    assert put(root, claim, 1, [9, 11], [20]) is not None
    assert erase(root, json.loads(ANNAS)).quarantined == 1, "the rows are others"
    assert numbers_in(root) == [9, 11]


def test_a_lake_without_a_quarantine_is_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    make(root, tmp_path / "checkpoint")
    content: dict[str, Any] = lake_status(root).to_json()
    assert content["quarantined"] == 0
    assert not (root / "_quarantine").exists()
