"""The lake's log without Spark: what a commit promises if it is interrupted, repeated, or made by the wrong stream."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.lake import verify
from tailrace.lake.store import commit_log
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import abort_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.layout import cluster_time_of
from tailrace.lake.store.manifest import Gap
from tailrace.lake.store.part_writer import FileLimits, PartWriter
from tailrace.lake.store.status import lake_status
from tests.unit.lake_events import COLUMNS, STREAM, batch, begin, make, numbers_in, planned_for, put, stage, token


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
        put(root, claim, number, stage(root, range(start, start + 100), stem=f"{number}-0"))

    assert numbers_in(root) == list(range(86_400 - 250, 86_400 + 250))
    assert sorted(path.name for path in root.glob("day=*")) == ["day=2026-11-21", "day=2026-11-22"]
    report = verify(root)
    assert (report.problems, report.rows, report.files, report.days) == ([], 500, 6, 2)


def test_a_replayed_batch_changes_nothing_and_its_files_are_dropped(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    assert put(root, claim, 0, stage(root, range(10)))
    assert put(root, claim, 0, stage(root, range(10), stem="again")) is None
    assert numbers_in(root) == list(range(10))
    assert list((root / "_staging").iterdir()) == []


def test_a_batch_given_again_with_another_range_is_refused(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    put(root, claim, 3, stage(root, range(10)))
    for number in (3, 2, 4):
        with pytest.raises(SinkError, match="the checkpoint is behind the lake"):
            put(root, claim, number, stage(root, range(5, 15), stem=f"n{number}"))
    assert numbers_in(root) == list(range(10))


@pytest.mark.parametrize("again", [range(0), range(3), range(2, 9), range(1, 12)])
def test_a_replay_is_known_by_its_planned_range_and_not_by_its_rows(root: Path, checkpoint: Path, again: range) -> None:
    """Where ``$match`` looks at a looked-up document, a replay may give fewer, other or more events than the first run.
    A replay was recognised by its rows, so the stream stopped for good. No test had a pipeline whose events depend on
    when it runs."""
    claim = make(root, checkpoint).claim
    first = stage(root, [2, 5, 8])
    planned = planned_for(stage(root, range(12), stem="plan"))
    assert put(root, claim, 4, first, planned)
    assert put(root, claim, 4, stage(root, again, stem="again"), planned) is None
    assert numbers_in(root) == [2, 5, 8]
    put(root, claim, 5, stage(root, range(12, 15), stem="next"))
    assert numbers_in(root) == [2, 5, 8, 12, 13, 14]


def test_events_that_the_lake_already_holds_are_refused(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    put(root, claim, 0, stage(root, range(10)))
    with pytest.raises(SinkError, match="already reaches to"):
        put(root, claim, 1, stage(root, range(9, 12)), planned_for(stage(root, range(10, 12), stem="plan")))
    assert numbers_in(root) == list(range(10))


def test_files_out_of_order_are_refused(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    late, early = stage(root, range(10, 20), stem="a"), stage(root, range(10), stem="b")
    with pytest.raises(SinkError, match="out of order"):
        put(root, claim, 0, late + early)
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
    assert put(root, claim, 0, stage(root, [])) is None
    assert put(root, claim, 0, ()) is None
    assert CommitLog(root).head().number == 0  # the commit that made the table


@pytest.mark.parametrize("step", ["commit.log", "commit.head"])
def test_a_commit_killed_at_any_step_is_finished_by_the_replay(root: Path, checkpoint: Path, step: str) -> None:
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    put(root, claim, 0, stage(root, range(10)))
    files = stage(root, range(10, 20), stem="a") + stage(root, range(20, 30), stem="b")
    assert die_at(step, 1, lambda: put(root, claim, 1, files)) == -signal.SIGKILL
    assert numbers_in(root) == list(range(30)), "a commit is one step: a reader sees all of it or nothing"

    assert make(root, checkpoint).claim == claim
    assert numbers_in(root) == list(range(30))
    assert put(root, claim, 1, stage(root, range(10, 30), stem="c")) is None
    put(root, claim, 2, stage(root, range(30, 40), stem="d"))
    assert numbers_in(root) == list(range(40))
    assert verify(root).problems == []


def test_abort_after_a_commit_that_happened_deletes_nothing(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    files = stage(root, range(10))
    assert die_at("commit.log", 1, lambda: put(root, claim, 0, files)) == -signal.SIGKILL
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
    put(root, claim, 0, stage(root, range(10)))
    stage(root, range(10, 20), stem="dead")
    torn = root / "_tailrace" / ".00000000000000000002.json.4711"
    torn.write_text("{")
    make(root, checkpoint)
    assert list((root / "_staging").iterdir()) == []
    assert not torn.exists()
    assert numbers_in(root) == list(range(10))


def test_a_staged_file_that_has_gone_stops_the_commit_before_it_begins(root: Path, checkpoint: Path) -> None:
    claim = make(root, checkpoint).claim
    files = stage(root, range(10))
    (root / files[0].name).unlink()
    with pytest.raises(SinkError, match="is gone before it could be committed"):
        put(root, claim, 0, files)
    assert CommitLog(root).head().number == 0


def test_another_streams_settings_are_refused_and_named(root: Path, checkpoint: Path) -> None:
    make(root, checkpoint)
    other = {**STREAM, "settings": {"scope": "shop.customers"}}
    with pytest.raises(
        UsageError, match=r'another stream: settings\.scope is "shop\.orders" there and "shop\.customers" here'
    ):
        open_lake(root, checkpoint, other, COLUMNS)


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
    put(root, old.claim, 7, stage(root, range(10)))

    fresh = make(root, tmp_path / "fresh")
    assert (fresh.lake_id, fresh.after) == (old.lake_id, token(9))
    with pytest.raises(SinkError, match="another checkpoint has taken over"):
        put(root, old.claim, 8, stage(root, range(10, 20), stem="old"))
    with pytest.raises(UsageError, match="was superseded"):
        make(root, checkpoint)
    put(root, fresh.claim, 0, stage(root, range(10, 20), stem="new"))
    begin(tmp_path / "fresh")
    assert make(root, tmp_path / "fresh").after == token(9), "a restart of the same checkpoint cuts at the same token"
    assert numbers_in(root) == list(range(20))


def test_a_take_over_killed_half_way_is_taken_again(tmp_path: Path, root: Path, checkpoint: Path) -> None:
    old = make(root, checkpoint)
    begin(checkpoint)
    put(root, old.claim, 0, stage(root, range(10)))
    assert die_at("claim.checkpoint", 1, lambda: make(root, tmp_path / "fresh")) == -signal.SIGKILL
    assert make(root, checkpoint).claim == old.claim
    assert make(root, tmp_path / "fresh").after == token(9)


def test_a_directory_with_other_things_in_it_is_refused(root: Path, checkpoint: Path) -> None:
    root.mkdir()
    (root / "thesis.doc").touch()
    with pytest.raises(UsageError, match=r"not empty and not a lake of Tailrace \(it holds 'thesis.doc'\)"):
        make(root, checkpoint)


@pytest.mark.parametrize("number", [1, 3])
def test_a_lake_of_another_format_is_refused(root: Path, checkpoint: Path, number: int) -> None:
    make(root, checkpoint)
    path = root / "_tailrace" / "lake.json"
    known = json.loads(path.read_text())
    known.pop("sha256")
    durable.write_sealed(path, {**known, "format": number})
    with pytest.raises(SinkError, match=f"has format {number}, and this version of Tailrace knows format 2"):
        make(root, checkpoint)


@pytest.mark.parametrize("place", ["lake.json", "head.json", "checkpoint"])
def test_nobody_works_on_a_lake_of_a_newer_release(
    place: str, root: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``expire`` did: it only checked that there is a ``lake.json``. The checkpoint's record of the lake had no format.
    Earlier tests tried only the start of a stream."""
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    put(root, claim, 0, stage(root, range(10)))
    path = checkpoint / "tailrace-lake.json" if place == "checkpoint" else root / "_tailrace" / place
    known = durable.read_sealed(path)
    assert known is not None
    assert known["format"] == 2
    durable.write_sealed(path, {**known, "format": 3})
    said = f"{path} has format 3, and this version of Tailrace knows format 2. Use the release that has written it"
    with pytest.raises(SinkError) as caught:
        make(root, checkpoint)
    assert str(caught.value) == said
    if place == "checkpoint":
        assert said.startswith(verify(root, checkpoint=checkpoint).problems[0])
        return
    for command in (["status"], ["verify"], ["compact"], ["expire"], ["erase", "--match", '{"operationType": "x"}']):
        assert main(["lake", command[0], str(root), *command[1:]]) == 1
        assert said in capsys.readouterr().err, command


def test_a_table_of_somebody_else_is_no_lake(root: Path, checkpoint: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(str(root), pa.table({"n": [1]}))
    with pytest.raises(UsageError, match="not a lake of Tailrace"):
        make(root, checkpoint)


def test_the_log_is_short_and_its_checkpoints_hold_what_went(
    root: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 10)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 15)
    claim = make(root, checkpoint).claim
    for number in range(35):
        put(root, claim, number, stage(root, range(number * 10, number * 10 + 10), stem=str(number)))
    names = sorted(path.name for path in (root / "_delta_log").iterdir())
    assert len(names) <= 25
    assert "00000000000000000030.checkpoint.parquet" in names
    assert "00000000000000000005.json" not in names
    assert len(CommitLog(root).live_files()) == 35
    assert numbers_in(root) == list(range(350))
    assert len(CommitLog(root).state(25).files) == 25, "an older version, while its commits are kept"
    (root / "_tailrace" / "head.json").unlink()
    with CommitLog(root).locked() as head:
        assert (head.number, head.last_token) == (35, token(349)), "the head is a copy: it can be found again"
    assert verify(root, full=True).problems == []


def test_a_checkpoint_torn_by_a_power_cut_is_made_again(
    root: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 10)
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    for number in range(12):
        put(root, claim, number, stage(root, range(number * 10, number * 10 + 10), stem=str(number)))
    (torn,) = (root / "_delta_log").glob("*.checkpoint.parquet")
    torn.write_bytes(torn.read_bytes()[:100])
    assert make(root, checkpoint).claim == claim
    assert numbers_in(root) == list(range(120))
    assert verify(root, full=True).problems == []


def test_an_accepted_gap_is_in_the_log_and_shown(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    put(root, claim, 0, stage(root, range(40)))
    gap = Gap(token(39), cluster_time_of(token(39)), cluster_time_of(token(100)))
    fresh = open_lake(root, tmp_path / "fresh", STREAM, COLUMNS, gap=gap)
    assert (fresh.after, fresh.start) == (token(39), gap.until)
    put(root, fresh.claim, 0, stage(root, range(100, 110), stem="new"))
    assert numbers_in(root) == [*range(40), *range(100, 110)]
    report = verify(root, full=True)
    assert report.problems == []
    (shown,) = report.gaps
    assert (shown.after_token, shown.after, shown.until) == (gap.after_token, gap.after, gap.until)
    assert "2026-11-21 00:00:39 UTC" in str(shown)
    assert "2026-11-21 00:01:40 UTC" in str(shown)
    begin(tmp_path / "fresh")
    again = open_lake(root, tmp_path / "fresh", STREAM, COLUMNS)
    assert (again.claim, again.start) == (fresh.claim, gap.until), "a restart before the first events starts there too"


def test_gaps_outlive_the_commits_that_wrote_them(
    root: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 5)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 5)
    claim = make(root, checkpoint).claim
    put(root, claim, 0, stage(root, range(10)))
    gap = Gap(token(9), cluster_time_of(token(9)), cluster_time_of(token(20)))
    claim = open_lake(root, checkpoint, STREAM, COLUMNS, gap=gap).claim
    for number in range(20):
        put(root, claim, number, stage(root, range(20 + number * 5, 25 + number * 5), stem=str(number)))
    assert not (root / "_delta_log" / f"{2:020d}.json").exists()
    assert [shown.until for shown in verify(root).gaps] == [gap.until]


def test_files_and_row_groups_are_bounded(root: Path, checkpoint: Path) -> None:
    import pyarrow.parquet as pq

    from tailrace.lake.store.part_writer import FIRST_TOKEN, PartWriter

    claim = make(root, checkpoint).claim
    limits = FileLimits(row_group_rows=100, file_bytes=20_000)
    writer = PartWriter(root, "s", limits=limits)
    files = writer.write_all(batch(range(start, start + 50)) for start in range(0, 1000, 50))
    assert [file.rows for file in files] == [400, 400, 200]
    put(root, claim, 0, files)
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


#: Microseconds since 1970: the last moment of the year 9999 and the first after it, the first moment of the year 1 and
#: the last before it, and the latest and the earliest that the column holds in whole milliseconds.
FAR_TIMES = [
    253_402_300_799_999_000,
    253_402_300_800_000_000,
    -62_135_596_800_000_000,
    -62_135_596_800_001_000,
    9_223_372_036_854_775_000,
    -9_223_372_036_854_775_000,
]


@pytest.mark.parametrize("last", FAR_TIMES)
def test_wall_times_of_any_year_are_kept(last: int, root: Path, checkpoint: Path) -> None:
    """A pipeline may put any date there. Beyond the year 9999 the bounds of a file ended the commit; no test of the
    lake had written such a date."""
    columns = [*COLUMNS, {"name": "wall_time", "type": "timestamp", "nullable": True, "metadata": {}}]
    claim = open_lake(root, checkpoint, STREAM, columns).claim
    begin(checkpoint)
    times = [1_795_219_200_000_000, None, *FAR_TIMES, last]
    for number in range(2):
        rows = range(number * len(times), (number + 1) * len(times))
        column = pa.array(times, pa.timestamp("us", tz="UTC"))
        files = PartWriter(root, str(number)).write_all([batch(rows).append_column("wall_time", column)])
        assert put(root, claim, number, files) is not None
    assert lake_status(root).rows == 2 * len(times)
    compact(root)
    assert verify(root, full=True).problems == []
    table = DeltaTable(root).to_pyarrow_dataset().to_table().sort_by("token")
    assert table.column("wall_time").cast(pa.int64()).to_pylist() == 2 * times
    (file,) = CommitLog(root).live_files()
    assert "wall_time" not in json.loads(file.stats)["maxValues"], "no bounds, rather than wrong ones"
