"""A gateway's statistics: plain numbers, counted up by the gateway in its event loop."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from tailrace.read.tail.shared_tail import TailStatistics


@dataclass(slots=True)
class GatewayMetrics:
    """What a gateway has done since it started, and how it is now.

    ``lag_seconds``  how far, in cluster time, the slowest stream is behind what was read
    ``trouble``      1 while the deployment cannot be read, else 0
    ``batches_shared``  how many of the batches another stream has made that asks the same
    ``errors``       how often an error was answered, by the server's code
    ``fallbacks``    how often a stream could not be served from the shared read, by reason: ``slow`` (it read for
                     itself) or ``refused`` (the engine refused it and left the answer to the server)
    ``processes``    that serve clients, and ``processes_ended`` that had to be started again
    """

    connections: int = 0
    connections_accepted: int = 0
    connections_refused: int = 0
    handshakes_failed: int = 0
    streams: int = 0
    streams_opened: int = 0
    batches: int = 0
    batches_shared: int = 0
    events: int = 0
    event_bytes: int = 0
    client_bytes_received: int = 0
    client_bytes_sent: int = 0
    messages_passed: int = 0
    frames_refused: int = 0
    cursors_expired: int = 0
    tails: int = 0
    upstream_reads: int = 0
    upstream_entries: int = 0
    upstream_bytes: int = 0
    window_bytes: int = 0
    window_entries: int = 0
    lag_seconds: float = 0
    trouble: int = 0
    stage_processes: int = 0
    stage_cpu_seconds: float = 0
    computations_stopped: int = 0
    processes: int = 1
    processes_ended: int = 0
    errors: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def saw_tail(self, tail: TailStatistics) -> None:
        """Take over the statistics of the shared read."""
        self.tails = 1 if tail.joined else 0
        self.upstream_reads, self.upstream_entries, self.upstream_bytes = tail.reads, tail.entries, tail.bytes
        self.window_bytes, self.window_entries = tail.window_bytes, tail.window_entries
        self.lag_seconds = tail.lag_seconds
        self.trouble = 0 if tail.trouble is None else 1
        if tail.fallbacks:
            self.fallbacks["slow"] = tail.fallbacks

    def without_gauges(self) -> GatewayMetrics:
        """What a process has done that has ended."""
        copy = dataclasses.replace(self)
        for name in GAUGES:
            setattr(copy, name, 0)
        return copy


#: How it is now; the others count what was done.
GAUGES: Final = (
    *("connections", "streams", "tails", "window_bytes", "window_entries", "lag_seconds", "stage_processes", "trouble"),
    "processes",
)
_LARGEST: Final = ("lag_seconds", "trouble", "tails")


def together(parts: Sequence[GatewayMetrics]) -> GatewayMetrics:
    """Those of several processes: sums, the longest lag, and whether any has trouble."""
    total = GatewayMetrics()
    for each in fields(GatewayMetrics):
        values = [getattr(part, each.name) for part in parts]
        if each.name in ("errors", "fallbacks"):
            setattr(total, each.name, sum(values, Counter()))
        else:
            setattr(total, each.name, max(values, default=0) if each.name in _LARGEST else sum(values))
    return total
