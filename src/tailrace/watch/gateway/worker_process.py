"""One of the processes of a gateway that has several: serves the clients that its parent hands to it.

It reads no oplog: the parent feeds it. The parent's questions come over one socket, the clients over another one. If
the parent ends, it ends too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from tailrace.core.oplog.entry_kinds import PASSED_OVER
from tailrace.errors import InternalError
from tailrace.read.source.uri import hide
from tailrace.read.tail.feed import FedReader
from tailrace.read.tail.shared_tail import TailStatistics
from tailrace.watch.gateway import listing
from tailrace.watch.gateway.connection import ClientConnection
from tailrace.watch.gateway.cursor_ids import ProcessIds
from tailrace.watch.gateway.line import Line
from tailrace.watch.gateway.log import log_to_standard_error
from tailrace.watch.gateway.metrics import GatewayMetrics
from tailrace.watch.gateway.options import GatewayOptions
from tailrace.watch.gateway.peers import Peers, Relay, Relayed, RelayedConnection
from tailrace.watch.gateway.process import raise_file_limit, settle
from tailrace.watch.gateway.server import Gateway
from tailrace.watch.gateway.stream_limits import OpeningTurn
from tailrace.watch.gateway.tls import server_context
from tailrace.watch.gateway.upstream import Address

#: Clients that are taken over at once.
_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``uri``      of the deployment, with its secrets: it never stands on a command line
    ``options``    without TLS, which is made again from the files of ``certificate`` and ``authority``
    ``directory``  where the processes' sockets are
    ``log``        as of ``log_to_standard_error``; ``None``: warnings
    """

    uri: str = field(repr=False)
    options: GatewayOptions
    certificate: str | None
    authority: str | None
    ids: ProcessIds
    directory: str
    log: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """How a process is doing. ``adopted``: clients that it was given, in all; ``connected``: those of them that are
    still there."""

    adopted: int
    connected: int
    metrics: GatewayMetrics
    tail: TailStatistics
    passed_over: Counter[str]


def peer_path(directory: str, number: int) -> str:
    """Where a process answers the others."""
    return f"{directory}/process-{number}"


def feed_path(directory: str) -> str:
    """Where the parent feeds what it reads of the oplog."""
    return f"{directory}/oplog"


class WorkerProcess:
    """``clients``: the socket over which they come."""

    def __init__(self, clients: socket.socket) -> None:
        self._clients = clients
        self._gateway: Gateway | None = None
        self._peers: Peers | None = None
        self._server: asyncio.Server | None = None
        self._lines: set[Line] = set()
        self._adopting: set[asyncio.Task[None]] = set()
        self._adopted = 0
        self.stopped = asyncio.Event()

    # -- what the parent asks ---------------------------------------------------------------------------------------

    async def answer(self, name: str, *args: Any) -> Any:
        match name:
            case "start":
                return await self._start(*args)
            case "report":
                return self._report()
            case "prefer":
                # It may be about to start, and then knows already.
                return None if self._gateway is None else self._gateway.upstream.prefer(*args)
            case "stop":
                self.stopped.set()
                return None
        raise InternalError(f"a process of the gateway is asked for {name}")

    async def _start(self, settings: WorkerSettings, preferred: Address | None) -> None:
        if settings.log is not None:
            log_to_standard_error(settings.log)
        options, loop, ids = settings.options, asyncio.get_running_loop(), settings.ids
        if settings.certificate is not None:
            options = dataclasses.replace(options, tls=server_context(settings.certificate, settings.authority))
        paths = tuple(peer_path(settings.directory, number) for number in range(ids.count))
        self._peers = Peers(ids, paths)
        feed = feed_path(settings.directory)
        self._gateway = Gateway(
            hide(settings.uri),
            options,
            peers=self._peers,
            make_reader=lambda receiver, on_read: FedReader(feed, loop, receiver, on_read),
        )
        self._gateway.upstream.prefer(preferred)
        await self._gateway.start()
        self._gateway.engine.limits.others_open = self._others_open
        own = paths[ids.number]
        if os.path.exists(own):  # of the process that this one replaces
            os.unlink(own)
        self._server = await asyncio.start_unix_server(self._connected, own)
        settle()
        loop.add_reader(self._clients.fileno(), self._take_clients)

    def _report(self) -> Report:
        gateway = self._running
        tail = gateway.engine.tail_statistics()
        return Report(self._adopted, gateway.connected + len(self._adopting), gateway.metrics, tail, PASSED_OVER.copy())

    def _take_clients(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, files, _, _ = socket.recv_fds(self._clients, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                data, files = b"", []
            if not data:
                asyncio.get_running_loop().remove_reader(self._clients.fileno())
                return
            self._adopted += 1
            for each in files:
                task = asyncio.create_task(self._running.adopt(socket.socket(fileno=each)))
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)

    @property
    def _running(self) -> Gateway:
        if self._gateway is None:
            raise InternalError("a process of the gateway is asked before it was started")
        return self._gateway

    # -- what the other processes ask -------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering = _Answering(self._running)
        line = answering.line = Line(reader, writer, answering.answer)
        self._lines.add(line)
        try:
            await line.closed.wait()
        finally:
            self._lines.discard(line)

    async def _others_open(self, tenant: Hashable, turn: OpeningTurn) -> tuple[int, int]:
        assert self._peers is not None
        found = await self._peers.ask_all("open_of", tenant, turn)
        return sum(each[0] for each in found), sum(each[1] for each in found)

    async def close(self) -> None:
        """End every stream so that its driver resumes, and close."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._clients.fileno())
        if self._gateway is not None:
            await self._gateway.stop()
        if self._server is not None:
            self._server.close()
        if self._peers is not None:
            self._peers.close()
        for line in list(self._lines):
            await line.drained()
            line.close()


class _Answering:
    """Answers another process over one line."""

    line: Line

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, name: str, *args: Any) -> Any:
        if name == "command":
            return await self._command(*args)
        engine, commands = self._gateway.engine, self._gateway.commands
        plain: dict[str, Callable[..., Any]] = {
            "open_of": engine.limits.open_of,
            "found": self._found,
            "kill": lambda numbers: engine.kill([one for one in map(engine.found, numbers) if one is not None]),
            "has_sessions": commands.has_sessions,
            "mark_ended": commands.mark_ended,
            "kill_of_sessions": commands.kill_of_sessions,
            "listed": lambda: listing.listed(engine),
        }
        return plain[name](*args)

    def _found(self, numbers: list[int]) -> list[tuple[int, Any, Any]]:
        found = ((number, self._gateway.engine.found(number)) for number in numbers)
        return [(number, one.owner, one.scope) for number, one in found if one is not None]

    async def _command(self, relay: Relay) -> Relayed:
        turns = self._gateway.engine.turns
        if not turns.goes(relay.tenant):
            await turns.wait(relay.tenant)
        connection = RelayedConnection(relay, self.line)
        # It has what commands of streams use of a connection.
        is_answered = await self._gateway.commands.answered(cast(ClientConnection, connection), relay.command)
        return connection.outcome(is_answered)


async def _serve(line_file: int, clients_file: int) -> None:
    raise_file_limit()
    clients = socket.socket(fileno=clients_file)
    clients.setblocking(False)
    worker = WorkerProcess(clients)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.stopped.set)
    ends = await asyncio.open_unix_connection(sock=socket.socket(fileno=line_file))
    line = Line(*ends, worker.answer)
    waits = [asyncio.create_task(worker.stopped.wait()), asyncio.create_task(line.closed.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    await worker.close()
    line.close()


def main() -> None:
    """The first two arguments are the file descriptors of the two sockets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which stops this process
    asyncio.run(_serve(*map(int, sys.argv[1:3])))
    sys.stderr.flush()
    os._exit(0)  # threads may still wait for a server that does not answer
