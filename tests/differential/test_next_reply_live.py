"""Replies that are read while the stream processes the one before: a user sees no difference.

Normally only a reply of half a megabyte or more is followed in this way. Here each one is, so that a small workload has
many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import NetworkTimeout

import tailrace
from tailrace.embedded import ReplicaSet
from tailrace.read.source import next_reply

pytestmark = pytest.mark.mongod

_RAW = CodecOptions[Any](document_class=RawBSONDocument)
_WRITES = 300
_AHEAD = "tailrace-next-reply"
_PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def _each_reply_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_reply, "AHEAD_BYTES_MIN", 1)


@pytest.fixture(scope="module")
def start(replica_set: ReplicaSet) -> Iterator[Timestamp]:
    """The time before ``_WRITES`` inserts."""
    with MongoClient[Any](replica_set.uri, w="majority") as client:
        begun: Timestamp = client.admin.command("ping")["operationTime"]
        for number in range(_WRITES):
            client.next_reply.things.insert_one({"_id": number, "pad": "x" * 100})
        yield Timestamp(begun.time, begun.inc + 1)


def watched(client: Any, start: Timestamp, **options: Any) -> Any:
    """Few entries in each reply: 300 are in 30."""
    things = client.get_database("next_reply", codec_options=_RAW).things
    return things.watch(start_at_operation_time=start, batch_size=10, **options)


def read_by_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == _AHEAD]


def none_within_patience(found: Callable[[], object]) -> bool:
    until = time.monotonic() + _PATIENCE_S
    while found():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_the_events_are_the_servers(replica_set: ReplicaSet, start: Timestamp, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    init = next_reply._Reply.__init__
    monkeypatch.setattr(next_reply._Reply, "__init__", lambda self, cursor: begun.append(1) or init(self, cursor))
    with MongoClient[Any](replica_set.uri) as native, watched(native, start) as stream:
        theirs = [stream.next().raw for _ in range(_WRITES)]
    with tailrace.connect(replica_set.uri) as client, watched(client, start) as stream:
        ours = [stream.next().raw for _ in range(_WRITES)]
    assert ours == theirs
    assert len(begun) >= _WRITES // 20


def test_a_stream_that_is_left_has_its_cursor_closed(replica_set: ReplicaSet, start: Timestamp) -> None:
    """The reply that was asked for is at the end of the oplog, so the server waits for entries."""
    comment = "left while a reply is on its way"
    with MongoClient[Any](replica_set.uri) as looking, tailrace.connect(replica_set.uri) as client:

        def cursors() -> list[Any]:
            operations = looking.admin.aggregate([{"$currentOp": {"idleCursors": True, "localOps": True}}])
            return [one for one in operations if comment in str(one)]

        with watched(client, start, comment=comment, max_await_time_ms=2000) as stream:
            for _ in range(_WRITES):
                stream.next()
            assert cursors()
        assert none_within_patience(cursors)
        assert none_within_patience(read_by_threads)


@pytest.mark.parametrize("failure", [{"errorCode": 43}, {"closeConnection": True}])
def test_an_error_of_a_reply_that_was_read_ahead_loses_no_event(
    replica_set: ReplicaSet, start: Timestamp, failure: dict[str, Any]
) -> None:
    with (
        MongoClient[Any](replica_set.uri) as beside,
        tailrace.connect(replica_set.uri, appname="ahead") as client,
        watched(client, start) as stream,
    ):
        got = [stream.next()["fullDocument"]["_id"]]
        data = {"failCommands": ["getMore"], "appName": "ahead", **failure}
        beside.admin.command("configureFailPoint", "failCommand", mode={"times": 2}, data=data)
        try:
            got += [stream.next()["fullDocument"]["_id"] for _ in range(_WRITES - 1)]
        finally:
            beside.admin.command("configureFailPoint", "failCommand", mode="off")
    assert got == list(range(_WRITES))


@pytest.mark.parametrize("call", ["next", "try_next"])
def test_a_time_limit_holds_for_a_reply_that_is_on_its_way(replica_set: ReplicaSet, call: str) -> None:
    """The reply was asked for before there was a limit, and the server waits five seconds with it."""
    with tailrace.connect(replica_set.uri) as client, client.next_reply.late.watch(max_await_time_ms=5000) as stream:
        client.next_reply.late.insert_one({"n": 1})
        assert stream.next()["fullDocument"]["n"] == 1
        with pytest.raises(NetworkTimeout), pymongo.timeout(0.5):
            getattr(stream, call)()
        client.next_reply.late.insert_one({"n": 2})
        assert stream.next()["fullDocument"]["n"] == 2


def test_nothing_is_read_ahead_within_a_time_limit(
    replica_set: ReplicaSet, start: Timestamp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_reply, "_Reply", None)  # whoever reads ahead fails
    with tailrace.connect(replica_set.uri) as client, pymongo.timeout(60), watched(client, start) as stream:
        for number in range(_WRITES):
            assert stream.next()["fullDocument"]["_id"] == number
