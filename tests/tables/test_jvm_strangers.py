"""What users do to tables with Delta's and Iceberg's own commands in Spark: the tables equal their collections
afterwards, or the writer refuses them with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bson
import pytest

from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.iceberg_mirror import identifier_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.tables.equality import in_collection, in_table
from tests.tables.jvm_readers import JvmReaders, catalogue_in
from tests.tables.jvm_readers import spark as spark  # noqa: PLC0414  a fixture
from tests.tables.test_restored import collection as collection  # noqa: PLC0414  a fixture

from tests.tables.rest_catalog import TOKEN, rest_catalog

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.mongod]

_SET = "ALTER TABLE {t} SET TBLPROPERTIES"
COMMANDS: dict[str, tuple[str, ...]] = {
    "optimize": ("OPTIMIZE {t}",),
    "z-order": ("OPTIMIZE {t} ZORDER BY (turn)",),
    "optimize and vacuum": ("OPTIMIZE {t}", "VACUUM {t} RETAIN 0 HOURS"),
    "delete": ("DELETE FROM {t} WHERE turn = 1",),
    "update": ("UPDATE {t} SET turn = 7 WHERE turn = 1",),
    "insert": ("INSERT INTO {t} SELECT * FROM {t} LIMIT 1",),
    "go back": ("RESTORE TABLE {t} TO VERSION AS OF 0",),
    "add a column": ("ALTER TABLE {t} ADD COLUMNS (mine INT)",),
    "add a constraint": ("ALTER TABLE {t} ADD CONSTRAINT small CHECK (turn < 100)",),
    "marks rows as deleted": (_SET + " ('delta.enableDeletionVectors' = 'true')",),
    "marks rows as deleted, and deletes": (
        _SET + " ('delta.enableDeletionVectors' = 'true')",
        "DELETE FROM {t} WHERE turn = 1",
    ),
    "purge": ("REORG TABLE {t} APPLY (PURGE)",),
    "newer checkpoints": (
        _SET + " ('delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '1')",
        "OPTIMIZE {t}",
    ),
    "names for columns": (_SET + " ('delta.columnMapping.mode' = 'name')",),
    "rows with numbers": (_SET + " ('delta.enableRowTracking' = 'true')",),
    "times in commits": (_SET + " ('delta.enableInCommitTimestamps' = 'true')",),
    "a feed": (_SET + " ('delta.enableChangeDataFeed' = 'true')",),
    "append only": (_SET + " ('delta.appendOnly' = 'true')",),
    "clustered": ("ALTER TABLE {t} CLUSTER BY (turn)", "OPTIMIZE {t}"),
    "a comment": ("COMMENT ON TABLE {t} IS 'orders'",),
    "wider types": (_SET + " ('delta.enableTypeWidening' = 'true')", "ALTER TABLE {t} ALTER COLUMN turn TYPE BIGINT"),
}


def brought_up(uri: str, root: Path, collection: Any, merges: bool) -> None:
    rule = TableRule(f"{collection.database.name}.*")
    settings = TableSettings(root, (rule,), every_s=0.0, compact_every=0, merge_on_read=merges)
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_tables_equal_their_collections_or_are_refused(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, spark: JvmReaders, command: str, merges: bool
) -> None:
    uri, root = replica_set.uri, tmp_path / "t"
    for turn in range(3):
        collection.insert_many([{"_id": turn * 10 + number, "turn": turn} for number in range(10)])
        collection.update_one({"_id": turn}, {"$set": {"n": turn}})
        brought_up(uri, root, collection, merges)
    folder = root / collection.full_name
    spark.set(
        {
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
            "spark.databricks.delta.optimize.zorder.checkStatsCollection.enabled": "false",
        }
    )
    for text in COMMANDS[command]:
        try:
            spark.sql(text.format(t=f"delta.`{folder}`"))
        except Exception as e:
            print("SPARK", str(e)[:200].replace(chr(10), " "))
    for turn in range(2):
        collection.update_one({"_id": 1}, {"$set": {"after": turn}})
        collection.delete_one({"_id": 7 + turn})
        try:
            brought_up(uri, root, collection, merges)
        except SinkError as error:
            print("REFUSED", error)
            continue
        assert in_table(root, collection.full_name) == in_collection(collection)
        rows = spark.delta(folder).column("_bson").to_pylist()
        assert {bson.decode(one)["_id"]: one for one in rows} == {
            bson.decode(one)["_id"]: one for one in in_collection(collection).values()
        }
        assert len(rows) == collection.count_documents({})
        print("EQUAL")


ICEBERG: dict[str, tuple[str, ...]] = {
    "rewrite the files": ("CALL {c}.system.rewrite_data_files(table => '{n}', options => map('rewrite-all', 'true'))",),
    "rewrite the manifests": ("CALL {c}.system.rewrite_manifests(table => '{n}')",),
    "expire snapshots": (
        "CALL {c}.system.expire_snapshots(table => '{n}', older_than => TIMESTAMP '2100-01-01 00:00:00')",
    ),
    "delete": ("DELETE FROM {c}.{n} WHERE turn = 1",),
    "delete by mark": (
        "ALTER TABLE {c}.{n} SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')",
        "DELETE FROM {c}.{n} WHERE n = 1",
    ),
    "update": ("UPDATE {c}.{n} SET turn = 7 WHERE turn = 1",),
    "insert": ("INSERT INTO {c}.{n} SELECT * FROM {c}.{n} LIMIT 1",),
    "go back": ("CALL {c}.system.rollback_to_snapshot('{n}', {first})",),
    "add a column": ("ALTER TABLE {c}.{n} ADD COLUMNS (mine INT)",),
    "rename a column": ("ALTER TABLE {c}.{n} RENAME COLUMN turn TO mine",),
    "drop a column": ("ALTER TABLE {c}.{n} DROP COLUMN turn",),
    "a partition": ("ALTER TABLE {c}.{n} ADD PARTITION FIELD turn",),
    "an order": ("ALTER TABLE {c}.{n} WRITE ORDERED BY turn",),
    "a newer format": ("ALTER TABLE {c}.{n} SET TBLPROPERTIES ('format-version' = '3')",),
    "a branch": ("ALTER TABLE {c}.{n} CREATE BRANCH mine",),
    "a tag": ("ALTER TABLE {c}.{n} CREATE TAG mine",),
    "no names for columns": ("ALTER TABLE {c}.{n} UNSET TBLPROPERTIES ('schema.name-mapping.default')",),
}


@pytest.mark.parametrize("command", ICEBERG)
def test_iceberg_tables_equal_their_collections_or_are_refused(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, spark: JvmReaders, command: str
) -> None:
    uri, root = replica_set.uri, tmp_path / "t"
    with rest_catalog(tmp_path / "catalog.db") as rest:
        given = IcebergSettings.of({"uri": rest.uri, "token": TOKEN}, "iceberg")
        rule = TableRule(f"{collection.database.name}.*")
        settings = TableSettings(root, (rule,), every_s=0.0, compact_every=0, iceberg=given)

        def bring_up() -> None:
            with TablesWriter(uri, settings) as writer:
                writer.run_to_present()

        for turn in range(3):
            collection.insert_many([{"_id": turn * 10 + number, "turn": turn} for number in range(10)])
            collection.update_one({"_id": turn}, {"$set": {"n": turn}})
            bring_up()
        catalogue, name = catalogue_in(spark, rest), ".".join(identifier_of(collection.full_name))
        found = rest.catalog.load_table(identifier_of(collection.full_name))
        first = found.snapshots()[0].snapshot_id
        for text in ICEBERG[command]:
            try:
                spark.sql(text.format(c=catalogue, n=name, first=first))
            except Exception as e:
                print("SPARK", str(e)[:200].replace(chr(10), " "))
        for turn in range(2):
            collection.update_one({"_id": 1}, {"$set": {"after": turn}})
            collection.delete_one({"_id": 7 + turn})
            try:
                bring_up()
            except SinkError as error:
                print("REFUSED", error)
                continue
            assert in_table(root, collection.full_name) == in_collection(collection)
            rows = spark.iceberg(f"{catalogue}.{name}").column("_bson").to_pylist()
            assert sorted(rows) == sorted(in_collection(collection).values())
            print("EQUAL")
