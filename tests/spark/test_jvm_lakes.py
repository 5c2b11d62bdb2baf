"""Lakes of a server's events as Delta's and Iceberg's own connectors for Spark read them, and tables that are kept from
what Delta's own stream gives of a lake."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pymongo
import pytest
from deltalake import DeltaTable

from tailrace.embedded import ReplicaSet
from tailrace.lake import compact
from tailrace.lake.spark.query.options import COLUMNS
from tests.spark.lake_driving import options_for
from tests.spark.sparkless_lake import fill
from tests.spark.streams import newest
from tests.spark.test_lake_iceberg import work
from tests.spark.test_tables_writer import WHOLE, change
from tests.spark.test_tables_writer_sources import assert_equal, begin
from tests.tables.jvm_readers import JvmReaders
from tests.tables.jvm_readers import spark as spark  # noqa: PLC0414  a fixture
from tests.unit.lake_iceberg import mirror_of, rows_of, table_of

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.mongod]
DATABASE = "lakeiceberg"


@pytest.mark.parametrize(
    ("documents", "partition_by"),
    [("json", ("day", "collection")), ("variant", ("day",)), ("bson", ("day", "hour", "collection"))],
)
def test_all_columns_of_a_server_s_events(
    replica_set: ReplicaSet, tmp_path: Path, spark: JvmReaders, documents: str, partition_by: tuple[str, ...]
) -> None:
    uri, lake = replica_set.uri, tmp_path / "lake"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client.drop_database(DATABASE)
    start = newest(uri)
    more = {"maxEventsPerTrigger": "10", "columns": ",".join(COLUMNS), "documents": documents}
    source = options_for(uri, DATABASE, start, **more)
    mirror = mirror_of(lake)
    fill(source, lake, work(uri, 0), partition_by=partition_by)
    mirror.follow()
    assert compact(lake, release=mirror.release).files_before
    mirror.follow()
    fill(source, lake, work(uri, 100), partition_by=partition_by, checkpoint=tmp_path / "another")
    mirror.follow()
    version = DeltaTable(str(lake)).version()
    for wanted in (version, version - 1, version // 2):
        expected = rows_of(DeltaTable(str(lake), version=wanted).to_pyarrow_table())
        assert rows_of(spark.delta(lake, versionAsOf=wanted)) == expected, wanted
    newest_rows = rows_of(DeltaTable(str(lake)).to_pyarrow_table())
    assert len(newest_rows) >= 46
    assert rows_of(spark.iceberg(table_of(lake).metadata_location)) == newest_rows
    one = newest_rows[7]
    found = spark.delta(lake, f"token = '{one['token']}'")
    assert rows_of(found) == [row for row in newest_rows if row["token"] == one["token"]]
    assert_parts_are_found(spark, lake, newest_rows, partition_by)
    mirror.close()


def assert_parts_are_found(spark: JvmReaders, lake: Path, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    """Filters by the columns that divide the lake, so that files are passed over."""
    for name in names:
        for value in {row[name] for row in rows}:
            where = f"{name} IS NULL" if value is None else f"{name} = '{value}'"
            wanted = [row for row in rows if row[name] == value]
            assert rows_of(spark.delta(lake, where)) == wanted, where
            assert rows_of(spark.iceberg(table_of(lake).metadata_location, where)) == wanted, where


def test_tables_from_delta_s_own_stream_of_a_lake(replica_set: ReplicaSet, tmp_path: Path, spark: JvmReaders) -> None:
    """A lake grows and is compacted between the runs of a query over it. Delta's stream skips what compaction wrote, so
    ``tables_writer`` need not refuse it, as it must refuse the bare files."""
    database, chosen, uri = "fedbydelta", random.Random(9305), replica_set.uri
    lake, root = tmp_path / "lake", tmp_path / "tables"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client.drop_database(database)
        begin(client, database)
        source = {
            "uri": uri, "database": database, "startingFrom": "snapshot", "columns": "event,token",
            "maxEventsPerTrigger": "25", **WHOLE,
        }  # fmt: skip
        for turn in range(3):
            fill(source, lake, newest(uri), checkpoint=tmp_path / f"from{turn}")
            spark.feed_tables(lake, tmp_path / "checkpoint", root, f"{database}.*", uri)
            if turn < 2:
                assert compact(lake).files_before
                change(client, database, chosen)
        assert_equal(client, database, root)
