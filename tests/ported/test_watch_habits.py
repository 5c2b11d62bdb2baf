"""Everything that users of PyMongo do with ``watch()`` and its stream, on each version, with each engine and flavour,
beside PyMongo's own: the same values of the same types, or errors that the same ``except`` catches.

All streams are open at the same time, over the same writes, so that events are compared whole, tokens included. The
documents have fields that are named like an event's, an oplog entry's and our own. Earlier tests tried parameters one
by one, on 6.0, synchronously, and mostly those that are refused; what a stream gives was compared as bytes, and not as
the objects that a program gets.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import datetime
import json
import pickle
import pprint
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import bson
import pytest
from bson import SON, Binary, Code, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp, json_util
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion, TypeDecoder, TypeRegistry
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.collation import Collation
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from tailrace.embedded import ReplicaSet
from tests.ported.faces import FACES, client_of, inside
from tests.quiet import QUIET, without_noops

pytestmark = pytest.mark.mongod

_DATABASE = "habits_of_watch"
_PATIENCE_S = 300.0
_QUICK: dict[str, Any] = {"max_await_time_ms": 10}
_AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678000)
#: Fields named like an event's, an oplog entry's, a token's and our own.
_NAMED = {
    "operationType": "invalidate",
    "ns": {"db": "other", "coll": 5},
    "documentKey": {"_id": 7},
    "fullDocument": None,
    "fullDocumentBeforeChange": [],
    "updateDescription": {"updatedFields": {}, "removedFields": ["x"]},
    "_data": "82",
    "clusterTime": Timestamp(1, 1),
    "wallTime": _AT,
    "splitEvent": {"fragment": 1, "of": 1},
    "to": {"db": "a"},
    "op": "d",
    "o": {"$v": 2},
    "o2": 1,
    "ui": Binary(b"u" * 16, 4),
    "ts": Timestamp(2, 2),
    "lsid": {"id": 1},
    "txnNumber": Int64(1),
    "kernel": True,
    "token": "t",
}
_VALUES = {
    "text": "grüße \N{SNOWMAN}",
    "double": 0.5,
    "long": Int64(1 << 40),
    "decimal": Decimal128("1.50"),
    "id": ObjectId("0123456789abcdef01234567"),
    "binary": b"\x00\xff",
    "pattern": Regex("^a", "i"),
    "code": Code("f()"),
    "scoped": Code("f()", {"x": 1}),
    "min": MinKey(),
    "max": MaxKey(),
    "nothing": None,
    "list": [1, [2.0, {"x": _AT}]],
    "old": datetime.datetime(1931, 5, 6),
}


class _Registered(TypeDecoder):
    bson_type = Decimal128

    def transform_bson(self, value: Any) -> Any:
        return ("decimal", str(value))


class _OwnDict(dict[str, Any]):
    """A class of the user's for documents."""


@dataclass(frozen=True)
class Habit:
    """``opens`` a stream over a client; ``reads`` it after the writes. ``client``: options of a client of its own."""

    opens: Callable[[Any], Any]
    reads: Callable[[Any], Any] | None = None
    client: dict[str, Any] = field(default_factory=dict)


HABITS: dict[str, Habit] = {}


def _collection(client: Any, **options: Any) -> Any:
    collection = client[_DATABASE]["c"]
    return collection.with_options(**options) if options else collection


def _watch(name: str, *arguments: Any, reads: Callable[[Any], Any] | None = None, **parameters: Any) -> None:
    parameters = parameters if len(arguments) > 3 else {**_QUICK, **parameters}
    HABITS[name] = Habit(lambda client: _collection(client).watch(*arguments, **parameters), reads)


def _with(name: str, **options: Any) -> None:
    """A stream of a collection with options."""
    HABITS[name] = Habit(lambda client: _collection(client, **options).watch(full_document="updateLookup", **_QUICK))


def _of(name: str, target: Callable[[Any], Any], reads: Callable[[Any], Any] | None = None, **parameters: Any) -> None:
    HABITS[name] = Habit(lambda client: target(client).watch(**{**_QUICK, **parameters}), reads or _state)


def taken(stream: Any, count: int = 4) -> list[Any]:
    """So many events; fewer where the stream gives no more."""
    events: list[Any] = []
    deadline = time.monotonic() + _PATIENCE_S
    while len(events) < count and stream.alive and time.monotonic() < deadline:
        event = stream.try_next()
        if event is not None:
            events.append(event)
    return events


def _all(stream: Any) -> Any:
    """The token after a batch is the batch's own, and our batches are ours: it is compared by its form."""
    events = taken(stream)
    return events, sorted(stream.resume_token), stream.alive


def _state(stream: Any) -> Any:
    """For a stream without events: that it opens."""
    found = stream.try_next(), stream.alive, sorted(stream.resume_token)
    stream.close()
    return *found, stream.alive


_watch("nothing said")
_watch("all positional", [{"$match": {}}], "updateLookup", None, 20, 5, None, None, None, None, "a comment", None, None)
_watch("some positional", [], "default", None, 20)
_watch(
    "a pipeline by name",
    pipeline=[{"$match": {"operationType": {"$in": ["insert", "delete"]}}}],
    reads=lambda stream: taken(stream, 2),
)
for _size in (0, 1, 2, 3, 1000, 2**31 - 1):
    _watch(f"batch_size={_size}", batch_size=_size)
for _size in (2**31, 2**63, 1.5, [1], None):
    _watch(f"batch_size={_size}", batch_size=_size, reads=lambda stream: taken(stream, 1))
for _wait in (0, 1, 50, 2**31 - 1):
    _watch(f"max_await_time_ms={_wait}", max_await_time_ms=_wait)
for _wait in (1.5, "10"):  # -1 and True are refused by watch() itself: docs/reference/pymongo.md
    _watch(f"max_await_time_ms={_wait!r}", max_await_time_ms=_wait, reads=lambda stream: taken(stream, 1))
for _value in (None, "default", "updateLookup", "whenAvailable", "required", "", "UpdateLookup", 1, ["default"]):
    _watch(f"full_document={_value!r}", full_document=_value)
for _value in (None, "off", "whenAvailable", "required", "default", "", 1):
    _watch(f"full_document_before_change={_value!r}", full_document_before_change=_value)
for _value in (True, False, None, 1, "yes"):
    _watch(f"show_expanded_events={_value!r}", show_expanded_events=_value)
for _comment in (
    "text", "", 5, Int64(5), 0.5, True, None, {}, {"a": {"b": [1]}}, [], [1, "x"], ObjectId(b"c" * 12), _AT, b"bytes",
    Binary(b"x", 128), Regex("x"), Decimal128("1"), MinKey(), MaxKey(), Timestamp(1, 1), Code("f"),
    SON([("b", 1), ("a", 2)]),
    uuid.UUID(int=5), object(), {"$where": 1}, {1: 2},
):  # fmt: skip
    _watch(f"comment of {_comment!r}"[:60], comment=_comment)
for _name in ("allowDiskUse", "allow_disk_use", "maxTimeMS", "let", "hint", "batchSize", "fullDocument", "cursor"):
    _watch(f"unknown {_name}", **{_name: 1})
_watch("simple collation", collation={"locale": "simple"})
_watch("simple Collation", collation=Collation("simple"))

for _pipeline in (
    (), {}, "x", 5, [{}], ["x"], [None], [[]], [{"$match": 5}], [{"$match": {}, "$project": {}}], [{"match": {}}],
    [{"$limit": 1}], [{"$group": {"_id": 1}}], [{"$sort": {"_id": 1}}], [{"$changeStream": {}}], [{"$lookup": {}}],
    [{"$match": {"$nothing": 1}}], [{"$match": {"n": {"$nothing": 1}}}], [{"$project": {}}],
    [{"$project": {"a": 1, "b": 0}}],
    [{"$replaceRoot": {"newRoot": "$nothing"}}], [{"$unset": []}], [{"$set": 5}], [{"$match": {"$expr": {"$bad": 1}}}],
):  # fmt: skip
    if _pipeline != ():
        _watch(f"pipeline {_pipeline!r}", _pipeline, reads=lambda stream: (taken(stream, 1), stream.alive))
for _pipeline in (
    [{"$match": {"ns.coll": "c", "fullDocument.ns.db": {"$ne": "x"}}}],
    [{"$match": {"fullDocument.operationType": "invalidate"}}],
    [{"$match": {"$or": [{"operationType": "delete"}, {"fullDocument.fullDocument": None}]}}],
    [{"$project": {"operationType": 1, "documentKey": 1}}],
    [{"$project": {"_id": 1}}],
    [{"$addFields": {"ns.here": "$fullDocument.operationType", "clusterTime": 1, "added": {"$type": "$wallTime"}}}],
    [{"$set": {"operationType": "mine", "fullDocument.token": "$_id._data"}}],
    [{"$unset": ["fullDocument", "updateDescription", "ns"]}],
    [{"$replaceRoot": {"newRoot": {"_id": "$_id", "document": "$fullDocument"}}}],
    [{"$replaceWith": {"_id": "$_id", "kind": "$operationType"}}],
    [{"$redact": "$$KEEP"}],
    [{"$match": {}}, {"$project": {"fullDocument.ns": 0}}, {"$match": {"operationType": {"$ne": "drop"}}}],
):
    _watch(f"pipeline {_pipeline!r}", _pipeline, reads=lambda stream: (taken(stream, 1), sorted(stream.resume_token)))

_with("SON", codec_options=CodecOptions(document_class=SON))
_with("OrderedDict", codec_options=CodecOptions(document_class=collections.OrderedDict))
_with("a class of one's own", codec_options=CodecOptions(document_class=_OwnDict))
_with("RawBSONDocument", codec_options=CodecOptions(document_class=RawBSONDocument))
_with("tz_aware", codec_options=CodecOptions(tz_aware=True))
_with("tzinfo", codec_options=CodecOptions(tz_aware=True, tzinfo=datetime.timezone(datetime.timedelta(hours=5))))
_with("times in milliseconds", codec_options=CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS))
_with("uuids", codec_options=CodecOptions(uuid_representation=UuidRepresentation.STANDARD))
_with("old uuids", codec_options=CodecOptions(uuid_representation=UuidRepresentation.JAVA_LEGACY))
_with("a decoder of one's own", codec_options=CodecOptions(type_registry=TypeRegistry([_Registered()])))
_with("an error handler", codec_options=CodecOptions(unicode_decode_error_handler="ignore"))
for _preference in ("PRIMARY", "PRIMARY_PREFERRED", "SECONDARY_PREFERRED", "NEAREST"):
    _with(f"reading from {_preference}", read_preference=getattr(ReadPreference, _preference))
_with("an unacknowledged write concern", write_concern=WriteConcern(0))
_with("majority", read_concern=ReadConcern("majority"))
for _level in ("local", "available", "linearizable", "snapshot"):
    _with(f"read concern {_level}", read_concern=ReadConcern(_level))
HABITS["a secondary that is not there"] = Habit(
    lambda client: _collection(client, read_preference=ReadPreference.SECONDARY).watch(),
    client={"serverSelectionTimeoutMS": 100},
)
for _name, _options in {
    "a client's document_class": {"document_class": SON},
    "a client's RawBSONDocument": {"document_class": RawBSONDocument},
    "a client's tz_aware": {"tz_aware": True},
    "a client's uuids": {"uuidRepresentation": "standard"},
    "a client that reads from the nearest": {"readPreference": "nearest"},
    "a client without retries": {"retryReads": False, "retryWrites": False},
    "a client with compression": {"compressors": "zlib"},
    "a client of the stable interface": {"appname": "mine"},
    "a client that connects later": {"connect": False},
    "a client with a small pool": {"maxPoolSize": 1, "minPoolSize": 1, "waitQueueTimeoutMS": 20_000},
}.items():
    HABITS[_name] = Habit(lambda client: _collection(client).watch(**_QUICK), client=_options)

_of("a database", lambda client: client[_DATABASE], _all)
_of(
    "a database with options",
    lambda client: client.get_database(_DATABASE, codec_options=CodecOptions(document_class=SON)),
    _all,
)
_of("the whole deployment", lambda client: client, lambda stream: taken(stream, 1))
for _name in ("admin", "config", "local"):
    _of(f"database {_name}", lambda client, name=_name: client[name])
    _of(f"a collection of {_name}", lambda client, name=_name: client[name]["c"])
for _name in (
    "", ".a", "a.", "a..b", "a$b", "$cmd", "oplog.$main", "system.views", "system.profile", "system.x", "a\x00b",
    "c" * 230, "c" * 300, "ü", " ", "a b", "a/b", 'a"b', "-", 5, None, b"c",
):  # fmt: skip
    _of(f"collection {_name!r}"[:60], lambda client, name=_name: client[_DATABASE][name])
for _name in (
    "",
    "a.b",
    "a b",
    "a$b",
    "a/b",
    "a\\b",
    'a"b',
    "d" * 63,
    "d" * 64,
    "ü",
    "$external",
    "a\x00b",
    5,
    None,
    "HABITS_OF_WATCH",
):
    _of(f"database {_name!r}"[:60], lambda client, name=_name: client[name])

for _token in (
    {},
    {"_data": b"x"},
    {"_data": ""},
    {"_data": "8"},
    {"_data": "82"},
    {"_data": "ff" * 20},
    {"_id": 1},
    [],
    "82",
    5,
):
    for _start in ("resume_after", "start_after"):
        if _start == "start_after" and not _token:
            continue  # PyMongo leaves it out in silence: docs/reference/pymongo.md
        _watch(f"{_start}={_token!r}", **{_start: _token}, reads=lambda stream: (taken(stream, 1), stream.alive))
for _time in (0, 5, _AT, "x", Timestamp(1, 1), {"t": 1}):
    _watch(f"start_at_operation_time={_time!r}", start_at_operation_time=_time, reads=lambda stream: taken(stream, 1))


def _reading(function: Callable[[Any], Any]) -> None:
    HABITS[function.__name__] = Habit(lambda client: _collection(client).watch(**_QUICK), function)


def _error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, StopIteration) as error:  # noqa: BLE001
        return type(error)


@_reading
def a_for_loop(stream: Any) -> Any:
    seen = []
    for event in stream:
        seen.append(event["operationType"])
        if event["operationType"] == "delete":
            break
    return seen, stream.alive


@_reading
def iterated_twice(stream: Any) -> Any:
    first = next(iter(stream))
    return first, [event for event, _ in zip(stream, range(2), strict=False)], stream.alive


@_reading
def closed_in_every_way(stream: Any) -> Any:
    first = stream.next()
    stream.close()
    stream.close()
    # Not try_next(): PyMongo's may still give what was in its batch (docs/reference/pymongo.md).
    return first, stream.alive, _error(stream.next), sorted(stream.resume_token), list(stream)


@_reading
def with_blocks(stream: Any) -> Any:
    with stream as same:
        first = same.next()
    with stream:
        again = stream.alive
    return first, again, stream.alive


@_reading
def left_by_an_error(stream: Any) -> Any:
    with suppress(ZeroDivisionError), stream:
        assert 1 / 0
    return stream.alive, _error(stream.next)


@_reading
def printed(stream: Any) -> Any:
    event = stream.next()
    return (
        pprint.pformat(event),
        str(event),
        json_util.dumps(event),
        _error(lambda: json.dumps(event)),
        repr(event["_id"]),
    )


@_reading
def an_event_is_one_s_own(stream: Any) -> Any:
    event = stream.next()
    other = copy.deepcopy(event)
    event.clear()
    event["x"] = 1
    token = stream.resume_token
    token["_data"] = "changed"
    return other, stream.resume_token, stream.next()


@_reading
def an_event_is_kept(stream: Any) -> Any:
    event = stream.next()
    return pickle.loads(pickle.dumps(event)), copy.copy(event) == event, bson.decode(bson.encode(event)) == event


@_reading
def as_an_object(stream: Any) -> Any:
    it = same = inside(stream)
    calls: tuple[Callable[[Any], Any], ...] = (len, lambda s: s[0], reversed, lambda s: s + 1, lambda s: s < 1)
    return (
        bool(it),
        it == same,
        it != same,
        isinstance(hash(it), int),
        it in {it},
        [_error(lambda call=call: call(it)) for call in calls],
    )


@_reading
def stored(stream: Any) -> Any:
    it = inside(stream)
    return [_error(lambda call=call: call(it) and "made") for call in (pickle.dumps,)]


@_reading
def attributes(stream: Any) -> Any:
    it = inside(stream)
    return [
        _error(lambda name=name: getattr(it, name))
        for name in ("nothing", "cursor", "collection", "session", "has_more")
    ]


@_reading
def token_after_every_event(stream: Any) -> Any:
    return [(event["_id"], stream.resume_token) for event in taken(stream)]


@_reading
def token_while_nothing_comes(stream: Any) -> Any:
    taken(stream)
    stream.try_next()
    return type(stream.resume_token), sorted(stream.resume_token)


def _resumed(start: str) -> None:
    """Another stream that goes on after the first one's second event."""

    def opens(client: Any) -> Any:
        collection = _collection(client)
        return collection, collection.watch(**_QUICK)

    def reads(opened: Any) -> Any:
        collection, stream = opened
        second = taken(stream, 2)[1]
        kinds: list[Any] = [
            dict,
            SON,
            lambda token: RawBSONDocument(bson.encode(token)),
            lambda token: {**token, "more": 1},
        ]
        found = []
        for kind in kinds:

            def tried(kind: Any = kind) -> Any:
                token = kind(second["_id"])
                with collection.watch(**{start: token}, **_QUICK) as other:
                    # Of which class the first one is depends on the one given (docs/reference/pymongo.md).
                    return other.resume_token["_data"], taken(other, 2), sorted(other.resume_token)

            found.append(_error(tried))
        return found

    HABITS[f"going on by {start}"] = Habit(opens, reads)


_resumed("resume_after")
_resumed("start_after")


def _mutated() -> None:
    pipelines: dict[int, Any] = {}

    def opens(client: Any) -> Any:
        pipeline: list[Any] = [{"$match": {"operationType": {"$ne": "none"}}}]
        stream = _collection(client).watch(pipeline, **_QUICK)
        pipeline[0]["$match"]["operationType"] = "drop"
        pipeline.append({"$out": "x"})
        pipelines[id(stream)] = pipeline
        return stream

    HABITS["a pipeline that is changed later"] = Habit(opens)


_mutated()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, StopIteration) as error:  # noqa: BLE001
        return error


def shape(value: Any) -> Any:
    """A value with the types of all that is in it."""
    if isinstance(value, RawBSONDocument):
        return "RawBSONDocument", bytes(value.raw)
    if isinstance(value, dict):
        return type(value).__name__, [(name, shape(each)) for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shape(each) for each in value]
    return type(value).__name__, repr(value)


def write(collection: Any, version: str) -> None:
    """Names with a dollar sign cannot be stored before 5.0."""
    named, inner = _NAMED, {"$numberLong": 1}
    if version.startswith("4.4"):
        named, inner = {**_NAMED, "o": {"v": 2}}, {"numberLong": 1}
    collection.insert_one({"_id": 1, **_VALUES, **named})
    collection.update_one(
        {"_id": 1}, {"$set": {"operationType": "mine", "ns.db": "c", "list.0": inner}, "$unset": {"to": 1}}
    )
    collection.replace_one({"_id": 1}, {**named, "documentKey": 1})
    collection.delete_one({"_id": 1})


def _reply(error: Any) -> Any:
    """What a program sees of the server's reply. With ``engine="server"`` it was a raw document, and no test had
    looked."""
    reply = getattr(error, "details", None)
    clocks = {"$clusterTime", "operationTime"}
    return (type(reply), sorted(set(reply) - clocks)) if isinstance(reply, Mapping) else reply


def _difference(theirs: Any, ours: Any) -> str | None:
    """The difference that a program would notice; ``None`` if there is none."""
    if isinstance(theirs, BaseException) or isinstance(ours, BaseException):
        same = isinstance(theirs, BaseException) and isinstance(ours, type(theirs))
        if same and isinstance(theirs, PyMongoError):
            same = getattr(ours, "code", None) == getattr(theirs, "code", None) and _reply(ours) == _reply(theirs)
            labels = {"ResumableChangeStreamError", "NonResumableChangeStreamError"}
            # Ours label a failed connection too: docs/reference/pymongo.md.
            same = same and all(ours.has_error_label(label) for label in labels if theirs.has_error_label(label))
        return None if same else f"{theirs!r:.300} | {ours!r:.300}"
    return first_difference(shape(theirs), shape(ours))


def first_difference(theirs: Any, ours: Any, path: str = "") -> str | None:
    """Where two shapes differ first."""
    if isinstance(theirs, (list, tuple)) and type(theirs) is type(ours) and len(theirs) == len(ours):
        for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            told = first_difference(one, other, f"{path}.{place}")
            if told is not None:
                return told
        return None
    return None if theirs == ours else f"{path}: {theirs!r:.300} | {ours!r:.300}"


@pytest.fixture(
    params=["6.0.27", pytest.param("5.0.4", marks=pytest.mark.slow), pytest.param("4.4.2", marks=pytest.mark.slow)],
    scope="module",
)
def running(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The version, and where its replica set is. It writes no no-ops: the token after the last event of a batch is
    compared, and with no-ops it would depend on when each stream was read."""
    if request.param.startswith("6"):
        with without_noops(request.getfixturevalue("replica_set")) as quiet:
            yield request.param, quiet.uri
        return
    with ReplicaSet(1, version=request.param, parameters=QUIET) as older:
        yield request.param, older.uri


def found(uri: str) -> dict[str, dict[str, Any]]:
    """For every habit, the outcome in each face."""
    results: dict[str, dict[str, Any]] = {name: {} for name in HABITS}
    with closing(asyncio.new_event_loop()) as loop, MongoClient[Any](uri) as admin:
        admin.drop_database(_DATABASE)
        admin[_DATABASE].create_collection("c")
        shared = {face: client_of(face, uri, loop) for face in FACES}
        clients = list(shared.values())
        opened: dict[tuple[str, str], Any] = {}
        for name, habit in HABITS.items():
            for face in FACES:
                client = shared[face]
                if habit.client:
                    client = client_of(face, uri, loop, **habit.client)
                    clients.append(client)
                made = outcome(lambda habit=habit, client=client: habit.opens(client))
                if isinstance(made, BaseException):
                    results[name][face] = made
                else:
                    opened[name, face] = made
        write(admin[_DATABASE]["c"], admin.server_info()["version"])
        for (name, face), stream in opened.items():
            reads = HABITS[name].reads or _all
            results[name][face] = outcome(lambda reads=reads, stream=stream: reads(stream))
        for each in opened.values():
            stream = each[1] if isinstance(each, tuple) else each
            outcome(stream.close)
        for client in clients:
            client.close()
        admin.drop_database(_DATABASE)
    return results


def test_what_users_do_with_watch_has_the_same_outcome(running: tuple[str, str]) -> None:
    version, uri = running
    results = found(uri)
    differences = {}
    for name, by_face in results.items():
        for face, ours in by_face.items():
            told = _difference(by_face["async pymongo" if face.startswith("async") else "pymongo"], ours)
            if told is not None:
                differences[f"{name}: {face}"] = told
    assert not differences, (
        version,
        len(differences),
        "\n".join(f"{name}: {told}" for name, told in differences.items()),
    )
