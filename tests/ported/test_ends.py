"""How a stream ends, beside PyMongo's own, in both flavours and with both engines: what a closed stream still gives,
which error ends it, in which words, and what it is afterwards.

Earlier tests of habits had used streams that were open, and had compared an error's class and code but not its text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded import ReplicaSet
from tests.ported.faces import FACES, client_of

pytestmark = pytest.mark.mongod

_DATABASE = "ends"
#: In place of a number of documents to write: drop the collection.
_DROP = -1
_QUICK: dict[str, Any] = {"max_await_time_ms": 100}
_LABEL = "NonResumableChangeStreamError"
_OURS = [face for face in FACES if "pymongo" not in face]

Habit = Callable[[Any, Callable[[int], None]], list[Any]]


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives of an event, or of the error that it raises."""
    try:
        found = call()
    except StopIteration:
        return "the end"
    except Exception as error:  # noqa: BLE001
        return error
    return found["documentKey"] if isinstance(found, dict) and "documentKey" in found else found


def afterwards(stream: Any) -> list[Any]:
    return [stream.alive, outcome(stream.try_next), outcome(lambda: next(stream)), stream.alive]


def over_what_happened(collection: Any, happens: Callable[[], object], *stages: dict[str, Any]) -> Any:
    """A stream whose first batch holds all of it."""
    with collection.watch(**_QUICK) as stream:
        token = stream.resume_token
    happens()
    return collection.watch(list(stages), resume_after=token, **_QUICK)


def closed_with_events(collection: Any, write: Callable[[int], None]) -> list[Any]:
    stream = over_what_happened(collection, lambda: write(3))
    first = outcome(lambda: next(stream))
    token = stream.resume_token
    stream.close()
    found = [first, stream.alive, outcome(lambda: next(stream)), stream.resume_token == token]
    found += [outcome(stream.try_next), stream.resume_token == token, outcome(lambda: next(stream))]
    stream.close()
    return [*found, *(outcome(stream.try_next) for _ in range(3)), stream.alive]


def closed_before_an_event(collection: Any, write: Callable[[int], None]) -> list[Any]:
    stream = collection.watch(**_QUICK)
    stream.close()
    write(2)
    return afterwards(stream)


def closed_before_its_invalidate(collection: Any, write: Callable[[int], None]) -> list[Any]:
    def happens() -> None:
        write(1)
        write(_DROP)

    stream = over_what_happened(collection, happens)
    next(stream)
    stream.close()
    found = [outcome(stream.try_next) for _ in range(2)]
    return [[one and one["operationType"] for one in found], *afterwards(stream)]


def failing(*stages: dict[str, Any], events: int = 1) -> Habit:
    def habit(collection: Any, write: Callable[[int], None]) -> list[Any]:
        stream = collection.watch(list(stages), **_QUICK)
        write(events)
        return [outcome(lambda: next(stream)), *afterwards(stream)]

    return habit


def failing_at_once(collection: Any, write: Callable[[int], None]) -> list[Any]:
    """The first batch holds the event: ``watch`` itself raises, but on 4.4."""
    return [outcome(lambda: next(over_what_happened(collection, lambda: write(1), {"$project": {"_id": 0}})))]


def undecodable(collection: Any, write: Callable[[int], None]) -> list[Any]:
    stream = collection.watch(**_QUICK)
    collection.insert_one({"_id": 9, "at": DatetimeMS(2**60)})
    write(1)
    return [outcome(lambda: next(stream)), *afterwards(stream)]


HABITS: dict[str, Habit] = {
    "closed with events": closed_with_events,
    "closed before an event": closed_before_an_event,
    "closed before its invalidate": closed_before_its_invalidate,
    "_id projected out": failing({"$project": {"_id": 0}}),
    "_id projected out of two": failing({"$project": {"_id": 0}}, events=2),
    "_id changed": failing({"$set": {"_id": "mine"}}),
    "_id unset": failing({"$unset": "_id"}),
    "wrong type": failing({"$set": {"x": {"$size": "$fullDocument._id"}}}),
    "failing at once": failing_at_once,
    "undecodable": undecodable,
}


@pytest.fixture(scope="module", params=["6.0.27", pytest.param("5.0.4", marks=pytest.mark.slow), "4.4.2"])
def uri(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "6.0.27":
        yield request.getfixturevalue("replica_set").uri
        return
    with ReplicaSet(1, version=request.param) as running:
        yield running.uri


def found(uri: str, face: str, habit: Habit) -> list[Any]:
    loop = asyncio.new_event_loop()
    with MongoClient[Any](uri, w="majority") as admin:
        admin.drop_database(_DATABASE)
        admin[_DATABASE].create_collection("c")
        client = client_of(face, uri, loop)
        try:
            return habit(
                client[_DATABASE]["c"],
                lambda count: _insert(admin, count),
            )
        finally:
            client.close()
            loop.close()


def _insert(admin: MongoClient[Any], count: int) -> None:
    if count == _DROP:
        admin[_DATABASE].drop_collection("c")
        return
    admin[_DATABASE]["c"].insert_many([{"_id": number} for number in range(count)])


def words(error: Any) -> str:
    """The error's text without the tokens in it, which differ from run to run."""
    text: str = error.details["errmsg"] if isinstance(error, OperationFailure) and error.details else ""
    return text.partition("Expected: ")[0]


@pytest.mark.parametrize("name", HABITS)
def test_a_stream_ends_as_pymongo_s_does(uri: str, name: str) -> None:
    theirs = {face: found(uri, face, HABITS[name]) for face in ("pymongo", "async pymongo")}
    for face in _OURS:
        expected = theirs["async pymongo" if face.startswith("async") else "pymongo"]
        ours = found(uri, face, HABITS[name])
        assert len(ours) == len(expected)
        for mine, one in zip(ours, expected, strict=True):
            if not isinstance(one, Exception):
                assert mine == one, (face, ours, expected)
                continue
            assert isinstance(mine, type(one)), (face, mine, one)
            assert getattr(mine, "code", None) == getattr(one, "code", None), (face, mine, one)
            assert words(mine) == words(one), (face, mine, one)
            if isinstance(one, PyMongoError):
                assert isinstance(mine, PyMongoError)
                assert mine.has_error_label(_LABEL) == one.has_error_label(_LABEL)
