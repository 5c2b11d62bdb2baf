"""The plain driver: answers what a pipeline asks for from one source."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TypeVar

from tailrace.errors import InternalError, TailraceError
from tailrace.event.change_event import ChangeEvent
from tailrace.event.event_block import EventBlock
from tailrace.plan.request import Answer, Emit, NeedDocuments, NeedEntries, NeedPreImages, Request, Running
from tailrace.source.base import OplogSource
from tailrace.source.time_limit import TimeLimitError

Given = TypeVar("Given", Emit, EventBlock)


def drive(running: Running, source: OplogSource) -> Iterator[list[ChangeEvent]]:
    """Run a pipeline to its end, answering its requests from ``source``; gives the events as they are finished.

    Where the source cannot answer, the pipeline gets the source's error in place of the answer: it gives what comes
    before and raises, or asks in another way. Where the caller's time is over, no events are given, and the request is
    made again afterwards. Closing the iterator closes the pipeline.
    """
    return drive_by(running, answers_of(source))


def drive_by(running: Running, answer_to: Callable[[Request], Answer]) -> Iterator[list[ChangeEvent]]:
    """The same with answers from ``answer_to``."""
    for given in _answered(running, answer_to):
        yield [] if given is None else given.events


def drive_blocks(
    running: Generator[EventBlock | Request, Answer, None], answer_to: Callable[[Request], Answer]
) -> Iterator[EventBlock]:
    """As ``drive_by``, for what gives blocks of events. Where the caller's time is over, a block without events."""
    for given in _answered(running, answer_to):
        yield EventBlock.of([]) if given is None else given


def answers_of(source: OplogSource) -> Callable[[Request], Answer]:
    """What answers the requests of a stream over one oplog."""
    return partial(_answer, source)


def _answered(
    running: Generator[Given | Request, Answer, None], answer_to: Callable[[Request], Answer]
) -> Iterator[Given | None]:
    """What ``running`` gives beside its requests; ``None`` where the caller's time is over."""
    answer: Answer = None
    failure: TailraceError | None = None
    try:
        while True:
            try:
                given = running.send(answer) if failure is None else running.throw(failure)
            except StopIteration:
                return
            answer = failure = None
            if isinstance(given, Emit | EventBlock):
                yield given
                continue
            while True:
                try:
                    answer = answer_to(given)
                except TimeLimitError:
                    yield None  # the caller is told, and the request is made again when it comes back
                    continue
                except TailraceError as error:
                    failure = error
                break
    finally:
        running.close()


def _answer(source: OplogSource, request: Request) -> list[bytes | None]:
    if isinstance(request, NeedEntries):
        return source.entries(request.times)
    if isinstance(request, NeedDocuments):
        return source.documents(request.lookups)
    if isinstance(request, NeedPreImages):
        return source.pre_images(request.keys)
    raise InternalError(f"a stream over one oplog asks for {type(request).__name__}")
