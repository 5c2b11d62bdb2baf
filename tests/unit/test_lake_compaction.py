"""Merging small files: same rows in the same order, atomic to readers, and whole again after a kill at any step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tailrace.errors import SinkError, UsageError
from tailrace.spark.lake import CompactionPolicy, compact, durable, verify
from tailrace.spark.lake.commit_log import CommitLog
from tailrace.spark.lake.committer import commit_batch
from tailrace.spark.lake.compaction import compact_after
from tests.unit.lake_events import begin, make, numbers_in, stage
from tests.unit.test_lake_commits import die_at

STEPS = ["compaction.merged", "commit.manifest", "compaction.built", "compaction.swapped", "compaction.removed"]


@pytest.fixture
def lake(tmp_path: Path) -> tuple[Path, str]:
    """A lake of 20 small files in two days, 200 events."""
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    for number in range(20):
        start = 86_400 - 100 + number * 10
        commit_batch(root, claim, number, stage(root, range(start, start + 10), stem=str(number)))
    return root, claim


EXPECTED = list(range(86_400 - 100, 86_400 + 100))


def files(root: Path) -> list[Path]:
    return sorted(root.glob("day=*/*.parquet"))


def test_a_days_small_files_become_one_with_the_same_rows(lake: tuple[Path, str]) -> None:
    root, claim = lake
    result = compact(root)
    assert (result.files_before, result.files_after) == (20, 2)
    assert len(files(root)) == 2
    assert numbers_in(root) == EXPECTED
    commit_batch(root, claim, 20, stage(root, range(86_500, 86_510), stem="later"))
    assert numbers_in(root) == [*EXPECTED, *range(86_500, 86_510)]
    assert compact(root).files_before == 2, "what was merged is merged again with what came after"
    assert numbers_in(root) == [*EXPECTED, *range(86_500, 86_510)]
    assert verify(root).problems == []
    assert not CommitLog(root).layout.swap_beside.exists()
    assert list((root / "_staging").iterdir()) == []


def test_the_target_size_bounds_what_is_merged(lake: tuple[Path, str]) -> None:
    root, _ = lake
    size = files(root)[0].stat().st_size
    compact(root, target_bytes=4 * size)
    assert 4 <= len(files(root)) <= 8
    assert numbers_in(root) == EXPECTED
    assert verify(root).problems == []


@pytest.mark.parametrize("step", STEPS)
def test_a_compaction_killed_at_any_step_neither_loses_nor_doubles_a_row(lake: tuple[Path, str], step: str) -> None:
    root, claim = lake
    assert die_at(step, 2, lambda: compact(root)) == -signal.SIGKILL
    assert numbers_in(root) == EXPECTED
    make(root, root.parent / "checkpoint")
    assert numbers_in(root) == EXPECTED
    commit_batch(root, claim, 20, stage(root, range(86_500, 86_510), stem="later"))
    compact(root)
    assert numbers_in(root) == [*EXPECTED, *range(86_500, 86_510)]
    assert verify(root).problems == []
    assert not CommitLog(root).layout.swap_beside.exists()


def test_without_an_atomic_swap_compaction_says_so_and_offline_does_it(
    lake: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = lake

    def no_swap(one: Path, other: Path) -> None:
        raise durable.SwapUnsupportedError(f"the file system of {one} cannot swap", hint="--offline")

    monkeypatch.setattr(durable, "swap_directories", no_swap)
    with pytest.raises(durable.SwapUnsupportedError, match="--offline"):
        compact(root)
    assert numbers_in(root) == EXPECTED
    assert die_at("compaction.unlinked", 3, lambda: compact(root, offline=True)) == -signal.SIGKILL
    make(root, root.parent / "checkpoint")
    assert numbers_in(root) == EXPECTED, "the start finishes what was begun"
    compact(root, offline=True)
    assert len(files(root)) == 2
    assert numbers_in(root) == EXPECTED
    assert verify(root).problems == []


def test_a_stream_compacts_every_so_many_commits_and_rewrites_rows_rarely(tmp_path: Path) -> None:
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    claim = make(root, checkpoint).claim
    policy = CompactionPolicy(every=8, fan_in=8, target_bytes=1 << 30)
    rewritten = 0
    commits = 128
    for number in range(commits):
        staged = stage(root, range(number * 50, number * 50 + 50), stem=str(number), payload=200)
        commit = commit_batch(root, claim, number, staged)
        if commit is not None:
            rewritten += compact_after(root, commit, policy).bytes_before
    assert numbers_in(root) == list(range(commits * 50))
    assert len(files(root)) <= 16
    assert rewritten <= 9 * sum(file.stat().st_size for file in files(root)), "log2(128) times and a little"
    assert verify(root).problems == []


def test_two_compactions_at_once_are_refused(lake: tuple[Path, str]) -> None:
    root, _ = lake
    with durable.locked(CommitLog(root).layout.compaction_lock), pytest.raises(SinkError, match="another compaction"):
        compact(root)


def test_a_place_that_is_no_lake_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a lake"):
        compact(tmp_path)
    with pytest.raises(UsageError, match="is not a lake"):
        verify(tmp_path / "missing")


@pytest.mark.parametrize("glob", ["day=*/*.parquet", "**/*.parquet"])
def test_a_duckdb_reader_beside_commits_and_compactions_never_sees_a_row_twice_or_misses_one(
    lake: tuple[Path, str], glob: str
) -> None:
    import duckdb

    root, claim = lake
    done = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(20, 60):
                start = 86_500 + (number - 20) * 10
                commit_batch(root, claim, number, stage(root, range(start, start + 10), stem=str(number)))
                if number % 3 == 0:
                    compact(root)
        except BaseException as error:  # noqa: BLE001  handed to the test's own thread
            failures.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set():
        try:
            with duckdb.connect() as connection:
                count, distinct, least, most = connection.execute(
                    "SELECT count(*), count(DISTINCT number), min(number), max(number) FROM read_parquet(?)",
                    [f"{root}/{glob}"],
                ).fetchone()
        except duckdb.IOException as error:
            # Listed before a swap, opened after it: an error, not a wrong answer.
            if "No such file" not in str(error):
                failures.append(error)
            continue
        reads += 1
        assert (count, least, most) == (distinct, 86_300, 86_300 + count - 1)
    writer.join()
    assert failures == []
    assert reads > 0
    assert numbers_in(root) == [*EXPECTED, *range(86_500, 86_900)]
