"""Deadlines of requests that wait without a task. Of those that wait equally long, the first to come is the first to
go, so one timer is enough for all of them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tailrace.watch.gateway.reading import now_ms


class Waiting(Protocol):
    """Somebody who waits."""

    def is_over(self) -> None:
        """Its time is up."""


class Deadlines:
    """Belongs to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: Who waits, by the number of milliseconds, and until when, on the cursors' clock.
        self._waiting: dict[int, dict[Waiting, int]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def add(self, waiting: Waiting, await_ms: int) -> None:
        """Tell ``waiting`` once, after this many milliseconds, that its time is up."""
        queue = self._waiting.get(await_ms)
        if queue is None:
            queue = self._waiting[await_ms] = {}
            self._timers[await_ms] = self._loop.call_later(await_ms / 1000, self._look, await_ms)
        queue[waiting] = now_ms() + await_ms

    def discard(self, waiting: Waiting, await_ms: int) -> None:
        """It waits no longer."""
        queue = self._waiting.get(await_ms)
        if queue is not None and queue.pop(waiting, None) is not None and not queue:
            # Otherwise a client that names another time with each command would leave a timer for each.
            del self._waiting[await_ms]
            self._timers.pop(await_ms).cancel()

    def _look(self, await_ms: int) -> None:
        now, queue = now_ms(), self._waiting.pop(await_ms)
        del self._timers[await_ms]
        over = []
        for waiting, deadline in queue.items():
            if deadline > now:
                self._timers[await_ms] = self._loop.call_later((deadline - now) / 1000, self._look, await_ms)
                self._waiting[await_ms] = queue
                break
            over.append(waiting)
        for waiting in over:
            del queue[waiting]
        for waiting in over:
            waiting.is_over()
