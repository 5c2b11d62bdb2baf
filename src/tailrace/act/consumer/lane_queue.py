"""What one lane has to do next: a bounded queue between the thread that reads and the thread that handles."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tailrace.act.consumer.rules.lanes import order_of
from tailrace.act.consumer.rules.large_events import token_of
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core import raw_bson
from tailrace.errors import TailraceError

#: How many events, and about how many bytes of them, may wait for a lane's handler; always at least one event.
WINDOW_EVENTS: Final = 1000
WINDOW_BYTES: Final = 16 << 20
#: With fewer events than this a queue runs low: it is time to read on.
_LOW_EVENTS: Final = 50


class Item(NamedTuple):
    """One event for the lane: its place, its bytes, and whether all lanes wait at it."""

    order: bytes
    event: bytes
    is_barrier: bool
    #: Why the stream could not give it.
    error: TailraceError | None = None
    #: Whether the stream's event directly before it has its token.
    repeats: bool = False

    @property
    def token(self) -> Mapping[str, Any]:
        return token_of(self.event)

    @property
    def is_invalidate(self) -> bool:
        return self.is_barrier and operation_of(self.event) == b"invalidate"


def operation_of(event: bytes) -> bytes:
    """The ``operationType`` of an event."""
    element = raw_bson.find(event, b"operationType")
    return b"" if element is None else raw_bson.value(event, element)[4:-1]


class LaneQueue:
    """Events of one lane in their order. One thread takes; one reader at a time puts, the last one that the lane was
    given to.

    ``position``  up to where the lane is done
    ``begin``     where to begin to read for it: earlier than that, where a barrier between may not be done yet

    ``seen`` is the place up to which readers have searched for this lane's events: what comes again from before it was
    put already. Several events may have one token: those after the first follow it only where the same reader has just
    put that one, since no stream resumes between them.
    """

    def __init__(
        self,
        position: StreamPosition,
        begin: StreamPosition | None = None,
        *,
        events: int = WINDOW_EVENTS,
        size: int = WINDOW_BYTES,
    ) -> None:
        self._changed = threading.Condition()
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._events_max, self._bytes_max = events, size
        self._seen: StreamPosition | Mapping[str, Any] | bytes = begin or position
        self._mark: Mapping[str, Any] | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._reader: object = None
        self._just_put = b""
        self._on_low: Callable[[], object] | None = None
        self._done = order_of(position)
        self.seen = order_of(begin or position)

    def follow(self, reader: object, on_low: Callable[[], object] | None = None) -> StreamPosition:
        """Take events from ``reader`` alone from now on; gives the place ``seen``, where it has to begin. ``on_low``
        is called whenever the queue begins to run low."""
        with self._changed:
            self._reader, self._on_low, self._just_put = reader, on_low, b""
            seen = self._seen
        if isinstance(seen, StreamPosition):
            return seen
        return StreamPosition(token_of(seen) if isinstance(seen, bytes) else seen, start_after=True)

    def follows(self, reader: object) -> bool:
        return self._reader is reader

    @property
    def is_closed(self) -> bool:
        """Whether the queue takes nothing any more: it will never have room."""
        return self._closed

    @property
    def is_empty(self) -> bool:
        return not self._items

    @property
    def is_low(self) -> bool:
        return len(self._items) < _LOW_EVENTS

    @property
    def is_hungry(self) -> bool:
        """Whether it is worth reading for the lane again after its queue was full."""
        return 2 * len(self._items) <= self._events_max and 2 * self._bytes <= self._bytes_max

    def put(self, item: Item, reader: object) -> bool:
        """Add an event; False where there is no room. One that was put before, or that another reader will put, is
        left out, and so is a change that the lane is done with."""
        with self._changed:
            is_new = item.order > self.seen or (item.repeats and item.order == self._just_put)
            if not is_new or self._reader is not reader:
                return True
            if self._items and (len(self._items) >= self._events_max or self._bytes >= self._bytes_max):
                return False
            self._seen, self.seen, self._mark = item.event, item.order, None
            self._just_put = item.order
            if item.order > self._done or item.is_barrier:
                self._items.append(item)
                self._bytes += len(item.event)
                if len(self._items) == 1:
                    self._changed.notify_all()
            return True

    def mark(self, token: Mapping[str, Any], reader: object) -> None:
        """Say that there is nothing more for the lane up to ``token``."""
        order = str(token["_data"]).encode()
        with self._changed:
            if order > self.seen and self._reader is reader:
                self._seen, self.seen = token, order
                if order > self._done:
                    self._mark = token

    def take_mark(self) -> Mapping[str, Any] | None:
        """The place of the last mark, once everything before it was taken; ``None`` where there is no new one."""
        with self._changed:
            if self._items:
                return None
            mark, self._mark = self._mark, None
            return mark

    def fail(self, error: BaseException, reader: object) -> None:
        """Nothing more comes from the reader: whoever has taken everything learns why."""
        with self._changed:
            if self._reader is reader:
                self._error = error
                self._changed.notify_all()

    def take(self, timeout: float) -> Item | None:
        """The next event, waited for up to ``timeout`` seconds. Raises what ended the reader."""
        with self._changed:
            if not self._items and not self._closed and self._error is None:
                self._changed.wait(timeout)
            if self._closed:
                return None
            if not self._items:
                if self._error is not None:
                    raise self._error
                return None
            was_hungry = self.is_hungry
            item = self._items.popleft()
            self._bytes -= len(item.event)
            if not was_hungry and self.is_hungry:
                self._changed.notify_all()
            on_low = self._on_low if len(self._items) == _LOW_EVENTS - 1 else None
        if on_low is not None:
            on_low()
        return item

    def wait_for_room(self, timeout: float) -> None:
        """Wait until half of the queue is free, at most that many seconds: waking the reader for each event that is
        taken would cost more than the event."""
        with self._changed:
            if not self.is_hungry and not self._closed:
                self._changed.wait(timeout)

    def close(self) -> None:
        """Wake who waits; nothing is taken any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
