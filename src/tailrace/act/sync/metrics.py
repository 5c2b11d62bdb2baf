"""The statistics of a sync, as Prometheus reads them. Needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.act.sync.progress import SyncProgress
from tailrace.base.metrics_server import Families

_PREFIX: Final = "tailrace_sync"


class SyncCollector(Collector):
    """Gives the numbers to Prometheus when it scrapes. Names begin with ``tailrace_sync_``. ``look`` must not wait."""

    def __init__(self, look: Callable[[], SyncProgress]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        found = self._look()
        families = Families(_PREFIX)
        yield families.counter("documents_copied", "Documents that were copied", found.documents)
        yield families.counter("bytes_copied", "Bytes of documents that were copied", found.bytes)
        yield families.counter("changes", "Changes of documents that were applied", found.changes)
        yield families.gauge("documents_estimate", "About how many documents there are to copy", found.of)
        yield families.gauge("consistent", "1 while the target equals the source at its position", found.is_consistent)
        yield families.gauge("paused", "1 while the sync is paused", found.paused)
        yield families.gauge("blocked", "1 while a definition is being applied", found.blocked_by is not None)
        if found.time is not None:
            yield families.gauge("position_seconds", "The position, in Unix seconds", found.time.seconds)
        if found.lag_s is not None:
            yield families.gauge("lag_seconds", "How far the target is behind the source's last write", found.lag_s)
        if found.reach_s is not None:
            text = "How long the source's oplog will still hold what comes next"
            yield families.gauge("oplog_reach_seconds", text, found.reach_s)
        if found.verified is not None:
            text = "Differences that the last verification found"
            yield families.gauge("differences", text, found.verified["differences"])
