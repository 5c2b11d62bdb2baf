"""A client without a connection to the server gets one back, however long the old one takes to end.

No test had shown the fault: on a plain socket a closed connection ends at once. With TLS the other side has to agree,
and a proxy in between may take its time; until then the gateway listened to the old connection, and the client's next
command was never answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import bson
import pytest

from tailrace.watch.gateway import connection
from tailrace.watch.gateway.command import ClientCommand
from tailrace.watch.gateway.connection import ClientConnection
from tailrace.watch.gateway.frame import HEADER_SIZE, OpMsg, op_msg, parse_header
from tailrace.watch.gateway.loop_turns import LoopTurns
from tailrace.watch.gateway.memory import MemoryBudget
from tailrace.watch.gateway.metrics import GatewayMetrics
from tailrace.watch.gateway.options import GatewayOptions
from tailrace.watch.gateway.replies import ServerClock
from tailrace.watch.gateway.surroundings import Surroundings
from tailrace.watch.gateway.upstream import Address, Channel

_LIMIT_S = 300.0
_ADDRESS = Address("127.0.0.1", 1)


class Peer:
    """The other end of a channel, in memory."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.channel = Channel(asyncio.StreamReader(), self)  # type: ignore[arg-type]
        self.is_closed = False
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes) -> None:
        self.reader.feed_data(bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        """The connection stays until this side agrees."""
        self.is_closed = True

    def get_extra_info(self, name: str) -> Any:
        return None

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(_LIMIT_S):
            head = await self.reader.readexactly(HEADER_SIZE)
            message = head + await self.reader.readexactly(parse_header(head).length - HEADER_SIZE)
        self.last = parse_header(message).request_id
        return bson.decode(OpMsg.parse(message).document)

    def send(self, document: dict[str, Any]) -> None:
        self.channel.reader.feed_data(op_msg(bson.encode(document), request_id=1, response_to=0))

    async def answers(self, name: str, **reply: Any) -> None:
        assert next(iter(await self.receive())) == name
        self.send({"ok": 1.0, **reply})


class Servers:
    """The upstream: each connection is a new peer."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    async def connect(self) -> tuple[Address, Channel]:
        await asyncio.sleep(0)
        self.peers.append(Peer())
        return _ADDRESS, self.peers[-1].channel


async def _answer(at: ClientConnection, command: ClientCommand) -> bool:
    """A stream's getMore; one with a comment is passed to the server."""
    if "comment" in bson.decode(command.document):
        await at.ask(command.document)
    await at.identity(1.0)
    at.rest()
    await at.reply(command, bson.encode({"ok": 1.0}))
    return True


async def _until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not holds():
            await asyncio.sleep(0)


async def _parked(client: Peer, servers: Servers, may_connect: Callable[[], bool] = lambda: True) -> asyncio.Task[None]:
    shared = Surroundings(
        GatewayOptions(),
        GatewayMetrics(),
        servers,  # type: ignore[arg-type]
        ServerClock(),
        frozenset((b"getMore",)),
        _answer,
        MemoryBudget(1 << 20),
        MemoryBudget(1 << 20),
        MemoryBudget(1 << 20),
        LoopTurns(asyncio.get_running_loop()),
        may_connect,
    )
    serving = asyncio.create_task(ClientConnection(shared, client.channel, "a:1").serve())
    client.send({"hello": 1, "$db": "admin"})
    await _until(lambda: servers.peers)
    await servers.peers[0].answers("hello")
    await client.receive()
    client.send({"getMore": 1, "$db": "a"})
    await servers.peers[0].answers("connectionStatus", authInfo={"authenticatedUsers": []})
    await servers.peers[0].answers("find")
    await client.receive()
    client.send({"getMore": 1, "$db": "a"})
    await client.receive()
    await _until(lambda: servers.peers[0].is_closed)
    return serving


def test_a_connection_that_is_slow_to_end_keeps_nobody_from_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "keep_alive", lambda writer: None)

    async def run() -> None:
        client, servers = Peer(), Servers()
        serving = await _parked(client, servers)
        client.send({"ping": 1, "$db": "admin"})
        await _until(lambda: len(servers.peers) == 2)
        await servers.peers[1].answers("hello")
        await servers.peers[1].answers("ping", it="came")
        assert (await client.receive())["it"] == "came"
        servers.peers[0].channel.reader.feed_eof()  # the old one ends at last, which affects nobody
        client.send({"ping": 1, "$db": "admin"})
        await servers.peers[1].answers("ping", it="lives")
        assert (await client.receive())["it"] == "lives"
        client.channel.reader.feed_eof()
        async with asyncio.timeout(_LIMIT_S):
            await serving

    asyncio.run(run())


def test_a_stream_whose_commands_the_server_has_to_judge_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its commands took a new connection."""
    monkeypatch.setattr(connection, "keep_alive", lambda writer: None)

    async def run() -> None:
        client, servers = Peer(), Servers()
        serving = await _parked(client, servers)
        for number in range(4):
            client.send({"getMore": 1, "comment": "odd", "$db": "a"})
            if not number:
                await _until(lambda: len(servers.peers) == 2)
                await servers.peers[1].answers("hello")
            await servers.peers[1].answers("getMore")
            await client.receive()
        assert len(servers.peers) == 2
        assert not servers.peers[1].is_closed
        client.channel.reader.feed_eof()
        async with asyncio.timeout(_LIMIT_S):
            await serving

    asyncio.run(run())


def test_whoever_returns_when_no_file_is_left_is_told_by_the_end_of_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only new clients were counted: thousands that returned at the same time took the files that the gateway itself
    needs."""
    monkeypatch.setattr(connection, "keep_alive", lambda writer: None)

    async def run() -> None:
        client, servers = Peer(), Servers()
        serving = await _parked(client, servers, lambda: False)
        client.send({"ping": 1, "$db": "admin"})
        async with asyncio.timeout(_LIMIT_S):
            await serving
        assert client.is_closed
        assert len(servers.peers) == 1

    asyncio.run(run())
