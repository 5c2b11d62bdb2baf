"""A gateway's statistics, as Prometheus reads them.

The metrics server reads them in a thread of its own. A number may be one event behind, which does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.base.metrics_server import UNKNOWN_ENTRIES, Families
from tailrace.core.oplog.entry_kinds import OTHER_KINDS, PASSED_OVER
from tailrace.errors import CODE_NAMES
from tailrace.watch.gateway.metrics import GatewayMetrics

_PREFIX: Final = "tailrace_gateway"
_COUNTERS: Final = {
    "connections_accepted": "Connections of clients that were accepted",
    "connections_refused": "Connections that were refused because of a limit",
    "handshakes_failed": "Connections that ended before they were encrypted",
    "streams_opened": "Change streams that were opened",
    "batches": "Replies with a first or a next batch",
    "batches_shared": "Of these replies, those that were made for another stream that asks for the same",
    "events": "Change events that were sent to clients",
    "event_bytes": "Bytes of the change events that were sent",
    "client_bytes_received": "Bytes that came from clients",
    "client_bytes_sent": "Bytes that were sent to clients",
    "messages_passed": "Messages of clients that were passed to the server unread",
    "frames_refused": "Messages that were not valid in the wire protocol, or beyond its limits",
    "cursors_expired": "Streams that were closed because nobody asked for more of them",
    "upstream_reads": "Batches of oplog entries that were read from the server",
    "upstream_entries": "Oplog entries that were read from the server",
    "upstream_bytes": "Bytes of oplog entries that were read from the server",
    "stage_cpu_seconds": "CPU seconds that processes took for the stages of streams that may compute for long",
    "processes_ended": "Processes of the gateway that have ended and were started again",
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
    "processes": "Processes of the gateway that serve clients",
    "trouble": "1 while the deployment cannot be read",
}

#: The label of errors whose code has no name (``CODE_NAMES``): mostly faults in stages, of which there are hundreds.
_OTHER_CODES: Final = "other"
_FALLBACKS: Final = ("refused", "slow")


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
        # Every label from the start, so that a first error is an increase and not a new series.
        errors = sorted(_by_label(metrics.errors.copy()).items())
        yield Families(_PREFIX, "code").counter("errors", "Errors that were answered, by the server's code", *errors)
        fallbacks = sorted((dict.fromkeys(_FALLBACKS, 0) | metrics.fallbacks.copy()).items())
        text = "Streams that could not be served from the shared read"
        yield Families(_PREFIX, "reason").counter("fallbacks", text, *fallbacks)
        unknown = sorted(({OTHER_KINDS: 0} | PASSED_OVER.copy()).items())
        yield Families(_PREFIX, "kind").counter("unknown_entries", UNKNOWN_ENTRIES, *unknown)


def _by_label(errors: Mapping[int, int]) -> dict[str, int]:
    """The numbers of errors by their labels, which are always the same."""
    counted = dict.fromkeys((*map(str, CODE_NAMES), _OTHER_CODES), 0)
    for code, count in errors.items():
        counted[str(code) if code in CODE_NAMES else _OTHER_CODES] += count
    return counted
