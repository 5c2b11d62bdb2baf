"""The lake's log without Spark: what a commit promises when it is interrupted, repeated, or made by the wrong one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.spark.lake import commit_log, durable, verify
from tailrace.spark.lake.commit_log import CommitLog
from tailrace.spark.lake.committer import abort_batch, commit_batch
from tailrace.spark.lake.identity import open_lake
from tailrace.spark.lake.part_writer import FileLimits
from tests.unit.lake_events import batch, begin, make, numbers_in, stage, token


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def die_at(target: str, times: int, work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process that SIGKILLs itself at the ``times``-th ``target``; gives its exit code."""

    def child() -> None:
        left = times

        def observe(step: str) -> None:
            nonlocal left
            left -= step == target
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        durable.observe_steps(observe)
        work()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def test_files_are_named_in_the_order_of_the_stream_and_split_by_day(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    for number, start in enumerate(range(86_400 - 250, 86_400 + 250, 100)):
        commit_batch(root, claim, number, stage(root, range(start, start + 100), stem=f"{number}-0"))

    assert numbers_in(root) == list(range(86_400 - 250, 86_400 + 250))
    assert sorted(path.name for path in root.glob("day=*")) == ["day=2026-11-21", "day=2026-11-22"]
    report = verify(root)
    assert (report.problems, report.rows, report.files, report.days) == ([], 500, 6, 2)


def test_a_replayed_batch_changes_nothing_and_its_files_are_dropped(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    assert commit_batch(root, claim, 0, stage(root, range(10)))
    assert commit_batch(root, claim, 0, stage(root, range(10), stem="again")) is None
    assert numbers_in(root) == list(range(10))
    assert list((root / "_staging").iterdir()) == []


def test_a_batch_given_again_with_other_events_is_refused(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    commit_batch(root, claim, 3, stage(root, range(10)))
    for number in (3, 2):
        with pytest.raises(SinkError, match="the checkpoint is behind the lake"):
            commit_batch(root, claim, number, stage(root, range(5, 15), stem=f"n{number}"))
    assert numbers_in(root) == list(range(10))


def test_events_that_the_lake_already_holds_are_refused(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    commit_batch(root, claim, 0, stage(root, range(10)))
    with pytest.raises(SinkError, match="already reaches to"):
        commit_batch(root, claim, 1, stage(root, range(9, 12)))
    assert numbers_in(root) == list(range(10))


def test_files_out_of_order_are_refused(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    late, early = stage(root, range(10, 20), stem="a"), stage(root, range(10), stem="b")
    with pytest.raises(SinkError, match="out of order"):
        commit_batch(root, claim, 0, late + early)
    assert numbers_in(root) == []


@pytest.mark.parametrize("numbers", [[1, 3, 2], [1, 2, 2]])
def test_rows_out_of_order_or_doubled_are_refused_where_they_are_written(
    root: Path, checkpoint: Path, numbers: list[int]
) -> None:
    make(root, checkpoint)
    with pytest.raises(SinkError, match="out of order, or one is there twice"):
        stage(root, numbers)
    assert list((root / "_staging").iterdir()) == []


def test_an_empty_batch_leaves_no_trace(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    assert commit_batch(root, claim, 0, stage(root, [])) is None
    assert commit_batch(root, claim, 0, ()) is None
    assert CommitLog(root).head().number == 0


@pytest.mark.parametrize(
    ("step", "times", "kept"),
    [("commit.manifest", 1, True), ("commit.rename", 1, True), ("commit.rename", 2, True), ("commit.head", 1, True)],
)
def test_a_commit_killed_at_any_step_is_finished_by_the_replay(
    root: Path, checkpoint: Path, step: str, times: int, kept: bool
) -> None:
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    commit_batch(root, claim, 0, stage(root, range(10)))
    files = stage(root, range(10, 20), stem="a") + stage(root, range(20, 30), stem="b")
    assert die_at(step, times, lambda: commit_batch(root, claim, 1, files)) == -signal.SIGKILL
    seen = numbers_in(root)
    assert seen == list(range(len(seen))), "a reader sees a beginning of the batch, in order"

    assert make(root, checkpoint).claim == claim
    assert numbers_in(root) == list(range(30))
    assert commit_batch(root, claim, 1, stage(root, range(10, 30), stem="c")) is None
    commit_batch(root, claim, 2, stage(root, range(30, 40), stem="d"))
    assert numbers_in(root) == list(range(40))
    assert verify(root).problems == []


def test_abort_after_a_commit_that_happened_deletes_nothing(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    files = stage(root, range(10))
    assert die_at("commit.manifest", 1, lambda: commit_batch(root, claim, 0, files)) == -signal.SIGKILL
    abort_batch(root, files)
    assert numbers_in(root) == list(range(10))


def test_abort_before_the_commit_drops_the_files(root: Path, checkpoint: Path) -> None:
    make(root, checkpoint)
    abort_batch(root, stage(root, range(10)))
    assert list((root / "_staging").iterdir()) == []
    assert numbers_in(root) == []


def test_a_start_clears_what_dead_tasks_left(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    commit_batch(root, claim, 0, stage(root, range(10)))
    stage(root, range(10, 20), stem="dead")
    torn = root / "_tailrace" / "commits" / ".0000000002.json.4711"
    torn.write_text("{")
    make(root, checkpoint)
    assert list((root / "_staging").iterdir()) == []
    assert not torn.exists()
    assert numbers_in(root) == list(range(10))


def test_a_staged_file_that_has_gone_stops_the_commit_before_it_begins(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    files = stage(root, range(10))
    (root / "_staging" / files[0].staged).unlink()
    with pytest.raises(SinkError, match="has gone before it could be committed"):
        commit_batch(root, claim, 0, files)
    assert CommitLog(root).head().number == 0


def test_another_streams_settings_are_refused_and_named(root: Path, checkpoint: Path) -> None:
    make(root, checkpoint)
    other = {"settings": {"scope": "shop.customers"}}
    with pytest.raises(
        UsageError, match=r'another stream: settings\.scope is "shop\.orders" there and "shop\.customers" here'
    ):
        open_lake(root, checkpoint, other)


def test_a_checkpoint_of_another_lake_is_refused(tmp_path: Path, root: Path, checkpoint: Path) -> None:
    make(root, checkpoint)
    other = tmp_path / "other"
    make(other, tmp_path / "other-checkpoint")
    begin(checkpoint)
    with pytest.raises(UsageError, match="belongs to another lake"):
        make(other, checkpoint)


def test_a_checkpoint_that_was_never_a_lakes_is_refused(root: Path, checkpoint: Path) -> None:
    begin(checkpoint)
    with pytest.raises(UsageError, match="was not made for a lake"):
        make(root, checkpoint)


def test_a_checkpoint_whose_lake_has_gone_is_refused(tmp_path: Path, root: Path, checkpoint: Path) -> None:
    make(root, checkpoint)
    begin(checkpoint)
    with pytest.raises(UsageError, match="continues a lake, and there is none"):
        make(tmp_path / "elsewhere", checkpoint)


def test_a_fresh_checkpoint_goes_on_after_the_last_event_and_shuts_the_old_one_out(
    tmp_path: Path, root: Path, checkpoint: Path
) -> None:
    old = make(root, checkpoint)
    begin(checkpoint)
    assert old.after is None
    commit_batch(root, old.claim, 7, stage(root, range(10)))

    fresh = make(root, tmp_path / "fresh")
    assert (fresh.lake_id, fresh.after) == (old.lake_id, token(9))
    with pytest.raises(SinkError, match="another checkpoint has taken over"):
        commit_batch(root, old.claim, 8, stage(root, range(10, 20), stem="old"))
    with pytest.raises(UsageError, match="was superseded"):
        make(root, checkpoint)
    commit_batch(root, fresh.claim, 0, stage(root, range(10, 20), stem="new"))
    begin(tmp_path / "fresh")
    assert make(root, tmp_path / "fresh").after == token(9), "a restart of the same checkpoint cuts at the same token"
    assert numbers_in(root) == list(range(20))


def test_a_take_over_killed_half_way_is_taken_again(tmp_path: Path, root: Path, checkpoint: Path) -> None:
    old = make(root, checkpoint)
    begin(checkpoint)
    commit_batch(root, old.claim, 0, stage(root, range(10)))
    assert die_at("claim.checkpoint", 1, lambda: make(root, tmp_path / "fresh")) == -signal.SIGKILL
    assert make(root, checkpoint).claim == old.claim
    assert make(root, tmp_path / "fresh").after == token(9)


def test_a_directory_with_other_things_in_it_is_refused(root: Path, checkpoint: Path) -> None:
    root.mkdir()
    (root / "thesis.doc").touch()
    with pytest.raises(UsageError, match=r"not empty and not a lake of Tailrace \(it holds 'thesis.doc'\)"):
        make(root, checkpoint)


def test_a_lake_of_a_later_format_is_refused(root: Path, checkpoint: Path) -> None:
    make(root, checkpoint)
    path = root / "_tailrace" / "lake.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(SinkError, match="has format 2"):
        make(root, checkpoint)


def test_a_damaged_manifest_is_named(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    commit_batch(root, claim, 0, stage(root, range(10)))
    manifest = root / "_tailrace" / "commits" / "0000000001.json"
    for text in ("{", "[]", '{"format": 1}', manifest.read_text().replace('"number": 1', '"number": 4')):
        manifest.write_text(text)
        with pytest.raises(SinkError, match=r"0000000001\.json is damaged"):
            CommitLog(root).live_files()


def test_the_log_is_folded_and_stays_short(root: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "SNAPSHOT_EVERY", 10)
    claim = make(root, checkpoint).claim
    for number in range(35):
        commit_batch(root, claim, number, stage(root, range(number * 10, number * 10 + 10), stem=str(number)))
    assert len(list((root / "_tailrace" / "commits").iterdir())) <= 20
    assert len(CommitLog(root).live_files()) == 35
    (root / "_tailrace" / "head.json").unlink()
    with CommitLog(root).locked() as head:
        assert (head.number, head.last_token) == (35, token(349)), "the head is a copy: it can be found again"
    assert verify(root).problems == []


def test_verify_names_what_is_wrong(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    for number in range(4):
        commit_batch(root, claim, number, stage(root, range(number * 10, number * 10 + 10), stem=str(number)))
    first, second, third, _ = sorted(root.glob("day=*/*.parquet"))
    (first.parent / "0000000009-00000.parquet").write_bytes(first.read_bytes())
    second.write_bytes(third.read_bytes())
    first.unlink()
    third.write_bytes(b"PAR1")
    text = "\n".join(verify(root).problems)
    assert "0000000009-00000.parquet is not in the log" in text
    assert f"{first.name} is in the log and missing" in text
    assert f"{second.name}: its footer and the log name different tokens" in text
    assert f"{third.name} cannot be read" in text


def test_files_and_row_groups_are_bounded(root: Path, checkpoint: Path) -> None:
    import pyarrow.parquet as pq

    from tailrace.spark.lake.layout import LakeLayout
    from tailrace.spark.lake.part_writer import FIRST_TOKEN, PartWriter

    claim = make(root, checkpoint).claim
    limits = FileLimits(row_group_rows=100, file_bytes=20_000)
    writer = PartWriter(LakeLayout(root).staging, "s", limits=limits)
    files = writer.write_all(batch(range(start, start + 50)) for start in range(0, 1000, 50))
    assert [file.rows for file in files] == [400, 400, 200]
    commit_batch(root, claim, 0, files)
    metadata = pq.read_metadata(min(root.glob("day=*/*.parquet")))
    assert metadata.num_row_groups == 4
    assert metadata.metadata[FIRST_TOKEN] == token(0).encode()
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert numbers_in(root) == list(range(1000))


def test_lake_errors_survive_the_way_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(durable.LakeFullError("no room", hint="make some")))
    assert isinstance(error, TailraceError)
    assert str(error) == "no room. make some"
