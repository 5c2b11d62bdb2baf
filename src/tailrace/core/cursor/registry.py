"""All open cursors of one source: ids, the three commands, killing, and dropping cursors that nobody uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tailrace.core.cursor.action import Acting, Members, NeedMembers, NeedStart, StreamStart
from tailrace.core.cursor.aggregate import AggregateCommand, check_kind
from tailrace.core.cursor.change_stream_cursor import ChangeStreamCursor
from tailrace.core.cursor.command import check_bson
from tailrace.core.cursor.get_more import GetMoreCommand, cursors_to_kill
from tailrace.core.cursor.reply import IN_AGGREGATE, IN_GET_MORE, cursor_reply, error_reply, kill_reply
from tailrace.core.cursor.reply_events import ReplyEvents
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import SERVER_6_0, ServerProfile
from tailrace.core.raw_bson import elements
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.merge import MergedStream
from tailrace.core.stream.stream import Stream, open_stream
from tailrace.errors import InternalError, ServerError, TailraceError, UsageError

#: A cursor that was not used for this long is closed (cursorTimeoutMillis of mongod).
IDLE_MS_MAX: Final = 600_000


@dataclass(slots=True)
class _Open:
    cursor: ChangeStreamCursor
    namespace: str
    used_ms: int
    in_use: bool = False


class CursorRegistry:
    """The cursors of one source.

    ``new_ids``  where cursor ids come from: positive int64 that cannot be guessed, endless
    ``profile``  the server version whose streams are given; may be set again, for those that are opened from then on
    ``kernel``   whether the kernel works on the batches

    Each method that carries out a command gives a generator of actions whose value is the reply; a TailraceError that
    the driver throws into it becomes an error reply. Only ``InternalError`` comes out, and ends its cursor.
    """

    def __init__(
        self,
        new_ids: Iterator[int],
        profile: ServerProfile = SERVER_6_0,
        *,
        idle_ms_max: int = IDLE_MS_MAX,
        kernel: KernelUse = "auto",
    ) -> None:
        self._new_ids = new_ids
        self.profile = profile
        self._idle_ms_max = idle_ms_max
        self._kernel: KernelUse = kernel
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, cursor_id: int) -> bool:
        return cursor_id in self._open

    def run(self, database: str, command: bytes, now_ms: int) -> Acting:
        """Carry out an aggregate, getMore or killCursors command on a database."""
        try:
            check_bson(command)
            name = next((element.name for element in elements(command)), b"")
        except TailraceError as error:
            return error_reply(error, in_stream=False, version=self.profile.series)
        match name:
            case b"aggregate":
                return (yield from self.aggregate(database, command, now_ms))
            case b"getMore":
                return (yield from self.get_more(database, command, now_ms))
            case b"killCursors":
                return self.kill_cursors(command)
            case _:
                text = name.decode("utf-8", "replace")
                return error_reply(
                    UsageError(f"no such command: '{text}'", code=59), in_stream=False, version=self.profile.series
                )

    def aggregate(self, database: str, command: bytes, now_ms: int) -> Acting:
        """Open a change stream and give its first batch."""
        prefix = ""
        try:
            wanted = AggregateCommand.parse(database, command, self.profile.version)
            start: StreamStart = yield NeedStart(wanted.scope)
            check_kind(wanted.namespace, start.kind, self.profile.version)
            plan = build_plan(wanted.options(self.profile), self.profile)
            started_by_caller = plan.start is not None
            if not started_by_caller:
                plan = plan.start_after(start.operation_time)
            members: Members | None = None
            if started_by_caller and start.knows_past and plan.read_after is not None:
                members = yield NeedMembers(plan.read_after)
            stream = _stream(plan, start, members, self._kernel)
            cursor = ChangeStreamCursor(stream, started_by_caller=started_by_caller)
            prefix = self._prefixed(IN_AGGREGATE)
            reply = ReplyEvents("firstBatch", wanted.batch_size)
            token, closed = yield from cursor.fill(reply, None)
        except InternalError:
            raise
        except TailraceError as error:
            return error_reply(error, prefix=prefix, in_stream=True, version=self.profile.series)
        cursor_id = 0 if closed else self._new_id()
        if not closed:
            self._open[cursor_id] = _Open(cursor, wanted.namespace, now_ms)
        return self._reply(reply, token, cursor_id, wanted.namespace)

    def get_more(self, database: str, command: bytes, now_ms: int, wanted: GetMoreCommand | None = None) -> Acting:
        """Give the next batch, after a wait where there is nothing. ``wanted``: what the command asks for, if it has
        been parsed already."""
        try:
            wanted = wanted or GetMoreCommand.parse(database, command, self.profile.version)
            entry = self._checked_out(wanted)
        except TailraceError as error:
            return error_reply(error, in_stream=False, version=self.profile.series)
        reply = ReplyEvents("nextBatch", wanted.batch_size)
        closed = True  # unless it ends well: whatever leaves this block closes the cursor
        entry.in_use = True
        try:
            token, closed = yield from entry.cursor.fill(reply, now_ms + wanted.await_ms)
        except InternalError:
            raise
        except TailraceError as error:
            return error_reply(error, prefix=self._prefixed(IN_GET_MORE), in_stream=True, version=self.profile.series)
        finally:
            entry.in_use = False
            entry.used_ms = now_ms + wanted.await_ms
            if closed:
                self._open.pop(wanted.cursor_id, None)
        cursor_id = 0 if closed else wanted.cursor_id
        return self._reply(reply, token, cursor_id, entry.namespace)

    def _prefixed(self, prefix: str) -> str:
        """The text before the message of an error of execution: none on 4.4."""
        return prefix if self.profile.series >= (5, 0) else ""

    def kill_cursors(self, command: bytes) -> bytes:
        """Close cursors; one that is waiting ends when its driver next answers it. The namespace is not checked."""
        try:
            wanted = cursors_to_kill(command, self.profile.version)
        except TailraceError as error:
            return error_reply(error, in_stream=False, version=self.profile.series)
        killed: list[int] = []
        not_found: list[int] = []
        for cursor_id in wanted:
            (killed if self.kill(cursor_id) else not_found).append(cursor_id)
        return kill_reply(killed, not_found)

    def kill(self, cursor_id: int) -> bool:
        """Close a cursor as ``kill_cursors`` does; whether it was open."""
        entry = self._open.pop(cursor_id, None)
        if entry is not None:
            entry.cursor.killed = True
        return entry is not None

    def expire(self, now_ms: int) -> int:
        """Close the cursors that nobody has asked for too long; how many."""
        idle = [
            cursor_id
            for cursor_id, entry in list(self._open.items())  # another thread may open one
            if not entry.in_use and now_ms - entry.used_ms >= self._idle_ms_max
        ]
        for cursor_id in idle:
            self._open.pop(cursor_id, None)
        return len(idle)

    def _reply(self, reply: ReplyEvents, token: bytes, cursor_id: int, namespace: str) -> bytes:
        # Only invalidation closes a change stream's cursor in a reply that is no error.
        invalidated = cursor_id == 0 and self.profile.reply_says_invalidated
        return cursor_reply(reply, token, cursor_id=cursor_id, namespace=namespace, invalidated=invalidated)

    def _new_id(self) -> int:
        return next(cursor_id for cursor_id in self._new_ids if cursor_id not in self._open)

    def _checked_out(self, wanted: GetMoreCommand) -> _Open:
        entry = self._open.get(wanted.cursor_id)
        if entry is None:
            raise ServerError(f"cursor id {wanted.cursor_id} not found", code=43)
        if entry.in_use:
            raise ServerError(f"cursor id {wanted.cursor_id} is already in use", code=143)
        if entry.namespace != wanted.namespace:
            raise ServerError(
                f"Requested getMore on namespace '{wanted.namespace}', but cursor belongs to a different namespace "
                f"{entry.namespace}",
                code=13,
            )
        return entry


def _stream(plan: Plan, start: StreamStart, members: Members | None, kernel: KernelUse) -> Stream:
    if start.shards is None:
        return open_stream(plan, kernel=kernel)
    if members is not None:
        from_start = [name for name, after in members.shards if after == plan.read_after]
        stream = MergedStream(plan, from_start, config_after=members.config_after, kernel=kernel)
        for name, after in members.shards:
            stream.open_shard(name, after.tick())
        return stream
    return MergedStream(plan, start.shards, config_after=start.config_after, kernel=kernel)
