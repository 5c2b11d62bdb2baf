"""Cluster time: the server's hybrid logical clock, (seconds, increment) compared as one 64-bit pair (semantics 10)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from bson.timestamp import Timestamp

#: Of the last cluster time of a second, which stands for the whole second.
_LAST: Final = 0xFFFFFFFF


class ClusterTime(int):
    """A cluster time as one integer: seconds in the high 32 bits, increment in the low 32.

    The packing is that of a BSON timestamp and of an oplog record id, so order is plain integer order.
    """

    __slots__ = ()

    @classmethod
    def of(cls, seconds: int, increment: int) -> ClusterTime:
        return cls((seconds << 32) | increment)

    @classmethod
    def from_timestamp(cls, timestamp: Timestamp) -> ClusterTime:
        return cls((timestamp.time << 32) | timestamp.inc)

    @classmethod
    def from_bytes_le(cls, data: bytes) -> ClusterTime:
        """From the 8 bytes of a BSON timestamp value."""
        return cls(int.from_bytes(data, "little"))

    @property
    def seconds(self) -> int:
        return int(self) >> 32

    @property
    def increment(self) -> int:
        return int(self) & 0xFFFFFFFF

    def tick(self) -> ClusterTime:
        """The next cluster time: the increment plus one (what the server starts a new stream at)."""
        return ClusterTime(self + 1)

    def to_timestamp(self) -> Timestamp:
        return Timestamp(self.seconds, self.increment)

    def to_bytes_le(self) -> bytes:
        """The 8 bytes of a BSON timestamp value."""
        return int(self).to_bytes(8, "little")

    def for_programs(self) -> str:
        """``Timestamp(seconds, increment)``: for JSON that programs read, and in the words of the server."""
        return f"Timestamp({self.seconds}, {self.increment})"

    def __str__(self) -> str:
        """Date and time, and ``seconds,increment`` as the command line takes it; a whole second has the date and time
        alone."""
        text = f"{datetime.fromtimestamp(self.seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
        return text if self.increment == _LAST else f"{text} ({self.seconds},{self.increment})"

    def __repr__(self) -> str:
        return f"ClusterTime.of({self.seconds}, {self.increment})"


ZERO = ClusterTime(0)
