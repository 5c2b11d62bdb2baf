"""Who comes next where tenants share a process that computes stages, and how much each has computed lately. No I/O."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Final

#: After so long, what a tenant has computed counts half.
_HALF_LIFE_S: Final = 60.0
_TENANTS_MAX: Final = 10_000


class CpuUse:
    """CPU seconds by tenant; what is long ago counts less."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[Hashable, tuple[float, float]] = {}

    def of(self, tenant: Hashable) -> float:
        seconds, at = self._used.get(tenant, (0.0, 0.0))
        return float(seconds * 0.5 ** ((self._clock() - at) / _HALF_LIFE_S))

    def add(self, tenant: Hashable, seconds: float) -> None:
        total = self.of(tenant) + seconds
        self._used.pop(tenant, None)
        self._used[tenant] = total, self._clock()
        if len(self._used) > _TENANTS_MAX:
            del self._used[next(iter(self._used))]


class Turns:
    """One at a time. Of those who wait, the tenant that has computed least lately comes first; within a tenant, whoever
    asked first."""

    def __init__(self, use: CpuUse) -> None:
        self._use = use
        self.holder: Hashable | None = None
        self._is_taken = False
        self._waiting: list[tuple[Hashable, asyncio.Future[None]]] = []

    @property
    def is_taken(self) -> bool:
        return self._is_taken

    @property
    def others_wait(self) -> bool:
        """Whether another tenant waits than the one whose turn it is."""
        return any(tenant != self.holder for tenant, future in self._waiting if not future.done())

    async def take(self, tenant: Hashable) -> None:
        """Wait for a turn."""
        if not self._is_taken:
            self._is_taken, self.holder = True, tenant
            return
        waiting = tenant, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            if waiting[1].done() and not waiting[1].cancelled():
                self.give()
            raise
        finally:
            self._waiting.remove(waiting)

    def give(self) -> None:
        """The turn is over."""
        waiting = [one for one in self._waiting if not one[1].done()]
        if not waiting:
            self._is_taken, self.holder = False, None
            return
        tenant, future = min(waiting, key=lambda one: self._use.of(one[0]))
        self.holder = tenant
        future.set_result(None)
