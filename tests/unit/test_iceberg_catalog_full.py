"""A catalogue's full disk is reported as such, without the minute of retries for a catalogue that does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.lake.iceberg.catalog import CatalogError, IcebergCatalog
from tailrace.lake.iceberg.lake_mirror import LakeMirror
from tailrace.lake.iceberg.settings import IcebergSettings
from tests.tables.rest_catalog import TOKEN, rest_catalog
from tests.unit.lake_iceberg import newest_rows
from tests.unit.test_lake_iceberg import Grown

pytestmark = pytest.mark.filterwarnings("ignore:Iceberg scan planning")


class _RefusedError(Exception):
    """What a driver of PostgreSQL raises; psycopg2 names the code ``pgcode``, and psycopg ``sqlstate``."""

    def __init__(self, name: str, code: str) -> None:
        super().__init__("could not extend file")
        setattr(self, name, code)


def never(_: float) -> bool:
    raise AssertionError("it was asked again")


@pytest.mark.parametrize("name", ["pgcode", "sqlstate"])
def test_postgresql_without_room(name: str, tmp_path: Path) -> None:
    """The error said that it does not answer: only SQLite's error was known."""
    from sqlalchemy.exc import OperationalError

    def work(_: Any) -> None:
        raise OperationalError("INSERT", {}, _RefusedError(name, "53100"))

    catalog = IcebergCatalog(IcebergSettings.of(f"sqlite:///{tmp_path / 'catalog.db'}", "iceberg"), wait=never)
    with pytest.raises(CatalogError, match=r"has no room left: OperationalError: could not extend file"):
        catalog.ask(work)

    def cut_off(_: Any) -> None:
        raise OperationalError("INSERT", {}, _RefusedError(name, "57P01"))

    with pytest.raises(CatalogError, match="does not answer"):
        catalog.ask(cut_off, patient=False)
    catalog.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_rest_catalogue_without_room(number: int, tmp_path: Path) -> None:
    """507 was taken for a server that may be back soon, whichever request it answers."""
    lake = Grown(tmp_path)
    lake.mirror.close()
    lake.add(shown=False)
    with rest_catalog(tmp_path / "catalog.db") as rest:
        settings = IcebergSettings.of({"uri": rest.uri, "token": TOKEN}, "lake.iceberg")
        mirror = LakeMirror(lake.root, settings)
        mirror.follow()
        lake.add(shown=False)
        for _ in range(number):  # a mirror that has begun, and one that begins
            mirror.close()
            mirror = LakeMirror(lake.root, settings)
        rest.broken = [507] * 9
        with pytest.raises(CatalogError, match="has no room left: ServerError") as caught:
            mirror.follow()
        assert TOKEN not in str(caught.value)
        assert len(rest.broken) >= 7, "it was asked again and again"
        rest.broken = []
        mirror.follow()
        mirror.close()
    lake.mirror.follow()
    assert [row["number"] for row in newest_rows(lake.root)] == list(range(6))
    lake.mirror.close()
