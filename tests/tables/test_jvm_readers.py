"""Delta's and Iceberg's own connectors for Spark read the same from tables and lakes as the readers in Python do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.delta_table import CHECKPOINT_EVERY_MERGED, CollectionTable
from tailrace.lake.tables.iceberg_mirror import IcebergMirror
from tailrace.lake.tables.schema import TableSchema
from tests.spark.sinks import postgresql_server
from tests.tables.change_feeds import known_values
from tests.tables.features import FEATURES, ODD, Made, odd_texts
from tests.tables.iceberg import iceberg_table, sql_mirror
from tests.tables.jvm_readers import CATALOG, JvmReaders, catalogue_in, typed
from tests.tables.jvm_readers import spark as spark  # noqa: PLC0414  a fixture
from tests.tables.rest_catalog import TOKEN, RestServer, rest_catalog
from tests.tables.test_merge_on_read import worked

pytestmark = [pytest.mark.slow, pytest.mark.spark]

BROUGHT = ("insert", "update_postimage")


@pytest.mark.parametrize("feature", FEATURES)
def test_delta_s_connector_reads_what_every_reader_reads(feature: str, spark: JvmReaders, tmp_path: Path) -> None:
    expected = FEATURES[feature](tmp_path / "t")
    assert typed(spark.delta(tmp_path / "t")) == expected


def test_delta_s_connector_finds_the_rows_of_a_value(spark: JvmReaders, tmp_path: Path) -> None:
    odd_texts(tmp_path / "t")
    for value in ("", "..", "a/b", "\0", "e\u0301", "__HIVE_DEFAULT_PARTITION__", "01", *ODD[-6:]):
        where = "c IS NULL" if value is None else f"c = {spark_text(value)}"
        assert typed(spark.delta(tmp_path / "t", where)) == [{"c": value}] * 2, value


def spark_text(value: str) -> str:
    return f"decode(unhex('{value.encode().hex()}'), 'UTF-8')"


# -- merged on read, and feeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("divide_by", [(), ("s",)])
def test_delta_s_connector_applies_our_deletion_vectors_at_each_version(
    divide_by: tuple[str, ...], spark: JvmReaders, tmp_path: Path
) -> None:
    made, truth = worked(tmp_path / "t", 7, CHECKPOINT_EVERY_MERGED + 8, partition_by=divide_by)
    assert made.table.version == len(truth) - 1
    assert any(file.gone for file in made.table.files())
    for version in [*range(0, len(truth), 7), len(truth) - 1]:
        assert held_by(spark, tmp_path / "t", versionAsOf=version) == truth[version], version
    some = spark.delta(tmp_path / "t", "n >= 10")
    assert sorted(some.column("n").to_pylist()) == sorted(n for n in truth[-1].values() if n >= 10)


def held_by(spark: JvmReaders, root: Path, **options: Any) -> dict[int, int]:
    """The rows of a version."""
    rows = spark.delta(root, **options)
    documents = [bson.decode(one) for one in rows.column("_bson").to_pylist()]
    assert [one["n"] for one in documents] == rows.column("n").to_pylist()
    assert len({one["_id"] for one in documents}) == len(documents), "a row is there twice"
    return {one["_id"]: one["n"] for one in documents}


@pytest.mark.parametrize("merges", [False, True])
def test_delta_s_connector_reads_the_feed_of_each_version(merges: bool, spark: JvmReaders, tmp_path: Path) -> None:
    made, truth = worked(tmp_path / "t", 8, 30, merges=merges, feed=True)
    table = DeltaTable(str(tmp_path / "t"))
    assert table.version() == made.table.version
    fed = spark.delta(tmp_path / "t", readChangeFeed="true", startingVersion=0)
    own = pa.table(table.load_cdf(starting_version=0))
    assert fed.num_rows == own.num_rows > 300
    columns = ["_commit_version", "_change_type", "_key", "n", "s", "_bson", "_json", "_changed"]
    assert counted(fed, columns) == counted(own, columns)
    assert followed(fed) == truth[-1]


def counted(rows: pa.Table, columns: list[str]) -> Counter[tuple[Any, ...]]:
    return Counter(
        tuple(map(repr, row)) for row in zip(*(rows.column(one).to_pylist() for one in columns), strict=True)
    )


def followed(feed: pa.Table) -> dict[int, int]:
    """What a reader has that takes all changes in their order."""
    found: dict[int, int] = {}
    by_version = sorted(feed.to_pylist(), key=lambda row: (row["_commit_version"], row["_change_type"] in BROUGHT))
    for row in by_version:
        document = bson.decode(row["_bson"])
        if row["_change_type"] in BROUGHT:
            assert document["_id"] not in found
            found[document["_id"]] = document["n"]
        else:
            assert found.pop(document["_id"]) == document["n"]
    return found


# -- Iceberg ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[RestServer]:
    with rest_catalog(tmp_path / "catalog.db") as server:
        yield server


@pytest.fixture
def catalogue(rest: RestServer, spark: JvmReaders) -> str:
    return catalogue_in(spark, rest)


@pytest.fixture
def mirrored(rest: RestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IcebergMirror]:
    """Each commit of a table that a test makes becomes a snapshot."""
    settings = IcebergSettings.of({"uri": rest.uri, "token": TOKEN}, "iceberg")
    mirror = sql_mirror(tmp_path, settings)
    monkeypatch.setattr(Made, "followed", lambda _, table: mirror.follow([table]))
    yield mirror
    mirror.close()


@pytest.mark.parametrize("feature", FEATURES)
def test_iceberg_s_connector_reads_what_every_reader_reads(
    feature: str, spark: JvmReaders, catalogue: str, mirrored: IcebergMirror, tmp_path: Path
) -> None:
    expected = FEATURES[feature](tmp_path / "t")
    mirrored.follow([CollectionTable(tmp_path / "t", "shop.orders")])  # merged since, or without news
    assert typed(spark.iceberg(f"{catalogue}.shop.orders")) == expected
    location = iceberg_table(tmp_path).metadata_location
    assert typed(spark.iceberg(location)) == expected


def test_each_snapshot_is_its_version_for_iceberg_s_connector(
    spark: JvmReaders, catalogue: str, mirrored: IcebergMirror, tmp_path: Path
) -> None:
    made = Made(tmp_path / "t", TableSchema(nested=True))
    made.whole([{"_id": number, "o": {"n": number}} for number in range(20)])
    for turn in range(1, 5):
        made.change(
            [{"_id": number, "o": {"n": turn, f"late{turn}": [turn]}} for number in range(turn)], gone=[9 + turn]
        )
    made.table.compact()
    mirrored.follow([made.table])
    found = iceberg_table(tmp_path)
    assert [version_of(one) for one in found.snapshots()] == [0, 1, 2, 3, 4, 5]
    for one in found.snapshots():
        rows = spark.iceberg(f"{catalogue}.shop.orders", **{"snapshot-id": one.snapshot_id})
        expected = DeltaTable(str(tmp_path / "t"), version=version_of(one)).to_pyarrow_table()
        assert known(rows) == known(expected), version_of(one)
        assert known(spark.delta(tmp_path / "t", versionAsOf=version_of(one))) == known(expected)
    told = spark.sql(f"SELECT summary['tailrace.version'] AS v FROM {catalogue}.shop.orders.snapshots ORDER BY 1")
    assert told.column("v").to_pylist() == list("012345")
    late = spark.iceberg(f"{catalogue}.shop.orders", "o.late4 IS NOT NULL")
    assert sorted(one["n"] for one in late.column("o").to_pylist()) == [4, 4, 4, 4]


def known(rows: pa.Table) -> list[str]:
    """Rows without NULL, since a reader may know fields by now that the version did not have."""
    return sorted(repr(known_values(row)) for row in rows.to_pylist())


def test_a_catalogue_in_postgresql_is_shared_with_spark(spark: JvmReaders, tmp_path: Path) -> None:
    """The tables are kept by pyiceberg's SQL catalogue, and read through Iceberg's own JDBC catalogue."""
    with postgresql_server() as server:
        uri = f"postgresql+psycopg2://test@127.0.0.1:{server.port}/postgres"
        mirror = sql_mirror(tmp_path, IcebergSettings.of(uri, "iceberg"))
        made = Made(tmp_path / "t", TableSchema())
        made.whole([{"_id": number, "n": number} for number in range(5)])
        mirror.follow([made.table])
        made.change([{"_id": 1, "n": 7}], gone=[2])
        mirror.follow([made.table])
        jdbc = "spark.sql.catalog.tailrace"
        spark.set(
            {
                jdbc: CATALOG,
                f"{jdbc}.type": "jdbc",
                f"{jdbc}.uri": f"jdbc:postgresql://127.0.0.1:{server.port}/postgres?user=test",
                f"{jdbc}.warehouse": str(tmp_path / "warehouse"),
            }
        )
        rows = typed(spark.iceberg("tailrace.shop.orders"))
        assert rows == [{"_id": one, "n": 7 if one == 1 else one} for one in (0, 1, 3, 4)]
        mirror.close()
