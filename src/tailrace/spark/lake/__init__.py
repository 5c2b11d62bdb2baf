"""The lake: change events as a Delta table of Parquet files, in order, exactly once, readable without Tailrace.

``write_stream`` (in ``tailrace.spark.lake.stream``) runs a stream into a lake; ``read`` and ``files`` read it at one
version; ``compact`` and ``verify`` work on a lake that is there, without Spark. Heavy imports happen when a name is
used, as in ``tailrace.spark``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.durable import LakeFullError
    from tailrace.lake.compaction import CompactionResult, compact
    from tailrace.lake.compaction_policy import CompactionPolicy
    from tailrace.lake.verification import LakeReport, verify
    from tailrace.spark.lake.snapshot import files, read

__all__ = [
    "CompactionPolicy",
    "CompactionResult",
    "LakeFullError",
    "LakeReport",
    "compact",
    "files",
    "read",
    "verify",
]

_MODULES = {
    "CompactionPolicy": "tailrace.lake.compaction_policy",
    "CompactionResult": "tailrace.lake.compaction",
    "LakeFullError": "tailrace.durable",
    "LakeReport": "tailrace.lake.verification",
    "compact": "tailrace.lake.compaction",
    "files": "tailrace.spark.lake.snapshot",
    "read": "tailrace.spark.lake.snapshot",
    "verify": "tailrace.lake.verification",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
