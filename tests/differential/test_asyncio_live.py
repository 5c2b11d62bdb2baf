"""Streams for asyncio: PyMongo's asynchronous client beside ours, with both engines.

There was no asynchronous client: programs had to run a stream in a thread of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient
from pymongo.errors import InvalidOperation, NetworkTimeout, OperationFailure

import tailrace
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests import commands
from tests.differential.auth import PASSWORD, add_user, mongod_with_users, uri_of
from tests.patience import patiently_awaited
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod

Connect = Callable[..., Any]


@pytest.fixture(params=["pymongo", "server", "oplog"])
def connect(request: pytest.FixtureRequest, replica_set: ReplicaSet) -> Connect:
    if request.param == "pymongo":
        return lambda **options: AsyncMongoClient(replica_set.uri, **options)
    return lambda **options: tailrace.AsyncClient(replica_set.uri, engine=request.param, **options)


def run(program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(program(), 300))


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except (Exception, StopAsyncIteration) as error:  # noqa: BLE001
        return error


def test_a_program_reads_what_it_writes(connect: Connect) -> None:
    async def program() -> None:
        async with connect() as client:
            orders = client["asyncio"]["orders"]
            await orders.drop()
            async with await orders.watch([{"$match": {"operationType": "insert"}}]) as stream:
                await orders.insert_many([{"_id": number} for number in range(5)])
                got = []
                async for event in stream:
                    got.append(event["documentKey"]["_id"])
                    if len(got) == 5:
                        break
                assert got == [0, 1, 2, 3, 4]
                token = stream.resume_token
                await orders.insert_one({"_id": "after"})
            async with await orders.watch(resume_after=token) as stream:
                assert (await stream.next())["documentKey"] == {"_id": "after"}
                assert await stream.try_next() is None
                assert stream.alive
            assert not stream.alive
            assert isinstance(await outcome(stream.next()), StopAsyncIteration)
            assert await stream.try_next() is None

    run(program)


@pytest.mark.parametrize("scope", ["cluster", "database", "collection"])
def test_the_bytes_are_those_of_pymongo_s_stream(replica_set: ReplicaSet, scope: str) -> None:
    async def events(client: Any, start: Any) -> list[bytes]:
        target = {"cluster": client, "database": client["asyncio"], "collection": client["asyncio"]["bytes"]}[scope]
        found: list[bytes] = []
        async with await target.watch(start_at_operation_time=start, max_await_time_ms=50) as stream:
            while len(found) < 20:
                found.append(bytes((await stream.next()).raw))
        return found

    async def program() -> None:
        raw: dict[str, Any] = {"document_class": RawBSONDocument}
        async with (
            AsyncMongoClient(replica_set.uri, **raw) as native,
            tailrace.AsyncClient(replica_set.uri, **raw) as ours,
            tailrace.AsyncClient(replica_set.uri, engine="server", **raw) as server,
        ):
            start = (await native["admin"].command("ping"))["operationTime"]
            await native["asyncio"]["bytes"].insert_many([{"n": number} for number in range(30)])
            expected = await events(native, start)
            assert await events(ours, start) == expected
            assert await events(server, start) == expected

    run(program)


@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_a_call_that_is_cancelled_loses_no_event(engine: Any, replica_set: ReplicaSet) -> None:
    """In this case PyMongo closes its stream, and so did ours with engine="server", which used PyMongo's."""

    async def program() -> None:
        async with tailrace.AsyncClient(replica_set.uri, engine=engine) as client:
            numbers = client["asyncio"]["cancelled"]
            await numbers.drop()
            async with await numbers.watch([{"$match": {"operationType": "insert"}}]) as stream:
                got = []
                for number in range(12):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(stream.next(), 0.05 * (number % 3))
                    await numbers.insert_one({"_id": number})
                    if number % 2:  # the look that was cancelled may have found it already
                        await asyncio.sleep(0.2)
                    got.append((await stream.next())["documentKey"]["_id"])
                assert got == list(range(12))

    run(program)


def test_close_from_another_task_ends_a_waiting_next_at_once(replica_set: ReplicaSet) -> None:
    async def program() -> None:
        async with tailrace.AsyncClient(replica_set.uri) as client:
            stream = await client["asyncio"]["closed"].watch(max_await_time_ms=3000)
            waiting = asyncio.create_task(outcome(stream.next()))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await stream.close()
            assert isinstance(await waiting, StopAsyncIteration)
            assert not stream.alive
            await stream.close()

    run(program)


def test_two_tasks_in_one_stream_are_both_told(connect: Connect) -> None:
    async def program() -> None:
        async with connect() as client:
            stream = await client["asyncio"]["shared"].watch(max_await_time_ms=4000)
            first = asyncio.create_task(outcome(stream.next()))
            await asyncio.sleep(1.5)  # it waits by then, on a busy machine too
            second = await outcome(stream.next())
            assert second.code == 143, second
            assert (await first).code == 237
            assert not stream.alive

    run(program)


def test_a_time_limit_ends_the_wait_and_not_the_stream(connect: Connect) -> None:
    async def program() -> None:
        async with connect() as client:
            limited = client["asyncio"]["limited"]
            await limited.drop()
            async with await limited.watch([{"$match": {"operationType": "insert"}}], max_await_time_ms=5000) as stream:
                for number in range(2):
                    with pymongo.timeout(0.5):
                        assert isinstance(await outcome(stream.next()), NetworkTimeout)
                    assert stream.alive
                    await limited.insert_one({"_id": number})
                    assert (await stream.next())["documentKey"] == {"_id": number}

    run(program)


def test_the_clients_own_limit_bounds_each_call(connect: Connect) -> None:
    async def program() -> None:
        async with connect(timeoutMS=1500) as client, connect() as unlimited:
            limited, writes = (one["asyncio"]["limited_too"] for one in (client, unlimited))
            await writes.drop()
            inserts = [{"$match": {"operationType": "insert"}}]
            async with await patiently_awaited(lambda: limited.watch(inserts, max_await_time_ms=9000)) as stream:
                for number in range(2):
                    assert isinstance(await outcome(stream.next()), NetworkTimeout)
                    assert stream.alive
                    await writes.insert_one({"_id": number})
                    assert (await patiently_awaited(stream.next))["documentKey"] == {"_id": number}

    run(program)


_FORGOTTEN = """
import asyncio, sys, tailrace, warnings
warnings.simplefilter("ignore")
async def program():
    client = tailrace.AsyncMongoClient(sys.argv[1], engine=sys.argv[3])
    stream = await client.habits.c.watch(max_await_time_ms=300)
    await stream.try_next()
    how = sys.argv[2]
    if how == "waiting":
        asyncio.create_task(stream.next())
        await asyncio.sleep(0.1)
    elif how == "raises":
        raise SystemExit(0)
asyncio.run(program())
"""


@pytest.mark.parametrize("how", ["left", "waiting", "raises"])
@pytest.mark.parametrize("engine", ["server", "oplog"])
def test_a_forgotten_stream_leaves_no_traceback(replica_set: ReplicaSet, engine: str, how: str) -> None:
    done = commands.run_text(replica_set.uri, how, engine, code=_FORGOTTEN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("engine", ["pymongo", "server", "oplog"])
def test_who_may_not_read_is_told_by_watch_itself(tmp_path: Path, engine: Any) -> None:
    async def program() -> None:
        with mongod_with_users(tmp_path) as guarded:
            add_user(guarded, "nobody", PASSWORD, [])
            uri = uri_of(guarded, "nobody", PASSWORD)
            opened = AsyncMongoClient[Any](uri) if engine == "pymongo" else tailrace.AsyncClient(uri, engine=engine)
            async with opened as client:
                refused = await outcome(client["shop"]["orders"].watch())
                assert isinstance(refused, OperationFailure)
                assert refused.code == 13

    run(program)


def test_errors_are_pymongo_s(connect: Connect) -> None:
    async def program() -> None:
        client = connect()
        orders = client["asyncio"]["orders"]
        refused = await outcome(orders.watch([{"$out": "elsewhere"}]))
        assert isinstance(refused, OperationFailure)
        assert refused.code == 20
        assert isinstance(await outcome(orders.watch({"$match": {}})), TypeError)
        assert isinstance(await outcome(orders.watch(batch_size=-1)), ValueError)
        assert isinstance(await outcome(orders.watch(session=5)), ValueError)
        async with client.start_session() as session, await orders.watch(session=session) as stream:
            assert stream.alive
        assert isinstance(await outcome(orders.watch(session=session)), InvalidOperation)
        await client.close()
        assert isinstance(await outcome(orders.watch()), InvalidOperation)

    run(program)


def test_a_cluster_is_watched_too(sharded_cluster: ShardedCluster) -> None:
    name = spread(sharded_cluster, "asyncio", "c")
    database, _, collection = name.partition(".")

    async def program() -> None:
        async with (
            tailrace.AsyncClient(sharded_cluster.uri) as client,
            await client[database][collection].watch() as stream,
        ):
            for number, region in enumerate("abab"):
                await asyncio.to_thread(sharded_cluster.router.insert_one, name, {"_id": number, "region": region})
            assert [(await stream.next())["documentKey"]["_id"] for _ in range(4)] == [0, 1, 2, 3]

    run(program)


def test_objects_are_pymongo_s_and_ours(replica_set: ReplicaSet) -> None:
    async def program() -> None:
        async with tailrace.AsyncClient(f"{replica_set.uri}&connectTimeoutMS=5000") as client:
            assert isinstance(client, AsyncMongoClient)
            made = await client["asyncio_made"].create_collection("c")
            for one in (made, client["asyncio_made"].c.with_options(), client.asyncio_made["a"].b, client["x"]["y"]):
                assert type(one).__module__.startswith("tailrace.")
                assert callable(one.watch)
            await client.drop_database("asyncio_made")
            assert repr(client).startswith("AsyncMongoClient(host=[")

    run(program)
