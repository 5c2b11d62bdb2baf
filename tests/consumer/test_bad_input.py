"""Handlers that raise, hang or fork, two listeners under one id, positions that do not fit, history that is lost: a
clear error each, and nothing lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pymongo
import pytest
from bson.timestamp import Timestamp

import tailrace
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.consumer import (
    Change,
    Fence,
    Fenced,
    HandlerFailed,
    HandlerForked,
    Lease,
    LeaseDocumentError,
    LeaseLost,
    Listener,
    MongoLeaseStore,
    OwnerNotUnique,
)
from tailrace.core.event.resume_token import ResumeToken
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost, StreamInvalidated, TailraceError, UsageError
from tests.consumer.shops import until

pytestmark = pytest.mark.mongod


class Shop:
    """A database of its own: orders that are watched, and leases."""

    def __init__(self, client: Any, name: str) -> None:
        self.database = client[name]
        self.orders = self.database["orders"]
        self.store = MongoLeaseStore(self.database["leases"])
        self.watched = client[name]["orders"]
        self.client = client

    def listener(self, handler: Any, **options: Any) -> Listener:
        return Listener(self.watched, handler, **{"resource": "orders", "store": self.store, **options})

    def handled(self, count: int, **options: Any) -> list[Any]:
        """The keys of the next ``count`` changes, as a listener of its own handles them."""
        seen: list[Any] = []

        def handle(change: Change) -> None:
            seen.append((change.operation_type, (change.document_key or {}).get("_id")))
            if len(seen) >= count:
                listener.stop()

        listener = self.listener(handle, **options)
        listener.run()
        return seen


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Shop]:
    name = f"bad_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        shop = Shop(client, name)
        shop.database.create_collection("orders")
        yield shop
        client.drop_database(name)


def test_a_handler_that_raises_is_tried_again_as_often_as_said_then_asked_about(shop: Shop) -> None:
    shop.orders.insert_many([{"_id": number} for number in range(3)])
    asked: list[Any] = []
    tries: list[Any] = []

    def handle(change: Change) -> None:
        tries.append(change.document_key["_id"])  # type: ignore[index]
        if change.document_key == {"_id": 1}:
            raise ValueError("poison")
        if change.document_key == {"_id": 2}:
            listener.stop()

    def judge(change: Change, error: Exception, attempt: int) -> Any:
        asked.append((change.message_id, str(error), attempt))
        return "skip"

    listener = shop.listener(handle, retries=2, on_error=judge)
    listener.run()
    assert tries == [0, 1, 1, 1, 2]
    assert [(error, attempt) for _, error, attempt in asked] == [("poison", 3)]
    assert listener.statistics.skipped == 1
    assert listener.statistics.failures == 3
    assert listener.statistics.handled == 2


def test_an_error_policy_that_answers_nonsense_stops_the_listener_before_the_change(shop: Shop) -> None:
    shop.orders.insert_one({"_id": 1})

    def handle(change: Change) -> None:
        raise ValueError

    with pytest.raises(UsageError, match="'perhaps'"):
        shop.listener(handle, on_error=lambda *_: "perhaps").run()
    assert shop.handled(1) == [("insert", 1)]


def test_a_handler_that_hangs_gives_its_lease_to_others_and_can_do_nothing_more(shop: Shop) -> None:
    shop.orders.insert_one({"_id": 1})
    shop.database.copies.insert_one({"_id": 1})
    release, refused, begun = threading.Event(), [], threading.Event()

    def hangs(change: Change) -> None:
        begun.set()
        assert release.wait(300)
        for attempt in (
            lambda: change.fence.update_one(shop.database.copies, {"_id": 1}, {"$set": {"by": "late"}}),
            lambda: change.transaction().__enter__(),
        ):
            with pytest.raises(LeaseLost, match="handler has been at work") as raised:
                attempt()
            refused.append(raised.value)
        first.stop()

    first = shop.listener(hangs, handler_timeout=0.3)
    with first:
        assert begun.wait(300), "else the other one may be the first"
        assert shop.handled(1, lease_seconds=1) == [("insert", 1)]  # another listener goes on
        release.set()
    assert len(refused) == 2
    assert first.statistics.leases_lost == 1
    assert shop.database.copies.find_one() == {"_id": 1}


def test_a_child_that_the_handler_forked_does_not_go_on_with_the_listener(shop: Shop) -> None:
    shop.orders.insert_many([{"_id": 1}, {"_id": 2}])
    reader, writer = os.pipe()
    children: list[int] = []

    def forks(change: Change) -> None:
        child = os.fork()
        if child == 0:
            return  # as a handler that forgets os._exit() does
        children.append(child)
        listener.stop()

    listener = shop.listener(forks)
    parent = os.getpid()
    try:
        listener.run()
    except BaseException as error:
        if os.getpid() != parent:
            os.write(writer, f"{isinstance(error, HandlerForked)} {error}".encode())
            os._exit(0)
        raise
    os.close(writer)
    os.waitpid(children[0], 0)
    with os.fdopen(reader) as said:
        assert said.read().startswith("True the handler of 'orders' forked")
    assert listener.statistics.handled == 1
    assert shop.handled(1) == [("insert", 2)]


def test_two_listeners_under_one_id_are_told_apart(shop: Shop) -> None:
    """The first finds out while the second holds the lease. If the second had released it, the first would go on from
    there, as any listener does."""
    shop.orders.insert_one({"_id": 1})
    begun, go_on = threading.Semaphore(0), [threading.Event(), threading.Event()]

    def waits_for(event: threading.Event) -> Any:
        def handle(change: Change) -> None:
            begun.release()
            assert event.wait(300)

        return handle

    first, second = (shop.listener(waits_for(event), owner="worker") for event in go_on)
    for listener in (first, second):
        listener.start()
        assert begun.acquire(timeout=300)
    go_on[0].set()
    with pytest.raises(OwnerNotUnique, match="same owner id 'worker'"):
        first.join()
    second.stop()
    go_on[1].set()
    assert second.join()
    assert second.statistics.handled == 1


@pytest.mark.parametrize("kind", [asyncio.CancelledError, concurrent.futures.CancelledError])
def test_a_handler_that_ends_with_a_cancellation_has_failed_as_with_any_error(shop: Shop, kind: type[Any]) -> None:
    """asyncio's CancelledError is no Exception: the error policy was not asked, and run() ended as if somebody had
    cancelled it."""
    shop.orders.insert_many([{"_id": 1}, {"_id": 2}])
    asked: list[str] = []

    def handle(change: Change) -> None:
        if change.document_key == {"_id": 1}:
            raise kind
        listener.stop()

    def judge(_change: Change, error: Exception, _attempt: int) -> Any:
        asked.append(type(error).__name__)
        return "skip"

    listener = shop.listener(handle, on_error=judge)
    listener.run()
    assert asked == ["HandlerCancelled" if kind is asyncio.CancelledError else "CancelledError"]


def test_two_processes_with_one_id_and_lanes_are_told(shop: Shop) -> None:
    """They took leases from each other for ever. The test above has no lanes."""
    shop.orders.insert_many([{"_id": number} for number in range(8)])
    seen: list[int] = []

    def handle(change: Change) -> None:
        seen.append(change.document_key["_id"])  # type: ignore[index]

    both = [shop.listener(handle, owner="worker", partitions=3, lease_seconds=1) for _ in range(2)]
    try:
        for one in both:
            one.start()
            until(lambda: len(set(seen)) == 8 or any(one._error for one in both))
        until(lambda: any(one._error for one in both))
    finally:
        for one in both:
            one.stop()
    ended = [raised(one) for one in both]
    assert any(isinstance(error, OwnerNotUnique) for error in ended)
    assert all(error is None or isinstance(error, OwnerNotUnique) for error in ended)


def raised(listener: Listener) -> BaseException | None:
    """The error that ended it."""
    try:
        assert listener.join(300)
    except TailraceError as error:
        return error
    return None


def test_a_token_of_another_collection_is_an_error_that_keeps_the_position(shop: Shop) -> None:
    """As with the server's stream: the token's event is looked for, and is not found (280) as soon as a later event
    comes."""
    shop.database.customers.insert_one({"_id": 1})
    other = Listener(
        shop.client[shop.database.name]["customers"], lambda change: other.stop(), resource="orders", store=shop.store
    )
    other.run()
    position = shop.store.read("orders").position  # type: ignore[union-attr]
    assert position["token"]  # type: ignore[index]
    shop.orders.insert_one({"_id": 1})
    with pytest.raises(TailraceError, match="resume"):
        shop.listener(lambda change: None).run()
    record = shop.store.read("orders")
    assert record is not None
    assert record.position == position
    assert record.owner is None


@pytest.mark.parametrize(
    "position",
    [
        {"token": 5},
        {"token": {"_data": "zz"}},
        {},
        {"at": 7},
        {"token": {"_data": "82"}, "at": Timestamp(1, 1)},
        {"x": 1},
    ],
)
def test_a_position_that_was_edited_into_something_else_is_an_error(shop: Shop, position: Any) -> None:
    lease = shop.store.acquire("orders", "a", 60)
    assert lease is not None
    shop.store.commit(lease, position, 60)
    shop.store.release(lease)
    with pytest.raises(LeaseDocumentError, match="the position in the lease on 'orders' cannot be read"):
        shop.listener(lambda change: None).run()
    assert shop.store.read("orders").position == position  # type: ignore[union-attr]


def lose_history(shop: Shop) -> None:
    """Write until the oplog no longer reaches back to this moment."""
    until, beyond = time.monotonic() + 240, shop.client.admin.command("ping")["operationTime"]
    while shop.client["local"]["oplog.rs"].find_one(sort=[("$natural", 1)])["ts"] <= beyond:
        assert time.monotonic() < until, "the oplog is not truncated"
        for _ in range(5):
            shop.database["fill"].insert_many([{"pad": os.urandom(50_000)} for _ in range(20)])
        time.sleep(0.3)


def test_lost_history_ends_the_listener_unless_the_gap_is_accepted_and_written_down(
    start_replica_set: Callable[..., ReplicaSet],
) -> None:
    replica_set = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    with tailrace.connect(replica_set.uri) as client:
        shop = Shop(client, "lost")
        shop.orders.insert_one({"_id": 1})
        assert shop.handled(1) == [("insert", 1)]
        before = shop.store.read("orders").position  # type: ignore[union-attr]
        stale = lanes_work(shop)
        lanes_that_accept_gaps(shop, range(10))
        lose_history(shop)
        lanes_copy_again(shop, stale)
        lanes_that_accept_gaps(shop, range(10, 20))
        with pytest.raises(ChangeStreamHistoryLost, match="on_history_lost"):
            shop.listener(lambda change: None).run()
        assert shop.store.read("orders").position == before  # type: ignore[union-attr]
        shop.orders.insert_one({"_id": 2})
        assert shop.handled(1, on_history_lost="gap") == [("insert", 2)]
        position = shop.store.read("orders").position  # type: ignore[union-attr]
        time_before = ResumeToken.parse(before["token"]).cluster_time  # type: ignore[index]
        assert [gap["from"] for gap in position["gaps"]] == [time_before.to_timestamp()]  # type: ignore[index]
        assert position["gaps"][0]["to"] > time_before.to_timestamp()  # type: ignore[index]


def lanes_that_accept_gaps(shop: Shop, keys: range) -> None:
    """Such lanes ended with "cannot tell where the oldest entry of LaneWatchable is". Each lane has its own gap."""
    seen: list[Any] = []

    def handle(change: Change) -> None:
        if change.operation_type == "insert":
            seen.append((change.document_key or {})["_id"])

    name = f"{shop.database.name}_gaps"
    options: dict[str, Any] = {"store": shop.store, "partitions": 2, "lease_seconds": 10, "on_history_lost": "gap"}
    first = keys[0] == 0
    listener = Listener(shop.client[name]["things"], handle, resource="gaps", **options)
    if first:
        shop.client[name].things.insert_many([{"_id": key} for key in keys])
    with listener:
        if not first:
            until(lambda: listener.statistics.gaps == 2 or listener._error)
            shop.client[name].things.insert_many([{"_id": key} for key in keys])
        until(lambda: set(seen) == set(keys) or listener._error)
    assert sorted(seen) == [*keys]
    for lane in range(2):
        position = shop.store.read(f"gaps/1.{lane}").position  # type: ignore[union-attr]
        assert len(position.get("gaps", [])) == (0 if first else 1)  # type: ignore[union-attr]


def lanes_of_items(shop: Shop, seen: list[Any]) -> Listener:
    """Two lanes that keep a fenced copy of ``items``."""

    def copy(change: Change) -> None:
        key = change.document_key
        assert key is not None
        document = {**(change.full_document or {}), "by": change.resource}
        change.fence.replace_one(shop.database["copies"], key, document, upsert=True)
        seen.append((key["_id"], change.operation_type, change.fence))

    return Listener(
        shop.client[shop.database.name]["items"],
        copy,
        resource="items",
        store=shop.store,
        partitions=2,
        lease_seconds=10,
        full_document="updateLookup",
        on_history_lost="snapshot",
    )


def lanes_work(shop: Shop) -> Fence:
    """Lanes handle thirty inserts and end; a fence that one of them had."""
    shop.database.items.insert_many([{"_id": number, "v": 0} for number in range(30)])
    seen: list[Any] = []
    with lanes_of_items(shop, seen):
        until(lambda: len(seen) >= 30)
    shop.database.items.update_many({}, {"$inc": {"v": 1}})  # what is lost
    fence: Fence = seen[0][2]
    return fence


def lanes_copy_again(shop: Shop, stale: Fence) -> None:
    """The listeners of two processes find that their lanes' history is lost: everything is copied once, and the lanes
    go on from there. The policy was refused with partitions."""
    copies = shop.database["copies"]
    seen: list[Any] = []
    listeners = [lanes_of_items(shop, seen).start() for _ in range(2)]
    try:
        until(lambda: copies.count_documents({"v": 1}) == 30 or any(one._error for one in listeners))
        shop.database.items.update_many({}, {"$inc": {"v": 1}})
        until(lambda: copies.count_documents({"v": 2}) == 30 or any(one._error for one in listeners))
    finally:
        for one in listeners:
            one.stop()
    assert all(one.join(300) for one in listeners)
    for number in range(30):
        operations = [operation for key, operation, _ in seen if key == number]
        assert operations == ["snapshot", "update"]
    assert {found["by"] for found in copies.find()} == {"items/0", "items/1"}
    plan = LanePlan.from_document(shop.store.read("items").position or {}, "items")  # type: ignore[union-attr]
    assert (plan.lanes, plan.generation, plan.beginning, plan.next_lanes) == (2, 3, None, None)
    stale._check = lambda: None  # as of a process that was stopped before the copy
    with pytest.raises(Fenced):
        stale.update_one(copies, {"by": stale.resource}, {"$set": {"v": 0}})


def test_a_dropped_collection_ends_the_listener_and_the_next_run_goes_on_after_it(shop: Shop) -> None:
    shop.orders.insert_one({"_id": 0})
    assert shop.handled(1) == [("insert", 0)]
    shop.orders.insert_one({"_id": 1})
    shop.orders.drop()
    seen: list[str] = []
    with pytest.raises(StreamInvalidated, match="dropped or renamed"):
        shop.listener(lambda change: seen.append(change.operation_type)).run()
    assert seen == ["insert", "drop", "invalidate"]
    shop.orders.insert_one({"_id": 2})
    assert shop.handled(1) == [("insert", 2)]


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_drop_from_before_the_listener_does_not_end_it_and_a_later_one_does(shop: Shop, partitions: int) -> None:
    """With start="oldest" it ended at its first start with StreamInvalidated, although the collection exists."""
    for number in range(2):
        shop.orders.insert_one({"_id": number})
        shop.orders.drop()
    shop.orders.insert_one({"_id": 2})
    seen: list[str] = []
    names = [("insert", 0), ("drop", None), ("invalidate", None), ("insert", 1), ("drop", None), ("invalidate", None)]
    if partitions == 1:  # another lane may have gone on by the time that one has stopped
        assert shop.handled(3) == names[:3]
        names = names[3:]
    assert shop.handled(len(names) + 1, partitions=partitions) == [*names, ("insert", 2)]
    shop.orders.drop()
    with pytest.raises(StreamInvalidated):
        shop.listener(lambda change: seen.append(change.operation_type), partitions=partitions).run()
    assert seen == ["drop", "invalidate"]


def test_a_renamed_collection_is_watched_by_its_name_if_so_told(shop: Shop) -> None:
    shop.orders.insert_one({"_id": 1})
    shop.orders.rename("old")
    shop.orders.insert_one({"_id": 2})
    seen = shop.handled(4, on_invalidate="resume")
    assert seen == [("insert", 1), ("rename", None), ("invalidate", None), ("insert", 2)]


def test_the_first_start_is_written_down_before_anything_happens(shop: Shop) -> None:
    """Figure 4a and 4b: what is written before the first listener, and between its start and its crash, is handled."""
    shop.orders.insert_one({"_id": 1})
    assert shop.handled(1) == [("insert", 1)]  # 4a
    quiet = shop.listener(lambda change: None, resource="from now", start="now")
    quiet.start()
    until = time.monotonic() + 300
    while (record := shop.store.read("from now")) is None or record.position is None:
        assert time.monotonic() < until
    shop.store.revoke("from now")  # as after a crash, long before its first change
    quiet.stop()
    quiet.join()
    shop.orders.insert_one({"_id": 2})
    assert shop.handled(1, resource="from now", start="now") == [("insert", 2)]  # 4b


def is_high_water(record: Lease | None) -> bool:
    position = record and record.position
    return bool(position and "token" in position and ResumeToken.parse(position["token"]).is_high_water_mark)


def test_a_quiet_stream_s_position_moves_on(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an event and after it. An earlier version of this test mistook a position before the event for one after
    it."""
    monkeypatch.setattr("tailrace.act.consumer.rules.commit_policy.CommitPolicy.is_due_when_quiet", lambda *_: True)
    monkeypatch.setattr("tailrace.act.consumer.rules.listener.ListenerLogic._may_mark", True)  # else once a minute
    seen: list[str] = []

    def handle(change: Change) -> None:
        seen.append(change.token["_data"])
        time.sleep(0.3)  # the position is still before the event

    def is_behind(place: str) -> bool:
        shop.database.others.insert_one({})
        record = shop.store.read("orders")
        return is_high_water(record) and record.position["token"]["_data"] > place  # type: ignore[union-attr, index]

    with shop.listener(handle):
        until(lambda: is_behind(""))
        shop.orders.insert_one({"_id": 1})
        until(lambda: seen and is_behind(seen[0]))
    assert is_high_water(shop.store.read("orders"))
    shop.orders.insert_one({"_id": 2})
    assert shop.handled(1) == [("insert", 2)]


def test_batched_commits_handle_again_what_was_not_committed(shop: Shop) -> None:
    shop.orders.insert_many([{"_id": number} for number in range(5)])
    seen: list[Any] = []

    def crashes_at_three(change: Change) -> None:
        seen.append(change.document_key["_id"])  # type: ignore[index]
        if seen[-1] == 3:
            shop.store.revoke("orders")  # nothing uncommitted counts any more
            listener.stop()

    listener = shop.listener(crashes_at_three, commit_every=3)
    listener.run()
    assert seen == [0, 1, 2, 3]
    assert shop.handled(2) == [("insert", 3), ("insert", 4)]


def test_a_target_with_a_newer_token_than_the_lease_in_force_is_an_error_that_says_so(shop: Shop) -> None:
    """As if the lease's record had been deleted: versions begin again, and every write would be refused for ever."""
    shop.orders.insert_one({"_id": 1})
    shop.database.copies.insert_one({"_id": 1, "_fence": {"orders": 99}})

    def handle(change: Change) -> None:
        change.fence.update_one(shop.database.copies, {"_id": 1}, {"$set": {"x": 1}})

    with pytest.raises(HandlerFailed, match="Was the lease's record deleted") as raised:
        shop.listener(handle).run()
    assert isinstance(raised.value.__cause__, Fenced)


WRONG: dict[str, dict[str, Any]] = {
    "commit_every": {"commit_every": 0},
    "commit_interval": {"commit_interval": -1},
    "start": {"start": "yesterday"},
    "on_history_lost": {"on_history_lost": "ignore"},
    "on_invalidate": {"on_invalidate": "ignore"},
    "on_error": {"on_error": "ignore"},
    "retries": {"retries": -1},
    "lease_seconds": {"lease_seconds": 0},
    "resume_after": {"resume_after": {"_data": "82"}},
    "resource": {"resource": ""},
    "owner": {"owner": ""},
    "top-level field": {"fence_field": "a.b"},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_that_cannot_be_is_refused_by_name(shop: Shop, name: str) -> None:
    def run() -> None:
        shop.orders.insert_one({"_id": 1})
        shop.listener(lambda change: listener_stop(), **WRONG[name]).run()

    def listener_stop() -> None:
        raise AssertionError("the listener began")

    with pytest.raises(UsageError, match=name):
        run()


def test_what_cannot_be_watched_or_called_is_refused(shop: Shop) -> None:
    with pytest.raises(UsageError, match="watches a client"):
        Listener("orders", lambda change: None, resource="r", store=shop.store)  # type: ignore[arg-type]
    # It used to end while it ran, with "cannot tell where the now entry of Collection is".
    plain = pymongo.MongoClient[Any](connect=False)
    with pytest.raises(UsageError, match="not PyMongo's own Collection"):
        Listener(plain.shop.orders, lambda change: None, resource="r", store=shop.store)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a function"):
        shop.listener("handle")
    listener = shop.listener(lambda change: None)
    listener.stop()
    listener.run()
    with pytest.raises(UsageError, match="runs once"):
        listener.run()
