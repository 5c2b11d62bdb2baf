"""Columns of structs and arrays: what they hold, how they grow, and what happens to values that do not fit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId
from deltalake import DeltaTable
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.lake.tables import nested
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.description import described
from tailrace.lake.tables.nested import declared_type, parsed, text_of
from tailrace.lake.tables.rows import rows_of
from tailrace.lake.tables.schema import Policy, TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.state import StoredDocument
from tailrace.lake.tables.writer import TablesWriter
from tests.differential.execute import note
from tests.differential.wire import Wire
from tests.tables.change_feeds import check_feed
from tests.tables.equality import in_collection, in_table
from tests.tables.features import Made
from tests.tables.nested_oracle import expected, renamed
from tests.tables.readers import READERS
from tests.tables.test_schema import rows, types

CODEC: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
GROWING = TableSchema(nested=True)


def shown(found: Any, name: str) -> list[Any]:
    values: list[Any] = found.batch.column(name).to_pylist()
    return values


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("array<string>", "array<string>"),
        ("array< struct < sku : string , n:int > >", "array<struct<sku:string,n:int>>"),
        ("struct<`a.b`: decimal(18, 2), `a``b`: json, ``: date, $ref: long>",) * 2,
        ("struct<array: array<array<double>>, struct: struct<x: objectid>>",) * 2,
    ],
)  # fmt: skip
def test_a_type_is_kept_in_one_way(given: str, kept: str) -> None:
    found = declared_type(given)
    assert parsed(found) == parsed(kept)
    assert declared_type(found) == found == text_of(parsed(found))


@pytest.mark.parametrize(
    "given",
    [
        "array", "array<>", "array<void>", "void", "struct<>", "struct<a>", "struct<a:>", "struct<a:int,>", "array<int",
        "array<int>>", "struct<a:int b:int>", "struct<a:int,a:long>", "array<money>", "struct<:int>", "map<string,int>",
        "array<decimal(39,1)>", "struct<`a:int>", "array<" * 17 + "int" + ">" * 17, "array<" * 5000, "", "<", "`int`",
        "struct<" + ",".join(f"f{number}:int" for number in range(1001)) + ">",
    ],
)  # fmt: skip
def test_what_is_no_type_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="column type"):
        TableSchema.declared({"c": given})


def test_types_are_inferred_at_each_place() -> None:
    document = {
        "_id": 1,
        "o": {"i": 1, "d": 1.5, "s": "x", "dec": Decimal128("NaN"), "t": datetime(2026, 1, 1), "id": ObjectId()},
        "l": [{"a": None}, None, {"a": [1, 2.5]}],
        "mixed": {"either": [1, "1"], "same": True},
        "nothing": {"x": None, "l": [], "o": {}},
    }
    assert types(rows(GROWING, document)) == {
        "_id": "long",
        "o": "struct<i:long,d:double,s:string,dec:string,t:timestamp,id:objectid>",
        "l": "array<struct<a:array<double>>>",
        "mixed": "struct<either:array<json>,same:boolean>",
        "nothing": "struct<l:array<void>,o:struct<>>",
    }


def test_names_inside_are_made_like_those_of_columns() -> None:
    found = rows(GROWING, {"o": {"a": 1, "A": 2, "a.b": 3, "a b": 4, "": 5, "_key": 6}})
    assert shown(found, "o") == [{"a": 1, "A_2": 2, "a_b": 3, "a_b_2": 4, "_": 5, "_key": 6}]
    later = rows(found.schema, {"o": {"A": 7, "a_b": 8}})
    assert shown(later, "o")[0] | {} == dict.fromkeys(shown(found, "o")[0]) | {"A_2": 7, "a_b_3": 8}
    assert not later.retyped


# --- how they grow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "type_", "retyped"),
    [
        ({"a": 1}, {"b": "x"}, "struct<a:long,b:string>", False),
        ([{"a": 1}], [{"b": [1]}], "array<struct<a:long,b:array<long>>>", False),
        ([1], [2.5], "array<double>", True),
        ([1], [2.5, 2**60], "array<json>", True),
        ({"a": 1, "b": 1}, {"a": {"x": 1}}, "struct<a:json,b:long>", True),
        ({"a": {"x": 1}}, {"a": [1]}, "struct<a:json>", True),
        ({"a": 1}, 5, "json", True),
        ([1], {"a": 1}, "json", True),
        (5, {"a": 1}, "json", True),
        ({}, {"a": None}, "struct<>", False),
        ({}, {"a": 1}, "struct<a:long>", True),
        ([], [None, []], "array<array<void>>", False),
        ([], [{}], "array<struct<>>", False),
        ([[], None], [[1]], "array<array<long>>", True),
        ({"a": []}, {"a": [1]}, "struct<a:array<long>>", True),
        ({"n": 1, "a": []}, {"n": 2, "a": [], "b": {}}, "struct<n:long,a:array<void>,b:struct<>>", False),
    ],
)
def test_a_type_grows_where_it_has_to(first: Any, second: Any, type_: str, retyped: bool) -> None:
    schema = rows(GROWING, {"_id": 1, "c": first}).schema
    found = rows(schema, {"_id": 1, "c": first}, {"_id": 2, "c": second})
    assert (types(found)["c"], found.retyped) == (type_, retyped)
    together = rows(GROWING, {"_id": 1, "c": first}, {"_id": 2, "c": second})
    assert (types(together)["c"], together.retyped) == (type_, False)
    assert together.batch.column("c").equals(found.batch.column("c"))


def test_an_object_whose_names_are_data_is_json() -> None:
    counts = {f"user{number}": 1 for number in range(nested.FIELDS_MAX)}
    found = rows(GROWING, {"o": {"kept": 1, "counts": counts}})
    assert types(found)["o"].count(":long") == nested.FIELDS_MAX + 1
    more = rows(found.schema, {"o": {"kept": 1, "counts": {"one more": 1}}})
    assert (types(more)["o"], more.retyped) == ("struct<kept:long,counts:json>", True)
    assert shown(more, "o") == [{"kept": 1, "counts": '{"one more": 1}'}]


def test_a_table_has_no_more_scalars_than_its_readers_take() -> None:
    wide = {f"o{number}": {"in": {f"f{one}": one for one in range(99)}} for number in range(12)}
    found = rows(GROWING, wide)
    assert sum(column.leaves for column in found.schema.columns) <= nested.LEAVES_MAX
    assert list(types(found).values()).count("json") == 2
    assert not rows(found.schema, {"o0": {"more": {f"g{one}": one for one in range(10)}}}).retyped
    grown = rows(found.schema, {"o0": {"more": {f"g{one}": one for one in range(11)}}})
    assert types(grown)["o0"] == "json"
    assert grown.retyped
    full = rows(found.schema, {"o0": {"more": {f"g{one}": one for one in range(10)}}})
    later = types(rows(full.schema, {"n": 1, "l": [1]}))
    assert (later["n"], later["l"]) == ("long", "json")


def test_names_that_are_as_long_as_data_are_json() -> None:
    schema = rows(GROWING, {"o": {"n" * 500: 1}}).schema
    assert schema.columns[0].leaves == 1
    assert types(rows(schema, {"o": {"m" * nested.TEXT_MAX: 1}}))["o"] == "json"
    assert types(rows(GROWING, {"o": {"m" * nested.TEXT_MAX: 1}}))["o"] == "json"


def test_what_is_deep_is_json() -> None:
    deep: Any = 1
    for _ in range(nested.DEPTH_MAX + 3):
        deep = [deep]
    found = rows(GROWING, {"c": deep})
    assert types(found)["c"] == "array<" * nested.DEPTH_MAX + "json" + ">" * nested.DEPTH_MAX
    inner = shown(found, "c")[0]
    for _ in range(nested.DEPTH_MAX - 1):
        inner = inner[0]
    assert inner == ["[[[1]]]"]


# --- odd values ------------------------------------------------------------------------------------------------------


def test_null_missing_and_empty_are_told_apart_where_columns_can() -> None:
    found = rows(GROWING, {"o": {"a": 1}, "l": [1]}, {"o": {}, "l": []}, {"o": None, "l": None}, {}, {"o": {"a": None}})
    assert shown(found, "o") == [{"a": 1}, {"a": None}, None, None, {"a": None}]
    assert shown(found, "l") == [[1], [], None, None, None]


def test_odd_bytes_inside_are_shown_as_in_columns() -> None:
    name = b"\xff"
    twice = raw_bson.encode_document(
        raw_bson.encode_element(
            raw_bson.OBJECT,
            b"o",
            raw_bson.encode_document(b"\x10a\0\1\0\0\0", b"\x10a\0\2\0\0\0", b"\x02s\0\x03\0\0\0\xff\0\0"),
        )
    )
    odd = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.OBJECT, b"o", raw_bson.encode_document(b"\x10" + name + b"\0\1\0\0\0"))
    )
    found = rows(GROWING, twice, odd)
    assert [row["_bson"] for row in found.batch.to_pylist()] == [twice, odd]
    assert shown(found, "o") == [{"a": 2, "s": "\ufffd\0", "\ufffd": None}, {"a": None, "s": None, "\ufffd": 1}]


def test_a_reference_is_an_object() -> None:
    identifier = ObjectId()
    found = rows(GROWING, {"r": DBRef("c", identifier)}, {"r": {"$ref": "d", "$id": 5, "more": 1}})
    assert types(found)["r"] == "struct<`$ref`:string,`$id`:json,more:long>"
    assert [one["$ref"] for one in shown(found, "r")] == ["c", "d"]


def test_far_dates_are_null_where_columns_become_wider_and_misfits_elsewhere() -> None:
    far = {"l": [DatetimeMS(2**60), DatetimeMS(0)]}
    assert shown(rows(GROWING, far), "l") == [[None, datetime(1970, 1, 1, tzinfo=UTC)]]
    found = rows(TableSchema.declared({"l": "array<timestamp>"}), far)
    assert [one.reason for one in found.misfits] == [f"'l[0]' is date {2**60} ms, and its column is timestamp"]


@pytest.mark.parametrize(
    ("type_", "value", "reason"),
    [
        ("array<int>", [1, 2**31], "'c[1]' is long 2147483648, and its column is int"),
        ("array<struct<n: int>>", [{"n": 1}, {"n": "x"}], "'c[1].n' is string x, and its column is int"),
        ("array<struct<n: int>>", {"n": 1}, "'c' is object {'n': 1}, and its column is array<struct<n:int>>"),
        ("struct<`a.b`: array<decimal(4,2)>>", {"a.b": [Decimal128("NaN")]}, "'c.a.b[0]' is Decimal128 NaN, "),
        ("struct<n: decimal(4,2)>", {"n": Decimal128("123.4")}, "'c.n' is Decimal128 123.4, "),
        ("struct<d: double>", {"d": bson.Int64(2**60)}, f"'c.d' is long {2**60}, and its column is double"),
        ("array<array<string>>", [["x"], "y"], "'c[1]' is string y, and its column is array<string>"),
    ],
)
def test_a_value_that_does_not_fit_is_named(type_: str, value: Any, reason: str) -> None:
    documents = {"_id": 1, "c": value}, {"_id": 2, "c": None}
    found = rows(TableSchema.declared({"c": type_}), *documents)
    assert found.batch.num_rows == 1
    (misfit,) = found.misfits
    assert misfit.reason.startswith(reason)
    with pytest.raises(SinkError, match="a document does not fit its table's columns"):
        rows(TableSchema.declared({"c": type_}, "fail"), *documents)
    wider = rows(TableSchema.declared({"c": type_}, "widen"), *documents)
    assert wider.retyped
    assert shown(wider, "c")[0] is not None


@pytest.mark.parametrize("policy", ["widen", "quarantine"])
def test_without_evolution_no_field_is_added(policy: Policy) -> None:
    schema = rows(TableSchema(policy=policy, nested=True), {"o": {"a": 1}, "l": []}).schema
    found = rows(schema, {"o": {"a": 2, "b": 3}, "l": [1]}, {"o": {"b": 3}})
    assert shown(found, "o") == [{"a": 2}, {"a": None}]
    assert shown(found, "l") == [[1] if policy == "widen" else ["1"], None]
    assert not found.misfits


# --- many values -----------------------------------------------------------------------------------------------------


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column holds no more than a thousand."""
    monkeypatch.setattr(nested, "VALUES_MAX", 1000)


def stored(*documents: dict[str, Any]) -> list[StoredDocument]:
    return [StoredDocument(b"%d" % at, ClusterTime.of(1, 1), bson.encode(one)) for at, one in enumerate(documents)]


WIDE = {f"f{number}": {"a": 1, "b": [1]} for number in range(10)}


@pytest.mark.usefixtures("few_values")
def test_documents_whose_columns_take_much_room_are_made_a_few_at_a_time() -> None:
    """An empty object takes seven bytes of an array, but in a column as many values as its type has fields."""
    documents = stored(*({"_id": number, "l": [WIDE, {}, None, {"late": number}]} for number in range(60)))
    for schema in (GROWING, next(rows_of(GROWING, documents)).schema):
        found = list(rows_of(schema, documents))
        assert len(found) > 3
        assert not any(one.retyped for one in found)
        shown = [row for one in found for row in one.batch.select(["_id", "l"]).to_pylist()]
        assert [row["_id"] for row in shown] == list(range(60))
        assert all(row["l"][2:] == [None, {**dict.fromkeys(row["l"][0]), "late": row["_id"]}] for row in shown)


@pytest.mark.usefixtures("few_values")
def test_a_document_that_takes_too_much_room_does_not_fit() -> None:
    schema = rows(GROWING, {"l": [WIDE]}).schema
    large = {"l": [WIDE] + [{}] * 60}
    for found in (list(rows_of(schema, stored({"l": [{}]}, large)))[-1], rows(GROWING, large)):
        assert types(found)["l"] == "json"
        assert shown(found, "l")[-1].endswith(", {}]")
    declared = TableSchema.declared({"l": schema.columns[0].type})
    _, found = rows_of(declared, stored({"l": [{}]}, large))
    assert found.batch.num_rows == 0
    (misfit,) = found.misfits
    assert misfit.reason == "'l' has 1,220 values, counting those that are NULL; at most 1,000 of a document fit"


def test_rows_cannot_be_arranged_by_others() -> None:
    for options in ({"z_order": ("c",)}, {"partition_by": ("c",)}):
        with pytest.raises(UsageError, match="'c'"):
            TableRule("shop.*", TableSchema.declared({"c": "array<int>"}), **options)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_feed_goes_on_while_structs_get_fields(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", GROWING, feed=True)
    made.whole([{"_id": 1, "o": {"a": 1}, "l": [{"x": 1}]}, {"_id": 2, "o": {}}])
    made.change([{"_id": 1, "o": {"a": 1, "b": {"c": 1}}, "l": []}])
    made.change([{"_id": 2, "o": None, "l": [{"y": "z"}, None]}], gone=[1])
    assert check_feed(tmp_path / "t") == 3


def test_the_status_tells_of_them(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", GROWING)
    made.whole([{"_id": 1, "o": {"a": 1, "A": 1}, "l": [1]}])
    wider = rows(made.schema, {"_id": 1, "o": {"a": 1}, "l": [1, "x"]})
    made.schema = wider.schema
    made.whole([{"_id": 1, "o": {"a": 1}, "l": [1, "x"]}])
    told = list(described(CollectionTable(tmp_path / "t", "shop.orders")))
    assert told == ["l is in column l: array<json>; it was array<long>"]
    made.change([{"_id": 2, "when": [DatetimeMS(2**60)]}, {"_id": 3, "when": [DatetimeMS(0)]}])
    (line,) = [one for one in described(CollectionTable(tmp_path / "t", "shop.orders"), whole=True) if "when" in one]
    assert line == "when is in column when: array<timestamp>; 1 rows with dates too far away for readers are NULL"


@pytest.fixture
def collection(replica_set: ReplicaSet) -> Iterator[Any]:
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database("nested")
        yield client["nested"]["things"]
        client.drop_database("nested")


def value(rng: random.Random, depth: int = 0) -> Any:
    """Mostly an object or array; scalars of one type at each name, and now and then of another."""
    turn = rng.random()
    if depth < 3 and turn < 0.45:
        return {name: value(rng, depth + 1) for name in rng.sample(("a", "b", "B", "c.d", "e"), rng.randint(0, 3))}
    if depth < 3 and turn < 0.75:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return rng.choice((None, 1, 2.5, "x", "x", True, datetime(2026, 1, 1), bson.Int64(2**60), b"\0", DatetimeMS(2**60)))


def write(collection: Any, rng: random.Random, steady: bool) -> None:
    """A change. ``steady``: apart from new fields, each place keeps its type."""
    one = {"_id": rng.randrange(12)}
    item = {"sku": rng.choice("abc"), rng.choice(("n", "m", "N")): rng.randrange(5)}
    turn = rng.randrange(6)
    if turn == 0:
        collection.delete_one(one)
    elif turn == 1:
        collection.update_one(one, {"$push": {"items": {"$each": [item, None], "$position": 0}}}, upsert=True)
    elif turn == 2:
        collection.update_one(one, {"$set": {"deep.of.x": 1, f"deep.of.y{rng.randrange(9)}": ["z"]}}, upsert=True)
    elif turn == 3:
        collection.update_one(one, {"$unset": {"deep.of": 1}, "$set": {"items": []}}, upsert=True)
    else:
        odd = {} if steady else {rng.choice("pqr"): value(rng)}
        collection.replace_one(one, {"items": [item], **odd}, upsert=True)


def check(root: Path, collection: Any, reader: str) -> int:
    """The table holds what plain Python makes of the documents. Returns how many values were compared."""
    truth = in_collection(collection)
    assert in_table(root, collection.full_name) == truth
    folder = root / collection.full_name
    columns = CollectionTable(folder, collection.full_name).schema(GROWING).columns
    arrow = DeltaTable(folder).to_pyarrow_dataset().schema
    found = READERS[reader](folder, None, None)
    assert len(found) == len(truth)
    compared = 0
    for raw, row in zip((truth[key] for key in sorted(truth)), found, strict=True):
        document = bson.decode(raw, CODEC)
        for name in document.keys() - {column.path[0] for column in columns}:
            assert document[name] is None
        for column in columns:
            type_ = parsed(column.type)
            wanted = expected(type_, document.get(column.path[0]))
            assert renamed(type_, arrow.field(column.name).type, row[column.name]) == wanted, (column, reader)
            compared += wanted is not None
    return compared


@pytest.mark.mongod
@pytest.mark.parametrize("seed", [1])
def test_nested_columns_hold_what_the_documents_hold(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, seed: int
) -> None:
    rng, compared = random.Random(seed), 0
    rule = TableRule(collection.full_name, GROWING)
    settings = TableSettings(tmp_path, (rule,), every_s=0.0, compact_every=3, feed_h=1.0)
    recorded = []
    with Wire.to(replica_set.uri) as wire:
        for step in range(12):
            for _ in range(8):
                write(collection, rng, steady=step % 3 != 2)
            recorded.append((note(wire, "recorded"), in_collection(collection)))
            for _ in range(4):
                write(collection, rng, steady=step % 3 != 2)
            with TablesWriter(replica_set.uri, settings) as writer:
                writer.run_to_present(note(wire, "written"))
            compared += check(tmp_path, collection, sorted(READERS)[step % len(READERS)])
    assert compared > 100
    assert check_feed(tmp_path / collection.full_name) > 10
    for time, truth in recorded[4:]:
        found = as_of(tmp_path, collection.full_name, time, uri=replica_set.uri)
        table = dict(zip(*(found.rows.column(name).to_pylist() for name in ("_key", "_bson")), strict=True))
        assert table == truth
    assert next(stated(tmp_path / collection.full_name)).time >= recorded[-1][0]


@pytest.mark.mongod
def test_a_table_whose_columns_become_nested_is_rewritten(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    collection.insert_one({"_id": 1, "l": [{"a": 1}]})
    seen = []
    for schema in (TableSchema(), GROWING, TableSchema.declared({"l": "array<struct<a: int>>"}), TableSchema()):
        settings = TableSettings(tmp_path, (TableRule(collection.full_name, schema),), every_s=0.0)
        with TablesWriter(replica_set.uri, settings) as writer:
            writer.run_to_present()
        table = DeltaTable(tmp_path / collection.full_name)
        seen.append((str(table.to_pyarrow_table().column("l").to_pylist()), len(table.to_pyarrow_table())))
    text, struct = "['[{\"a\": 1}]']", "[[{'a': 1}]]"
    assert seen == [(text, 1), (struct, 1), (struct, 1), (text, 1)]


@pytest.mark.mongod
def test_a_table_that_left_something_out_is_rewritten_when_its_policy_does_not(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    """Documents from before the policy have no column, or no row, so only later files would have it."""

    def follow(schema: TableSchema) -> list[Any]:
        settings = TableSettings(tmp_path, (TableRule(collection.full_name, schema),), every_s=0.0)
        with TablesWriter(replica_set.uri, settings) as writer:
            writer.run_to_present()
        table = DeltaTable(tmp_path / collection.full_name).to_pyarrow_table().sort_by("_key")
        return [{name: value for name, value in row.items() if name in "om"} for row in table.to_pylist()]

    collection.insert_one({"_id": 1, "o": {"a": 1}})
    assert follow(TableSchema(policy="quarantine", nested=True)) == [{"o": {"a": 1}}]
    collection.insert_many([{"_id": 2, "o": {"a": 2, "b": 2}, "m": 2}, {"_id": 3, "o": 3}])
    assert follow(TableSchema(policy="quarantine", nested=True)) == [{"o": {"a": 1}}, {"o": {"a": 2}}]
    collection.insert_one({"_id": 4, "o": {"a": 4, "b": 4}, "m": 4})
    found = follow(TableSchema(policy="widen", nested=True))
    assert [row["o"] for row in found] == ['{"a": 1}', '{"a": 2, "b": 2}', "3", '{"a": 4, "b": 4}']
    collection.update_one({"_id": 3}, {"$set": {"o": {"b": 3}}})
    assert [row["m"] for row in follow(GROWING)] == [None, 2, None, 4]
