"""A listener's statistics, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.act.consumer.standing import ListenerLag
from tailrace.base.metrics_server import UNKNOWN_ENTRIES, Families
from tailrace.core.oplog.entry_kinds import PASSED_OVER

_COUNTERS: Final = {
    "handled": ("changes_handled", "Changes that the handler has returned from"),
    "skipped": ("changes_skipped", "Changes that the error policy passed over"),
    "failures": ("handler_failures", "Times that the handler raised"),
    "commits": ("commits", "Positions written"),
    "leases_lost": ("leases_lost", "Times that a lease was lost or given up"),
    "gaps": ("gaps", "Times that lost history was accepted"),
}
_LAG: Final = "Seconds of cluster time not handled yet; while it stands by, not committed yet"


class ListenerCollector(Collector):
    """Reads the statistics of listeners when it is asked. Names begin with ``tailrace_listener_``; ``resource`` is a
    label. ``lag``: of a listener (``Standing.lag``)."""

    def __init__(self, listeners: Sequence[Any], lag: Callable[[Any], ListenerLag]) -> None:
        self._listeners = listeners
        self._lag = lag

    def collect(self) -> Iterable[Metric]:
        """One family for each statistic."""
        families = Families("tailrace_listener", "resource")
        rows = [(listener.resource, listener.statistics) for listener in self._listeners]
        for attribute, (name, text) in _COUNTERS.items():
            yield families.counter(name, text, *((resource, getattr(one, attribute)) for resource, one in rows))
        versions = ((resource, one.lease_version) for resource, one in rows)
        yield families.gauge("lease_version", "Fencing token of the lease that is held; 0 while none is", *versions)
        lags = [(listener.resource, self._lag(listener)) for listener in self._listeners]
        holds = ((resource, float(lag.holds)) for resource, lag in lags)
        yield families.gauge(
            "holds_lease", "1 while it holds the lease, or that of a lane; 0 while it stands by", *holds
        )
        seconds = [(resource, lag.seconds) for resource, lag in lags if lag.seconds is not None]
        yield families.gauge("lag_seconds", _LAG, *seconds)
        pauses = ((resource, one.paused) for resource, one in rows)
        yield families.gauge("paused", "1 while an operator has paused the resource", *pauses)
        unknown = sorted(PASSED_OVER.copy().items())
        yield Families("tailrace_listener", "kind").counter("unknown_entries", UNKNOWN_ENTRIES, *unknown)
