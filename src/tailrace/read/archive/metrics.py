"""The statistics of a recorder, as Prometheus reads them. Needs the extra ``metrics``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tailrace.base.metrics_server import UNKNOWN_ENTRIES, Families
from tailrace.read.archive.recorder import Recorder

_PREFIX: Final = "tailrace_archive"
_COUNTERS: Final = {
    "entries": "Oplog entries that were archived",
    "bytes": "Bytes of these entries",
    "images": "Pre-images that were archived",
    "segments": "Segments that were published",
    "expired": "Segments that were deleted because of their age or the archive's size",
}


class ArchiveCollector(Collector):
    """Gives the numbers to Prometheus when it scrapes, each by oplog. Names begin with ``tailrace_archive_``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        written = self._recorder.statistics()
        families = Families(_PREFIX, "oplog")
        for name, text in _COUNTERS.items():
            yield families.counter(name, text, *((oplog, getattr(one, name)) for oplog, one in written.items()))
        unknown: Counter[str] = Counter()
        for one in written.values():
            unknown.update(one.unknown.copy())
        yield Families(_PREFIX, "kind").counter("unknown_entries", UNKNOWN_ENTRIES, *sorted(unknown.items()))
        until = [(oplog, one.until.seconds) for oplog, one in written.items() if one.until]
        yield families.gauge("until_seconds", "Cluster time up to which the archive is on disk", *until)
        lag = [(oplog, max(0.0, time.time() - seconds)) for oplog, seconds in until]
        yield families.gauge("lag_seconds", "How long ago that was, by this machine's clock", *lag)
