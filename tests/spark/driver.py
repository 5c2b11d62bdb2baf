"""A separate Spark driver, to be killed: it runs a stream into a directory, with a Parquet directory for each
micro-batch.

    python -m tests.spark.driver OPTIONS_JSON CHECKPOINT OUTPUT MASTER

A micro-batch is written elsewhere and moved to its place; one that is written again replaces the first. So the sink is
exactly-once as long as the source repeats the same micro-batch, which is what is tested.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tailrace.lake.spark.runtime.class_data import class_data_options
from tailrace.lake.spark.runtime.java import use_java
from tailrace.spark import local_session


def follow(spark: SparkSession, options: Mapping[str, str], checkpoint: Path, out: Path) -> StreamingQuery:
    """The stream of the driver, in any session."""
    out.mkdir(exist_ok=True)

    def write(frame: DataFrame, batch_id: int) -> None:
        beside, place = out / f".batch-{batch_id:06d}", out / f"batch-{batch_id:06d}"
        frame.write.mode("overwrite").parquet(str(beside))
        shutil.rmtree(place, ignore_errors=True)
        beside.rename(place)

    return (
        spark.readStream.format("tailrace")
        .options(**options)
        .load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="0 seconds")
        .start()
    )


def main(options_json: str, checkpoint: str, output: str, master: str) -> None:
    quick = f"{class_data_options(use_java())} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    config = {"spark.master": master, "spark.executor.extraJavaOptions": quick}
    spark = local_session("tailrace-driver", cores=2, fast_start=True, config=config)
    spark.sparkContext.setLogLevel("ERROR")
    follow(spark, json.loads(options_json), Path(checkpoint), Path(output)).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
