"""What a stream's own cursor does for a getMore that is carried out without a task."""

from __future__ import annotations

from typing import Any, Final

from tailrace.core.cursor import Acting, Action, OplogRead, ReadOplog
from tailrace.core.cursor.get_more import GetMoreCommand
from tailrace.core.cursor.registry import IDLE_MS_MAX
from tailrace.errors import InternalError, TailraceError
from tailrace.watch.gateway.engine import Engine
from tailrace.watch.gateway.local_acting import advance
from tailrace.watch.gateway.reading import INLINE_BYTES
from tailrace.watch.gateway.reply_facts import CursorFacts, token_form
from tailrace.watch.gateway.served import ServedStream
from tailrace.watch.gateway.settling import settle
from tailrace.watch.gateway.shared_steps import SharedStep

#: A cursor that does not know of a getMore is closed if it was not used for ten minutes: before that it is told.
_UNTOLD_MS_MAX: Final = IDLE_MS_MAX - 30_000


class CursorWork:
    """What a stream's own cursor does for one getMore, as far as nothing but the shared window is needed.

    ``reply``     the cursor's, once it is made
    ``acting``    ``None``: the cursor does not know of the getMore yet
    ``may_wait``  whether it need not know of it while nothing comes, until ``until_ms`` on the cursors' clock
    """

    __slots__ = (
        "_action",
        "_begun_ms",
        "_engine",
        "_last",
        "_reads",
        "_stream",
        "_wanted",
        "acting",
        "left",
        "may_wait",
        "reply",
        "until_ms",
    )

    def __init__(self, engine: Engine, stream: ServedStream, wanted: GetMoreCommand, begun_ms: int) -> None:
        self._engine, self._stream, self._wanted, self._begun_ms = engine, stream, wanted, begun_ms
        self.until_ms = begun_ms + wanted.await_ms
        unused_ms = self.until_ms - stream.sharing.own_ms
        self.may_wait = stream.sharing.is_settled and wanted.await_ms > 0 and unused_ms <= _UNTOLD_MS_MAX
        self.acting: Acting | None = None
        self.reply: bytes | None = None
        #: What it has asked for.
        self._action: Action | None = None
        #: How often it was given entries, or told that there are none; and what last.
        self._reads = 0
        self._last: OplogRead | None = None
        #: What a task has to go on with: an action to carry out, or what the last one is answered.
        self.left: tuple[Action | None, OplogRead | None] | None = None

    @property
    def wants_entries(self) -> bool:
        """Whether it can go on with what the window has, or has not begun."""
        return self.reply is None and (self._action is None or isinstance(self._action, ReadOplog))

    def begin(self) -> None:
        """Have the cursor know of the getMore."""
        if self.acting is not None:
            return
        settle(self._stream, self._engine.cursors, self._engine.steps)
        self.acting = self._engine.cursors.get_more("", b"", self._begun_ms, self._wanted)
        self._asked(self._advanced(None))

    def drive(self, read: OplogRead | None) -> None:
        """Have it work on what was read, until it has a ``reply``, there is no more, or something is ``left``."""
        stream = self._stream
        reading = stream.reading
        while self.reply is None:
            if not isinstance(self._action, ReadOplog) or (read is None and reading.ending is None):
                self.left = self._action, None
                return
            deadline = self._action.deadline_ms
            if read is None or reading.ending is not None:
                self._asked(self._advanced(None, reading.ending))
            else:
                if not read.batch.raw and read.at_end and deadline is not None and read.now_ms < deadline:
                    if not reading.is_hurried:
                        return
                    read = read._replace(now_ms=deadline)
                self._reads += 1
                self._last = read
                stream.heavy = len(read.batch.raw)
                if stream.heavy * stream.cost.weight > INLINE_BYTES:
                    self.left = None, read
                    return
                self._asked(self._advanced(read))
            if self.reply is None:
                read = reading.at_hand()

    def _asked(self, out: Action | bytes) -> None:
        if isinstance(out, bytes):
            self.reply = out
        else:
            self._action = out

    def _advanced(self, answer: Any, error: TailraceError | None = None) -> Action | bytes:
        assert self.acting is not None
        try:
            return advance(self.acting, answer, error)
        except InternalError as caught:
            return self._engine.failed(caught)

    def note_sharing(self, reply: bytes, facts: CursorFacts) -> SharedStep | None:
        """Note whether the stream stands between two replies, and give what others may share of this one."""
        stream, engine, sharing, last = self._stream, self._engine, self._stream.sharing, self._last
        size, was_settled = self._wanted.batch_size, sharing.is_settled
        # Nothing was looked up: so no event is longer than its entry, and none was left for being too long.
        is_whole = facts.code is None and last is not None and last.at_end and (size is None or facts.events < size)
        sharing.is_settled = is_whole and stream.cursor_id in engine.cursors
        if sharing.is_settled and last is not None and facts.events:
            sharing.form = token_form(reply)
            if was_settled and self._reads == 1:
                return engine.steps.add(sharing, last.batch, size, stream.cursor_id, reply)
        return None
