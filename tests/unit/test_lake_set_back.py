"""A lake and its checkpoint are two records of one truth: each is compared with the other before anything is written.

A lake that was restored (its directory from a backup) under its newer checkpoint lost events for good, and `verify`
called it sound. A checkpoint that is older than its lake was refused, but the reverse was not checked: no test had
restored an older copy of a lake.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.checkpoint_file import CHECKPOINT_FILE
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.manifest import Commit, PlannedRange
from tailrace.lake.store.verification import verify
from tests.unit.lake_events import COLUMNS, MIDNIGHT, STREAM, begin, make, numbers_in, stage, token

OLDER = "is older than its checkpoint"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "lake.checkpoint"


def span(first: int, last: int) -> PlannedRange:
    """The range of the events ``first`` to ``last``, as Spark plans one after the other."""
    return PlannedRange(ClusterTime.of(MIDNIGHT + first - 1, 1), ClusterTime.of(MIDNIGHT + last, 1))


def put(root: Path, checkpoint: Path, batch: int, numbers: range, *, empty: bool = False) -> Commit | None:
    """Micro-batch ``batch``, as Spark gives it; with ``empty``, its range has no events."""
    claim = json.loads((checkpoint / CHECKPOINT_FILE).read_text())["claim"]
    files = () if empty else stage(root, numbers, stem=f"{batch}-{numbers.start}")
    return commit_batch(root, claim, batch, span(numbers[0], numbers[-1]), files, checkpoint=checkpoint)


def begun(root: Path, checkpoint: Path) -> None:
    """A lake with micro-batch 0."""
    make(root, checkpoint)
    begin(checkpoint)
    assert put(root, checkpoint, 0, range(10))


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def set_back(root: Path, checkpoint: Path, tmp_path: Path) -> Path:
    """A lake of one micro-batch whose checkpoint has seen two. Returns the copy of the good lake."""
    begun(root, checkpoint)
    shutil.copytree(root, tmp_path / "old")
    assert put(root, checkpoint, 1, range(10, 20))
    root.rename(tmp_path / "good")
    (tmp_path / "old").rename(root)
    return tmp_path / "good"


def test_an_old_copy_of_the_lake_is_refused_at_the_start_and_found_by_verify(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    set_back(root, checkpoint, tmp_path)
    before = everything(root)
    with pytest.raises(SinkError, match=OLDER):
        make(root, checkpoint)
    (problem,) = verify(root, full=True).problems
    assert OLDER in problem
    assert verify(root, checkpoint=tmp_path / "elsewhere").problems == [], "by itself it is a sound lake"
    assert everything(root) == before, "nothing was written"


def test_an_old_copy_that_is_put_in_place_while_the_stream_runs_is_refused_by_the_next_commit(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    set_back(root, checkpoint, tmp_path)
    for empty in (False, True):
        with pytest.raises(SinkError, match=OLDER):
            put(root, checkpoint, 2, range(20, 30), empty=empty)
    assert numbers_in(root) == list(range(10))


def test_an_old_copy_that_was_changed_since_is_another_lake(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Compacted or erased from by hand, it has as many commits as its checkpoint has seen."""
    begun(root, checkpoint)
    assert put(root, checkpoint, 1, range(10, 20))
    shutil.copytree(root, tmp_path / "old")
    assert put(root, checkpoint, 2, range(20, 30))
    shutil.rmtree(root)
    (tmp_path / "old").rename(root)
    assert compact(root).files_after == 1
    with pytest.raises(SinkError, match=r"is not the one that the checkpoint .*: its commit \d+ is a different one"):
        make(root, checkpoint)


def test_running_the_checkpoint_on_an_old_copy_does_not_harm_the_good_lake(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    good = set_back(root, checkpoint, tmp_path)
    with pytest.raises(SinkError, match=OLDER):
        make(root, checkpoint)
    shutil.rmtree(root)
    good.rename(root)
    make(root, checkpoint)
    assert put(root, checkpoint, 2, range(20, 30))
    assert numbers_in(root) == list(range(30))
    assert verify(root, full=True).problems == []


def test_of_two_copies_under_one_checkpoint_the_one_that_fell_behind_is_refused(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    begun(root, checkpoint)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    make(copy, checkpoint)  # a lake may be moved
    assert put(copy, checkpoint, 1, range(10, 20))
    with pytest.raises(SinkError, match=OLDER):
        make(root, checkpoint)
    fresh = tmp_path / "fresh"
    assert make(root, fresh).after == token(9), "the way out: nothing is lost"
    begin(fresh)
    with pytest.raises(SinkError, match=OLDER):
        make(root, checkpoint)
    make(copy, checkpoint)


def test_lake_and_checkpoint_that_were_set_back_together_go_on(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    begun(root, checkpoint)
    for path in (root, checkpoint):
        shutil.copytree(path, tmp_path / "backup" / path.name)
    assert put(root, checkpoint, 1, range(10, 20))
    for path in (root, checkpoint):
        shutil.rmtree(path)
        (tmp_path / "backup" / path.name).rename(path)
    make(root, checkpoint)
    assert put(root, checkpoint, 1, range(10, 25))
    assert numbers_in(root) == list(range(25))


def test_a_lake_that_is_newer_than_its_checkpoint_goes_on_where_spark_gives_the_micro_batch_again(
    root: Path, checkpoint: Path
) -> None:
    """A kill between our commit and Spark's, before the checkpoint was updated."""
    begun(root, checkpoint)
    known = (checkpoint / CHECKPOINT_FILE).read_bytes()
    assert put(root, checkpoint, 1, range(10, 20))
    (checkpoint / CHECKPOINT_FILE).write_bytes(known)
    make(root, checkpoint)
    assert put(root, checkpoint, 1, range(10, 20)) is None
    assert json.loads((checkpoint / CHECKPOINT_FILE).read_text())["newest"]["number"] == 2, "it knows now"
    assert compact(root).files_after == 1
    assert put(root, checkpoint, 2, range(20, 30))
    assert numbers_in(root) == list(range(30))
    assert verify(root, full=True).problems == []


def test_a_checkpoint_that_was_set_back_under_its_newer_lake_is_refused(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The whole directory from a backup: Spark would give the events after the backup again, cut as it likes. (What
    stood for it was a micro-batch with a number that the lake has passed.)"""
    begun(root, checkpoint)
    shutil.copytree(checkpoint, tmp_path / "old")
    assert put(root, checkpoint, 1, range(10, 20))
    assert put(root, checkpoint, 2, range(20, 30))
    shutil.rmtree(checkpoint)
    (tmp_path / "old").rename(checkpoint)
    before = everything(root)
    for numbers in (range(10, 25), range(10, 20)):
        make(root, checkpoint)
        with pytest.raises(SinkError, match="the checkpoint is behind the lake"):
            put(root, checkpoint, 1, numbers)
    assert numbers_in(root) == list(range(30))
    assert {name: one for name, one in everything(root).items() if "_delta_log" in name} == {
        name: one for name, one in before.items() if "_delta_log" in name
    }


def test_a_hole_between_what_the_lake_was_read_to_and_a_range_is_refused(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """For the case that the checkpoint's file is restored with the lake, but Spark's offsets are not."""
    begun(root, checkpoint)
    assert put(root, checkpoint, 1, range(10, 20), empty=True) is None
    assert put(root, checkpoint, 2, range(20, 30)) is not None, "an empty micro-batch is no hole"
    for empty in (False, True):
        with pytest.raises(SinkError, match=rf"{OLDER}: micro-batch 5 is planned for .* reaches only to"):
            put(root, checkpoint, 5, range(40, 50), empty=empty)
    assert put(root, checkpoint, 3, range(30, 40), empty=True) is None
    assert put(root, checkpoint, 5, range(40, 50))
    assert verify(root, full=True).problems == []
    assert CommitLog(root).head().reached == ClusterTime.of(MIDNIGHT + 49, 1)


def test_without_its_head_a_lake_goes_on_if_the_checkpoint_has_seen_no_more(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    begun(root, checkpoint)
    assert put(root, checkpoint, 1, range(10, 20), empty=True) is None
    (root / "_tailrace" / "head.json").unlink()
    make(root, checkpoint)
    assert put(root, checkpoint, 2, range(20, 30))
    assert verify(root, full=True).problems == []
    # The log has lost its end, and so has the witness beside it, but the checkpoint knows.
    (root / "_tailrace" / "head.json").unlink()
    (root / "_delta_log" / f"{2:020d}.json").unlink()
    with pytest.raises(SinkError, match=OLDER):
        make(root, checkpoint)


def test_verify_finds_a_hole_between_the_planned_ranges_of_two_commits(root: Path, checkpoint: Path) -> None:
    begun(root, checkpoint)
    assert put(root, checkpoint, 1, range(10, 20))
    path = root / "_delta_log" / f"{2:020d}.json"
    for key, said in (("planned", "adds what came after"), ("follows", "says that it follows 20")):
        original = path.read_text()
        lines = [json.loads(line) for line in original.splitlines()]
        ours = lines[0]["commitInfo"]["tailrace"]
        if key == "planned":
            ours["planned"]["after"] = [MIDNIGHT + 12, 1]
        else:
            ours["follows"] = [MIDNIGHT + 8, 1]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (root / "_tailrace" / "head.json").unlink(missing_ok=True)
        assert any(said in problem for problem in verify(root, checkpoint=root / "none").problems)
        path.write_text(original)


def test_a_lost_checkpoint_loses_nothing_of_a_lake_that_has_no_event_yet(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Such a lake began anew, by default from the present: events since the backup were lost."""
    make(root, checkpoint)
    begin(checkpoint)
    assert put(root, checkpoint, 0, range(10), empty=True) is None
    opening = make(root, tmp_path / "fresh")
    assert (opening.after, opening.start) == (None, ClusterTime.of(MIDNIGHT + 9, 2))


def test_a_checkpoint_without_its_file_and_one_of_a_lake_that_has_gone_are_refused(
    root: Path, checkpoint: Path
) -> None:
    begun(root, checkpoint)
    known = (checkpoint / CHECKPOINT_FILE).read_bytes()
    (checkpoint / CHECKPOINT_FILE).unlink()
    with pytest.raises(UsageError, match="was not made for a lake"):
        make(root, checkpoint)
    claim, files = json.loads(known)["claim"], stage(root, range(10, 20))
    with pytest.raises(SinkError, match="is gone or was replaced while its stream was running"):
        commit_batch(root, claim, 1, span(10, 19), files, checkpoint=checkpoint)
    (checkpoint / CHECKPOINT_FILE).write_bytes(known)
    shutil.rmtree(root)
    with pytest.raises(UsageError, match="continues a lake, and there is none at"):
        make(root, checkpoint)


def test_a_read_only_copy_is_verified_without_writing(root: Path, checkpoint: Path) -> None:
    """It wanted to write its lock. Root may write everywhere, so the directory is compared."""
    begun(root, checkpoint)
    (root / "_tailrace" / "lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))}
    assert verify(root, full=True).problems == []
    assert {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))} == before
    open_lake(root, checkpoint, STREAM, COLUMNS)


def test_the_lake_of_another_deployment_with_the_same_name_is_refused(tmp_path: Path) -> None:
    """Sets are often called rs0: their ids tell them apart, and a server that does not tell its id is not asked."""
    root, ours = tmp_path / "lake", {**STREAM, "replicaSets": {"rs0": "6a5f"}}
    open_lake(root, tmp_path / "first", ours, COLUMNS)
    with pytest.raises(UsageError, match=r'another stream: replicaSets\.rs0 is "6a5f" there and "77e1" here'):
        open_lake(root, tmp_path / "second", {**STREAM, "replicaSets": {"rs0": "77e1"}}, COLUMNS)
    open_lake(root, tmp_path / "third", {**STREAM, "replicaSets": {"rs0": ""}}, COLUMNS)
