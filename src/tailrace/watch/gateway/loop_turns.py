"""Whose work the event loop does next. No I/O.

Each step of a plain stream is short, but a user with thousands of streams has thousands of steps waiting, and a loop
does what is ready in the order in which it came: everybody else would wait for all of them. So a pass of the loop has a
bounded number of steps, and waiting steps are taken in the order of how much each tenant has had.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

#: Steps in one pass of the loop: a few milliseconds.
STEPS: Final = 64
#: What a step counts for, in seconds; one that took longer counts for as long.
_STEP_S: Final = 0.000_05


class LoopTurns:
    """A step is work that is done at once, or that is woken by it. While no more are wanted than a pass has room for,
    nobody waits.

    A tenant that had no work for a while has no claim from that time: it begins where the others are.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = STEPS
        self._is_due = False
        self._order = itertools.count()
        self._waiting: dict[Hashable, deque[Callable[[], object]]] = {}
        #: Of each tenant that waits: what it has had, and how it is found in ``_waiting``.
        self._queue: list[tuple[float, int, Hashable]] = []
        #: What each tenant has had; without those that are not ahead of ``_now``.
        self._had: dict[Hashable, float] = {}
        #: What the tenant had had that was served last.
        self._now = 0.0

    def goes(self, tenant: Hashable) -> bool:
        """Whether a step may be done at once; if not, ``wait`` for it."""
        self._see_to_it()
        if self._queue or self._left <= 0:
            return False
        self._count(tenant)
        return True

    async def wait(self, tenant: Hashable) -> None:
        """Wait for a step."""
        granted = asyncio.Event()
        self._append(tenant, granted.set)
        await granted.wait()

    def call(self, tenant: Hashable, work: Callable[[], object]) -> None:
        """Call ``work`` when it is this tenant's turn, at once if nobody waits. In the loop's thread."""
        if self.goes(tenant):
            work()
        else:
            self._append(tenant, work)

    def charge(self, tenant: Hashable, seconds: float) -> None:
        """A step that was counted has taken so long."""
        if seconds > _STEP_S:
            self._had[tenant] = max(self._had.get(tenant, 0.0), self._now) + seconds - _STEP_S

    def _append(self, tenant: Hashable, work: Callable[[], object]) -> None:
        waiting = self._waiting.get(tenant)
        if waiting is None:
            waiting = self._waiting[tenant] = deque()
            self._push(tenant)
        waiting.append(work)
        self._see_to_it()

    def _push(self, tenant: Hashable) -> None:
        heapq.heappush(self._queue, (max(self._had.get(tenant, 0.0), self._now), next(self._order), tenant))

    def _count(self, tenant: Hashable) -> None:
        self._left -= 1
        self._had[tenant] = max(self._had.get(tenant, 0.0), self._now) + _STEP_S

    def _see_to_it(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._is_due = False
        self._left = STEPS
        while self._queue and self._left > 0:
            had, _, tenant = heapq.heappop(self._queue)
            if self._had.get(tenant, 0.0) > had:  # it was charged since
                self._push(tenant)
                continue
            self._now = max(self._now, had)
            waiting = self._waiting[tenant]
            work = waiting.popleft()
            self._count(tenant)
            if waiting:
                self._push(tenant)
            else:
                del self._waiting[tenant]
            work()
        if self._queue:
            self._see_to_it()
        else:  # nobody waits: all start again, and what they had meanwhile was nobody else's
            self._now = 0.0
            self._had.clear()
