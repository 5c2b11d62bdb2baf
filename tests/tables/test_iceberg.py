"""Iceberg snapshots over the files of Delta tables: equal to their versions, or refused."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.types import LongType

from tailrace.base import durable
from tailrace.errors import SinkError, UsageError
from tailrace.lake.iceberg import snapshot as iceberg_snapshot
from tailrace.lake.iceberg.catalog import CatalogError, IcebergCatalog
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.iceberg.settings import IcebergSettings, check_place, texts_of
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.iceberg_mirror import IcebergMirror, identifier_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.versions import Keeping
from tests.tables.features import FEATURES, ODD, Made, Rows, odd_texts, rows
from tests.tables.iceberg import (
    compared,
    iceberg_table,
    newest_is_shown,
    rows_of,
    sql_catalog,
    sql_mirror,
    sql_settings,
)
from tests.tables.readers import ICEBERG_READERS
from tests.tables.rest_catalog import TOKEN, RestServer, rest_catalog

pytestmark = pytest.mark.filterwarnings("ignore:Iceberg scan planning")  # Polars would like a package of its own


@pytest.fixture
def mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IcebergMirror]:
    """Each commit of a table that a test makes becomes a snapshot."""
    mirror = sql_mirror(tmp_path)
    monkeypatch.setattr(Made, "followed", lambda _, table: mirror.follow([table]))
    yield mirror
    mirror.close()


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[RestServer]:
    with rest_catalog(tmp_path / "catalog.db") as server:
        yield server


def of_rest(server: RestServer, folder: Path, **options: Any) -> IcebergMirror:
    settings = IcebergSettings.of({"uri": server.uri, "token": TOKEN}, "iceberg")
    return IcebergMirror(folder, IcebergCatalog(settings, **options))


def orders(folder: Path, count: int = 3) -> Made:
    made = Made(folder / "t", TableSchema())
    made.whole([{"_id": number, "n": number} for number in range(count)])
    return made


# -- what readers read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_every_reader_reads_the_same(feature: str, tmp_path: Path, mirrored: IcebergMirror) -> None:
    expected = FEATURES[feature](tmp_path / "t")
    mirrored.follow([CollectionTable(tmp_path / "t", "shop.orders")])  # merged since, or without news
    assert newest_is_shown(tmp_path / "t", iceberg_table(tmp_path))
    for name, read in ICEBERG_READERS.items():
        seen = expected if name == "polars" else without_null_lists(expected)
        assert read(tmp_path / "t", None, None) == seen, name


def without_null_lists(rows: Rows) -> Rows:
    """pyiceberg reads NULL as ``[]`` where an array is of objects (apache/iceberg-python#3833, 0.12.0)."""
    of_objects = {
        name for row in rows for name, value in row.items()
        if isinstance(value, list) and any(isinstance(one, dict) for one in value)
    }  # fmt: skip
    return [
        {name: [] if name in of_objects and value is None else value for name, value in row.items()} for row in rows
    ]


def test_every_reader_finds_the_rows_of_a_value(tmp_path: Path, mirrored: IcebergMirror) -> None:
    odd_texts(tmp_path / "t")
    for value in ("", "\0", "e\u0301", *ODD[-2:]):
        for name, read in ICEBERG_READERS.items():
            assert read(tmp_path / "t", "c", value) == [{"c": value}] * 2, (name, value)


def test_a_struct_that_gets_a_field_keeps_its_numbers_and_snapshots(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = Made(tmp_path / "t", TableSchema(nested=True))
    made.whole([{"_id": 1, "o": {"a": 1, "in": {"x": 1}}, "l": [{"n": 1}]}])
    first = iceberg_table(tmp_path).schema()
    made.change([{"_id": 2, "o": {"late": [True], "in": {"y": "z"}}, "l": [{"n": 2, "m": "late"}]}])
    then = iceberg_table(tmp_path).schema()
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1]
    names = {one: first.find_column_name(one) for one in first.field_ids if first.find_column_name(one)}
    assert len(names) > 12
    assert {one: then.find_column_name(one) for one in names} == names
    wider = rows(made.schema, [{"_id": 1, "o": {"a": 1.5}, "l": []}])
    made.schema = wider.schema
    made.whole([{"_id": 1, "o": {"a": 1.5}, "l": []}])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [2]
    assert iceberg_table(tmp_path).schema().find_field("l").field_id == then.find_field("l").field_id
    assert iceberg_table(tmp_path).schema().find_field("o").field_id != then.find_field("o").field_id


def test_each_snapshot_is_its_version_and_those_that_would_be_misread_go(
    tmp_path: Path, mirrored: IcebergMirror
) -> None:
    made = orders(tmp_path)
    made.change([{"_id": 1, "n": 7, "late": "x"}], gone=[2])
    made.change([])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1, 2]
    before = iceberg_table(tmp_path).schema().find_field("n").field_id
    made.schema = rows(made.schema, [{"_id": 3, "n": 1.5}]).schema
    made.whole([{"_id": 3, "n": 1.5}, {"_id": 1, "n": 7}])
    made.change([{"_id": 4, "n": 2.5}])
    found = iceberg_table(tmp_path)
    assert compared(tmp_path / "t", found) == [3, 4]
    assert found.schema().find_field("n").field_id > before
    assert [one.schema_id for one in found.metadata.schemas] == [found.schema().schema_id]


def test_numbers_of_columns_that_went_and_came_again(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = Made(tmp_path / "t", TableSchema.declared({"a": "int", "b": "int"}))
    made.whole([{"_id": 1, "a": 1, "b": 2}])
    for columns in ({"b": "int"}, {"b": "int", "a": "int"}):
        made.schema = TableSchema.declared(columns)
        made.whole([{"_id": 1, "a": 1, "b": 2}])
    found = iceberg_table(tmp_path)
    assert compared(tmp_path / "t", found) == [1, 2]
    assert found.schema().find_field("a").field_id > found.schema().find_field("b").field_id


def test_a_column_that_came_and_went(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = Made(tmp_path / "t", TableSchema.declared({"a": "int"}))
    made.whole([{"_id": 1, "a": 1, "b": 2}])
    for columns in ({"a": "int", "b": "int"}, {"a": "int"}):
        made.schema = TableSchema.declared(columns)
        made.whole([{"_id": 1, "a": 1, "b": 2}])
    found = iceberg_table(tmp_path)
    assert compared(tmp_path / "t", found) == [0, 2]
    # Catalogues that already have this schema refuse to add it again.
    assert [one.schema_id for one in found.metadata.schemas] == [0]


def test_full_manifests_stay(tmp_path: Path, mirrored: IcebergMirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_snapshot, "_FULL", 2)
    made = orders(tmp_path)
    for number in range(10, 16):
        made.change([{"_id": number, "n": number}])
    found = iceberg_table(tmp_path)
    assert [len(one.fetch_manifest_entry(found.io)) for one in found.current_snapshot().manifests(found.io)].count(
        2
    ) == 3
    made.change([{"_id": 10, "n": 0}, {"_id": 20, "n": 0}], gone=[13])
    made.table.compact()
    mirrored.follow([made.table])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == list(range(9))


def test_no_value_of_a_document_is_in_the_manifests(tmp_path: Path, mirrored: IcebergMirror) -> None:
    odd_texts(tmp_path / "t")  # whose bounds are in Delta's log
    found = iceberg_table(tmp_path)
    for manifest in found.current_snapshot().manifests(found.io):
        for entry in manifest.fetch_manifest_entry(found.io):
            assert not entry.data_file.lower_bounds
            assert not entry.data_file.upper_bounds


def test_a_table_has_twenty_snapshots(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    for number in range(25):
        made.change([{"_id": 1, "n": number}])
    found = iceberg_table(tmp_path)
    assert [version_of(one) for one in found.snapshots()] == list(range(6, 26))
    assert len(found.metadata.metadata_log) == 1


def test_names_in_a_catalogue() -> None:
    assert identifier_of("shop.orders") == ("shop", "orders")
    assert identifier_of("Shop.a.b/C") == ("~53hop", "a~2eb~2f~43")
    assert identifier_of("shop._x.") == ("shop", "~5fx~2e")


# -- two records of one truth -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["table.commit", "iceberg.written", "iceberg.shown"])
def test_a_crash_is_made_good(tmp_path: Path, mirrored: IcebergMirror, step: str) -> None:
    made = orders(tmp_path)

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            made.change([{"_id": 9, "n": 9}])
    finally:
        durable.observe_steps(None)
    again = CollectionTable(tmp_path / "t", "shop.orders")
    for _ in range(2):  # the second time there is nothing to do
        sql_mirror(tmp_path).follow([again])
        assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1]


def test_a_catalogue_that_is_set_back_is_brought_up(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    made.change([{"_id": 1, "n": 5}])
    copy = iceberg_table(tmp_path).metadata_location
    made.change([{"_id": 2, "n": 5}])
    with sqlite3.connect(tmp_path / "catalog.db") as catalog:
        catalog.execute("UPDATE iceberg_tables SET metadata_location = ?", [copy])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1]
    made.change([{"_id": 3, "n": 5}])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1, 3]


def test_a_table_that_was_dropped_comes_again(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    sql_catalog(tmp_path).drop_table(identifier_of("shop.orders"))
    made.change([{"_id": 1, "n": 5}])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [1]


def test_a_delta_table_that_was_set_back_is_shown_as_it_is(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    made.change([{"_id": 1, "n": 5}])
    made.change([{"_id": 1, "n": 6}])
    (tmp_path / "t" / "_delta_log" / f"{2:020}.json").unlink()
    table = CollectionTable(tmp_path / "t", "shop.orders")
    sql_mirror(tmp_path).follow([table])
    found = iceberg_table(tmp_path)
    assert version_of(found.current_snapshot()) == 1
    assert sql_mirror(tmp_path).fault(table) is None


def test_a_version_that_was_made_twice_has_one_snapshot(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    made.change([{"_id": 1, "n": 5}])
    made.change([{"_id": 1, "n": 6}])
    for number in (1, 2):
        (tmp_path / "t" / "_delta_log" / f"{number:020}.json").unlink()
    made.table = CollectionTable(tmp_path / "t", "shop.orders")
    made.change([{"_id": 1, "n": 7}])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1]
    (tmp_path / "t" / "_delta_log" / f"{1:020}.json").unlink()
    made.table = CollectionTable(tmp_path / "t", "shop.orders")
    made.change([{"_id": 1, "n": 8}])  # as version 1, which this process has shown
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1]


def test_versions_that_were_made_again_while_nobody_looked(tmp_path: Path) -> None:
    made = orders(tmp_path)
    for number in range(3):
        sql_mirror(tmp_path).follow([made.table])
        made.change([{"_id": 1, "n": number}])
    for number in (2, 3):
        (tmp_path / "t" / "_delta_log" / f"{number:020}.json").unlink()
    made.table = CollectionTable(tmp_path / "t", "shop.orders")
    for number in range(3):
        made.change([{"_id": 2, "n": number}])
    assert sql_mirror(tmp_path).fault(made.table) == "has other files than version 2 of the table"
    sql_mirror(tmp_path).follow([made.table])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1, 4]


def test_snapshots_of_another_table_in_this_place_go(tmp_path: Path, mirrored: IcebergMirror) -> None:
    for _ in range(2):
        made = orders(tmp_path)
        made.change([{"_id": 1, "n": 5}])
        made.change([{"_id": 1, "n": 6}])
        shutil.rmtree(tmp_path / "t" / "_delta_log")
    made = orders(tmp_path)
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0]


def test_rows_of_another_program_are_in_no_snapshot(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    write_deltalake(tmp_path / "t", DeltaTable(str(tmp_path / "t")).to_pyarrow_table(), mode="append")
    with pytest.raises(SinkError, match="another program has changed the table"):
        made.table.expire(Keeping(1))  # upkeep reads the log, and only warns
    with pytest.raises(SinkError, match=r"another program has changed the table .* \(version 1\)"):
        mirrored.follow([made.table])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0]


def test_somebody_else_has_added_rows(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    found = iceberg_table(tmp_path)
    found.append(found.scan().to_arrow())
    with pytest.raises(SinkError, match=r"another program has changed the Iceberg table shop.orders \(snapshot \d+\)"):
        made.change([{"_id": 1, "n": 5}])
    assert "another program" in (mirrored.fault(made.table) or "")
    sql_catalog(tmp_path).drop_table(identifier_of("shop.orders"))  # as the hint says
    mirrored.follow([made.table])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [1]


def test_somebody_else_has_changed_columns(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    with iceberg_table(tmp_path).update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("n", "m")
    with iceberg_table(tmp_path).transaction() as change:
        change.set_properties({"schema.name-mapping.default": "[]"})
    made.change([{"_id": 1, "n": 5}])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [1]


def test_somebody_else_has_a_branch(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    found = iceberg_table(tmp_path)
    found.manage_snapshots().create_branch(found.current_snapshot().snapshot_id, "theirs").commit()
    found = iceberg_table(tmp_path)
    found.append(found.scan().to_arrow(), branch="theirs")
    made.change([{"_id": 1, "n": 5}])
    found = iceberg_table(tmp_path)
    assert version_of(found.current_snapshot()) == 1
    assert rows_of(found.scan().to_arrow()) == rows_of(DeltaTable(str(tmp_path / "t")).to_pyarrow_table())
    assert "theirs" in found.refs()


def test_somebody_else_has_given_a_column_another_number(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    with iceberg_table(tmp_path).update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("n")
    with iceberg_table(tmp_path).update_schema() as update:
        update.add_column("n", LongType())
    sql_mirror(tmp_path).follow([made.table])
    made.change([{"_id": 1, "n": 5}])
    found = iceberg_table(tmp_path)
    numbers = {found.schemas()[one.schema_id].find_field("n").field_id for one in found.snapshots()}
    assert len(numbers) == 1
    assert set(compared(tmp_path / "t", found)) <= {0, 1}


@pytest.mark.parametrize("properties", [{"schema.name-mapping.default": "[]"}, {"tailrace.namespace": "shop.other"}])
def test_verifying_sees_what_readers_would_misread(
    tmp_path: Path, mirrored: IcebergMirror, properties: dict[str, str]
) -> None:
    made = orders(tmp_path)
    assert sql_mirror(tmp_path).fault(made.table) is None
    with iceberg_table(tmp_path).transaction() as change:
        change.set_properties(properties)
    assert sql_mirror(tmp_path).fault(made.table) is not None


@pytest.mark.parametrize("ours", [True, False])
def test_a_table_of_that_name_is_another_one(tmp_path: Path, ours: bool) -> None:
    there = tmp_path / "other"
    there.mkdir()
    if ours:
        made = Made(there / "t", TableSchema())
        made.whole([{"_id": 1}])
        sql_mirror(there, sql_settings(tmp_path)).follow([made.table])
    else:
        catalog = sql_catalog(tmp_path)
        catalog.create_namespace("shop")
        catalog.create_table(("shop", "orders"), pa.schema([("x", pa.int64())]), location=f"file://{there}")
    made = orders(tmp_path)
    said = "has other files: file://.*/other/t/_iceberg" if ours else "is not a table of Tailrace"
    with pytest.raises(SinkError, match=said):
        sql_mirror(tmp_path).follow([made.table])


def test_damaged_files_of_iceberg(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    for path in (tmp_path / "t" / "_iceberg" / "metadata").glob("*.avro"):
        path.write_bytes(path.read_bytes()[:40])
    assert "cannot be read" in (sql_mirror(tmp_path).fault(made.table) or "")
    sql_mirror(tmp_path).follow([made.table])
    found = iceberg_table(tmp_path)
    assert len(found.scan().to_arrow()) == 3
    assert sql_mirror(tmp_path).fault(made.table) is None
    for path in (tmp_path / "t" / "_iceberg" / "metadata").glob("*.json"):
        path.write_text("{")
    with pytest.raises(SinkError, match=r"the metadata of the Iceberg table shop.orders cannot be read"):
        sql_mirror(tmp_path).follow([made.table])


def test_verifying_names_what_is_wrong(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = Made(tmp_path / "t", TableSchema())
    assert mirrored.fault(made.table) == "is not in the catalogue"
    made.whole([{"_id": 1}])
    assert mirrored.fault(made.table) is None
    file = next((tmp_path / "t").glob("*.parquet"))
    os.truncate(file, 10)
    assert "lacks its data file" in (mirrored.fault(made.table) or "")


# -- files that go ----------------------------------------------------------------------------------------------------


def test_snapshots_go_before_their_files(tmp_path: Path, mirrored: IcebergMirror) -> None:
    made = orders(tmp_path)
    for number in range(3):
        made.change([{"_id": 1, "n": number}])
    past = time.time_ns() // 1_000_000 + 60_000
    mirrored.release(made.table, past - 3_600_000)
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1, 2, 3]
    mirrored.release(made.table, past)
    made.table.expire(Keeping(0), past)
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [3]
    files = sorted(path.suffix for path in (tmp_path / "t" / "_iceberg" / "metadata").iterdir())
    assert files.count(".avro") == 2  # a list, and a manifest
    assert files.count(".json") <= 2
    made.change([{"_id": 1, "n": 9}])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [3, 4]


def test_no_manifest_goes_while_a_list_cannot_be_read(
    tmp_path: Path, mirrored: IcebergMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = orders(tmp_path)

    def unreadable(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "manifests", unreadable)
        mirrored.release(made.table, time.time_ns() // 1_000_000 + 60_000)
    assert sql_mirror(tmp_path).fault(made.table) is None


def test_a_writer_without_the_catalogue_says_so(
    tmp_path: Path, mirrored: IcebergMirror, caplog: pytest.LogCaptureFixture
) -> None:
    made = orders(tmp_path)
    left = IcebergMirror(tmp_path, None)
    for _ in range(2):
        left.follow([made.table])
    assert caplog.text.count("its Iceberg snapshots get no new versions and lose their files") == 1


def test_upkeep_does_not_wait_for_a_catalogue(tmp_path: Path, rest: RestServer) -> None:
    waited: list[float] = []
    mirror = of_rest(rest, tmp_path, wait=waited.append)
    made = orders(tmp_path)
    mirror.follow([made.table])
    rest.broken = [503]
    with pytest.raises(CatalogError, match="does not answer"):
        mirror.release(made.table, 0)
    assert not waited


def test_no_file_goes_that_the_newest_snapshot_has(tmp_path: Path) -> None:
    made = orders(tmp_path)
    sql_mirror(tmp_path).follow([made.table])
    made.change([{"_id": 1, "n": 5}])
    with pytest.raises(SinkError, match="does not have version 1 yet"):
        sql_mirror(tmp_path).release(made.table, time.time_ns() // 1_000_000)


# -- a REST catalogue -------------------------------------------------------------------------------------------------


def test_a_rest_catalogue(tmp_path: Path, rest: RestServer) -> None:
    mirror = of_rest(rest, tmp_path)
    made = orders(tmp_path)
    mirror.follow([made.table])
    for number in range(3):
        made.change([{"_id": 1, "n": number, f"c{number}": 1}])
        mirror.follow([made.table])
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1, 2, 3]
    assert mirror.fault(made.table) is None
    mirror.release(made.table, time.time_ns() // 1_000_000 + 60_000)
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [3]
    mirror.close()


def test_answers_that_are_lost(tmp_path: Path, rest: RestServer) -> None:
    waited: list[float] = []
    mirror = of_rest(rest, tmp_path, wait=waited.append)
    made = orders(tmp_path)
    rest.lost = 1
    mirror.follow([made.table])
    for number in range(3):
        made.change([{"_id": 1, "n": number}])
        rest.lost, rest.silent = 1, number % 2
        rest.broken = [503] * number
        mirror.follow([made.table])
    assert len(waited) >= 4
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1, 2, 3]


def test_a_catalogue_that_stays_away_is_an_error_without_secrets(
    tmp_path: Path, rest: RestServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tailrace")
    clock = iter(range(0, 10_000, 15))
    mirror = of_rest(rest, tmp_path, wait=lambda _: False, clock=lambda: next(clock))
    made = orders(tmp_path)
    rest.broken = [503] * 100
    with pytest.raises(CatalogError, match="the Iceberg catalogue 'tailrace' does not answer") as found:
        mirror.follow([made.table])
    assert 2 <= len(rest.requests) <= 8
    rest.broken = [403]
    with pytest.raises(CatalogError, match="refuses") as refused:
        mirror.follow([made.table])
    for text in (str(found.value), str(refused.value), caplog.text, repr(mirror._mirror._catalog._settings)):
        assert TOKEN not in text
    rest.broken = []
    mirror.follow([made.table])  # nothing is lost
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0]


def test_the_writer_is_stopped_while_it_waits(tmp_path: Path, rest: RestServer) -> None:
    mirror = of_rest(rest, tmp_path, wait=lambda _: True)
    rest.broken = [503] * 3
    with pytest.raises(CatalogError):
        mirror.follow([orders(tmp_path).table])


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "must name an Iceberg catalogue"),
        ([], "must name an Iceberg catalogue"),
        ("thrift://h:9083", "a catalogue of this kind is not supported (thrift)"),
        ({"uri": "http://h", "type": "hive"}, "a catalogue of this kind is not supported (http)"),
        ("http://", "has no host"),
        ({"uri": ["x"]}, "must map pyiceberg's properties"),
    ],
)
def test_what_is_no_catalogue(given: Any, said: str) -> None:
    with pytest.raises(UsageError) as found:
        IcebergSettings.of(given, "tables.iceberg")
    assert said in found.value.message


def test_a_name_that_nobody_knows(tmp_path: Path) -> None:
    mirror = IcebergMirror(tmp_path, IcebergCatalog(IcebergSettings("nowhere")))
    with pytest.raises(UsageError, match="there is no Iceberg catalogue 'nowhere'"):
        mirror.follow([orders(tmp_path).table])


def test_a_password_in_a_uri_is_not_told(tmp_path: Path) -> None:
    settings = IcebergSettings.of(f"sqlite:///user:s3cret-word@{tmp_path}/no/such/file.db", "iceberg")
    mirror = IcebergMirror(tmp_path, IcebergCatalog(settings, wait=lambda _: True))
    with pytest.raises(CatalogError) as found:
        mirror.follow([orders(tmp_path).table])
    assert "s3cret-word" not in str(found.value)


def test_the_parts_of_secrets() -> None:
    found = texts_of({"uri": "postgresql://u:p%40w@h/d", "credential": "me:s3cret", "type": "sql"})
    assert {"p%40w", "p@w", "s3cret"} <= set(found)
    assert not {"u", "me", ""} & set(found)


def test_settings_of_pyiceberg_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / ".pyiceberg.yaml").write_text("catalog:\n  prod:\n    token: s3cret\n   bad: [\n")
    code = (
        "from tailrace.lake.iceberg.catalog import IcebergCatalog\n"
        "from tailrace.lake.iceberg.settings import IcebergSettings\n"
        "try:\n    IcebergCatalog(IcebergSettings('prod'))\n"
        "except Exception as error:\n    print(repr(error), error)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, "PYICEBERG_HOME": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert "UsageError" in done.stdout
    assert "pyiceberg cannot read its settings" in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


def test_where_tables_of_iceberg_cannot_lie(tmp_path: Path) -> None:
    for name in ("a b", "é", "50%", "a#b"):
        with pytest.raises(UsageError, match="plain ASCII"):
            check_place(tmp_path / name)
