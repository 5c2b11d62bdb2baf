"""Lets a stage go on after an event that it cannot handle, if the stream puts such events aside."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.plan.request import Answer, Request
from tailrace.errors import TailraceError

#: The events that were put aside; ``None``: an event that a stage cannot handle ends the stream.
Aside: TypeAlias = "list[QuarantinedEvent] | None"


def process(stage: Any, items: list[Any], out: list[Any], aside: Aside) -> Generator[Request, Answer, None]:
    """``stage.process``. An event at which it raises goes to ``aside``; what the stage has given already stays, and it
    goes on with the events after that one: with one event at first, then with twice as many each time, so that a stage
    that looks something up for all of them and fails at each does not repeat every look-up again and again."""
    first, size = 0, len(items)
    while True:
        part = items[first : first + size] if first else items
        try:
            requests = stage.process(part, out)
            if requests is not None:
                yield from requests
        except TailraceError as error:
            place = next((place for place, item in enumerate(part) if item is error.event), None)
            if aside is None or place is None:
                raise
            aside.append(QuarantinedEvent.of(part[place], error))
            first, size = first + place + 1, 1
        else:
            first, size = first + len(part), 2 * size
            if first >= len(items):
                return
