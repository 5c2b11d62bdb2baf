"""If nobody watches most of the writes, the server is asked to leave them out. What streams get stays the same while
the filter comes, stays and goes. (No earlier test had enough unwatched writes for a filter.)"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.write_concern import WriteConcern

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.read.source.batch import entry_time
from tailrace.read.source.mongod import MongodSource
from tests.gateway.gateways import running_gateway
from tests.gateway.running import eventually

pytestmark = pytest.mark.mongod

_RAW = CodecOptions[Any](document_class=RawBSONDocument)
_UNWATCHED = 400


@dataclass(frozen=True)
class Sides:
    """A database of the server and the same through a gateway, with the gateway's shared read; ``server`` writes."""

    server: MongoClient[Any]
    database: Any
    sides: list[Any]
    tail: Any

    def write(self, collection: str, numbers: range) -> None:
        for number in numbers:
            self.database[collection].insert_one({"_id": number, "text": "x" * 100})

    def watched(self) -> list[Any]:
        """Streams of the collection ``watched``, which read with the others, of which some are left out."""
        streams = [side["watched"].watch(max_await_time_ms=100) for side in self.sides]
        # A stream reads for itself until the shared read has reached its place, which needs writes.
        eventually(lambda: write_and_ask(self.database, streams, self.tail), "the stream reads with the others")
        self.write("other", range(_UNWATCHED))
        eventually(lambda: is_narrow(self.tail, self.database), "the read has a filter")
        return streams


@pytest.fixture
def both(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Sides]:
    name = request.node.originalname[:50]
    with (
        running_gateway(replica_set.uri) as running,
        MongoClient[Any](replica_set.uri) as server,
        MongoClient[Any](running.uri("directConnection=true")) as client,
    ):
        for collection in ("watched", "other", "late"):
            server[name][collection].insert_one({"_id": "first"})
        sides = [one.get_database(name, codec_options=_RAW) for one in (server, client)]
        yield Sides(server, server[name], sides, running.gateway.engine._shared)


def same(streams: list[Any], count: int) -> None:
    native, ours = (events(stream, count) for stream in streams)
    assert ours == native
    assert len(ours) == count


def events(stream: Any, count: int) -> list[bytes]:
    found: list[bytes] = []

    def all_came() -> bool:
        while (event := stream.try_next()) is not None:
            found.append(bytes(event.raw))
        return len(found) >= count

    eventually(all_came, f"{count} events come")
    return found


def test_streams_get_what_the_server_gives_with_a_filter_and_without(both: Sides) -> None:
    tail, write = both.tail, both.write
    watched = both.watched()
    reads = tail.statistics.entries
    write("other", range(10_000, 10_050))
    write("watched", range(50))
    same(watched, 50)
    assert tail.statistics.entries - reads < 80, "what nobody watches is read"

    late = [side["late"].watch(max_await_time_ms=100) for side in both.sides]
    write("late", range(20))
    write("watched", range(100, 120))
    same(late, 20)
    same(watched, 20)
    eventually(lambda: tail._filter.keys is None, "everything is read again")

    with both.server.start_session() as session, session.start_transaction():
        for collection in ("late", "other", "watched"):
            both.database[collection].insert_one({"_id": "in a transaction"}, session=session)
    whole = [side.watch(max_await_time_ms=100) for side in both.sides]
    write("other", range(20_000, 20_000 + _UNWATCHED))
    write("late", range(200, 220))
    same(late, 21)
    same(watched, 1)
    same(whole, _UNWATCHED + 20)
    assert tail._filter.keys is None, "a stream over the database cannot do with some collections"
    for stream in [*watched, *late, *whole]:
        stream.close()


def is_narrow(tail: Any, database: Any) -> bool:
    database["other"].insert_one({})
    return tail._filter.keys is not None


def write_and_ask(database: Any, streams: list[Any], tail: Any) -> bool:
    """Make a joined stream, and take its events on both sides."""
    database["watched"].insert_one({})
    for stream in streams:
        events(stream, 1)
    return bool(tail.statistics.joined > 1)  # the first is the keeper of the read


def test_definitions_and_transactions_come_through_the_filter(both: Sides) -> None:
    database = both.database
    streams = both.watched()
    with both.server.start_session() as session, session.start_transaction():
        for number in range(3):
            database["other"].insert_one({"_id": f"t{number}"}, session=session)
            database["watched"].insert_one({"_id": f"t{number}"}, session=session)
    database["watched"].update_one({"_id": "t1"}, {"$set": {"a": 1}})
    database["watched"].delete_one({"_id": "t2"})
    database["watched"].rename("renamed")
    same(streams, 7)  # three, two, the rename, the invalidate
    assert both.tail._filter.keys is not None
    for stream in streams:
        stream.close()


def nothing_is_promised_before_it_is_given(source: MongodSource, start: ClusterTime, namespace: str) -> None:
    """Read with a filter on the namespace up to its first entry, which must be later than everything promised."""
    promised = start
    for batch in source.tail(start, await_ms=50, oplog_filter=bson.encode({"ns": namespace})):
        if batch.raw:
            assert entry_time(batch.raw) > promised
            return
        promised = batch.high_water


def test_a_late_look_at_the_newest_entry_promises_nothing_that_is_still_to_come(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty replies wait on the connection when the reader asks for the newest entry, as after a pause of its process:
    the server sent them before that entry was written. (In earlier tests the reader always kept up with the server's
    pushing.)"""
    with MongoClient[Any](replica_set.uri) as client, closing(MongodSource(replica_set.uri, pushed=True)) as source:
        # The reader begins after this insert, since the newest entry that it gets is majority-committed.
        collection = client["late_look"].get_collection("c", write_concern=WriteConcern("majority"))
        collection.insert_one({"_id": 0})
        look, written = source._newest, list[object]()

        def late() -> Any:
            cursor = source._tailing
            if cursor is not None and cursor.is_pushed and not written:
                with closing(cursor.pushed_socket() or pytest.fail("nothing is pushed")) as view:
                    select.select([view], [], [])
                written.append(collection.insert_one({"_id": 1}).inserted_id)
            return look()

        start = source.newest()
        monkeypatch.setattr(source, "_newest", late)
        nothing_is_promised_before_it_is_given(source, start, collection.full_name)
        assert written


@contextmanager
def stopped_replication(members: ReplicaSet) -> Iterator[None]:
    """Nothing is majority-committed inside the block."""
    secondary = members.members[1 - (members.primary or 0)]
    with MongoClient[Any](secondary.uri) as client:
        for mode in ("alwaysOn", "off"):
            client.admin.command("configureFailPoint", "stopReplProducer", mode=mode)
            if mode == "alwaysOn":
                yield


def waiting_bytes(view: socket.socket) -> int:
    try:
        return len(view.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


def test_a_write_that_is_committed_late_is_not_promised_before_it_is_given(
    start_replica_set: Callable[..., ReplicaSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is several replies behind the server's pushing, and an entry is committed after they were sent. Their
    operation times must be those of what was committed, not of what was applied: on 4.4 and 5.0 this had not been
    checked."""
    members = start_replica_set(2, enable_test_commands=True)
    with MongoClient[Any](members.uri) as client, closing(MongodSource(members.uri, pushed=True)) as source:
        collection = client["committed_late"].get_collection("c", write_concern=WriteConcern("majority"))
        collection.insert_one({"_id": 0})
        weak = collection.with_options(write_concern=WriteConcern(1))
        look, written = source._newest, list[object]()

        def late() -> Any:
            cursor = source._tailing
            if cursor is None or not cursor.is_pushed or written:
                return look()
            with (
                stopped_replication(members),
                closing(cursor.pushed_socket() or pytest.fail("nothing is pushed")) as view,
            ):
                written.append(weak.insert_one({"_id": 1}).inserted_id)
                begun = waiting_bytes(view)
                eventually(lambda: waiting_bytes(view) > begun + 2000, "several replies are pushed")
            collection.insert_one({"_id": 2})  # this commits the one before it too
            return look()

        start = source.newest()
        monkeypatch.setattr(source, "_newest", late)
        nothing_is_promised_before_it_is_given(source, start, collection.full_name)
        assert written
