"""Waiting for conditions, with deadlines that hold on a loaded machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tailrace
from tailrace.watch.client.patience import try_next_patiently

PATIENCE_S = 300.0


def take(stream: tailrace.ChangeStream, count: int) -> list[Any]:
    """So many events, in spite of errors that leave the stream open. The deadline starts again with each event, since
    the number of events may depend on how fast the machine was while they were written."""
    events: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(events) < count:
        assert time.monotonic() < deadline, f"only {len(events)} of {count} events came"
        event = try_next_patiently(stream)
        if event is not None:
            events.append(event)
            deadline = time.monotonic() + PATIENCE_S
        assert stream.alive or len(events) == count
    return events


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
