"""How much of an oplog one query with a filter may cover.

The server answers a query only when it has something to give or is at the end, and a filter may leave it nothing to
give for hours of oplog. So such a range is read in windows of cluster time, which grow while replies are quick: the
reader can promise something after each, and no reply outlasts the socket's time limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from tailrace.core.oplog.cluster_time import ClusterTime

_FIRST_S: Final = 60
_LONGEST_S: Final = 7 * 24 * 3600
#: A reply that takes this long is worth half the window, one that takes a quarter of it worth twice the window.
_LONG_REPLY_S: Final = 2.0


class Window:
    """The length of the next window. ``oplog_filter`` ``None``: one window is the whole range."""

    def __init__(self, oplog_filter: bytes | None) -> None:
        self.oplog_filter = oplog_filter
        self._seconds: float = _FIRST_S

    def end(self, after: ClusterTime, until: ClusterTime) -> ClusterTime:
        """Where the window after ``after`` ends, inclusive."""
        if self.oplog_filter is None:
            return until
        return min(until, ClusterTime.of(after.seconds + max(1, int(self._seconds)), 0))

    def shrink(self) -> None:
        """A read was cut off: perhaps because it took too long."""
        self._seconds = max(1.0, self._seconds / 8)

    def timed(self, replies: Iterator[bytes]) -> Iterator[bytes]:
        """The replies of one window. The slowest one decides on the next window's length."""
        slowest = 0.0
        while True:
            begun = time.monotonic()
            reply = next(replies, None)
            slowest = max(slowest, time.monotonic() - begun)
            if reply is None:
                break
            yield reply
        if slowest > _LONG_REPLY_S:
            self._seconds = max(1.0, self._seconds / 2)
        elif slowest < _LONG_REPLY_S / 4:
            self._seconds = min(float(_LONGEST_S), self._seconds * 2)
