"""The cluster's clock: a hybrid logical clock that its members keep together by gossip (semantics 10).

What may live here: comparing, ticking and passing on cluster times. Nothing here reads a wall clock: the caller of a
tick says what time it is. Three rules make the order causal: a member that writes takes a time above everything it has
seen (``tick``); a message carries the largest time its sender has seen (``document``); its receiver adopts that time
if it is larger (``gossip``). So if one write was known when another was made, it has the smaller time, whichever shards
they are on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.raw_bson import TIMESTAMP
from tailrace.errors import UsageError

#: The server's increments are signed: after the last one comes the next second.
_INCREMENT_MAX: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class SeenTime:
    """A ``$clusterTime`` document as a member sent it: its time, and its bytes with the signature."""

    cluster_time: ClusterTime
    document: bytes

    @classmethod
    def parse(cls, document: bytes) -> SeenTime:
        """From the BSON of ``{clusterTime, signature}``. Raises ``UsageError`` where it has no timestamp
        ``clusterTime``."""
        element = raw_bson.find(document, b"clusterTime")
        if element is None or element.type != TIMESTAMP:
            raise UsageError("a $clusterTime document has no timestamp clusterTime")
        return cls(ClusterTime.from_bytes_le(raw_bson.value(document, element)), bytes(document))


class ClusterClock:
    """The largest cluster time seen so far, with the signed document that proves it.

    ``now`` only grows. A time that ``tick`` made has no signature: only members make such times and sign them.
    """

    __slots__ = ("_document", "_now")

    def __init__(self, now: ClusterTime = ZERO) -> None:
        self._now = now
        self._document: bytes | None = None

    @property
    def now(self) -> ClusterTime:
        return self._now

    @property
    def document(self) -> bytes | None:
        """The ``$clusterTime`` to send along: the largest one received, its bytes as received. ``None`` before any."""
        return self._document

    def gossip(self, document: bytes) -> bool:
        """Take over a ``$clusterTime`` document that a member sent; whether it was larger than what was known.

        Taking it twice, or several in another order, comes to the same. Of equal times the first signature stays.
        """
        seen = SeenTime.parse(document)
        if self._document is not None and seen.cluster_time <= SeenTime.parse(self._document).cluster_time:
            return False
        self._document = seen.document
        advanced = seen.cluster_time > self._now
        self._now = max(self._now, seen.cluster_time)
        return advanced

    def advance(self, seen: ClusterTime) -> bool:
        """Take over a bare time (an ``operationTime``, a token's); nothing to pass on. Whether it was larger."""
        if seen <= self._now:
            return False
        self._now = seen
        return True

    def tick(self, wall_seconds: int = 0) -> ClusterTime:
        """The time of a new write: the wall clock's second where that is ahead, else the next increment."""
        seconds, increment = self._now.seconds, self._now.increment
        if wall_seconds > seconds:
            self._now = ClusterTime.of(wall_seconds, 1)
        elif increment >= _INCREMENT_MAX:
            self._now = ClusterTime.of(seconds + 1, 1)
        else:
            self._now = ClusterTime.of(seconds, increment + 1)
        return self._now
