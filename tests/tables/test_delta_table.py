"""One table without a server: odd partition values, bounds of every type, and rules that change."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from deltalake import DeltaTable

from tailrace.errors import UsageError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.tables.delta_commit import Batch
from tailrace.tables.delta_table import CollectionTable
from tailrace.tables.rows import make_rows
from tailrace.tables.schema import TableSchema
from tailrace.tables.settings import TableRule
from tailrace.tables.state import StoredDocument
from tests.tables.equality import key_of

ODD = (
    "a b",
    "a/b",
    "../x",
    "%41",
    "é",
    "a:b=c",
    "a#b?c",
    "日本",
    "a\\b",
    "\n",
    "'\"",
    "+",
    "__HIVE_DEFAULT_PARTITION__",
)


def batch(number: int) -> Batch:
    return Batch(number, ClusterTime.of(100 + number, 0), ClusterTime.of(101 + number, 0), "00" * 16)


def rows(schema: TableSchema, documents: Sequence[dict[str, Any]]) -> Any:
    encoded = [bson.encode(one) for one in documents]
    found = make_rows(schema, [StoredDocument(key_of(one), ClusterTime.of(100, 1), one) for one in encoded])
    assert not found.misfits
    return found.batch


def change(table: CollectionTable, number: int, schema: TableSchema, documents: Sequence[dict[str, Any]]) -> None:
    made = rows(schema, documents)
    table.change(batch(number), schema, made.column("_key").to_pylist(), [made])


def test_rows_of_odd_partitions_change_after_small_files_were_merged(tmp_path: Path) -> None:
    # The partition values of the other tests are letters: only what deltalake escapes in a path showed that paths in
    # Delta's log are escaped once more than the names of the files.
    schema = TableSchema.declared({"c": "string"})
    table = CollectionTable(tmp_path / "t", "shop.orders", partition_by=("c",))
    table.write_whole(batch(0), schema, [rows(schema, [{"_id": n, "c": v} for n, v in enumerate(ODD)])], "whole")
    change(table, 1, schema, [{"_id": 100 + n, "c": v} for n, v in enumerate(ODD)])
    assert table.compact()["numFilesRemoved"] == 2 * len(ODD)
    again = CollectionTable(tmp_path / "t", "shop.orders", partition_by=("c",))
    change(again, 2, schema, [{"_id": n, "c": "new"} for n in range(len(ODD))])
    held = DeltaTable(str(tmp_path / "t")).to_pyarrow_table().sort_by("_key").column("c").to_pylist()
    assert held == ["new"] * len(ODD) + list(ODD)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("decimal(18,2)", [Decimal128("1.50"), Decimal128("7")]),
        ("binary", [b"\x00", b"\xff"]),
        ("double", [1.5, float("inf")]),
        ("double", [float("nan"), float("-inf")]),
        ("timestamp", [DatetimeMS(0), DatetimeMS(253402300800000 * 3)]),
        ("date", [DatetimeMS(-62135596800000), DatetimeMS(253402300799999)]),
        ("string", ["", "é\n\"'"]),
        ("boolean", [False, True]),
        ("objectid", [bson.ObjectId(), bson.ObjectId()]),
    ],
)
def test_bounds_of_any_type_hide_no_row(tmp_path: Path, type_: str, values: list[Any]) -> None:
    # Bounds had been written of int and string alone; JSON has no decimals, no bytes, no infinity.
    schema = TableSchema.declared({"c": type_})
    table = CollectionTable(tmp_path / "t", "shop.orders", bounds=("c",))
    made = rows(schema, [{"_id": n, "c": v} for n, v in enumerate(values)])
    table.write_whole(batch(0), schema, [made], "whole")
    found = DeltaTable(str(tmp_path / "t"))
    assert found.to_pyarrow_table().num_rows == 2
    log = (tmp_path / "t" / "_delta_log" / f"{0:020d}.json").read_text()
    assert "Infinity" not in log
    assert "NaN" not in log
    if type_ in ("timestamp", "date"):
        later = datetime(2000, 1, 1, tzinfo=UTC) if type_ == "timestamp" else datetime(2000, 1, 1).date()
        column = DeltaTable(str(tmp_path / "t")).to_pyarrow_dataset().to_table(["_key"], filter=_above("c", later))
        assert column.num_rows == 1
    elif type_ not in ("binary", "boolean", "objectid") and values[0] == values[0]:
        wanted = made.column("c")[1].as_py()
        assert found.to_pyarrow_table(filters=[("c", "=", wanted)]).num_rows == 1


def _above(name: str, value: Any) -> Any:
    import pyarrow.dataset as ds

    return ds.field(name) > value


def test_a_date_that_readers_have_no_year_for_does_not_fit() -> None:
    schema = TableSchema.declared({"c": "date"})
    document = bson.encode({"_id": 1, "c": DatetimeMS(253402300800000)})
    found = make_rows(schema, [StoredDocument(key_of(document), ClusterTime.of(1, 1), document)])
    assert [one.reason for one in found.misfits]


@pytest.mark.parametrize("type_", ["double", "binary", "timestamp", "decimal(9,2)", "json"])
def test_types_that_are_no_partitions_are_refused(type_: str) -> None:
    # The page names the types; nothing had held the code to it, and bytes were written as b'...'.
    with pytest.raises(UsageError, match="'c' cannot divide shop"):
        TableRule("shop.*", TableSchema.declared({"c": type_}), partition_by=("c",))


def test_a_table_is_written_anew_under_another_declaration(tmp_path: Path) -> None:
    # Rules had never been changed under a table that was there: its own columns counted, and the partitions of new
    # files were others than those of the log.
    before, after = TableSchema.declared({"c": "int"}), TableSchema.declared({"c": "string", "d": "long"})
    table = CollectionTable(tmp_path / "t", "shop.orders", declared=before.declaration)
    table.write_whole(batch(0), before, [rows(before, [{"_id": 1, "c": 1}])], "whole")
    again = CollectionTable(tmp_path / "t", "shop.orders", declared=before.declaration)
    assert not again.redeclared
    divided = CollectionTable(tmp_path / "t", "shop.orders", declared=before.declaration, partition_by=("c",))
    assert divided.redeclared
    other = CollectionTable(tmp_path / "t", "shop.orders", declared=after.declaration, partition_by=("c",))
    assert other.redeclared
    assert other.schema(after) == after
    other.write_whole(batch(1), after, [rows(after, [{"_id": 1, "c": "one", "d": 5}])], "whole")
    assert not other.redeclared
    found = DeltaTable(str(tmp_path / "t"))
    assert found.metadata().partition_columns == ["c"]
    assert found.to_pyarrow_table(columns=["c", "d"]).to_pylist() == [{"c": "one", "d": 5}]
    assert DeltaTable(str(tmp_path / "t"), version=0).to_pyarrow_table(columns=["c"]).to_pylist() == [{"c": 1}]
