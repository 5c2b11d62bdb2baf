"""Peers that break the protocol: a clear error or a closed connection, never a crash, never another user's data, and
the gateway frees what it held for them."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway import frame
from tailrace.watch.gateway.compression import COMPRESSORS, compress, zstd_package
from tests import shared_clock
from tests.amounts import amount
from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.fuzz import fuzz, mutated
from tests.gateway.record import recorded
from tests.gateway.running import GatewayProcess, eventually

pytestmark = pytest.mark.mongod

_MB = 1 << 20


@pytest.fixture(autouse=True)
def _the_gateway_is_as_it_was(gateway: GatewayProcess) -> Iterator[None]:
    with unharmed(gateway):
        yield


@contextmanager
def unharmed(gateway: GatewayProcess) -> Iterator[None]:
    """Afterwards it serves others and reports no fault of its own. It holds no more files, apart from a few connections
    to the server more or fewer, and no more memory than is taken by the window of the oplog and by the compiled code
    that it loads once it has read enough."""
    serves(gateway)
    handles, memory = gateway.handles(), gateway.memory()
    yield
    serves(gateway)
    assert "fault of the gateway" not in gateway.log.read_text()
    eventually(lambda: gateway.handles() <= handles + 10, "the gateway keeps files open")
    assert gateway.memory() < memory + 300 * _MB


def serves(gateway: GatewayProcess) -> None:
    with pymongo.MongoClient[Any](gateway.uri) as client, client.hostile.good.watch() as stream:
        client.hostile.good.insert_one({"good": True})
        assert next(stream)["operationType"] == "insert"


def connect(gateway: GatewayProcess) -> socket.socket:
    return socket.create_connection(gateway.host_and_port, timeout=300)


def answer(connection: socket.socket) -> dict[str, Any] | None:
    """The next reply's document, or None where the peer closed the connection."""
    with suppress(ConnectionError):
        head = _exactly(connection, frame.HEADER_SIZE)
        if head is not None:
            header = frame.parse_header(head)
            rest = _exactly(connection, header.length - frame.HEADER_SIZE)
            if rest is not None:
                if header.op_code == frame.OP_REPLY:
                    return bson.decode(frame.OpReply.parse(head + rest).documents[0])
                return bson.decode(frame.OpMsg.parse(head + rest).document)
    return None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return data


def ask(gateway: GatewayProcess, message: bytes) -> dict[str, Any] | None:
    """The answer to a message on a connection of its own."""
    with connect(gateway) as connection:
        with suppress(ConnectionError):
            connection.sendall(message)
        return answer(connection)


def watching(**more: Any) -> dict[str, Any]:
    return {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, "$db": "hostile", **more}


def message_of(command: dict[str, Any]) -> bytes:
    return frame.op_msg(bson.encode(command), request_id=1)


def nested(depth: int) -> bytes:
    opening = b"".join(struct.pack("<i", 5 + 8 * left) + b"\x03a\x00" for left in range(depth, 0, -1))
    return opening + b"\x05\x00\x00\x00\x00" + bytes(depth)


def test_a_message_that_is_cut_off_at_any_byte_is_let_go(gateway: GatewayProcess) -> None:
    message = message_of(watching())
    for length in range(len(message)):
        with connect(gateway) as connection:
            connection.sendall(message[:length])
    found = ask(gateway, message)
    assert found is not None
    assert found["ok"] == 1


@pytest.mark.parametrize("length", [-1, 0, 15, 48_000_001, 0x7FFFFFFF, -0x80000000])
def test_a_header_that_lies_closes_the_connection(length: int, gateway: GatewayProcess) -> None:
    assert ask(gateway, struct.pack("<iiii", length, 1, 0, frame.OP_MSG) + bytes(100)) is None


def test_lengths_inside_a_message_that_lie_are_refused(gateway: GatewayProcess) -> None:
    good = message_of(watching())
    at = good.index(b"\x04pipeline\x00") + len(b"\x04pipeline\x00")
    for place in (21, at, at + 7):  # the command, the pipeline, its first stage
        for length in (0, 4, -1, 0x7FFFFFFF, 20, 16_000_000):
            damaged = bytearray(good)
            struct.pack_into("<i", damaged, place, length)
            found = ask(gateway, bytes(damaged))
            assert found is None or found["ok"] == 0, (place, length, found)


@pytest.mark.parametrize("op_code", [0, 3, 2001, 2002, 2005, 2006, 2007, 2010, 2011, 2014, 9999, -1])
def test_an_opcode_that_is_not_known_harms_nobody(op_code: int, gateway: GatewayProcess) -> None:
    with connect(gateway) as connection:
        connection.sendall(struct.pack("<iiii", 40, 1, 0, op_code) + bytes(24))
        connection.shutdown(socket.SHUT_WR)
        answer(connection)


@pytest.mark.parametrize("depth", [199, 201, 10_000, 500_000])
def test_a_command_that_is_nested_too_deeply_is_refused(depth: int, gateway: GatewayProcess) -> None:
    deep = bson.raw_bson.RawBSONDocument(nested(depth))
    commands = [watching(comment=deep), {**watching(), "pipeline": [{"$changeStream": {}}, {"$match": deep}]}]
    commands += [{"getMore": Int64(1), "collection": "c", "$db": "hostile", "comment": deep}]
    commands += [{"killCursors": "c", "cursors": [Int64(1)], "$db": "hostile", "comment": deep}]
    for command in commands:
        found = ask(gateway, message_of(command))
        assert found is None or found["ok"] == 0 or "killCursors" in command or depth < 200, found


def test_a_message_of_48_mb_is_passed_on_and_one_that_never_comes_takes_no_memory(gateway: GatewayProcess) -> None:
    memory = gateway.memory()
    claims = [connect(gateway) for _ in range(50)]
    for connection in claims:
        connection.sendall(struct.pack("<iiiiI", 48_000_000, 1, 0, frame.OP_MSG, 0) + b"\x00")
    serves(gateway)
    assert gateway.memory() < memory + 100 * _MB
    for connection in claims:
        connection.close()
    document = bson.encode({"text": "x" * 15_900_000})
    message = frame.op_msg(
        bson.encode({"insert": "large", "$db": "hostile"}), request_id=1, sequences=((b"documents", 3 * document),)
    )
    assert 47_000_000 < len(message) <= frame.MESSAGE_SIZE_MAX
    found = ask(gateway, message)
    assert found is not None
    assert found["n"] == 3


def compressed(number: int, packed: bytes, size: int, op_code: int = frame.OP_MSG) -> bytes:
    fields = struct.pack("<iiB", op_code, size, number)
    return struct.pack("<iiii", 25 + len(packed), 1, 0, frame.OP_COMPRESSED) + fields + packed


#: Each holds 256 MB, or claims to.
BOMBS = {
    "zlib": lambda: zlib.compress(bytes(1 << 28), 9),
    "zstd": lambda: zstd_package().compress(bytes(1 << 28)),
    "snappy": lambda: b"\x80\x80\x80\x80\x01" + b"\xfe\x01\x00" * 50_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_decompression_bomb_closes_the_connection(name: str, gateway: GatewayProcess) -> None:
    """Only zlib bombs had been sent to a gateway before."""
    memory = gateway.memory()
    packed, number = BOMBS[name](), COMPRESSORS[name]
    for size in (1000, 47_999_000, 1 << 28, -1):
        assert ask(gateway, compressed(number, packed, size)) is None
    assert gateway.memory() < memory + 150 * _MB


def test_compressions_within_each_other_close_the_connection(gateway: GatewayProcess) -> None:
    inner = message_of({"ping": 1, "$db": "admin"})
    for outer, number in COMPRESSORS.items():
        for inside in ("zlib", "zstd", "snappy"):
            body = compress(inner, inside)[frame.HEADER_SIZE :]
            packed = body if outer == "noop" else compress(struct.pack("<iiii", 16 + len(body), 1, 0, 1) + body, outer)
            packed = packed if outer == "noop" else packed[25:]
            assert ask(gateway, compressed(number, packed, len(body), frame.OP_COMPRESSED)) is None


def test_absurd_lists_of_compressors_are_answered_as_by_the_server(
    gateway: GatewayProcess, replica_set: ReplicaSet
) -> None:
    lists: tuple[Any, ...] = (
        *([], ["zlib"] * 10_000, ["x" * 1_000_000], [5], [None, {}], [["zlib"]], "zlib", 5, None, {"0": "zlib"}),
        *(["snappy", "nothing", "noop", "zstd"], [""], ["zlib\0"], [{"zlib": 1}] * 1000),
    )
    for each in lists:
        hello = {"hello": 1, "compression": each, "$db": "admin"}
        reply = ask(gateway, message_of(hello))
        with Wire.to(replica_set.uri) as wire:
            theirs = bson.decode(wire.exchange(bson.encode(hello)), ANY_VALUE)
        assert reply is not None
        assert [reply.get(name) for name in ("ok", "code", "errmsg", "compression")] == [
            theirs.get(name) for name in ("ok", "code", "errmsg", "compression")
        ]


def test_hundreds_of_half_open_connections_keep_nobody_out(gateway: GatewayProcess) -> None:
    """Nothing, a part of a header, a header alone, a part of a command. (Thousands with ``-m slow``.)"""
    half_open(gateway, 400)


@pytest.mark.slow
def test_thousands_of_half_open_connections_keep_nobody_out(gateway: GatewayProcess) -> None:
    half_open(gateway, 3000)


def half_open(gateway: GatewayProcess, count: int) -> None:
    """Some clients can go on when a few hundred more have connected, long before the minute after which a silent
    connection is closed."""
    message = message_of(watching())
    clients: list[socket.socket] = []
    begun: list[float] = []
    behind = min(400, count // 2)

    def goes_on(number: int) -> None:
        with suppress(ConnectionError):
            clients[number].sendall(message[40:])
        found = answer(clients[number])
        assert found is not None, f"closed after {time.monotonic() - begun[number]:.0f} s of silence"
        assert found["ok"] == 1, found

    try:
        for number in range(count):
            clients.append(connect(gateway))
            begun.append(time.monotonic())
            clients[-1].sendall(message[: (0, 7, 16, 40)[number % 4]])
            if number >= behind and number % 40 == 3:
                goes_on(number - behind)
        serves(gateway)
        goes_on(count - 1)
    finally:
        for client in clients:
            client.close()


def test_clients_that_come_while_the_gateway_is_busy_are_not_forgotten(gateway: GatewayProcess) -> None:
    """The system queued 1,024 clients and dropped some of the others, which were cut off when they sent something. The
    test with thousands had shown this only on a busy machine, where it was taken for slowness."""
    count = min(1500, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    clients: list[socket.socket] = []
    os.kill(gateway.pid, signal.SIGSTOP)
    try:
        clients = [connect(gateway) for _ in range(count)]  # the operating system accepts connections for the gateway
    finally:
        os.kill(gateway.pid, signal.SIGCONT)
    try:
        for client in (clients[0], clients[-1]):
            client.sendall(message_of({"ping": 1, "$db": "admin"}))
            found = answer(client)
            assert found is not None
            assert found["ok"] == 1
    finally:
        for client in clients:
            client.close()


def test_damaged_messages_of_real_drivers_harm_nobody(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    """The messages go to a server of their own: they may be any command, and may set its clock forward by hours."""
    own = start_replica_set(1)
    gateway = start_gateway(own.uri)
    shared_clock.check(own.uri)
    chance, corpus = random.Random(5), recorded()
    with unharmed(gateway):
        for _ in range(amount(100, 300)):
            with connect(gateway) as connection, suppress(ConnectionError):
                connection.sendall(mutated(chance.choice(corpus), chance))
                connection.shutdown(socket.SHUT_WR)
    ahead = int(time.time() + max(0.0, shared_clock.seconds_ahead(own.uri))) + 600
    unsigned = {"clusterTime": Timestamp(ahead, 1), "signature": {"hash": bytes(20), "keyId": Int64(0)}}
    with Wire.to(own.uri) as wire:
        wire.run("admin", {"ping": 1, "$clusterTime": unsigned})
    with pytest.raises(AssertionError, match="has set the clock of the shared deployment forward by"):
        shared_clock.check(own.uri)


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_messages_are_parsed_or_refused_with_a_sentence(seed: int) -> None:
    found = fuzz(seed, amount(4_000, 15_000))
    assert min(found.values()) > 0, found


def test_a_cursor_of_another_user_gives_nothing(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    """Both may watch the collection, but a cursor belongs to its user, on the server too."""
    guarded = start_replica_set(1, root_password="r00t")
    with pymongo.MongoClient[Any](guarded.uri) as root:
        for name in ("alice", "bob"):
            root.admin.command("createUser", name, pwd="pw", roles=[{"role": "read", "db": "shop"}])
        root.shop.orders.insert_one({"_id": 0})
        gateway = start_gateway(guarded.uri)
        options = f"replicaSet={guarded.name}&authSource=admin"
        with (
            pymongo.MongoClient[Any](f"mongodb://alice:pw@{gateway.address}/?{options}") as alice,
            pymongo.MongoClient[Any](f"mongodb://bob:pw@{gateway.address}/?{options}") as bob,
            pymongo.MongoClient[Any](f"mongodb://{gateway.address}/?replicaSet={guarded.name}") as nobody,
            alice.shop.orders.watch(max_await_time_ms=200) as stream,
        ):
            assert stream.try_next() is None
            cursor_id = stream._cursor.cursor_id
            root.shop.orders.insert_one({"_id": 1})
            for other in (bob, nobody):
                with pytest.raises(OperationFailure) as refused:
                    other.shop.command("getMore", Int64(cursor_id), collection="orders")
                assert refused.value.code == 13
                with suppress(OperationFailure):
                    killed = other.shop.command("killCursors", "orders", cursors=[Int64(cursor_id)])
                    assert killed["cursorsKilled"] == []
                with pytest.raises(OperationFailure) as unseen, other.other.orders.watch():
                    pass
                assert unseen.value.code == 13
            assert eventually(stream.try_next, "alice's stream was ended")["documentKey"] == {"_id": 1}
