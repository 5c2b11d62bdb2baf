"""Tables with declared columns, partitioned and in a Z-order: the documents that they are made of, including some that
do not fit and dates that readers fail on, and what programs that read the tables must find."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from deltalake import DeltaTable

from tailrace.errors import SinkError
from tailrace.lake.tables.data_files import opened
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.schema import Decoded as Documents
from tailrace.lake.tables.schema import Policy, TableSchema, convert, fill, typed_array
from tailrace.lake.tables.settings import TableRule
from tests.tables.equality import read
from tests.tables.features import ODD
from tests.tables.readers import MERGING_READERS, READERS

#: Collections of the same documents: one table has declared columns, the other one gets a column for each field.
DECLARED: Final = "typed"
INFERRED: Final = "loose"
_IDS: Final = 30
_COLUMNS: Final = {
    "text": "string", "day": "date", "at": "timestamp", "k": "int", "big": "long", "ok": "boolean", "oid": "objectid",
    "amount": "decimal(38,10)", "o.x": "double", "j": "json", "raw": "binary",
}  # fmt: skip
_BY_TEXT: Final = (("text",), ("text", "day"))
_DIVIDING: Final = (("day",), ("k",), ("big",), ("ok",), ("oid",), ("ok", "k"), ())
_ORDERED: Final = ((), ("at",), ("k", "text"), ("amount",), ("ok", "o_x"))
_FAR: Final = (2**63 - 1, -(2**63), 253_402_300_800_000, -62_135_596_800_001, -62_135_596_800_000)
_QUARANTINE: Final = "_quarantine"


@dataclass(frozen=True)
class Write:
    """One write to a document: an ``update`` with what it sets and unsets, a ``replace`` with all fields, or a
    ``delete``."""

    collection: str
    id: int
    kind: str
    change: Mapping[str, Any]

    def command(self) -> dict[str, Any]:
        """The write as a server takes it."""
        if self.kind == "delete":
            return {"delete": self.collection, "deletes": [{"q": {"_id": self.id}, "limit": 1}]}
        return {"update": self.collection, "updates": [{"q": {"_id": self.id}, "u": self.change, "upsert": True}]}


def write(rng: random.Random) -> Write:
    """The next write."""
    collection, number = rng.choice((DECLARED, DECLARED, INFERRED)), rng.randrange(_IDS)
    kind = rng.random()
    if kind < 0.1:
        return Write(collection, number, "delete", {})
    names = rng.sample(list(_VALUES), rng.randint(1, 4))
    fields = {name: _value(rng, name) for name in names}
    if kind < 0.6:
        return Write(collection, number, "replace", {name: _value(rng, name) for name in _VALUES} | fields)
    if kind < 0.7:
        return Write(collection, number, "update", {"$unset": dict.fromkeys(names, "")})
    return Write(collection, number, "update", {"$set": fields})


def _value(rng: random.Random, name: str) -> Any:
    if rng.random() < 0.02:
        return _VALUES[rng.choice(list(_VALUES))](rng)
    return None if rng.random() < 0.1 else _VALUES[name](rng)


def _date(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return DatetimeMS(rng.choice(_FAR))
    return datetime(rng.choice((1, 1969, 2020, 2026, 9999)), rng.randint(2, 12), rng.randint(3, 28), 12, tzinfo=UTC)


_VALUES: Final[dict[str, Any]] = {
    "text": lambda rng: rng.choice([one for one in ODD if one is not None]),
    "day": _date,
    "at": _date,
    "k": lambda rng: rng.choice((0, 1, -1, 2**31 - 1, -(2**31))),
    "big": lambda rng: Int64(rng.choice((0, 5, 2**63 - 1, -(2**63)))),
    "ok": lambda rng: rng.random() < 0.5,
    "oid": lambda rng: ObjectId(f"{rng.randrange(3):024x}"),
    "amount": lambda rng: Decimal128(rng.choice(("0", "1.50", "-123456789012345678901234.0123456789", "1E+3"))),
    "o": lambda rng: {"x": rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), 3)), "more": [rng.randrange(3)]},
    "j": lambda rng: rng.choice(("text", 1, 1.5, [1, None], {"a": {"b": "é"}}, True)),
    "raw": lambda rng: Binary(rng.randbytes(rng.choice((0, 1, 40)))),
}


def rules(played: int, databases: Iterable[str], policies: Sequence[Policy]) -> tuple[TableRule, ...]:
    """The rules of a seed for the collections with declared columns, and the patterns of the others."""
    rng = random.Random(f"tailrace typed {played}")
    found = []
    for database in databases:
        schema = TableSchema.declared(_COLUMNS, rng.choice(policies))
        divided, ordered = rng.choice(_BY_TEXT if rng.random() < 0.5 else _DIVIDING), rng.choice(_ORDERED)
        found.append(TableRule(f"{database}.{DECLARED}", schema, divided, ordered))
    return tuple(found)


def quarantined(
    root: Path, rule: TableRule, expected: Mapping[bytes, bytes], found: Mapping[bytes, bytes]
) -> tuple[dict[bytes, bytes], list[str]]:
    """The documents that a table lacks because they do not fit, according to the quarantine, and what is wrong with the
    quarantine: documents that fit must be in their table, and the others must not."""
    held = _in_quarantine(root, rule.pattern)
    missing = {key: one for key, one in held.items() if key not in found and expected.get(key) == one}
    told = []
    if strange := _misfits(rule, found.values()):
        told.append(f"the table of {rule.pattern} has {len(strange)} documents that do not fit: {strange[0]}")
    if fits := len(missing) - len(_misfits(rule, missing.values())):
        told.append(f"{fits} documents of {rule.pattern} are in quarantine, and fit")
    return missing, told


def _in_quarantine(root: Path, namespace: str) -> dict[bytes, bytes]:
    """The newest of the documents with each key."""
    if not (root / _QUARANTINE / "_delta_log").exists():
        return {}
    try:
        rows = DeltaTable(root / _QUARANTINE).to_pyarrow_table(columns=["namespace", "_key", "_bson", "noticed"])
    except (OSError, pa.ArrowException) as error:  # what a reader raises at a damaged or missing file
        raise SinkError(f"the quarantine cannot be read: {error}") from error
    found = rows.sort_by("noticed").to_pylist()
    return {row["_key"]: row["_bson"] for row in found if row["namespace"] == namespace}


def _misfits(rule: TableRule, documents: Iterable[bytes]) -> list[str]:
    return list(convert(rule.schema, list(documents)).misfits.values())


def unlike_its_documents(root: Path, namespace: str, rng: random.Random) -> list[str]:
    """Differences that one of the programs that read tables finds in the typed columns of a table."""
    folder = root / folder_of(namespace)
    if not (folder / "_delta_log").exists():
        return []
    table = CollectionTable(folder, namespace)
    for file in table.files():
        with opened(folder, file.name) as opening:
            opening.read()  # most programs do not check whether files are damaged; this does
    delta = DeltaTable(folder)
    rows = read(delta, "_key", "_bson").sort_by("_key")
    decoded = Documents(rows.column("_bson").to_pylist())
    documents = [decoded[number] for number in range(rows.num_rows)]
    columns = table.schema(TableSchema()).columns
    expected = {one.name: typed_array(fill(one, documents, far_is_null=True)[0], one.arrow) for one in columns}
    reader = rng.choice(sorted(MERGING_READERS if delta.protocol().reader_features else READERS))
    found = READERS[reader](folder, None, None)
    where = f"{reader} reads in the table of {namespace}"
    told = _unlike(where, {name: values.to_pylist() for name, values in expected.items()}, found)
    dividing = [name for name in _COLUMNS if name in expected and len(expected[name])]
    if told or not dividing or not namespace.endswith(f".{DECLARED}"):
        return told
    name = rng.choice([one for one in dividing if _can_be_asked(expected[one])] or ["k"])
    value = rng.choice(expected[name].to_pylist())
    scalar = pa.scalar(value, expected[name].type)
    if reader == "deltalake" and isinstance(value, str) and "\0" in value:
        return []  # its SQL has no literal for it
    wanted = pc.is_null(expected[name]) if value is None else pc.equal(expected[name], scalar)
    kept = {one: values.filter(wanted.fill_null(False)).to_pylist() for one, values in expected.items()}
    return _unlike(f"{where} where {name} is {value!r}", kept, READERS[reader](folder, name, value))


def _can_be_asked(values: Any) -> bool:
    return str(values.type) in ("string", "int32", "int64", "bool", "date32[day]")


def _unlike(where: str, expected: Mapping[str, list[Any]], found: list[dict[str, Any]]) -> list[str]:
    count = len(next(iter(expected.values()), found))
    if len(found) != count:
        return [f"{where} {len(found)} rows, not {count}"]
    for name, values in expected.items():
        for place, (theirs, row) in enumerate(zip(values, found, strict=True)):
            if not _same(theirs, row[name]):
                return [f"{where} {row[name]!r:.200} in {name} of row {place}, not {theirs!r:.200}"]
    return []


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (isinstance(one, float) and isinstance(other, float) and isnan(one) and isnan(other))
