"""GetMores that are carried out without a task: those that repeat the last one of their connection, of plain streams
that read from the shared window.

Such a getMore is the rule, and a task, a timer and a row of coroutines for each would cost more than its event. It is
taken as it arrives (``ClientReader.take``), waits as an entry in a list, and is answered in the call by which the
reader reports that something has come. Anything more (something has to be looked up or asked, the client does not take
its replies, a batch is large) is left to a task, which continues from that point.

Its cursor learns of it only when there is something to do. Until then another stream may do it (``shared_steps``).
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Coroutine
from typing import Any, Final

from tailrace.core.cursor import Acting, Action, OplogRead, ReadOplog
from tailrace.core.cursor.get_more import GetMoreCommand
from tailrace.core.cursor.registry import IDLE_MS_MAX
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import encode_int64
from tailrace.errors import InternalError, ServerError, TailraceError
from tailrace.watch.gateway.command import ClientCommand
from tailrace.watch.gateway.commands import Commands
from tailrace.watch.gateway.connection import ClientConnection
from tailrace.watch.gateway.deadlines import Deadlines
from tailrace.watch.gateway.engine import Engine
from tailrace.watch.gateway.fail_points import FailPoints
from tailrace.watch.gateway.frame import OP_MSG
from tailrace.watch.gateway.get_more_checks import FAR_S, check_owner, check_use
from tailrace.watch.gateway.local_acting import advance, size_of
from tailrace.watch.gateway.metrics import GatewayMetrics
from tailrace.watch.gateway.reading import INLINE_BYTES, now_ms
from tailrace.watch.gateway.repeated import GetMoreFacts
from tailrace.watch.gateway.reply_facts import CursorFacts, facts_of_next, facts_of_reply, reached, token_form
from tailrace.watch.gateway.served import ServedStream
from tailrace.watch.gateway.settling import settle
from tailrace.watch.gateway.shared_steps import SharedStep

#: A longer reply is sent by a task, as fast as the client takes it.
_FRAME_BYTES_MAX: Final = 1 << 16
#: A cursor that does not know of a getMore is closed if it was not used for ten minutes: before that it is reported.
_UNTOLD_MS_MAX: Final = IDLE_MS_MAX - 30_000
#: What surrounds the document of a reply: header, flags, and the kind of its section.
_FRAME: Final = struct.Struct("<iiiiIB")
_REQUEST_ID_AT: Final = 4
_INT32: Final = struct.Struct("<i")


class QuickGetMores:
    """What the getMores without a task of a gateway have in common.

    ``fail_points``  ``None``: clients may set none here
    """

    def __init__(
        self,
        engine: Engine,
        commands: Commands,
        metrics: GatewayMetrics,
        *,
        rights_seconds: float,
        fail_points: FailPoints | None,
    ) -> None:
        self.engine = engine
        self.commands = commands
        self.metrics = metrics
        self.rights_seconds = rights_seconds
        self._fail_points = fail_points
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.tasks: set[asyncio.Task[None]] = set()

    def stamped_step(self, step: SharedStep) -> tuple[bytes, bytes]:
        """A step's reply with the server's times, before and after the cursor's id. It is stamped once for each time
        of the server's."""
        clock = self.engine.clock_now()
        known = step.stamped
        if known is None or known[0] is not clock.document:
            whole = clock.stamp(step.reply(0), step.reached)
            known = step.stamped = clock.document, whole[: len(step.head)], whole[len(step.head) + 8 :]
        return known[1], known[2]

    def stream_of(
        self, connection: ClientConnection, command: ClientCommand, facts: GetMoreFacts, time: ClusterTime
    ) -> ServedStream | None:
        """The stream of a getMore that is to be carried out without a task. ``None``: it is not, which includes a
        getMore that is to be refused."""
        engine, wanted = self.engine, facts.wanted
        stream = None if wanted is None else engine.streams.get(wanted.cursor_id)
        if stream is None or wanted is None or not facts.is_plain or facts.error is not None:
            return None
        if stream.is_busy or stream.worker is not None or stream.reading.needs_task or engine.stopping is not None:
            return None
        if self._fail_points is not None and self._fail_points.is_set:
            return None
        if time.seconds > engine.clock.time.seconds + FAR_S or stream.heavy * stream.cost.weight > INLINE_BYTES:
            return None
        identity = connection.identification.known(self.rights_seconds)
        if identity is None or not (identity.users or identity.may_all) or wanted.namespace != stream.namespace:
            return None
        try:
            check_owner(stream, identity, command.session, engine.version)
            check_use(stream, wanted, facts, engine.version)
        except ServerError:
            return None
        return stream


class _CursorWork:
    """What a stream's own cursor does for one getMore, as far as nothing but the shared window is needed.

    ``reply``   the cursor's, once it is made
    ``acting``  ``None``: the cursor does not know of the getMore yet
    """

    def __init__(self, engine: Engine, stream: ServedStream, wanted: GetMoreCommand, begun_ms: int) -> None:
        self._engine, self._stream, self._wanted, self._begun_ms = engine, stream, wanted, begun_ms
        self.acting: Acting | None = None
        self.reply: bytes | None = None
        #: What it has asked for.
        self._action: Action | None = None
        #: How often it was given entries, or learned that there are none; and what came last.
        self._reads = 0
        self._last: OplogRead | None = None
        #: What a task has to go on with: an action to carry out, or what the last one is answered.
        self.left: tuple[Action | None, OplogRead | None] | None = None

    @property
    def wants_entries(self) -> bool:
        """Whether it can go on with what the window has, or has not begun."""
        return self.reply is None and (self._action is None or isinstance(self._action, ReadOplog))

    def begin(self) -> None:
        """Let the cursor know about the getMore."""
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

    def note_sharing(self, reply: bytes, facts: CursorFacts) -> None:
        """Whether the stream stands between two replies, and what others may share of this one."""
        stream, engine, sharing, last = self._stream, self._engine, self._stream.sharing, self._last
        size, was_settled = self._wanted.batch_size, sharing.is_settled
        # Nothing was looked up, so no event is longer than its entry, and none was left for being too long.
        is_whole = facts.code is None and last is not None and last.at_end and (size is None or facts.events < size)
        sharing.is_settled = is_whole and stream.cursor_id in engine.cursors
        if sharing.is_settled and last is not None and facts.events:
            sharing.form = token_form(reply)
            if was_settled and self._reads == 1:
                engine.steps.add(sharing, last.batch, size, stream.cursor_id, reply)


class QuickGetMore:
    """The getMores without a task of one connection, one after another.

    ``is_busy``  one is under way
    """

    def __init__(self, path: QuickGetMores, connection: ClientConnection) -> None:
        self._path = path
        self._connection = connection
        self.is_busy = False
        self._idle = asyncio.Event()
        #: It waits for entries or for its turn; else a task has it.
        self._waits = False
        self._task: asyncio.Task[None] | None = None
        self._message = b""
        self._stream: ServedStream
        self._wanted: GetMoreCommand
        self._work: _CursorWork

    # -- what the connection tells ----------------------------------------------------------------------------------

    def take(self, data: bytes) -> bool:
        """Whether ``data``, which came while nothing was under way, is a getMore that is carried out here."""
        last = self._connection.last_get_more
        if len(data) != last.size or self.is_busy or not self._connection.is_at_rest:
            return False
        time_of_it = last.time_of(data)
        if time_of_it is None or last.command is None or last.facts is None:
            return False
        if self._connection.identification.asks_nobody:
            return self._takes(data, last.command, last.facts, time_of_it)
        # The shared read first takes what has come with it: it may say that the user has lost a right.
        self.is_busy = True
        self._path.loop.call_soon(self._take_or_leave, data, last.command, last.facts, time_of_it)
        return True

    def _take_or_leave(self, *args: Any) -> None:
        if self.is_busy and not self._takes(*args):
            self.is_busy = False
            self._idle.set()
            self._connection.client.reader.feed_data(args[0])

    def _takes(self, data: bytes, command: ClientCommand, facts: GetMoreFacts, time: ClusterTime) -> bool:
        try:
            stream = self._path.stream_of(self._connection, command, facts, time)
            if stream is None or facts.wanted is None:
                return False
            self._take(data, stream, facts.wanted)
        except Exception as fault:  # noqa: BLE001  told to the connection
            self._failed(fault)
        return True

    def client_left(self) -> None:
        """Nobody waits for the getMore under way."""
        if not self.is_busy:
            return
        if self._task is not None:
            self._task.cancel()
        else:
            if self._waits:
                self._give_up()
            self._is_done()

    async def done(self) -> None:
        """Wait until nothing is under way."""
        while self.is_busy:
            self._idle.clear()
            await self._idle.wait()

    # -- from beginning to end --------------------------------------------------------------------------------------

    def _take(self, message: bytes, stream: ServedStream, wanted: GetMoreCommand) -> None:
        path, reading = self._path, stream.reading
        path.metrics.client_bytes_received += len(message)
        self._connection.rest()
        self._message, self._stream, self._wanted = message, stream, wanted
        begun_ms = now_ms()
        self._work = _CursorWork(path.engine, stream, wanted, begun_ms)
        self.is_busy = self._waits = stream.is_busy = True
        stream.quick = self
        reading.rest()
        reading.on_came = self.step
        if wanted.await_ms:
            path.deadlines.add(self, wanted.await_ms)
        unused_ms = begun_ms + wanted.await_ms - stream.sharing.own_ms
        may_wait = stream.sharing.is_settled and wanted.await_ms and unused_ms <= _UNTOLD_MS_MAX
        if not may_wait or reading.has_more:
            path.engine.turns.call(stream.tenant, self.step)

    def is_over(self) -> None:
        """Its time is up."""
        self._path.engine.turns.call(self._stream.tenant, self.step)

    def step(self) -> None:
        """Do what there is to do, in a turn."""
        if not self._waits:
            return
        begun, stream = time.perf_counter(), self._stream
        try:
            self._look()
        except Exception as fault:  # noqa: BLE001  told to the connection
            self._failed(fault)
        finally:
            self._path.engine.turns.charge(stream.tenant, time.perf_counter() - begun)

    def begin(self) -> None:
        """Let the cursor know about the getMore, because another command is about it."""
        if self._waits:
            self._work.begin()
            if self._work.reply is not None:
                self._path.loop.call_soon(self.step)

    def _look(self) -> None:
        reading, work = self._stream.reading, self._work
        if not self._stream.sharing.is_settled or reading.ending is not None:
            work.begin()  # what is left of the last reply may be all of this one: nothing may be taken for it
        read = None
        if work.wants_entries:
            read = reading.at_hand()
            if read is not None and read.batch.raw and work.acting is None:
                step = self._shared(read)
                if step is not None:
                    self._give(step)
                    return
            work.begin()
        work.drive(read)
        if work.reply is not None:
            self._answer(work.reply)
        elif work.left is not None:
            self._leave_to_task(*work.left)

    def _shared(self, read: OplogRead) -> SharedStep | None:
        """What another stream has made of it."""
        if not read.at_end:
            return None
        engine = self._path.engine
        return engine.steps.found(self._stream.sharing, read.batch, self._wanted.batch_size)

    def _answer(self, reply: bytes) -> None:
        """The cursor's reply is made."""
        stream, path = self._stream, self._path
        self._unhook()
        self._used(stream)
        facts = facts_of_next(reply) or facts_of_reply(reply)
        path.engine.counted(stream, len(reply), facts)
        self._work.note_sharing(reply, facts)
        if facts.events and not self._may_have(stream, reached(reply)):
            self._run(self._checked(reply))
            return
        document = path.engine.stamped(reply)
        self._send(self._framed(len(document), document))

    def _give(self, step: SharedStep) -> None:
        """Answer with what another stream has made."""
        stream, path = self._stream, self._path
        self._unhook()
        stream.is_busy = False
        path.engine.steps.give(stream.sharing, step)
        stream.heavy, stream.used_ms = len(step.batch.raw), now_ms()
        size = len(step.head) + 8 + len(step.tail)
        path.engine.counted(stream, size, step.facts)
        path.metrics.batches_shared += 1
        if not self._may_have(stream, step.reached):
            self._run(self._checked(step.reply(stream.cursor_id)))
            return
        head, tail = path.stamped_step(step)
        size = len(head) + 8 + len(tail)
        self._send(self._framed(size, head, encode_int64(stream.cursor_id), tail))

    def _may_have(self, stream: ServedStream, until: ClusterTime) -> bool:
        """Whether it is known that the client still may watch the stream, all changes of rights up to ``until``
        considered."""
        identity = self._connection.identification.known(self._path.rights_seconds, until)
        if identity is None or identity.may_all:
            return identity is not None
        try:
            check_owner(stream, identity, self._command.session, self._path.engine.version)
        except ServerError:
            return False
        return True

    @property
    def _command(self) -> ClientCommand:
        command = self._connection.last_get_more.command
        assert command is not None  # it was repeated
        return command

    # -- what is sent -----------------------------------------------------------------------------------------------

    def _framed(self, size: int, *parts: bytes) -> bytes:
        asked = _INT32.unpack_from(self._message, _REQUEST_ID_AT)[0]
        number = self._connection.next_id()
        return b"".join([_FRAME.pack(_FRAME.size + size, number, asked, OP_MSG, 0, 0), *parts])

    def _send(self, frame: bytes) -> None:
        if len(frame) > _FRAME_BYTES_MAX:
            self._run(self._connection.send_whole(frame))
            return
        self._path.metrics.client_bytes_sent += len(frame)
        transport = self._connection.client.writer.transport
        transport.write(frame)
        if transport.get_write_buffer_size():  # the system has not taken all of it
            self._run(self._connection.drained())
        else:
            self._is_done()

    # -- where it takes more than that ------------------------------------------------------------------------------

    def _leave_to_task(self, action: Action | None, answer: OplogRead | None) -> None:
        """Go on in a task: the cursor has asked for ``action``, or is answered first."""
        self._unhook()
        assert self._work.acting is not None
        self._run(self._rest(self._stream, self._work.acting, action, answer))

    async def _rest(
        self, stream: ServedStream, acting: Acting, action: Action | None, answer: OplogRead | None
    ) -> None:
        engine = self._path.engine
        stream.sharing.is_settled = False  # events may be left for the next command
        try:
            local, size = engine.local(stream, acting), size_of(answer)
            reply = await engine.carried_out(local, stream.reading, size, stream, action=action, answer=answer)
        finally:
            self._used(stream)
        facts = facts_of_next(reply) or facts_of_reply(reply)
        engine.counted(stream, len(reply), facts)
        if facts.events:
            await self._checked(reply)
        else:
            await self._reply_with(engine.stamped(reply))

    async def _checked(self, reply: bytes) -> None:
        """Send a reply, once the server has said that the client may have it."""
        path = self._path
        reply = await path.commands.if_still_allowed(self._connection, self._stream, self._command, reply)
        await self._reply_with(path.engine.stamped(reply))

    async def _reply_with(self, document: bytes) -> None:
        await self._connection.send_whole(self._framed(len(document), document))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._path.loop.create_task(self._running(work))
        self._path.tasks.add(self._task)
        self._task.add_done_callback(self._path.tasks.discard)

    async def _running(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            engine = self._path.engine
            if engine.stopping is not None:  # it waits for a server that does not answer
                await self._reply_with(engine.stamped(engine.refused(engine.stopping)))
        except Exception as fault:  # noqa: BLE001  told to the connection
            self._connection.fail(fault)
        finally:
            self._is_done()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _unhook(self) -> None:
        """It waits no longer."""
        self._waits = False
        self._stream.reading.on_came = self._stream.quick = None
        self._path.deadlines.discard(self, self._wanted.await_ms)

    def _used(self, stream: ServedStream) -> None:
        """The stream's own cursor has done its work."""
        stream.is_busy = False
        self._path.engine.worked(stream)

    def _give_up(self) -> None:
        """The cursor ends, as it does where a task's getMore is given up."""
        stream = self._stream
        self._unhook()
        if self._work.acting is not None:
            self._work.acting.close()
        self._path.engine.cursors.kill(stream.cursor_id)
        self._used(stream)

    def _failed(self, fault: Exception) -> None:
        """A fault of the gateway: the connection is closed."""
        if self._waits:
            self._give_up()
        self._connection.fail(fault)
        self._is_done()

    def _is_done(self) -> None:
        self.is_busy = False
        self._task = None
        self._idle.set()
        self._connection.quick_is_done()
