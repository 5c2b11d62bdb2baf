"""A listener's statistics, as Prometheus reads them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_COUNTERS: Final = {
    "handled": ("changes_handled", "Changes that the handler has returned from"),
    "skipped": ("changes_skipped", "Changes that the error policy passed over"),
    "failures": ("handler_failures", "Times that the handler raised"),
    "commits": ("commits", "Positions written"),
    "leases_lost": ("leases_lost", "Times that a lease was lost or given up"),
    "gaps": ("gaps", "Times that lost history was accepted"),
}


class ListenerCollector(Collector):
    """Reads the statistics of listeners when it is asked. Names begin with ``tailrace_listener_``; ``resource`` is a
    label."""

    def __init__(self, listeners: Sequence[Any]) -> None:
        self._listeners = listeners

    def collect(self) -> Iterable[Metric]:
        """One family for each statistic."""
        rows = [([listener.resource], listener.statistics) for listener in self._listeners]
        for attribute, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"tailrace_listener_{name}", text, labels=["resource"])
            for labels, statistics in rows:
                counter.add_metric(labels, getattr(statistics, attribute))
            yield counter
        version = GaugeMetricFamily(
            "tailrace_listener_lease_version",
            "Fencing token of the lease that is held; 0 while none is",
            labels=["resource"],
        )
        lag = GaugeMetricFamily(
            "tailrace_listener_lag_seconds",
            "Now minus the cluster time that everything was handled up to",
            labels=["resource"],
        )
        for labels, statistics in rows:
            version.add_metric(labels, statistics.lease_version)
            if statistics.position_time:
                lag.add_metric(labels, max(0.0, time.time() - statistics.position_time))
        yield version
        yield lag
