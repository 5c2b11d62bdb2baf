"""A driver that keeps tables with ``tables_writer`` until it is killed, or has come to the end of what is there.

    python -m tests.spark.tables_driver OPTIONS_JSON CHECKPOINT TABLES PATTERN [DIE_AT]

``DIE_AT`` is ``<step> <n>``: the n-th time that the state, or all tables, have a micro-batch (``tables.state``,
``tables.done``), or that the function has ended and Spark has not noted it (``end``).
"""

from __future__ import annotations

import json
import os
import signal
import sys

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tailrace.base import durable
from tailrace.spark import local_session, tables_writer


def main(options_json: str, checkpoint: str, tables: str, pattern: str, die_at: str = "never 0") -> None:
    options = json.loads(options_json)
    spark = local_session("tables-driver", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("ERROR")
    moment, _, number = die_at.partition(" ")
    left = int(number)

    def passed(name: str) -> None:
        nonlocal left
        left -= name == moment
        if name == moment and left == 0:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    durable.step = passed
    keep = tables_writer(tables, collections=pattern, uri=options["uri"])

    def write(frame: DataFrame, batch: int) -> None:
        keep(frame, batch)
        passed("end")

    events = spark.readStream.format("tailrace").options(**options).load().repartition(3, f.rand())
    writer = events.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
