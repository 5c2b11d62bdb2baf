"""Work that is under way inside a stream, and the needs by which it asks for what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from tailrace.core.event.event_block import EventBlock
from tailrace.core.plan.request import Answer, Emit, Request
from tailrace.errors import TailraceError, invariant

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")

#: What the stages and the kernel do with a batch: blocks and lists of events as they are finished, and requests.
Working: TypeAlias = Generator["EventBlock | Emit | Request", Answer, None]


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """What a stream needs to go on with the oplog of one participant. Each need is answered once.

    ``participant``  whose oplog it is; ``request`` says what is asked for and what the answer looks like
    """

    participant: str
    request: Request


def relayed(
    steps: Generator[_Given, Answer, object], in_place_of: Callable[[_Given], Generator[_Made, Answer, None]]
) -> Generator[_Made | Request, Answer, None]:
    """Run ``steps``, and replace what it yields with what ``in_place_of`` gives for it.

    A request is passed on all the same, after what ``in_place_of`` gives for it, and its answer or refusal reaches the
    step that asked. There is only this one loop: if refusals reached a stage from one driver and not from another,
    streams would end at different events.
    """
    answer: Answer = None
    failure: TailraceError | None = None
    while True:
        try:
            given = steps.send(answer) if failure is None else steps.throw(failure)
        except StopIteration:
            return
        answer = failure = None
        yield from in_place_of(given)
        if isinstance(given, Request):
            try:
                answer = yield given
            except TailraceError as error:
                failure = error


class Task:
    """One piece of work of a participant's, done step by step.

    ``need``  what it waits for; ``None`` while it can go on, or where nothing is under way
    """

    def __init__(self, participant: str) -> None:
        self._participant: Final = participant
        self._working: Working | None = None
        self._answer: Answer = None
        self._failure: TailraceError | None = None
        self.need: Need | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work is under way, or waiting."""
        return self._working is not None

    @property
    def can_go_on(self) -> bool:
        return self._working is not None and self.need is None

    def start(self, working: Working) -> None:
        invariant(self._working is None, f"{self._participant} is given work before it is done with the last")
        self._working = working

    def step(self) -> EventBlock | Emit | Need | None:
        """What comes next; ``None`` where the work is done, or waits for an answer. Raises what the work raises."""
        if self._working is None or self.need is not None:
            return None
        answer, failure = self._answer, self._failure
        self._answer = self._failure = None
        try:
            out = self._working.send(answer) if failure is None else self._working.throw(failure)
        except StopIteration:
            self._working = None
            return None
        except BaseException:
            self._working = None
            raise
        if isinstance(out, EventBlock | Emit):
            return out
        self.need = Need(self._participant, out)
        return self.need

    def settle(self, need: Need, answer: Answer, failure: TailraceError | None) -> bool:
        """Take the answer to ``need``, or the error in its place; False where it is not this task's."""
        if self.need is not need:
            return False
        self.need = None
        self._answer, self._failure = answer, failure
        return True

    def drop(self) -> None:
        """Leave the rest of the work undone."""
        if self._working is not None:
            self._working.close()
        self._working = self.need = self._failure = None
