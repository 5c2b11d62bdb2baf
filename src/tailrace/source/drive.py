"""The trampoline: turns a stream, and whoever can answer what it needs, into an iterator of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from tailrace.errors import InternalError, TailraceError
from tailrace.event.change_event import ChangeEvent
from tailrace.event.event_block import EventBlock
from tailrace.pipeline.stream import ONE_OPLOG, Later, Need, Stream
from tailrace.pipeline.task import Task, Working
from tailrace.plan.request import Answer, Emit, NeedDocuments, NeedEntries, NeedPreImages, Request, Running
from tailrace.source.base import OplogSource
from tailrace.source.time_limit import TimeLimitError

#: Answers a need, or says that the answer comes later (``LATER``): the need is then asked again at the next call.
AnswerTo: TypeAlias = Callable[[Need], "Answer | Later"]


def drive(stream: Stream, answer_to: AnswerTo) -> Iterator[EventBlock]:
    """What the stream makes of what it was fed, up to where it wants more.

    Where a need cannot be answered, the stream is given the error in the answer's place: it gives what comes before and
    raises, or asks in another way. The end of the caller's time (``TimeLimitError``) comes out at once; nothing is lost
    by it, nor by leaving the iterator: the next call continues where this one stopped, and makes the request again.
    """
    while (block := _next_block(stream, answer_to)) is not None:
        yield block


def _next_block(stream: Stream, answer_to: AnswerTo) -> EventBlock | None:
    steps = stream.next_block()
    try:
        need = next(steps)
        while True:
            try:
                answer = answer_to(need)
            except TimeLimitError:
                steps.close()
                raise
            except TailraceError as error:
                need = steps.throw(error)
            else:
                need = steps.send(answer)
    except StopIteration as end:
        given: EventBlock | None = end.value
        return given


def answers_of(source: OplogSource) -> AnswerTo:
    """The answers of the one source that the stream is read from."""
    return partial(_answer, source)


def _answer(source: OplogSource, need: Need) -> Sequence[bytes | None]:
    request: Request = need.request
    if isinstance(request, NeedEntries):
        return source.entries(request.times)
    if isinstance(request, NeedDocuments):
        return source.documents(request.lookups)
    if isinstance(request, NeedPreImages):
        return source.pre_images(request.keys)
    raise InternalError(f"a stream over one oplog asks for {type(request).__name__}")


def drive_by(running: Running, answer_to: Callable[[Request], Answer]) -> Iterator[list[ChangeEvent]]:
    """The events of one oplog's stages at work, for callers that look at these alone."""
    for given in _answered(running, answer_to):
        if isinstance(given, Emit):
            yield given.events


def drive_blocks(working: Working, answer_to: Callable[[Request], Answer]) -> Iterator[EventBlock]:
    """The blocks of the kernel at work, for who looks at it alone."""
    for given in _answered(working, answer_to):
        yield given if isinstance(given, EventBlock) else EventBlock.of(given.events)


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
