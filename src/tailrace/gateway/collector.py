"""A gateway's statistics, as Prometheus reads them.

The metrics server reads them in a thread of its own. A number may be one event behind, which does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.gateway.metrics import GatewayMetrics

_PREFIX: Final = "tailrace_gateway"
_COUNTERS: Final = {
    "connections_accepted": "Connections of clients that were accepted",
    "connections_refused": "Connections that were refused because of a limit",
    "streams_opened": "Change streams that were opened",
    "batches": "Replies with a first or a next batch",
    "events": "Change events that were sent to clients",
    "event_bytes": "Bytes of the change events that were sent",
    "client_bytes_received": "Bytes that came from clients",
    "client_bytes_sent": "Bytes that were sent to clients",
    "messages_passed": "Messages of clients that went to the server unread",
    "frames_refused": "Messages that were not valid in the wire protocol, or beyond its limits",
    "cursors_expired": "Streams that were closed because nobody asked for them any more",
    "upstream_reads": "Batches of oplog entries that were read from the server",
    "upstream_entries": "Oplog entries that were read from the server",
    "upstream_bytes": "Bytes of oplog entries that were read from the server",
}
_GAUGES: Final = {
    "connections": "Connections of clients that are open",
    "streams": "Change streams that are open",
    "tails": "Reads of the oplog that are open; all streams share the first",
    "window_bytes": "Bytes of oplog entries that are kept in memory for streams that are behind",
    "window_entries": "Oplog entries that are kept in memory for streams that are behind",
    "lag_seconds": "How far, in cluster time, the slowest stream is behind what was read",
    "trouble": "1 while the deployment cannot be read",
}


class GatewayCollector(Collector):
    """Gives the numbers to Prometheus when it scrapes. Names begin with ``tailrace_gateway_``.

    ``refresh`` is called first, in the server's thread: it may bring numbers up to date that are not counted, such as
    the size of the window.
    """

    def __init__(self, metrics: GatewayMetrics, refresh: Callable[[], object] = lambda: None) -> None:
        self._metrics = metrics
        self._refresh = refresh

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        self._refresh()
        metrics = self._metrics
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=getattr(metrics, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=getattr(metrics, name))
        errors = CounterMetricFamily(f"{_PREFIX}_errors", "Errors that were answered", labels=["code"])
        for code, count in sorted(metrics.errors.copy().items()):
            errors.add_metric([str(code)], count)
        yield errors
        fallbacks = CounterMetricFamily(
            f"{_PREFIX}_fallbacks", "Streams that could not be served from the shared read", labels=["reason"]
        )
        for reason, count in sorted(metrics.fallbacks.copy().items()):
            fallbacks.add_metric([reason], count)
        yield fallbacks
