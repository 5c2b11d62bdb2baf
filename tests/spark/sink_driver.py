"""A driver that writes to DuckDB and to PostgreSQL, and kills itself, the JVM and the workers at a chosen moment.

    python -m tests.spark.sink_driver OPTIONS_JSON CHECKPOINT DUCKDB_FILE [DSN [DIE_AT]]

``DIE_AT`` is ``note <n>`` (the n-th time that a sink's note is written and not yet committed) or ``end <n>`` (after the
n-th batch, before Spark notes it).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from tailrace.spark import AppliedBatches, MicroBatch, foreach_batch, local_session
from tests.spark.sinks import example


def main(options_json: str, checkpoint: str, file: str, dsn: str = "", die_at: str = "never 0") -> None:
    spark = local_session("sink-driver", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("ERROR")
    to_duckdb = example("to_duckdb")
    to_postgresql = example("to_postgresql") if dsn else None
    moment, _, number = die_at.partition(" ")
    left = int(number)

    def passed(name: str) -> None:
        nonlocal left
        left -= name == moment
        if name == moment and left == 0:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    record = AppliedBatches._record

    def recorded(self: Any, *arguments: Any) -> None:
        record(self, *arguments)
        passed("note")

    AppliedBatches._record = recorded  # type: ignore[method-assign]

    def write(batch: MicroBatch) -> None:
        to_duckdb.write(batch, file)
        if to_postgresql is not None:
            to_postgresql.write(batch, dsn)
        passed("end")

    query = (
        spark.readStream.format("tailrace")
        .options(**json.loads(options_json))
        .load()
        .writeStream.foreachBatch(foreach_batch(write))
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
