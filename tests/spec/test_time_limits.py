"""Rule 31 by the drivers' own cases: ``timeoutMS`` of a stream (PyMongo's ``watch`` has none, and skips these cases).

Their times are made much longer, so that two busy cores do not decide the outcome; those that wait are slow then. Calls
of the asynchronous flavour were once not bounded by the client's ``timeoutMS``, and no test had noticed.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pymongo
import pytest
from pymongo import MongoClient
from pymongo.errors import ConfigurationError, NetworkTimeout, PyMongoError

import tailrace
from tailrace.embedded import ReplicaSet
from tests.patience import patiently_awaited
from tests.pymongo_source import NotFetchedError, pymongo_source
from tests.spec.runner import Case, cases_in, run
from tests.spec.test_unified import flavour_named

pytestmark = pytest.mark.mongod

_FLAVOURS = ("server", "oplog", "server async", "oplog async")
_SLOWER = 40
_LIMIT_MS = 3000
_DATABASE = "timelimits"


def _slower(value: Any) -> Any:
    if isinstance(value, list):
        return [_slower(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: inside * _SLOWER if name in ("timeoutMS", "blockTimeMS") else _slower(inside)
        for name, inside in value.items()
    }


def _cases() -> list[Case]:
    try:
        found = cases_in(pymongo_source() / "test" / "csot", "change-streams.json")
    except NotFetchedError:
        return []
    return [case if _is_refused(case) else replace(case, test=_slower(copy.deepcopy(case.test))) for case in found]


def _is_refused(case: Case) -> bool:
    return case.test["description"].startswith("error if")


_CASES = _cases()


@pytest.fixture(scope="module")
def admin(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](replica_set.uri) as client:
        yield client
        client.drop_database(_DATABASE)


def test_the_file_holds_the_cases_that_we_know_of() -> None:
    if not _CASES:
        pytest.skip("the files could not be fetched")
    assert len(_CASES) == 8


def _parameters() -> Iterator[Any]:
    for case in _CASES:
        marks = () if _is_refused(case) else pytest.mark.slow
        yield pytest.param(case, id=case.test["description"], marks=marks)


@pytest.mark.parametrize("flavour", _FLAVOURS)
@pytest.mark.parametrize("case", list(_parameters()))
def test_a_case_of_time_limits_holds(
    flavour: str, case: Case, replica_set: ReplicaSet, admin: MongoClient[Any]
) -> None:
    run(flavour_named(flavour, replica_set.uri), case, admin)


@pytest.mark.parametrize("engine", ["server", "oplog"])
def test_awaiting_the_next_event_ends_with_the_time_given_and_misses_nothing(
    engine: Any, replica_set: ReplicaSet, admin: MongoClient[Any]
) -> None:
    async def limited_by(what: str) -> None:
        name = f"{engine}{what}"
        options: dict[str, Any] = {"timeoutMS": _LIMIT_MS} if what == "client" else {}
        said: dict[str, Any] = {"timeout_ms": _LIMIT_MS} if what == "watch" else {}
        async with tailrace.AsyncClient(replica_set.uri, engine=engine, **options) as client:
            watched = client[_DATABASE][name]
            stream = await patiently_awaited(lambda: watched.watch(max_await_time_ms=100, **said))
            within = pymongo.timeout(_LIMIT_MS / 1000) if what == "context" else nullcontext()
            with pytest.raises(PyMongoError) as raised, within:
                await stream.next()
            assert raised.value.timeout
            assert stream.alive
            await asyncio.to_thread(admin[_DATABASE][name].insert_one, {"_id": 1})
            while (event := await patiently_awaited(stream.try_next)) is None:
                pass
            assert event["fullDocument"] == {"_id": 1}
            await stream.close()

    async def main() -> None:
        async with asyncio.timeout(300):
            await asyncio.gather(*map(limited_by, ("client", "watch", "context")))

    asyncio.run(main())


def test_a_call_does_not_inherit_the_time_of_one_that_was_cancelled(
    replica_set: ReplicaSet, admin: MongoClient[Any]
) -> None:
    """A read in the thread outlives the call that was cancelled, and kept that call's time limit."""
    numbers = admin[_DATABASE]["inherited"]

    async def main() -> None:
        async with tailrace.AsyncClient(replica_set.uri) as client:
            stream = await client[_DATABASE]["inherited"].watch(max_await_time_ms=30_000)
            with pymongo.timeout(3):
                look = asyncio.ensure_future(stream.next())
                await asyncio.sleep(0.1)
                look.cancel()
            with pytest.raises(asyncio.CancelledError):
                await look
            later = asyncio.ensure_future(stream.next())
            await asyncio.sleep(4)
            assert not later.done()
            numbers.insert_one({"_id": 1})
            assert (await asyncio.wait_for(later, 300))["fullDocument"] == {"_id": 1}
            with pytest.raises(NetworkTimeout), pymongo.timeout(0.5):
                await stream.next()
            await stream.close()

    asyncio.run(main())


@pytest.mark.parametrize("engine", ["server", "oplog"])
def test_a_look_as_long_as_a_call_is_refused(engine: Any, replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri, engine=engine) as client:
        for wait_ms, limit_ms in ((10, 5), (5, 5)):
            with pytest.raises(ConfigurationError, match="must be less than timeout_ms") as raised:
                client[_DATABASE]["c"].watch(max_await_time_ms=wait_ms, timeout_ms=limit_ms)
            assert isinstance(raised.value, tailrace.UsageError)
        with client[_DATABASE]["c"].watch(max_await_time_ms=5, timeout_ms=0) as stream:
            assert stream.try_next() is None


def test_no_limit_of_a_stream_s_own_stands_in_place_of_the_client_s(
    replica_set: ReplicaSet, admin: MongoClient[Any]
) -> None:
    with (
        tailrace.connect(replica_set.uri, timeoutMS=2000) as client,
        client[_DATABASE]["c"].watch(max_await_time_ms=4000, timeout_ms=0) as stream,
    ):
        assert stream.try_next() is None
