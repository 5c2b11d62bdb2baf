"""How many bytes of messages may be in memory at a time, and for how long a client may keep others from having it.

A message is counted as it arrives: the length that it announces takes nothing from others. So when there is no more
room, several messages may each have arrived in part. One of them may then go on, so that it ends and makes room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

#: Smaller messages are not counted: every connection may have one.
COUNTED_BYTES_MIN: Final = 1 << 18
#: While others wait for memory, a client has to send a large message, or to take a large reply, at this rate, in bytes
#: per second, measured over this time.
SLOW_BYTES: Final = 1 << 20
SLOW_S: Final = 5.0

_CHUNK: Final = 1 << 16
#: How often it is checked whether somebody waits for the memory of a message that does not come.
_LOOK_S: Final = 0.5


class ClosedConnection(Exception):  # noqa: N818  no error: one of the two has gone
    """The client or the server has closed its connection, or is too slow."""


class MemoryBudget:
    """``bytes_max`` for the large messages of all connections together. What exceeds it waits.

    Each tenant, a user or an address, may hold as much as is free: alone half of it, two of them a third each. So there
    is always room for one who comes. Beyond that one message goes on at a time, however large it is.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._by_tenant: Counter[Hashable] = Counter()
        self._waiting: list[_RoomWanted] = []
        #: The one that goes on although there is no room.
        self._exempt: Share | None = None

    @asynccontextmanager
    async def share(self, tenant: Hashable) -> AsyncIterator[Share]:
        """What one message of ``tenant`` holds while the block runs: nothing at first."""
        share = Share(self, tenant)
        try:
            yield share
        finally:
            if self._exempt is share:
                self._exempt = None
            share.give_back(share.held)

    @asynccontextmanager
    async def held(self, size: int, tenant: Hashable) -> AsyncIterator[Share]:
        """Room for a message of ``size`` bytes that is there as a whole, while the block runs."""
        async with self.share(tenant) as share:
            if size >= COUNTED_BYTES_MIN:
                await share.take(size)
            yield share

    def _admits(self, share: Share, size: int) -> bool:
        """Count ``size`` bytes more for a share if there is room."""
        fits = self._by_tenant[share.tenant] + size <= self._bytes_max - self._held
        if not fits and self._exempt not in (None, share):
            return False
        if not fits:
            self._exempt = share
        self._held += size
        self._by_tenant[share.tenant] += size
        share.held += size
        return True

    def _released(self, share: Share, size: int) -> None:
        self._held -= size
        self._by_tenant[share.tenant] -= size
        if not self._by_tenant[share.tenant]:
            del self._by_tenant[share.tenant]
        share.held -= size
        # Whose tenant holds least is first; of one tenant, who came first.
        for waiting in sorted(self._waiting, key=lambda one: self._by_tenant[one.share.tenant]):
            if not waiting.granted.done() and self._admits(waiting.share, waiting.size):
                waiting.granted.set_result(None)


@dataclass(eq=False, slots=True)
class Share:
    """``held`` bytes that one message of ``tenant`` has of a budget."""

    budget: MemoryBudget
    tenant: Hashable
    held: int = 0

    def takes(self, size: int) -> bool:
        """Take ``size`` bytes more if they can be had at once; whether they could."""
        return self.budget._admits(self, size)

    async def take(self, size: int) -> None:
        """Take ``size`` bytes more; waits for room."""
        if self.takes(size):
            return
        waiting = _RoomWanted(self, size)
        self.budget._waiting.append(waiting)
        try:
            await waiting.granted
        finally:
            self.budget._waiting.remove(waiting)

    def give_back(self, size: int) -> None:
        self.budget._released(self, size)

    @property
    def is_wanted(self) -> bool:
        """Whether a message waits that has a better claim to this memory: its tenant holds no more than this one's."""
        held = self.budget._by_tenant
        return any(held[one.share.tenant] <= held[self.tenant] for one in self.budget._waiting)


@dataclass(eq=False, slots=True)
class _RoomWanted:
    share: Share
    size: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


async def granted(share: Share, size: int, limit: asyncio.Timeout) -> None:
    """Take ``size`` bytes; the time for which this waits does not count for ``limit``."""
    if share.takes(size):
        return
    loop, deadline = asyncio.get_running_loop(), limit.when()
    begun = loop.time()
    limit.reschedule(None)
    await share.take(size)
    limit.reschedule(None if deadline is None else deadline + loop.time() - begun)


async def large_message(
    reader: asyncio.StreamReader, head: bytes, length: int, share: Share, limit: asyncio.Timeout
) -> bytes:
    """The whole message of ``length`` bytes that begins with ``head``, counted in ``share`` as it comes. Raises
    ClosedConnection where the client sends it too slowly while others wait for room."""
    if length < COUNTED_BYTES_MIN:
        return head + await reader.readexactly(length - len(head))
    message = bytearray(head)
    since, came = time.monotonic(), 0
    while len(message) < length:
        chunk = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                chunk = await reader.read(min(length - len(message), _CHUNK))
        if chunk == b"":
            raise ClosedConnection("the client has left in the middle of a message")
        if chunk:
            if not share.takes(len(chunk)):
                await granted(share, len(chunk), limit)
                since, came = time.monotonic(), 0  # meanwhile nothing was asked of the client
            message += chunk
            came += len(chunk)
        if time.monotonic() > since + SLOW_S:
            if came < SLOW_S * SLOW_BYTES and share.is_wanted:
                raise ClosedConnection("the client sends its message too slowly")
            since, came = time.monotonic(), 0
    return bytes(message)


async def taken(
    writer: asyncio.StreamWriter, stall_seconds: float, grace: float | None = None, share: Share | None = None
) -> None:
    """Wait until the client has taken what was sent. ``grace``: the time after which a client counts as too slow if
    others wait for the ``share`` of the memory that its reply has. Raises ClosedConnection."""
    transport = writer.transport
    if not transport.get_write_buffer_size() and not transport.is_closing():
        return  # the system has taken all of it
    stalled = time.monotonic() + stall_seconds
    while True:
        if grace is not None and time.monotonic() > grace and share is not None and share.is_wanted:
            break
        limit = stalled - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, limit if grace is None else min(limit, SLOW_S))):
                await writer.drain()
            return
        except TimeoutError:
            if time.monotonic() >= stalled:
                break
    # A plain close would wait until the client has taken the rest.
    transport.abort()
    raise ClosedConnection("the client does not take its replies")
