"""Habits of PyMongo's users, each a few lines that run with PyMongo's client and with ours: the same value comes back,
or an exception that PyMongo's ``except`` catches, with the same code.

Of 26 such habits 9 differed at first, some of them silently: tests had used a stream, but not the client around it.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pymongo
import pytest
from bson import SON
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, MongoClient
from pymongo.change_stream import ChangeStream
from pymongo.read_concern import ReadConcern

import tailrace
from tailrace.embedded import ReplicaSet

pytestmark = pytest.mark.mongod

Connect = Callable[..., Any]
Habit = Callable[[Connect], Any]
HABITS: dict[str, Habit] = {}


#: Of those that are a ``watch`` alone: its parameters.
_WATCHED: dict[Habit, dict[str, Any]] = {}


def habit(function: Habit) -> Habit:
    HABITS[function.__name__] = function
    return function


def _of_collection(snippet: Callable[[Any], Any]) -> Habit:
    def run(connect: Connect) -> Any:
        with connect() as client:
            return snippet(client["habit"]["c"])

    return run


def _watching(**parameters: Any) -> Habit:
    made = _of_collection(lambda c: c.watch(**parameters).close())
    _WATCHED[made] = parameters
    return made


HABITS |= {
    "insert and find": _of_collection(lambda c: (c.insert_one({"_id": 1}).inserted_id, c.find_one())),
    "count": _of_collection(lambda c: c.insert_many([{}, {}]) and c.count_documents({})),
    "aggregate": _of_collection(lambda c: list(c.aggregate([{"$count": "n"}]))),
    "dotted names": _of_collection(lambda c: (c.a.b.full_name, c["x.y"].name, c.database.name)),
    "equality": _of_collection(
        lambda c: (c == c.database["c"], c == c.database["d"], c.database == c.database.client["habit"])
    ),
    "hash": _of_collection(lambda c: len({c, c.database["c"], c.database.client["habit"].c})),
    "bool of a collection": _of_collection(bool),
    "bool of a database": _of_collection(lambda c: bool(c.database)),
    "bool of a client": _of_collection(lambda c: bool(c.database.client)),
    "repr": _of_collection(lambda c: (repr(c), repr(c.database), repr(c.database.client))),
    "underscore": _of_collection(lambda c: c._x),
    "iterating a collection": _of_collection(list),
    "iterating a client": _of_collection(lambda c: next(c.database.client)),
    "calling a method that is none": _of_collection(lambda c: c.save({})),
    "no default database": _of_collection(lambda c: c.database.client.get_default_database()),
    "a default": _of_collection(lambda c: c.database.client.get_default_database("d").name),
    "empty name": _of_collection(lambda c: c.database.client[""]),
    "dollar in a name": _of_collection(lambda c: c.database["a$b"]),
    "a name that is none": _of_collection(lambda c: c.database.client[5]),
    "command": _of_collection(lambda c: c.database.command("ping")["ok"]),
    "names": _of_collection(lambda c: c.insert_one({}) and c.database.list_collection_names()),
    "pickle": _of_collection(lambda c: pickle.dumps(c.database.client)),
    "copy": _of_collection(lambda c: type(copy.copy(c).name)),
    "pipeline that is no list": _watching(pipeline={"$match": {}}),
    "full_document that is no text": _watching(full_document=5),
    "full_document that nobody knows": _watching(full_document="maybe"),
    "negative batch_size": _watching(batch_size=-1),
    "batch_size that is no number": _watching(batch_size="x"),
    "batch_size that is a number as text": _watching(batch_size="2"),
    "max_await_time_ms that is no number": _watching(max_await_time_ms="x"),
    "collation that is none": _watching(collation=5),
    "session that is none": _watching(session=5),
    "parameter that is none": _watching(nothing=1),
    "too many positional": _of_collection(lambda c: c.watch(*[None] * 13)),
    "damaged token": _watching(resume_after={"_data": "zz"}),
    "token without data": _watching(resume_after={"data": "82"}),
    "token that is none": _watching(resume_after={"_data": 5}),
    "time that is none": _watching(start_at_operation_time=5),
    "forbidden stage": _watching(pipeline=[{"$out": "x"}]),
    "unknown stage": _watching(pipeline=[{"$nothing": 1}]),
    "stage that is none": _watching(pipeline=[{}]),
    "comment that is no BSON": _watching(comment=object()),
    "pipeline that is no BSON": _watching(pipeline=[{"$match": {"x": object()}}]),
    "a read concern that is none": _of_collection(lambda c: c.with_options(read_concern=ReadConcern("x")).watch()),
    "read concern": _of_collection(lambda c: c.with_options(read_concern=ReadConcern("local")).watch()),
}


@habit
def session(connect: Connect) -> Any:
    with connect() as client, client.start_session() as session, client.habit.c.watch(session=session) as stream:
        client.habit.c.insert_one({"_id": 1}, session=session)
        return stream.next()["documentKey"]


@habit
def ended_session(connect: Connect) -> Any:
    with connect() as client:
        session = client.start_session()
        session.end_session()
        return client.watch(session=session)


@habit
def foreign_session(connect: Connect) -> Any:
    with connect() as client, connect() as other, other.start_session() as session:
        return client.watch(session=session)


@habit
def positional(connect: Connect) -> Any:
    with connect() as client:
        with client.habit.c.watch([], None, None, 100) as stream:
            client.habit.c.insert_one({"_id": 1})
            token = stream.next()["_id"]
            client.habit.c.insert_one({"_id": 2})
        with client.habit.c.watch([{"$project": {"documentKey": 1}}], "updateLookup", token, 100, 5) as stream:
            event = stream.next()
            return sorted(event), event["documentKey"], stream.try_next()


@habit
def closed_client(connect: Connect) -> Any:
    client = connect()
    client.close()
    return client.habit.c.watch()


@habit
def stream_of_a_closed_client(connect: Connect) -> Any:
    client = connect()
    stream = client.habit.c.watch(max_await_time_ms=100)
    client.close()
    return stream.next()


@habit
def invalidated(connect: Connect) -> Any:
    with connect() as client, client.habit.c.watch() as stream:
        client.habit.c.insert_one({"_id": 1})
        client.habit.c.drop()
        kinds = [event["operationType"] for event in stream]
        return kinds, stream.alive, stream.try_next()


@habit
def closed_stream(connect: Connect) -> Any:
    with connect() as client:
        with client.habit.watch() as stream:
            assert stream.alive
        return stream.alive, next(stream, "nothing"), stream.try_next(), type(stream.resume_token)


@habit
def token_of_one_s_own(connect: Connect) -> Any:
    with connect() as client, client.habit.watch() as stream:
        stream.resume_token.clear()
        return list(stream.resume_token), isinstance(stream, ChangeStream)


@habit
def scopes(connect: Connect) -> Any:
    with connect() as client, client.watch() as all_of_it, client.habit.watch() as database:
        client.habit.c.insert_one({"_id": 1})
        return all_of_it.next()["ns"], database.next()["ns"]


@habit
def created(connect: Connect) -> Any:
    with connect() as client:
        made = client.habit.create_collection("made", capped=True, size=4096)
        with made.watch(full_document="updateLookup") as stream:
            made.insert_one({"_id": 1, "n": 1})
            made.update_one({}, {"$inc": {"n": 1}})
            return [stream.next().get("fullDocument") for _ in range(2)], made.options()["capped"]


@habit
def codec(connect: Connect) -> Any:
    aware: CodecOptions[Any] = CodecOptions(document_class=SON, tz_aware=True)
    with connect() as client, client.get_database("habit", codec_options=aware).c.watch() as stream:
        client.habit.c.insert_one({"_id": 1, "at": datetime.datetime(2026, 1, 1)})
        event = stream.next()
        return type(event).__name__, event["fullDocument"]["at"]


@habit
def transaction(connect: Connect) -> Any:
    with connect() as client:
        client.habit.create_collection("c")
        with client.habit.c.watch() as stream, client.start_session() as session:
            with session.start_transaction():
                client.habit.c.insert_many([{"_id": 1}, {"_id": 2}], session=session)
            return [(event["documentKey"], "lsid" in event) for event in (stream.next(), stream.next())]


@habit
def without_id(connect: Connect) -> Any:
    with connect() as client, client.habit.c.watch([{"$project": {"_id": 0}}]) as stream:
        client.habit.c.insert_one({"_id": 1})
        return stream.next()


@habit
def label(connect: Connect) -> Any:
    try:
        return without_id(connect)
    except pymongo.errors.OperationFailure as error:
        return (
            error.code,
            error.has_error_label("NonResumableChangeStreamError"),
            error.details["codeName"],
            error.timeout,
        )


@habit
def unreachable(connect: Connect) -> Any:
    return connect("mongodb://127.0.0.1:1/", serverSelectionTimeoutMS=50).habit.c.watch()


@habit
def wrong_set(connect: Connect) -> Any:
    return connect(replicaSet="another", serverSelectionTimeoutMS=200).habit.c.watch()


for _arguments in (
    ("mongodb://host:x/",),
    ("http://host/",),
    ("mongodb://",),
    (5,),
    ([],),
    ("localhost", "27017"),
    ("localhost", -1),
    ("mongodb://a:b:c@host/",),
):
    HABITS[f"client of {_arguments}"] = lambda connect, given=_arguments: connect(*given, connect=False) and "made"
HABITS["an option that is none"] = lambda connect: connect("localhost", connect=False, nothing=1)
HABITS["a value that is none"] = lambda connect: connect("localhost", connect=False, maxPoolSize="x")
HABITS["host and port"] = lambda connect: repr(connect("localhost", 27018, connect=False))
HABITS["list of hosts"] = lambda connect: sorted(connect(["a:1", "b:2"], connect=False).eq_props()[0])
HABITS["no argument"] = lambda connect: repr(connect(connect=False))


def outcome(call: Habit, connect: Connect) -> Any:
    try:
        return call(connect)
    except (Exception, StopIteration) as error:  # noqa: BLE001
        return error


@pytest.fixture(scope="module", params=["6.0.27", pytest.param("5.0.4", marks=pytest.mark.slow), "4.4.2"])
def uri(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "6.0.27":
        yield request.getfixturevalue("replica_set").uri
        return
    with ReplicaSet(1, version=request.param) as running:
        yield running.uri


@pytest.fixture(scope="module")
def admin(uri: str) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](uri) as client:
        yield client


@pytest.mark.parametrize("engine", ["oplog", "server"])
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_has_the_same_outcome(uri: str, admin: MongoClient[Any], name: str, engine: str) -> None:
    def client_of(kind: Any, **more: Any) -> Connect:
        def connect(*arguments: Any, **options: Any) -> Any:
            if not arguments and options.get("connect") is not False:
                arguments = (uri,)
            return kind(*arguments, **options, **more)

        return connect

    results = []
    for connect in (client_of(MongoClient), client_of(tailrace.connect, engine=engine)):
        admin.drop_database("habit")
        results.append(outcome(HABITS[name], connect))
    theirs, ours = results
    if not isinstance(theirs, Exception):
        assert ours == theirs
        return
    assert isinstance(ours, type(theirs)), (theirs, ours)
    assert getattr(ours, "code", None) == getattr(theirs, "code", None)


@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_an_awaited_watch_is_refused_as_pymongo_s_is(replica_set: ReplicaSet, engine: Any) -> None:
    """Only calls that wait had been tried."""

    async def outcomes(kind: Any, **more: Any) -> dict[str, Any]:
        found = {}
        async with kind(replica_set.uri, **more) as client:
            for name, call in HABITS.items():
                if call in _WATCHED:
                    try:
                        await (await client["habit"]["c"].watch(**_WATCHED[call])).close()
                        found[name] = None
                    except Exception as error:  # noqa: BLE001
                        found[name] = error
        return found

    theirs = asyncio.run(outcomes(AsyncMongoClient))
    ours = asyncio.run(outcomes(tailrace.AsyncClient, engine=engine))
    assert len(ours) > 15
    for name, error in theirs.items():
        assert isinstance(ours[name], type(error)), (name, error, ours[name])
        assert getattr(ours[name], "code", None) == getattr(error, "code", None), name
