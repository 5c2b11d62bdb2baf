"""Typed columns: what is inferred, what is declared, and each policy for what does not fit."""

from __future__ import annotations

import random
from typing import Any

import bson
import pytest
from bson.code import Code
from bson.decimal128 import Decimal128
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.event import keystring
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SinkError, UsageError
from tailrace.lake.tables.names import folder_of, free_name
from tailrace.lake.tables.rows import Rows, make_rows
from tailrace.lake.tables.schema import Policy, TableSchema
from tailrace.lake.tables.state import StoredDocument
from tailrace.read.window.sortable_key import sortable_key
from tests.property import random_values


def rows(schema: TableSchema, *documents: dict[str, Any] | bytes) -> Rows:
    found = [one if isinstance(one, bytes) else bson.encode(one) for one in documents]
    return make_rows(schema, [StoredDocument(b"k%d" % n, ClusterTime.of(7, n), one) for n, one in enumerate(found)])


def types(found: Rows) -> dict[str, str]:
    return {column.name: column.type for column in found.schema.columns}


def test_columns_are_inferred_from_the_top_of_documents() -> None:
    document = {
        "_id": ObjectId(), "i": 1, "d": 1.5, "s": "x", "b": True, "dec": Decimal128("1.50"), "o": {"a": 1}, "l": [1],
        "r": Regex("a"), "t": Timestamp(1, 2), "min": MinKey(), "max": MaxKey(), "code": Code("x"), "bin": b"\0\1",
        "none": None,
    }  # fmt: skip
    found = rows(TableSchema(), document)
    assert types(found) == {
        "_id": "objectid", "i": "long", "d": "double", "s": "string", "b": "boolean", "dec": "string", "o": "json",
        "l": "json", "r": "json", "t": "json", "min": "json", "max": "json", "code": "json", "bin": "binary",
    }  # fmt: skip
    row = found.batch.to_pylist()[0]
    assert row["dec"] == "1.50"
    assert row["o"] == '{"a": 1}'
    assert row["_bson"] == bson.encode(document)
    assert row["_changed"] == {"t": 7, "i": 0}


@pytest.mark.parametrize("columns", [{"total": "decimal(18,2)"}, {}, ("total",), "total"])
def test_columns_that_only_declared_takes_are_refused(columns: Any) -> None:
    """They ended in an AttributeError where the first document was written: every test declared its columns."""
    with pytest.raises(UsageError, match="must be a sequence of Column") as caught:
        TableSchema(columns=columns)
    assert "TableSchema.declared" in (caught.value.hint or "")


def test_fields_named_like_our_columns_and_odd_names_get_columns_of_their_own() -> None:
    found = rows(TableSchema(), {"_id": 1, "_key": 2, "_BSON": 3, "a": 4, "A": 5, "a.b": 6, "$x": 7, "": 8, "x y": 9})
    names = {column.name: column.path[0] for column in found.schema.columns}
    assert names == {
        "_id": "_id", "_key_2": "_key", "_BSON_2": "_BSON", "a": "a", "A_2": "A", "a_b": "a.b", "$x": "$x", "_": "",
        "x_y": "x y",
    }  # fmt: skip
    assert found.batch.to_pylist()[0]["A_2"] == 5
    assert free_name("_json", ["_json_2"]) == "_json_3"


def test_a_field_that_is_there_twice_is_kept_in_the_document() -> None:
    twice = raw_bson.encode_document(b"\x10_id\0\1\0\0\0", b"\x10a\0\1\0\0\0", b"\x10a\0\2\0\0\0")
    found = rows(TableSchema(), twice)
    assert found.batch.to_pylist()[0]["_bson"] == twice


@pytest.mark.parametrize(("policy", "type_"), [("evolve", "double"), ("widen", "double")])
def test_a_column_becomes_wider(policy: Policy, type_: str) -> None:
    schema = rows(TableSchema(policy=policy), {"_id": 1, "n": 1}).schema
    found = rows(schema, {"_id": 2, "n": 1.5, "new": 1})
    assert found.retyped
    assert types(found)["n"] == type_
    assert ("new" in types(found)) == (policy == "evolve")
    text = rows(found.schema, {"_id": 3, "n": "three"})
    assert types(text)["n"] == "json"
    assert text.batch.column("n").to_pylist() == ['"three"']


def test_quarantine_and_fail() -> None:
    declared = {"n": "int", "o.name": "string", "`a.b`": "long", "price": "decimal(6,2)"}
    fits = {"_id": 1, "n": 1, "o": {"name": "x"}, "a.b": 2, "price": Decimal128("1234.50")}
    wrong = [{"_id": 2, "n": 2**40}, {"_id": 3, "price": Decimal128("0.123")}, {"_id": 4, "o": {"name": 1}}]
    found = rows(TableSchema.declared(declared), fits, *wrong)
    assert found.batch.num_rows == 1
    assert types(found) == {"n": "int", "o_name": "string", "a_b": "long", "price": "decimal(6,2)"}
    row = found.batch.to_pylist()[0]
    assert (row["o_name"], row["a_b"], str(row["price"])) == ("x", 2, "1234.50")
    assert [one.document.key for one in found.misfits] == [b"k1", b"k2", b"k3"]
    assert found.misfits[0].reason == "'n' is long 1099511627776, and its column is int"
    with pytest.raises(SinkError, match="'n' is string x, and its column is int"):
        rows(TableSchema.declared(declared, "fail"), {"_id": 1, "n": "x"})
    with pytest.raises(UsageError, match="'money' is not a column type"):
        TableSchema.declared({"n": "money"})


def test_a_decimal_with_more_places_than_its_column_does_not_fit() -> None:
    """Python's context rounds decimals to 28 digits, and the run ended with Arrow's error. No test had a longer one."""
    texts = (
        "1.000000000000000000000000000000001",
        "1.5000000000000000000000000000000000",
        "0.0000",
        "-0E-6000",
        "12E2",
    )
    found = rows(TableSchema.declared({"n": "decimal(6,2)"}), *({"_id": 1, "n": Decimal128(text)} for text in texts))
    assert [str(value) for value in found.batch.column("n").to_pylist()] == ["1.50", "0.00", "0.00", "1200.00"]
    assert [one.document.key for one in found.misfits] == [b"k0"]


def test_dates_out_of_range_and_bytes_that_are_no_text() -> None:
    far = raw_bson.encode_document(b"\x10_id\0\1\0\0\0", b"\x09d\0" + (2**62).to_bytes(8, "little"))
    found = rows(TableSchema(), far)
    assert types(found) == {"_id": "long", "d": "timestamp"}
    assert found.batch.to_pylist()[0]["d"] is None
    assert found.batch.to_pylist()[0]["_bson"] == far
    assert found.batch.to_pylist()[0]["_json"] == '{"_id": 1, "d": {"$date": {"$numberLong": "4611686018427387904"}}}'
    odd = raw_bson.encode_document(b"\x10_id\0\1\0\0\0", b"\x02s\0\x03\0\0\0\xff\0\0")
    row = rows(TableSchema(), odd).batch.to_pylist()[0]
    assert row["s"] == "\ufffd\0"
    assert row["_bson"] == odd


def test_keys_sort_as_the_server_sorts() -> None:
    values = [MinKey(), None, -1, 0.5, 1, 2**40, "a", "b", {"a": 1}, [1], b"x", ObjectId(), False, True, MaxKey()]
    keys = []
    for value in values:
        document = bson.encode({"_id": value})
        element = raw_bson.find(document, b"_id")
        assert element is not None
        keys.append(sortable_key(element.type, raw_bson.value(document, element)))
    assert keys == sorted(keys)
    assert sortable_key(0x10, b"\1\0\0\0") == sortable_key(0x12, b"\1\0\0\0\0\0\0\0")


def test_short_ways_to_a_key_lead_to_the_same_key() -> None:
    rng = random.Random(20261123)
    for _ in range(3000):
        type_, value = random_values.value(rng)
        assert sortable_key(type_, value) == keystring.encode(type_, value)[0], (type_, value.hex())


def test_collections_are_selected_and_have_folders_of_their_own() -> None:
    chosen = Selection.of(["shop.*", "log?.a*"])
    assert chosen.has("shop.orders")
    assert chosen.has("log1.a.b")
    assert not chosen.has("log10.a")
    assert not chosen.has("shop.system.views")
    assert Selection.of(["*.*"]).databases is None
    for wrong in ("shop", ".x", "shop.", ""):
        with pytest.raises(UsageError):
            Selection.of([wrong])
    names = ["shop.orders", "shop.Orders", "shop.a/b", "shop.a~b", "shop..a", "shop." + "x" * 220, "shop." + "x" * 221]
    folders = [folder_of(name) for name in names]
    assert folders[0] == "shop.orders"
    assert len({one.lower() for one in folders}) == len(names)
    assert all("/" not in one and len(one) <= 200 for one in folders)
