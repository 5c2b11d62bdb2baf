"""What a streaming query's progress says about its change stream, and the same for Prometheus.

from tailrace.lake.spark.monitoring import MetricsListener, counted

listener = MetricsListener()
spark.streams.addListener(listener)
with listener.serve("127.0.0.1", 9464):
    counted(spark.readStream.format("tailrace")...load()).writeStream...
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.listener import StreamingQueryListener

from tailrace.base.health import Health
from tailrace.core.event.event_block import OPERATION_TYPES
from tailrace.lake.spark.planning.backlog import Backlog, backlog_in, worst
from tailrace.lake.spark.query_numbers import QueryNumbers

if TYPE_CHECKING:
    from prometheus_client.registry import Collector
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )

#: The name of the observed metrics: ``events``, and one for each kind of operation.
OBSERVED: Final = "tailrace"
#: The kinds of operation that are counted: the server's, and those of documents that were copied.
OPERATIONS: Final = (*OPERATION_TYPES[1:], "snapshot")

_log = logging.getLogger("tailrace.spark")


def counted(rows: DataFrame) -> DataFrame:
    """The rows of ``format("tailrace")``; from now on, each progress report has their number by operation
    (``observedMetrics["tailrace"]``): ``events``, ``insert``, ``update``, ... The column ``operation_type`` must be
    there."""
    kinds = {kind: f"count_if(operation_type = '{kind}')" for kind in OPERATIONS}
    return _observed(rows, {"events": "count(1)", **kinds})


def counted_files(rows: DataFrame) -> DataFrame:
    """The same for a lake's source, whose rows are files."""
    counts = ("quarantined", *OPERATIONS)
    found = {kind: f"cast(get_json_object(operations, '$.{kind}') as bigint)" for kind in counts}
    # Events that were put aside are in a file too.
    sums = {"events": f"rows - coalesce({found['quarantined']}, 0L)", **found}
    return _observed(rows, {name: f"coalesce(sum({one}), 0L)" for name, one in sums.items()})


def _observed(rows: DataFrame, metrics: Mapping[str, str]) -> DataFrame:
    """``metrics`` are SQL: PySpark's functions each call the JVM, which took 0.1 s of a query of 1.1 s."""
    from pyspark.sql.functions import expr  # noqa: PLC0415

    return rows.observe(OBSERVED, *(expr(f"{metric} as `{name}`") for name, metric in metrics.items()))


def backlog_of(progress: StreamingQueryProgress) -> Backlog | None:
    """How far a query is behind; ``None`` if none of its sources is a change stream, or nothing is known yet."""
    found = (backlog_in(source.latestOffset) for source in progress.sources)
    return worst(one for one in found if one is not None)


def rows_by_operation(progress: StreamingQueryProgress) -> dict[str, int]:
    """The micro-batch's rows by operation, without the operations that it has no rows of. Empty where they are not
    counted."""
    observed = progress.observedMetrics.get(OBSERVED)
    if observed is None:
        return {}
    found: Mapping[str, Any] = observed.asDict()
    return {kind: found[kind] for kind in OPERATIONS if found.get(kind)}


class MetricsListener(StreamingQueryListener):
    """Follows all queries of a session: ``spark.streams.addListener(MetricsListener())``. Logs a warning (logger
    ``tailrace.spark``) when a query comes nearer to the oplog's old end than to its new one.

    Prometheus gets, by query (its name, or its id): ``tailrace_query_active``, ``tailrace_query_batches_total``,
    ``tailrace_query_batch_seconds``, ``tailrace_query_rows_total`` by operation, ``tailrace_query_lag_seconds``,
    ``tailrace_query_lag_bytes``, ``tailrace_query_oplog_seconds_left``.
    """

    def __init__(self) -> None:
        super().__init__()
        #: By name, or id: queries that follow one another under one name are one to Prometheus, which refuses doubles.
        self._queries: dict[str, QueryNumbers] = {}
        self._runs: dict[str, str] = {}
        self._lock = threading.Lock()

    def serve(
        self,
        host: str,
        port: int,
        *,
        beside: Sequence[Collector] = (),
        health: Callable[[], Health] | None = None,
    ) -> AbstractContextManager[str]:
        """Serve the numbers over HTTP while the block runs, with those of other collectors of ``prometheus_client``
        ``beside`` them, and ``health``, by default that of the queries. Gives the address. Needs the extra
        ``metrics``. Raises SinkError if the address cannot be used."""
        from tailrace.base.metrics_server import serve_metrics  # noqa: PLC0415  not without prometheus_client
        from tailrace.lake.spark.query_collector import QueryCollector  # noqa: PLC0415

        return serve_metrics(QueryCollector(self.snapshot), host, port, beside=beside, health=health or self.health)

    def health(self) -> Health:
        """Ready while all queries run, and none is nearer to the oplog's old end than to its new one."""
        known = list(self.snapshot())
        begun = bool(known)
        for one in known:
            if not one.active:
                return Health("", unready=f"the query {one.name} has ended")
            if one.backlog is not None and one.backlog.in_danger:
                return Health("", unready=f"{one.name}: {one.backlog.warning()}")
        return Health(f"{len(known)} queries are running" if begun else "no query has started yet", begun=begun)

    def snapshot(self) -> Iterable[QueryNumbers]:
        """The present numbers."""
        with self._lock:
            return [
                QueryNumbers(one.name, one.batches, Counter(one.rows), one.backlog, one.seconds, one.active)
                for one in self._queries.values()
            ]

    def _query(self, of: QueryStartedEvent | StreamingQueryProgress) -> QueryNumbers:
        name = of.name or str(of.id)
        self._runs[name] = str(of.runId)
        return self._queries.setdefault(name, QueryNumbers(name))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        with self._lock:
            self._query(event).active = True

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        self.add(event.progress)

    def add(self, progress: StreamingQueryProgress) -> None:
        """Count a micro-batch's progress."""
        backlog = backlog_of(progress)
        with self._lock:
            query = self._query(progress)
            was = query.backlog is not None and query.backlog.in_danger
            query.batches += 1
            query.rows.update(rows_by_operation(progress))
            query.seconds = progress.batchDuration / 1000
            query.backlog = backlog or query.backlog
        if backlog is not None and backlog.in_danger and not was:
            _log.warning("%s: %s", query.name, backlog.warning())

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Nothing has changed."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        with self._lock:
            for name, run in self._runs.items():
                if run == str(event.runId):  # Spark may tell so after the next run has begun
                    self._queries[name].active = False
