"""The trampoline: turns a stream, and an object that answers what it needs, into an iterator of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from tailrace.core.event.event_block import EventBlock
from tailrace.core.plan.request import Answer, NeedDocuments, NeedEntries, NeedPreImages, NeedShardKeys, Request
from tailrace.core.stream.stream import Later, Need, Stream
from tailrace.errors import InternalError, TailraceError
from tailrace.read.source.base import OplogSource
from tailrace.read.source.routing import OwnerLookup
from tailrace.read.source.time_limit import TimeLimitError

#: Answers a need, or says that the answer comes later (``LATER``): the need is then asked again at the next call.
AnswerTo: TypeAlias = Callable[[Need], "Answer | Later"]


class AskAgainError(Exception):
    """A need cannot be answered at the moment, and is to be asked again at the next call: this one ends with ``error``.
    The exception itself never leaves ``drive``."""

    def __init__(self, error: TailraceError) -> None:
        super().__init__(str(error))
        self.error = error


def drive(stream: Stream, answer_to: AnswerTo) -> Iterator[EventBlock]:
    """What the stream makes of what it was fed, up to where it wants more.

    Where a need cannot be answered, the stream is given the error in the answer's place: it gives what comes before and
    raises, or asks in another way. The end of the caller's time (``TimeLimitError``), and the error of an
    ``AskAgainError``, come out at once; nothing is lost by it, nor by leaving the iterator: the next call continues
    where this one stopped, and makes the request again.
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
            except AskAgainError as refused:
                steps.close()
                raise refused.error from None
            except TailraceError as error:
                need = steps.throw(error)
            else:
                need = steps.send(answer)
    except StopIteration as end:
        given: EventBlock | None = end.value
        return given


def answers_of(source: OplogSource) -> AnswerTo:
    """The answers of the one source that the stream is read from."""
    return lambda need: answer_request(need.request, source)


def answer_request(request: Request, source: OplogSource, owners: OwnerLookup | None = None) -> Answer:
    """The answer to what a stream over the oplog of ``source`` asks for. A shard's entries and pre-images are its own;
    documents and shard keys are asked of the ``owners`` in its cluster. Raises TailraceError."""
    if isinstance(request, NeedEntries):
        return source.entries(request.times)
    if isinstance(request, NeedPreImages):
        return source.pre_images(request.keys)
    if isinstance(request, NeedDocuments):
        return (source if owners is None else owners).documents(request.lookups)
    if isinstance(request, NeedShardKeys) and owners is not None:
        return owners.shard_keys(request.uuids)
    raise InternalError(f"a stream over one oplog asks for {type(request).__name__}")
