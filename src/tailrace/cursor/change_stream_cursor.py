"""One open cursor: it reads ahead only as far as the reply at hand needs, and keeps what did not fit for the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple

from tailrace.cursor.action import Action, NeedOldest, OldestEntry, OplogRead, ReadOplog
from tailrace.cursor.batch import Batch
from tailrace.errors import ChangeStreamHistoryLost, ServerError, TailraceError
from tailrace.event.change_event import ChangeEvent
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.pipeline.stream import ChangeStreamPipeline
from tailrace.plan.plan import Plan
from tailrace.plan.request import Answer, Emit, Running


class Filled(NamedTuple):
    """How a reply ends: its post-batch resume token, and whether the stream is over."""

    resume_token: bytes
    closed: bool


class ChangeStreamCursor:
    """A change stream between two replies. ``plan`` must have a start.

    ``started_by_caller``  the start was the caller's and may lie before the oplog
    ``killed``             set from outside: a reply being made ends in 237 as soon as its driver answers
    """

    def __init__(self, plan: Plan, *, started_by_caller: bool) -> None:
        self._plan = plan
        self._pipeline = ChangeStreamPipeline(plan)
        self._events: deque[ChangeEvent] = deque()
        self._running: Running | None = None
        self._after = plan.read_after or ClusterTime(0)
        self._history_unconfirmed = started_by_caller
        self._has_read = False
        self.killed = False

    @property
    def first_token(self) -> bytes:
        """The post-batch resume token before anything was read."""
        return self._plan.first_token.to_bson()

    @property
    def unknown_operations(self) -> dict[str, int]:
        """How many oplog entries were skipped for an operation letter that is not known, by letter."""
        return self._pipeline.unknown_operations

    def fill(self, batch: Batch, deadline_ms: int | None) -> Generator[Action, Any, Filled]:
        """Put events into ``batch`` until it is full, the end of the oplog is reached, or the stream is over.

        ``deadline_ms``  how long to wait for a first event; ``None``: not at all

        Raises what ends the stream. Events that the batch held by then are lost with it, as on the server; a stream
        that is resumed gives them again.
        """
        at_end = False
        now_ms: int | None = None
        while not batch.is_full:
            if self._events:
                event = self._events[0]
                if not batch.add(event.to_bson(), event.token_bson):
                    break
                self._events.popleft()
            elif self._running is not None:
                yield from self._run_on()
            elif self._pipeline.invalidated:
                return Filled(self._pipeline.resume_token.to_bson(), closed=True)
            elif at_end and (batch or deadline_ms is None or (now_ms is not None and now_ms >= deadline_ms)):
                return Filled(self._pipeline.resume_token.to_bson(), closed=False)
            else:
                at_end, now_ms = yield from self._read(None if batch else deadline_ms)
        # Cut short: the stream goes on behind the last event given, whatever was read beyond it.
        return Filled(batch.last_token or self.first_token, closed=False)

    def _read(self, deadline_ms: int | None) -> Generator[Action, Any, tuple[bool, int]]:
        if self._history_unconfirmed:
            oldest: OldestEntry = yield NeedOldest()
            self._plan.confirm_history(oldest.time, oldest.history_complete)
            self._history_unconfirmed = False
        try:
            read: OplogRead = yield ReadOplog(self._after, deadline_ms)
        except ChangeStreamHistoryLost as error:
            raise self._overtaken() if self._has_read else error from None
        if self.killed:
            raise ServerError("operation was interrupted", code=237)
        self._has_read = True
        self._after = max(self._after, read.batch.high_water)
        self._running = self._pipeline.process(read.batch)
        return read.at_end, read.now_ms

    def _run_on(self) -> Generator[Action, Any, None]:
        """Let the pipeline work until it gives events or is through with what it was fed.

        What the driver throws in place of an answer is the pipeline's to deal with: it gives the events that come
        before, and then raises.
        """
        answer: Answer = None
        failure: TailraceError | None = None
        while self._running is not None and not self._events:
            try:
                request = self._running.send(answer) if failure is None else self._running.throw(failure)
            except StopIteration:
                self._running = None
                return
            answer = failure = None
            if isinstance(request, Emit):
                self._events.extend(request.events)
                continue
            try:
                answer = yield request
            except TailraceError as error:
                failure = error

    def _overtaken(self) -> ServerError:
        """The oplog was truncated past a cursor that was reading it: the client resumes, and is then told 286."""
        return ServerError(
            "CollectionScan died due to failure to restore tailable cursor position. Last seen record id: "
            f"RecordId({int(self._after)})",
            code=136,
        )
