"""A table's columns as Iceberg has them: each has a number for its life.

The data files hold no numbers, since Delta's readers need none, so the table names the number of each column
(``schema.name-mapping.default``). A column that gets another type, or is dropped, loses its number. Iceberg promises
that a column's name means the same number in every file of a table, so the snapshots from before then have to go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from tailrace.errors import SinkError

_TYPES: Final[dict[str, IcebergType]] = {
    "binary": BinaryType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "double": DoubleType(),
    "integer": IntegerType(),
    "long": LongType(),
    "string": StringType(),
    "timestamp": TimestamptzType(),
}
_DECIMAL: Final = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def numbered(fields: Sequence[Mapping[str, Any]], before: Schema | None, last_id: int) -> Schema:
    """The schema of Delta's ``fields``. What ``before`` has under the same name and type keeps its number; other
    columns get numbers above ``last_id``. It is ``before`` itself if nothing is different."""
    known = {} if before is None else {field.name: field for field in before.fields}
    count = _Count(last_id)
    made: list[NestedField] = []
    for one in fields:
        old = known.get(one["name"])
        if old is not None and _same(old, one):
            made.append(old)
        else:
            number = count.next()
            made.append(NestedField(number, one["name"], _type(one["type"], count), required=not one["nullable"]))
    return before if before is not None and tuple(made) == before.fields else Schema(*made)


def columns_of(schema: Schema) -> set[tuple[int, str, str]]:
    """Number, name and type of each column."""
    return {(one.field_id, one.name, str(one.field_type)) for one in schema.fields}


def name_mapping(schema: Schema) -> str:
    """The numbers of columns by name, as the property of the table has them."""
    return create_mapping_from_schema(schema).model_dump_json()


class _Count:
    def __init__(self, last: int) -> None:
        self._last = last

    def next(self) -> int:
        self._last += 1
        return self._last


def _type(given: Any, count: _Count) -> IcebergType:
    if isinstance(given, Mapping):
        return StructType(
            *(
                NestedField(count.next(), one["name"], _type(one["type"], count), required=not one["nullable"])
                for one in given["fields"]
            )
        )
    if given in _TYPES:
        return _TYPES[given]
    match = _DECIMAL.fullmatch(given)
    if match is None:
        raise SinkError(f"a column of type {given} has no type in Iceberg")
    return DecimalType(int(match[1]), int(match[2]))


def _same(old: NestedField, given: Mapping[str, Any]) -> bool:
    """Whether a column is that of Delta's field, apart from its numbers."""
    if old.required == given["nullable"]:
        return False
    if isinstance(given["type"], Mapping):
        inner = given["type"]["fields"]
        return (
            isinstance(old.field_type, StructType)
            and len(inner) == len(old.field_type.fields)
            and all(
                one.name == other["name"] and _same(one, other)
                for one, other in zip(old.field_type.fields, inner, strict=True)
            )
        )
    return old.field_type == _type(given["type"], _Count(0))
