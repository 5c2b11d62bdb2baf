"""A change stream as its driver sees it: batches of oplog in, blocks of finished events and needs out. No I/O.

``open_stream`` makes one over a single oplog, ``tailrace.core.stream.merge.MergedStream`` one over those of a cluster;
its driver need not know which. Feed a participant's batch, take ``next_output`` until it gives nothing more, and feed
the next one that the stream ``wants``::

    for batch in source.read(...):
        stream.feed(ONE_OPLOG, batch)
        while (out := stream.next_output()) is not None:
            if isinstance(out, Need):
                stream.answer(out, ...)  # or stream.refuse(out, error); now, or later while other participants go on
            else:
                ...  # an EventBlock: events in stream order

``next_block`` does this loop's inside for every driver; ``tailrace.read.source.drive`` answers from a source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from tailrace.core.event.event_block import EventBlock
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.pipeline.quarantine import Aside
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.pipeline.task import Need, Task
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import Answer, Emit, OplogBatch
from tailrace.core.stream.kernel_choice import KernelUse, working_on
from tailrace.errors import InternalError, TailraceError

__all__ = ["LATER", "ONE_OPLOG", "Later", "Need", "Statistics", "Stream", "open_stream"]

#: The participant of a stream over a single oplog.
ONE_OPLOG: Final = "oplog"


class Later:
    """In place of an answer: it will come."""


LATER: Final = Later()
Answered: TypeAlias = "Answer | Later"


@dataclass(frozen=True, slots=True)
class Statistics:
    """``unknown_operations``  how many entries, and operations inside of entries, were skipped because their kind is
    not known, by kind"""

    unknown_operations: dict[str, int]


class Stream(ABC):
    """One change stream.

    ``plan``         what was asked for, with a start
    ``invalidated``  the stream is over: all its events were given, or no participant has any more for it
    """

    plan: Plan
    invalidated: bool

    # -- what a driver does ---------------------------------------------------------------------------------------

    @abstractmethod
    def feed(self, participant: str, batch: OplogBatch) -> None:
        """The next batch of a participant's oplog. Call it where the stream ``wants`` one."""

    @abstractmethod
    def next_output(self) -> EventBlock | Need | None:
        """The next finished events, or something that is needed; ``None``: feed it, answer it, or promise something.

        Raises what ends the stream, after everything that comes before it was given: ``OplogFormatError`` with the
        entry's position, ``ChangeStreamFatal`` (280), ``ChangeStreamHistoryLost`` (286), an error that a need was
        refused with, or what a stage raises. An error of one of several participants has its name.
        """

    @property
    def needs(self) -> tuple[Need, ...]:
        """What was asked for and is neither answered nor refused yet."""
        return tuple(task.need for task in self._tasks() if task.need is not None)

    def answer(self, need: Need, answer: Answer) -> None:
        """Answer a need. One whose participant has left the stream meanwhile is forgotten."""
        self._take_answer(need, answer, None)

    def refuse(self, need: Need, error: TailraceError) -> None:
        """A need cannot be answered: the stream gives what comes before, and then raises, or asks in another way."""
        self._take_answer(need, None, error)

    def next_block(self) -> Generator[Need, Answered, EventBlock | None]:
        """The next finished events, for a driver that answers as it goes: yields each need, is sent its answer or
        ``LATER``, or is thrown the error it is refused with. Its value is ``None`` where the stream wants more input.

        What was left for later is asked again first. A driver that closes it in place of an answer leaves the need for
        later too.
        """
        for need in self.needs:
            yield from self._asked(need)
        while isinstance(out := self.next_output(), Need):
            yield from self._asked(out)
        return out

    def _asked(self, need: Need) -> Generator[Need, Answered, None]:
        try:
            answer = yield need
        except TailraceError as error:
            self.refuse(need, error)
            return
        if not isinstance(answer, Later):
            self.answer(need, answer)

    def _take_answer(self, need: Need, answer: Answer, failure: TailraceError | None) -> None:
        for task in self._tasks():
            if task.settle(need, answer, failure):
                return

    @abstractmethod
    def _tasks(self) -> Iterable[Task]: ...

    def take_quarantined(self) -> list[QuarantinedEvent]:
        """The events that were put aside since the last call because a stage could not handle them. None unless the
        plan says that such events are put aside."""
        found: list[QuarantinedEvent] = []
        for aside in self._asides():
            if aside:
                found += aside
                aside.clear()
        return found

    @abstractmethod
    def _asides(self) -> Iterable[Aside]: ...

    # -- what a driver asks ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def participants(self) -> tuple[str, ...]:
        """Whose oplogs are read, in the order in which they were opened."""

    @abstractmethod
    def wants(self, participant: str) -> bool:
        """Whether the participant's next batch should be fed: the last one is done with, its part of the stream is not
        over, and it is not too far ahead of the others."""

    @abstractmethod
    def promised(self, participant: str) -> ClusterTime:
        """Up to which cluster time the participant's oplog was worked on. Read on after it."""

    @property
    @abstractmethod
    def token(self) -> ResumeToken:
        """The post-batch resume token: where a new stream goes on after all that was given. It never goes back."""

    @property
    @abstractmethod
    def high_water(self) -> ClusterTime:
        """Everything at or before this cluster time has come in, from every participant."""

    @property
    @abstractmethod
    def searching(self) -> bool:
        """The event resumed from has not been met yet."""

    @property
    @abstractmethod
    def statistics(self) -> Statistics: ...

    @property
    @abstractmethod
    def oplog_filter(self) -> bytes | None:
        """The query by which the source of the entries may leave some out from here on; ``None``: it gives all. It may
        change from one batch to the next."""

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The participants that hold back the next event; where no event waits, those that hold back the token."""
        return ()

    @property
    def awaited_time(self) -> ClusterTime | None:
        """The cluster time of the event that waits for other participants' promises; ``None`` where none waits. A
        promise of this time from each of ``waiting_for`` lets it leave."""
        return None

    @property
    def leaving(self) -> tuple[str, ...]:
        """The shards that were removed from the cluster and have to be read up to their removal still."""
        return ()

    # -- what a driver tells --------------------------------------------------------------------------------------

    @abstractmethod
    def promise(self, participant: str, cluster_time: ClusterTime) -> None:
        """Everything of the participant's oplog at or before ``cluster_time`` was fed; what comes is later."""

    @abstractmethod
    def fail(self, participant: str, error: TailraceError) -> None:
        """The participant's oplog cannot be read any further: what comes before is given, and then the error raised.
        The first error counts."""

    def open_shard(self, name: str, start: ClusterTime) -> None:
        """A further shard takes part from ``start``, inclusive. For a shard that is asked for (``NeedShard``) this was
        done already."""
        raise InternalError(f"a stream over a single oplog is told about the shard {name}, from {start}")


class OneOplogStream(Stream):
    """The stream over a replica set, a dump, or one shard on its own."""

    def __init__(self, pipeline: ChangeStreamPipeline, kernel: KernelUse) -> None:
        self.plan = pipeline.plan
        self._pipeline = pipeline
        self._kernel: KernelUse = kernel
        self._task = Task(ONE_OPLOG)
        self._failure: TailraceError | None = None
        self._has_failed = False

    @property
    def invalidated(self) -> bool:  # type: ignore[override]
        return self._pipeline.invalidated

    def feed(self, participant: str, batch: OplogBatch) -> None:
        self._task.start(working_on(self._pipeline, batch, self._kernel))

    def next_output(self) -> EventBlock | Need | None:
        while self._task.can_go_on:
            try:
                out = self._task.step()
            except TailraceError:
                self._has_failed = True
                raise
            if not isinstance(out, Emit):
                if out is not None:
                    return out
            elif out.events:
                return EventBlock.of(out.events)
        if self._failure is not None and not self._task.is_busy and not self._has_failed:
            self._has_failed = True
            raise self._failure
        return None

    def _tasks(self) -> Iterable[Task]:
        return (self._task,)

    def _asides(self) -> Iterable[Aside]:
        return (self._pipeline.quarantined,)

    @property
    def participants(self) -> tuple[str, ...]:
        return (ONE_OPLOG,)

    def wants(self, participant: str) -> bool:
        over = self._pipeline.invalidated or self._has_failed or self._failure is not None
        return not over and not self._task.is_busy

    def promised(self, participant: str) -> ClusterTime:
        return self._pipeline.high_water

    @property
    def token(self) -> ResumeToken:
        return self._pipeline.resume_token

    @property
    def high_water(self) -> ClusterTime:
        return self._pipeline.high_water

    @property
    def searching(self) -> bool:
        return self._pipeline.searching

    @property
    def statistics(self) -> Statistics:
        return Statistics(dict(self._pipeline.unknown_operations))

    @property
    def oplog_filter(self) -> bytes | None:
        return self._pipeline.oplog_filter

    def promise(self, participant: str, cluster_time: ClusterTime) -> None:
        self.feed(participant, OplogBatch(b"", cluster_time))

    def fail(self, participant: str, error: TailraceError) -> None:
        self._failure = self._failure or error


def open_stream(
    plan: Plan,
    *,
    mid_stream: bool = False,
    on_shard: bool = False,
    pushes_down: bool = True,
    kernel: KernelUse = "auto",
) -> Stream:
    """The stream over a single oplog; ``plan`` has a start.

    ``mid_stream``   a later slice of a stream whose start another slice has found: nothing is searched for
    ``on_shard``     the oplog is a shard's: before 5.3 document keys of inserts need its catalog
    ``pushes_down``  whether the user's ``$match`` is asked of entries before they are transformed
    ``kernel``       whether the kernel works on the batches
    """
    pipeline = ChangeStreamPipeline(plan, mid_stream=mid_stream, on_shard=on_shard, pushes_down=pushes_down)
    return OneOplogStream(pipeline, kernel)
