"""One thread at a time works on a stream, and any thread may end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

from tailrace.errors import ServerError

_CURSOR_IN_USE: Final = 143
_CURSOR_KILLED: Final = 237


class Turn:
    """``with turn:`` around each piece of work. If a second thread uses the stream at the same time, the stream ends
    for both, as it would on the server, and both get an error: no event is lost unnoticed.

    ``release``  gives back what the stream holds; called once, when the stream is ended and nobody works on it
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        # Reentrant: a signal's handler may end the stream in the middle of this very thread's work.
        self._lock = threading.RLock()
        self._working = False
        self._released = False
        self._disputed = False
        self.ended = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._working:
                self._working = True
                return
            self._disputed = self.ended = True
        raise ServerError(
            "the stream is already in use by another thread",
            code=_CURSOR_IN_USE,
            hint="Give each thread a stream of its own, or let one thread read and pass the events on",
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._working = False
            ended = self.ended
        if ended:
            self.end()

    def end(self) -> None:
        """End the stream: now, or as soon as the thread that works on it notices."""
        with self._lock:
            self.ended = True
            if self._working or self._released:
                return
            self._released = True
        self._release()

    def check(self) -> None:
        """Raises ServerError where another thread came in between."""
        if self._disputed:
            raise ServerError(
                "operation was interrupted: another thread used the stream at the same time",
                code=_CURSOR_KILLED,
                hint="Give each thread a stream of its own, or let one thread read and pass the events on",
            )
