"""Programs that read a table, each as shown on the page: rows as dictionaries of the typed columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltalake import DeltaTable, QueryBuilder

from tests.tables.iceberg import iceberg_table

#: The rows of a table, each a mapping of its typed columns; with a value of ``column``, only the rows that have it.
Reader = Callable[[Path, str | None, Any], list[dict[str, Any]]]
_OURS = ("_bson", "_json", "_changed")


def by_pyarrow(root: Path, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    """The dataset that deltalake makes for pyarrow, with its bounds of each file."""
    import pyarrow.dataset as ds

    found = DeltaTable(str(root)).to_pyarrow_dataset()
    wanted = None if column is None else ds.field(column).is_null() if value is None else ds.field(column) == value
    return plain(found.to_table(filter=wanted).to_pylist())


def by_deltalake(root: Path, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    """deltalake's own engine, DataFusion."""
    import pyarrow as pa

    where = (
        "" if column is None else f' WHERE "{column}" IS NULL' if value is None else f' WHERE "{column}" = {sql(value)}'
    )
    found = QueryBuilder().register("t", DeltaTable(str(root))).execute(f"SELECT * FROM t{where}").read_all()
    return plain(pa.table(found).to_pylist())


def by_duckdb(root: Path, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    """DuckDB over that dataset."""
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("t", DeltaTable(str(root)).to_pyarrow_dataset())
        where = "" if column is None else f' WHERE "{column}" IS NOT DISTINCT FROM ?'
        found = connection.execute(f"SELECT * FROM t{where}", [] if column is None else [value])
        return plain(found.to_arrow_table().to_pylist())


def by_polars(root: Path, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    import polars

    found = polars.scan_delta(str(root))
    if column is not None:
        found = found.filter(polars.col(column).is_null() if value is None else polars.col(column) == polars.lit(value))
    return plain(found.collect().to_dicts())


def by_pandas(root: Path, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    import pandas as pd
    import pyarrow as pa

    found = DeltaTable(str(root)).to_pandas(types_mapper=pd.ArrowDtype)
    if column is not None:
        found = found[found[column].isna() if value is None else found[column] == value]
    return plain(pa.Table.from_pandas(found, preserve_index=False).to_pylist())


def of_pyiceberg(table: Any, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    return plain(_iceberg_scan(table, column, value).to_arrow().to_pylist())


def of_polars(table: Any, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    import polars

    store = {name: value for name, value in table.io.properties.items() if name.startswith("s3.")}
    options = {**store, "aws_allow_http": "true"} if store else None
    found = polars.scan_iceberg(table, storage_options=options, reader_override="native")
    if column is not None:
        found = found.filter(polars.col(column).is_null() if value is None else polars.col(column) == polars.lit(value))
    return plain(found.collect().to_dicts())


def of_duckdb(table: Any, column: str | None = None, value: Any = None) -> list[dict[str, Any]]:
    """What pyiceberg gives DuckDB: its extension for Iceberg is not on PyPI for each version of DuckDB."""
    with _iceberg_scan(table, column, value).to_duckdb("t") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return plain(connection.sql("SELECT * FROM t").to_arrow_table().to_pylist())


def _iceberg_scan(table: Any, column: str | None, value: Any) -> Any:
    from pyiceberg.expressions import AlwaysTrue, EqualTo, IsNull

    wanted = AlwaysTrue() if column is None else IsNull(column) if value is None else EqualTo(column, value)
    return table.scan(wanted)


#: Readers of a table that a catalogue has loaded.
TABLE_READERS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "pyiceberg": of_pyiceberg,
    "polars": of_polars,
    "duckdb": of_duckdb,
}


def _beside(read: Callable[..., list[dict[str, Any]]]) -> Reader:
    return lambda root, column, value: read(iceberg_table(root.parent), column, value)


#: Readers of the Iceberg table that a catalogue beside the table has.
ICEBERG_READERS: dict[str, Reader] = {name: _beside(read) for name, read in TABLE_READERS.items()}

READERS: dict[str, Reader] = {
    "pyarrow": by_pyarrow,
    "deltalake": by_deltalake,
    "duckdb": by_duckdb,
    "polars": by_polars,
    "pandas": by_pandas,
}

#: Those of them that support deletion vectors.
MERGING_READERS = ("deltalake", "polars")


def sql(value: Any) -> str:
    """A value as SQL has it."""
    if isinstance(value, bool):
        return str(value).upper()
    return str(value) if isinstance(value, int) else f"DATE '{value}'" if hasattr(value, "year") else _text(value)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only the typed columns, in the order of the keys."""
    ordered = sorted(rows, key=lambda row: bytes(row["_key"]))
    return [{name: value for name, value in row.items() if name not in (*_OURS, "_key")} for row in ordered]
