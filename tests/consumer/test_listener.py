"""Listeners on a real replica set: every change, in order, from the committed position on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tailrace
from tailrace.consumer import Change, HandlerFailed, LeaseLost, Listener, MongoLeaseStore
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError

pytestmark = pytest.mark.mongod


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client, the database of this test, and its lease store."""
    name = f"consumer_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        database = client[name]
        yield client, database, MongoLeaseStore(database["leases"])
        client.drop_database(name)


def run_until(listener: Listener, ended: threading.Event, timeout: float = 300) -> None:
    with listener:
        assert ended.wait(timeout), "the listener has not come so far"


def collect(seen: list[Any], count: int) -> tuple[Any, threading.Event]:
    ended = threading.Event()

    def handle(change: Change) -> None:
        seen.append((change.operation_type, (change.document_key or {}).get("_id")))
        if len(seen) >= count:
            ended.set()

    return handle, ended


def test_each_change_is_handled_once_across_restarts(shop: Any) -> None:
    client, database, store = shop
    database.orders.insert_many([{"_id": number} for number in range(5)])
    watched = client[database.name]["orders"]
    seen: list[Any] = []
    handle, ended = collect(seen, 5)
    run_until(Listener(watched, handle, resource="orders", store=store), ended)
    database.orders.delete_one({"_id": 3})
    handle, ended = collect(seen, 6)
    run_until(Listener(watched, handle, resource="orders", store=store), ended)
    assert seen == [("insert", number) for number in range(5)] + [("delete", 3)]
    lease = store.read("orders")
    assert lease.owner is None
    assert lease.version == 2


def test_the_position_stays_before_a_change_whose_handler_raises(shop: Any) -> None:
    client, database, store = shop
    database.orders.insert_many([{"_id": number} for number in range(3)])
    watched = client[database.name]["orders"]
    seen: list[Any] = []

    def fails_at_the_second(change: Change) -> None:
        if change.document_key == {"_id": 1}:
            raise RuntimeError("no")
        seen.append(change.document_key)

    with pytest.raises(HandlerFailed, match="RuntimeError"):
        Listener(watched, fails_at_the_second, resource="orders", store=store).run()
    assert seen == [{"_id": 0}]
    rest: list[Any] = []
    handle, ended = collect(rest, 2)
    run_until(Listener(watched, handle, resource="orders", store=store), ended)
    assert rest == [("insert", 1), ("insert", 2)]


def test_a_transaction_commits_the_position_with_the_handler_s_writes(shop: Any) -> None:
    client, database, store = shop
    database.create_collection("copies")
    database.orders.insert_many([{"_id": number} for number in range(3)])
    ended = threading.Event()

    def handle(change: Change) -> None:
        with change.transaction() as session:
            change.fence.bound_to(session).insert_one(database.copies, dict(change.full_document or {}))
        if change.document_key == {"_id": 2}:
            ended.set()

    run_until(Listener(client[database.name]["orders"], handle, resource="orders", store=store), ended)
    assert [found["_id"] for found in database.copies.find(sort=[("_id", 1)])] == [0, 1, 2]
    assert database.copies.find_one({"_id": 0})["_fence"] == {"orders": 1}


def test_a_lease_that_is_taken_stops_the_handler_s_world(shop: Any) -> None:
    client, database, store = shop
    database.orders.insert_one({"_id": 1})
    taken, refused, ended = threading.Event(), [], threading.Event()

    def handle(change: Change) -> None:
        if taken.is_set():
            ended.set()
            return
        store.revoke("orders")
        taken.set()
        try:
            with change.transaction():
                pass
        except LeaseLost as error:
            refused.append(error)
            raise

    listener = Listener(client[database.name]["orders"], handle, resource="orders", store=store)
    run_until(listener, ended)
    assert len(refused) == 1
    assert listener.statistics.leases_lost == 1
    assert store.read("orders").version == 2


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_position_is_not_continued_on_another_deployment_of_the_same_name(
    shop: Any, start_replica_set: Callable[..., ReplicaSet], partitions: int
) -> None:
    """Leases may be kept in another deployment than the watched one, and a position does not say which deployment it is
    from: any deployment accepted a time or a high-water mark. No test had a second deployment."""
    client, database, store = shop
    other = start_replica_set()
    database.orders.insert_one({"_id": 1})
    seen: list[Any] = []
    handle, ended = collect(seen, 1)
    options: dict[str, Any] = {"resource": "orders", "store": store, "partitions": partitions, "lease_seconds": 2}
    run_until(Listener(client[database.name]["orders"], handle, **options), ended)
    with tailrace.connect(other.uri) as elsewhere:
        elsewhere[database.name]["orders"].insert_one({"_id": 2})
        listener = Listener(elsewhere[database.name]["orders"], handle, **options)
        with pytest.raises(OtherHistoryError, match="the committed position is of another deployment"):
            listener.run()
    assert seen == [("insert", 1)]
    database.orders.insert_one({"_id": 3})
    handle, ended = collect(seen, 2)
    run_until(Listener(client[database.name]["orders"], handle, **options), ended)
    assert seen == [("insert", 1), ("insert", 3)]
