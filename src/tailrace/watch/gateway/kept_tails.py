"""The shared reads that a gateway keeps going while it has streams, and for a while after the last one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from pymongo import MongoClient

from tailrace.read.tail.shared_tail import SharedTail
from tailrace.watch.gateway.reading import Keeper

#: How long the shared read goes on after the last stream was closed.
_LINGER_S: Final = 30.0


class KeptTails:
    """The tails that are kept going, by the client that reads them."""

    def __init__(self) -> None:
        self._kept: dict[MongoClient[Any], tuple[SharedTail, Keeper]] = {}
        self._idle_since: float | None = None

    def keep(self, client: MongoClient[Any], shared: SharedTail) -> None:
        """Keep this tail going."""
        if client not in self._kept:
            self._kept[client] = shared, Keeper(client, shared)

    def clocks(self) -> Iterator[bytes]:
        """The newest document with the server's times that each has received."""
        for shared, _ in self._kept.values():
            if shared.clock is not None:
                yield shared.clock

    def are_needed(self) -> None:
        """There is a stream, or soon will be."""
        self._idle_since = None

    def are_idle(self) -> bool:
        """There is no stream. Returns whether that has been so for long enough to let go of the tails."""
        now = time.monotonic()
        if not self._kept:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        return self._idle_since is not None and now - self._idle_since > _LINGER_S

    def let_go(self) -> None:
        """Keep none of them going."""
        for _, keeper in self._kept.values():
            keeper.close()
        self._kept.clear()
