"""Clients whose streams only wait take nothing from the server, not even a connection.

No test had shown the fault: with 10,000 streams some connections were never answered, because each client took two of
the gateway's open files, and all tests had fewer clients than files.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import bson
import pytest

from tailrace.embedded import ReplicaSet
from tests.differential.wire import Wire
from tests.gateway.gateways import running_gateway

pytestmark = pytest.mark.mongod

_LIMIT_S = 300.0
DATABASE = "gatewayParked"
STREAM = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def get_more(cursor: int, await_ms: int = 1) -> dict[str, Any]:
    return {"getMore": bson.Int64(cursor), "collection": "c", "maxTimeMS": await_ms}


def next_batch(wire: Wire, cursor: int) -> list[Any]:
    batch: list[Any] = []
    until(lambda: batch or batch.extend(wire.run(DATABASE, get_more(cursor, 1000))["cursor"]["nextBatch"]))
    return batch


def connections(wire: Wire) -> int:
    """The connections of the wire tests' clients at the server."""
    stages = [{"$currentOp": {"allUsers": True, "idleConnections": True}}, {"$match": {"clientMetadata": WHO}}]
    reply = wire.run("admin", {"aggregate": 1, "pipeline": stages, "cursor": {}})
    return len(reply["cursor"]["firstBatch"])


WHO = {"driver": {"name": "parked", "version": "1"}, "os": {"type": "Linux"}}


def watching(uri: str) -> tuple[Wire, int]:
    wire = Wire.to(uri)
    wire.run("admin", {"hello": 1, "client": WHO})
    return wire, wire.run(DATABASE, STREAM)["cursor"]["id"]


def test_a_stream_that_waits_has_no_connection_at_the_server(replica_set: ReplicaSet) -> None:
    with running_gateway(replica_set.uri) as running, Wire.to(replica_set.uri) as native, ExitStack() as stack:
        opened = [watching(running.uri()) for _ in range(5)]
        for wire, _ in opened:
            stack.enter_context(wire)
        assert connections(native) == 5
        for _ in range(2):
            for wire, cursor in opened:
                assert wire.run(DATABASE, get_more(cursor))["cursor"]["nextBatch"] == []
        until(lambda: connections(native) == 0)
        native.run(DATABASE, {"insert": "c", "documents": [{"_id": "parked"}]})
        for wire, cursor in opened:  # the streams are alive
            assert [event["documentKey"]["_id"] for event in next_batch(wire, cursor)] == ["parked"]
        for wire, cursor in opened[:3]:  # and a client that asks the server has a connection again, as the same client
            assert wire.run(DATABASE, {"find": "c"})["cursor"]["firstBatch"][0]["_id"] == "parked"
            assert wire.run(DATABASE, get_more(cursor))["cursor"]["nextBatch"] == []
        assert connections(native) == 3
        native.run(DATABASE, {"dropDatabase": 1})


def test_a_client_that_has_asked_the_server_for_more_keeps_its_connection(replica_set: ReplicaSet) -> None:
    """What the server may remember of it, nobody knows here."""
    with running_gateway(replica_set.uri) as running, Wire.to(replica_set.uri) as native:
        wire, cursor = watching(running.uri())
        with wire:
            wire.run("admin", {"ping": 1})
            for _ in range(4):
                wire.run(DATABASE, get_more(cursor))
            assert connections(native) == 1
            assert not running.call(lambda: any(one.is_parked for one in running.gateway._connections))


def test_clients_beyond_the_open_files_are_refused_at_once(
    replica_set: ReplicaSet, caplog: pytest.LogCaptureFixture
) -> None:
    """They never got an answer, and neither did anybody after them."""
    with running_gateway(replica_set.uri) as running, ExitStack() as stack:
        running.call(lambda: setattr(running.gateway, "_files", 24))  # less than two for each of sixteen clients
        for _ in range(2):
            opened = [watching(running.uri()) for _ in range(8)]
            for wire, cursor in opened:
                stack.enter_context(wire)
                for _ in range(2):
                    wire.run(DATABASE, get_more(cursor))
            until(lambda: running.call(lambda: all(one.is_parked for one in running.gateway._connections)))
        running.call(lambda: setattr(running.gateway, "_files", 20))
        fresh = [stack.enter_context(Wire.to(running.uri())) for _ in range(2)]
        fresh[0].run("admin", {"hello": 1})
        refused = stack.enter_context(socket.create_connection((running.host, running.port), timeout=_LIMIT_S))
        with suppress(ConnectionError):
            assert refused.recv(1) == b""
        fresh[1].run("admin", {"hello": 1})
        assert "ulimit -n" in caplog.text
