"""Signals that end ``tailrace run`` and ``tailrace demo``: they stop what they have begun, and exit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.cli.signal_calls import call_aside


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` on SIGINT and SIGTERM while the body runs. Once Spark has a session, it has a handler of its own:
    what is entered later counts."""
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda *_: call_aside(stop.set))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
