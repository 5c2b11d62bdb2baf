"""Spark's real-time mode and Python sources. The page docs/design/at-scale.md says that this is not possible. If a
later PySpark allows it, this test fails, and the source can support it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


def test_spark_refuses_python_sources_in_real_time_mode(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    events = spark.readStream.format("tailrace").option("uri", replica_set.uri).option("columns", "event").load()
    writer = events.writeStream.format("console").outputMode("update").option("checkpointLocation", str(tmp_path))
    query = writer.trigger(realTime="5 seconds").start()
    with pytest.raises(StreamingQueryException, match="INPUT_STREAM_NOT_SUPPORTED"):
        query.awaitTermination(120)
