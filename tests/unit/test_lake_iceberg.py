"""A lake as an Iceberg table: equal to its commits, or refused."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import bson
import pyarrow as pa
import pytest

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.errors import SinkError, UsageError
from tailrace.lake.iceberg.lake_mirror import LakeMirror, left_behind
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.store.changing import changed_name, commit_change, lake_before
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact, compact_after
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.erasure import drop_days, erase
from tailrace.lake.store.identity import open_lake, read_identity
from tailrace.lake.store.manifest import LakeChange, StagedFile
from tailrace.lake.store.part_writer import PartWriter, opened_checked
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.retention import expire
from tailrace.lake.store.verification import verify
from tests.tables.rest_catalog import TOKEN, rest_catalog
from tests.unit.lake_events import COLUMNS, STREAM, begin, put, token
from tests.unit.lake_iceberg import (
    catalog_of,
    is_shown,
    mirror_of,
    newest_rows,
    settings_of,
    table_of,
    versions_shown,
)

pytestmark = pytest.mark.filterwarnings("ignore:Iceberg scan planning")  # Polars would like a package of its own
LAKE_COLUMNS = [*COLUMNS, {"name": "collection", "type": "string", "nullable": True, "metadata": {}}]
NAMES = ["orders", "Orders", "2024", "a/b", "näme %20 = #", None]
HOUR = 3600


class Grown:
    """A lake of made-up events that a catalogue follows. Event n is of second n after midnight, or of hour n."""

    def __init__(self, folder: Path, *names: str, step: int = 1) -> None:
        self.root = folder / "lake"
        self.checkpoint = folder / "checkpoint"
        self.partitioning = Partitioning.of(names)
        self.step = step
        self.opened()
        self.mirror = mirror_of(self.root)
        self.number = self.count = 0

    def opened(self) -> None:
        """As a start opens it."""
        opening = open_lake(self.root, self.checkpoint, STREAM, LAKE_COLUMNS, partitioning=self.partitioning)
        self.claim = opening.claim
        begin(self.checkpoint)

    def staged(self, numbers: Iterable[int]) -> tuple[StagedFile, ...]:
        numbers = list(numbers)
        tokens = [token(number * self.step) for number in numbers]
        event = [bson.encode({"_id": {"_data": token(n * self.step)}, "documentKey": {"_id": n}}) for n in numbers]
        batch = pa.record_batch(
            {
                "token": pa.array(tokens, pa.string()),
                "number": pa.array(numbers, pa.int64()),
                "event": pa.array(event, pa.binary()),
                "collection": pa.array([NAMES[n % len(NAMES)] for n in numbers], pa.string()),
            }
        )
        return PartWriter(self.root, f"s{numbers[0]}", partitioning=self.partitioning).write_all([batch])

    def add(self, events: int = 3, *, shown: bool = True) -> None:
        commit = put(self.root, self.claim, self.number, self.staged(range(self.count, self.count + events)))
        assert commit is not None
        self.number += 1
        self.count += events
        if shown:
            self.mirror.follow()

    def numbers(self) -> list[int]:
        return [row["number"] for row in newest_rows(self.root)]

    def head(self) -> int:
        return CommitLog(self.root).head().number

    def set_back(self, copy: Path) -> None:
        """Put a copy of the lake's log and state in their place; Iceberg's files stay."""
        for name in ("_delta_log", "_tailrace"):
            shutil.rmtree(self.root / name)
            shutil.copytree(copy / name, self.root / name)
        shutil.rmtree(self.checkpoint)
        self.opened()


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Grown]:
    grown = Grown(tmp_path)
    yield grown
    grown.mirror.close()


# -- what readers read ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_commit_is_a_snapshot_that_every_reader_reads(lake: Grown) -> None:
    for _ in range(3):
        lake.add()
    assert versions_shown(lake.root) == [1, 2, 3]
    assert lake.numbers() == list(range(9))
    assert table_of(lake.root).current_snapshot().summary["tailrace.token"] == token(8)
    assert table_of(lake.root).scan().to_arrow().column("number").to_pylist() == list(range(9))  # in the stream's order
    assert lake.mirror.fault() is None


@pytest.mark.parametrize(
    "names",
    [  # the guard of the slow ones is the one that is divided by both
        pytest.param(("hour",), marks=pytest.mark.slow),
        pytest.param(("collection",), marks=pytest.mark.slow),
        pytest.param(("hour", "collection"), marks=pytest.mark.long),
    ],
    ids="+".join,
)
def test_partitions_are_read_and_pruned_by(names: tuple[str, ...], tmp_path: Path) -> None:
    lake = Grown(tmp_path, *names, step=HOUR)
    for _ in range(3):
        lake.add(13)
    lake.mirror.follow()
    assert versions_shown(lake.root) == [1, 2, 3]
    rows = newest_rows(lake.root)
    assert [row["day"] for row in rows[23:26]] == [date(2026, 11, 21), date(2026, 11, 22), date(2026, 11, 22)]
    found = table_of(lake.root)
    assert found.scan("day = '2026-11-22'").to_arrow().num_rows == 15
    files = sum(1 for _ in found.scan("day = '2026-11-22'").plan_files())
    assert files < sum(1 for _ in found.scan().plan_files())
    if "hour" in names:
        assert sorted(row["number"] for row in found.scan("hour = 3").to_arrow().to_pylist()) == [3, 27]
    if "collection" in names:
        given = found.scan("collection = 'a/b'").to_arrow().to_pylist()
        assert sorted(row["number"] for row in given) == list(range(3, 39, 6))
    nothing = found.scan("collection is null").to_arrow().column("number").to_pylist()
    assert sorted(nothing) == list(range(5, 39, 6))
    compact(lake.root, release=lake.mirror.release)
    lake.mirror.follow()
    assert newest_rows(lake.root) == rows
    assert mirror_of(lake.root).fault() is None
    shown = table_of(lake.root).metadata_location
    mirror_of(lake.root).follow()  # a process that knows nothing finds nothing to do
    assert table_of(lake.root).metadata_location == shown


def test_iceberg_is_turned_on_for_a_lake_with_history_off_and_on_again(lake: Grown) -> None:
    for _ in range(3):
        lake.add(shown=False)
    assert left_behind(lake.root) is None
    lake.mirror.follow()
    assert versions_shown(lake.root) == [3]
    for _ in range(2):
        lake.add(shown=False)
    assert "its Iceberg snapshots get no new events" in (left_behind(lake.root) or "")
    compact(lake.root, retention=timedelta(1), release=lambda _: None)
    mirror_of(lake.root).follow()
    assert versions_shown(lake.root) == [3, 6]
    assert lake.numbers() == list(range(15))


# -- two records of one truth -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["commit.log", "commit.head", "iceberg.written", "iceberg.shown"])
def test_a_run_that_dies_between_the_two_is_made_good(lake: Grown, step: str) -> None:
    lake.add()

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            lake.add()
    finally:
        durable.observe_steps(None)
    assert set(versions_shown(lake.root)) <= {1, 2}
    lake.opened()
    for _ in range(2):  # the second time there is nothing to do
        mirror_of(lake.root).follow()
        assert versions_shown(lake.root) == [1, 2]
    assert lake.numbers() == list(range(6))


@pytest.mark.parametrize("added", [0, 1, 3])
def test_who_knows_the_lake_shows_a_commit_that_its_head_does_not_have(lake: Grown, added: int) -> None:
    """It was shown only with the next commit. In the test above a new mirror looks, which knows nothing yet."""
    for _ in range(added):
        lake.add()
    lake.mirror.follow()
    known = CommitLog(lake.root).layout.head.read_bytes()
    lake.add(shown=False)
    CommitLog(lake.root).layout.head.write_bytes(known)  # as after a death between the commit and the head
    lake.mirror.follow()
    assert versions_shown(lake.root)[-1] == added + 1
    assert lake.numbers() == list(range(3 * (added + 1)))
    lake.mirror.follow()
    lake.opened()
    lake.add()
    assert versions_shown(lake.root)[-1] == added + 2


def test_a_lake_that_was_set_back_is_shown_as_it_is(lake: Grown, tmp_path: Path) -> None:
    lake.add()
    shutil.copytree(lake.root, tmp_path / "copy")
    for _ in range(2):
        lake.add()
    lake.set_back(tmp_path / "copy")
    assert mirror_of(lake.root).fault() == "is of version 3, and the table's newest is 1"
    mirror_of(lake.root).follow()
    assert versions_shown(lake.root) == [1]
    assert lake.numbers() == list(range(3))


def test_a_lake_that_was_set_back_and_grew_again_while_nobody_looked(lake: Grown, tmp_path: Path) -> None:
    """Its commits have the numbers of commits that no longer exist, and other events."""
    lake.add()
    shutil.copytree(lake.root, tmp_path / "copy")
    for _ in range(2):
        lake.add()
    lake.set_back(tmp_path / "copy")
    lake.count, lake.number = 100, 0
    for _ in range(2):
        lake.add(2, shown=False)
    assert mirror_of(lake.root).fault() == "has other files than version 3 of the table"
    lake.add(2, shown=False)
    mirror_of(lake.root).follow()
    assert versions_shown(lake.root) == [1, 4]
    assert lake.numbers() == [*range(3), *range(100, 106)]


def test_snapshots_of_commits_that_the_log_has_dropped_go_if_nobody_knows_them(
    lake: Grown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lake.store.commit_log.CHECKPOINT_EVERY", 4)
    monkeypatch.setattr("tailrace.lake.store.commit_log.COMMITS_KEPT", 4)
    lake.add()
    shutil.copytree(lake.root, tmp_path / "copy")
    lake.add()
    lake.set_back(tmp_path / "copy")
    lake.count, lake.number = 100, 0
    for _ in range(12):
        lake.add(1, shown=False)
    assert CommitLog(lake.root).digest_of(2) is None
    mirror_of(lake.root).follow()
    assert versions_shown(lake.root) == [13]


def test_a_lake_that_was_restored_as_a_whole_is_refused_until_its_table_is_dropped(lake: Grown, tmp_path: Path) -> None:
    """Iceberg's files were restored too: the catalogue names metadata that is no longer there."""
    lake.add()
    shutil.copytree(lake.root, tmp_path / "copy")
    lake.add()
    shutil.rmtree(lake.root)
    shutil.move(tmp_path / "copy", lake.root)
    for ask in (LakeMirror.check, LakeMirror.follow):
        with pytest.raises(SinkError, match=r"the metadata of the Iceberg table lake\.events cannot be read") as found:
            ask(mirror_of(lake.root))
        assert "Drop it from the catalogue" in (found.value.hint or "")
    catalog_of(lake.root).drop_table("lake.events")
    mirror_of(lake.root).follow()
    assert versions_shown(lake.root) == [1]


def test_a_catalogue_that_was_set_back_is_brought_up(lake: Grown) -> None:
    lake.add()
    old = table_of(lake.root).metadata_location
    lake.add()
    with sqlite3.connect(lake.root.parent / "catalog.db") as catalog:
        catalog.execute("UPDATE iceberg_tables SET metadata_location = ?", [old])
    lake.add()
    assert versions_shown(lake.root) == [1, 3]
    assert lake.numbers() == list(range(9))


def test_a_catalogue_whose_file_was_replaced_is_opened_again(lake: Grown, tmp_path: Path) -> None:
    """An open connection keeps the old file and cannot write: the sink's process went on using it, even in the next
    query. Tests had changed the catalogue within its file, or had opened it anew."""
    lake.add()
    shutil.copy(tmp_path / "catalog.db", tmp_path / "copy.db")
    lake.add()
    (tmp_path / "copy.db").replace(tmp_path / "catalog.db")
    lake.add()
    assert versions_shown(lake.root) == [1, 3]


def test_a_copy_of_the_lake_is_refused(lake: Grown, tmp_path: Path) -> None:
    lake.add()
    shutil.copytree(lake.root, tmp_path / "elsewhere" / "lake")
    copy = LakeMirror(tmp_path / "elsewhere" / "lake", settings_of(tmp_path))
    for ask in (copy.check, copy.follow):
        with pytest.raises(SinkError, match=r"the catalogue's table lake\.events has other files: file://.*/lake/_ice"):
            ask()
    assert "has other files" in (copy.fault() or "")


def test_another_lake_in_this_place_is_shown_alone(lake: Grown, tmp_path: Path) -> None:
    for _ in range(2):
        lake.add()
    kept = tmp_path / "kept"
    shutil.move(lake.root / "_iceberg", kept)
    shutil.rmtree(lake.root)
    shutil.rmtree(lake.checkpoint)
    other = Grown(tmp_path)
    shutil.move(kept, lake.root / "_iceberg")
    for _ in range(3):
        other.add(1, shown=False)
    other.mirror.follow()
    assert versions_shown(lake.root) == [3]
    assert other.numbers() == [0, 1, 2]


def test_a_table_of_somebody_else_is_refused(lake: Grown) -> None:
    catalog = catalog_of(lake.root)
    catalog.create_namespace("lake")
    catalog.create_table("lake.events", pa.schema([("x", pa.int64())]), location=f"file://{lake.root.parent}/x")
    with pytest.raises(SinkError, match=r"a table lake\.events that is not a table of Tailrace"):
        mirror_of(lake.root).check()


def test_somebody_else_has_changed_the_table(lake: Grown) -> None:
    lake.add()
    found = table_of(lake.root)
    found.delete("number = 0")
    with pytest.raises(SinkError, match=r"another program has changed the Iceberg table lake\.events \(snapshot \d+\)"):
        lake.add()
    catalog_of(lake.root).drop_table("lake.events")
    mirror_of(lake.root).follow()
    assert versions_shown(lake.root) == [2]
    with table_of(lake.root).update_spec() as update:
        update.remove_field("day")
    with pytest.raises(SinkError, match=r"\(its partitions are different\)"):
        mirror_of(lake.root).check()


def test_metadata_that_is_damaged_gone_or_half_there(lake: Grown) -> None:
    lake.add()
    folder = lake.root / "_iceberg" / "metadata"
    for path in folder.glob("*.avro"):
        path.write_bytes(path.read_bytes()[:40])
    assert "cannot be read" in (mirror_of(lake.root).fault() or "")
    mirror_of(lake.root).follow()
    assert lake.numbers() == [0, 1, 2]
    for path in folder.glob("*.avro"):
        path.unlink()
    lake.add()  # this process has them in memory
    mirror_of(lake.root).follow()
    assert lake.numbers() == list(range(6))
    assert mirror_of(lake.root).fault() is None
    shutil.rmtree(folder)
    with pytest.raises(SinkError, match=r"the metadata of the Iceberg table lake\.events cannot be read"):
        mirror_of(lake.root).follow()


def test_of_two_processes_each_finds_what_the_other_has_shown(lake: Grown) -> None:
    other = mirror_of(lake.root)
    for _ in range(2):
        lake.add()
        lake.add(shown=False)
        other.follow()
    lake.mirror.follow()
    assert versions_shown(lake.root) == [1, 2, 3, 4]
    assert is_shown(lake.root)


# -- a lake that changes ----------------------------------------------------------------------------------------------


def test_snapshots_go_before_the_files_that_compaction_has_replaced(lake: Grown) -> None:
    for _ in range(4):
        lake.add()
    with pytest.raises(UsageError, match="has Iceberg snapshots, which would lose their files"):
        compact(lake.root)
    with pytest.raises(UsageError, match="has Iceberg snapshots, which would lose their files"):
        expire(lake.root, timedelta(0))
    compact(lake.root, release=lake.mirror.release)
    lake.mirror.follow()
    assert versions_shown(lake.root) == [1, 2, 3, 4, 5]
    assert expire(lake.root, timedelta(0), release=lake.mirror.release) == 4
    assert versions_shown(lake.root) == [5]
    assert lake.numbers() == list(range(12))


def test_a_stream_keeps_replaced_files_while_the_catalogue_is_away(
    lake: Grown, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = CompactionPolicy(every=1, fan_in=2, retention=timedelta(0))

    def away(_: datetime) -> None:
        raise SinkError("the Iceberg catalogue does not answer")

    for _ in range(6):
        lake.add()
    newest = next(iter(CommitLog(lake.root).commits(5)))
    compact_after(lake.root, newest, policy, away)
    assert "old files were not removed: the Iceberg catalogue does not answer" in caplog.text
    assert versions_shown(lake.root) == [1, 2, 3, 4, 5, 6]
    compact_after(lake.root, newest, policy, lake.mirror.release)
    lake.mirror.follow()
    assert versions_shown(lake.root) == [lake.head()]
    assert len(list(lake.root.rglob("day=*/*.parquet"))) == 1


def test_what_is_erased_is_in_no_snapshot(lake: Grown) -> None:
    for _ in range(3):
        lake.add()
    report = erase(lake.root, {"documentKey._id": 4}, vacuum=True, release=lake.mirror.release)
    lake.mirror.follow()
    assert (report.rows, report.replaced) == (1, 0)
    assert versions_shown(lake.root) == [4]
    assert lake.numbers() == [0, 1, 2, 3, 5, 6, 7, 8]
    erase(lake.root, {"documentKey._id": 5}, vacuum=True)  # it does not wait for a catalogue
    mirror_of(lake.root).follow()
    assert lake.numbers() == [0, 1, 2, 3, 6, 7, 8]


def test_days_that_are_dropped(tmp_path: Path) -> None:
    lake = Grown(tmp_path, step=10 * HOUR)
    for _ in range(3):
        lake.add()
    drop_days(lake.root, date(2026, 11, 23), vacuum=True, release=lake.mirror.release)
    lake.mirror.follow()
    assert lake.numbers() == [5, 6, 7, 8]
    assert versions_shown(lake.root) == [4]


def test_columns_that_come_later(lake: Grown) -> None:
    for _ in range(2):
        lake.add()
    numbers = {one.name: one.field_id for one in table_of(lake.root).schema().fields}
    late = [*LAKE_COLUMNS, {"name": "late", "type": "timestamp", "nullable": True, "metadata": {}}]
    with lake_before(lake.root) as before:
        made: list[StagedFile] = []
        for file in before.state.in_order:
            with opened_checked(lake.root, file) as parquet:
                table = parquet.read()
            moments = pa.array([datetime(2026, 11, 21, tzinfo=UTC)] * len(table), pa.timestamp("us", "UTC"))
            batches = table.append_column("late", moments).to_batches()
            made += PartWriter(lake.root, "merge-x", name=changed_name).write_all(batches)
        change = LakeChange("later", ("columns",))
        commit_change(before, change, {**STREAM, "x": 1}, late, gone=before.state.in_order, made=made)
    lake.mirror.follow()
    assert versions_shown(lake.root) == [1, 2, 3]
    found = {one.name: one.field_id for one in table_of(lake.root).schema().fields}
    assert numbers.items() < found.items()
    assert {row["late"] for row in newest_rows(lake.root)} == {datetime(2026, 11, 21, tzinfo=UTC)}
    assert verify(lake.root, full=True).sound


@pytest.mark.long
def test_a_lake_has_twenty_snapshots_and_few_files_of_iceberg(lake: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.lake.iceberg.lake_mirror._SWEEP_EVERY", 12)
    monkeypatch.setattr("tailrace.lake.iceberg.lake_mirror._SWEEP_MS", -60_000)
    for _ in range(24):
        lake.add(1)
    assert [one.summary["tailrace.version"] for one in table_of(lake.root).snapshots()] == [
        str(number) for number in range(5, 25)
    ]
    assert len(list((lake.root / "_iceberg" / "metadata").iterdir())) <= 44
    assert lake.numbers() == list(range(24))


def test_where_a_lake_of_iceberg_cannot_lie(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a lake with Iceberg snapshots must have a path of plain ASCII"):
        LakeMirror(tmp_path / "a b", settings_of(tmp_path))


def test_a_lake_that_has_not_been_made_is_only_looked_for(tmp_path: Path) -> None:
    mirror = LakeMirror(tmp_path / "lake", settings_of(tmp_path))
    mirror.check()
    mirror.follow()
    assert not (tmp_path / "lake").exists()
    assert read_identity(tmp_path / "lake") is None


# -- commands, and a REST catalogue -----------------------------------------------------------------------------------


def test_commands_bring_the_catalogue_up(lake: Grown, capsys: pytest.CaptureFixture[str]) -> None:
    root, given = str(lake.root), ("--iceberg", settings_of(lake.root.parent).properties["uri"])
    for _ in range(3):
        lake.add()
    assert main(["lake", "compact", root]) == 1
    assert "which would lose their files" in capsys.readouterr().err
    assert main(["lake", "compact", root, *given]) == 0
    assert versions_shown(lake.root) == [1, 2, 3, 4]
    assert main(["lake", "expire", root, "--keep", "0s"]) == 1
    assert main(["lake", "expire", root, "--keep", "0s", *given]) == 0
    assert versions_shown(lake.root) == [4]
    match = ("--match", '{"documentKey._id": 4}')
    assert main(["lake", "erase", root, *match, "--dry-run", *given]) == 0
    assert versions_shown(lake.root) == [4]
    assert main(["lake", "erase", root, *match, *given]) == 0
    assert versions_shown(lake.root) == [4, 5]
    assert main(["lake", "erase", root, "--match", '{"documentKey._id": 5}']) == 0
    assert "Iceberg snapshots name them, or have lost them" in capsys.readouterr().out
    assert main(["lake", "verify", root, *given]) == 0
    assert "has the files of the commit that it states" in capsys.readouterr().out
    catalog_of(lake.root).drop_table("lake.events")
    assert main(["lake", "verify", root, *given]) == 1
    assert "the Iceberg table is not in the catalogue" in capsys.readouterr().out
    assert main(["lake", "status", root, *given]) == 2


def test_a_rest_catalogue(lake: Grown, tmp_path: Path) -> None:
    with rest_catalog(tmp_path / "catalog.db") as server:
        settings = IcebergSettings.of({"uri": server.uri, "token": TOKEN}, "lake.iceberg")
        assert IcebergSettings.from_text(settings.to_text()) == settings
        assert TOKEN not in repr(settings)
        lake.mirror = LakeMirror(lake.root, settings)
        for number in range(3):
            server.lost = number % 2
            lake.add()
        assert lake.mirror.fault() is None
        compact(lake.root, retention=timedelta(0), release=lake.mirror.release)
        lake.mirror.follow()
    assert versions_shown(lake.root) == [4]
    assert lake.numbers() == list(range(9))
