"""Clients that would make a gateway slow, full or wrong for everybody else, and fields of commands that only the server
can judge.

Why nothing had caught these: tests of hostile peers had asked for one thing at a time, with small messages and no
earlier request open, and tests of errors had not touched the fields that any command may carry.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import uuid
from threading import current_thread
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.cli.stream_arguments import address_of
from tailrace.embedded import ReplicaSet
from tailrace.errors import InternalError, UsageError
from tailrace.read.source.uri import hide
from tailrace.watch.gateway import command, commands, compression, exchange, identification, upstream
from tailrace.watch.gateway.command import opens_stream
from tailrace.watch.gateway.engine import Engine
from tailrace.watch.gateway.frame import HEADER_SIZE, OP_MSG, BadFrame, op_msg, parse_header
from tailrace.watch.gateway.generic_fields import is_ordinary
from tailrace.watch.gateway.local_acting import LocalActing
from tailrace.watch.gateway.metrics import GatewayMetrics
from tailrace.watch.gateway.reading import OplogReading, Threads
from tailrace.watch.gateway.reply_facts import facts_of_reply
from tests.differential.wire import Wire
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.gateway.running import eventually

UUID = Binary(bytes(range(16)), 4)
STREAM: dict[str, Any] = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}

ORDINARY: list[dict[str, Any]] = [
    {},
    {"lsid": None},
    {"lsid": {"id": UUID}},
    {"apiVersion": "1", "apiStrict": True, "apiDeprecationErrors": False},
    {"readConcern": {"level": "majority", "afterClusterTime": Timestamp(1, 1)}},
    {"$readPreference": {"mode": "nearest", "tags": [{}]}},
    {"$clusterTime": {"clusterTime": Timestamp(1, 1), "signature": {"hash": b"", "keyId": Int64(0)}}},
    {"comment": {"lsid": 1}, "let": {"txnNumber": 1}, "collation": {"locale": "en"}, "maxTimeMS": 5},
]
SERVERS: list[dict[str, Any]] = [
    {"lsid": 5},
    {"lsid": {}},
    {"lsid": {"id": "x"}},
    {"lsid": {"id": UUID, "more": 1}},
    {"lsid": {"id": UUID, "uid": b""}},
    {"lsid": {"id": Binary(b"abc", 4)}},
    {"lsid": {"id": Binary(bytes(16), 3)}},
    {"txnNumber": Int64(1)},
    {"lsid": {"id": UUID}, "txnNumber": Int64(1)},
    {"lsid": {"id": UUID}, "txnNumber": Int64(2), "autocommit": False, "startTransaction": True},
    {"lsid": {"id": UUID}, "txnNumber": Int64(2), "autocommit": True},
    {"autocommit": False},
    {"startTransaction": True},
    {"apiVersion": "2"},
    {"apiVersion": 1},
    {"apiStrict": True},
    {"readConcern": {"level": "majority", "bad": 1}},
    {"readConcern": {"level": "majority", "afterClusterTime": 1}},
    {"writeConcern": 5},
    {"hint": 5},
    {"help": True},
    {"$readPreference": {"mode": "bogus"}},
    {"$readPreference": 5},
    {"$clusterTime": {"clusterTime": Timestamp(1, 1)}},
    {"$clusterTime": 5},
    {"collectionUUID": UUID},
    {"maxTimeMSOpOnly": 5},
    {"shardVersion": 1},
    {"$client": 1},
    {"tracking_info": 1},
]


@pytest.mark.parametrize("fields", ORDINARY)
def test_fields_that_any_driver_sends_leave_a_stream_with_the_gateway(fields: dict[str, Any]) -> None:
    document = bson.encode({**STREAM, **fields, "$db": "d"})
    assert is_ordinary(document)
    assert opens_stream(document)


@pytest.mark.parametrize("fields", SERVERS)
def test_fields_that_only_the_server_can_judge_are_left_to_it(fields: dict[str, Any]) -> None:
    assert not opens_stream(bson.encode({**STREAM, **fields, "$db": "d"}))


@pytest.mark.mongod
def test_what_the_server_refuses_in_the_fields_of_any_command_is_refused(replica_set: ReplicaSet) -> None:
    """Each of these had opened a stream: a malformed session was ignored, and a transaction was not checked."""
    with running_gateway(replica_set.uri) as running, Wire.to(running.uri()) as wire, Wire.to(replica_set.uri) as real:
        for fields in SERVERS:
            ours, theirs = (
                bson.decode(one.exchange(bson.encode({**STREAM, **in_a_new_session(fields), "$db": "broken"})))
                for one in (wire, real)
            )
            assert [ours.get(name) for name in ("ok", "code", "errmsg")] == [
                theirs.get(name) for name in ("ok", "code", "errmsg")
            ], fields
            cursor_id = wire.run("broken", STREAM)["cursor"]["id"]
            more = {"getMore": Int64(cursor_id), "collection": "c", "maxTimeMS": 5, **fields}
            assert bson.decode(wire.exchange(bson.encode({**more, "$db": "broken"})))["ok"] == 0, fields
            wire.run("broken", {"killCursors": "c", "cursors": [Int64(cursor_id)]})


def in_a_new_session(fields: dict[str, Any]) -> dict[str, Any]:
    """A transaction's number may not be used twice."""
    return (
        {**fields, "lsid": {"id": Binary(uuid.uuid4().bytes, 4)}}
        if "autocommit" in fields and "lsid" in fields
        else fields
    )


# -- what a message may cost ---------------------------------------------------------------------------------------


def packed(message: bytes) -> bytes:
    return compression.compress(message, "zlib")


def test_the_size_of_what_is_compressed_is_known_before_it_is_read() -> None:
    frame = packed(op_msg(bson.encode({"ping": 1, "text": "x" * 1000, "$db": "d"}), request_id=1))
    assert compression.size_inside(frame[:25]) + HEADER_SIZE == parse_header(compression.decompress(frame)).length
    for size in (-1, 1 << 30):
        with pytest.raises(BadFrame):
            compression.size_inside(frame[:16] + struct.pack("<iiB", OP_MSG, size, 2))
    with pytest.raises(BadFrame):
        compression.size_inside(frame[:24])


def hello_that_waits(wire: Wire, request_id: int) -> bytes:
    """A hello that the server answers when it has news, within an hour. It needs no login."""
    known = wire.run("admin", {"hello": 1})["topologyVersion"]
    asked = {"hello": 1, "topologyVersion": known, "maxAwaitTimeMS": Int64(3_600_000), "$db": "admin"}
    return op_msg(bson.encode(asked), request_id=request_id)


@pytest.mark.mongod
@pytest.mark.parametrize("is_compressed", [True, False])
def test_a_large_message_after_an_open_request_takes_no_memory(replica_set: ReplicaSet, is_compressed: bool) -> None:
    """16 kB of zlib had become 16 MB for each connection that waits, beside the limit for all of them."""
    large = op_msg(
        bson.encode({"aggregate": "c", "pipeline": [{"$changeStream": {}}], "comment": b"\0" * 12_000_000, "$db": "d"}),
        request_id=2,
    )
    seen: list[int] = []
    apart = compression.decompress

    def note_decompress(message: bytes) -> bytes:
        seen.append(len(message))
        return apart(message)

    def note_command(message: bytes, _: str | None) -> None:
        seen.append(len(message))

    with running_gateway(replica_set.uri) as running, Wire.to(running.uri()) as wire:
        wire.run("admin", {"ping": 1})
        open_before = running.gateway.metrics.connections
        clients = [socket.create_connection((running.host, running.port), timeout=300) for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "decompress", note_decompress)
            patch.setattr(exchange, "command_of", note_command)
            for client in clients:
                client.sendall(hello_that_waits(wire, 1))
                client.sendall(packed(large) if is_compressed else large[:60_000])
            wire.run("admin", {"ping": 1})
            eventually(lambda: sum(map(waits_for_room, connections(running))) == 3, "nobody waits")
            assert not [size for size in seen if size > 10_000]
        for client in clients:
            client.close()
        eventually(lambda: running.gateway.metrics.connections == open_before, "connections are left")


def connections(running: RunningGateway) -> list[Any]:
    return running.call(lambda: list(running.gateway._connections))


def waits_for_room(one: Any) -> bool:
    return bool(one._awaited) and one._answering and one._shared.memory._held == 0


def test_names_in_names_without_end_are_no_fault_of_the_gateway() -> None:
    """The whole of a compressed message had been searched, one call deeper for each ``query`` in it."""
    inner = bson.encode({"a": 1})
    for _ in range(5000):
        inner = struct.pack("<i", len(inner) + 12) + b"\x03query\x00" + inner + b"\x00"
    assert command.outline(OP_MSG, op_msg(inner, request_id=1)).op_code == OP_MSG


@pytest.mark.mongod
def test_what_is_large_is_not_worked_on_in_the_loop(replica_set: ReplicaSet) -> None:
    """The others had waited half a second for each message, whoever had sent it, and 2 s for one with many stages."""
    many: list[dict[str, Any]] = [{"$changeStream": {}}] + [{"$match": {"a": 1}}] * 2000
    large = bson.encode({"aggregate": "c", "pipeline": many, "cursor": {}, "$db": "broken"})
    threads: set[str] = set()
    parsed, scoped = command.command_of, commands._scope_of

    def note_command(*one: Any) -> Any:
        if len(one[0]) > 50_000:
            threads.add(current_thread().name)
        return parsed(*one)

    def note_scope(one: Any) -> Any:
        threads.add(current_thread().name)
        return scoped(one)

    with (
        running_gateway(replica_set.uri) as running,
        Wire.to(running.uri()) as wire,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(exchange, "command_of", note_command)
        patch.setattr(commands, "_scope_of", note_scope)
        wire.exchange(large)
    assert threads
    assert "gateway" not in threads


# -- other parts ---------------------------------------------------------------------------------------------------


def test_the_question_whether_rights_are_asked_for_may_be_put_to_any_member() -> None:
    """A member that accepts no writes refused it with 13435, and its deployment was taken for one with users."""
    assert bson.decode(identification._PROBE)["$readPreference"] == {"mode": "secondaryPreferred"}


def test_a_connection_made_while_another_member_was_elected_goes_to_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed with the old one, and a driver that monitors the server through it would have seen no primary any
    more."""
    old, new = upstream.Address("127.0.0.1", 1), upstream.Address("127.0.0.1", 2)

    class Writer:
        closed = False

        def close(self) -> None:
            self.closed = True

        def get_extra_info(self, name: str) -> None:
            return None

    async def run() -> tuple[upstream.Address, list[tuple[int, Writer]]]:
        followed = upstream.Upstream(hide("mongodb://127.0.0.1:1/?connect=false"), lambda _: None)
        made: list[tuple[int, Writer]] = []

        async def open_connection(host: str, port: int, **_: Any) -> tuple[None, Writer]:
            made.append((port, Writer()))
            followed.address = new
            return None, made[-1][1]

        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        followed.address = old
        try:
            return (await followed.connect())[0], made
        finally:
            followed.close()

    chosen, made = asyncio.run(run())
    assert chosen == new
    assert [(port, writer.closed) for port, writer in made] == [(1, True), (2, False)]


@pytest.mark.parametrize("port", ["²", "٣"])
def test_a_port_in_other_digits_is_no_address(port: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        address_of(f"127.0.0.1:{port}", "--listen")


def test_a_fault_of_a_stream_is_counted_once() -> None:
    def failing() -> Any:
        yield from ()
        raise InternalError("broken")

    engine = object.__new__(Engine)
    engine.metrics, engine.streams, engine.version = GatewayMetrics(), {}, (6, 0)
    acting = LocalActing(failing(), Threads(1, thread_name_prefix="test"), 1)
    reply = asyncio.run(engine.carried_out(acting, object.__new__(OplogReading), 0))
    engine._count(len(reply), facts_of_reply(reply))
    assert sum(engine.metrics.errors.values()) == 1
