"""Old versions of a table: which ones stay, for readers and for ``as of``, and how much disk that costs."""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from deltalake import DeltaTable

from tailrace.base.object_place import object_place
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.tables import delta_table, publishing, versions
from tailrace.lake.tables.data_files import opened
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.holding import lock
from tailrace.lake.tables.pace import Cost, Pace
from tailrace.lake.tables.publishing import Publication
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.upkeep import Upkeep
from tailrace.lake.tables.versions import Keeping
from tests.amounts import amount
from tests.tables.aging import age
from tests.tables.features import Made


def aged(root: Path, count: int) -> tuple[Made, int]:
    """A table with a version each minute, and the time of the last one. Each has its number in the document."""
    made = Made(root, TableSchema())
    made.whole([{"_id": 0, "n": 0}])
    for number in range(1, count):
        made.change([{"_id": 0, "n": number}])
    return made, age(root)


def held(root: Path, version: int | None = None) -> list[int]:
    found: list[int] = DeltaTable(str(root), version=version).to_pyarrow_table(columns=["n"]).column(0).to_pylist()
    return found


def names(made: Made) -> list[str]:
    return [file.name for file in made.table.files()]


def test_old_versions_are_thinned_and_a_time_between_them_is_told_from_one_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version of a week was kept, with all of its files, however many there were."""
    monkeypatch.setattr(delta_table, "CHECKPOINT_EVERY", amount(12, 50))  # one is older than the oldest that is kept
    root = tmp_path / "t"
    count, retention = amount(40, 120), amount(24, 80)  # in minutes
    made, now = aged(root, count)
    keeping = Keeping(grace_h=10 / 60, retention_h=retention / 60, versions=4)
    versions.expire(root, keeping, names(made), now)
    whole = [number for number in range(count) if versions.is_whole(root, number)]
    assert whole[-11:] == list(range(count - 11, count)), "a reader that began ten minutes ago goes on"
    kept = whole[:-11]
    assert 4 <= len(kept) <= 6
    assert kept[0] <= count - retention, "as of reaches back as far as the retention"
    assert max(after - before for before, after in pairwise(whole)) <= retention // 4 + 1
    assert len([path for path in root.rglob("*.parquet") if path.parent.name != "_delta_log"]) == len(whole)
    assert len(list((root / "_delta_log").glob("*.json"))) < count, "and what of the log no kept version needs has gone"
    assert held(root) == [count - 1]
    for number in whole:
        assert held(root, number) == [number]
    # How long a version was valid is known if the next one is known.
    for time in range(101, 101 + count):
        base, following = versions.around(root, ClusterTime.of(time, 5))
        number = time - 101
        if number < kept[0]:
            assert base is None
            continue
        assert base is not None
        assert base.version == max(one for one in whole if one <= number)
        assert (following is None) == (base.version == count - 1)
        assert following is None or following.version == base.version + 1
    assert versions.expire(root, keeping, names(made), now) == []
    again = CollectionTable(root, "shop.orders", declared="")
    made.table = again
    made.change([{"_id": 0, "n": 500}])
    assert held(root) == [500]


def test_all_that_nobody_keeps_goes_and_what_a_crash_left_too(tmp_path: Path) -> None:
    root = tmp_path / "t"
    made, now = aged(root, 60)
    for name in ("left.parquet", ".begun.parquet", "by-0000000000000000/left.parquet"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"")
        os.utime(root / name, (1, 1))
    (root / "new.parquet").write_bytes(b"")
    os.utime(root / "new.parquet", (now / 1000 + 5, now / 1000 + 5))
    gone = versions.expire(root, Keeping(0), names(made), now + 1)
    assert len(gone) == 59 + 3
    assert (root / "new.parquet").exists()
    assert not (root / "by-0000000000000000").exists()
    assert held(root) == [59]
    assert len(list((root / "_delta_log").glob("*.json"))) == 10  # from the last checkpoint on


def test_what_fails_in_one_table_or_task_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One ``try`` was around both tasks: where small files could not be merged, old files were never removed."""
    tables = {}
    for name in ("a", "b"):
        made = Made(tmp_path / name, TableSchema())
        made.whole([{"_id": 1}])
        made.change([{"_id": 2}])
        tables[f"shop.{name}"] = made.table
    (broken,) = [file for file in tables["shop.a"].files() if "-" in file.name][:1]
    path = tmp_path / "a" / broken.name
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    for table in tables.values():
        (table.root / "left.parquet").write_bytes(b"")
        os.utime(table.root / "left.parquet", (1, 1))
    upkeep = Upkeep(TableSettings(tmp_path, (TableRule("shop.*"),), compact_every=1), 0)
    upkeep.compact(tables, 1)
    upkeep.expire(tables)
    assert "shop.a: small files were not merged" in caplog.text
    assert [len(list(table.files())) for table in tables.values()] == [2, 1]
    assert not any((table.root / "left.parquet").exists() for table in tables.values())


@pytest.mark.parametrize(("place", "least", "most"), [("disk", 10, 13), ("s3://bucket/tables", 3, 6)])
def test_a_resting_table_is_left_alone_once_its_old_files_have_gone(
    tmp_path: Path, place: str, least: int, most: int
) -> None:
    """A store is asked less often: each look costs requests."""
    looked: list[str] = []

    class Watched(CollectionTable):
        def expire(self, keeping: Keeping, now_ms: int | None = None) -> list[str]:
            looked.append(self.namespace)
            return super().expire(keeping, now_ms)

    now = [0.0]
    root = tmp_path if place == "disk" else object_place(place, beside=tmp_path)
    settings = TableSettings(root, (TableRule("shop.*"),), grace_h=100 / 3600)
    upkeep = Upkeep(settings, 0, lambda: now[0])
    made = Made(tmp_path / "t", TableSchema())
    made.table = Watched(tmp_path / "t", "shop.orders", declared="")
    made.whole([{"_id": 1}])
    for _ in range(60):
        upkeep.expire({"shop.orders": made.table})
        now[0] += 10.0
    assert least <= len(looked) <= most
    made.change([{"_id": 1, "n": 1}])
    upkeep.expire({"shop.orders": made.table})
    assert len(looked) <= most + 1


def test_replaced_bytes_stay_within_their_budget() -> None:
    now, live = [0.0], 100 << 20
    pace = Pace(lambda: now[0])
    replaced = writes = 0
    while now[0] < 600:
        if pace.wait() <= 0:
            pace.spent(live, live)
            replaced += live
            writes += 1
        now[0] += 1
    assert 10 <= writes <= 13, "the whole table each second, at first; then once a minute"
    assert replaced <= 13 * live
    now[0] += 600
    assert pace.wait() == 0
    small = Pace(lambda: now[0])
    for _ in range(60):
        assert small.wait() == 0, "a small table is written as often as it changes"
        small.spent(64 << 10, 64 << 10)
        now[0] += 1


@pytest.mark.parametrize(("merges", "seconds"), [(False, 60), (True, 20)])
def test_a_table_that_is_merged_has_a_larger_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merges: bool, seconds: float
) -> None:
    """It was that of tables whose files are rewritten: merging used it up, and commits waited."""
    monkeypatch.setattr(publishing, "time", SimpleNamespace(monotonic=lambda: 0.0))
    settings = TableSettings(tmp_path, (TableRule("shop.*"),), merge_on_read=merges)
    tables = SimpleNamespace(opened={"shop.a": SimpleNamespace(cost=Cost(300 << 20), live_bytes=100 << 20)})
    state = SimpleNamespace(position=lambda: None)
    publication = Publication(settings, cast(Any, state), cast(Any, tables), Mock())
    monkeypatch.setattr(publication, "_upkeep", Mock())
    monkeypatch.setattr(publication, "_tables", Mock(opened=tables.opened, note_damaged=lambda: False))
    publication._keep_up(1)
    assert publication.wait() == seconds, "what is more than twice the tables' bytes"
    assert tables.opened["shop.a"].cost == Cost()


def test_a_flipped_bit_in_a_data_file_is_found_where_it_is_read(tmp_path: Path) -> None:
    """Nothing in the files was checked: rows that were copied into a new file kept the error."""
    made = Made(tmp_path / "t", TableSchema())
    made.whole([{"_id": number, "text": f"text {number}"} for number in range(100)])
    (file,) = made.table.files()
    path = tmp_path / "t" / file.name
    content = path.read_bytes()
    with opened(made.table.root, file.name) as opening:
        truth = opening.read()
    found = 0
    for place in range(0, len(content), 13):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        try:
            with opened(made.table.root, file.name) as opening:
                assert opening.read().equals(truth), place  # a bit of a page's header that does not affect the rows
        except SinkError:
            found += 1
    assert found > len(content) / 13 * 0.9
    path.write_bytes(content[:-30] + b"?" + content[-29:])
    with pytest.raises(SinkError, match="is damaged") as raised:
        made.change([{"_id": 5, "text": "other"}])
    assert "tailrace tables rebuild" in str(raised.value.hint)
    assert made.table.version == 0


def test_the_directory_of_the_tables_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It was created with the umask's mode, so every user of the machine could read its documents."""
    os.close(lock(tmp_path / "t"))
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) & 0o077 == 0
    (tmp_path / "shared").mkdir(mode=0o755)
    os.close(lock(tmp_path / "shared"))
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755


def test_rows_are_arranged_along_a_curve(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", TableSchema.declared({"a": "int", "b": "string", "c": "boolean"}))
    documents: list[dict[str, Any]] = [
        {"_id": n, "a": n * 7 % 16, "b": "abcdefghijklmnop"[n * 11 % 16], "c": n % 3 == 0 or None} for n in range(256)
    ]
    made.whole(documents[:128])
    made.change(documents[128:])
    before = made.table.cost.replaced
    assert made.table.compact(z_order=["a", "b"]) == {"numFilesRemoved": 2, "numFilesAdded": 1}
    assert made.table.cost.replaced > before
    rows = DeltaTable(str(tmp_path / "t")).to_pyarrow_table().to_pylist()
    assert sorted(row["_key"] for row in rows) == [row["_key"] for row in sorted(rows, key=lambda row: row["_key"])]
    for quarter in range(4):
        part = rows[quarter * 64 : quarter * 64 + 64]
        assert len({row["a"] for row in part}) <= 10
        assert len({row["b"] for row in part}) <= 10
    assert made.table.compact(z_order=["c"], everything=True)["numFilesAdded"] == 1
    with pytest.raises(SinkError, match="it has no column 'x'"):
        made.table.compact(z_order=["x"], everything=True)
    assert made.table.compact() == {"numFilesRemoved": 0, "numFilesAdded": 0}
