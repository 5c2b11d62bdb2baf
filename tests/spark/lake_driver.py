"""A driver that writes a lake, to be killed: from outside at any moment, or by its own sink at a step of a commit.

python -m tests.spark.lake_driver OPTIONS_JSON LAKE [--die-at STEP TIMES] [--available-now] [--state DIR]
"""

from __future__ import annotations

import argparse
import json
import os

from tailrace.lake import CompactionPolicy, IcebergSettings
from tailrace.lake.spark.store.sink import LakeSink
from tailrace.lake.spark.store.stream import write_stream
from tailrace.spark import local_session
from tests.spark.dying_sink import dying_sink


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("options")
    parser.add_argument("lake")
    parser.add_argument("--die-at", nargs=2)
    parser.add_argument("--available-now", action="store_true")
    parser.add_argument("--on-error", default="fail")
    parser.add_argument("--iceberg")
    parser.add_argument("--state")
    args = parser.parse_args()
    spark = local_session("lake-driver", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("ERROR")
    query = write_stream(
        spark,
        json.loads(args.options),
        args.lake,
        state=args.state,
        available_now=args.available_now,
        compaction=CompactionPolicy(every=4, fan_in=2),
        on_error=args.on_error,
        iceberg=None if args.iceberg is None else IcebergSettings.from_text(args.iceberg),
        sink=LakeSink if args.die_at is None else dying_sink(args.die_at[0], int(args.die_at[1]), os.getpgid(0)),
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
