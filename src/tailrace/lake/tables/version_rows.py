"""The rows of one version of a table, for tables that are merged on read too: deltalake's dataset refuses these."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.data_files import opened, with_columns, without
from tailrace.lake.tables.delta_commit import columns_of
from tailrace.lake.tables.live_files import files_at, gone_of
from tailrace.lake.tables.merge_on_read import has_vectors
from tailrace.lake.tables.rows import arrow_schema
from tailrace.lake.tables.schema import TableSchema


def all_rows(root: TablePlace, table: DeltaTable) -> pa.Table:
    """All rows of the version that ``table`` is at, with all columns. ``root``: where it lies."""
    if not has_vectors(table):
        return table.to_pyarrow_table()
    schema = _schema(table)
    pieces = [piece.cast(schema) for piece in _pieces(root, table, schema.names)]
    return pa.concat_tables([schema.empty_table(), *pieces])


def batches(root: TablePlace, table: DeltaTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """These columns of all rows, in pieces."""
    if not has_vectors(table):
        yield from table.to_pyarrow_dataset().to_batches(columns=list(columns))
        return
    for piece in _pieces(root, table, columns):
        yield from piece.to_batches()


def rows_in(
    root: TablePlace, table: DeltaTable, column: str, values: Sequence[object], columns: Sequence[str]
) -> pa.Table:
    """These columns of the rows that have one of ``values`` in ``column``, which is one of them."""
    schema = _schema(table)
    wanted = pa.array(values, schema.field(column).type)
    if not has_vectors(table):
        return table.to_pyarrow_dataset().to_table(columns=list(columns), filter=pc.field(column).isin(wanted))
    names = [field for field in schema if field.name in columns]
    pieces = [piece.filter(pc.is_in(piece.column(column), value_set=wanted)) for piece in _pieces(root, table, columns)]
    return pa.concat_tables([pa.schema(names).empty_table(), *pieces]).select(list(columns))


def _pieces(root: TablePlace, table: DeltaTable, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of each file that are not gone."""
    wanted = [field for field in _schema(table) if field.name in columns]
    for file in files_at(root, table.version()):
        with opened(root, file.name) as opening:
            found = with_columns(opening, wanted)
        yield without(found, gone_of(root, file))


def _schema(table: DeltaTable) -> pa.Schema:
    return arrow_schema(TableSchema(tuple(columns_of(json.loads(table.schema().to_json())["fields"]))))
