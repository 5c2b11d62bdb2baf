"""Small connection pools: the limit that a program gives its client applies to its own commands, and no stream waits
for a connection that another one keeps.

No test had more than one stream with a small ``maxPoolSize``: the server pushes a shared read's replies over one
connection, so with one connection in all, look-ups and further calls of ``watch()`` waited for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, CursorType, MongoClient
from pymongo.errors import WaitQueueTimeoutError

import tailrace
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.differential.beside import PATIENCE_S, event_loop, on, wait_until
from tests.gateway.running import GatewayProcess
from tests.server_in_use import SERVER_VERSION
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod

_DATABASE = "pools"
_STREAMS = 3
_WATCH: dict[str, Any] = {"full_document": "updateLookup", "max_await_time_ms": 100}
_POOLS = [
    {"maxPoolSize": 1},
    {"maxPoolSize": 2},
    {"maxPoolSize": 1, "waitQueueTimeoutMS": 30_000},
    {"maxpoolsize": "1"},
]


@pytest.fixture(
    params=[
        SERVER_VERSION,
        pytest.param("5.0.4", marks=pytest.mark.slow),
        pytest.param("4.4.2", marks=pytest.mark.slow),
    ],
    scope="module",
)
def uri(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == SERVER_VERSION:
        running: ReplicaSet = request.getfixturevalue("replica_set")
        yield running.uri
        return
    with ReplicaSet(1, version=request.param) as older:
        yield older.uri


def patiently(call: Callable[[], Any]) -> Any:
    """A call that has to return. It runs in a daemon thread, so a call that never returns fails the test instead of
    stopping it."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done.result(PATIENCE_S)


def numbers_of(stream: Any, count: int) -> list[Any]:
    """The looked-up numbers of the next updates."""
    found = [stream.next() for _ in range(count)]
    return [event["fullDocument"]["n"] for event in found if event["operationType"] == "update"]


@pytest.mark.parametrize("pool", _POOLS, ids=str)
@pytest.mark.parametrize("engine", ["pymongo", "oplog", "server"])
def test_streams_look_ups_and_commands_of_a_client_with_one_connection(uri: str, engine: Any, pool: Any) -> None:
    """Three streams that read together, each with look-ups, a fourth that begins meanwhile, and plain commands between
    them. The same with PyMongo's client."""
    with ExitStack() as stack:
        client = MongoClient[Any](uri, **pool) if engine == "pymongo" else tailrace.connect(uri, engine=engine, **pool)
        stack.enter_context(client)
        collection = client[_DATABASE][engine]
        streams = [patiently(lambda: collection.watch(**_WATCH)) for _ in range(_STREAMS)]
        if engine == "oplog":
            wait_until(lambda: patiently(lambda: _joined(client, streams)), "the streams read together")
        collection.insert_one({"_id": 1, "n": 0})
        for number in range(1, 6):
            collection.update_one({"_id": 1}, {"$set": {"n": number}})
            # Each takes its events before the next change: a look-up gives the document of now.
            seen = [patiently(partial(numbers_of, stream, 1 + (number == 1))) for stream in streams]
            assert seen == [[number]] * len(streams)
            assert collection.find_one({"_id": 1}) == {"_id": 1, "n": number}
            streams.append(patiently(lambda: client[_DATABASE].watch(**_WATCH)))  # another that begins now
        assert client.options.pool_options.max_pool_size == int(next(iter(pool.values())))
        for stream in streams:
            patiently(stream.close)
        collection.drop()


def _joined(client: Any, streams: list[Any]) -> bool:
    assert [stream.try_next() for stream in streams] == [None] * len(streams)
    return bool(client.tail_statistics.joined == len(streams))


@pytest.mark.parametrize("engine", ["pymongo", "oplog", "server"])
def test_streams_and_look_ups_of_an_asynchronous_client_with_one_connection(uri: str, engine: Any) -> None:
    async def program() -> None:
        client: Any = (
            AsyncMongoClient(uri, maxPoolSize=1)
            if engine == "pymongo"
            else tailrace.AsyncClient(uri, engine=engine, maxPoolSize=1)
        )
        async with client:
            collection = client[_DATABASE][f"async {engine}"]
            streams = [await collection.watch(**_WATCH) for _ in range(_STREAMS)]
            while engine == "oplog" and client._deployment.tail_statistics.joined < _STREAMS:
                assert [await stream.try_next() for stream in streams] == [None] * _STREAMS
            await collection.insert_one({"_id": 1, "n": 0})
            assert [(await stream.next())["operationType"] for stream in streams] == ["insert"] * _STREAMS
            for number in range(1, 4):
                await collection.update_one({"_id": 1}, {"$set": {"n": number}})
                events = await asyncio.gather(*(stream.next() for stream in streams))
                assert [event["fullDocument"]["n"] for event in events] == [number] * len(streams)
                streams.append(await client[_DATABASE].watch(**_WATCH))
            for stream in streams:
                await stream.close()
            await collection.drop()

    with event_loop() as loop:
        on(loop, asyncio.wait_for(program(), PATIENCE_S))


@pytest.mark.parametrize("engine", ["pymongo", "oplog", "server"])
def test_the_limit_is_kept_by_the_programs_own_commands(uri: str, engine: Any) -> None:
    """A cursor of the program's own has the only connection: its next command is refused as PyMongo refuses it. Streams
    that are made from the oplog have connections of their own."""
    pool: dict[str, Any] = {"maxPoolSize": 1, "waitQueueTimeoutMS": 200}
    with MongoClient[Any](uri) as writer:
        writer[_DATABASE].many.insert_many([{} for _ in range(50)])
    client: Any = MongoClient(uri, **pool) if engine == "pymongo" else tailrace.connect(uri, engine=engine, **pool)
    with client:
        collection = client[_DATABASE].many
        streams = [collection.watch(**_WATCH) for _ in range(2)]
        cursor = collection.find({}, cursor_type=CursorType.EXHAUST, batch_size=2)
        assert next(cursor)
        with pytest.raises(WaitQueueTimeoutError):
            collection.find_one({})
        with MongoClient[Any](uri) as writer:
            writer[_DATABASE].many.insert_one({"n": 1})
        if engine == "oplog":
            assert [patiently(stream.next)["fullDocument"]["n"] for stream in streams] == [1, 1]
        else:
            with pytest.raises(WaitQueueTimeoutError):
                patiently(streams[0].next)
        cursor.close()
        for stream in streams:
            patiently(stream.close)


def test_shards_are_read_by_as_many_connections_as_their_reading_needs(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, _DATABASE, "spread")
    router = sharded_cluster.router
    with tailrace.connect(sharded_cluster.uri, maxPoolSize=1) as client:
        collection = client[_DATABASE].spread
        streams = [patiently(lambda: collection.watch(**_WATCH)) for _ in range(_STREAMS)]
        wait_until(lambda: patiently(lambda: _read_together(client, streams)), "the streams read together")
        for number, region in enumerate("ahnahn", start=1):
            document = {"_id": number, "region": region, "n": 0}
            router.insert_one(namespace, document)
            assert [patiently(stream.next)["fullDocument"]["n"] for stream in streams] == [0] * _STREAMS
            router.update_one(namespace, {"_id": number, "region": region}, {"$set": {"n": number}})
            assert [patiently(stream.next)["fullDocument"]["n"] for stream in streams] == [number] * _STREAMS
        streams.append(patiently(lambda: client.watch(**_WATCH)))
        for stream in streams:
            patiently(stream.close)


def _read_together(client: Any, streams: list[Any]) -> bool:
    assert [stream.try_next() for stream in streams] == [None] * len(streams)
    return bool(client.tail_statistics.joined >= 3 * len(streams))


def test_the_gateway_reads_a_deployment_whose_uri_allows_one_connection(
    replica_set: ReplicaSet, tmp_path: Path
) -> None:
    upstream = f"{replica_set.uri}&maxPoolSize=1"
    with (
        GatewayProcess(upstream, tmp_path / "log") as gateway,
        MongoClient[Any](gateway.uri) as client,
    ):
        collection = client[_DATABASE].through
        streams = [patiently(lambda: collection.watch(**_WATCH)) for _ in range(_STREAMS)]
        assert [patiently(stream.try_next) for stream in streams] == [None] * _STREAMS
        collection.insert_one({"_id": 1, "n": 0})
        assert [patiently(stream.next)["fullDocument"]["n"] for stream in streams] == [0] * _STREAMS
        collection.update_one({"_id": 1}, {"$set": {"n": 1}})
        assert [patiently(stream.next)["fullDocument"]["n"] for stream in streams] == [1] * _STREAMS
        collection.drop()
