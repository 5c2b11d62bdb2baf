"""A gateway's statistics: plain numbers, counted up by the gateway in its event loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class GatewayMetrics:
    """What a gateway has done since it started, and how it is now.

    ``read_time``     cluster time, in seconds since 1970, up to which the oplog was read; 0 before the first read
    ``slowest_time``  the same for the stream that is furthest behind; 0 where none is open
    ``errors``        how often an error was answered, by the server's code
    ``fallbacks``     how often a stream could not be served from the shared read, by the reason in a word or two
    """

    connections: int = 0
    connections_accepted: int = 0
    connections_refused: int = 0
    streams: int = 0
    streams_opened: int = 0
    batches: int = 0
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
    read_time: float = 0.0
    slowest_time: float = 0.0
    errors: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def lag(self, now: float) -> tuple[float, float]:
        """How far, in seconds, the read of the oplog and the slowest stream are behind ``now``; 0 where there is
        none."""
        return _behind(now, self.read_time), _behind(now, self.slowest_time)


def _behind(now: float, then: float) -> float:
    return max(0.0, now - then) if then else 0.0
