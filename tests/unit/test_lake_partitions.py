"""Lakes that are partitioned by hour and collection: the same events for every reader, with correct partitions and
order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.base.durable import read_json, write_sealed
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.layout import folder_of
from tailrace.lake.store.manifest import StagedFile
from tailrace.lake.store.part_writer import FileLimits, PartWriter
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.retention import expire
from tailrace.lake.store.verification import verify
from tests.unit.lake_events import COLUMNS, STREAM, as_spark_plans, begin, planned_for, put, token

#: Names that cannot be directories, look like numbers or dates, or differ in case alone; and events of no collection.
NAMES = ["orders", "Orders", "2024", "a/b", "..", "x" * 200, "näme %20 = #", "2026-01-01", None]
LAKE_COLUMNS = [*COLUMNS, {"name": "collection", "type": "string", "nullable": True, "metadata": {}}]
DIVISIONS = [("hour",), ("collection",), ("day", "hour", "collection")]


def events(numbers: Sequence[int]) -> pa.RecordBatch:
    """Events of made-up collections; number n happens n seconds after midnight."""
    return pa.record_batch(
        {
            "token": pa.array([token(n) for n in numbers], pa.string()),
            "number": pa.array(numbers, pa.int64()),
            "event": pa.array([random.Random(n).randbytes(9) for n in numbers], pa.binary()),
            "collection": pa.array([NAMES[n % len(NAMES)] for n in numbers], pa.string()),
        }
    )


def stage(root: Path, numbers: Sequence[int], names: Sequence[str], **more: Any) -> tuple[StagedFile, ...]:
    writer = PartWriter(root, f"s{numbers[0]}", partitioning=Partitioning.of(names), **more)
    return writer.write_all([events(numbers[:7]), events(numbers[7:])])


def fill(root: Path, names: Sequence[str], *, batches: int = 12) -> list[int]:
    """A lake of ``batches`` micro-batches over some hours of two days. Gives the numbers of its events."""
    checkpoint = root.with_name("checkpoint")
    claim = open_lake(root, checkpoint, STREAM, LAKE_COLUMNS, partitioning=Partitioning.of(names)).claim
    begin(checkpoint)
    everything = []
    for number in range(batches):
        start = 86_400 - 6 * 1_800 + number * 1_800
        numbers = list(range(start, start + 1_800, 60))
        assert put(root, claim, number, stage(root, numbers, names)) is not None
        everything += numbers
    return everything


def by_every_reader(root: Path, columns: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
    """The lake's rows of ``columns``, in the order of the stream, as each reader sees them."""
    import duckdb
    import polars
    from deltalake import DeltaTable

    lake = DeltaTable(root).to_pyarrow_dataset()
    named = ", ".join(columns)
    frame = DeltaTable(root).to_pandas().sort_values("number")
    table = lake.to_table(columns=list(columns)).sort_by("number")
    return {
        "duckdb": duckdb.sql(f"SELECT {named} FROM lake ORDER BY number").fetchall(),
        "polars": polars.scan_delta(str(root)).select(columns).sort("number").collect().rows(),
        "pandas": list(
            frame[list(columns)]
            .astype(object)
            .where(frame[list(columns)].notna(), None)
            .itertuples(index=False, name=None)
        ),
        "pyarrow": list(zip(*(table.column(name).to_pylist() for name in columns), strict=True)),
    }


@pytest.mark.long
@pytest.mark.parametrize("names", DIVISIONS, ids="+".join)
def test_every_reader_sees_every_event_and_its_partition(names: tuple[str, ...], tmp_path: Path) -> None:
    import duckdb
    import polars
    from deltalake import DeltaTable

    root = tmp_path / "lake"
    numbers = fill(root, names)
    expected = [(n, NAMES[n % len(NAMES)], *([n // 3600 % 24] if "hour" in names else [])) for n in numbers]
    columns = ["number", "collection", *(["hour"] if "hour" in names else [])]
    before = by_every_reader(root, columns)
    assert before == dict.fromkeys(before, expected)
    assert verify(root, full=True).problems == []
    files = CommitLog(root).live_files()
    result = compact(root)
    assert result.files_after < result.files_before == len(files)
    assert verify(root, full=True).problems == []
    after = by_every_reader(root, columns)
    assert after == dict.fromkeys(after, expected)
    for file in CommitLog(root).live_files():
        rows = pq.read_table(root / file.name, partitioning=None)
        if "collection" in names:
            assert set(rows.column("collection").to_pylist()) == {file.collection}
        if "hour" in names:
            assert {n // 3600 % 24 for n in rows.column("number").to_pylist()} == {int(str(file.partition["hour"]))}
        assert set(file.partition) == {"day", *names}
    for name in NAMES:
        lake = DeltaTable(root).to_pyarrow_dataset()
        assert lake is not None
        wanted = len([one for one in expected if one[1] == name])
        asked = "collection IS NULL" if name is None else f"collection = '{name}'"
        assert duckdb.sql(f"SELECT 1 FROM lake WHERE {asked}").fetchall() == [(1,)] * wanted, "readers skip files by it"
        same = polars.col("collection").is_null() if name is None else polars.col("collection") == name
        assert polars.scan_delta(str(root)).filter(same).collect().height == wanted
    assert expire(root, CompactionPolicy().retention * 0) == result.files_before
    assert by_every_reader(root, columns) == after


def test_a_checkpoint_of_the_log_keeps_the_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.lake.store.commit_log.CHECKPOINT_EVERY", 6)
    root = tmp_path / "lake"
    fill(root, ["hour", "collection"])
    assert list(root.glob("_delta_log/*.checkpoint.parquet"))
    log = CommitLog(root)
    one_by_one = {file.name: file.partition for commit in log.commits() for file in commit.files}
    assert {file.name: file.partition for file in log.live_files()} == one_by_one
    compact(root)
    assert verify(root, full=True).problems == []


def test_many_collections_need_few_open_files_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lake.store.part_writer._OPEN_MAX", 4)
    limits = FileLimits(row_group_rows=3, row_group_bytes=100)
    root = tmp_path / "lake"
    fill(root, ["collection"], batches=1)
    numbers = list(range(90_000, 90_100))
    writer = PartWriter(root, "many", partitioning=Partitioning.of(["collection"]), limits=limits)
    files = writer.write_all([events(numbers[first : first + 25]) for first in range(0, 100, 25)])
    assert len(files) > len(NAMES)
    claim = json.loads((root / "_tailrace" / "lake.json").read_text())["claim"]
    assert put(root, claim, 1, files) is not None
    assert [n for n, _ in by_every_reader(root, ["number", "collection"])["pyarrow"]][-100:] == numbers
    assert verify(root, full=True).problems == []


def test_collections_of_few_rows_have_one_file_each_however_many_they_are(tmp_path: Path) -> None:
    """Each batch of events from more than 64 collections made a file for each of them; no test had so many."""
    root = tmp_path / "lake"
    fill(root, ["collection"], batches=0)
    names = [f"c{number:03d}" for number in range(150)]
    batches = [
        pa.record_batch({"token": [token(n) for n in numbers], "collection": [names[n % 150] for n in numbers]})
        for numbers in (range(90_000 + first, 90_300 + first) for first in range(0, 3000, 300))
    ]
    files = PartWriter(root, "many", partitioning=Partitioning.of(["collection"])).write_all(batches)
    assert len(files) == 150
    assert {file.rows for file in files} == {20}


def test_files_of_a_collection_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    fill(root, ["collection"], batches=1)
    claim = json.loads((root / "_tailrace" / "lake.json").read_text())["claim"]
    first, second = stage(root, [90_000], ["collection"]), stage(root, [90_000 + len(NAMES)], ["collection"])
    with pytest.raises(SinkError, match="out of order"):
        put(root, claim, 1, (*second, *first))
    early = stage(root, [100], ["collection"])
    with pytest.raises(SinkError, match="already reaches"):
        put(root, claim, 1, (*early, *second), as_spark_plans(root, 1, planned_for(second)))


def test_what_a_lake_cannot_be_divided_by_is_refused(tmp_path: Path) -> None:
    for name, hint in (
        ("days", "Did you mean 'day'"),
        ("colection", "'collection'"),
        ("month", "can be partitioned by d"),
    ):
        with pytest.raises(UsageError, match=f"cannot be partitioned by '{name}'") as refused:
            Partitioning.of([name])
        assert hint in str(refused.value)
    with pytest.raises(UsageError, match="have no 'collection'"):
        Partitioning.of(["collection"]).check_columns(["token", "event"])
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    open_lake(root, checkpoint, STREAM, LAKE_COLUMNS, partitioning=Partitioning.of(["hour"]))
    with pytest.raises(UsageError, match="partitioned by day, hour, not by day"):
        open_lake(root, checkpoint, STREAM, LAKE_COLUMNS, partitioning=Partitioning())
    open_lake(root, checkpoint, STREAM, LAKE_COLUMNS)
    held = root / "_tailrace" / "lake.json"
    known = read_json(held) or {}
    known.pop("sha256")
    for damaged in ("day", ["month"], [7]):
        write_sealed(held, {**known, "partitionBy": damaged})
        with pytest.raises((SinkError, UsageError), match=r"lake\.json|cannot be partitioned"):
            open_lake(root, checkpoint, STREAM, LAKE_COLUMNS)


def test_a_file_in_the_wrong_partition_is_found(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    fill(root, ["hour"], batches=1)
    log = CommitLog(root)
    path = log.layout.commit(1)
    text = path.read_text()
    name = log.live_files()[0].name
    hour = name.split("/")[1]
    path.write_text(text.replace(f"/{hour}/", "/hour=03/"))
    (root / "_tailrace" / "head.json").unlink()
    with pytest.raises(SinkError, match="another day or hour"):
        log.live_files()


def test_nothing_is_removed_behind_a_link(tmp_path: Path) -> None:
    """Only a file's own directory was checked, which was enough while there was one level of directories."""
    root = tmp_path / "lake"
    fill(root, ["hour"], batches=2)
    compact(root, target_bytes=1 << 20)
    for day in list(root.glob("day=*")):
        day.rename(tmp_path / day.name)
        day.symlink_to(tmp_path / day.name)
    before = sorted(tmp_path.glob("day=*/**/*.parquet"))
    assert expire(root, CompactionPolicy().retention * 0) == 0
    assert sorted(tmp_path.glob("day=*/**/*.parquet")) == before != []


def test_a_collections_directory_is_safe_and_its_own() -> None:
    folders = [folder_of(name) for name in NAMES]
    assert len(set(folders)) == len(folders)
    assert all(len(folder) < 140 and "=" not in folder and "/" not in folder for folder in folders)
    files = [StagedFile("day=2026-11-21/" + "0" * 16 + "-00000-a" + "0" * 32 + ".parquet", 1, 1, "", "", "")]
    assert replace(files[0]).partition == {"day": "2026-11-21"}
