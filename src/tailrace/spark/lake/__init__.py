"""The lake: change events as a directory of Parquet files, in order, exactly once, readable without Tailrace.

``write_stream`` (in ``tailrace.spark.lake.stream``) runs a stream into a lake; ``compact`` and ``verify`` work on
a lake that is there, without Spark.
"""

from __future__ import annotations

from tailrace.spark.lake.compaction import CompactionPolicy, CompactionResult, compact
from tailrace.spark.lake.durable import LakeFullError, SwapUnsupportedError
from tailrace.spark.lake.verification import LakeReport, verify

__all__ = [
    "CompactionPolicy",
    "CompactionResult",
    "LakeFullError",
    "LakeReport",
    "SwapUnsupportedError",
    "compact",
    "verify",
]
