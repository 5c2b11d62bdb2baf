"""MongoDB change events as a Spark data source: ``spark.readStream.format("tailrace")``.

``foreach_batch`` and ``AppliedBatches`` are for sinks of one's own. Heavy imports happen when a name is used: Spark
imports this package in each of its Python processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.spark.applied import AppliedBatches
    from tailrace.spark.batch import MicroBatch, foreach_batch
    from tailrace.spark.runtime.session import local_session, register

__all__ = ["AppliedBatches", "MicroBatch", "foreach_batch", "local_session", "register"]

_MODULES = {
    "AppliedBatches": "tailrace.spark.applied",
    "MicroBatch": "tailrace.spark.batch",
    "foreach_batch": "tailrace.spark.batch",
    "local_session": "tailrace.spark.runtime.session",
    "register": "tailrace.spark.runtime.session",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
