"""The drivers' prose tests for change streams, by their numbers, with each engine and flavour.

5, 9, 10, 12, 15 and 16 were removed. What is named after a rule is one of docs/reference/driver-rules.md.

PyMongo's client passes them too: what these tests ask is what a driver does.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import bson
import pytest
from pymongo import MongoClient
from pymongo.asynchronous.change_stream import AsyncChangeStream
from pymongo.asynchronous.command_cursor import AsyncCommandCursor
from pymongo.monitoring import CommandListener

from tailrace.embedded import ReplicaSet
from tests.quiet import QUIET
from tests.server_in_use import SERVER_VERSION, major
from tests.spec.test_unified import flavour_named

pytestmark = pytest.mark.mongod

_FLAVOURS = ("pymongo", "server", "oplog", "pymongo async", "server async", "oplog async")
_DATABASE = "prose"
_OLDER = ("5.0.4", "4.4.2")


class Commands(CommandListener):
    """The commands of a stream, as they were sent and answered."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.replies: list[dict[str, Any]] = []
        self.failed_names: list[str] = []

    def started(self, event: Any) -> None:
        if event.command_name in ("aggregate", "getMore", "killCursors"):
            self.sent.append(dict(event.command))

    def succeeded(self, event: Any) -> None:
        if event.command_name in ("aggregate", "getMore"):
            self.replies.append(bson.decode(bson.encode(event.reply)))

    def failed(self, event: Any) -> None:
        self.failed_names.append(event.command_name)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [command for command in self.sent if name in command]

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The ``$changeStream`` of each aggregate."""
        return [command["pipeline"][0]["$changeStream"] for command in self.named("aggregate")]


class Awaited:
    """An awaited client, database, collection or stream, whose calls are awaited here."""

    def __init__(self, inside: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inside = inside
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inside, name)
        return partial(self._call, found) if inspect.iscoroutinefunction(found) else found

    def with_options(self, **options: Any) -> Awaited:
        return Awaited(self._inside.with_options(**options), self._loop)

    def __getitem__(self, name: str) -> Awaited:
        return Awaited(self._inside[name], self._loop)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = self._loop.run_until_complete(function(*arguments, **options))
        return Awaited(result, self._loop) if isinstance(result, (AsyncChangeStream, AsyncCommandCursor)) else result

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Deployment:
    def __init__(self, admin: MongoClient[Any], connect: Callable[..., Any], flavour: str, version: str) -> None:
        self.reads_oplog = flavour.startswith("oplog")
        self.is_pymongo = flavour.startswith("pymongo")
        self.version = version
        self.admin = admin
        self.connect = connect
        self.collection = admin[_DATABASE].c

    @contextmanager
    def fail(self, command: str, times: int = 1, **data: Any) -> Iterator[None]:
        self.admin.admin.command(
            "configureFailPoint", "failCommand", mode={"times": times}, data={"failCommands": [command], **data}
        )
        try:
            yield
        finally:
            self.admin.admin.command("configureFailPoint", "failCommand", mode="off")


@pytest.fixture(scope="module")
def older() -> Iterator[Callable[[str], str]]:
    """Where replica sets of older versions are, each started when it is first asked for."""
    with ExitStack() as stack:

        @functools.cache
        def uri(version: str) -> str:
            return stack.enter_context(ReplicaSet(1, version=version, enable_test_commands=True, parameters=QUIET)).uri

        yield uri


def _flavours() -> Iterator[Any]:
    yield from _FLAVOURS
    for version in _OLDER:
        for flavour in _FLAVOURS:
            yield pytest.param(f"{flavour} @{version}", marks=pytest.mark.slow)


@pytest.fixture(params=list(_flavours()))
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    flavour, _, version = request.param.partition(" @")
    # Tokens after a batch are compared with its event's: no no-op may come between.
    uri = request.getfixturevalue("older")(version) if version else request.getfixturevalue("quiet_replica_set").uri
    with MongoClient[Any](uri) as admin:
        admin.drop_database(_DATABASE)
        connect = flavour_named(flavour, uri).connect
        with closing(asyncio.new_event_loop()) as loop:
            if flavour.endswith(" async"):
                make, connect = connect, lambda **options: Awaited(make(**options), loop)
            yield Deployment(admin, connect, flavour, version or SERVER_VERSION)
        admin.drop_database(_DATABASE)


@contextmanager
def watching(deployment: Deployment, **parameters: Any) -> Iterator[tuple[Any, Commands]]:
    commands = Commands()
    with (
        deployment.connect(event_listeners=[commands]) as client,
        client[_DATABASE]["c"].watch(max_await_time_ms=200, **parameters) as stream,
    ):
        yield stream, commands


def batch_token(reply: dict[str, Any]) -> Any:
    return reply["cursor"].get("postBatchResumeToken")


def test_1_the_last_token_is_followed_all_the_time(deployment: Deployment) -> None:
    with watching(deployment) as (stream, _):
        seen = [stream.resume_token]
        for number in range(3):
            deployment.collection.insert_one({"n": number})
            assert stream.next()["fullDocument"]["n"] == number
            seen.append(stream.resume_token)
        texts = [token["_data"] for token in seen]
        assert texts == sorted(set(texts))


def test_2_an_event_without_its_token_is_an_error(deployment: Deployment) -> None:
    with watching(deployment, pipeline=[{"$project": {"_id": 0}}]) as (stream, _):
        deployment.collection.insert_one({})
        with pytest.raises(Exception, match=r"_id|resume token") as raised:
            stream.next()
        assert raised.value.code == 280
        assert not stream.alive


def test_3_a_resume_sends_the_same_command_but_for_the_token(deployment: Deployment) -> None:
    pipeline = [{"$match": {"operationType": "insert"}}]
    with watching(deployment, pipeline=pipeline, batch_size=3, full_document="updateLookup", comment="c") as (
        stream,
        commands,
    ):
        deployment.collection.insert_one({"n": 1})
        stream.next()
        with deployment.fail("getMore", closeConnection=True):
            deployment.collection.insert_one({"n": 2})
            assert stream.next()["fullDocument"]["n"] == 2
        first, second = commands.named("aggregate")
        assert second["pipeline"][1:] == first["pipeline"][1:] == pipeline
        resumed = dict(second["pipeline"][0]["$changeStream"])
        assert set(resumed.pop("resumeAfter")) >= {"_data"}
        assert resumed == first["pipeline"][0]["$changeStream"]
        assert (second["cursor"], second["comment"]) == (first["cursor"], first["comment"])


def test_4_nothing_is_resumed_after_an_aggregate_that_failed(deployment: Deployment) -> None:
    commands = Commands()
    with (
        deployment.connect(event_listeners=[commands]) as client,
        # The oplog engine sends no aggregate: its first read fails instead.
        deployment.fail("find" if deployment.reads_oplog else "aggregate", errorCode=2),
        pytest.raises(Exception, match="failpoint") as raised,
    ):
        client[_DATABASE]["c"].watch()
    assert raised.value.code == 2
    assert len(commands.named("aggregate")) == 1


def test_6_the_server_is_chosen_by_the_same_read_preference_again(deployment: Deployment) -> None:
    commands = Commands()
    with (
        deployment.connect(event_listeners=[commands], readPreference="secondaryPreferred") as client,
        client[_DATABASE]["c"].watch(max_await_time_ms=200) as stream,
    ):
        with deployment.fail("getMore", closeConnection=True):
            stream.try_next()
        first, second = commands.named("aggregate")
        assert second["$readPreference"] == first["$readPreference"] == {"mode": "secondaryPreferred"}


def test_7_an_empty_first_batch_leaves_the_cursor_open(deployment: Deployment) -> None:
    with watching(deployment) as (stream, commands):
        assert commands.replies[0]["cursor"]["firstBatch"] == []
        assert commands.replies[0]["cursor"]["id"] != 0
        assert not commands.named("killCursors")
        deployment.collection.insert_one({})
        assert stream.next()["operationType"] == "insert"


def test_8_a_failing_kill_cursors_is_not_seen(deployment: Deployment) -> None:
    with watching(deployment) as (stream, _):
        deployment.admin.admin.command(
            "configureFailPoint", "failGetMoreAfterCursorCheckout", mode={"times": 1}, data={"errorCode": 10107}
        )
        try:
            with deployment.fail("killCursors", times=2, errorCode=2):
                deployment.collection.insert_one({})
                assert stream.next()["operationType"] == "insert"
        finally:
            deployment.admin.admin.command("configureFailPoint", "failGetMoreAfterCursorCheckout", mode="off")


def test_11_an_empty_or_used_up_batch_leaves_its_own_token(deployment: Deployment) -> None:
    with watching(deployment) as (stream, commands):
        assert stream.resume_token == batch_token(commands.replies[-1])
        assert stream.try_next() is None
        assert stream.resume_token == batch_token(commands.replies[-1])
        deployment.collection.insert_one({})
        event = stream.next()
        assert stream.resume_token == batch_token(commands.replies[-1]) == event["_id"]


def test_13_inside_a_batch_the_token_is_that_of_the_event_before(deployment: Deployment) -> None:
    with watching(deployment) as (stream, _):
        deployment.collection.insert_many([{"n": number} for number in range(3)])
        for number in range(3):
            event = stream.next()
            assert event["fullDocument"]["n"] == number
            assert stream.resume_token == event["_id"]


@pytest.mark.parametrize("option", ["resume_after", "start_after"])
def test_14_before_the_first_event_of_a_batch_the_token_is_the_one_given(deployment: Deployment, option: str) -> None:
    with watching(deployment) as (stream, _):
        deployment.collection.insert_many([{}, {}])
        token = stream.next()["_id"]
    with watching(deployment, **{option: token}) as (stream, commands):
        assert len(commands.replies[0]["cursor"]["firstBatch"]) == 1
        assert stream.resume_token == token
        assert stream.next()["_id"] == commands.replies[0]["cursor"]["firstBatch"][0]["_id"] != token
        assert not commands.named("getMore")


def test_rule_22_a_resume_that_finds_nothing_is_not_followed_by_a_get_more(deployment: Deployment) -> None:
    """A call asks the server once, and the aggregate of the resume was that."""
    with watching(deployment) as (stream, commands):
        assert stream.try_next() is None
        with deployment.fail("getMore", closeConnection=True):
            assert stream.try_next() is None
        sent = [next(iter(command)) for command in commands.sent]
        assert [name for name in sent if name != "killCursors"] == ["aggregate", "getMore", "getMore", "aggregate"]


def test_rule_18_an_empty_first_batch_is_given_to_who_asks_for_it(deployment: Deployment) -> None:
    """``batch_size=0`` asks for it."""
    with watching(deployment) as (stream, _):
        deployment.collection.insert_many([{}, {}])
        token = stream.next()["_id"]
    with watching(deployment, resume_after=token, batch_size=0) as (stream, commands):
        assert commands.replies[0]["cursor"]["firstBatch"] == []
        assert stream.next()["_id"] != token


def test_17_start_after_is_sent_again_while_nothing_has_come(deployment: Deployment) -> None:
    with watching(deployment) as (stream, _):
        deployment.collection.insert_one({})
        token = stream.next()["_id"]
    with watching(deployment, start_after=token) as (stream, commands):
        with deployment.fail("getMore", closeConnection=True):
            assert stream.try_next() is None
        assert [sorted({"startAfter", "resumeAfter"} & set(stage)) for stage in commands.stages] == [["startAfter"]] * 2


def test_18_resume_after_is_sent_once_an_event_has_come(deployment: Deployment) -> None:
    with watching(deployment) as (stream, _):
        deployment.collection.insert_many([{}, {}])
        token = stream.next()["_id"]
    with watching(deployment, start_after=token) as (stream, commands):
        assert stream.next() is not None
        with deployment.fail("getMore", closeConnection=True):
            assert stream.try_next() is None
        sent = [sorted({"startAfter", "resumeAfter"} & set(stage)) for stage in commands.stages]
        assert sent == [["startAfter"], ["resumeAfter"]]


def test_19_a_large_event_comes_in_fragments(deployment: Deployment) -> None:
    if major(deployment.version) < 6:
        pytest.skip("events are divided from 6.0.9 on")
    half = 10 << 20
    database = deployment.admin[_DATABASE]
    database.drop_collection("c")
    database.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
    deployment.collection.insert_one({"_id": 1, "v": "q" * half})
    with watching(
        deployment, pipeline=[{"$changeStreamSplitLargeEvent": {}}], full_document_before_change="required"
    ) as (stream, _):
        deployment.collection.update_one({"_id": 1}, {"$set": {"v": "z" * half}})
        assert [stream.next()["splitEvent"] for _ in range(2)] == [
            {"fragment": 1, "of": 2},
            {"fragment": 2, "of": 2},
        ]
