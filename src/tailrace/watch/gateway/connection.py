"""One client's connection, and the connection to the server that belongs to it.

Messages pass in both directions unread, as they come. Commands of change streams are answered here. For them the server
is asked who is logged in, on the client's own connection to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from tailrace.errors import SourceError
from tailrace.watch.gateway.command import (
    HEAD_BYTES,
    LOGIN_NAMES,
    ClientCommand,
    MessageOutline,
    app_name_of,
    outline,
    unpacked,
)
from tailrace.watch.gateway.compression import COMPRESSED_HEAD_BYTES, available, compress, size_inside
from tailrace.watch.gateway.connection_ends import tell_of_end
from tailrace.watch.gateway.exchange import command_in
from tailrace.watch.gateway.frame import (
    DOCUMENT_SIZE_MAX,
    HEADER_SIZE,
    MESSAGE_SIZE_MAX,
    OP_COMPRESSED,
    OP_MSG,
    OP_REPLY,
    BadFrame,
    Header,
    OpMsg,
    OpQuery,
    OpReply,
    op_msg,
    op_reply,
    parse_header,
    with_document,
)
from tailrace.watch.gateway.hello import HELLO_NAMES, rewritten
from tailrace.watch.gateway.identification import Identification
from tailrace.watch.gateway.memory import (
    COUNTED_BYTES_MIN,
    SLOW_BYTES,
    SLOW_S,
    ClosedConnection,
    Share,
    granted,
    large_message,
    taken,
)
from tailrace.watch.gateway.reading import aside
from tailrace.watch.gateway.repeated import LastGetMore
from tailrace.watch.gateway.surroundings import QuickWork, Surroundings
from tailrace.watch.gateway.upstream import Address, Channel, keep_alive

#: How many bytes are read, and written, at a time.
_CHUNK: Final = 1 << 16
#: The longest command that may be for the gateway: a document of 16 MB and what surrounds it.
_COMMAND_SIZE_MAX: Final = DOCUMENT_SIZE_MAX + 1024
#: A server's reply may be a little longer than a message to it.
_REPLY_SIZE_MAX: Final = MESSAGE_SIZE_MAX + (1 << 20)

_OP_MSG: Final = OP_MSG.to_bytes(4, "little")
_log = logging.getLogger("tailrace.gateway")
_T = TypeVar("_T")
_numbers = itertools.count(1)
#: The request id of our own messages; a connection has one of them under way at a time.
_request_ids = itertools.count(1)


@dataclass(slots=True)
class _Awaited:
    """A reply that the server owes. ``answer``: it is for us, not for the client."""

    is_hello: bool = False
    exhaust: bool = False
    answer: asyncio.Future[bytes] | None = None


def _looked_at(frame: bytes, message: bytes, awaited: _Awaited, told: Callable[[bytes], bytes]) -> tuple[bytes, bool]:
    """The frame that the client gets for ``frame``, which holds ``message``, with a hello's document as ``told`` makes
    it; and whether it is the last one to its message."""
    op_code = parse_header(message).op_code
    if op_code == OP_MSG:
        parsed = OpMsg.parse(message)
        if awaited.is_hello:
            frame = with_document(parsed, told(parsed.document))
        return frame, not parsed.more_to_come
    if op_code == OP_REPLY:
        reply = OpReply.parse(message)
        if awaited.is_hello and reply.documents:
            frame = with_document(reply, told(reply.documents[0]))
        return frame, not (awaited.exhaust and reply.cursor_id)
    return frame, True


class ClientConnection:
    """Serves one client until it disconnects.

    ``address``  the address that is given to the client
    ``holds``    whether at least this many bytes of the client wait to be read
    """

    #: Another process of the gateway has the connection (``RelayedConnection``).
    is_relayed = False

    def __init__(
        self,
        shared: Surroundings,
        client: Channel,
        address: str,
        holds: Callable[[int], bool] = lambda size: False,
    ) -> None:
        self.number = next(_numbers)
        peer = client.writer.get_extra_info("peername")
        #: The machine that the client is at, as the gateway sees it.
        self.client_host = str(peer[0]) if peer else ""
        self._shared = shared
        self.client = client
        self._address = address
        self._upstream: Channel
        self.upstream_address: Address | None = None
        self._awaited: deque[_Awaited] = deque()
        self._answered = asyncio.Event()
        self._answered.set()
        #: The client's first message, if it is a hello and nothing else has passed: it can be sent to the server again.
        self._handshake: bytes | None = None
        self._passed = 0
        self._rests = 0
        #: The connection to the server is closed for the time being.
        self.is_parked = False
        self._connected_again = asyncio.Event()
        self.identification = Identification(self.ask, shared.rights, shared.rights_heard)
        #: See ``Identification.identity``.
        self.identity = self.identification.identity
        self._serving: asyncio.Task[None] | None = None
        self._at_rest = True
        self._holds = holds
        self.last_get_more = LastGetMore()
        self.quick: QuickWork | None = None
        #: A command is being answered here: nothing of it has to reach the server.
        self._answering = False
        self._server_left = False
        #: To be closed as soon as nothing is under way.
        self._leaving = False
        #: The application's name, if fail points may ask for it.
        self.app_name: str | None = None

    # -- from beginning to end --------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve the client; returns when both connections are closed."""
        keep_alive(self.client.writer)
        tasks: list[asyncio.Task[None]] = []
        try:
            self.upstream_address, self._upstream = await self._shared.upstream.connect()
            self._serving = asyncio.create_task(self._requests())
            tasks = [self._serving, asyncio.create_task(self._replies())]
            if self._leaving:
                return
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if (self._answering or self._is_quick) and tasks[1].done():
                # The server has gone, and a stream's reply no longer needs it.
                await asyncio.wait(tasks[:1])
        except SourceError as error:
            _log.warning("connection %d: %s", self.number, error)
        finally:
            self._shared.parked.discard(self)
            if self.quick is not None:
                self.quick.client_left()
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                self._tell(outcome)
            for channel in (self.client, getattr(self, "_upstream", None)):
                if channel is not None:
                    with suppress(OSError, RuntimeError):
                        channel.writer.close()

    def leave(self) -> None:
        """Close the connection once the client has the reply to its command."""
        self._leaving = True
        if self._serving is not None and self._at_rest and not self._is_quick and not self._is_owed():
            self._serving.cancel()

    def client_left(self) -> None:
        """The client has closed its side: nobody waits for the command under way."""
        if self.quick is not None:
            self.quick.client_left()
        if self._serving is not None and self._answering:
            self._serving.cancel()

    @property
    def _is_quick(self) -> bool:
        """Whether something is answered without the connection's task."""
        return self.quick is not None and self.quick.is_busy

    def _is_owed(self) -> bool:
        """Whether the client waits for a reply of the server, other than the next of an exhaust cursor."""
        return any(not each.exhaust for each in self._awaited)

    def _tell(self, outcome: BaseException | None) -> None:
        if isinstance(outcome, BadFrame):
            self._shared.metrics.frames_refused += 1
        if outcome is not None:
            tell_of_end(self.number, outcome)

    # -- what the client sends --------------------------------------------------------------------------------------

    async def _requests(self) -> None:
        options, turns = self._shared.options, self._shared.turns
        try:
            async with asyncio.timeout(options.handshake_seconds):
                head = await self.client.reader.readexactly(HEADER_SIZE)
        except TimeoutError:
            raise ClosedConnection("no message came") from None
        while True:
            self._at_rest = False
            if self.quick is not None and self.quick.is_busy:
                await self.quick.done()
            if not turns.goes(tenant := self.tenant):
                await turns.wait(tenant)
            head, is_done = await self._repeated(head)
            if not is_done:
                async with asyncio.timeout(options.stall_seconds) as limit:
                    await self._request(head, limit)
            if self._server_left or (self._leaving and not self._is_owed()):
                return
            self._at_rest = True
            head = await self.client.reader.readexactly(HEADER_SIZE)

    async def _repeated(self, head: bytes) -> tuple[bytes, bool]:
        """Answer a getMore that repeats the last one and has arrived as a whole, or pass it on. Returns what was read
        of the message, and whether nothing more is to be done for it."""
        size = self.last_get_more.size
        if not size or head[:4] != size.to_bytes(4, "little") or not self._holds(size - HEADER_SIZE):
            return head, False
        if head[12:16] != _OP_MSG:
            return head, False
        message = head + await self._rest(head, size)  # comes at once
        command = self.last_get_more.repeated(message)
        if command is None:
            return message, False
        self._shared.metrics.client_bytes_received += size
        if not await self._while_answering(self._shared.answer(self, command)):
            # The server's. Nobody is asked about it twice: a fail point counts the commands that it is asked about.
            async with asyncio.timeout(self._shared.options.stall_seconds) as limit:
                await self._pass_on(outline(OP_MSG, message), message, size, limit)
        return message, True

    async def _request(self, head: bytes, limit: asyncio.Timeout) -> None:
        """One message. ``limit``: until it is here, or passed on."""
        header = parse_header(head, limit=self._shared.options.message_bytes)
        self._shared.metrics.client_bytes_received += header.length
        if header.op_code == OP_COMPRESSED:
            await self._compressed_request(head, header.length, limit)
            return
        head += await self._rest(head, min(header.length, HEAD_BYTES))
        seen = outline(header.op_code, head)
        if not self._is_for_us(seen, header.length):
            await self._pass_on(seen, head, header.length, limit)
            return
        if len(head) == header.length:  # small, as most are: nothing more to read or to count
            await self._whole_request(seen, head, head, None, limit)
            return
        async with self._room(header.length, limit) as share:
            head = await large_message(self.client.reader, head, header.length, share, limit)
            await self._whole_request(seen, head, head, None, limit)

    async def _compressed_request(self, head: bytes, length: int, limit: asyncio.Timeout) -> None:
        head += await self._rest(head, min(length, COMPRESSED_HEAD_BYTES))
        inside = size_inside(head)
        async with self._room(length + inside, limit) as share:
            head = await large_message(self.client.reader, head, length, share, limit)
            if inside >= COUNTED_BYTES_MIN:
                await granted(share, inside, limit)
            message, compressor = await aside(length + inside, unpacked, head)
            seen = outline(parse_header(message).op_code, message)
            if self._is_for_us(seen, len(message)):
                await self._whole_request(seen, head, message, compressor, limit)
            else:
                del message
                share.give_back(inside if inside >= COUNTED_BYTES_MIN else 0)
                await self._pass_on(seen, head, length, limit)

    def _is_for_us(self, seen: MessageOutline, length: int) -> bool:
        """Whether the whole message has to be seen."""
        if seen.name == b"aggregate" or seen.is_hidden:
            return True  # it might end the server's process
        return seen.name in self._shared.names and seen.op_code == OP_MSG and length <= _COMMAND_SIZE_MAX

    async def _rest(self, head: bytes, length: int) -> bytes:
        return await self.client.reader.readexactly(length - len(head))

    @asynccontextmanager
    async def _room(self, size: int, limit: asyncio.Timeout) -> AsyncIterator[Share]:
        """Memory for a message of ``size`` bytes while it is answered or passed on. A large one is not read before the
        server has answered those before it: it could be kept waiting here for as long as its client likes."""
        memory = self._shared.memory
        if size >= COUNTED_BYTES_MIN:
            limit.reschedule(None)
            if self._awaited:
                await self._while_answering(self.answered())
            if await self._while_answering(self._is_stranger()):
                memory = self._shared.strangers
            limit.reschedule(asyncio.get_running_loop().time() + self._shared.options.stall_seconds)
        async with memory.share(self.tenant) as share:
            yield share

    async def _is_stranger(self) -> bool:
        """Whether the deployment has users, and the client is none of them so far. The server is asked once."""
        identity = await self.identity(math.inf)
        return not identity.users and not identity.may_all

    @property
    def tenant(self) -> Hashable:
        """Who shares with this client what each has of memory: connections of the same users; without users, those
        from the same address."""
        known = self.identification.last
        return self.client_host if known is None else known.users or self.client_host

    async def _whole_request(
        self, seen: MessageOutline, head: bytes, message: bytes, compressor: str | None, limit: asyncio.Timeout
    ) -> None:
        """A message that may be for the gateway: ``message``, which came as ``head``."""
        command = await aside(len(message), command_in, message, compressor)
        if command is not None:
            limit.reschedule(None)
            if await self._while_answering(self._shared.answer(self, command)):
                return
        await self._pass_on(seen, head, len(head), limit)

    async def _while_answering(self, work: Awaitable[_T]) -> _T:
        """What ``work`` gives; given up where the client leaves."""
        self._answering = True
        try:
            return await work
        finally:
            self._answering = False

    async def _pass_on(self, seen: MessageOutline, head: bytes, length: int, limit: asyncio.Timeout) -> None:
        """Send a message to the server as it came: the part that is here, and what follows."""
        await self._connect_again()
        self._passed += 1
        is_first_hello = self._passed == 1 and seen.name in HELLO_NAMES and not seen.exhaust
        self._handshake = head if is_first_hello and len(head) == length else None
        if seen.answered:
            self._owe(_Awaited(is_hello=seen.name in HELLO_NAMES, exhaust=seen.exhaust))
        if seen.name in LOGIN_NAMES or seen.name in HELLO_NAMES:
            self.identification.forget()  # a hello may log in too
        if seen.name in HELLO_NAMES and self.app_name is None and self._shared.options.test_commands:
            self.app_name = app_name_of(head)
        self._shared.metrics.messages_passed += 1
        writer, left = self._upstream.writer, length - len(head)
        writer.write(head)
        while left:
            chunk = await self.client.reader.read(min(left, _CHUNK))
            if not chunk:
                raise ClosedConnection("the client has left in the middle of a message")
            left -= len(chunk)
            writer.write(chunk)
            limit.reschedule(None)  # a server that is busy may take its time
            await writer.drain()
            limit.reschedule(asyncio.get_running_loop().time() + self._shared.options.stall_seconds)
        limit.reschedule(None)
        await writer.drain()

    def _owe(self, awaited: _Awaited) -> None:
        self._awaited.append(awaited)
        self._answered.clear()

    # -- what the server sends --------------------------------------------------------------------------------------

    async def _replies(self) -> None:
        try:
            while True:
                reader = self._upstream.reader
                try:
                    await self._each_reply()
                except (EOFError, OSError):
                    if not self.is_parked and reader is self._upstream.reader:
                        raise
                await self._connected_again.wait()
        finally:
            self._server_left = True
            self._answered.set()
            for awaited in self._awaited:
                if awaited.answer is not None and not awaited.answer.done():
                    awaited.answer.cancel()

    async def _each_reply(self) -> None:
        reader = self._upstream.reader
        while True:
            head = await reader.readexactly(HEADER_SIZE)
            header = parse_header(head, limit=_REPLY_SIZE_MAX)
            awaited = self._awaited[0] if self._awaited else _Awaited()
            is_last = True
            if awaited.answer is not None or awaited.is_hello or awaited.exhaust:
                is_last = await self._reply(awaited, head + await reader.readexactly(header.length - HEADER_SIZE))
            else:
                await self._copy(head, header)
            if is_last and self._awaited:
                self._awaited.popleft()
                if not self._awaited:
                    self._answered.set()
            if self._leaving and self._at_rest and not self._is_quick and not self._is_owed():
                raise ClosedConnection("it was to be closed")

    async def _copy(self, head: bytes, header: Header) -> None:
        """Pass a reply on as it comes."""
        writer, left = self.client.writer, header.length - HEADER_SIZE
        self._shared.metrics.client_bytes_sent += header.length
        while left:
            chunk = await self._upstream.reader.read(min(left, _CHUNK))
            if not chunk:
                raise ClosedConnection("the server has left in the middle of a reply")
            left -= len(chunk)
            writer.write(head + chunk if head else chunk)
            head = b""
            await self.drained()
        if head:
            writer.write(head)

    async def _reply(self, awaited: _Awaited, frame: bytes) -> bool:
        """Handle a reply that has to be read. Returns whether it is the last one to its message."""
        message, _ = unpacked(frame)
        if awaited.answer is not None:
            if not awaited.answer.done():
                awaited.answer.set_result(OpMsg.parse(message).document)
            return True
        frame, is_last = _looked_at(frame, message, awaited, self._told)
        await self.send(frame)
        return is_last

    def _told(self, hello: bytes) -> bytes:
        return rewritten(hello, self._address, available(), as_mongos=self._shared.options.as_mongos)

    # -- for what answers commands ----------------------------------------------------------------------------------

    async def send(self, frame: bytes, share: Share | None = None) -> None:
        """Send a whole message to the client, as fast as the client takes it. The connection of a client that takes one
        too slowly is closed if others wait for its ``share`` of the memory."""
        self._shared.metrics.client_bytes_sent += len(frame)
        grace = None if share is None else time.monotonic() + SLOW_S + len(frame) / SLOW_BYTES
        view = memoryview(frame)
        for start in range(0, len(frame), _CHUNK):
            self.client.writer.write(view[start : start + _CHUNK])
            await self.drained(grace, share)

    async def reply(self, command: ClientCommand, document: bytes) -> None:
        """Send our answer to a command of the client, unless it wants none."""
        if command.message.more_to_come:
            return
        write = op_reply if isinstance(command.message, OpQuery) else op_msg
        frame = write(document, request_id=self.next_id(), response_to=command.message.header.request_id)
        if command.compressor is not None and command.compressor != "noop":
            frame = await aside(len(frame), compress, frame, command.compressor)
        await self.send_whole(frame)

    async def send_whole(self, frame: bytes) -> None:
        """Send our answer to the client, with room for it if it is large."""
        if len(frame) < COUNTED_BYTES_MIN:
            await self.send(frame)
            return
        async with self._shared.reply_memory.held(len(frame), self.tenant) as share:
            await self.send(frame, share)

    # -- for what answers commands without a task -------------------------------------------------------------------

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way, and what comes next is read."""
        return self._at_rest and not (self._awaited or self._leaving or self._server_left)

    def quick_is_done(self) -> None:
        """A getMore that was carried out without a task is done; if the connection is to end, it ends now."""
        if self._serving is not None and (self._server_left or (self._leaving and not self._is_owed())):
            self._serving.cancel()

    def fail(self, fault: Exception) -> None:
        """Close the connection, because of what has failed without its task."""
        self._tell(fault)
        if self._serving is not None:
            self._serving.cancel()

    @property
    def server_left(self) -> bool:
        """Whether the server has closed its side."""
        return self._server_left

    async def answered(self) -> None:
        """Wait until the server has answered all that was passed on: replies come in the order of their commands."""
        await self._answered.wait()

    async def ask(self, document: bytes, *, may_take_long: bool = False) -> bytes:
        """The server's reply to a command of the gateway, on the client's own connection.

        ``may_take_long``  the server may wait before it answers, for as long as the client does
        """
        await self.answered()
        self._rests = 0
        await self._connect_again()
        if self._server_left:
            raise ClosedConnection("the server has left")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._owe(_Awaited(answer=answer))
        self._upstream.writer.write(op_msg(document, request_id=self.next_id()))
        await self._upstream.writer.drain()
        async with asyncio.timeout(None if may_take_long else self._shared.options.stall_seconds):
            reply = await answer
        self._shared.clock.saw_reply(reply)
        return reply

    # -- without a connection to the server -------------------------------------------------------------------------

    def rest(self) -> None:
        """Called when the gateway answers a stream's getMore. From the second one on the connection to the server is
        closed if a new one would serve as well: the deployment has no users, and only a hello has passed."""
        self._rests += 1
        is_new = self._handshake is not None and not self._awaited and self.identification.asks_nobody
        if is_new and self._rests > 1 and not self.is_parked and not self._server_left and not self._leaving:
            self.is_parked = True
            self._shared.parked.add(self)
            self._connected_again.clear()
            # With TLS a connection ends when the other side has agreed, up to 30 s later: nobody listens until then.
            self._upstream.reader.feed_eof()
            self._upstream.writer.close()

    async def _connect_again(self) -> None:
        """Connect the client to the server again, if its connection was closed by ``rest``."""
        if not self.is_parked or self._handshake is None:
            return
        if not self._shared.may_connect():
            _log.warning("connection %d is closed: the limit of open files is reached", self.number)
            raise ClosedConnection("the limit of open files is reached")
        self._shared.parked.discard(self)  # counted before the connection is made: thousands may return at once
        address, channel = await self._shared.upstream.connect()
        try:
            if address != self.upstream_address:
                raise ClosedConnection("another member has become primary")
            channel.writer.write(self._handshake)
            async with asyncio.timeout(self._shared.options.stall_seconds):
                header = parse_header(await channel.reader.readexactly(HEADER_SIZE), limit=_REPLY_SIZE_MAX)
                await channel.reader.readexactly(header.length - HEADER_SIZE)
        except BaseException:
            channel.writer.close()
            raise
        self._upstream = channel
        self.is_parked = False
        self._connected_again.set()

    @staticmethod
    def next_id() -> int:
        """The request id of our next message."""
        return next(_request_ids) & 0x7FFFFFFF

    async def drained(self, grace: float | None = None, share: Share | None = None) -> None:
        """Wait until the client has taken what was sent. ``grace``: the time after which a client counts as too slow if
        others wait for the ``share`` of the memory that its reply has."""
        await taken(self.client.writer, self._shared.options.stall_seconds, grace, share)
