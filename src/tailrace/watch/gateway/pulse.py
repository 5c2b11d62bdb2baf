"""Whether a gateway lives: its event loop turns. Whether it works: the deployment can be read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tailrace.base.health import Health
from tailrace.read.tail.shared_tail import TailStatistics

#: A loop that has not turned for this long answers nobody. What computes for longer runs in other processes.
DEAD_AFTER_S: Final = 60.0
_BEAT_S: Final = 1.0


class Pulse:
    """``beat_until`` in the event loop; ``health`` from any thread."""

    def __init__(self, tail: Callable[[], TailStatistics]) -> None:
        self._tail = tail
        self._at = time.monotonic()

    async def beat_until(self, stopped: asyncio.Event) -> None:
        """Note that the loop turns until ``stopped`` is set."""
        while not stopped.is_set():
            self._at = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _BEAT_S)

    def health(self) -> Health:
        """Whether the loop turns, and whether what streams share can be read."""
        silence = time.monotonic() - self._at
        if silence > DEAD_AFTER_S:
            return Health("", dead=f"the gateway has answered no client for {silence:.0f} s: its event loop is blocked")
        trouble = self._tail().trouble
        unready = None if trouble is None else f"the deployment cannot be read: {trouble}"
        return Health("the gateway serves streams", unready=unready)
