"""Iceberg tables over Delta tables in an object store: equal to their versions, or refused.

``test_iceberg.py`` has what is the same on a disk.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError, object_place
from tailrace.base.store_probe import check_store
from tailrace.errors import SinkError, UsageError
from tailrace.lake.iceberg.catalog import IcebergCatalog
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.iceberg.settings import IcebergSettings, check_place
from tailrace.lake.store import delta
from tailrace.lake.store.mirrored import ICEBERG
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.iceberg_mirror import IcebergMirror, identifier_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.versions import Keeping
from tests.tables.features import FEATURES, Made, rows
from tests.tables.iceberg import (
    compared,
    iceberg_table,
    newest_is_shown,
    rows_of,
    sql_catalog,
    sql_mirror,
    sql_settings,
)
from tests.tables.object_server import SECRET, ObjectServer, held_in
from tests.tables.readers import TABLE_READERS
from tests.tables.rest_catalog import TOKEN, rest_catalog
from tests.tables.test_iceberg import without_null_lists
from tests.tables.unkind_proxy import Fault, UnkindProxy

pytestmark = [
    pytest.mark.filterwarnings("ignore:Iceberg scan planning"),  # Polars would like a package of its own
    pytest.mark.parametrize("object_store", ["s3"], indirect=True),
]


_REPLACED = r"another writer has made a later version of shop\.orders"


class Shop:
    """A table in a store and the catalogue beside its state, with a mirror that follows each commit."""

    def __init__(self, store: ObjectServer, prefix: str, folder: Path) -> None:
        self.store, self.prefix, self.folder = store, prefix, folder
        (folder / "state").mkdir(exist_ok=True)
        self.tables = store.place(prefix, folder / "state")
        self.root = self.tables / "shop.orders"
        self.mirror = self.mirror_at()
        self.made: Any = None

    def mirror_at(self, place: ObjectPlace | None = None) -> IcebergMirror:
        return sql_mirror(self.folder, root=place or self.tables)

    def place_by(self, address: str) -> ObjectPlace:
        """The tables, by another way."""
        return self.store.place(self.prefix, self.folder / "state", address=address, retry_s=0.3)

    def found(self, **more: str) -> Any:
        """What another program finds."""
        return iceberg_table(self.folder, **self.store.for_iceberg(), **more)

    def orders(self, count: int = 3) -> Made:
        self.made = Made(self.root, TableSchema())
        self.made.whole([{"_id": number, "n": number} for number in range(count)])
        return self.made

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Commits that no mirror follows."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Made, "followed", None)
            yield

    def opened(self) -> CollectionTable:
        """The table as another process opens it."""
        return CollectionTable(self.root, "shop.orders")

    def change(self, number: int) -> None:
        """A commit by a process that has just opened the table."""
        self.made.table = self.opened()
        self.made.change([{"_id": number, "n": number}])

    @property
    def metadata(self) -> ObjectPlace:
        return self.root / ICEBERG / "metadata"

    def versions(self) -> list[int]:
        return compared(self.root, self.found())


@pytest.fixture
def shop(object_store: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    found = Shop(object_store, prefix, tmp_path)
    monkeypatch.setattr(Made, "followed", lambda _, table: found.mirror.follow([table]))
    yield found
    durable.observe_steps(None)
    found.mirror.close()


def at_step(wanted: str, number: int, work: Callable[[], None]) -> None:
    """Do something at the ``number``th step of that name from now on, once."""
    left = [number]

    def stepped(name: str) -> None:
        left[0] -= name == wanted
        if not left[0]:
            durable.observe_steps(None)
            work()

    durable.observe_steps(stepped)


def die() -> None:
    raise KeyboardInterrupt


# -- equal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "feature", [pytest.param(one, marks=() if one == "nested_values" else pytest.mark.slow) for one in FEATURES]
)  # the others on a disk: test_iceberg.py
def test_every_reader_reads_the_same(feature: str, shop: Shop) -> None:
    expected = FEATURES[feature](shop.root)
    shop.mirror.follow([shop.opened()])
    found = shop.found()
    assert newest_is_shown(shop.root, found)
    for name, read in TABLE_READERS.items():
        assert read(found) == (expected if name == "polars" else without_null_lists(expected)), name


def test_the_same_work_on_a_disk_and_in_a_store(shop: Shop, tmp_path: Path) -> None:
    """Each snapshot equals its version of the Delta table, and the snapshot on the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mirrors = {"disk": sql_mirror(disk), "store": shop.mirror}
    roots = {"disk": disk / "t", "store": shop.root}
    found: dict[str, Any] = {}
    for place, root in roots.items():
        made = Made(root, TableSchema())
        made.followed = lambda table, place=place: mirrors[place].follow([table])
        made.whole([{"_id": number, "n": number, "o": {"a": [number]}} for number in range(20)])
        made.change([{"_id": 3, "n": 7, "late": "x"}, {"_id": 99}], gone=[2])
        made.table.compact()
        made.change([], gone=[4])
        made.schema = rows(made.schema, [{"_id": 3, "n": 1.5}]).schema
        made.whole([{"_id": 3, "n": 1.5}, {"_id": 1, "n": 7}])
        made.change([{"_id": 4, "n": 2.5}])
    found["disk"], found["store"] = iceberg_table(disk), shop.found()
    assert compared(roots["disk"], found["disk"]) == shop.versions()
    scans = [
        [rows_of(one.scan(snapshot_id=shown.snapshot_id).to_arrow()) for shown in one.snapshots()]
        for one in found.values()
    ]
    assert scans[0] == scans[1]
    assert [one.summary["total-records"] for one in found["store"].snapshots()] == ["2", "3"]
    assert shop.mirror.fault(shop.opened()) is None


def test_a_prefix_of_every_character_that_is_allowed(
    shop: Shop, object_store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = object_store.place("odd/a-Z_0!4f.'(b)=c", tmp_path / "state")
    mirror = IcebergMirror(tables, IcebergCatalog(sql_settings(tmp_path), root=tables))
    monkeypatch.setattr(Made, "followed", lambda _, table: mirror.follow([table]))
    made = Made(tables / "shop.orders", TableSchema())
    made.whole([{"_id": 1, "n": 5}])
    for name, read in TABLE_READERS.items():
        assert read(shop.found()) == [{"_id": 1, "n": 5}], name


def test_nothing_holds_the_keys(shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shop.orders()
    shop.change(1)
    everything = b"".join(held_in(shop.root).values()) + (tmp_path / "catalog.db").read_bytes()
    for text in (everything, caplog.text.encode(), repr(shop.mirror.__dict__).encode()):
        assert SECRET.encode() not in text
    assert not set(shop.found(**{"s3.connect-timeout": "5"}).properties) & set(shop.store.for_iceberg())


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "number", "shown"),
    [
        ("table.commit", 1, 0),  # Delta has it
        ("iceberg.put", 1, 0),  # the manifest
        ("iceberg.put", 2, 0),  # and the list of manifests
        ("iceberg.written", 1, 0),
        ("iceberg.put", 3, 0),  # and the metadata, which no catalogue names yet
        ("iceberg.shown", 1, 1),
    ],
)
def test_a_kill_at_each_step(shop: Shop, step: str, number: int, shown: int) -> None:
    """What readers have is whole at each moment; the next run brings the rest, and nothing of the old one stays."""
    made = shop.orders()
    at_step(step, number, die)
    with pytest.raises(KeyboardInterrupt):
        made.change([{"_id": 9, "n": 9}])
    durable.observe_steps(None)
    assert shop.versions() == list(range(shown + 1))
    again = shop.opened()
    for _ in range(2):  # the second time there is nothing to do
        mirror = shop.mirror_at()
        mirror.follow([again])
        assert shop.versions() == [0, 1]
    before = len(held_in(shop.metadata))
    mirror.release(again, time.time_ns() // 1_000_000 - 60_000)
    assert len(held_in(shop.metadata)) == before  # a writer that is just beginning may have made them
    mirror.release(again, time.time_ns() // 1_000_000 + 60_000)
    assert shop.versions() == [1]
    found = shop.found()
    (newest,) = found.snapshots()
    needed = {newest.manifest_list, *(one.manifest_path for one in newest.manifests(found.io))}
    needed |= {found.metadata_location, *(one.metadata_file for one in found.metadata.metadata_log)}
    assert {f"{shop.metadata}/{name}" for name in held_in(shop.metadata)} == needed
    assert len(needed) < before


def test_a_store_whose_clock_is_behind(shop: Shop) -> None:
    """What is old is told by its clock: with ours, objects of just now would be an hour old."""
    shop.orders()
    for number in range(3):
        shop.change(number)
    shop.mirror.release(shop.opened(), 0)
    before = len(held_in(shop.metadata))
    shop.tables.bucket.clock[:] = [-3600.0]
    shop.mirror_at().release(shop.opened(), time.time_ns() // 1_000_000 + 60_000)
    assert len(held_in(shop.metadata)) == before + 1  # the snapshots have gone
    shop.tables.bucket.clock[:] = [0.0]
    shop.mirror.release(shop.opened(), time.time_ns() // 1_000_000 + 60_000)  # it knows lists that it has written
    assert len(held_in(shop.metadata)) < before
    assert shop.versions() == [3]


# -- two writers ------------------------------------------------------------------------------------------------------


def test_a_writer_that_was_replaced_shows_nothing_older(shop: Shop) -> None:
    """It has committed a version, and stood still before the catalogue had it."""
    shop.orders()
    stale = shop.mirror  # it still knows what it has shown
    with shop.unseen():
        shop.change(1)
    late = shop.opened()
    shop.mirror = shop.mirror_at()
    shop.change(2)
    for mirror in (stale, shop.mirror_at()):
        with pytest.raises(SinkError, match=_REPLACED):
            mirror.follow([late])
    assert shop.versions() == [0, 2]
    shop.change(3)
    assert shop.versions() == [0, 2, 3]


@pytest.mark.parametrize("step", ["iceberg.put", "iceberg.written"])
def test_a_writer_that_is_replaced_while_it_shows(shop: Shop, step: str) -> None:
    """It has looked what the catalogue has, and another one comes first: the catalogue's comparison decides."""
    shop.orders()
    with shop.unseen():
        shop.change(1)
    late = shop.opened()
    at_step(step, 1, lambda: shop.change(2))
    with pytest.raises(SinkError, match=_REPLACED):
        shop.mirror_at().follow([late])
    assert shop.versions() == [0, 2]


def test_two_writers_make_the_table_at_the_same_time(shop: Shop) -> None:
    with shop.unseen():
        shop.orders()
    other = shop.mirror_at()
    at_step("iceberg.written", 1, lambda: other.follow([shop.opened()]))
    shop.mirror.follow([shop.opened()])
    assert shop.versions() == [0]


# -- another catalogue, another table ---------------------------------------------------------------------------------


def set_back(folder: Path, location: str) -> None:
    with sqlite3.connect(folder / "catalog.db") as catalog:
        catalog.execute("UPDATE iceberg_tables SET metadata_location = ?", [location])


def test_a_catalogue_of_a_backup_is_brought_up_or_refused(shop: Shop) -> None:
    shop.orders()
    old = shop.found().metadata_location
    shop.change(1)
    shop.change(2)
    set_back(shop.folder, old)
    assert shop.versions() == [0]
    shop.change(3)
    assert shop.versions() == [0, 3]
    before = shop.found().metadata_location
    old = shop.found().metadata.metadata_log[-1].metadata_file
    for number in range(4, 8):
        shop.change(number)
    shop.mirror_at().release(shop.opened(), time.time_ns() // 1_000_000 + 60_000)
    for location in (before, old):  # neither is there any more
        set_back(shop.folder, location)
        shop.mirror = shop.mirror_at()
        with pytest.raises(SinkError, match=r"the metadata of the Iceberg table shop.orders cannot be read: FileNotF"):
            shop.mirror.follow([shop.opened()])
    sql_catalog(shop.folder).drop_table(identifier_of("shop.orders"))  # as the hint says
    shop.mirror.follow([shop.opened()])
    assert shop.versions() == [7]


def test_a_store_that_was_set_back(shop: Shop) -> None:
    shop.orders()
    shop.change(1)
    shop.change(2)
    delta.commit_path(shop.root, 2).unlink()
    shop.mirror = shop.mirror_at()
    shop.mirror.follow([shop.opened()])
    assert version_of(shop.found().current_snapshot()) == 1
    assert shop.mirror.fault(shop.opened()) is None
    shop.change(3)
    assert shop.versions()[-1] == 2


def test_the_catalogue_has_a_table_of_another_place(shop: Shop, tmp_path: Path) -> None:
    """Under another prefix, in another bucket, or on a disk: nothing is asked there, and nothing is written."""
    shop.orders()
    disk = Made(tmp_path / "t", TableSchema())
    with shop.unseen():
        disk.whole([{"_id": 1}])
    with pytest.raises(SinkError, match=r"table shop.orders has other files: s3://tests/.* is not on a disk"):
        sql_mirror(tmp_path).follow([disk.table])
    place = shop.found().metadata_location
    for location in (place.replace("tests/", "tests/a", 1), place.replace("tests/", "other/"), "file:///nowhere"):
        set_back(tmp_path, location)
        with pytest.raises(SinkError, match=r"table shop.orders has other files: .* is not below s3://tests/"):
            shop.mirror_at().follow([shop.opened()])
    set_back(tmp_path, place)
    shop.mirror = shop.mirror_at()
    made = Made(shop.tables / "a" / "shop.orders", TableSchema())
    with pytest.raises(SinkError, match=r"the catalogue's table shop.orders has other files: s3://tests/.*_iceberg"):
        made.whole([{"_id": 1}])
    assert shop.versions() == [0]


def test_where_no_iceberg_table_can_be(object_store: ObjectServer, tmp_path: Path) -> None:
    check_place(object_store.place("x", tmp_path))
    options = {"azure_storage_account_name": "a", "azure_storage_account_key": "a2V5"}
    for uri in ("az://container/tables", "abfss://container@account.dfs.core.windows.net/tables"):
        with pytest.raises(UsageError, match="tables in Azure cannot have Iceberg snapshots"):
            check_place(object_place(uri, beside=tmp_path, options=options))


def test_why_azure_is_refused(object_store: ObjectServer) -> None:
    """pyiceberg 0.12.0 takes the whole authority for the container, and knows no ``az``. Once it does not, tables in
    Azure may be tried."""
    uri = "abfss://container@account.dfs.core.windows.net/tables/x"
    assert PyArrowFileIO.parse_location(uri)[2] == "container@account.dfs.core.windows.net/tables/x"
    with pytest.raises(ValueError, match="Unrecognized filesystem type in URI: az"):
        PyArrowFileIO().new_input("az://container/tables/x")


# -- objects that are lost or damaged, and requests -------------------------------------------------------------------


def test_damaged_and_missing_objects(shop: Shop) -> None:
    made = shop.orders()
    for harm in (
        lambda place: obstore.put(place.bucket.store, place.key, place.read_bytes()[:40]),
        lambda place: place.unlink(),
    ):
        for ending in ("-m0.avro", ".avro"):
            for name in held_in(shop.metadata):
                if name.endswith(ending):
                    harm(shop.metadata / name)
            assert "cannot be read" in (shop.mirror_at().fault(shop.opened()) or "")
            shop.mirror_at().follow([shop.opened()])
            assert len(shop.found().scan().to_arrow()) == 3
            assert shop.mirror_at().fault(shop.opened()) is None
    for name in held_in(shop.metadata):
        if name.endswith(".json"):
            obstore.put(shop.tables.bucket.store, (shop.metadata / name).key, b"{")
    with pytest.raises(SinkError, match=r"the metadata of the Iceberg table shop.orders cannot be read"):
        shop.mirror_at().follow([made.table])
    sql_catalog(shop.folder).drop_table(identifier_of("shop.orders"))
    shop.mirror_at().follow([made.table])
    (shop.root / next(one.name for one in shop.opened().files())).unlink()
    assert "lacks its data file" in (shop.mirror_at().fault(shop.opened()) or "")


def test_a_store_that_is_away_is_no_damage(shop: Shop) -> None:
    """Whatever request it does not answer, the error says that, and nothing of the catalogue is thrown away."""
    shop.orders()
    away: list[int] = []
    asked: list[str] = []

    def fault(_: int, method: str, path: str) -> Fault | None:
        if f"/{ICEBERG}/" not in path:
            return None
        asked.append(method)
        return "cut" if away and len(asked) >= away[0] else None

    with UnkindProxy(shop.store.address, fault) as proxy:
        tables = shop.place_by(proxy.address)
        with shop.unseen():
            shop.change(1)
        table = CollectionTable(tables / "shop.orders", "shop.orders")
        for number in range(1, 9):
            away[:], asked[:] = [number], []
            with pytest.raises(StoreAwayError) as found:
                shop.mirror_at(tables).follow([table])
            assert "Iceberg" not in found.value.message
            assert shop.versions() == ([0] if number < 8 else [0, 1])
        away[:], asked[:] = [9], []
        shop.mirror_at(tables).follow([table])
    assert shop.versions() == [0, 1]


def test_answers_of_the_store_that_are_lost(shop: Shop) -> None:
    lost: set[str] = set()

    def fault(_: int, method: str, path: str) -> Fault | None:
        if method != "PUT" or f"/{ICEBERG}/" not in path or path in lost:
            return None
        lost.add(path)
        return "lost"

    with UnkindProxy(shop.store.address, fault) as proxy:
        tables = shop.store.place(shop.prefix, shop.folder / "state", address=proxy.address)
        shop.orders()
        mirror = shop.mirror_at(tables)
        for number in range(2):
            with shop.unseen():
                shop.change(number)
            mirror.follow([CollectionTable(tables / "shop.orders", "shop.orders")])
        assert proxy.faults["lost"] == 6
    assert shop.versions() == [0, 1, 2]


def test_what_a_snapshot_costs(shop: Shop) -> None:
    """The page has these numbers."""
    asked: list[str] = []

    def noted(_: int, method: str, path: str) -> None:
        asked.append(f"{method} {path}")

    with UnkindProxy(shop.store.address, noted) as proxy:
        shop.orders()
        check_store(tables := shop.place_by(proxy.address))
        made = Made(tables / "shop.orders", TableSchema())
        mirror = shop.mirror_at(tables)
        for number in range(3):
            with shop.unseen():
                made.change([{"_id": number, "n": 8}])
            asked.clear()
            mirror.follow([made.table])
        assert [one.partition(" ")[0] for one in asked].count("PUT") == 3
        assert len(asked) == 9, asked
        asked.clear()
        mirror.follow([made.table])
        assert not asked
        mirror.release(made.table, 0)
        assert len(asked) == 3 + 2 * 3, asked  # of the four snapshots three may go


def test_a_rest_catalogue(shop: Shop, tmp_path: Path) -> None:
    """It writes the metadata itself; an answer of its commit that is lost is no second snapshot."""
    with rest_catalog(tmp_path / "catalog.db", **shop.store.for_iceberg()) as rest:
        settings = IcebergSettings.of({"uri": rest.uri, "token": TOKEN}, "iceberg")
        waited: list[float] = []
        shop.mirror = IcebergMirror(shop.tables, IcebergCatalog(settings, root=shop.tables, wait=waited.append))
        rest.lost = 1
        shop.orders()
        for number in range(1, 4):
            rest.lost = number % 2
            shop.change(number)
        assert len(waited) == 3
        assert shop.versions() == [0, 1, 2, 3]
        assert shop.mirror.fault(shop.opened()) is None
        shop.mirror.release(shop.opened(), time.time_ns() // 1_000_000 + 60_000)
        shop.opened().expire(Keeping(0))
        assert shop.versions() == [3]
