"""A listener's statistics, as Prometheus reads them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.metrics_server import UNKNOWN_ENTRIES, Families
from tailrace.oplog.entry_kinds import PASSED_OVER

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
        families = Families("tailrace_listener", "resource")
        rows = [(listener.resource, listener.statistics) for listener in self._listeners]
        for attribute, (name, text) in _COUNTERS.items():
            yield families.counter(name, text, *((resource, getattr(one, attribute)) for resource, one in rows))
        versions = ((resource, one.lease_version) for resource, one in rows)
        yield families.gauge("lease_version", "Fencing token of the lease that is held; 0 while none is", *versions)
        lags = [(resource, max(0.0, time.time() - one.position_time)) for resource, one in rows if one.position_time]
        yield families.gauge("lag_seconds", "Now minus the cluster time that everything was handled up to", *lags)
        unknown = sorted(PASSED_OVER.copy().items())
        yield Families("tailrace_listener", "kind").counter("unknown_entries", UNKNOWN_ENTRIES, *unknown)
