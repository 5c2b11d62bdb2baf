"""MongoDB change events as a Spark data source: ``spark.readStream.format("tailrace")``.

``tables_writer`` keeps current-state tables from a query's events. ``foreach_batch``, ``AppliedBatches`` and
``kafka_records`` are for sinks of one's own, ``MetricsListener``, ``backlog_of`` and ``counted`` for operating a query.
Heavy imports happen when a name is used: Spark imports this module in each of its Python processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.faces import lazily

if TYPE_CHECKING:
    from tailrace.lake.spark.applied import AppliedBatches
    from tailrace.lake.spark.batch import MicroBatch, document_of, foreach_batch
    from tailrace.lake.spark.monitoring import MetricsListener, backlog_of, counted
    from tailrace.lake.spark.records import kafka_records
    from tailrace.lake.spark.runtime.session import local_session, register
    from tailrace.lake.spark.tables_writer import tables_writer

__all__ = [
    "AppliedBatches",
    "MetricsListener",
    "MicroBatch",
    "backlog_of",
    "counted",
    "document_of",
    "foreach_batch",
    "kafka_records",
    "local_session",
    "register",
    "tables_writer",
]

__getattr__ = lazily(
    __name__,
    {
        "AppliedBatches": "tailrace.lake.spark.applied",
        "MetricsListener": "tailrace.lake.spark.monitoring",
        "MicroBatch": "tailrace.lake.spark.batch",
        "backlog_of": "tailrace.lake.spark.monitoring",
        "counted": "tailrace.lake.spark.monitoring",
        "document_of": "tailrace.lake.spark.batch",
        "foreach_batch": "tailrace.lake.spark.batch",
        "kafka_records": "tailrace.lake.spark.records",
        "local_session": "tailrace.lake.spark.runtime.session",
        "register": "tailrace.lake.spark.runtime.session",
        "tables_writer": "tailrace.lake.spark.tables_writer",
    },
)
