"""What a table shows of its documents: which field is in which column, and which is in none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.printable import in_a_line
from tailrace.lake.tables.column_values import is_far
from tailrace.lake.tables.data_files import opened, without
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.live_files import gone_of
from tailrace.lake.tables.names import BSON, OURS
from tailrace.lake.tables.nested import is_nested
from tailrace.lake.tables.schema import COLUMNS_MAX, CUT_MAX, Column, Decoded, TableSchema, fill_values, value_at

#: How many fields without a column are named at once.
_NAMED: Final = 20
_DATES: Final = re.compile(r"\b(?:timestamp|date)\b")
_FAR: Final = ("dates", "rows with dates")


def described(table: CollectionTable, *, whole: bool = False) -> Iterator[str]:
    """What there is to say about a table's columns, a line each. ``whole``: every column, and how many dates it does
    not show, for which the documents of the rows that are NULL are read."""
    schema = table.schema(TableSchema())
    for column in schema.columns:
        renamed = column.name != "_".join(column.path)
        if not (whole or renamed or column.was):
            continue
        notes = [column.type]
        if column.was:
            notes.append(f"it was {column.was}" + (", and strings are now in quotes" if _quotes(column) else ""))
        if renamed and _is_twin(column, schema):
            notes.append("another column has this name, or one that differs only in case")
        if whole and _DATES.search(column.type) and (far := _far_dates(table, column)):
            notes.append(f"{far:,} {_FAR[is_nested(column.type)]} too far away for readers are NULL")
        yield f"{in_a_line('.'.join(column.path))} is in column {in_a_line(column.name)}: {'; '.join(notes)}"
    if schema.cut:
        names = schema.cut if whole else schema.cut[:_NAMED]
        more = " and others" if len(schema.cut) > len(names) or len(schema.cut) >= CUT_MAX else ""
        yield (
            f"only in _bson and _json, since a table has at most {COLUMNS_MAX} columns: "
            f"{', '.join(map(in_a_line, names))}{more}"
        )


def _quotes(column: Column) -> bool:
    return column.type == "json" and column.was in ("string", "objectid")


def _is_twin(column: Column, schema: TableSchema) -> bool:
    base = column.name.rpartition("_")[0].lower()
    return base in OURS or any(one is not column and one.name.lower() == base for one in schema.columns)


def _far_dates(table: CollectionTable, column: Column) -> int:
    """The rows whose document has a date that the column does not show. In a column that becomes wider, nothing else
    does not fit."""
    found = 0
    for file in table.files():
        with opened(table.root, file.name) as opening:
            if column.name not in opening.schema_arrow.names:
                continue  # the file is older than the column
            gone, first = gone_of(table.root, file), 0
            for read in opening.iter_batches(columns=[column.name, BSON]):
                here = gone[(gone >= first) & (gone < first + read.num_rows)] - first
                first += read.num_rows
                batch = without(pa.Table.from_batches([read]), here)
                is_null = pc.is_null(batch.column(column.name))
                if is_nested(column.type):
                    is_null = pc.invert(is_null)
                looked_at = batch.filter(is_null).column(BSON).to_pylist()
                rows = Decoded(looked_at)
                values = [value_at(rows[number], column.path) for number in range(len(looked_at))]
                if is_nested(column.type):
                    found += len(fill_values(column, values)[1])
                else:
                    found += sum(is_far(value, column.type) for value in values)
    return found
