"""One table without a server: odd partition values, bounds of every type, and rules that change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from deltalake import DeltaTable

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import UsageError
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.rows import make_rows
from tailrace.lake.tables.schema import Policy, TableSchema
from tailrace.lake.tables.settings import TableRule
from tailrace.lake.tables.state import StoredDocument
from tests.tables import features
from tests.tables.equality import key_of
from tests.tables.features import batch


def rows(schema: TableSchema, documents: Sequence[dict[str, Any]]) -> Any:
    return features.rows(schema, documents).batch


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("decimal(18,2)", [Decimal128("1.50"), Decimal128("7")]),
        ("binary", [b"\x00", b"\xff"]),
        ("double", [1.5, float("inf")]),
        ("double", [float("nan"), float("-inf")]),
        ("timestamp", [DatetimeMS(0), DatetimeMS(253402300799999)]),
        ("date", [DatetimeMS(-62135596800000), DatetimeMS(253402300799999)]),
        ("string", ["", "é\n\"'"]),
        ("boolean", [False, True]),
        ("objectid", [bson.ObjectId(), bson.ObjectId()]),
    ],
)
def test_bounds_of_any_type_hide_no_row(tmp_path: Path, type_: str, values: list[Any]) -> None:
    # Bounds had been written only for int and string; JSON has no decimals, bytes or infinity.
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


@pytest.mark.parametrize("type_", ["date", "timestamp"])
def test_a_date_that_readers_have_no_year_for_does_not_fit_a_declared_column(type_: str) -> None:
    schema = TableSchema.declared({"c": type_})
    document = bson.encode({"_id": 1, "c": DatetimeMS(253402300800000)})
    found = make_rows(schema, [StoredDocument(key_of(document), ClusterTime.of(1, 1), document)])
    assert [one.reason for one in found.misfits] == [f"'c' is date 253402300800000 ms, and its column is {type_}"]
    assert make_rows(replace(schema, policy="widen"), [found.misfits[0].document]).batch.to_pylist()[0]["c"] is None


@pytest.mark.parametrize("type_", ["double", "binary", "timestamp", "decimal(9,2)", "json"])
def test_types_that_are_no_partitions_are_refused(type_: str) -> None:
    # The page names the types, but nothing checked the code against it, and bytes were written as b'...'.
    with pytest.raises(UsageError, match="'c' cannot divide shop"):
        TableRule("shop.*", TableSchema.declared({"c": type_}), partition_by=("c",))


@pytest.mark.parametrize(
    ("before", "now", "anew"),
    [
        ("quarantine", "fail", True), ("quarantine", "quarantine", False), ("widen", "evolve", True),
        ("evolve", "widen", False), ("evolve", "quarantine", False), (None, "evolve", False),
    ],
)  # fmt: skip
def test_a_table_is_written_anew_under_a_policy_that_leaves_less_out(
    tmp_path: Path, before: Policy | None, now: Policy, *, anew: bool
) -> None:
    table = CollectionTable(tmp_path / "t", "shop.orders", declared="", policy=before)
    table.write_whole(batch(0), TableSchema(), [rows(TableSchema(), [{"_id": 1}])], "whole")
    assert CollectionTable(tmp_path / "t", "shop.orders", declared="", policy=now).redeclared is anew


def test_a_table_is_written_anew_under_another_declaration(tmp_path: Path) -> None:
    # Rules had never been changed for an existing table: its own columns counted, and the partitions of new files were
    # not those of the log.
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
    assert found.metadata().configuration["tailrace.partitionBy"] == '["c"]'
    assert found.to_pyarrow_table(columns=["c", "d"]).to_pylist() == [{"c": "one", "d": 5}]
    assert DeltaTable(str(tmp_path / "t"), version=0).to_pyarrow_table(columns=["c"]).to_pylist() == [{"c": 1}]
