"""The statistics of a sampled comparison, as Prometheus reads them. Needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.base.metrics_server import Families
from tailrace.watch.compare.pairing import KINDS
from tailrace.watch.compare.sampling import SampledComparison

_PREFIX: Final = "tailrace_compare"


class ComparisonCollector(Collector):
    """Gives the numbers to Prometheus when it scrapes. Names begin with ``tailrace_compare_``."""

    def __init__(self, sampled: SampledComparison) -> None:
        self._sampled = sampled

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        found = self._sampled.numbers
        families = Families(_PREFIX)
        counters = (
            ("events", "Events of the server's own stream that were compared with ours", found.events),
            ("comparisons", "Comparisons of a few seconds that were completed", found.comparisons),
            ("failures", "Comparisons that could not be made or completed", found.failures),
            ("gaps", "Moments at which both streams started again; writes in between were not compared", found.gaps),
            ("seconds", "How long the comparisons took", found.seconds),
        )
        for name, text, value in counters:
            yield families.counter(name, text, value)
        # Every kind from the start, so that a first difference is an increase and not a new series.
        differences = [(kind, found.differences.get(kind, 0)) for kind in sorted(KINDS)]
        yield Families(_PREFIX, "kind").counter("differences", "Differences that were found", *differences)
        yield families.gauge("share", "The share of the time that is compared", self._sampled.share)
