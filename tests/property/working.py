"""Runs one oplog's stages, or the kernel, by themselves, for the tests that compare the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.event_block import EventBlock
from tailrace.core.pipeline.task import Task, Working
from tailrace.core.plan.request import Answer, Emit, Request, Running
from tailrace.core.stream.stream import ONE_OPLOG, Need
from tailrace.errors import TailraceError
from tests.property.noted import check_noted


def drive_by(running: Running, answer_to: Callable[[Request], Answer]) -> Iterator[list[ChangeEvent]]:
    """The events of one oplog's stages."""
    for given in _answered(running, answer_to):
        if isinstance(given, Emit):
            yield given.events


def drive_blocks(working: Working, answer_to: Callable[[Request], Answer]) -> Iterator[EventBlock]:
    """The kernel's blocks. Checks that the noted parts are those that would be found."""
    for given in _answered(working, answer_to):
        block = given if isinstance(given, EventBlock) else EventBlock.of(given.events)
        check_noted(block)
        yield block


def _answered(working: Working, answer_to: Callable[[Request], Answer]) -> Iterator[EventBlock | Emit]:
    task = Task(ONE_OPLOG)
    task.start(working)
    while (given := task.step()) is not None:
        if not isinstance(given, Need):
            yield given
            continue
        try:
            task.settle(given, answer_to(given.request), None)
        except TailraceError as error:
            task.settle(given, None, error)
