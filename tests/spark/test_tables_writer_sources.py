"""``tables_writer`` over clusters, 7.0, lakes and files, from which its rows may come. Each costs seconds of Spark;
tests/unit/test_fed_tables.py has the rules without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.lake import CompactionPolicy, compact, write_stream
from tailrace.spark import tables_writer
from tests.snapshot.test_snapshot_sharded import REGIONS, spread_over
from tests.spark.streams import PATIENCE_S, newest
from tests.spark.test_tables_writer import WHOLE, change, run
from tests.tables.equality import in_collection, in_table
from tests.tables.test_sharded_equality import truth

pytestmark = [pytest.mark.spark, pytest.mark.mongod, pytest.mark.slow]  # tests/unit/test_fed_tables.py

NAMES = ("orders", "rest", "copied", "after")
COLUMNS = {"columns": "event,token"}


def begin(client: Any, database: str) -> None:
    """Documents that exist before the copy."""
    client[database].orders.insert_many([{"_id": n, "n": n} for n in range(50)])
    client[database].rest.insert_one({"_id": "x"})


def assert_equal(client: Any, database: str, root: Path) -> None:
    for name in NAMES:
        assert in_table(root, f"{database}.{name}") == in_collection(client[database][name]), name
    assert not in_table(root, f"{database}.before")


def keep(rows: DataFrame, write: Callable[[DataFrame, int], None], checkpoint: Path) -> None:
    """Run a query over existing files."""
    query = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
    assert query.trigger(availableNow=True).start().awaitTermination(PATIENCE_S)


@pytest.mark.parametrize("version", [pytest.param("7.0.28", marks=pytest.mark.wine)])
def test_tables_of_another_version(
    spark: SparkSession, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str
) -> None:
    """With a copy, changes, and a second copy of the function for each run."""
    database, chosen = "fedversion", random.Random(9302)
    uri = start_replica_set(version=version).uri
    options = {"uri": uri, "database": database, "startingFrom": "snapshot", "maxEventsPerTrigger": "40", **WHOLE}
    with MongoClient[Any](uri) as client:
        begin(client, database)
        for turn in range(3):
            write = tables_writer(tmp_path / "tables", collections=f"{database}.*", uri=uri)
            run(spark, options, tmp_path / "checkpoint", write, select=lambda one: one.repartition(3, f.rand()))
            if turn < 2:
                change(client, database, chosen)
                newest(uri)
        assert_equal(client, database, tmp_path / "tables")


def test_tables_of_a_sharded_cluster(spark: SparkSession, sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    """Its events are those of three shards. Chunks move and a transaction writes to all shards between the runs."""
    database, chosen, router = "fedcluster", random.Random(9303), sharded_cluster.router
    namespace = spread_over(sharded_cluster, database, {"region": 1, "_id": 1})
    uri, root = sharded_cluster.uri, tmp_path / "tables"
    options = {"uri": uri, "database": database, "startingFrom": "snapshot", "maxEventsPerTrigger": "40", **WHOLE}

    def key(number: int) -> dict[str, Any]:
        return {"region": REGIONS[number % len(REGIONS)], "_id": number}

    def transact(transaction: Any) -> None:
        for number in (0, 1, 2):
            transaction.update_one(namespace, key(number), {"$inc": {"t": 1}}, upsert=True)

    try:
        router.insert_many(namespace, [{**key(number), "v": {"a": [1, 2]}} for number in range(50)])
        router.insert_one(f"{database}.plain", {"_id": 1})
        for turn in range(3):
            write = tables_writer(root, collections=f"{database}.*", uri=uri)
            run(spark, options, tmp_path / "checkpoint", write, select=lambda one: one.repartition(3, f.rand()))
            if turn == 2:
                break
            for number in [chosen.randrange(60) for _ in range(40)]:
                if chosen.random() < 0.3:
                    router.delete_one(namespace, key(number))
                else:
                    router.update_one(namespace, key(number), {"$push": {"l": turn}, "$inc": {"n": 1}}, upsert=True)
            router.run_transaction(transact)
            there = router.owner(namespace, key(0))
            router.move_chunk(namespace, key(0), to=next(one for one in sharded_cluster.shards if one != there))
            router.insert_one(f"{database}.plain", {"_id": 2 + turn})
        for name in (namespace, f"{database}.plain"):
            assert in_table(root, name) == truth(sharded_cluster, name), name
    finally:
        router.drop_database(database)


def test_tables_of_a_lake(spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path) -> None:
    """A lake of the events, and a query over its files while it grows. After a compaction the same events are in two
    files: such rows are refused."""
    database, chosen, uri = "fedbylake", random.Random(9304), replica_set.uri
    lake, root = tmp_path / "lake", tmp_path / "tables"
    source = {"uri": uri, "database": database, "startingFrom": "snapshot", **COLUMNS, **WHOLE}

    def follow(checkpoint: str = "checkpoint", where: Path = root) -> None:
        rows = spark.readStream.schema("event binary").option("recursiveFileLookup", True).parquet(str(lake))
        keep(rows, tables_writer(where, collections=f"{database}.*", uri=uri), tmp_path / checkpoint)

    with MongoClient[Any](uri) as client:
        client.drop_database(database)
        begin(client, database)
        for turn in range(3):
            query = write_stream(spark, source, lake, available_now=True, compaction=CompactionPolicy(every=0))
            assert query.awaitTermination(PATIENCE_S)
            follow()
            if turn < 2:
                change(client, database, chosen)
                newest(uri)
        assert_equal(client, database, root)
        assert compact(lake).files_before
        with pytest.raises(PySparkException, match=r"twice|earlier"):
            follow("anew", tmp_path / "anew")
        with pytest.raises(PySparkException, match=r"twice|earlier|document of a copy after events"):
            follow()
        assert_equal(client, database, root)
        client.drop_database(database)


def test_tables_of_rows_that_were_text_on_their_way(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """As if through a topic whose values are JSON: the event's bytes in Base64, in lines of files, and back."""
    database, uri = "fedbytext", replica_set.uri
    start = newest(uri)
    with MongoClient[Any](uri) as client:
        client.drop_database(database)
        begin(client, database)
        change(client, database, random.Random(9305))
        newest(uri)
        options = {"uri": uri, "database": database, "startAtOperationTime": f"{start.seconds},{start.increment}"}
        events = spark.read.format("tailrace").options(**options, **WHOLE).load()
        text = events.select(f.to_json(f.struct("token", f.base64("event").alias("event"))).alias("value"))
        text.repartition(3, f.rand()).write.text(str(tmp_path / "topic"))
        lines = spark.readStream.schema("value string").text(str(tmp_path / "topic"))
        rows = lines.select(f.unbase64(f.get_json_object("value", "$.event")).alias("event"))
        write = tables_writer(tmp_path / "tables", collections=f"{database}.*", begins_empty=True)
        keep(rows, write, tmp_path / "checkpoint")
        assert_equal(client, database, tmp_path / "tables")
        client.drop_database(database)
