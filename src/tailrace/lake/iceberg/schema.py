"""A table's columns as Iceberg has them: each has a number for its life.

The data files hold no numbers, since Delta's readers need none, so the table names the number of each column
(``schema.name-mapping.default``). A column that gets another type, or is dropped, loses its number. Iceberg promises
that a column's name means the same number in every file of a table, so the snapshots from before then have to go.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
    ListType,
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
        made.append(_grown(known.get(one["name"]), one, count) or _field(one, count))
    return before if before is not None and tuple(made) == before.fields else Schema(*made)


def columns_of(schema: Schema) -> set[tuple[int, str, str]]:
    """Number, name and type of each column, and of what is inside of them: a struct that gets a field has all that it
    had."""
    return {found for one in schema.fields for found in _numbers_in(one.field_id, one.name, one.field_type)}


def _numbers_in(number: int, name: str, type_: IcebergType) -> Iterator[tuple[int, str, str]]:
    if isinstance(type_, ListType):
        yield number, name, "list"
        yield from _numbers_in(type_.element_id, f"{name}.element", type_.element_type)
    elif isinstance(type_, StructType):
        yield number, name, "struct"
        for one in type_.fields:
            yield from _numbers_in(one.field_id, f"{name}.{one.name}", one.field_type)
    else:
        yield number, name, str(type_)


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
    if isinstance(given, Mapping) and given["type"] == "array":
        return ListType(count.next(), _type(given["elementType"], count), element_required=False)
    if isinstance(given, Mapping):
        return StructType(*(_field(one, count) for one in given["fields"]))
    if given in _TYPES:
        return _TYPES[given]
    match = _DECIMAL.fullmatch(given)
    if match is None:
        raise SinkError(f"a column of type {given} has no type in Iceberg")
    return DecimalType(int(match[1]), int(match[2]))


def _field(given: Mapping[str, Any], count: _Count) -> NestedField:
    """A new column, or a new field in one."""
    number = count.next()
    return NestedField(number, given["name"], _type(given["type"], count), required=not given["nullable"])


def _grown(old: NestedField | None, given: Mapping[str, Any], count: _Count) -> NestedField | None:
    """A column with its numbers, and further ones for the fields that it has got; ``None`` if it is another one. A
    column that may be NULL from now on is still the same."""
    if old is None or not (old.required or given["nullable"]):
        return None
    type_ = _grown_type(old.field_type, given["type"], count)
    return None if type_ is None else NestedField(old.field_id, old.name, type_, required=not given["nullable"])


def _grown_type(old: IcebergType, given: Any, count: _Count) -> IcebergType | None:
    if not isinstance(given, Mapping):
        return old if old == _type(given, _Count(0)) else None
    if given["type"] == "array":
        if not isinstance(old, ListType):
            return None
        element = _grown_type(old.element_type, given["elementType"], count)
        return None if element is None else ListType(old.element_id, element, element_required=False)
    if not isinstance(old, StructType):
        return None
    known = {one.name: one for one in old.fields}
    if not known.keys() <= {one["name"] for one in given["fields"]}:
        return None
    fields: list[NestedField] = []
    for one in given["fields"]:
        field = _grown(known[one["name"]], one, count) if one["name"] in known else _field(one, count)
        if field is None:
            return None
        fields.append(field)
    return StructType(*fields)
