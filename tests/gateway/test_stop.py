"""How a gateway ends, and how its clients go on: a clean stop, another gateway, another primary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import bson
import pymongo
import pytest
from bson.int64 import Int64

from tailrace.embedded import ReplicaSet
from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.gateways import running_gateway
from tests.gateway.running import GatewayProcess

pytestmark = pytest.mark.mongod

_LIMIT_S = 300.0
STREAM = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_stop_ends_a_stream_that_waits_with_an_error_that_resumes(replica_set: ReplicaSet) -> None:
    with running_gateway(replica_set.uri) as running, Wire.to(running.uri()) as waiting, Wire.to(running.uri()) as idle:
        idle.run("admin", {"ping": 1})
        cursor = waiting.run("gatewayStop", STREAM)["cursor"]["id"]
        read = {"getMore": Int64(cursor), "collection": "c", "maxTimeMS": 600_000, "$db": "gatewayStop"}
        replies: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: replies.append(bson.decode(waiting.exchange(bson.encode(read)), ANY_VALUE))
        )
        thread.start()
        engine = running.gateway.engine
        until(lambda: running.call(lambda: engine.streams[cursor].is_busy))
        running.stop()
        thread.join(_LIMIT_S)
        assert replies[0]["code"] == 91
        assert replies[0]["errorLabels"] == ["ResumableChangeStreamError"]
        for wire in (waiting, idle):  # both are closed, and nothing more comes
            with pytest.raises(OSError):  # noqa: PT011  a closed connection has many names
                wire.exchange(bson.encode({"ping": 1, "$db": "admin"}))
        assert engine.streams == {}


def test_a_driver_goes_on_at_the_next_gateway(replica_set: ReplicaSet) -> None:
    with (
        running_gateway(replica_set.uri) as first,
        pymongo.MongoClient[dict[str, Any]](first.uri("directConnection=true")) as client,
        client.gatewayStop.moved.watch(max_await_time_ms=200) as stream,
    ):
        client.gatewayStop.moved.insert_one({"_id": 1})
        assert next(stream)["documentKey"] == {"_id": 1}
        port = first.port
        first.stop()
        with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as direct:
            direct.gatewayStop.moved.insert_one({"_id": 2})
        with running_gateway(replica_set.uri, port=port):
            assert next(stream)["documentKey"] == {"_id": 2}
            stream.close()  # while there is a gateway: PyMongo would search for one for 30 s
            client.close()


def test_two_gateways_take_each_other_s_tokens(replica_set: ReplicaSet) -> None:
    with (
        running_gateway(replica_set.uri) as first,
        running_gateway(replica_set.uri) as second,
        pymongo.MongoClient[dict[str, Any]](first.uri()) as one,
        pymongo.MongoClient[dict[str, Any]](second.uri()) as other,
    ):
        with one.gatewayStop.both.watch() as stream:
            for number in range(4):
                one.gatewayStop.both.insert_one({"_id": number})
            tokens = [next(stream)["_id"] for _ in range(4)]
        for number, token in enumerate(tokens[:-1]):
            with other.gatewayStop.both.watch(resume_after=token) as stream:
                assert next(stream)["documentKey"] == {"_id": number + 1}


def test_streams_go_on_when_another_member_is_elected(start_replica_set: Callable[..., ReplicaSet]) -> None:
    deployment = start_replica_set(members=3)
    with (
        running_gateway(deployment.uri) as running,
        pymongo.MongoClient[dict[str, Any]](running.uri(), retryWrites=True) as client,
        client.shop.orders.watch(max_await_time_ms=500) as stream,
    ):
        client.shop.orders.insert_one({"_id": 0})
        assert next(stream)["documentKey"] == {"_id": 0}
        deployment.step_down()

        def written() -> bool:
            try:
                client.shop.orders.insert_one({"_id": 1})
            except pymongo.errors.DuplicateKeyError:
                return True
            except pymongo.errors.PyMongoError:
                return False
            return True

        until(written)
        assert next(stream)["documentKey"] == {"_id": 1}


def test_a_frozen_server_holds_up_neither_the_end_nor_the_streams(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    """A stop waited for every reading thread, and so for as long as a socket may be silent: here, ten minutes. All
    earlier tests of a stop had a server that answers."""
    frozen = start_replica_set(1)
    with start_gateway(f"{frozen.uri}&socketTimeoutMS=600000") as gateway, Wire.to(gateway.uri) as wire:
        cursor = wire.run("gatewayStop", STREAM)["cursor"]["id"]
        token = wire.run("gatewayStop", {"getMore": Int64(cursor), "collection": "c", "maxTimeMS": 1})
        late = {**STREAM, "pipeline": [{"$changeStream": {"resumeAfter": token["cursor"]["postBatchResumeToken"]}}]}
        replies: dict[str, int] = {}

        def ask(name: str, database: str, command: dict[str, Any], own: Wire) -> None:
            try:
                reply = bson.decode(own.exchange(bson.encode({**command, "$db": database})), ANY_VALUE)
                replies[name] = reply["code"]
            except OSError:
                replies[name] = -1  # closed, which is the answer to what the server owes

        with Wire.to(gateway.uri) as second, Wire.to(gateway.uri) as third:
            for other in (second, third):
                other.run("admin", {"ping": 1})
            read = {"getMore": Int64(cursor), "collection": "c", "maxTimeMS": 600_000}
            asked = [("waits", "gatewayStop", read, wire), ("opens", "gatewayStop", late, second)]
            asked.append(("passed", "gatewayStop", {"find": "c"}, third))
            os.kill(frozen.members[0].pid, signal.SIGSTOP)
            try:
                threads = [threading.Thread(target=ask, args=each) for each in asked]
                for thread in threads:
                    thread.start()
                time.sleep(5)  # so that they have begun, on a busy machine too
                gateway.process.send_signal(signal.SIGTERM)
                assert gateway.process.wait(_LIMIT_S) == 0
                for thread in threads:
                    thread.join(_LIMIT_S)
            finally:
                os.kill(frozen.members[0].pid, signal.SIGCONT)
    assert replies == {"waits": 91, "opens": 91, "passed": -1}


def test_the_command_ends_at_sigterm(replica_set: ReplicaSet) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TAILRACE_URI"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "gateway", "--upstream", replica_set.uri, "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listening at 127.0.0.1:" in line
        with pymongo.MongoClient[dict[str, Any]](f"mongodb://{line.split()[-1]}/") as client:
            client.admin.command("ping")
            process.send_signal(signal.SIGTERM)
            assert process.wait(_LIMIT_S) == 0
            with pymongo.timeout(1):  # nobody is there to be told that the session has ended
                client.close()
    finally:
        process.kill()
        process.wait()
