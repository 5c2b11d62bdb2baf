"""Limits of a gateway, clients that stand still, and TLS on both sides."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from pymongo.errors import OperationFailure, ServerSelectionTimeoutError

from tailrace.cli.stream_arguments import address_of
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.watch.gateway import connection, memory
from tailrace.watch.gateway.frame import MESSAGE_SIZE_MAX, op_msg
from tests.differential.wire import Wire
from tests.gateway.gateways import RunningGateway, running_gateway

pytestmark = pytest.mark.mongod

_LIMIT_S = 300.0
DATABASE = "gatewayLimits"
STREAM = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other side closes."""
    connection.settimeout(_LIMIT_S)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def connected(running: RunningGateway) -> socket.socket:
    return socket.create_connection((running.host, running.port), timeout=_LIMIT_S)


def test_streams_over_the_limit_are_refused_and_room_is_made(replica_set: ReplicaSet) -> None:
    with running_gateway(replica_set.uri, cursors_max=2) as running, Wire.to(running.uri()) as wire:
        opened = [wire.run(DATABASE, STREAM)["cursor"]["id"] for _ in range(2)]
        reply = bson.decode(wire.exchange(bson.encode({**STREAM, "$db": DATABASE})))
        assert reply["code"] == 146
        assert "2 change streams open" in reply["errmsg"]
        wire.run(DATABASE, {"killCursors": "c", "cursors": [bson.Int64(opened[0])]})
        assert wire.run(DATABASE, STREAM)["ok"] == 1


def test_one_address_does_not_take_all_streams_where_there_are_no_users(replica_set: ReplicaSet) -> None:
    """There --cursors-per-user had no effect."""
    with running_gateway(replica_set.uri, cursors_per_user=2) as running, Wire.to(running.uri()) as wire:
        for _ in range(2):
            wire.run(DATABASE, STREAM)
        reply = bson.decode(wire.exchange(bson.encode({**STREAM, "$db": DATABASE})))
        assert reply["code"] == 146
        assert "2 change streams of this address open" in reply["errmsg"]


def test_connections_over_the_limit_are_closed(replica_set: ReplicaSet) -> None:
    with running_gateway(replica_set.uri, connections_max=2) as running:
        first, second = Wire.to(running.uri()), Wire.to(running.uri())
        for wire in (first, second):
            wire.run("admin", {"ping": 1})
        with connected(running) as third:
            assert is_closed(third)
        first.close()
        until(lambda: running.call(lambda: running.gateway.metrics.connections) == 1)
        with Wire.to(running.uri()) as fourth:
            fourth.run("admin", {"ping": 1})
        second.close()
        assert running.gateway.metrics.connections_refused == 1


@pytest.mark.parametrize("length", [0, 15, -1, MESSAGE_SIZE_MAX + 1, 0x7FFFFFFF])
def test_a_length_that_lies_closes_the_connection(replica_set: ReplicaSet, length: int) -> None:
    with running_gateway(replica_set.uri) as running:
        with connected(running) as connection:
            connection.sendall(struct.pack("<iiii", length, 1, 0, 2013))
            assert is_closed(connection)
        assert running.gateway.metrics.frames_refused == 1


def test_who_says_nothing_or_stops_in_the_middle_is_closed(replica_set: ReplicaSet) -> None:
    with running_gateway(replica_set.uri, handshake_seconds=0.5, stall_seconds=0.5) as running:
        with connected(running) as silent:
            assert is_closed(silent)
        for part in (10, 20, 60):
            with connected(running) as slow:
                slow.sendall(op_msg(bson.encode({"ping": 1, "text": "x" * 100, "$db": "admin"}), request_id=1)[:part])
                assert is_closed(slow)
        until(lambda: running.call(lambda: running.gateway.metrics.connections) == 0)


def test_who_sends_a_byte_at_a_time_is_closed_and_holds_up_nobody(replica_set: ReplicaSet) -> None:
    """The limit is for the whole message: a byte now and then does not extend it. (Only a client that stopped sending
    had been tried.)"""
    message = op_msg(bson.encode({"ping": 1, "text": "x" * 100_000, "$db": "admin"}), request_id=1)
    with running_gateway(replica_set.uri, stall_seconds=1.0) as running, connected(running) as slow:
        slow.sendall(message[:20])
        sent = 20
        with suppress(ConnectionError):
            while sent < len(message):
                slow.sendall(message[sent : sent + 1])
                sent += 1
                time.sleep(0.02)
        assert sent < len(message), "it was let go on"
        with pymongo.MongoClient[dict[str, Any]](running.uri()) as other:
            assert other.admin.command("ping")["ok"] == 1


def test_who_does_not_take_what_he_asks_for_is_closed(replica_set: ReplicaSet) -> None:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[DATABASE].large.insert_many([{"text": "x" * 1_000_000} for _ in range(12)])
    with running_gateway(replica_set.uri, stall_seconds=1.0) as running, connected(running) as greedy:
        find = {"find": "large", "batchSize": 12, "$db": DATABASE}
        for number in range(8):
            greedy.sendall(op_msg(bson.encode(find), request_id=number))
        with pymongo.MongoClient[dict[str, Any]](running.uri()) as other:
            assert other.admin.command("ping")["ok"] == 1
        until(lambda: running.call(lambda: running.gateway.metrics.connections) == 0)


def test_who_takes_a_large_reply_too_slowly_is_closed_if_others_wait(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow readers held the memory for replies as long as they read a little now and then, and the large replies of all
    others waited. No test had two clients with large replies."""
    monkeypatch.setattr(connection, "SLOW_S", 0.3)
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        before = client.admin.command("ping")["operationTime"]
        client[DATABASE].wide.insert_many([{"text": "x" * 1_000_000} for _ in range(14)])
    pipeline = [{"$changeStream": {"startAtOperationTime": before}}]
    stream = {"aggregate": "wide", "pipeline": pipeline, "cursor": {"batchSize": 14}, "$db": DATABASE}
    with running_gateway(replica_set.uri, memory_bytes=2, stall_seconds=3600.0) as running, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        slow.connect((running.host, running.port))
        slow.sendall(op_msg(bson.encode(stream), request_id=1))
        until(lambda: running.call(lambda: running.gateway._surroundings.reply_memory._held))
        assert running.gateway.metrics.connections == 1
        with Wire.to(running.uri()) as other:
            reply = bson.decode(other.exchange(bson.encode(stream)))
            assert len(reply["cursor"]["firstBatch"]) == 14
        until(lambda: running.call(lambda: running.gateway.metrics.connections) == 0)


def large_read(size: int) -> dict[str, Any]:
    """A command that the gateway has to read as a whole."""
    return {"aggregate": "c", "pipeline": [{"$match": {"text": "x" * size}}], "cursor": {}}


def begun(running: RunningGateway, size: int) -> socket.socket:
    """A connection on which only the beginning of a message of ``size`` bytes was sent."""
    client = connected(running)
    client.sendall(op_msg(bson.encode({**large_read(size), "$db": DATABASE}), request_id=1)[:100_000])
    return client


def test_who_sends_a_large_message_too_slowly_is_closed_if_others_wait(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as for replies: the memory was held for as long as a message may take, even if others waited for it.
    Slow messages had only been tried by themselves."""
    monkeypatch.setattr(memory, "SLOW_S", 0.3)
    with running_gateway(replica_set.uri, memory_bytes=2, stall_seconds=3600.0) as running:
        with begun(running, 300_000) as slow:
            until(lambda: running.call(lambda: running.gateway._surroundings.memory._held))
            with Wire.to(running.uri()) as other:
                assert other.run(DATABASE, large_read(300_000))["ok"] == 1
            assert is_closed(slow)
        assert not running.call(lambda: running.gateway._surroundings.memory._held)


def test_an_address_that_is_taken_is_an_error(replica_set: ReplicaSet) -> None:
    with (
        running_gateway(replica_set.uri) as running,
        pytest.raises(SinkError, match="cannot listen at"),
        running_gateway(replica_set.uri, port=running.port),
    ):
        pass


def test_addresses() -> None:
    assert address_of("127.0.0.1:5", "--listen") == ("127.0.0.1", 5)
    assert address_of("[::1]:5", "--listen") == ("::1", 5)
    assert address_of(":5", "--listen") == ("127.0.0.1", 5)
    for wrong in ("", "here", "here:", "here:x", "here:70000"):
        with pytest.raises(UsageError, match="is not an address"):
            address_of(wrong, "--listen")


# -- TLS ----------------------------------------------------------------------------------------------------------


def assert_refused(uri: str) -> None:
    with (
        pymongo.MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=3000) as client,
        pytest.raises(ServerSelectionTimeoutError),
    ):
        client.admin.command("ping")


def test_tls_to_clients_and_to_the_server(certificates: Path, encrypted: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem")
    with running_gateway(encrypted, tls=context) as running:
        trusting = running.uri(f"tls=true&tlsCAFile={certificates / 'ca.pem'}")
        with pymongo.MongoClient[dict[str, Any]](trusting) as client, client.shop.c.watch() as stream:
            client.shop.c.insert_one({"_id": 1})
            assert next(stream)["documentKey"] == {"_id": 1}
        for refused in (running.uri(), running.uri(f"tls=true&tlsCAFile={certificates / 'other.pem'}")):
            assert_refused(refused)


def test_clients_count_before_their_handshake_and_have_to_end_it(certificates: Path, replica_set: ReplicaSet) -> None:
    """asyncio reports clients only after the handshake, and gives them a minute for it: any number could wait. No test
    had stopped in the middle of one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem")
    with running_gateway(replica_set.uri, tls=context, connections_max=2, handshake_seconds=3.0) as running:
        with connected(running) as first, connected(running) as second:
            until(lambda: running.call(lambda: len(running.gateway._arriving)) == 2)
            with connected(running) as third:
                assert is_closed(third)
            assert is_closed(first)
            assert is_closed(second)
        assert running.gateway.metrics.connections_refused == 1
        until(lambda: running.gateway.metrics.handshakes_failed == 2)
        trusting = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        ping = op_msg(bson.encode({"ping": 1, "$db": "admin"}), request_id=1)
        with (
            trusting.wrap_socket(connected(running), server_hostname="127.0.0.1") as one,
            trusting.wrap_socket(connected(running), server_hostname="127.0.0.1") as other,
        ):
            for client in (one, other):
                client.sendall(ping)
                assert len(client.recv(16)) == 16


def test_a_stop_does_not_wait_for_handshakes(certificates: Path, replica_set: ReplicaSet) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem")
    with (
        running_gateway(replica_set.uri, tls=context, handshake_seconds=3600.0, stop_seconds=3600.0) as running,
        connected(running) as silent,
    ):
        until(lambda: running.call(lambda: running.gateway._arriving))
        running.stop()
        assert is_closed(silent)


def test_clients_may_have_to_show_a_certificate(certificates: Path, replica_set: ReplicaSet) -> None:
    from tailrace.cli.gateway import _tls

    context = _tls(str(certificates / "server.pem"), str(certificates / "ca.pem"))
    with running_gateway(replica_set.uri, tls=context) as running:
        bare = running.uri(f"tls=true&tlsCAFile={certificates / 'ca.pem'}")
        shown = f"{bare}&tlsCertificateKeyFile={certificates / 'server.pem'}"
        with pymongo.MongoClient[dict[str, Any]](shown) as client:
            client.admin.command("ping")
        assert_refused(bare)
    with pytest.raises(UsageError, match="there is no file"):
        _tls(str(certificates / "nothing.pem"), None)
    with pytest.raises(UsageError, match="certificate cannot be used"):
        _tls(str(certificates / "ca.pem"), None)


def test_errors_do_not_hold_passwords(replica_set: ReplicaSet) -> None:
    """A client that may not log in is refused by the server; the gateway's own URI gives nobody any rights."""
    with running_gateway(replica_set.uri) as running:
        uri = running.uri("authSource=admin", "nobody:s3cret")
        with pymongo.MongoClient[dict[str, Any]](uri) as client, pytest.raises(OperationFailure) as caught:
            client.admin.command("ping")
        assert caught.value.code == 18
        assert "s3cret" not in str(caught.value.details)
