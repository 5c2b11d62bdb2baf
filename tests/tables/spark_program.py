"""Spark 4.0 with Delta's and Iceberg's own connectors, in a process of its own: it does what lines of JSON on stdin
say, and answers each with a line. ``tests/tables/jvm_readers.py`` starts it.

The JAR with both connectors lacks the list of their short names (``delta``, ``iceberg``), so a small JAR adds it.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

_NAMED = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
_CLASSES = ("org.apache.spark.sql.delta.sources.DeltaDataSource", "org.apache.iceberg.spark.source.IcebergSource")
_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # A small heap, and code that is compiled quickly rather than well.
    "spark.driver.memory": "900m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Duser.timezone=UTC",
}


def session_with(jar: str, folder: str) -> SparkSession:
    names = f"{folder}/names.jar"
    with zipfile.ZipFile(names, "w") as made:
        made.writestr(_NAMED, "\n".join(_CLASSES))
    builder = SparkSession.builder.master("local[1]").appName("readers").config("spark.jars", f"{jar},{names}")
    for name, value in {**_SETTINGS, "spark.sql.warehouse.dir": f"{folder}/warehouse"}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def asked(session: SparkSession, wanted: dict[str, Any]) -> DataFrame | None:
    """``settings``: of the session, set first. Then ``run``, a command; ``sql``, a query; or a table with a filter."""
    for name, value in wanted.get("settings", {}).items():
        session.conf.set(name, value)
    if "stream" in wanted:
        _stream(session, wanted)
    if "run" in wanted:
        session.sql(wanted["run"])
    if "sql" in wanted:
        return session.sql(wanted["sql"])
    if "format" not in wanted:
        return None
    found = session.read.format(wanted["format"]).options(**wanted.get("options", {})).load(wanted["path"])
    return _nullable(found.where(wanted["where"]) if "where" in wanted else found)


def _nullable(found: DataFrame) -> DataFrame:
    """``toArrow`` of 4.0 refuses NULL in a column of structs whose fields may not be NULL, such as a lake's variants
    (``collect`` returns them)."""
    of_variants = "struct<value:binary,metadata:binary>"
    names = [one.name for one in found.schema.fields if one.dataType.simpleString() == of_variants]
    loose = {name: f.when(f.col(f"`{name}`").isNotNull(), f.col(f"`{name}`").cast(of_variants)) for name in names}
    return found.withColumns(loose) if loose else found


def _stream(session: SparkSession, wanted: dict[str, Any]) -> None:
    from tailrace.spark import tables_writer

    write = tables_writer(Path(wanted["root"]), collections=wanted["collections"], uri=wanted["uri"])
    rows = session.readStream.format("delta").option("maxFilesPerTrigger", "3").load(wanted["stream"]).select("event")
    query = rows.writeStream.foreachBatch(write).option("checkpointLocation", wanted["checkpoint"])
    query.trigger(availableNow=True).start().awaitTermination()


def serve(session: SparkSession, folder: Path) -> None:
    for number, line in enumerate(sys.stdin):
        try:
            found = asked(session, json.loads(line))
            if found is None:
                answer: dict[str, Any] = {}
            else:
                answer = {"rows": str(folder / f"{number}.arrow")}
                _write(found, answer["rows"])
        except Exception as error:  # noqa: BLE001  whatever it is, the test has to see it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _write(found: DataFrame, path: str) -> None:
    collect: Callable[[], pa.Table] = found.toArrow
    table = collect()
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    jar, folder = sys.argv[1:]
    # What Delta's commands print must not be among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = answers
    with session_with(jar, folder) as opened:
        print(json.dumps({"spark": opened.version}), flush=True)
        serve(opened, Path(folder))
