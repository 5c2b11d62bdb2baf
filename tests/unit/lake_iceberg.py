"""A lake of made-up events and its Iceberg table: what each reader reads from both, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

from tailrace.lake.iceberg.lake_mirror import COMMIT, LakeMirror, identifier_of
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.store.commit_log import CommitLog

Rows = list[dict[str, Any]]


def settings_of(folder: Path) -> IcebergSettings:
    """A SQL catalogue in a folder."""
    return IcebergSettings.of(f"sqlite:///{folder / 'catalog.db'}", "lake.iceberg")


def mirror_of(root: Path) -> LakeMirror:
    """The catalogue as another process opens it, without knowing what was shown before."""
    return LakeMirror(root, settings_of(root.parent))


def catalog_of(root: Path) -> SqlCatalog:
    return SqlCatalog("tailrace", uri=f"sqlite:///{root.parent / 'catalog.db'}")


def table_of(root: Path) -> Any:
    return catalog_of(root).load_table(identifier_of(root))


def rows_of(table: Any) -> Rows:
    found: Rows = pa.table(table).to_pylist()
    return sorted(found, key=lambda row: (row["token"], str(row)))


def versions_shown(root: Path) -> list[int]:
    """Compare each snapshot with the commit that it refers to, row for row, and the newest one, for every reader, with
    what the lake itself gives. Returns the commits."""
    found, log, versions = table_of(root), CommitLog(root), []
    for snapshot in found.snapshots():
        version = version_of(snapshot)
        assert snapshot.summary[COMMIT] == log.digest_of(version)
        expected = DeltaTable(str(root), version=version).to_pyarrow_table()
        given = found.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
        assert given.column_names == expected.column_names, version
        assert rows_of(given) == rows_of(expected), version
        assert int(snapshot.summary["total-records"]) == expected.num_rows
        assert int(snapshot.summary["total-data-files"]) == len(log.state(version).files)
        versions.append(version)
    assert version_of(found.current_snapshot()) == max(versions)
    return versions


def newest_rows(root: Path) -> Rows:
    """What the lake and each reader of Iceberg read, which must be the same, by token."""
    import polars

    found = table_of(root)
    given = rows_of(found.scan().to_arrow())
    assert given == rows_of(polars.scan_iceberg(found, reader_override="native").collect().to_arrow())
    with found.scan().to_duckdb("t") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        assert given == rows_of(connection.sql("SELECT * FROM t").to_arrow_table())
    assert given == rows_of(DeltaTable(str(root)).to_pyarrow_table())
    assert [(row["token"], row["event"]) for row in given] == events_of(root)
    return given


def events_of(root: Path) -> list[tuple[str, bytes]]:
    """What the lake's own log names, read file by file."""
    found: list[tuple[str, bytes]] = []
    for file in CommitLog(root).live_files():
        with pq.ParquetFile(root / file.name) as parquet:
            table = parquet.read(columns=["token", "event"])
        found += zip(table.column("token").to_pylist(), table.column("event").to_pylist(), strict=True)
    return sorted(found)


def is_shown(root: Path) -> bool:
    """Whether the newest snapshot refers to the newest commit."""
    return version_of(table_of(root).current_snapshot()) == CommitLog(root).head().number
