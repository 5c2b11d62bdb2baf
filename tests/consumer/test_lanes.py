"""Lanes on a real replica set: order in each document, barriers, several listeners, changes of their number."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tailrace
from tailrace.act.consumer import lane_queue
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.consumer import Change, Fence, Fenced, HandlerFailed, Listener, MongoLeaseStore
from tailrace.embedded import ReplicaSet
from tailrace.errors import StreamInvalidated
from tests.consumer.shops import begin_now

pytestmark = pytest.mark.mongod

WAIT_S = 300.0


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client, the database of this test, and a lease store in another."""
    name = f"lanes_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield client, client[name], MongoLeaseStore(client[f"{name}_leases"]["leases"])
        client.drop_database(name)
        client.drop_database(f"{name}_leases")


def eventually(holds: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, f"still waiting: {what}"
        time.sleep(0.02)


class Seen:
    """What handlers saw: each change with the owner that handled it. Thread-safe."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, Any, Any, str]] = []
        self._lock = threading.Lock()

    def handler(self, who: str) -> Callable[[Change], None]:
        def handle(change: Change) -> None:
            key = (change.document_key or {}).get("_id")
            number = (change.full_document or change.event.get("updateDescription", {}).get("updatedFields", {})).get(
                "n"
            )
            with self._lock:
                self.changes.append((change.operation_type, key, number, who))

        return handle

    def numbers(self) -> dict[Any, list[int]]:
        found = defaultdict(list)
        for operation, key, number, _ in list(self.changes):
            if operation in ("insert", "update"):
                found[key].append(number)
        return dict(found)


def write_rounds(collection: Any, rounds: range, keys: int = 12) -> None:
    """One change of each document in each round; the documents have fields named like ours."""
    for n in rounds:
        for key in range(keys):
            ours = {"n": n, "token": {"_data": "x"}, "version": -n, "lane": 3, "position": 1, "documentKey": {"_id": 0}}
            collection.update_one({"_id": key}, {"$set": ours}, upsert=True)


def every_round(rounds: int, keys: int = 12) -> dict[int, list[int]]:
    return {key: list(range(rounds)) for key in range(keys)}


def listen(shop: Any, seen: Seen, who: str, partitions: int, **options: Any) -> Listener:
    client, database, store = shop
    options = {"lease_seconds": 2.0, "resource": "orders", "store": store, **options}
    return Listener(client[database.name]["orders"], seen.handler(who), partitions=partitions, **options)


@pytest.mark.parametrize("commit_every", [1, 10])
def test_lanes_handle_nothing_from_after_an_invalidate_before_the_listener_ends(shop: Any, commit_every: int) -> None:
    """Three of four lanes took the end of the stream for a failure that passes, and went on. Earlier tests wrote
    nothing after the drop."""
    seen, orders = Seen(), shop[1].orders
    begin_now(shop[2], shop[0])
    orders.insert_many([{"_id": key, "n": 1} for key in range(20)])
    orders.drop()
    orders.insert_many([{"_id": key, "n": 2} for key in range(20)])
    with pytest.raises(StreamInvalidated):
        listen(shop, seen, "a", 4, commit_every=commit_every).run()
    assert [number for _, _, number, _ in seen.changes if number == 2] == []
    with listen(shop, seen, "b", 4, commit_every=commit_every):
        eventually(lambda: len(seen.changes) >= 42, "the next run's")
    assert seen.numbers() == {key: [1, 2] for key in range(20)}


def holders(store: MongoLeaseStore) -> dict[str, int]:
    """How many lanes of the present generation each owner holds."""
    record = store.read("orders")
    if record is None or not LanePlan.is_plan(record.position):
        return {}
    plan = LanePlan.from_document(record.position or {}, "orders")
    found: dict[str, int] = defaultdict(int)
    for lease in store.leases():
        if lease.resource.startswith(f"orders/{plan.generation}.") and lease.owner is not None:
            found[lease.owner] += 1
    return dict(found)


def test_four_lanes_keep_the_order_of_each_document(shop: Any) -> None:
    seen = Seen()
    write_rounds(shop[1].orders, range(20))
    listener = listen(shop, seen, "a", 4, commit_every=10)
    with listener:
        write_rounds(shop[1].orders, range(20, 30))
        eventually(lambda: len(seen.changes) >= 360, "all changes")
    assert seen.numbers() == every_round(30)
    assert listener.statistics.handled == 360
    with listen(shop, seen, "b", 4):
        shop[1].orders.insert_one({"_id": 99, "n": 0})
        eventually(lambda: 99 in seen.numbers(), "the next run")
    assert len(seen.changes) == 361, "the next run began where the first one had ended"


def test_lanes_are_shared_among_listeners_that_come_and_go(shop: Any) -> None:
    seen, store = Seen(), shop[2]
    first, second, third = (listen(shop, seen, who, 6, owner=who) for who in "abc")
    with first:
        eventually(lambda: holders(store) == {"a": 6}, "six lanes of one")
        with second, third:
            write_rounds(shop[1].orders, range(10))
            eventually(lambda: holders(store) == {"a": 2, "b": 2, "c": 2}, "two lanes each")
            write_rounds(shop[1].orders, range(10, 20))
            eventually(lambda: len(seen.changes) >= 240, "all changes")
        eventually(lambda: holders(store) == {"a": 6}, "six lanes of one again")
    assert seen.numbers() == every_round(20), "handed over in order, nothing lost, nothing handled again"
    assert holders(store) == {}
    assert {who for *_, who in seen.changes} == {"a", "b", "c"}


def test_their_number_changes_under_listeners_that_were_told_different_ones(shop: Any) -> None:
    seen, store = Seen(), shop[2]
    listeners = [listen(shop, seen, f"{place}", lanes) for place, lanes in enumerate((4, 6, 1, 3))]

    def lanes() -> int:
        record = store.read("orders")
        return record.position.get("lanes", 0) if record is not None and record.position is not None else 0

    for place, listener in enumerate(listeners):
        write_rounds(shop[1].orders, range(5 * place, 5 * place + 5))
        listener.start()
        eventually(lambda place=place: lanes() == (4, 6, 1, 3)[place], "the new number")
    write_rounds(shop[1].orders, range(20, 25))
    eventually(lambda: len(seen.changes) >= 25 * 12, "all changes")
    for listener in listeners:
        listener.stop()
    assert all(listener.join(WAIT_S) for listener in listeners)
    assert seen.numbers() == every_round(25)


def test_a_listener_without_partitions_hands_its_place_over_and_gets_it_back(shop: Any) -> None:
    seen = Seen()
    for place, partitions in enumerate((1, 4, 1)):
        write_rounds(shop[1].orders, range(5 * place, 5 * place + 5))
        with listen(shop, seen, f"{place}", partitions):
            eventually(lambda place=place: len(seen.changes) >= (place + 1) * 60, "all changes")
    assert seen.numbers() == every_round(15)


def test_ddl_is_a_barrier_across_lanes_and_listeners(shop: Any) -> None:
    """The change is handled once: after everything that came before it, and before everything after it."""
    client, database, store = shop
    seen = Seen()
    options = {"resource": "orders", "store": store, "lease_seconds": 2.0, "partitions": 4}
    first, second = (Listener(client[database.name], seen.handler(who), **options) for who in "ab")
    for n in range(3):
        write_rounds(database.orders, range(10 * n, 10 * n + 10))
        database.orders.drop()
    with first, second:
        for n in range(3, 5):
            write_rounds(database.orders, range(10 * n, 10 * n + 10))
            database.orders.rename("old")
            database.old.drop()
        eventually(lambda: len(seen.changes) >= 50 * 12 + 3 + 4, "all changes")
    parts: list[list[int]] = [[]]
    for operation, _, number, _ in seen.changes:
        if operation in ("drop", "rename"):
            parts.append([])
        else:
            parts[-1].append(number)
    expected = [sorted([*range(10 * n, 10 * n + 10)] * 12) for n in range(5)]
    assert [sorted(part) for part in parts] == [*expected[:4], [], expected[4], [], []]


def test_an_invalidation_ends_or_resumes_all_lanes(shop: Any) -> None:
    seen = Seen()
    begin_now(shop[2], shop[0])
    write_rounds(shop[1].orders, range(3))
    shop[1].orders.drop()
    with pytest.raises(StreamInvalidated):
        listen(shop, seen, "a", 4).run()
    assert [operation for operation, *_ in seen.changes[-2:]] == ["drop", "invalidate"]
    assert seen.numbers() == every_round(3)
    write_rounds(shop[1].orders, range(3, 6))
    with listen(shop, seen, "b", 4, on_invalidate="resume"):
        eventually(lambda: len(seen.changes) >= 74, "what was written after the invalidation")
        shop[1].orders.drop()
        write_rounds(shop[1].orders, range(6, 8))
        eventually(lambda: len(seen.changes) >= 100, "what was written after the second")
    assert seen.numbers() == every_round(8)


def test_a_lane_without_changes_moves_with_the_others(shop: Any) -> None:
    """Otherwise its position would fall off the oplog."""
    seen, store = Seen(), shop[2]
    times: dict[str, str] = {}
    with listen(shop, seen, "a", 4, commit_idle=0.2):
        for n in range(1000):
            shop[1].orders.update_one({"_id": 1}, {"$set": {"n": n}}, upsert=True)
            time.sleep(0.02)
            times = {
                lease.resource: lease.position["token"]["_data"][2:18]
                for lease in store.leases()
                if "/1." in lease.resource and lease.position is not None and "token" in lease.position
            }
            if n > 10 and len(times) == 4:
                break
    assert len(times) == 4


def test_a_lane_that_is_held_up_holds_no_other(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_queue.LaneQueue.__init__, "__kwdefaults__", {"events": 5, "size": 1 << 20})
    free, seen = threading.Event(), Seen()
    handle = seen.handler("a")

    def held_up(change: Change) -> None:
        if change.document_key == {"_id": 0}:
            free.wait(WAIT_S)
        handle(change)

    client, database, store = shop
    write_rounds(database.orders, range(40))
    with Listener(client[database.name]["orders"], held_up, resource="orders", store=store, partitions=4):
        others = [key for key in range(12) if key % 12]
        eventually(
            lambda: sum(seen.numbers().get(key) == list(range(40)) for key in others) >= 6, "the lanes beside it"
        )
        assert 0 not in seen.numbers()
        free.set()
        eventually(lambda: len(seen.changes) >= 480, "the lane that was held up")
        write_rounds(database.orders, range(40, 50))
        eventually(lambda: len(seen.changes) >= 600, "all together")
    assert seen.numbers() == every_round(50)


def test_a_handler_that_raises_ends_all_lanes_before_its_change(shop: Any) -> None:
    seen = Seen()
    handle = seen.handler("a")

    def fails(change: Change) -> None:
        updated = change.event.get("updateDescription", {}).get("updatedFields", {})
        if change.document_key == {"_id": 5} and updated.get("n") == 5:
            raise RuntimeError("no")
        handle(change)

    client, database, store = shop
    write_rounds(database.orders, range(10))
    watched = client[database.name]["orders"]
    with pytest.raises(HandlerFailed, match="RuntimeError"):
        Listener(watched, fails, resource="orders", store=store, partitions=4).run()
    assert holders(store) == {}
    with listen(shop, seen, "b", 4):
        eventually(lambda: len(seen.changes) >= 120, "the next run")
    assert seen.numbers() == every_round(10)


def test_lanes_share_a_target_and_an_older_generation_is_shut_out(shop: Any) -> None:
    """Lanes have versions of their own: with one name in the fence for all, one lane would shut out the others."""
    client, database, store = shop
    fences: dict[str, Fence] = {}
    seen = Seen()

    def total(change: Change) -> None:
        change.fence.update_one(database.totals, {"_id": "all"}, {"$inc": {"n": 1}}, upsert=True)
        fences.setdefault(change.resource, change.fence)
        seen.handler("a")(change)

    watched = client[database.name]["orders"]
    write_rounds(database.orders, range(5))
    with Listener(watched, total, resource="orders", store=store, partitions=4):
        eventually(lambda: len(seen.changes) >= 60, "all changes")
    assert database.totals.find_one({"_id": "all"})["n"] == 60
    stale = next(iter(fences.values()))
    with listen(shop, seen, "b", 6):
        eventually(lambda: store.read("orders").position["generation"] == 2, "the next generation")
    plan = LanePlan.from_document(store.read("orders").position, "orders")
    newer = Fence("orders/5", plan.fencing_token(1), above={"orders": plan.fencing_token(0)})
    newer.update_one(database.totals, {"_id": "all"}, {"$inc": {"n": 1}})
    stale._check = lambda: None  # like a process that has not noticed
    with pytest.raises(Fenced):
        stale.update_one(database.totals, {"_id": "all"}, {"$inc": {"n": 1}})
    assert database.totals.find_one({"_id": "all"})["n"] == 61
