"""What goes wrong between a stream and its deployment: the outcome of both engines beside that of PyMongo's own stream.

Each test does the same to three streams at a time and compares what every call gives or raises. Our oplog engine had
waited for ever where PyMongo's stream raises and stays open.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

import tailrace
from tailrace.embedded import ReplicaSet
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.differential.reply_cutter import ReplyCutter
from tests.differential.tcp_proxy import TcpProxy

pytestmark = pytest.mark.mongod

FLAVOURS = ("pymongo", "server", "oplog")
#: So long nobody waits for a member, and so often the members are looked at.
_IMPATIENT = {"serverSelectionTimeoutMS": 1500, "heartbeatFrequencyMS": 500}


def connect(flavour: str, uri: str, **options: Any) -> Any:
    if flavour == "pymongo":
        return MongoClient[Any](uri, **_IMPATIENT, **options)
    return tailrace.connect(uri, engine=flavour, **_IMPATIENT, **options)  # type: ignore[arg-type]


class Streams:
    """The streams of all flavours on one collection; each call is made of all at a time."""

    def __init__(self, streams: dict[str, Any]) -> None:
        self.streams = streams
        self._pool = ThreadPoolExecutor(len(streams))

    def each(self, call: Callable[[Any], Any]) -> dict[str, Any]:
        """What the call gives for each flavour, or the exception that it raises."""
        futures = {flavour: self._pool.submit(call, stream) for flavour, stream in self.streams.items()}
        return {flavour: future.exception() or future.result() for flavour, future in futures.items()}

    def events(self, number: int, patience_s: float = 60.0) -> dict[str, list[Any]]:
        """The next events' ``n``. An error that leaves the stream open is followed by another call."""

        def collect(stream: Any) -> list[Any]:
            found: list[Any] = []
            deadline = time.monotonic() + patience_s
            while len(found) < number and time.monotonic() < deadline:
                try:
                    event = stream.try_next()
                except PyMongoError:
                    if not stream.alive:
                        raise
                    continue
                if event is not None:
                    found.append(event["fullDocument"]["n"])
            return found

        return self.each(collect)


@contextmanager
def streams_at(uri: str, uris: dict[str, str] | None = None, **options: Any) -> Iterator[Streams]:
    with ExitStack() as stack:
        opened = {}
        for flavour in FLAVOURS:
            client = stack.enter_context(connect(flavour, (uris or {}).get(flavour, uri), **options))
            opened[flavour] = stack.enter_context(client["failing"]["c"].watch(max_await_time_ms=200))
        yield Streams(opened)


def same(outcomes: dict[str, Any]) -> Any:
    """The one outcome of all flavours."""
    for flavour in FLAVOURS[1:]:
        assert outcomes[flavour] == outcomes["pymongo"], outcomes
    return outcomes["pymongo"]


def insert(uri: str, *numbers: int) -> None:
    with MongoClient[Any](uri) as client:
        client.failing.c.insert_many([{"n": number} for number in numbers])


def test_a_killed_member_is_an_error_that_leaves_the_stream_open(start_replica_set: Callable[..., ReplicaSet]) -> None:
    deployment = start_replica_set(1)
    insert(deployment.uri, 0)
    with streams_at(deployment.uri) as streams:
        insert(deployment.uri, 1)
        assert same(streams.events(1)) == [1]
        deployment.kill(0)
        raised = streams.each(lambda stream: stream.next())
        assert all(isinstance(error, ConnectionFailure) for error in raised.values()), raised
        assert same(streams.each(lambda stream: stream.alive)) is True
        again = streams.each(lambda stream: stream.try_next())
        assert all(isinstance(error, ConnectionFailure) for error in again.values()), again
        deployment.restart(0)
        insert(deployment.uri, 2, 3)
        assert same(streams.events(2)) == [2, 3]


def test_a_step_down_costs_no_event_and_no_error_that_ends_the_stream(
    start_replica_set: Callable[..., ReplicaSet],
) -> None:
    deployment = start_replica_set(3)
    insert(deployment.uri, 0)
    with streams_at(deployment.uri) as streams:
        for number in range(1, 5):
            insert(deployment.uri, number)
            if number == 2:
                deployment.step_down()
            assert same(streams.events(1)) == [number]
        members = [member for member in deployment.members if member.pid is not None]
        stopped = members[deployment.primary]
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            time.sleep(4)  # the others elect one of them
            seeds = ",".join(member.host for member in members if member is not stopped)
            insert(f"mongodb://{seeds}/?replicaSet={deployment.name}&serverSelectionTimeoutMS=60000", 5)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        assert same(streams.events(1)) == [5]


@pytest.mark.slow
def test_a_lost_majority_is_silence_and_its_return_costs_no_event(
    start_replica_set: Callable[..., ReplicaSet],
) -> None:
    """The cursors outlive the step-down: nobody hears of it, PyMongo's stream neither."""
    deployment = start_replica_set(3)
    insert(deployment.uri, 0)
    with streams_at(deployment.uri) as streams:
        insert(deployment.uri, 1)
        assert same(streams.events(1)) == [1]
        others = [number for number in range(3) if number != deployment.primary]
        for number in others:
            deployment.kill(number)

        def look(stream: Any) -> Any:
            until = time.monotonic() + 6  # the primary has stepped down by then
            while time.monotonic() < until:
                assert stream.try_next() is None

        assert same(streams.each(look)) is None
        assert same(streams.each(lambda stream: stream.alive)) is True
        for number in others:
            deployment.restart(number)
        insert(f"{deployment.uri}&serverSelectionTimeoutMS=60000", 2)
        assert same(streams.events(1)) == [2]


def test_a_cut_connection_is_resumed_in_the_same_call(replica_set: ReplicaSet) -> None:
    direct = replica_set.members[0].uri
    with ExitStack() as stack:
        proxies = {flavour: stack.enter_context(TcpProxy(replica_set.members[0].host)) for flavour in FLAVOURS}
        uris = {flavour: f"mongodb://{proxy.host}/?directConnection=true" for flavour, proxy in proxies.items()}
        with streams_at(direct, uris) as streams:
            for number in range(4):
                for proxy in proxies.values():
                    proxy.cut()
                insert(direct, number)
                assert same(streams.events(1)) == [number]
            for proxy in proxies.values():
                proxy.refuse()
            raised = streams.each(lambda stream: stream.next())
            assert all(isinstance(error, ConnectionFailure) for error in raised.values()), raised
            for proxy in proxies.values():
                proxy.refuse(False)
            insert(direct, 4)
            assert same(streams.events(1)) == [4]


#: Before, inside and after the message's header, and inside the reply's document.
_SOME_PLACES = (0, 1, 15, 16, 20, 21, 25, 64, 150)


@pytest.mark.parametrize(
    "places", [_SOME_PLACES, pytest.param(range(400), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_reply_that_is_cut_at_any_byte_is_asked_for_again(replica_set: ReplicaSet, places: Sequence[int]) -> None:
    direct = replica_set.members[0].uri
    with ExitStack() as stack:
        proxies = {flavour: stack.enter_context(ReplyCutter(replica_set.members[0].host)) for flavour in FLAVOURS}
        uris = {flavour: f"mongodb://{proxy.host}/?directConnection=true" for flavour, proxy in proxies.items()}
        with streams_at(direct, uris) as streams:
            for round_number, place in enumerate(places, 1):
                for proxy in proxies.values():
                    proxy.cut_next(place)
                insert(direct, place)
                assert same(streams.events(1)) == [place]
                assert [proxy.cuts for proxy in proxies.values()] == [round_number] * len(proxies)


def test_a_cursor_that_somebody_kills_between_two_calls_is_resumed(replica_set: ReplicaSet) -> None:
    with streams_at(replica_set.uri) as streams, MongoClient[Any](replica_set.uri) as admin:
        insert(replica_set.uri, 1)
        assert same(streams.events(1)) == [1]
        idle = [
            (cursor["ns"], cursor["cursor"]["cursorId"])
            for cursor in admin.admin.aggregate([{"$currentOp": {"idleCursors": True, "allUsers": True}}])
            if cursor.get("type") == "idleCursor"
        ]
        assert len(idle) >= len(FLAVOURS)
        for namespace, number in idle:
            database, _, collection = namespace.partition(".")
            admin[database].command("killCursors", collection, cursors=[number])
        insert(replica_set.uri, 2)
        assert same(streams.events(1)) == [2]


def test_rights_that_are_taken_away_end_the_stream(tmp_path: Any) -> None:
    with mongod_with_users(tmp_path) as guarded:
        add_user(guarded, "reader", "pw", [{"role": "read", "db": "local"}, {"role": "read", "db": "failing"}])
        uri = uri_of(guarded, "reader", "pw")
        admin_uri = uri_of(guarded, ROOT, PASSWORD)
        insert(admin_uri, 0)
        with streams_at(uri) as streams:
            insert(admin_uri, 1)
            assert same(streams.events(1)) == [1]
            with MongoClient[Any](admin_uri) as admin:
                admin.admin.command("updateUser", "reader", roles=[])
            insert(admin_uri, 2)

            def until_error(stream: Any) -> Any:
                for _ in range(50):
                    stream.try_next()

            raised = streams.each(until_error)
            assert all(isinstance(error, OperationFailure) for error in raised.values()), raised
            assert {error.code for error in raised.values()} == {13}, raised
            assert same(streams.each(lambda stream: stream.alive)) is False
