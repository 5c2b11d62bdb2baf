"""Rules of docs/reference/driver-rules.md that neither the unified cases nor the prose tests ask for, by their numbers.

With each engine and flavour; PyMongo's client is held to them too. What a stream sends had been looked at by those
cases alone, which say nothing of closing, of sessions, and of what must not be sent.
"""

from __future__ import annotations

import asyncio
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from tailrace.watch.client.request import STAGE_NAMES
from tests.server_in_use import major
from tests.spec.test_prose import Awaited, Commands, Deployment, deployment, older, watching

pytestmark = pytest.mark.mongod
__all__ = ["deployment", "older"]
_DATABASE = "prose"


def watched(client: Any, scope: str) -> Any:
    return {"client": client, "database": client[_DATABASE], "collection": client[_DATABASE]["c"]}[scope]


@pytest.mark.parametrize("scope", ["client", "database", "collection"])
def test_3_4_and_12_what_is_sent_where_and_nothing_that_was_not_said(deployment: Deployment, scope: str) -> None:
    deployment.collection.insert_one({})
    commands = Commands()
    with deployment.connect(event_listeners=[commands]) as client, watched(client, scope).watch() as stream:
        assert stream.try_next() is None
    opened, more = commands.named("aggregate")[0], commands.named("getMore")[0]
    assert opened["aggregate"] == ("c" if scope == "collection" else 1)
    assert opened["$db"] == more["$db"] == ("admin" if scope == "client" else _DATABASE)
    assert opened["pipeline"] == [{"$changeStream": {"allChangesForCluster": True} if scope == "client" else {}}]
    assert opened["cursor"] == {}
    assert more["collection"] == ("c" if scope == "collection" else "$cmd.aggregate")
    assert more["getMore"] == commands.replies[0]["cursor"]["id"]
    for command in (opened, more):
        assert not {"maxTimeMS", "batchSize", "comment", "collation", "maxAwaitTimeMS", "let"} & set(command)


def test_4_and_13_what_was_said_stands_where_it_belongs(deployment: Deployment) -> None:
    deployment.collection.insert_one({})
    time = deployment.admin.admin.command("ping")["operationTime"]
    said: dict[str, Any] = {"full_document": "updateLookup"}
    if major(deployment.version) >= 6:
        said |= {"full_document_before_change": "off", "show_expanded_events": True}
    with watching(deployment, **said, start_at_operation_time=time, batch_size=7, comment={"who": 1}) as (
        stream,
        commands,
    ):
        assert stream.next()["operationType"] == "insert"
        assert stream.try_next() is None
    opened, more = commands.named("aggregate")[0], commands.named("getMore")[0]
    assert opened["pipeline"][0]["$changeStream"] == {
        **{STAGE_NAMES[name]: value for name, value in said.items()},
        "startAtOperationTime": time,
    }
    assert (opened["cursor"], opened["comment"], "maxTimeMS" in opened) == ({"batchSize": 7}, {"who": 1}, False)
    assert (more["batchSize"], more["comment"], more["maxTimeMS"]) == (7, {"who": 1}, 200)


def test_5_a_start_is_a_timestamp(deployment: Deployment) -> None:
    deployment.collection.insert_one({"n": 1})
    time = deployment.admin.admin.command("ping")["operationTime"]
    deployment.collection.insert_one({"n": 2})
    with watching(deployment, start_at_operation_time=Timestamp(time.time, time.inc + 1)) as (stream, _):
        assert stream.next()["fullDocument"]["n"] == 2


def test_6_and_7_what_the_server_refuses_is_refused_by_its_code(deployment: Deployment) -> None:
    unknown_value = 40575 if deployment.version.startswith("4.4") else 2
    with deployment.connect() as client:
        collection = client[_DATABASE]["c"]
        refused = {
            72: collection.with_options(read_concern=ReadConcern("local")).watch,
            unknown_value: lambda: collection.watch(full_document="no such value"),
            40602: lambda: collection.watch([{"$changeStream": {}}]),
            9: lambda: collection.watch(resume_after={"_data": "no token"}),
        }
        for code, watch in refused.items():
            with pytest.raises(OperationFailure) as raised:
                watch()
            assert raised.value.code == code, raised.value
        with collection.with_options(read_concern=ReadConcern("majority")).watch() as stream:
            assert stream.alive


def test_7_two_starting_points_are_the_server_s_to_refuse(deployment: Deployment) -> None:
    deployment.collection.insert_one({})
    time = deployment.admin.admin.command("ping")["operationTime"]
    with watching(deployment) as (stream, _):
        token = stream.resume_token
    with deployment.connect() as client:
        two: dict[str, Any] = {"resume_after": token, "start_at_operation_time": time}
        if deployment.is_pymongo:  # it leaves one out in silence
            client[_DATABASE]["c"].watch(**two).close()
            return
        with pytest.raises(OperationFailure) as raised:
            client[_DATABASE]["c"].watch(**two)
        assert raised.value.code == 40674


def test_8_an_event_is_given_whatever_its_type_and_fields(deployment: Deployment) -> None:
    changed = {"operationType": "of another kind", "ns": {"db": "x", "coll": "y", "viewOn": "z"}, "more": {"a": [1]}}
    with watching(deployment, pipeline=[{"$addFields": {**changed, "ns": {"$literal": changed["ns"]}}}]) as (stream, _):
        deployment.collection.insert_one({"operationType": "invalidate"})
        event = stream.next()
        assert {name: event[name] for name in ("operationType", "more")} == {
            name: changed[name] for name in ("operationType", "more")
        }
        assert event["ns"]["viewOn"] == "z"
        deployment.collection.insert_one({})
        assert stream.next()["_id"] != event["_id"]


def test_9_a_plain_aggregate_knows_nothing_of_streams(deployment: Deployment) -> None:
    """Its cursor waits as a cursor of ``find`` does, and a failure is not followed by a resume."""
    commands = Commands()
    deployment.collection.insert_one({})
    with deployment.connect(event_listeners=[commands]) as client:
        cursor = client[_DATABASE]["c"].aggregate([{"$changeStream": {}}], maxAwaitTimeMS=100)
        deployment.collection.insert_one({"n": 1})
        event = None
        while event is None:
            event = cursor.try_next()
        assert event["fullDocument"]["n"] == 1
        with (
            deployment.fail("getMore", errorCode=91, errorLabels=["ResumableChangeStreamError"]),
            pytest.raises(PyMongoError),
        ):
            cursor.try_next()
        assert len(commands.named("aggregate")) == 1
        cursor.close()


def test_14_closing_ends_the_server_s_cursor_and_an_invalidation_is_its_end(deployment: Deployment) -> None:
    with watching(deployment) as (stream, commands):
        number = commands.replies[0]["cursor"]["id"]
        stream.close()
        (kill,) = commands.named("killCursors")
        assert (kill["killCursors"], list(kill["cursors"])) == ("c", [number])
        assert not stream.alive
        assert stream.try_next() is None
    deployment.collection.insert_one({})
    with watching(deployment) as (stream, commands):
        deployment.collection.drop()
        assert [stream.next()["operationType"] for _ in range(2)] == ["drop", "invalidate"]
        with pytest.raises((StopIteration, StopAsyncIteration)):
            stream.next()
        assert not stream.alive
    assert not commands.named("killCursors")


def test_15_all_commands_of_a_stream_run_in_its_session(deployment: Deployment) -> None:
    commands = Commands()
    with deployment.connect(event_listeners=[commands]) as client:
        session = client.start_session()
        with client[_DATABASE]["c"].watch(max_await_time_ms=200, session=session) as stream:
            with deployment.fail("getMore", closeConnection=True):
                stream.try_next()
            stream.try_next()
        identity = session.session_id
        ended = session.end_session()
        if isinstance(client, Awaited) and asyncio.iscoroutine(ended):
            client._loop.run_until_complete(ended)
    sent = [command for command in commands.sent if "killCursors" not in command]
    assert len(sent) >= 4
    assert {bytes(command["lsid"]["id"]) for command in sent} == {bytes(identity["id"])}


def test_16_a_get_more_is_not_sent_again(deployment: Deployment) -> None:
    with watching(deployment) as (stream, commands), deployment.fail("getMore", closeConnection=True):
        stream.try_next()
    sent = [next(iter(command)) for command in commands.sent]
    assert [name for name in sent if name != "killCursors"] == ["aggregate", "getMore", "aggregate"]


def test_24_to_26_each_failure_has_one_attempt_and_another_error_ends_the_stream(deployment: Deployment) -> None:
    with watching(deployment) as (stream, commands):
        for _ in range(3):  # one after the other, with no event between
            with deployment.fail("getMore", errorCode=91, errorLabels=["ResumableChangeStreamError"]):
                assert stream.try_next() is None
        assert len(commands.named("aggregate")) == 4
        with deployment.fail("getMore", errorCode=2), pytest.raises(OperationFailure) as raised:
            stream.try_next()
        assert raised.value.code == 2
        assert not stream.alive
        assert len(commands.named("aggregate")) == 4


class _Replies(Commands):
    """With the replies of all commands, the failed ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.every: list[dict[str, Any]] = []

    def succeeded(self, event: Any) -> None:
        super().succeeded(event)
        if event.command_name in ("aggregate", "getMore", "killCursors"):
            self.every.append(bson.decode(bson.encode(event.reply)))

    def failed(self, event: Any) -> None:
        super().failed(event)
        self.every.append(dict(event.failure))


def test_listeners_are_told_the_server_s_clock_with_every_command_and_reply(deployment: Deployment) -> None:
    """Ours came without ``operationTime`` and ``$clusterTime``, which programs pass on to another session; tests had
    looked only at the cursor in replies."""
    commands = _Replies()
    deployment.collection.insert_one({})
    with (
        deployment.connect(event_listeners=[commands]) as client,
        client[_DATABASE]["c"].watch(max_await_time_ms=200) as stream,
    ):
        stream.try_next()
        deployment.collection.insert_one({})
        event = stream.next()
        with deployment.fail("getMore", errorCode=2), pytest.raises(OperationFailure):
            stream.try_next()
    assert {next(iter(command)) for command in commands.sent} == {"aggregate", "getMore", "killCursors"}
    assert all("$clusterTime" in command for command in commands.sent)
    times = []
    for reply in commands.every:
        assert {"ok", "operationTime", "$clusterTime"} <= set(reply)
        assert reply["operationTime"] <= reply["$clusterTime"]["clusterTime"]
        assert {"clusterTime", "signature"} == set(reply["$clusterTime"])
        if "cursor" in reply:
            assert set(reply) == {"cursor", "ok", "operationTime", "$clusterTime"}
            times.append(reply["operationTime"])
    assert times == sorted(times)
    assert times[-1] >= event["clusterTime"]
