"""Writes the archive of Java's classes before the tests if there is none, as after each new installation.

    python -m tests.spark.class_data

The first session on a machine writes it when it ends. In a run of the tests all sessions begin before one of them ends,
and killed ones write none: each of some thirty JVMs took 11 s of processor until its first query, instead of 5.
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from tailrace.lake.spark.runtime.class_data import class_data_options
from tailrace.lake.spark.runtime.java import use_java
from tailrace.spark import local_session

_WRITES = "-XX:ArchiveClassesAtExit="


def main() -> None:
    options = shlex.split(class_data_options(use_java()))
    if not options or not options[0].startswith(_WRITES):
        return
    Path(options[0].removeprefix(_WRITES)).unlink()  # otherwise it would be another session's to write
    spark = local_session("class-data", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("OFF")
    stream(spark)
    gateway = SparkContext._gateway
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends when its input is closed
    gateway.proc.wait()


def stream(spark: SparkSession) -> None:
    """Use what most tests load: a stream with a checkpoint, a sink in Python, Parquet, and a query."""
    with tempfile.TemporaryDirectory() as directory:
        output = f"{directory}/output"

        def write(frame: DataFrame, batch_id: int) -> None:
            frame.write.mode("overwrite").parquet(output)

        rows = spark.readStream.format("rate").load().writeStream.foreachBatch(write)
        query = rows.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True).start()
        query.awaitTermination()
        spark.read.parquet(output).selectExpr("count(value)").collect()


if __name__ == "__main__":
    main()
