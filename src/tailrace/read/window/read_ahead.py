"""Reads in a thread what is needed next, while the caller works on what was read before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: Seconds for which ``give_up`` waits for a read to end. One that hangs in the network ends later, and on its own.
_PATIENCE_S: Final = 1.0
_LOOK_S: Final = 0.1


class ReadAhead(Generic[T]):
    """One call of ``read``, which has begun. ``interrupt`` makes it end early, from another thread."""

    def __init__(self, read: Callable[[], T], interrupt: Callable[[], None]) -> None:
        self._read = read
        self._interrupt = interrupt
        self._found: list[T] = []
        self._error: BaseException | None = None
        # A daemon: a process that ends does not wait for the network.
        self._thread = threading.Thread(target=self._run, name="tailrace-read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._read())
        except BaseException as error:  # noqa: BLE001  the caller of result() gets it
            self._error = error

    def wait(self, stopped: threading.Event | None = None) -> bool:
        """Wait until the call has ended, or ``stopped`` is set. Returns whether it has ended."""
        while self._thread.is_alive() and not (stopped is not None and stopped.is_set()):
            self._thread.join(_LOOK_S)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What was read, once it is there. Raises what the call has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found.pop()

    def give_up(self) -> None:
        """Nobody wants the result any more."""
        self._interrupt()
        self._thread.join(_PATIENCE_S)
