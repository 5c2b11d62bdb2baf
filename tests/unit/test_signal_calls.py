"""A signal handler may call something that needs a lock held by the interrupted thread.

Every command made such a call in the handler itself, and ``tailrace top`` once went on for ever. These moments are only
a few steps of Python long, so no test that ends a command by a signal had hit one; here the lock is certainly held.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.cli import archive, compare, console, listen, sync
from tailrace.cli.stopped_by_signals import stopped_by_signals

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stopped(threading.Event):
    """What a command stops: takes a lock for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def set(self) -> None:
        if self.lock.acquire(timeout=1):  # a second is for ever where the thread that holds it waits
            super().set()

    def stop(self) -> None:
        self.set()


@contextmanager
def for_good(install: Callable[[Any], None], stopped: Stopped) -> Iterator[None]:
    """Handlers that the command leaves in force to its end."""
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        install(stopped)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


HANDLERS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "run, demo": stopped_by_signals,
    "archive": lambda stopped: for_good(archive._stop_at_signals, stopped),
    "compare": compare._stopped_by_signals,
    "listen": lambda stopped: listen._stopping_on_signals([stopped.stop], False),
    "a part of listen": lambda stopped: listen._stopping_on_signals([stopped.stop], True),
    "sync": lambda stopped: for_good(sync._stop_at_signals, stopped),
}


@pytest.mark.parametrize("number", _NUMBERS)
def test_a_signal_ends_top_and_the_console_too(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "threading", SimpleNamespace(Event=Stopped))
    with console.ended_by_signals() as ended:
        assert isinstance(ended, Stopped)
        with ended.lock:
            signal.raise_signal(number)
        assert ended.wait(20)


@pytest.mark.parametrize("number", _NUMBERS)
@pytest.mark.parametrize("command", HANDLERS)
def test_a_signal_stops_a_command_that_holds_the_lock(command: str, number: signal.Signals) -> None:
    stopped = Stopped()
    with HANDLERS[command](stopped):
        with stopped.lock:
            signal.raise_signal(number)
        assert stopped.wait(20)
