"""What goes wrong between a stream and its deployment: the outcome for both engines, synchronous and asynchronous,
alone and with streams that share a tail, beside that of PyMongo's own streams.

Each test does the same to all streams at the same time, and compares what every call returns or raises. Our oplog
engine waited for ever where PyMongo's stream raises and stays open. After that was fixed, streams that share a tail
still did, because every failure was tested with a stream that is alone on its client.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import ConnectionFailure
from pymongo.monitoring import CommandListener

from tailrace.embedded import Mongod, ReplicaSet
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.differential.beside import (
    FLAVOURS,
    SHARING,
    Streams,
    connect,
    insert,
    sharing,
    streams_at,
    wait_until,
)
from tests.differential.reply_cutter import ReplyCutter
from tests.differential.tcp_proxy import TcpProxy
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = pytest.mark.mongod
StartReplicaSet = Callable[..., ReplicaSet]
_OTHERS = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]
all_versions = pytest.mark.parametrize("version", [SERVER_VERSION, *_OTHERS])


@contextmanager
def proxied(target: str, kind: type[Any], **options: Any) -> Iterator[tuple[list[Any], Streams]]:
    """A proxy for each client, and the streams behind them."""
    with ExitStack() as stack:
        proxies = {flavour: stack.enter_context(kind(target)) for flavour in FLAVOURS}
        uris = {flavour: f"mongodb://{proxy.host}/?directConnection=true" for flavour, proxy in proxies.items()}
        with streams_at("", uris, **options) as streams:
            yield list(proxies.values()), streams


@all_versions
def test_a_killed_member_is_an_error_that_leaves_the_stream_open(
    start_replica_set: StartReplicaSet, version: str
) -> None:
    deployment = start_replica_set(1, version=version)
    insert(deployment.uri, 0)
    with streams_at(deployment.uri) as streams:
        insert(deployment.uri, 1)
        assert streams.events(1) == [1]
        deployment.kill(0)
        assert streams.raised() == "ConnectionFailure"
        assert streams.alive
        assert streams.same(lambda stream: stream.try_next()) == "ConnectionFailure"
        assert streams.same(lambda stream: stream.try_next()) == "ConnectionFailure"
        assert streams.alive
        deployment.restart(0)
        insert(deployment.uri, 2, 3)
        assert streams.events(2, may_fail_once=True) == [2, 3]


@all_versions
def test_elections_cost_no_event_and_no_error_that_ends_the_stream(
    start_replica_set: StartReplicaSet, version: str
) -> None:
    """A step-down, a primary that stops without a word, and one that is killed."""
    deployment = start_replica_set(3, version=version)
    insert(deployment.uri, 0)
    with streams_at(deployment.uri) as streams:
        for number in range(1, 5):
            insert(deployment.uri, number)
            if number == 2:
                deployment.step_down()
            assert streams.events(1) == [number]
        members = [member for member in deployment.members if member.pid is not None]
        stopped = members[deployment.primary]
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            time.sleep(4)  # the others elect one of them
            seeds = ",".join(member.host for member in members if member is not stopped)
            insert(f"mongodb://{seeds}/?replicaSet={deployment.name}", 5)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        assert streams.events(1) == [5]
        insert(deployment.uri, 6)
        killed = deployment.primary
        deployment.kill(killed)
        insert(deployment.uri, 7)
        assert streams.events(2) == [6, 7]
        deployment.restart(killed)
        insert(deployment.uri, 8)
        assert streams.events(1) == [8]


@pytest.mark.slow
@pytest.mark.parametrize("version", [SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def test_a_lost_majority_is_silence_and_its_return_costs_no_event(
    start_replica_set: StartReplicaSet, version: str
) -> None:
    """The cursors survive the step-down: no stream notices it, and neither does PyMongo's."""
    deployment = start_replica_set(3, version=version)
    insert(deployment.uri, 0)
    with streams_at(deployment.uri) as streams:
        insert(deployment.uri, 1)
        assert streams.events(1) == [1]
        others = [number for number in range(3) if number != deployment.primary]
        for number in others:
            deployment.kill(number)

        def look(stream: Any) -> Any:
            until = time.monotonic() + 6  # the primary has stepped down by then
            while time.monotonic() < until:
                assert stream.try_next() is None

        assert streams.same(look) is None
        assert streams.alive
        for number in others:
            deployment.restart(number)
        insert(deployment.uri, 2)
        assert streams.events(1) == [2]


def test_a_cut_connection_is_resumed_in_the_same_call(replica_set: ReplicaSet) -> None:
    direct = replica_set.members[0].uri
    with proxied(replica_set.members[0].host, TcpProxy) as (proxies, streams):
        for number in range(4):
            for proxy in proxies:
                proxy.cut()
            insert(direct, number)
            assert streams.events(1) == [number]
        for proxy in proxies:
            proxy.refuse()
        assert streams.raised() == "ConnectionFailure"
        assert streams.same(lambda stream: stream.try_next()) == "ConnectionFailure"
        assert streams.alive
        for proxy in proxies:
            proxy.refuse(False)
        insert(direct, 4)
        assert streams.events(1, may_fail_once=True) == [4]


class _Commands(CommandListener):
    """The outcomes of the streams' commands, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def started(self, event: Any) -> None:
        pass

    def succeeded(self, event: Any) -> None:
        if event.command_name in ("aggregate", "getMore", "killCursors"):
            self.seen.append(event.command_name)

    def failed(self, event: Any) -> None:
        self.seen.append(f"{event.command_name} fails")


def test_a_failover_between_two_calls_is_met_by_the_next_one(start_replica_set: StartReplicaSet) -> None:
    """By the next call the failure is over. Streams that share a read, which had failed and gone on, were not told: the
    next call gave the same event, but its listeners saw no failure, and ``try_next`` waited."""
    deployment = start_replica_set(1)
    insert(deployment.uri, 0)
    with ExitStack() as stack:
        streams: list[tuple[str, Any, _Commands]] = []
        for flavour in ("pymongo", "server", "oplog", "shared"):
            commands = _Commands()
            client = stack.enter_context(connect(flavour, deployment.uri, event_listeners=[commands]))
            watching = {"max_await_time_ms": 200}
            if flavour == "shared":
                found = [stream for _, stream in sharing(client.failing.c, client, stack, watching)]
            else:
                found = [stack.enter_context(client.failing.c.watch(**watching))]
            streams += [(flavour, stream, commands) for stream in found]
        shared: Any = client
        for number in range(3):
            deployment.kill(0)
            time.sleep(2)  # the shared read fails, more than once
            deployment.restart(0)
            insert(deployment.uri, number, collection="c" if number else "another")
            reads = shared.tail_statistics.reads
            insert(deployment.uri, 0, collection="another")
            wait_until(lambda: shared.tail_statistics.reads > reads, "the shared read goes on")  # noqa: B023
            seen = []
            for flavour, stream, commands in streams:
                wait_until(lambda: stream._client.primary is not None, "the primary is known")  # noqa: B023
                del commands.seen[:]
                event = stream.next() if number else stream.try_next()
                seen.append((flavour, event and event["fullDocument"]["n"], "; ".join(commands.seen)))
            expected = (number or None, "getMore fails; aggregate")
            assert seen == [(flavour, *expected) for flavour, _, _ in streams]


#: Before, inside and after the message's header, and inside the reply's document.
_SOME_PLACES = (0, 15, 16, 25, 150)
#: All servers are up, but a busy machine needs a while to find them again.
_PATIENT: dict[str, Any] = {"serverSelectionTimeoutMS": 60_000}
#: How many bytes are tried at the same time: what takes long is the driver's wait for a server that has failed.
_LANES = 8
#: A stream may get its event from a command whose reply was not to be cut: then it is tried again.
_TRIES = 5
places_of_a_reply = pytest.mark.parametrize(
    "lanes", [[_SOME_PLACES], pytest.param([None] * _LANES, marks=pytest.mark.slow)], ids=["some", "every byte"]
)


def in_lanes(lanes: Sequence[Sequence[int] | None], run: Callable[[str, Iterable[int]], int]) -> None:
    """Run lanes, each with a collection of its own and the places that it tries. If they are not given, it goes on
    until a reply has no such byte. Each returns how many places it has tried."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        runs = [
            pool.submit(run, f"lane{number}", places or count(number, len(lanes)))
            for number, places in enumerate(lanes)
        ]
        tried = [each.result() for each in runs]
    assert sum(tried) >= (300 if lanes[0] is None else len(_SOME_PLACES)), tried


@places_of_a_reply
def test_a_reply_that_is_cut_at_any_byte_is_asked_for_again(
    replica_set: ReplicaSet, lanes: Sequence[Sequence[int] | None]
) -> None:
    """Cut the reply with the event. A reply that is shorter than the place arrives whole: then every place was
    tried."""
    direct = replica_set.members[0].uri

    def run(collection: str, places: Iterable[int]) -> int:
        tried = 0
        with proxied(replica_set.members[0].host, ReplyCutter, collection=collection, **_PATIENT) as (proxies, streams):
            for number, place in enumerate(places, 1):
                for proxy in proxies:
                    if not proxy.was_whole:
                        proxy.cut_next(place, "getMore", holding=b"cut me")
                insert(direct, place, text="cut me", collection=collection)
                assert streams.events(1) == [place]
                assert all(proxy.was_whole or proxy.cuts == number for proxy in proxies)
                if all(proxy.was_whole for proxy in proxies):
                    break
                tried += 1
        return tried

    in_lanes(lanes, run)


@places_of_a_reply
@pytest.mark.parametrize("retry_reads", [True, False])
def test_a_stream_whose_reopening_is_cut_at_any_byte_is_opened_at_last(
    replica_set: ReplicaSet, lanes: Sequence[Sequence[int] | None], retry_reads: bool
) -> None:
    """The reply to a getMore is cut, and then that of the aggregate that resumes the stream: of our find. With
    ``retryReads`` it is sent a second time; without, the call fails and leaves the stream open. Streams that share a
    read are told about failures while they wait for it: here the failure may be over before they call."""
    direct = replica_set.members[0].uri
    options: dict[str, Any] = {"retryReads": retry_reads, **_PATIENT}

    def cut_at(place: int, collection: str, proxies: list[Any], streams: Streams) -> set[str]:
        """One event, with both replies cut if they come in this order. Returns the clients for which they did."""
        before = [proxy.cuts for proxy in proxies]
        for proxy in proxies:
            proxy.forget()
            if not proxy.was_whole:
                proxy.cut_next(0, "getMore")
                proxy.cut_next(place, "aggregate", "find")
        insert(direct, place, collection=collection)
        given = streams.each(lambda stream: stream.next()["fullDocument"]["n"])
        missed = {name for name, result in given.items() if isinstance(result, ConnectionFailure)}
        assert {result for name, result in given.items() if name not in missed} <= {place}, given
        of_both = {
            flavour for flavour, proxy, cuts in zip(FLAVOURS, proxies, before, strict=True) if proxy.cuts == cuts + 2
        }
        for flavour in FLAVOURS:
            if flavour != "shared":
                assert (flavour in missed) == (flavour in of_both and not retry_reads), given
        assert streams.alive
        again = streams.each(lambda stream: stream.next()["fullDocument"]["n"], missed)
        assert set(again.values()) <= {place}, again
        return of_both

    def run(collection: str, places: Iterable[int]) -> int:
        tried = 0
        with proxied(replica_set.members[0].host, ReplyCutter, collection=collection, **options) as (proxies, streams):
            for place in places:
                done: set[str] = {"shared"}
                for _ in range(_TRIES):
                    done |= cut_at(place, collection, proxies, streams)
                    done |= {flavour for flavour, proxy in zip(FLAVOURS, proxies, strict=True) if proxy.was_whole}
                    if done == set(FLAVOURS):
                        break
                assert done == set(FLAVOURS), place
                if all(
                    proxy.was_whole for flavour, proxy in zip(FLAVOURS, proxies, strict=True) if flavour != "shared"
                ):
                    break
                tried += 1
        return tried

    in_lanes(lanes, run)


def test_a_look_up_that_fails_leaves_the_stream_open(replica_set: ReplicaSet) -> None:
    """On the oplog the current document is a read of our own, which was retried for two minutes and then ended the
    stream. For comparison, the reply and the resume of the server's stream fail, since that looks documents up
    itself."""
    direct = replica_set.members[0].uri
    options: dict[str, Any] = {"retryReads": False, "full_document": "updateLookup", **_PATIENT}
    with (
        proxied(replica_set.members[0].host, ReplyCutter, **options) as (proxies, streams),
        MongoClient[Any](direct) as client,
    ):
        client.failing.c.insert_one({"_id": "looked up", "n": 0})
        assert streams.events(1) == [0]
        for number in range(1, 4):
            for flavour, proxy in zip(FLAVOURS, proxies, strict=True):
                if flavour.endswith(("pymongo", "server")):
                    proxy.cut_next(0, "getMore")
                    proxy.cut_next(0, "aggregate")
                else:
                    for _ in range(2 * (SHARING if flavour == "shared" else 1)):
                        proxy.cut_next(0, "find")
            client.failing.c.update_one({"_id": "looked up"}, {"$set": {"n": number}})
            assert streams.raised() == "ConnectionFailure"
            assert streams.alive
            assert streams.events(1) == [number]


def test_a_look_up_that_fails_once_is_not_noticed(replica_set: ReplicaSet) -> None:
    """Neither is a single failure of a reply of the server's stream. Our look-up raised at once: a step-down ended a
    program with look-ups, unlike with PyMongo. Earlier tests always let both the reply and the resume fail."""
    direct = replica_set.members[0].uri
    options: dict[str, Any] = {"retryReads": False, "full_document": "updateLookup", **_PATIENT}
    with (
        proxied(replica_set.members[0].host, ReplyCutter, **options) as (proxies, streams),
        MongoClient[Any](direct) as client,
    ):
        client.failing.c.insert_one({"_id": "looked up once", "n": 0})
        assert streams.events(1) == [0]
        for flavour, proxy in zip(FLAVOURS, proxies, strict=True):
            proxy.cut_next(0, "getMore" if flavour.endswith(("pymongo", "server")) else "find")
        client.failing.c.update_one({"_id": "looked up once"}, {"$set": {"n": 1}})
        assert streams.same(lambda stream: stream.next()["fullDocument"]["n"]) == 1


@contextmanager
def resolver(*names: str) -> Iterator[set[str]]:
    """The names lead to this machine while they are in the set that is given."""
    known, ask = set(names), socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host in names:
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return ask(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield known


def test_a_name_that_resolves_no_longer_is_an_error_that_leaves_the_stream_open(replica_set: ReplicaSet) -> None:
    """Existing connections go on; new ones cannot be opened until the name is back."""
    direct = replica_set.members[0].uri
    with resolver("db.tailrace.test") as known, ExitStack() as stack:
        proxies = {flavour: stack.enter_context(TcpProxy(replica_set.members[0].host)) for flavour in FLAVOURS}
        ports = {flavour: proxy.host.rpartition(":")[2] for flavour, proxy in proxies.items()}
        uris = {flavour: f"mongodb://db.tailrace.test:{port}/?directConnection=true" for flavour, port in ports.items()}
        with streams_at("", uris) as streams:
            insert(direct, 1)
            assert streams.events(1) == [1]
            known.clear()
            insert(direct, 2)
            assert streams.events(1) == [2]
            for proxy in proxies.values():
                proxy.cut()
            assert streams.raised() == "ConnectionFailure"
            assert streams.same(lambda stream: stream.try_next()) == "ConnectionFailure"
            assert streams.alive
            known.add("db.tailrace.test")
            insert(direct, 3)
            assert streams.events(1, may_fail_once=True) == [3]


def test_a_seed_that_resolves_no_longer_is_not_missed(replica_set: ReplicaSet) -> None:
    """The members' own addresses count."""
    host, name = replica_set.members[0].host, replica_set.name
    uri = f"mongodb://seed.tailrace.test:{host.rpartition(':')[2]}/?replicaSet={name}"
    with resolver("seed.tailrace.test") as known, streams_at(uri) as streams:
        insert(replica_set.uri, 1)
        assert streams.events(1) == [1]
        known.clear()
        insert(replica_set.uri, 2)
        assert streams.events(1) == [2]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Mongod]:
    with mongod_with_users(tmp_path) as mongod:
        add_user(mongod, "reader", "pw", [{"role": "read", "db": "local"}, {"role": "read", "db": "failing"}])
        insert(uri_of(mongod, ROOT, PASSWORD), 0)
        yield mongod


def test_rights_that_are_taken_away_end_the_stream(guarded: Mongod) -> None:
    """Neither the oplog nor the collection can be read any more."""
    admin_uri = uri_of(guarded, ROOT, PASSWORD)
    with streams_at(uri_of(guarded, "reader", "pw")) as streams, MongoClient[Any](admin_uri) as admin:
        insert(admin_uri, 1)
        assert streams.events(1) == [1]
        admin.admin.command("updateUser", "reader", roles=[])
        insert(admin_uri, 2)

        def until_error(stream: Any) -> Any:
            for _ in range(50):
                stream.try_next()

        assert streams.same(until_error) == ("OperationFailure", 13)
        assert not streams.alive


def test_a_password_that_is_changed_is_asked_for_with_the_next_connection(guarded: Mongod) -> None:
    admin_uri = uri_of(guarded, ROOT, PASSWORD)
    with ExitStack() as stack:
        proxies = {flavour: stack.enter_context(TcpProxy(guarded.host)) for flavour in FLAVOURS}
        uris = {
            flavour: f"mongodb://reader:pw@{proxy.host}/?authSource=admin&directConnection=true"
            for flavour, proxy in proxies.items()
        }
        admin = stack.enter_context(MongoClient[Any](admin_uri))
        with streams_at("", uris) as streams:
            insert(admin_uri, 1)
            assert streams.events(1) == [1]
            admin.admin.command("updateUser", "reader", pwd="another")
            insert(admin_uri, 2)
            assert streams.events(1) == [2]
            for proxy in proxies.values():
                proxy.cut()
            insert(admin_uri, 3)
            assert streams.raised() == ("OperationFailure", 18)
            assert not streams.alive
