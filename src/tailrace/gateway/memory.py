"""How many bytes of messages may be in memory at a time, and for how long a client may keep others from having it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

#: Smaller messages are not counted: every connection may have one.
COUNTED_BYTES_MIN: Final = 1 << 18
#: While others wait for memory, a client has to send a large message, or to take a large reply, at this rate, in bytes
#: per second, after this time.
SLOW_BYTES: Final = 1 << 20
SLOW_S: Final = 5.0

_CHUNK: Final = 1 << 16
#: How often it is checked whether somebody waits for the memory of a message that does not come.
_LOOK_S: Final = 0.5


class ClosedConnection(Exception):  # noqa: N818  no error: one of the two has gone
    """The client or the server has closed its connection, or is too slow."""


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


async def large_message(reader: asyncio.StreamReader, head: bytes, length: int, memory: MemoryBudget) -> bytes:
    """The whole message of ``length`` bytes that begins with ``head``. Its room in ``memory`` is held from the
    beginning, so that it can always be finished; raises ClosedConnection where the client sends it too slowly while
    others wait for room."""
    if length < COUNTED_BYTES_MIN:
        return head + await reader.readexactly(length - len(head))
    grace = time.monotonic() + SLOW_S + length / SLOW_BYTES
    message = bytearray(head)
    while len(message) < length:
        chunk = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                chunk = await reader.read(min(length - len(message), _CHUNK))
        if chunk == b"":
            raise ClosedConnection("the client has left in the middle of a message")
        message += chunk or b""
        if memory.is_wanted and time.monotonic() > grace:
            raise ClosedConnection("the client sends its message too slowly")
    return bytes(message)
