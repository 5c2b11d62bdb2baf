"""How many bytes of messages may be in memory at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

#: Smaller messages are not counted: every connection may have one.
COUNTED_BYTES_MIN: Final = 1 << 18


class MemoryBudget:
    """``bytes_max`` for the large messages of all connections together. A message that asks for more waits."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._changed = asyncio.Condition()
        self._waiting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether a message waits for room."""
        return self._waiting > 0

    @asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[None]:
        """Room for ``size`` bytes while the block runs. One message may always be held, however large."""
        if size < COUNTED_BYTES_MIN:
            yield
            return
        async with self._changed:
            self._waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._held or self._held + size <= self._bytes_max)
            finally:
                self._waiting -= 1
            self._held += size
        try:
            yield
        finally:
            self._held -= size
            async with self._changed:
                self._changed.notify_all()
