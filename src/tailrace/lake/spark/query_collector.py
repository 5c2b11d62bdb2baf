"""Streaming queries' numbers, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.lake.spark.query_numbers import QueryNumbers

_PREFIX: Final = "tailrace_query"
#: Name, text, and how a query says it; ``None``: not known.
_GAUGES: Final[tuple[tuple[str, str, Callable[[Any], float | None]], ...]] = (
    ("active", "1 while the query runs", lambda one: int(one.active)),
    ("batch_seconds", "How long the last micro-batch took", lambda one: one.seconds),
    (
        "lag_seconds",
        "How far, in cluster time, the query is behind the newest majority-committed entry",
        lambda one: one.backlog and one.backlog.seconds,
    ),
    (
        "lag_bytes",
        "About how many bytes of the oplogs the query has not read yet",
        lambda one: one.backlog and one.backlog.bytes,
    ),
    (
        "oplog_seconds_left",
        "How much older the oldest oplog entry is than the query's position",
        lambda one: one.backlog and one.backlog.seconds_left,
    ),
)


class QueryCollector(Collector):
    """Gives the numbers to Prometheus when it scrapes. ``queries`` is called in the server's thread."""

    def __init__(self, queries: Callable[[], Iterable[QueryNumbers]]) -> None:
        self._queries = queries

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        queries = list(self._queries())
        batches = CounterMetricFamily(f"{_PREFIX}_batches", "Micro-batches", labels=["query"])
        rows = CounterMetricFamily(f"{_PREFIX}_rows", "Rows by operation", labels=["query", "operation"])
        for query in queries:
            batches.add_metric([query.name], query.batches)
            for operation, count in sorted(query.rows.items()):
                rows.add_metric([query.name, operation], count)
        yield batches
        yield rows
        for name, text, value_of in _GAUGES:
            family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["query"])
            for query in queries:
                value = value_of(query)
                if value is not None:
                    family.add_metric([query.name], value)
            yield family
