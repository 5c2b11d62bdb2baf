"""A command that is carried out in the gateway's own process: its stages are plain."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from tailrace.core.cursor import Acting, Action
from tailrace.errors import TailraceError
from tailrace.watch.gateway.reading import INLINE_BYTES, in_thread


class LocalActing:
    """``weight``: by how much more each byte costs than without stages. Large batches are worked on in a thread.
    ``charge``: called with how long a step in the event loop has taken."""

    def __init__(
        self, acting: Acting, pool: Executor, weight: int, charge: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._charge = charge
        self._acting = acting
        self._pool = pool
        self._weight = weight

    async def advance(self, size: int, answer: Any, error: TailraceError | None) -> Action | bytes:
        """One step: what the command asks for, or its reply. ``size``: bytes that it looks at."""
        if size * self._weight > INLINE_BYTES:
            return await in_thread(self._pool, advance, self._acting, answer, error)
        begun = time.perf_counter()
        try:
            return advance(self._acting, answer, error)
        finally:
            self._charge(time.perf_counter() - begun)

    def close(self) -> None:
        self._acting.close()


def advance(acting: Acting, answer: Any, error: TailraceError | None) -> Action | bytes:
    """One step of a command: what it asks for, or its reply."""
    try:
        return acting.send(answer) if error is None else acting.throw(error)
    except StopIteration as end:
        reply: bytes = end.value
        return reply


def size_of(answer: Any) -> int:
    """Bytes of entries or documents in what a command was answered."""
    batch = getattr(answer, "batch", None)
    if batch is not None:
        return len(batch.raw)
    data = getattr(answer, "data", None)  # many documents in one buffer
    if data is not None:
        return int(data.nbytes)
    return sum(len(each or b"") for each in answer) if isinstance(answer, list) else 0
