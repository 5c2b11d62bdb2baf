"""One open cursor: it reads ahead only as far as the reply at hand needs, and keeps what did not fit for the next."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from tailrace.core.cursor.action import Action, NeedOldest, OldestEntry, OplogRead, Position, ReadOplog
from tailrace.core.cursor.reply_events import ReplyEvents
from tailrace.core.event.event_block import EventBlock
from tailrace.core.stream.stream import Stream
from tailrace.errors import ChangeStreamHistoryLost, ServerError


class Filled(NamedTuple):
    """How a reply ends: its post-batch resume token, and whether the stream is over."""

    resume_token: bytes
    closed: bool


class ChangeStreamCursor:
    """A change stream between two replies.

    ``stream``             over a single oplog, or over those of a cluster
    ``started_by_caller``  the start was the caller's and may lie before the oplog
    ``killed``             set from outside: a reply being made ends in 237 as soon as its driver answers
    """

    def __init__(self, stream: Stream, *, started_by_caller: bool) -> None:
        self._stream = stream
        self._events: EventBlock | None = None
        #: The participants of which it is not known yet whether their oplogs reach back to the start.
        self._unconfirmed = set(stream.participants) if started_by_caller else set()
        self._has_read = False
        #: What the last batch has become.
        self._made = self._made_bytes = 0
        self.killed = False

    @property
    def first_token(self) -> bytes:
        """The post-batch resume token before anything was read."""
        return self._stream.plan.first_token.to_bson()

    @property
    def stream(self) -> Stream:
        """The stream that the cursor reads: its statistics, and what it waits for."""
        return self._stream

    def fill(self, reply: ReplyEvents, deadline_ms: int | None) -> Generator[Action, Any, Filled]:
        """Put events into ``reply`` until it is full, the end of the oplog is reached, or the stream is over.

        ``deadline_ms``  how long to wait for a first event; ``None``: not at all

        Raises what ends the stream. Events that the reply held by then are lost with it, as on the server; a stream
        that is resumed gives them again.
        """
        at_end = False
        now_ms: int | None = None
        while not reply.is_full:
            if self._events is None:
                self._events = yield from self._made_next()
            if self._events is not None:
                if not self._put_into(reply):
                    break
            elif self._stream.invalidated:
                return Filled(self._stream.token.to_bson(), closed=True)
            elif at_end and (reply or deadline_ms is None or (now_ms is not None and now_ms >= deadline_ms)):
                return Filled(self._stream.token.to_bson(), closed=False)
            else:
                at_end, now_ms = yield from self._read(None if reply else deadline_ms)
        # Cut short: the stream goes on after the last event given, whatever was read beyond it.
        return Filled(reply.last_token or self.first_token, closed=False)

    def _made_next(self) -> Generator[Action, Any, EventBlock | None]:
        block = yield from self._stream.next_block()
        if block is not None:
            self._made += len(block)
            self._made_bytes += block.size
        return block

    def _put_into(self, reply: ReplyEvents) -> bool:
        """Move events that wait into the reply; False where some have to wait longer."""
        events = self._events
        if events is None:
            return True
        taken = reply.add(events)
        self._events = None if taken == len(events) else events.cut(taken, len(events))
        return self._events is None

    def _read(self, deadline_ms: int | None) -> Generator[Action, Any, tuple[bool, int]]:
        stream = self._stream
        wanted = [name for name in stream.participants if stream.wants(name)]
        if stream.awaited_time is not None:
            # The others are read when this event has left: they need not be ahead of it.
            wanted = [name for name in wanted if name in stream.waiting_for] or wanted
        for name in wanted:
            if name in self._unconfirmed:
                oldest: OldestEntry = yield NeedOldest(name)
                stream.plan.confirm_history(oldest.time, oldest.history_complete)
                self._unconfirmed.discard(name)
        positions = tuple(Position(name, stream.promised(name)) for name in wanted)
        try:
            read: OplogRead = yield ReadOplog(
                positions, deadline_ms, stream.awaited_time, stream.oplog_filter, self._made, self._made_bytes
            )
        except ChangeStreamHistoryLost as error:
            raise self._overtaken(positions[0]) if self._has_read else error from None
        if self.killed:
            raise ServerError("operation was interrupted", code=237)
        self._has_read = True
        self._made = self._made_bytes = 0
        stream.feed(read.participant, read.batch)
        return read.at_end, read.now_ms

    def _overtaken(self, position: Position) -> ServerError:
        """The oplog was truncated past a cursor that was reading it: the client resumes, and is then told 286."""
        return ServerError(
            "CollectionScan died due to failure to restore tailable cursor position. Last seen record id: "
            f"RecordId({int(position.after)})",
            code=136,
        )
