"""A driver that writes a lake, to be killed: from outside at any moment, or by its own sink at a step of a commit.

python -m tests.spark.lake_driver OPTIONS_JSON LAKE [--die-at STEP TIMES] [--available-now]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Mapping

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from tailrace import durable
from tailrace.spark import local_session
from tailrace.spark.lake import CompactionPolicy
from tailrace.spark.lake.sink import LakeSink, LakeStreamWriter
from tailrace.spark.lake.stream import write_stream


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("options")
    parser.add_argument("lake")
    parser.add_argument("--die-at", nargs=2)
    parser.add_argument("--available-now", action="store_true")
    parser.add_argument("--on-error", default="fail")
    args = parser.parse_args()
    spark = local_session("lake-driver", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("ERROR")
    query = write_stream(
        spark,
        json.loads(args.options),
        args.lake,
        available_now=args.available_now,
        compaction=CompactionPolicy(every=4, fan_in=2),
        on_error=args.on_error,
        sink=LakeSink if args.die_at is None else dying_sink(args.die_at[0], int(args.die_at[1]), os.getpgid(0)),
    )
    query.awaitTermination()


def dying_sink(step: str, times: int, group: int) -> type[LakeSink]:
    """The lake's sink, but at the ``times``-th ``step`` it kills the driver, the JVM and itself. The class goes to
    Spark's Python processes by value, so nothing of this is in the sink itself."""

    class DyingWriter(LakeStreamWriter):
        def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            left = times

            def observe(name: str) -> None:
                nonlocal left
                left -= name == step
                if left == 0:
                    os.killpg(group, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)

            durable.observe_steps(observe)
            super().commit(messages, batchId)

    class DyingSink(LakeSink):
        def streamWriter(self, schema: StructType, overwrite: bool) -> LakeStreamWriter:  # noqa: N802
            options: Mapping[str, str] = self.options
            return DyingWriter(schema, options)

    return DyingSink


if __name__ == "__main__":
    main()
