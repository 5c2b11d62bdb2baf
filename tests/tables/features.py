"""Tables with features that readers may have trouble with, and what each reader must read there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import bson
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from deltalake import DeltaTable

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.tables.delta_commit import Batch
from tailrace.lake.tables.delta_table import CHECKPOINT_EVERY, CollectionTable
from tailrace.lake.tables.rows import make_rows
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.state import StoredDocument
from tailrace.lake.tables.versions import Keeping
from tests.tables.equality import key_of

#: Texts that a path, a URI, SQL or Hive might misinterpret, or that are too long for them.
ODD = (
    "a b", "a/b", "../x", "..", ".", "%41", "%2F", "é", "e\u0301", "a:b=c", "=", "a#b?c", "日本", "a\\b", "\n", "\r\n",
    "'\"", "+", "~", "", "\0", "a\0b", "\ufffd", "\u2028", "__HIVE_DEFAULT_PARTITION__", "NULL", "null", "true", "1",
    "01", "2020-01-01", "A", "a", "x" * 300, "x" * 299 + "y", "é" * 2000, "\U0010ffff" * 1100, "\ud7ff" * 1100, None,
)  # fmt: skip

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Rows = list[dict[str, Any]]


def batch(number: int) -> Batch:
    return Batch(number, ClusterTime.of(100 + number, 0), ClusterTime.of(101 + number, 0), "00" * 16)


def rows(schema: TableSchema, documents: Sequence[dict[str, Any]]) -> Any:
    encoded = [bson.encode(one) for one in documents]
    found = make_rows(schema, [StoredDocument(key_of(one), ClusterTime.of(100, 1), one) for one in encoded])
    assert not found.misfits
    return found


class Made:
    """A table that is made step by step, as by a writer. ``followed`` is called after each commit."""

    followed: Callable[[CollectionTable], None] | None = None

    def __init__(self, root: Path, schema: TableSchema, **options: Any) -> None:
        self.schema = schema
        self.table = CollectionTable(root, "shop.orders", declared=schema.declaration, **options)
        self._number = 0

    def whole(self, documents: Sequence[dict[str, Any]]) -> None:
        found = rows(self.schema, documents)
        self.schema = found.schema
        self.table.write_whole(batch(self._number), self.schema, [found.batch], "whole")
        self._committed()

    def change(self, documents: Sequence[dict[str, Any]], gone: Sequence[int] = ()) -> None:
        found = rows(self.schema, documents)
        assert not found.retyped
        self.schema = found.schema
        keys = [*found.batch.column("_key").to_pylist(), *(key_of(bson.encode({"_id": one})) for one in gone)]
        self.table.change(batch(self._number), self.schema, keys, [found.batch])
        self._committed()

    def _committed(self) -> None:
        self._number += 1
        if self.followed is not None:
            self.followed(self.table)


def divided(root: Path, type_: str, values: Sequence[Any], shown: Sequence[Any]) -> Rows:
    """A table that is partitioned by a column with these values; the same values come once more in a second commit."""
    made = Made(root, TableSchema.declared({"c": type_}), partition_by=("c",))
    made.whole([{"_id": number, "c": value} for number, value in enumerate(values)])
    made.change([{"_id": 10_000 + number, "c": value} for number, value in enumerate(values)])
    return [{"c": value} for value in (*shown, *shown)]


def odd_texts(root: Path) -> Rows:
    return divided(root, "string", ODD, ODD)


def whole_numbers(root: Path) -> Rows:
    values = [0, -1, 1, 2**31 - 1, -(2**31), None]
    return divided(root, "int", values, values)


def long_numbers(root: Path) -> Rows:
    values = [bson.Int64(0), bson.Int64(2**63 - 1), bson.Int64(-(2**63)), None]
    return divided(root, "long", values, [None if one is None else int(one) for one in values])


def truths(root: Path) -> Rows:
    return divided(root, "boolean", [True, False, None], [True, False, None])


def dates(root: Path) -> Rows:
    shown = [date(1, 1, 1), date(1969, 12, 31), date(2020, 2, 29), date(9999, 12, 31), None]
    values = [None if one is None else datetime(one.year, one.month, one.day, tzinfo=UTC) for one in shown]
    return divided(root, "date", values, shown)


def merged_files(root: Path) -> Rows:
    """Small files were merged, rows deleted, and the files of all versions but the newest removed."""
    made = Made(root, TableSchema.declared({"c": "string"}), partition_by=("c",))
    made.whole([{"_id": number, "c": value} for number, value in enumerate(ODD)])
    made.change([{"_id": 100 + number, "c": value} for number, value in enumerate(ODD)], gone=range(10))
    assert made.table.compact()["numFilesRemoved"] == 2 * (len(ODD) - 10)
    assert len(made.table.expire(Keeping(0))) == 10 + 2 * (len(ODD) - 10)
    return [{"c": value} for value in (*ODD[10:], *ODD)]


def checkpoints(root: Path) -> Rows:
    """More commits than between two checkpoints, and no log before the last checkpoint."""
    made = Made(root, TableSchema.declared({"c": "string"}), partition_by=("c",))
    made.whole([{"_id": 0, "c": "first"}])
    for number in range(1, CHECKPOINT_EVERY + 3):
        made.change([{"_id": number % 5, "c": f"{number}%"}])
    made.table.expire(Keeping(0))
    last = CHECKPOINT_EVERY + 2
    return [{"c": f"{last - (last - number) % 5}%"} for number in range(5)]


def odd_names(root: Path) -> Rows:
    """Fields whose names differ only in case or are like ours, and fields with values that readers refuse."""
    made = Made(root, TableSchema())
    made.whole([{"_id": 1, "abC": 1, "Abc": 2, "_key": 3, "a.b": 4, "x y": 5, "é": 6, "": 7, "a%b/c=d": 8}])
    made.change([{"_id": 2, "abC": 1, "ABC": "late"}])
    first = {"abC": 1, "Abc_2": 2, "_key_2": 3, "a_b": 4, "x_y": 5, "é": 6, "_": 7, "a%b/c_d": 8, "ABC_3": None}
    return [{"_id": 1, **first}, {**dict.fromkeys(first), "_id": 2, "abC": 1, "ABC_3": "late"}]


def late_columns(root: Path) -> Rows:
    """Files from before a column existed, and a column whose type has become wider."""
    made = Made(root, TableSchema())
    made.whole([{"_id": 1, "n": 1}])
    made.change([{"_id": 2, "n": 2, "more": {"a": [1, None]}}])
    wider = rows(made.schema, [{"_id": 3, "n": 1.5}])
    assert wider.retyped
    made.schema = wider.schema
    made.whole([{"_id": 1, "n": 1}, {"_id": 2, "n": 2, "more": {"a": [1, None]}}, {"_id": 3, "n": 1.5}])
    made.change([{"_id": 4, "later": "x"}])
    return [
        {"_id": 1, "n": 1.0, "more": None, "later": None},
        {"_id": 2, "n": 2.0, "more": '{"a": [1, null]}', "later": None},
        {"_id": 3, "n": 1.5, "more": None, "later": None},
        {"_id": 4, "n": None, "more": None, "later": "x"},
    ]


def far_dates(root: Path) -> Rows:
    """Dates of years that most programs cannot represent."""
    made = Made(root, TableSchema())
    first, last = -62135596800000 + 2 * 86_400_000, 253402300799999
    far = [first - 1, -62135596800000, last + 1, 2**63 - 1, -(2**63)]
    made.whole([{"_id": number, "t": DatetimeMS(value)} for number, value in enumerate([first, last, 0, *far])])
    made.change([{"_id": 100 + number, "t": DatetimeMS(value)} for number, value in enumerate(far)])
    shown = [datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC), _EPOCH]
    hidden = [{"_id": number, "t": None} for number in (*range(3, 8), *range(100, 105))]
    return [*({"_id": number, "t": value} for number, value in enumerate(shown)), *hidden]


def every_type(root: Path) -> Rows:
    types = {
        "d": "double", "s": "string", "b": "binary", "o": "objectid", "j": "json", "m": "decimal(38,10)",
        "t": "timestamp", "y": "date", "l": "long", "i": "int", "f": "boolean",
    }  # fmt: skip
    identifier = bson.ObjectId("65536f2a0000000000000001")
    moment = datetime(2026, 11, 25, 12, 0, 0, 1000, tzinfo=UTC)
    document = {
        "d": float("inf"), "s": "\0", "b": b"\0\xff", "o": identifier, "j": {"k": "v"},
        "m": Decimal128("123456789012345678901234.0123456789"), "t": moment, "y": moment, "l": 2**62, "i": -1,
        "f": True,
    }  # fmt: skip
    made = Made(root, TableSchema.declared(types))
    made.whole([{"_id": 1, **document}, {"_id": 2}])
    shown = {**document, "o": str(identifier), "j": '{"k": "v"}', "m": document["m"].to_decimal(), "y": moment.date()}
    return [shown, dict.fromkeys(types)]


def nested_values(root: Path) -> Rows:
    """Objects and arrays as structs and lists: empty ones, NULL at each level, odd names, and files from before some
    fields existed in their structs."""
    made = Made(root, TableSchema(nested=True))
    moment = datetime(2026, 11, 25, 12, 0, 0, 1000, tzinfo=UTC)
    first = {"a": 1, "A": "x", "b.c": [[1, None], [], None], "t": moment, "raw": b"\0\xff", "f": True, "": 1.5}
    made.whole(
        [
            {"_id": 1, "o": first, "l": [{"n": 1, "s": "é"}, None, {}], "empty": [], "many": [1, "1", None, {"k": 2}]},
            {"_id": 2, "o": {}, "l": []},
            {"_id": 3, "o": None},
        ]
    )
    made.change([{"_id": 4, "o": {"a": 2, "late": {"x": [{"y": 1}]}}, "l": [{"n": 2, "late": [True]}]}])
    made.change([{"_id": 5, "o": {"late": {"z": "z", "x": [{"w": None}, {"w": 1}]}}}, {"_id": 2, "o": {}, "l": []}])
    late = {"x": [{"y": 1, "w": None}], "z": None}
    none = dict.fromkeys(("a", "A_2", "b_c", "t", "raw", "f", "_", "late"))
    shown = {**none, **first, "A_2": "x", "b_c": first["b.c"], "_": 1.5}
    many = ["1", '"1"', None, '{"k": 2}']
    return [
        {
            "_id": 1,
            "o": {name: shown[name] for name in none},
            "l": [{"n": 1, "s": "é", "late": None}, None, {"n": None, "s": None, "late": None}],
            "empty": "[]",
            "many": many,
        },
        {"_id": 2, "o": none, "l": [], "empty": None, "many": None},
        {"_id": 3, "o": None, "l": None, "empty": None, "many": None},
        {
            "_id": 4,
            "o": {**none, "a": 2, "late": late},
            "l": [{"n": 2, "s": None, "late": [True]}],
            "empty": None,
            "many": None,
        },
        {
            "_id": 5,
            "o": {**none, "late": {"x": [{"y": None, "w": None}, {"y": None, "w": 1}], "z": "z"}},
            "l": None,
            "empty": None,
            "many": None,
        },
    ]


def merged_nested(root: Path) -> Rows:
    """The same in one file."""
    found = nested_values(root)
    assert CollectionTable(root, "shop.orders").compact() == {"numFilesRemoved": 3, "numFilesAdded": 1}
    return found


def every_nested_type(root: Path) -> Rows:
    """Each declared type nested in others."""
    inner = {
        "d": "double", "s": "string", "b": "binary", "o": "objectid", "j": "json", "m": "decimal(38,10)",
        "t": "timestamp", "y": "date", "l": "long", "i": "int", "f": "boolean",
    }  # fmt: skip
    struct = f"struct<{', '.join(f'{name}: {type_}' for name, type_ in inner.items())}>"
    identifier, moment = bson.ObjectId("65536f2a0000000000000001"), datetime(2026, 11, 25, 12, 0, 0, 1000, tzinfo=UTC)
    document = {
        "d": float("inf"), "s": "\0", "b": b"\0\xff", "o": identifier, "j": {"k": "v"},
        "m": Decimal128("123456789012345678901234.0123456789"), "t": moment, "y": moment, "l": 2**62, "i": -1,
        "f": True,
    }  # fmt: skip
    made = Made(root, TableSchema.declared({"one": struct, "all": f"array<array<{struct}>>"}))
    made.whole([{"_id": 1, "one": document, "all": [[document, None], []]}, {"_id": 2}])
    shown = {**document, "o": str(identifier), "j": '{"k": "v"}', "m": document["m"].to_decimal(), "y": moment.date()}
    return [{"one": shown, "all": [[shown, None], []]}, {"one": None, "all": None}]


def nothing(root: Path) -> Rows:
    """A table whose rows have all gone."""
    made = Made(root, TableSchema.declared({"c": "string"}), partition_by=("c",))
    made.whole([{"_id": 1, "c": "a"}])
    made.change([], gone=[1])
    return []


FEATURES: dict[str, Callable[[Path], Rows]] = {
    one.__name__: one
    for one in (
        odd_texts, whole_numbers, long_numbers, truths, dates, merged_files, checkpoints, odd_names, late_columns,
        far_dates, every_type, nested_values, merged_nested, every_nested_type, nothing,
    )
}  # fmt: skip
__all__ = ["FEATURES", "ODD", "DeltaTable", "Made", "batch", "rows"]
