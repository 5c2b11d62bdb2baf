"""The process that Spark's Python workers are forked from, with the stages, kernel and Arrow loaded already.

Spark starts it as ``python -m tailrace.spark.runtime.worker_daemon`` where ``spark.python.daemon.module`` says so
(``local_session`` does). A worker that loads them by itself takes 0.6 to 1.2 s before its first event, and a query is
given workers that have not read before again and again (measured on two cores: Spark keeps any idle ones). Nothing that
is loaded here starts a thread, opens a connection or reads a clock, so a fork is safe.
"""

from __future__ import annotations

import pyspark.daemon

import tailrace.lake.part_writer
import tailrace.spark.lake.source
import tailrace.spark.reading.slice_reader  # noqa: F401

if __name__ == "__main__":
    pyspark.daemon.manager()
