"""Listeners that begin with the existing documents."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from bson.timestamp import Timestamp

import tailrace
from tailrace.consumer import Change, HandlerFailed, Listener, MongoLeaseStore
from tailrace.consumer.messages import ChangeMessages, MemoryPublisher, MessageRelay
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost
from tests.pace import BETWEEN_WRITES_S

pytestmark = pytest.mark.mongod


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"copying_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield client[name], MongoLeaseStore(client[f"{name}_leases"]["leases"])
        client.drop_database(name)
        client.drop_database(f"{name}_leases")


def run_until(listener: Listener, ended: threading.Event) -> None:
    with listener:
        assert ended.wait(300), "the listener has not come so far"


def test_what_is_there_comes_first_then_every_change_since(shop: Any) -> None:
    database, store = shop
    database.orders.insert_many([{"_id": number} for number in range(250)])
    seen: list[Any] = []
    ended = threading.Event()

    def handle(change: Change) -> None:
        seen.append((change.operation_type, change.document_key["_id"]))
        if len(seen) == 10:
            database.orders.insert_one({"_id": "later"})
        if seen[-1] == ("insert", "later"):
            ended.set()

    run_until(Listener(database.orders, handle, resource="orders", store=store, start="snapshot"), ended)
    copied = [id_ for kind, id_ in seen if kind == "snapshot"]
    assert set(copied) >= set(range(250))
    assert len(copied) == len(set(copied))
    assert seen[-1] == ("insert", "later")
    position = store.read("orders").position
    # The copy's place is gone, and the identity of the history has stayed. (It used to be lost at the end of the copy.)
    assert set(position) == {"token", "deployment", "entries"}


def test_a_listener_that_dies_again_and_again_while_it_copies_loses_nothing(shop: Any) -> None:
    """The state of the collection, as its handler keeps it, is the collection at the end."""
    database, store = shop
    database.orders.insert_many([{"_id": number, "n": 0} for number in range(400)])
    state: dict[Any, Any] = {}
    chosen = random.Random(4)
    stop, caught_up = threading.Event(), threading.Event()
    deaths: list[int] = []

    def write() -> None:
        writer = random.Random(5)
        while not stop.wait(BETWEEN_WRITES_S):
            number = writer.randrange(450)
            if writer.random() < 0.3:
                database.orders.delete_one({"_id": number})
            else:
                database.orders.update_one({"_id": number}, {"$inc": {"n": 1}}, upsert=True)

    def handle(change: Change) -> None:
        if chosen.random() < 0.01 and len(deaths) < 12:
            raise RuntimeError("dies")
        id_ = change.document_key["_id"]
        if change.operation_type == "delete" or change.full_document is None:
            state.pop(id_, None)
        else:
            state[id_] = change.full_document
        if id_ == "end":
            caught_up.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not caught_up.is_set():
            listener = Listener(
                database.orders,
                handle,
                resource="orders",
                store=store,
                start="snapshot",
                commit_every=chosen.choice([1, 10, 50]),
                full_document="updateLookup",
            )
            listener.start()
            if len(deaths) >= 12:
                stop.set()
                writer.join()
                database.orders.insert_one({"_id": "end"})
                assert caught_up.wait(300)
                listener.stop()
                listener.join()
                break
            with pytest.raises(HandlerFailed):
                listener.join(300)
            deaths.append(listener.statistics.handled)
    finally:
        stop.set()
        writer.join()
    assert state == {one["_id"]: one for one in database.orders.find()}


def test_the_pipeline_of_a_stream_is_that_of_its_snapshot_too(shop: Any) -> None:
    database, store = shop
    database.orders.insert_many([{"_id": number, "tier": number % 3} for number in range(30)])
    database.orders.insert_one({"_id": "last", "tier": 1})
    seen: list[Any] = []
    ended = threading.Event()

    def handle(change: Change) -> None:
        seen.append(change.document_key["_id"])
        if seen[-1] == "last":
            ended.set()

    pipeline = [{"$match": {"fullDocument.tier": 1}}]
    run_until(
        Listener(database.orders, handle, resource="orders", store=store, start="snapshot", pipeline=pipeline), ended
    )
    assert seen == [*range(1, 30, 3), "last"]


def test_an_empty_database_goes_straight_to_its_stream(shop: Any) -> None:
    database, store = shop
    seen: list[str] = []
    ended = threading.Event()

    def handle(change: Change) -> None:
        seen.append(change.operation_type)
        ended.set()

    with Listener(database, handle, resource="all", store=store, start="snapshot"):
        while (lease := store.read("all")) is None or lease.position is None or "snapshot" in lease.position:
            ended.wait(0.02)
        database.new.insert_one({"_id": 1})
        assert ended.wait(300)
    assert seen == ["insert"]


def test_lost_history_is_healed_by_another_snapshot(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oplog of a test does not lose history, so here the collection's ``watch`` claims it for an old time."""
    database, store = shop
    orders = database.orders
    orders.insert_many([{"_id": number} for number in range(5)])
    watch = orders.watch

    def watch_recent(*arguments: Any, **options: Any) -> Any:
        if options.get("start_at_operation_time") == Timestamp(1, 1):
            raise ChangeStreamHistoryLost("the oplog has gone on")
        return watch(*arguments, **options)

    monkeypatch.setattr(orders, "watch", watch_recent)
    lease = store.acquire("orders", "me", 30)
    store.commit(lease, {"at": Timestamp(1, 1)}, 30)
    store.release(store.read("orders"))
    with pytest.raises(ChangeStreamHistoryLost):
        Listener(orders, print, resource="orders", store=store).run()
    seen: list[Any] = []
    ended = threading.Event()

    def handle(change: Change) -> None:
        seen.append((change.operation_type, change.document_key["_id"]))
        if len(seen) == 5:
            ended.set()

    run_until(Listener(orders, handle, resource="orders", store=store, on_history_lost="snapshot"), ended)
    assert seen == [("snapshot", number) for number in range(5)]


def test_a_document_of_a_snapshot_has_a_message_id_of_its_own(shop: Any) -> None:
    database, store = shop
    database.orders.insert_many([{"_id": number} for number in range(5)])
    publisher = MemoryPublisher()
    relay = MessageRelay(publisher, ChangeMessages("orders"))
    ended = threading.Event()
    ids = []

    def handle(change: Change) -> None:
        relay(change)
        ids.append(change.message_id)
        if len(ids) == 5:
            ended.set()

    run_until(Listener(database.orders, handle, resource="orders", store=store, start="snapshot"), ended)
    assert [message.id for message in publisher.stored] == ids
    assert len(set(ids)) == 5
    assert [message.key for message in publisher.stored] == ["0", "1", "2", "3", "4"]
