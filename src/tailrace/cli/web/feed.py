"""What is new, sent to every page that is open (server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

#: How many pages at a time, and how many messages may wait for a page that does not read them; then the oldest goes.
VIEWERS_MAX: Final = 32
_WAITING_MAX: Final = 256
#: After how long without a message a page is told that the console is still there.
_SILENCE_S: Final = 10.0


class Feed:
    """Messages to pages. Belongs to one event loop; ``send`` may be called from any thread.

    ``watched``  notified of whether somebody looks, when that changes
    """

    def __init__(self, watched: Callable[[bool], None]) -> None:
        self._watched = watched
        self._loop: asyncio.AbstractEventLoop | None = None
        self._viewers: set[asyncio.Queue[bytes | None]] = set()

    @property
    def is_full(self) -> bool:
        return len(self._viewers) >= VIEWERS_MAX

    def send(self, kind: str, text: str) -> None:
        """Send a message of JSON to all pages that are open."""
        loop = self._loop
        if loop is not None and self._viewers:
            loop.call_soon_threadsafe(self._put, _message(kind, text))

    def close(self) -> None:
        """Let every page go."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._put, None)

    def _put(self, data: bytes | None) -> None:
        for queue in self._viewers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(data)

    async def messages(self, first: Callable[[], list[tuple[str, str]]]) -> AsyncIterator[bytes]:
        """The messages for one page: ``first`` what there is already, then what comes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING_MAX)
        self._loop = asyncio.get_running_loop()
        self._viewers.add(queue)
        self._watched(True)
        try:
            for kind, text in first():
                yield _message(kind, text)
            while True:
                try:
                    async with asyncio.timeout(_SILENCE_S):
                        found = await queue.get()
                except TimeoutError:
                    found = b": the console is there\n\n"
                if found is None:
                    return
                yield found
        finally:
            self._viewers.discard(queue)
            if not self._viewers:
                self._watched(False)


def _message(kind: str, text: str) -> bytes:
    """A message as it is sent. ``text`` is JSON on one line."""
    return f"event: {kind}\ndata: {text}\n\n".encode()
