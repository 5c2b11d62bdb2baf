"""A gateway's statistics, as Prometheus reads them.

The metrics server reads them in a thread of its own. A number may be one event behind, which does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.gateway.metrics import GatewayMetrics
from tailrace.metrics_server import UNKNOWN_ENTRIES, Families
from tailrace.oplog.entry_kinds import PASSED_OVER

_PREFIX: Final = "tailrace_gateway"
_COUNTERS: Final = {
    "connections_accepted": "Connections of clients that were accepted",
    "connections_refused": "Connections that were refused because of a limit",
    "handshakes_failed": "Connections that ended before they were encrypted",
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
    "stage_cpu_seconds": "CPU seconds that processes took for the stages of streams that may compute for long",
    "computations_stopped": "Computations of stages that were ended: by a limit, or because somebody killed them",
}
_GAUGES: Final = {
    "connections": "Connections of clients that are open",
    "streams": "Change streams that are open",
    "tails": "Reads of the oplog that are open; all streams share the first",
    "window_bytes": "Bytes of oplog entries that are kept in memory for streams that are behind",
    "window_entries": "Oplog entries that are kept in memory for streams that are behind",
    "lag_seconds": "How far, in cluster time, the slowest stream is behind what was read",
    "stage_processes": "Processes that compute the stages of streams",
    "trouble": "1 while the deployment cannot be read",
}

#: What exists from the start, so that a first error is an increase and not a new series: errors that clients get most.
_ERRORS: Final = dict.fromkeys((13, 43, 50, 91, 136, 146, 237, 280, 286), 0)
_FALLBACKS: Final = {"slow": 0, "refused": 0}


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
        families = Families(_PREFIX)
        for name, text in _COUNTERS.items():
            yield families.counter(name, text, getattr(metrics, name))
        for name, text in _GAUGES.items():
            yield families.gauge(name, text, getattr(metrics, name))
        errors = [(str(code), count) for code, count in sorted((_ERRORS | metrics.errors.copy()).items())]
        yield Families(_PREFIX, "code").counter("errors", "Errors that were answered", *errors)
        fallbacks = sorted((_FALLBACKS | metrics.fallbacks.copy()).items())
        text = "Streams that could not be served from the shared read"
        yield Families(_PREFIX, "reason").counter("fallbacks", text, *fallbacks)
        unknown = sorted(PASSED_OVER.copy().items())
        yield Families(_PREFIX, "kind").counter("unknown_entries", UNKNOWN_ENTRIES, *unknown)
