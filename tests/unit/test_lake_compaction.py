"""Merging small files: same rows in the same order, atomic to readers, and whole again after a kill at any step."""

from __future__ import annotations

import json
import signal
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.base import durable
from tailrace.errors import SinkError, UsageError
from tailrace.lake import CompactionPolicy, compact, verify
from tailrace.lake import files as named_files
from tailrace.lake.store import commit_log
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact_after, compact_idle
from tailrace.lake.store.retention import expire
from tests.unit.lake_events import begin, make, numbers_in, put, stage, token
from tests.unit.lake_readers import READERS
from tests.unit.test_lake_commits import die_at

STEPS = ["compaction.merged", "commit.log", "commit.head", "compaction.removed"]
NO_RETENTION = timedelta(0)


@pytest.fixture
def lake(tmp_path: Path) -> tuple[Path, str]:
    """A lake of 20 small files in two days, 200 events."""
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    for number in range(20):
        start = 86_400 - 100 + number * 10
        put(root, claim, number, stage(root, range(start, start + 10), stem=str(number)))
    return root, claim


EXPECTED = list(range(86_400 - 100, 86_400 + 100))


def files(root: Path) -> list[Path]:
    """The lake's files as its log names them."""
    return [Path(name) for name in named_files(root)]


def present(root: Path) -> set[Path]:
    return set(root.glob("day=*/*.parquet"))


def test_a_days_small_files_become_one_with_the_same_rows(lake: tuple[Path, str]) -> None:
    root, claim = lake
    result = compact(root)
    assert (result.files_before, result.files_after) == (20, 2)
    assert len(files(root)) == 2
    assert numbers_in(root) == EXPECTED
    put(root, claim, 20, stage(root, range(86_500, 86_510), stem="later"))
    assert numbers_in(root) == [*EXPECTED, *range(86_500, 86_510)]
    assert compact(root).files_before == 2, "what was merged is merged again with what came after"
    assert numbers_in(root) == [*EXPECTED, *range(86_500, 86_510)]
    assert verify(root).problems == []
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
    assert die_at(step, 2, lambda: compact(root, retention=NO_RETENTION)) == -signal.SIGKILL
    assert numbers_in(root) == EXPECTED
    make(root, root.parent / "checkpoint")
    assert numbers_in(root) == EXPECTED
    put(root, claim, 20, stage(root, range(86_500, 86_510), stem="later"))
    compact(root)
    assert numbers_in(root) == [*EXPECTED, *range(86_500, 86_510)]
    assert verify(root).problems == []


def test_replaced_files_stay_for_readers_until_the_retention_has_passed(lake: tuple[Path, str]) -> None:
    root, _ = lake
    before = set(files(root))
    compact(root)
    assert before <= present(root), "a reader may hold the log of a moment ago"
    assert (len(files(root)), verify(root).replaced) == (2, 20)
    make(root, root.parent / "checkpoint")
    assert before <= present(root), "a start of the stream removes what no commit names, not what one has named"
    compact(root, retention=NO_RETENTION)
    assert present(root) == set(files(root))
    assert sorted(root.glob("day=*")) == [root / "day=2026-11-21", root / "day=2026-11-22"]
    assert verify(root, full=True).problems == []


def in_checkpoint(root: Path) -> tuple[int, set[str], set[str]]:
    """The newest checkpoint of the log: of which commit, the lake's files, and those that were replaced."""
    newest = max((root / "_delta_log").glob("*.checkpoint.parquet"))
    rows = pq.read_table(newest).to_pylist()
    held, replaced = ({row[kind]["path"] for row in rows if row[kind]} for kind in ("add", "remove"))
    return int(newest.name[:20]), held, replaced


def test_a_checkpoint_of_the_log_names_replaced_files_for_as_long_as_they_are_there(
    lake: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log named them for 30 days, whatever the lake's retention: 2.6 million with a commit a second. Tests had only
    looked at the sizes of data files."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 3)
    root, claim = lake
    rows = list(EXPECTED)

    def go_on() -> tuple[int, set[str], set[str]]:
        for _ in range(3):
            number = CommitLog(root).head().newest
            assert number is not None
            rows.extend(range(rows[-1] + 1, rows[-1] + 11))
            put(root, claim, number.batch + 1, stage(root, rows[-10:], stem=str(number.batch)))
        return in_checkpoint(root)

    before = {str(path.relative_to(root)) for path in files(root)}
    merged = compact(root)
    opened = CommitLog(root).head().number - merged.files_after  # before the first merge
    assert (merged.files_before, len(before)) == (20, 20)
    assert go_on()[2] == before
    old = DeltaTable(str(root), version=opened).to_pyarrow_dataset().to_table(columns=["number"])
    assert sorted(old.column("number").to_pylist()) == EXPECTED, "a reader of the version before"
    assert {file.name for file in CommitLog(root).state(opened).in_order} == before
    assert open_again(root, before)
    expire(root, NO_RETENTION)
    number, held, replaced = go_on()
    assert (replaced, held) == (set(), {str(path.relative_to(root)) for path in files(root)} - after(root, number))
    assert numbers_in(root) == rows
    for reader in ("pyarrow", "files"):
        assert READERS[reader](root) == (len(rows), len(rows), rows[0], rows[-1])
    assert json.loads((root / "_delta_log" / "_last_checkpoint").read_text())["version"] == number
    assert verify(root).problems == []


def after(root: Path, number: int) -> set[str]:
    """The files that commits after ``number`` have added."""
    return {file.name for commit in CommitLog(root).commits(number) for file in commit.files}


def open_again(root: Path, replaced: set[str]) -> bool:
    """Open the lake, which removes what no commit names. Returns whether ``replaced`` are still there."""
    make(root, root.with_name("checkpoint"))
    return all((root / name).exists() for name in replaced)


def test_filters_on_any_column_find_their_rows_by_every_reader(lake: tuple[Path, str]) -> None:
    """``deltalake`` takes missing bounds of a column for NULL: for any filter on such a column, pyarrow and DuckDB left
    out every file, and gave no rows and no error."""
    import duckdb
    import polars
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

    root, _ = lake
    number, least = EXPECTED[150], token(EXPECTED[150])
    for _ in range(2):
        dataset = DeltaTable(str(root)).to_pyarrow_dataset()
        for column, value in (("number", number), ("token", least)):
            assert dataset.to_table(filter=ds.field(column) >= value).num_rows == 50
            # A result that is not fetched to its end would keep DuckDB's shared connection from the tests that follow.
            counted = duckdb.execute(f"SELECT count(*) FROM dataset WHERE {column} >= ?", [value]).fetchall()
            assert counted == [(50,)]
            assert polars.scan_delta(str(root)).filter(polars.col(column) >= value).collect().height == 50
            assert len(DeltaTable(str(root)).to_pandas(filters=[(column, ">=", value)])) == 50
        assert dataset.to_table(filter=ds.field("number").is_null()).num_rows == 0
        compact(root)


@pytest.mark.parametrize("held", ["opened", "named"])
def test_a_reader_held_between_its_two_calls_misses_nothing(lake: tuple[Path, str], held: str) -> None:
    """A reader that had opened a day's directory, or listed it, and was held while a compaction swapped the directory,
    found 0 and 10 of 200 rows, without an error. The tests that read beside compactions did so once in a while and
    never between those two calls. Now readers name files, and what is named stays."""
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

    root, _ = lake
    table = DeltaTable(str(root))
    dataset = table.to_pyarrow_dataset() if held == "named" else None
    compact(root)
    for number in range(20, 40):
        put(root, _, number, stage(root, range(86_300 + number * 10, 86_310 + number * 10), stem=str(number)))
    compact(root)
    dataset = dataset or table.to_pyarrow_dataset()
    assert isinstance(dataset, ds.Dataset)
    assert sorted(dataset.to_table(columns=["number"]).column(0).to_pylist()) == EXPECTED


@pytest.mark.long
def test_a_stream_compacts_every_so_many_commits_and_rewrites_rows_rarely(tmp_path: Path) -> None:
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    claim = make(root, checkpoint).claim
    policy = CompactionPolicy(every=8, fan_in=8, target_bytes=1 << 30)
    rewritten = 0
    commits = 128
    for number in range(commits):
        staged = stage(root, range(number * 50, number * 50 + 50), stem=str(number), payload=200)
        commit = put(root, claim, number, staged)
        if commit is not None:
            rewritten += compact_after(root, commit, policy).bytes_before
    assert numbers_in(root) == list(range(commits * 50))
    assert len(files(root)) <= 16
    assert len(present(root)) > len(files(root))
    assert rewritten <= 4 * sum(file.stat().st_size for file in files(root)), (
        "log4(128 / 8) times, once more and a little"
    )
    assert verify(root).problems == []


def test_the_last_small_files_are_merged_where_nothing_more_comes(tmp_path: Path) -> None:
    """A stream merged only after a number of commits: what came before a pause stayed in small files until the next
    load, and replaced files stayed just as long. No test had looked at a lake whose stream had become idle."""
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    claim = make(root, checkpoint).claim
    policy = CompactionPolicy(every=64, fan_in=8, retention=NO_RETENTION)
    for number in range(10):
        assert put(root, claim, number, stage(root, range(number * 50, number * 50 + 50), stem=str(number))) is not None
        if number == 6:
            assert compact_idle(root, policy).files_before == 0, "too few to be worth it"
    assert compact_idle(root, policy).files_before == 10
    assert len(files(root)) == len(present(root)) == 1
    assert compact_idle(root, policy).files_before == 0
    assert put(root, claim, 10, stage(root, range(500, 501))) is not None
    assert compact_idle(root, policy).files_before == 0, "a large file is not written again for a small one"
    assert numbers_in(root) == list(range(501))
    assert verify(root, full=True).problems == []


def test_two_compactions_at_once_are_refused(lake: tuple[Path, str]) -> None:
    root, _ = lake
    with durable.locked(CommitLog(root).layout.compaction_lock), pytest.raises(SinkError, match="another compaction"):
        compact(root)


def test_a_place_that_is_no_lake_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a lake"):
        compact(tmp_path)
    with pytest.raises(UsageError, match="is not a lake"):
        verify(tmp_path / "missing")
