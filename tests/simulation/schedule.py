"""Virtual time: one seeded order in which everything happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Schedule:
    """What is to be done, by virtual time in seconds. ``random`` is the only source of chance in a run, apart from
    ``late_random`` for requests that arrive late and ``skip_random`` for changes that are left out. So up to the first
    of these a seed plays the run that it played before they were introduced."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.late_random = Random(f"late {seed}")
        self.skip_random = Random(f"skip {seed}")
        self.now = 0.0
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._count, action))

    def run(self, is_over: Callable[[], bool], limit: float) -> bool:
        """Do one thing after the other until nothing is left. Returns whether that was before ``limit``."""
        while self._waiting and not is_over():
            self.step()
            if self.now > limit:
                return False
        return is_over()

    def step(self) -> bool:
        """Do the next thing, if there is one."""
        if not self._waiting:
            return False
        self.now, _, action = heapq.heappop(self._waiting)
        action()
        return True

    def server_time(self) -> datetime:
        """The server's clock."""
        return EPOCH + timedelta(seconds=self.now)
