"""Tables whose columns hold objects as structs and arrays as lists: the documents that they are made of, and a
comparison of what plain Python makes of these with what programs read."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from datetime import datetime
from math import isnan
from pathlib import Path
from typing import Any, Final

import bson
import pyarrow as pa
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from deltalake import DeltaTable

from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.merge_on_read import has_vectors
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.nested import parsed
from tailrace.lake.tables.schema import CODEC, TableSchema
from tailrace.lake.tables.settings import TableRule
from tests.tables.equality import read
from tests.tables.nested_oracle import NotShownError, expected, renamed
from tests.tables.readers import MERGING_READERS, READERS

NESTED: Final = "nested"
_IDS: Final = 20
#: Names that differ in case or in how a letter is composed, that readers refuse, and a long one.
_NAMES: Final = ("a", "A", "b.c", "$d", "", " ", "é", "e\u0301", "list", "element", "`", "x" * 500)
#: More fields than an object may have: then their names are data.
_KEYS: Final = 130
_SCALARS: Final[tuple[Any, ...]] = (
    None, 1, 2.5, float("inf"), -0.0, Int64(2**60), "x", "\0é", True, Binary(b"\0\xff"), ObjectId("6" * 24),
    datetime(2026, 1, 1), DatetimeMS(2**60), Decimal128("9" * 34), Decimal128("NaN"), Decimal128("1E-6000"), {}, [],
)  # fmt: skip


def write(rng: random.Random) -> dict[str, Any]:
    """The next write to the collection, as a server takes it."""
    chosen, query = rng.random(), {"_id": rng.randrange(_IDS)}
    if chosen < 0.1:
        return {"delete": NESTED, "deletes": [{"q": query, "limit": 1}]}
    change = _document(rng) if chosen < 0.5 else _update(rng)
    return {"update": NESTED, "updates": [{"q": query, "u": change, "upsert": True}]}


def _document(rng: random.Random) -> dict[str, Any]:
    odd = {rng.choice("pqr"): _value(rng)} if rng.random() < 0.3 else {}
    return {"items": [_item(rng) for _ in range(rng.randrange(4))], "o": _object(rng), **odd}


def _update(rng: random.Random) -> dict[str, Any]:
    """A change inside of objects and arrays. Some do not fit the document; the server refuses them."""
    return rng.choice(
        (
            {"$push": {"items": {"$each": [_item(rng), None], "$position": 0, "$slice": 5}}},
            {"$set": {f"items.{rng.randrange(5)}.n": rng.choice((1, 2.5, Int64(2**40)))}},
            {"$pull": {"items": {"n": 1}}},
            {"$set": {f"counts.user{rng.randrange(_KEYS)}": rng.randrange(9) for _ in range(rng.choice((1, 1, 30)))}},
            {"$set": {"deep.of": _value(rng), "deep.same": rng.randrange(3)}},
            {"$unset": {rng.choice(("deep.of", "counts", "o", "items")): ""}},
        )
    )


def _item(rng: random.Random) -> Any:
    names = rng.sample(("n", "N", "tags", "price"), rng.randrange(4))
    values = {"n": rng.randrange(3), "N": "n", "tags": ["x", None][: rng.randrange(3)], "price": rng.random()}
    return None if rng.random() < 0.1 else {"sku": rng.choice("abc"), **{name: values[name] for name in names}}


def _object(rng: random.Random) -> dict[str, Any]:
    """The values of a name have one type, and now and then another."""
    names = rng.sample(_NAMES, rng.randrange(5))
    return {name: _SCALARS[_NAMES.index(name) + 1 if rng.random() < 0.97 else 0] for name in names}


def _value(rng: random.Random, depth: int = 0) -> Any:
    turn = rng.random() if depth < 4 else 1.0
    if turn < 0.4:
        return {name: _value(rng, depth + 1) for name in rng.sample(_NAMES, rng.randrange(3))}
    if turn < 0.7:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return rng.choice(_SCALARS)


def rules(played: int, databases: Iterable[str]) -> tuple[TableRule, ...]:
    """The documents of a seed."""
    rng = random.Random(f"tailrace nested {played}")
    return tuple(
        TableRule(f"{one}.{NESTED}", TableSchema(nested=True, policy=rng.choice(("evolve", "evolve", "widen"))))
        for one in databases
    )


def unlike_its_documents(root: Path, rule: TableRule, rng: random.Random) -> list[str]:
    """Differences that one of the programs that read tables finds in a table."""
    namespace = rule.pattern
    folder = root / folder_of(namespace)
    if not (folder / "_delta_log").exists():
        return []
    merged = has_vectors(DeltaTable(folder))
    reader = rng.choice(sorted(MERGING_READERS if merged else READERS))
    told = _differences(folder, rule, reader)
    return [f"{reader} reads in the table of {namespace} {one}" for one in told]


def _differences(folder: Path, rule: TableRule, reader: str) -> Iterator[str]:
    grows = rule.schema.grows
    columns = CollectionTable(folder, rule.pattern).schema(rule.schema).columns
    table = DeltaTable(folder)
    arrow = pa.schema(table.schema().to_arrow())
    rows = read(table, "_key", "_bson").sort_by("_key").column("_bson").to_pylist()
    found = READERS[reader](folder, None, None)
    if len(found) != len(rows):
        yield f"{len(found)} rows, not {len(rows)}"
        return
    for place, (raw, row) in enumerate(zip(rows, found, strict=True)):
        document = bson.decode(raw, CODEC)
        shown = {one.path[0] for one in columns}
        if hidden := [name for name, value in document.items() if grows and value is not None and name not in shown]:
            yield f"no column for {hidden}"
        for column in columns:
            type_ = parsed(column.type)
            try:
                wanted = expected(type_, document.get(column.path[0]), grows=grows)
            except NotShownError as error:
                yield f"{column.name} of row {place} as {column.type:.300}: it does not show {error}"
                return
            given = renamed(type_, arrow.field(column.name).type, row[column.name])
            if not _same(wanted, given):
                yield f"{given!r:.300} in {column.name} of row {place}, not {wanted!r:.300}"
                return


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN is itself."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float) and isnan(one):
        return isnan(other)
    return bool(one == other)
