"""What one lane has to do next: a bounded queue between the thread that reads and the thread that handles."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import bson

from tailrace import raw_bson
from tailrace.consumer.rules.lanes import order_of

#: So many events, and about so many bytes of them, wait for a lane's handler; one event at least.
WINDOW_EVENTS: Final = 1000
WINDOW_BYTES: Final = 16 << 20


class Item(NamedTuple):
    """One event for the lane: its place, its bytes, and whether all lanes wait at it."""

    order: bytes
    event: bytes
    is_barrier: bool

    @property
    def token(self) -> Mapping[str, Any]:
        return token_of(self.event)


def token_of(event: bytes) -> Mapping[str, Any]:
    """The resume token of an event."""
    element = raw_bson.find(event, b"_id")
    assert element is not None
    return bson.decode(raw_bson.value(event, element))


class LaneQueue:
    """Events of one lane in their order. One thread puts, one takes.

    ``seen`` is the place up to which the reader has looked for this lane's events: what comes again from before it was
    put already.
    """

    def __init__(self, token: Mapping[str, Any] | None, *, events: int = WINDOW_EVENTS, size: int = WINDOW_BYTES):
        self._changed = threading.Condition()
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._events_max, self._bytes_max = events, size
        self._seen: Mapping[str, Any] | bytes | None = token
        self._mark: Mapping[str, Any] | None = None
        self._closed = False
        self.seen = order_of(token)

    @property
    def seen_token(self) -> Mapping[str, Any] | None:
        """The token of the place ``seen``."""
        seen = self._seen
        return token_of(seen) if isinstance(seen, bytes) else seen

    @property
    def is_empty(self) -> bool:
        return not self._items

    @property
    def is_hungry(self) -> bool:
        """Whether it is worth reading for the lane again after its queue was full."""
        return 2 * len(self._items) <= self._events_max and 2 * self._bytes <= self._bytes_max

    def put(self, item: Item) -> bool:
        """Add an event; False where there is no room."""
        with self._changed:
            if self._items and (len(self._items) >= self._events_max or self._bytes >= self._bytes_max):
                return False
            self._items.append(item)
            self._bytes += len(item.event)
            self._seen, self.seen, self._mark = item.event, item.order, None
            self._changed.notify_all()
            return True

    def mark(self, token: Mapping[str, Any]) -> None:
        """Say that there is nothing more for the lane up to ``token``."""
        order = order_of(token)
        with self._changed:
            if order > self.seen:
                self._seen = self._mark = token
                self.seen = order

    def take_mark(self) -> Mapping[str, Any] | None:
        """The place of the last mark, once everything before it was taken; ``None`` where there is no new one."""
        with self._changed:
            if self._items:
                return None
            mark, self._mark = self._mark, None
            return mark

    def take(self, timeout: float) -> Item | None:
        """The next event, waited for up to ``timeout`` seconds."""
        with self._changed:
            if not self._items and not self._closed:
                self._changed.wait(timeout)
            if not self._items or self._closed:
                return None
            item = self._items.popleft()
            self._bytes -= len(item.event)
            self._changed.notify_all()
            return item

    def wait_for_room(self, timeout: float) -> None:
        with self._changed:
            if self._items and not self._closed:
                self._changed.wait(timeout)

    def close(self) -> None:
        """Wake who waits; nothing is taken any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
