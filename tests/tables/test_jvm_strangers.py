"""What users do to tables with Delta's and Iceberg's own commands in Spark: the tables equal their collections
afterwards, or the writer refuses them with an error that says so.

tests/tables/test_strangers.py does what deltalake can do. It found nothing wrong with the column ``_changed``, which
Delta's own connector refused to write again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.iceberg_mirror import identifier_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.spark.sinks import postgresql_server
from tests.tables.equality import in_collection, in_table
from tests.tables.jvm_readers import CATALOG, JvmReaders, SparkError
from tests.tables.jvm_readers import spark as spark  # noqa: PLC0414  a fixture
from tests.tables.test_restored import collection as collection  # noqa: PLC0414  a fixture

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.mongod]

_SET = "ALTER TABLE {t} SET TBLPROPERTIES"
#: What leaves a table's rows as they are, so that the writer goes on.
KEPT: Mapping[str, tuple[str, ...]] = {
    "optimize": ("OPTIMIZE {t}",),
    "z-order": ("OPTIMIZE {t} ZORDER BY (turn)",),
    "optimize and vacuum": ("OPTIMIZE {t}", "VACUUM {t} RETAIN 0 HOURS"),
}
#: What changes its rows, its columns or what it promises.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "delete": ("DELETE FROM {t} WHERE turn = 1",),
    "update": ("UPDATE {t} SET turn = 7 WHERE turn = 1",),
    "insert": ("INSERT INTO {t} SELECT * FROM {t} LIMIT 1",),
    "go back": ("RESTORE TABLE {t} TO VERSION AS OF 0",),
    "add a column": ("ALTER TABLE {t} ADD COLUMNS (mine INT)",),
    "add a constraint": ("ALTER TABLE {t} ADD CONSTRAINT small CHECK (turn < 100)",),
    "mark rows as deleted": (
        _SET + " ('delta.enableDeletionVectors' = 'true')",
        "DELETE FROM {t} WHERE turn = 1",
    ),
    "newer checkpoints": (
        _SET + " ('delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '1')",
        "OPTIMIZE {t}",
    ),
    "names for columns": (_SET + " ('delta.columnMapping.mode' = 'name')",),
    "numbers for rows": (_SET + " ('delta.enableRowTracking' = 'true')",),
    "times in commits": (_SET + " ('delta.enableInCommitTimestamps' = 'true')",),
    "a feed": (_SET + " ('delta.enableChangeDataFeed' = 'true')",),
    "append only": (_SET + " ('delta.appendOnly' = 'true')",),
    "a comment": ("COMMENT ON TABLE {t} IS 'orders'",),
    "wider types": (_SET + " ('delta.enableTypeWidening' = 'true')", "ALTER TABLE {t} ALTER COLUMN turn TYPE BIGINT"),
}
_FREE = {
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    "spark.databricks.delta.optimize.zorder.checkStatsCollection.enabled": "false",
}


def worked(collection: Any, bring_up: Callable[[], None]) -> None:
    """Three versions of a table, the first of which is a copy."""
    for turn in range(3):
        collection.insert_many([{"_id": turn * 10 + number, "turn": turn} for number in range(10)])
        collection.update_one({"_id": turn}, {"$set": {"n": turn}})
        bring_up()


def work_on(collection: Any) -> Iterator[int]:
    for turn in range(2):
        collection.update_one({"_id": 1}, {"$set": {"after": turn}})
        collection.delete_one({"_id": 7 + turn})
        yield turn


@pytest.mark.parametrize("merges", [False, True], ids=["rewritten", "merged on read"])
@pytest.mark.parametrize("command", [*KEPT, *REFUSED])
def test_tables_equal_their_collections_or_are_refused(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, spark: JvmReaders, *, command: str, merges: bool
) -> None:
    root, rule = tmp_path / "t", TableRule(f"{collection.database.name}.*")
    settings = TableSettings(root, (rule,), every_s=0.0, compact_every=0, merge_on_read=merges)

    def bring_up() -> None:
        with TablesWriter(replica_set.uri, settings) as writer:
            writer.run_to_present()

    worked(collection, bring_up)
    folder = root / collection.full_name
    spark.set(_FREE)
    for text in {**KEPT, **REFUSED}[command]:
        spark.run(text.format(t=f"delta.`{folder}`"))
    for _ in work_on(collection):
        if command in REFUSED:
            with pytest.raises(SinkError, match=r"another program has changed the table .*tables rebuild"):
                bring_up()
            continue
        bring_up()
        assert in_table(root, collection.full_name) == in_collection(collection)
        rows = spark.delta(folder).column("_bson").to_pylist()
        assert sorted(rows) == sorted(in_collection(collection).values())


#: What Iceberg's commands in Spark leave equal: what they change is put right by the next commit, or nobody reads it.
KEPT_IN_ICEBERG: Mapping[str, tuple[str, ...]] = {
    "rewrite the manifests": ("CALL {c}.system.rewrite_manifests(table => '{n}')",),
    "go back": ("CALL {c}.system.rollback_to_snapshot('{n}', {first})",),
    "add a column": ("ALTER TABLE {c}.{n} ADD COLUMNS (mine INT)",),
    "rename a column": ("ALTER TABLE {c}.{n} RENAME COLUMN turn TO mine",),
    "drop a column": ("ALTER TABLE {c}.{n} DROP COLUMN turn",),
    "an order": ("ALTER TABLE {c}.{n} WRITE ORDERED BY turn",),
    "a branch": ("ALTER TABLE {c}.{n} CREATE BRANCH mine",),
    "a tag": ("ALTER TABLE {c}.{n} CREATE TAG mine",),
    "no names for columns": ("ALTER TABLE {c}.{n} UNSET TBLPROPERTIES ('schema.name-mapping.default')",),
}
REFUSED_IN_ICEBERG: Mapping[str, tuple[str, ...]] = {
    "rewrite the files": ("CALL {c}.system.rewrite_data_files(table => '{n}', options => map('rewrite-all', 'true'))",),
    "delete": ("DELETE FROM {c}.{n} WHERE turn = 1",),
    "mark rows as deleted": (
        "ALTER TABLE {c}.{n} SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')",
        "DELETE FROM {c}.{n} WHERE n = 1",
    ),
    "update": ("UPDATE {c}.{n} SET turn = 7 WHERE turn = 1",),
    "insert": ("INSERT INTO {c}.{n} SELECT * FROM {c}.{n} LIMIT 1",),
    "a partition": ("ALTER TABLE {c}.{n} ADD PARTITION FIELD turn",),
    "a newer format": ("ALTER TABLE {c}.{n} SET TBLPROPERTIES ('format-version' = '3')",),
}
IN_ICEBERG = {**KEPT_IN_ICEBERG, **REFUSED_IN_ICEBERG}


class Shared:
    """A table that a catalogue in PostgreSQL has, and Spark's name of it."""

    def __init__(
        self, uri: str, collection: Any, folder: Path, spark: JvmReaders, *, place: str, catalogue: str
    ) -> None:
        self.collection, self.root, self.spark, self._uri = collection, folder / "t", spark, uri
        self.catalogue, self.name = catalogue, ".".join(identifier_of(collection.full_name))
        given = {"name": catalogue, "uri": f"postgresql+psycopg2://test@{place}"}
        rule = TableRule(f"{collection.database.name}.*")
        iceberg = IcebergSettings.of(given, "iceberg")
        self._settings = TableSettings(self.root, (rule,), every_s=0.0, compact_every=0, iceberg=iceberg)
        whole = f"spark.sql.catalog.{catalogue}"
        more = {"type": "jdbc", "uri": f"jdbc:postgresql://{place}?user=test", "warehouse": str(folder / "w")}
        more["cache-enabled"] = "false"  # by default a loaded table is cached for 30 seconds
        spark.set({whole: CATALOG, **{f"{whole}.{one}": value for one, value in more.items()}})

    def bring_up(self) -> None:
        with TablesWriter(self._uri, self._settings) as writer:
            writer.run_to_present()

    def run(self, text: str) -> None:
        names = {"c": self.catalogue, "n": self.name}
        found = self.spark.sql("SELECT snapshot_id FROM {c}.{n}.snapshots ORDER BY committed_at".format(**names))
        self.spark.run(text.format(**names, first=found.column(0)[0]))

    def compare(self) -> None:
        expected = in_collection(self.collection)
        assert in_table(self.root, self.collection.full_name) == expected
        rows = self.spark.iceberg(f"{self.catalogue}.{self.name}").column("_bson").to_pylist()
        assert sorted(rows) == sorted(expected.values())


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    with postgresql_server() as running:
        yield f"127.0.0.1:{running.port}/postgres"


@pytest.fixture
def shared(replica_set: ReplicaSet, collection: Any, tmp_path: Path, spark: JvmReaders, postgresql: str) -> Shared:
    made = Shared(replica_set.uri, collection, tmp_path, spark, place=postgresql, catalogue=f"c{uuid.uuid4().hex[:8]}")
    worked(collection, made.bring_up)
    return made


@pytest.mark.parametrize("command", IN_ICEBERG)
def test_iceberg_tables_equal_their_collections_or_are_refused(shared: Shared, command: str) -> None:
    for text in IN_ICEBERG[command]:
        shared.run(text)
    for _ in work_on(shared.collection):
        if command in REFUSED_IN_ICEBERG:
            with pytest.raises(SinkError, match=r"another program has changed the Iceberg table .*Drop it from"):
                shared.bring_up()
            continue
        shared.bring_up()
        shared.compare()


def test_iceberg_refuses_to_remove_files_that_delta_has(shared: Shared) -> None:
    """``gc.enabled`` says so in the table."""
    with pytest.raises(SparkError, match="GC is disabled"):
        shared.run("CALL {c}.system.expire_snapshots(table => '{n}', older_than => TIMESTAMP '2100-01-01 00:00:00')")
    with pytest.raises(SparkError, match="GC is disabled"):
        shared.run("CALL {c}.system.remove_orphan_files(table => '{n}', older_than => TIMESTAMP '2020-01-01 00:00:00')")
    for _ in work_on(shared.collection):
        shared.bring_up()
        shared.compare()
