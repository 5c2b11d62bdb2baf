"""What asyncio reports about a client's connection, and where its bytes go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class ClientReader(asyncio.StreamReader):
    """Tells when the client has gone, while nobody reads.

    ``take``  is offered what comes while nothing waits to be read; returns whether it has taken it
    """

    on_end: Callable[[], None] | None = None
    take: Callable[[bytes], bool] | None = None

    def holds(self, size: int) -> bool:
        """Whether this many bytes can be read without waiting. (asyncio has no public way to ask.)"""
        return len(getattr(self, "_buffer", b"")) >= size

    def feed_eof(self) -> None:
        super().feed_eof()
        if self.on_end is not None:
            self.on_end()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        if self.on_end is not None:
            self.on_end()


class ClientProtocol(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Receives into ``buffer``, which all clients of a loop share. A plain protocol is given a new 256 kB for each
    message, however short: the system maps and unmaps them, which costs more than the message."""

    def __init__(
        self,
        reader: ClientReader,
        buffer: bytearray,
        on_connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
    ) -> None:
        super().__init__(reader, on_connected)
        self._client_reader: ClientReader | None = reader
        self._buffer = memoryview(buffer)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes are to go; ``buffer_updated`` is called before anybody else asks."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._client_reader
        if reader is None:
            return
        data = bytes(self._buffer[:nbytes])
        if reader.take is None or reader.holds(1) or not reader.take(data):
            reader.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._client_reader = None
