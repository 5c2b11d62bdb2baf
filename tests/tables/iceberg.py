"""Iceberg snapshots compared with the versions of the Delta table that they refer to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog

from tailrace.lake.iceberg.catalog import IcebergCatalog
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.store import places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.iceberg_mirror import IcebergMirror, identifier_of


def catalog_uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'catalog.db'}"


def sql_settings(folder: Path) -> IcebergSettings:
    """A SQL catalogue in a folder."""
    return IcebergSettings.of(catalog_uri(folder), "iceberg")


def sql_mirror(folder: Path, settings: IcebergSettings | None = None, root: TablePlace | None = None) -> IcebergMirror:
    """``root``: the tables' place, if it is not the catalogue's folder."""
    return IcebergMirror(root or folder, IcebergCatalog(settings or sql_settings(folder), root=root))


def sql_catalog(folder: Path, **properties: str) -> SqlCatalog:
    """The same as another program opens it. ``properties``: of a store, as pyiceberg names them."""
    return SqlCatalog("tailrace", uri=catalog_uri(folder), **properties)


def iceberg_table(folder: Path, namespace: str = "shop.orders", **properties: str) -> Any:
    return sql_catalog(folder, **properties).load_table(identifier_of(namespace))


def rows_of(table: Any) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: bytes(row["_key"]))


def compared(root: TablePlace, found: Any) -> list[int]:
    """Compare each snapshot with the version of the table at ``root`` that it states, row for row, and what it says
    with what that version's commit says. Gives the versions."""
    versions = []
    for snapshot in found.snapshots():
        version = version_of(snapshot)
        assert version >= 0
        told = next(one for one in delta_commit.stated(root) if one.version <= version)
        assert snapshot.summary["tailrace.clusterTime"] == delta_commit.time_text(told.time)
        assert snapshot.summary["tailrace.token"] == delta_commit.token_of(type(told.time)(told.time + 1))
        expected = places.delta_table(root, version).to_pyarrow_table()
        given = found.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
        assert given.column_names == expected.column_names, version
        assert rows_of(given) == rows_of(expected), version
        assert int(snapshot.summary["total-records"]) == expected.num_rows
        versions.append(version)
    assert found.current_snapshot() is not None
    assert version_of(found.current_snapshot()) == max(versions)
    return versions


def newest_is_shown(root: TablePlace, found: Any) -> bool:
    """Whether the newest snapshot is of the newest version."""
    return version_of(found.current_snapshot()) == CollectionTable(root, "").version
