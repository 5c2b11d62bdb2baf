"""One side of a comparison: a stream that is read in a thread of its own, no further ahead than there is room for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Condition
from typing import Any, Final, Protocol

from bson.raw_bson import RawBSONDocument

from tailrace.base.threads import CheckedThread
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError
from tailrace.watch.client.patience import try_next_patiently

#: After how many events or bytes a side passes on what it has read, or when there is nothing more at hand.
_CHUNK_EVENTS: Final = 500
_CHUNK_BYTES: Final = 1 << 20
#: Where the token's type stands in the digits of tokens of version 1 and 2.
_TYPE: Final = slice(22, 24)
_EVENT: Final = "2C"
_ROOM_S: Final = 0.2
_END_S: Final = 30.0


class EventStream(Protocol):
    """What a comparison uses of a change stream; events are ``RawBSONDocument``."""

    @property
    def alive(self) -> bool: ...
    @property
    def has_next(self) -> bool: ...
    @property
    def resume_token(self) -> Any: ...
    @property
    def statistics(self) -> Any: ...
    def try_next(self) -> Any: ...
    def close(self) -> None: ...


#: Opens a side's stream; it is given where to begin, as parameters of ``watch``.
Opener = Callable[[Mapping[str, Any]], EventStream]


class ReadingPace:
    """At most this many events and this many bytes a second, on average since it began; ``None``: as many as come."""

    def __init__(
        self,
        events_per_second: float | None,
        bytes_per_second: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events_s = 0.0 if events_per_second is None else 1 / events_per_second
        self._bytes_s = 0.0 if bytes_per_second is None else 1 / bytes_per_second
        self._clock = clock
        self._begun = clock()
        self._spent = 0.0
        #: What is read between two waits: a tenth of a second's part, so that the limit holds inside a second too.
        self.chunk_events = _part(events_per_second, _CHUNK_EVENTS)
        self.chunk_bytes = _part(bytes_per_second, _CHUNK_BYTES)
        #: How long readers had to wait so far.
        self.waited_s = 0.0

    def wait_s(self, events: int, size: int = 0) -> float:
        """How long to wait after these many more events and bytes."""
        self._spent += max(events * self._events_s, size * self._bytes_s)
        ahead = self._begun + self._spent - self._clock()
        if ahead < -1.0:  # a quiet time is not made up for
            self._begun, self._spent = self._clock(), 0.0
        wait = max(0.0, ahead)
        self.waited_s += wait
        return wait


def _part(per_second: float | None, most: int) -> int:
    return most if per_second is None else max(1, min(most, int(per_second / 10)))


class SideReader:
    """Reads one side's stream until it ends or ``stop`` is called.

    ``changed``  its lock guards what both sides have read, and it is notified when there is more
    ``room``     of bytes for events that nobody has taken yet
    ``has_one_oplog``  the events are all of one oplog, and the stream leaves none of them out
    """

    def __init__(
        self,
        name: str,
        opener: Opener,
        start: Mapping[str, Any],
        *,
        changed: Condition,
        room: int,
        pace: ReadingPace,
        has_one_oplog: bool = False,
    ) -> None:
        self.name = name
        #: What ended the stream: an error; ``None`` with ``ended`` where it was closed by an invalidation.
        self.error: TailraceError | None = None
        self.ended = self.opened = False
        #: Looks that have found nothing, and the time that the side has passed: all before it was given.
        self.idle_looks = 0
        self.promise = ClusterTime(0)
        #: Where the stream could go on, as of its last look that found nothing.
        self.idle_token: Mapping[str, Any] | None = None
        self.unknown_operations: Counter[str] = Counter()
        self._opener, self._start, self._changed, self._room, self._pace = opener, start, changed, room, pace
        self._has_one_oplog = has_one_oplog
        self._idle_in_a_row = 0
        self._has_given = False
        self._events: list[bytes] = []
        self._size = 0
        self._stopped = self._held = False
        self._thread = CheckedThread(self._read, f"compare {name}", failed=self._fail)

    def start(self) -> None:
        """Open the stream and read it."""
        self._thread.start()

    def stop(self) -> None:
        """End it. What it holds on the server is given back when its wait there is over."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the stream is closed; one that hangs in an outage is left to its end."""
        self._thread.join(_END_S)

    def take(self) -> list[bytes]:
        """The events that were read and not taken yet. The caller holds the lock."""
        events, self._events, self._size = self._events, [], 0
        return events

    def hold(self, held: bool) -> None:
        """Whether to read no more for now. The caller holds the lock."""
        self._held = held
        self._changed.notify_all()

    def _read(self) -> None:
        stream = self._opener(self._start)
        try:
            with self._changed:
                self.opened = True
            while not self._stopped and stream.alive:
                self._take_chunk(stream)
        finally:
            self.unknown_operations = Counter(stream.statistics.unknown_operations)
            stream.close()
        with self._changed:
            self.ended = not self._stopped
            self._changed.notify_all()

    def _take_chunk(self, stream: EventStream) -> None:
        events: list[bytes] = []
        size = 0
        found: RawBSONDocument | None = None
        try:
            while True:
                found = try_next_patiently(stream)
                if found is None:
                    break
                events.append(raw_bson.bytes_of(found))
                size += len(events[-1])
                if not stream.has_next or len(events) >= self._pace.chunk_events or size >= self._pace.chunk_bytes:
                    break
        finally:  # a stream that fails has given what came before
            with self._changed:
                self._events += events
                self._size += size
        token = stream.resume_token if found is None else None
        with self._changed:
            if events:
                self._idle_in_a_row = 0
                self._has_given = True
            elif token is not None:
                self.idle_looks += 1
                self._idle_in_a_row += 1
                self.idle_token = token
                self.promise = self._promised(token)
            self._changed.notify_all()
            deadline = time.monotonic() + self._pace.wait_s(len(events), size)
            while not self._stopped:
                left = deadline - time.monotonic()
                if left <= 0 and self._size < self._room and not self._held:
                    break
                self._changed.wait(max(_ROOM_S / 10, min(left, _ROOM_S)))

    def _promised(self, token: Mapping[str, Any]) -> ClusterTime:
        """What a read that has found nothing promises. Of one oplog, all that an entry gives comes at once: whoever has
        looked twice after an event for nothing has all events of its time. Not after the event that it is resumed
        from, though: there a server may not have begun to read yet."""
        time = time_of(token)
        is_own = self._has_given and token["_data"][_TYPE] == _EVENT
        return time.tick() if self._has_one_oplog and is_own and self._idle_in_a_row > 1 else time

    def _fail(self, error: TailraceError) -> None:
        with self._changed:
            self.error, self.ended = error, not self._stopped
            self._changed.notify_all()


def time_of(token: Mapping[str, Any]) -> ClusterTime:
    """The cluster time of a resume token."""
    return ClusterTime(int(token["_data"][2:18], 16))
