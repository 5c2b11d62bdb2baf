"""One tenant's expressions keep nobody else waiting: they are computed in processes of their own, within limits.

They used to be evaluated in the event loop if the batch was small, so a nested ``$map`` over ``$range`` blocked the
gateway for half a minute. The tests of hostile clients had only sent odd bytes, and no valid command that computes for
long.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson.int64 import Int64
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway.frame import HEADER_SIZE, OpMsg, op_msg, parse_header
from tests import commands
from tests.gateway.running import GatewayProcess, eventually

pytestmark = pytest.mark.mongod

#: After this time a client's call ends, whatever the gateway does.
_LIMIT_MS = 300_000


def of_event() -> list[dict[str, Any]]:
    """Stages that take hours for each event."""
    numbers = {"$range": [0, 20_000]}
    inner = {"$map": {"input": numbers, "as": "b", "in": {"$add": ["$$a", "$$b"]}}}
    return [{"$set": {"made": {"$size": {"$map": {"input": numbers, "as": "a", "in": {"$size": inner}}}}}}]


def constant() -> list[dict[str, Any]]:
    """Stages that take minutes to open, since constants are computed then, and that let no event pass."""
    numbers = [{"$size": {"$setUnion": [{"$range": [0, 900_000]}, {"$range": [one, 900_000]}]}} for one in range(100)]
    return [{"$match": {"$expr": {"$lt": [{"$add": numbers}, 1]}}}]


@contextmanager
def clients(gateway: GatewayProcess, count: int) -> Iterator[list[pymongo.MongoClient[Any]]]:
    made = [pymongo.MongoClient[Any](gateway.uri, socketTimeoutMS=_LIMIT_MS) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def listed(gateway: GatewayProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(commands.run_text("streams", gateway.uri, "--format", "json").stdout)
    return found


def computing(gateway: GatewayProcess) -> list[dict[str, Any]]:
    return [one for one in listed(gateway)["gateway"]["processes"] if one["computing"] is not None]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that runs ``work``, and a list that gets its result or PyMongo's error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except PyMongoError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def answer(connection: socket.socket) -> bytes:
    """The document of the reply that comes next."""
    with connection.makefile("rb") as reader:
        head = reader.read(HEADER_SIZE)
        return OpMsg.parse(head + reader.read(parse_header(head).length - HEADER_SIZE)).document


def test_a_constant_that_computes_for_ever_is_ended_and_refused_when_it_comes_again(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, "--stage-seconds", "1", "--metrics", "127.0.0.1:0")
    with clients(gateway, 2) as (hostile, honest):
        with honest.fair.t.watch(max_await_time_ms=50) as stream:
            thread, outcome = in_thread(lambda: hostile.foul.t.watch(constant()))
            for number in range(20):  # while it computes, and after
                honest.fair.t.insert_one({"_id": number})
                assert next(stream)["documentKey"]["_id"] == number
            thread.join(300)
        assert isinstance(outcome[0], OperationFailure)
        assert outcome[0].code == 50
        assert "exceeded time limit" in str(outcome[0])
        for _ in range(3):  # drivers retry at once
            with pytest.raises(OperationFailure, match="opens it again in") as again:
                hostile.foul.t.watch(constant())
            assert again.value.code == 50
        statistics = gateway.statistics()
        assert statistics["computations_stopped_total"] == 1
        assert statistics["errors_total 50"] == 4
        # Nor was it passed to the server, which would have computed it to the end.
        assert statistics["fallbacks_total refused"] == 0
        with hostile.foul.t.watch([{"$match": {"$expr": {"$gt": [1, 0]}}}], max_await_time_ms=50) as other:
            hostile.foul.t.insert_one({"_id": 1})
            assert next(other)["documentKey"] == {"_id": 1}


def test_events_that_compute_for_ever_end_their_stream_alone(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, "--stage-seconds", "1", "--stage-processes", "1")
    twice = [{"$set": {"twice": {"$add": [1, 1]}}}]
    with (
        clients(gateway, 2) as (hostile, honest),
        # Both are computed in the only process that is allowed.
        honest.alone.t.watch(twice, max_await_time_ms=50) as fair,
        hostile.alone.t.watch(of_event(), max_await_time_ms=50) as foul,
    ):
        [process] = listed(gateway)["gateway"]["processes"]
        honest.alone.t.insert_one({"_id": 1})
        with pytest.raises(OperationFailure) as ended:
            next(foul)
        assert ended.value.code == 50
        assert next(fair)["twice"] == 2
        honest.alone.t.insert_one({"_id": 2})
        assert next(fair)["documentKey"] == {"_id": 2}
        [same] = listed(gateway)["gateway"]["processes"]
        assert same["pid"] == process["pid"]


def test_a_computation_is_seen_and_killed(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, "--stage-seconds", "300")
    with clients(gateway, 2) as (hostile, operator):
        found = hostile.seen.command({"aggregate": "t", "pipeline": [{"$changeStream": {}}, *of_event()], "cursor": {}})
        hostile.seen.t.insert_one({"_id": 1})
        cursor = found["cursor"]["id"]
        thread, outcome = in_thread(lambda: hostile.seen.command("getMore", cursor, collection="t"))
        [process] = eventually(lambda: computing(gateway), "nobody computes")
        assert process["computing"] == "seen.t"
        [shown] = [one for one in listed(gateway)["streams"] if one["cursor"] == cursor]
        assert shown["computingSeconds"] > 0
        assert shown["process"] == process["pid"]
        assert "computes" in commands.run_text("streams", gateway.uri).stdout
        killed = commands.run_text("streams", gateway.uri, "--kill", str(cursor))
        assert killed.returncode == 0, killed.stderr
        thread.join(300)
        assert isinstance(outcome[0], OperationFailure)
        assert outcome[0].code == 237
        assert computing(gateway) == []
        again = commands.run_text("streams", gateway.uri, "--kill", str(cursor))
        assert again.returncode == 1
        assert f"no stream {cursor}" in again.stderr
        assert operator.admin.command("ping")["ok"] == 1


@pytest.mark.parametrize("way", ["tailrace streams", "killCursors", "killOp"])
def test_a_stream_that_is_being_opened_is_seen_and_killed(
    way: str, replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """It has no cursor yet, and so could not be killed. Only an open stream had been killed in tests."""
    gateway = start_gateway(replica_set.uri, "--stage-seconds", "300")
    with clients(gateway, 2) as (hostile, operator):
        thread, outcome = in_thread(lambda: hostile.opening.t.watch(constant()))
        [shown] = eventually(
            lambda: [one for one in listed(gateway)["streams"] if one["computingSeconds"] is not None],
            "nobody computes",
        )
        assert shown["opening"]
        assert shown["ns"] == "opening.t"
        assert f"{shown['cursor']}" in commands.run_text("streams", gateway.uri).stdout
        if way == "killOp":
            assert operator.admin.command("killOp", op=Int64(shown["cursor"]))["ok"] == 1
        elif way == "killCursors":
            killed = operator.opening.command("killCursors", "t", cursors=[Int64(shown["cursor"])])
            assert killed["cursorsKilled"] == [shown["cursor"]]
        else:
            ended = commands.run_text("streams", gateway.uri, "--kill", f"{shown['cursor']}")
            assert ended.returncode == 0, ended.stderr
        thread.join(300)
        assert isinstance(outcome[0], OperationFailure)
        assert outcome[0].code == 11601
        eventually(lambda: listed(gateway)["streams"] == [] and not computing(gateway), "it goes on")
        with hostile.opening.t.watch([{"$set": {"n": {"$add": [1, 1]}}}], max_await_time_ms=50) as stream:
            hostile.opening.t.insert_one({})
            assert next(stream)["n"] == 2


@pytest.mark.parametrize("stages", [of_event, constant])
def test_users_who_share_a_process_do_not_wait_for_one_who_computes(
    stages: Callable[[], list[dict[str, Any]]],
    start_replica_set: Callable[..., ReplicaSet],
    start_gateway: Callable[..., GatewayProcess],
) -> None:
    """With more users than --stage-processes, one user's computation held up all others in its process for up to
    --stage-seconds. Two users in one process had not been tried."""
    guarded = start_replica_set(1, root_password="r00t")
    with pymongo.MongoClient[Any](guarded.uri) as root:
        for name in ("greedy", "modest"):
            root.admin.command("createUser", name, pwd="pw", roles=["readWriteAnyDatabase"])
    gateway = start_gateway(guarded.uri, "--stage-seconds", "3600", "--stage-processes", "1")
    options = f"replicaSet={guarded.name}&authSource=admin&socketTimeoutMS={_LIMIT_MS}"
    uris = [f"mongodb://{name}:pw@{gateway.address}/?{options}" for name in ("greedy", "modest")]
    with (
        pymongo.MongoClient[Any](uris[0]) as greedy,
        pymongo.MongoClient[Any](uris[1]) as modest,
        modest.sharing.t.watch([{"$set": {"n": {"$add": [1, 1]}}}], max_await_time_ms=50) as stream,
    ):
        thread, outcome = in_thread(lambda: next(greedy.foul.t.watch(stages())))
        greedy.foul.t.insert_one({})
        for number in range(20):
            greedy.foul.t.insert_one({})
            modest.sharing.t.insert_one({"_id": number})
            assert next(stream)["documentKey"] == {"_id": number}
        # The stream that computes was not ended for good: its driver has resumed, in a process for such streams.
        assert not outcome
        assert thread.is_alive()


def test_a_client_that_leaves_takes_its_computation_with_it(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, "--stage-seconds", "300")
    with pymongo.MongoClient[Any](gateway.uri) as writer, socket.create_connection(gateway.host_and_port) as leaving:
        opens = {"aggregate": "t", "pipeline": [{"$changeStream": {}}, *of_event()], "cursor": {}, "$db": "left"}
        leaving.sendall(op_msg(bson.encode(opens), request_id=1))
        found = bson.decode(answer(leaving))
        [process] = listed(gateway)["gateway"]["processes"]
        writer.left.t.insert_one({"_id": 1})
        asks = {"getMore": found["cursor"]["id"], "collection": "t", "$db": "left"}
        leaving.sendall(op_msg(bson.encode(asks), request_id=2))
        eventually(lambda: computing(gateway), "nobody computes")
    eventually(lambda: not computing(gateway), "the computation goes on")
    left = listed(gateway)
    assert left["streams"] == []
    assert [one["pid"] for one in left["gateway"]["processes"]] == [process["pid"]]  # others' streams go on in it


def test_what_python_cannot_interrupt_is_ended_by_the_system(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """A process that hangs in a C function; here it is stopped, and so handles no signal."""
    gateway = start_gateway(replica_set.uri, "--stage-seconds", "300")
    with clients(gateway, 1) as (client,):
        found = client.stuck.command({"aggregate": "t", "pipeline": [{"$changeStream": {}}, *of_event()], "cursor": {}})
        client.stuck.t.insert_one({"_id": 1})
        cursor = found["cursor"]["id"]
        thread, outcome = in_thread(lambda: client.stuck.command("getMore", cursor, collection="t"))
        [process] = eventually(lambda: computing(gateway), "nobody computes")
        os.kill(process["pid"], signal.SIGSTOP)
        client.stuck.command("killCursors", "t", cursors=[cursor])
        thread.join(300)
        assert isinstance(outcome[0], OperationFailure)
        assert outcome[0].code == 237
        eventually(lambda: not Path(f"/proc/{process['pid']}").exists(), "the process stays")


def test_a_process_that_ends_takes_nothing_with_it(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """The process's streams get an error after which drivers resume, and no event is lost."""
    gateway = start_gateway(replica_set.uri)
    with (
        clients(gateway, 1) as (client,),
        client.ended.t.watch([{"$set": {"sum": {"$add": ["$fullDocument._id", 1]}}}], max_await_time_ms=50) as stream,
    ):
        for number in range(8):
            client.ended.t.insert_one({"_id": number})
            if number in (2, 5):
                [process] = listed(gateway)["gateway"]["processes"]
                os.kill(process["pid"], signal.SIGKILL)
            assert next(stream)["sum"] == number + 1


def test_memory_is_bounded(replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]) -> None:
    gateway = start_gateway(replica_set.uri, "--stage-memory-mb", "300")
    many = {f"a{number}": {"$concat": ["$fullDocument.text", f"{number}"]} for number in range(60)}
    stages = [{"$set": {"fullDocument": {"$let": {"vars": many, "in": 1}}}}]
    with clients(gateway, 1) as (client,), client.large.t.watch(stages) as stream:
        client.large.t.insert_one({"text": ""})
        assert next(stream)["fullDocument"] == 1
        client.large.t.insert_one({"text": "x" * 10_000_000})
        with pytest.raises(OperationFailure) as refused:
            next(stream)
        assert refused.value.code == 146
        assert "300 MB" in str(refused.value)
        assert client.admin.command("ping")["ok"] == 1


def test_sigterm_ends_a_gateway_that_computes(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, "--stage-seconds", "300")
    with clients(gateway, 1) as (client,):
        found = client.term.command({"aggregate": "t", "pipeline": [{"$changeStream": {}}, *of_event()], "cursor": {}})
        client.term.t.insert_one({"_id": 1})
        thread, outcome = in_thread(lambda: client.term.command("getMore", found["cursor"]["id"], collection="t"))
        [process] = eventually(lambda: computing(gateway), "nobody computes")
        assert gateway.stop() == 0
        thread.join(300)
        assert isinstance(outcome[0], PyMongoError)
        assert getattr(outcome[0], "code", 91) == 91
        assert not Path(f"/proc/{process['pid']}").exists()
