"""The gateway: listens for clients, and serves each of them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from tailrace.base.bind_failure import bind_failure
from tailrace.errors import SinkError
from tailrace.read.source.uri import ConnectionString
from tailrace.read.tail.shared_tail import ReaderMaker, TailStatistics
from tailrace.watch.gateway.client_protocol import ClientProtocol, ClientReader
from tailrace.watch.gateway.command import FAIL_POINT, SESSION_NAMES, STREAM_NAMES
from tailrace.watch.gateway.commands import Commands
from tailrace.watch.gateway.connection import ClientConnection
from tailrace.watch.gateway.engine import Engine
from tailrace.watch.gateway.fail_points import FailPoints
from tailrace.watch.gateway.first_user import refuse_first_users
from tailrace.watch.gateway.memory import MemoryBudget
from tailrace.watch.gateway.metrics import GatewayMetrics
from tailrace.watch.gateway.options import GatewayOptions
from tailrace.watch.gateway.peers import Peers
from tailrace.watch.gateway.process import files_for_connections
from tailrace.watch.gateway.quick import QuickGetMore, QuickGetMores
from tailrace.watch.gateway.reading import aside_for
from tailrace.watch.gateway.surroundings import Surroundings
from tailrace.watch.gateway.upstream import Address, Channel, Upstream

_BUFFER: Final = 1 << 16
#: How many bytes are received from a client at once.
_RECEIVED_BYTES: Final = 1 << 18
#: How many clients may wait to be accepted. The system lowers this to its own limit (``net.core.somaxconn``, 4,096) and
#: drops some clients beyond it: such a client believes that it is connected, and is cut off when it sends something.
BACKLOG: Final = 65_535
#: All clients that have not logged in share this part of the memory: logging in takes small messages.
_STRANGERS_SHARE: Final = 16
#: How long the parts of a gateway may take to close.
_CLOSE_S: Final = 2.0

_log = logging.getLogger("tailrace.gateway")


class Gateway:
    """Serves change streams of the deployment at ``uri``, and passes everything else on to it.

    Made and used in one event loop. ``start``, then ``stop``; in between ``address`` says where it listens.

    ``peers``        the other processes of it, if it has several; it then does not listen, and is given its clients by
                     ``adopt``
    ``make_reader``  see ``SharedTail``
    """

    def __init__(
        self,
        uri: ConnectionString,
        options: GatewayOptions,
        *,
        peers: Peers | None = None,
        make_reader: ReaderMaker | None = None,
    ) -> None:
        self._peers = peers
        self.options = options
        self.metrics = GatewayMetrics()
        self.upstream = Upstream(uri, self._upstream_changed)
        self.engine = Engine(
            self.upstream.client,
            uri,
            self.metrics,
            cursors_max=options.cursors_max,
            cursors_per_user=options.cursors_per_user,
            window_bytes=options.window_bytes,
            stage_limits=options.stage_limits,
            ids=None if peers is None or peers.ids is None else peers.ids.new(),
            make_reader=make_reader,
        )
        self.engine.clock.signed = self.upstream.has_users
        self._fail_points = FailPoints() if options.test_commands else None
        self.commands = Commands(
            self.engine,
            rights_seconds=options.rights_seconds,
            fail_points=self._fail_points,
            peers=peers,
            unmatched=self.upstream.unmatched if options.as_mongos else lambda command: None,
        )
        self._quick = QuickGetMores(
            self.engine,
            self.commands,
            self.metrics,
            rights_seconds=options.rights_seconds,
            fail_points=self._fail_points,
        )
        self._surroundings = Surroundings(
            options,
            self.metrics,
            self.upstream,
            self.engine.clock,
            STREAM_NAMES | SESSION_NAMES | ({FAIL_POINT} if options.test_commands else set()),
            self.commands.answered,
            MemoryBudget(options.memory_bytes // 2),
            MemoryBudget(options.memory_bytes // 2),
            MemoryBudget(options.memory_bytes // _STRANGERS_SHARE),
            self.engine.turns,
            lambda: self._used_files() < self._files,
            rights_heard=self.engine.rights_heard,
        )
        #: What clients send is received into it, one after another.
        self._received_into = bytearray(_RECEIVED_BYTES)
        self._connections: set[ClientConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Those of them that are a TLS handshake.
        self._arriving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._stopping = False
        self._files = files_for_connections()
        self._said_full = False

    async def start(self) -> None:
        """Connect to the server, and listen. Raises SourceError if the deployment cannot be read, and SinkError if the
        gateway cannot listen at the address."""
        try:
            await self.engine.start()
            await refuse_first_users(self.upstream, self.options.host)
            if self._fail_points is not None:
                self._fail_points.version = self.engine.version
            if self._peers is None:
                await self._listen()
        except BaseException:
            await self._close()
            raise

    async def _listen(self) -> None:
        options, loop = self.options, asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._protocol, options.host, options.port, backlog=BACKLOG)
        except OSError as error:
            raise not_listening(options.host, options.port, error) from None

    async def adopt(self, client: socket.socket) -> None:
        """Serve a client that another process has accepted."""
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, client)

    def tail_statistics(self) -> TailStatistics:
        """How the reads of the oplog are doing. May be called from any thread; updates the metrics too."""
        return self.engine.tail_statistics()

    @property
    def connected(self) -> int:
        """How many clients there are, those included that have not encrypted their connections yet."""
        return len(self._tasks)

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._server is not None
        name: Any = self._server.sockets[0].getsockname()
        return Address(str(name[0]), int(name[1]))

    # -- clients ----------------------------------------------------------------------------------------------------

    def _protocol(self) -> asyncio.BaseProtocol:
        return self._stream_protocol() if self.options.tls is None else _Arrival(self._arrived)

    def _stream_protocol(self) -> asyncio.StreamReaderProtocol:
        return ClientProtocol(ClientReader(limit=_BUFFER), self._received_into, self._connected)

    def _arrived(self, transport: asyncio.Transport) -> None:
        """A client that is to speak TLS: it is counted, and may be refused, before its handshake."""
        if self._is_refused():
            transport.abort()
            return
        task = self._begin(self._shake_hands(transport))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        """Serve the client, once it has encrypted its connection; it has as long for it as for a first message."""
        protocol = self._stream_protocol()
        loop, options = asyncio.get_running_loop(), self.options
        assert options.tls is not None
        try:
            encrypted = await loop.start_tls(
                transport,
                protocol,
                options.tls,
                server_side=True,
                ssl_handshake_timeout=options.handshake_seconds,
            )
        except (OSError, asyncio.CancelledError):
            self.metrics.handshakes_failed += 1
            transport.abort()
            return
        if encrypted is None:  # it has left meanwhile
            self.metrics.handshakes_failed += 1
            return
        protocol.connection_made(encrypted)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # With TLS it was checked before its handshake.
        if self._stopping or (self.options.tls is None and self._is_refused()):
            writer.close()
            return
        self.metrics.connections_accepted += 1
        self._begin(self._serve(reader, writer))

    def _is_refused(self) -> bool:
        if self._stopping or len(self._tasks) >= self.options.connections_max or self._files_run_out():
            self.metrics.connections_refused += 1
            return True
        return False

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _files_run_out(self) -> bool:
        """Whether another client would exceed the limit of open files. It is then refused at once."""
        if self._used_files() + 2 <= self._files:
            return False
        if not self._said_full:
            self._said_full = True
            _log.warning("clients are refused: the limit of open files is reached (ulimit -n, LimitNOFILE=)")
        return True

    def _used_files(self) -> int:
        return 2 * len(self._tasks) - len(self._surroundings.parked)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, ClientReader)
        connection = ClientConnection(
            self._surroundings,
            Channel(reader, writer),
            self.options.advertise or _own_address(writer),
            reader.holds,
        )
        reader.on_end = connection.client_left
        quick = QuickGetMore(self._quick, connection)
        connection.quick, reader.take = quick, quick.take
        self._connections.add(connection)
        self.metrics.connections = len(self._connections)
        try:
            await connection.serve()
        except asyncio.CancelledError:
            pass
        except Exception:  # noqa: BLE001  one client's trouble must not affect others
            _log.exception("a connection was closed by a fault of the gateway")
        finally:
            self._connections.discard(connection)
            self.metrics.connections = len(self._connections)
            with suppress(OSError, RuntimeError):
                writer.close()

    def _upstream_changed(self, address: Address | None) -> None:
        """There is a new primary. Clients connected to the old one through us have to connect again, as if that member
        had closed the connection."""
        for connection in list(self._connections):
            if connection.upstream_address not in (None, address):
                connection.leave()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End every stream so that its driver resumes elsewhere, answer what is under way, and close."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        self.engine.stop()
        for task in list(self._arriving):
            task.cancel()
        for connection in list(self._connections):
            connection.leave()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self.options.answer_seconds)
        # Streams that still wait for the server learn now that they end. Commands passed on may take longer.
        self.engine.give_up()
        for connection in list(self._connections):
            connection.client_left()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self.options.stop_seconds - self.options.answer_seconds)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CLOSE_S)
        await self._close()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.engine.give_up()
        await self.engine.close()
        await aside_for(self.upstream.close, _CLOSE_S)


class _Arrival(asyncio.Protocol):
    """A client before its TLS handshake. asyncio by itself reports a client only after it."""

    def __init__(self, on_arrival: Callable[[asyncio.Transport], None]) -> None:
        self._on_arrival = on_arrival

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # what it sends belongs to the handshake
        self._on_arrival(transport)


def not_listening(host: str, port: int, error: OSError) -> SinkError:
    return bind_failure("cannot listen at", host, port, error, "name another address (--listen)")


def _own_address(writer: asyncio.StreamWriter) -> str:
    """The address that a client has connected to."""
    name = writer.get_extra_info("sockname")
    return str(Address(str(name[0]), int(name[1])))
