"""What the gateway does not answer is passed through unchanged; replies in which servers name themselves name the
gateway."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import bson
import pymongo
import pytest
from pymongo.errors import OperationFailure

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway.frame import EXHAUST_ALLOWED, MORE_TO_COME, OpMsg, OpReply, op_msg, op_query
from tailrace.watch.gateway.hello import rewritten
from tests.differential.wire import Wire
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.server_in_use import LANGUAGE

pytestmark = pytest.mark.mongod

DATABASE = "gatewayPassing"


@pytest.fixture(scope="module")
def running(replica_set: ReplicaSet) -> Iterator[RunningGateway]:
    with running_gateway(replica_set.uri) as made:
        yield made


class Connection:
    """Whole messages, as bytes."""

    def __init__(self, running: RunningGateway) -> None:
        self._socket = socket.create_connection((running.host, running.port), timeout=300)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, message: bytes) -> None:
        self._socket.sendall(message)

    def receive(self) -> bytes:
        size = struct.unpack("<i", head := self._exactly(4))[0]
        return head + self._exactly(size - 4)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the gateway closed the connection"
            data += more
        return data


def test_each_form_of_hello_names_the_gateway_alone(running: RunningGateway) -> None:
    forms = [
        op_query(b"admin.$cmd", bson.encode({name: 1, "helloOk": True}), request_id=number)
        for number, name in enumerate(("isMaster", "ismaster"))
    ]
    forms.append(op_query(b"admin.$cmd", bson.encode({"$query": {"isMaster": 1}}), request_id=8))
    forms += [
        op_msg(bson.encode({name: 1, "$db": "admin"}), request_id=number)
        for number, name in enumerate(("hello", "isMaster"))
    ]
    with Connection(running) as connection:
        for form in forms:
            connection.send(form)
            reply = connection.receive()
            is_query = struct.unpack_from("<i", form, 12)[0] == 2004
            raw = OpReply.parse(reply).documents[0] if is_query else OpMsg.parse(reply).document
            document = bson.decode(raw)
            if form is forms[2] and LANGUAGE >= (7, 0):  # which takes no such query
                assert document["code"] == 352
                assert "hosts" not in document
                continue
            assert document["hosts"] == [running.hosts]
            assert document["me"] == document["primary"] == running.hosts
            assert document["setName"] == "rs0"


def test_streamed_hellos_name_it_too(running: RunningGateway) -> None:
    with Connection(running) as connection:
        connection.send(op_msg(bson.encode({"hello": 1, "$db": "admin"}), request_id=1))
        version = bson.decode(OpMsg.parse(connection.receive()).document)["topologyVersion"]
        command = {"hello": 1, "topologyVersion": version, "maxAwaitTimeMS": 20, "$db": "admin"}
        connection.send(op_msg(bson.encode(command), request_id=2, flags=EXHAUST_ALLOWED))
        for _ in range(3):
            message = OpMsg.parse(connection.receive())
            assert message.more_to_come
            assert bson.decode(message.document)["hosts"] == [running.hosts]


def test_a_member_that_is_not_primary_names_none() -> None:
    reply = {"isWritablePrimary": False, "hosts": ["a:1", "b:2"], "primary": "a:1", "me": "b:2", "arbiters": ["c:3"]}
    told = bson.decode(rewritten(bson.encode({**reply, "compression": ["snappy", "zstd"]}), "gate:9", ["zstd"]))
    assert told == {"isWritablePrimary": False, "hosts": ["gate:9"], "me": "gate:9", "compression": ["zstd"]}


def test_unanswered_messages_are_not_waited_for(running: RunningGateway) -> None:
    with Connection(running) as connection:
        insert = {"insert": "c", "documents": [{"_id": "unanswered"}], "writeConcern": {"w": 0}, "$db": DATABASE}
        connection.send(op_msg(bson.encode(insert), request_id=1, flags=MORE_TO_COME))
        stream = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, "$db": DATABASE}
        connection.send(op_msg(bson.encode(stream), request_id=2))
        assert OpMsg.parse(connection.receive()).header.response_to == 2


def test_replies_come_in_the_order_of_commands(running: RunningGateway) -> None:
    stream = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, "$db": DATABASE}
    ping = {"ping": 1, "$db": DATABASE}
    with Connection(running) as connection:
        for number in range(40):
            connection.send(op_msg(bson.encode(stream if number % 4 == 3 else ping), request_id=number))
        assert [OpMsg.parse(connection.receive()).header.response_to for _ in range(40)] == list(range(40))


def test_large_messages_pass_both_ways(running: RunningGateway) -> None:
    with pymongo.MongoClient[dict[str, Any]](running.uri()) as client:
        documents = [{"_id": number, "text": "x" * 5_000_000} for number in range(4)]
        client[DATABASE].large.insert_many(documents)
        assert [len(each["text"]) for each in client[DATABASE].large.find()] == [5_000_000] * 4
        client[DATABASE].large.drop()


def test_transactions_and_exhaust_cursors_work(running: RunningGateway) -> None:
    with pymongo.MongoClient[dict[str, Any]](running.uri()) as client:
        with client.start_session() as session, session.start_transaction():
            client[DATABASE].c.insert_many([{"_id": number} for number in range(1000)], session=session)
        found = client[DATABASE].c.find(cursor_type=pymongo.CursorType.EXHAUST, batch_size=10)
        assert len(list(found)) >= 1000


@pytest.mark.parametrize("compressor", ["zlib", "snappy", "zstd"])
def test_compressed_streams(running: RunningGateway, compressor: str) -> None:
    with (
        pymongo.MongoClient[dict[str, Any]](running.uri(f"compressors={compressor}")) as client,
        client[DATABASE].compressed.watch() as stream,
    ):
        client[DATABASE].compressed.insert_many({"text": "x" * 1000} for _ in range(50))
        assert [next(stream)["fullDocument"]["text"] for _ in range(50)] == ["x" * 1000] * 50


def test_what_is_no_stream_of_ours_is_the_server_s(running: RunningGateway) -> None:
    with Wire.to(running.uri()) as wire:
        explained = wire.run(
            DATABASE, {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, "explain": True}
        )
        assert "stages" in explained
    with Connection(running) as connection:
        # Of two fields with the same name the server reads one; it refuses both.
        one = bson.encode({"getMore": 1})[4:-1]
        body = one + one + bson.encode({"collection": "c", "$db": DATABASE})[4:-1]
        connection.send(op_msg(struct.pack("<i", len(body) + 5) + body + b"\0", request_id=1))
        assert bson.decode(OpMsg.parse(connection.receive()).document)["ok"] == 0


def test_the_server_counts_no_stream(replica_set: ReplicaSet, running: RunningGateway) -> None:
    with pymongo.MongoClient[dict[str, Any]](running.uri()) as client:

        def counted() -> int:
            return int(client.admin.command("serverStatus")["metrics"]["aggStageCounters"]["$changeStream"])

        before = counted()
        for target in (client, client[DATABASE], client[DATABASE].c):
            with target.watch(max_await_time_ms=1) as stream:
                stream.try_next()
        with pytest.raises(OperationFailure):
            client[DATABASE].watch([{"$nothing": 1}])
        assert counted() == before
