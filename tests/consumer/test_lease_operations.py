"""What an operator does with leases while listeners run on a real replica set: every change is handled once, unless the
operator asked for something else."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from bson.timestamp import Timestamp

import tailrace
from tailrace.act.consumer.lease_operations import StillHeldError
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.cli.main import main
from tailrace.consumer import AsyncListener, Change, HandlerFailed, LeaseOperations, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import ServerError, UsageError

pytestmark = pytest.mark.mongod
#: An operation is carried out on each lane of a resource, or on itself where it has none: ``make test-landing`` has the
#: lanes here, and a resource without any in the tests that have no such parameter.
ONE_LANE = pytest.param(1, marks=pytest.mark.slow)


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline, "it has not come to that in five minutes"
        time.sleep(0.02)


class Shop:
    """A collection, what its listeners have handled, and the operator."""

    def __init__(self, uri: str, name: str, stack: ExitStack) -> None:
        self.uri = uri
        self.client = stack.enter_context(tailrace.connect(uri))
        self.database = self.client[name]
        self.orders = self.database.orders
        self.store = MongoLeaseStore(self.client[f"{name}_leases"]["leases"])
        self.where = f"{name}_leases.leases"
        self.operations = LeaseOperations(self.store, wait_seconds=120)
        self.handled: list[tuple[str, Any]] = []
        self.began = self.now()
        self.refuses: Any = None
        self.failing = ""
        self.letters = DeadLetters(self.database.letters)

    def now(self) -> Timestamp:
        return ClusterTime.from_timestamp(self.client.admin.command("ping")["operationTime"]).to_timestamp()

    def listener(self, owner: str, **options: Any) -> Listener:
        def handle(change: Change) -> None:
            key = (change.document_key or {}).get("_id")
            if key is not None and key == self.refuses:
                self.failing = change.resource
                raise ValueError("not this one")
            self.handled.append((owner, key))

        chosen = {"resource": "orders", "store": self.store, "lease_seconds": 2.0, **options}
        return Listener(self.orders, handle, owner=owner, **chosen)

    def write(self, *numbers: int) -> None:
        self.orders.insert_many([{"_id": number} for number in numbers])

    @property
    def counts(self) -> Counter[Any]:
        return Counter(key for _, key in self.handled)

    def owners(self, names: list[str] | None = None) -> set[str]:
        records = [self.store.read(name) for name in names or self.operations.find("orders").lanes]
        return {record.owner for record in records if record is not None and record.owner is not None}

    def cli(self, *words: str) -> int:
        return main(["leases", *words, "--uri", self.uri, "--store", self.where])


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Shop]:
    name = f"operator_{abs(hash(request.node.nodeid)) % 10**9}"
    with ExitStack() as stack:
        shop = Shop(replica_set.uri, name, stack)
        yield shop
        shop.client.drop_database(name)
        shop.client.drop_database(f"{name}_leases")


def begin(shop: Shop, listener: Listener) -> None:
    """Wait until the listener has handled something."""
    shop.write(0)
    until(lambda: shop.handled)
    assert listener.statistics.paused == 0


@pytest.mark.parametrize("partitions", [ONE_LANE, 3])
def test_a_paused_listener_finishes_what_it_has_in_hand_and_goes_on_when_it_may(
    shop: Shop, partitions: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (shop.listener(owner, partitions=partitions) for owner in ("first", "second"))
    with first, second:
        begin(shop, first)
        with caplog.at_level(logging.WARNING, "tailrace.consumer"):
            shop.operations.pause("orders")
            assert shop.owners() == set()
            shop.write(*range(1, 40))
            until(lambda: first.statistics.paused == second.statistics.paused == 1)
            time.sleep(3)  # longer than a lease: others would take it now
            assert shop.counts == {0: 1}
            assert caplog.text.count("orders: an operator paused it at") >= 2
            assert shop.operations.resume("orders")
            until(lambda: len(shop.counts) == 40)
            until(lambda: first.statistics.paused == second.statistics.paused == 0)
        assert "orders: it is no longer paused" in caplog.text
    assert set(shop.counts.values()) == {1}
    assert first.statistics.leases_lost == second.statistics.leases_lost == 0
    assert not shop.operations.resume("orders")


def test_a_listener_whose_handler_does_not_end_keeps_its_lease_until_that_is_taken_at_once(shop: Shop) -> None:
    busy, go = threading.Event(), threading.Event()

    def hangs(change: Change) -> None:
        busy.set()
        assert go.wait(300)
        shop.handled.append(("hangs", change.document_key["_id"]))

    with Listener(shop.orders, hangs, resource="orders", store=shop.store, owner="hangs"):
        until(lambda: shop.store.read("orders") and shop.store.read("orders").position)
        shop.write(1)
        assert busy.wait(300)
        before = shop.store.read("orders").position
        with pytest.raises(StillHeldError, match="hangs is still at work on a change of orders"):
            LeaseOperations(shop.store, wait_seconds=0.5).pause("orders")
        assert shop.owners() == {"hangs"}
        shop.operations.pause("orders", now=True)
        assert shop.owners() == set()
        go.set()
        until(lambda: shop.handled)
        time.sleep(0.5)
        assert shop.store.read("orders").position == before, "what was taken away is not committed"
        shop.operations.resume("orders")
        until(lambda: shop.counts == {1: 2})


@pytest.mark.parametrize("partitions", [ONE_LANE, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_lease_goes_to_whom_it_is_handed(shop: Shop, partitions: int) -> None:
    """In ten of ten attempts the previous owner took it back: it asks a moment after it has lost it. And if there are
    fewer lanes than listeners, a listener without a lane did not take what it was handed, and nobody else could: no
    test had so few lanes."""
    owners = ["host1-1-a", "host10-2-b", "host2-3-c"]
    listeners = {owner: shop.listener(owner, partitions=partitions) for owner in owners}
    with ExitStack() as stack:
        for listener in listeners.values():
            stack.enter_context(listener)
        begin(shop, listeners[owners[0]])
        until(shop.owners)
        for to in ("host10", "host1", "host2-3-c", "host1"):
            shop.operations.release("orders", to, 60)
            (wanted,) = [owner for owner in owners if owner == to or owner.startswith(f"{to}-")]
            until(lambda wanted=wanted: shop.owners() == {wanted} and len(held(shop)) == partitions)
        shop.operations.resume("orders")  # no lane is reserved for anybody any more
        shop.write(*range(1, 30))
        until(lambda: len(shop.counts) == 30)
    assert all(count <= 2 for count in shop.counts.values())


def held(shop: Shop) -> list[str]:
    records = [shop.store.read(name) for name in shop.operations.find("orders").lanes]
    return [record.resource for record in records if record is not None and record.owner is not None]


@pytest.mark.parametrize("partitions", [ONE_LANE, 2])
def test_an_absent_owner_does_not_leave_a_lease_without_one(shop: Shop, partitions: int) -> None:
    with shop.listener("first", partitions=partitions) as listener:
        begin(shop, listener)
        shop.operations.release("orders", "nobody", 2)
        assert held(shop) == []
        until(lambda: len(held(shop)) == partitions)
        shop.write(1)
        until(lambda: len(shop.counts) == 2)


@pytest.mark.by_turns
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("commit_every", [1, 10])
def test_a_position_is_set_back_and_ahead_while_listeners_run(shop: Shop, partitions: int, commit_every: int) -> None:
    options = {"partitions": partitions, "commit_every": commit_every}
    with shop.listener("first", **options) as first, shop.listener("second", **options):
        begin(shop, first)
        shop.write(*range(1, 20))
        between = shop.now()
        shop.write(*range(20, 40))
        until(lambda: len(shop.counts) == 40)
        target = StreamPosition(at=ClusterTime.from_timestamp(between).tick().to_timestamp())
        before = shop.operations.seek("orders", target)
        assert before is not None
        until(lambda: all(shop.counts[number] >= 2 for number in range(20, 40)))
        assert all(shop.counts[number] == 1 for number in range(20)), "nothing from before it"
        shop.operations.pause("orders")
        counts = shop.counts
        shop.write(*range(40, 50))
        after = shop.now()
        shop.operations.seek("orders", StreamPosition(at=ClusterTime.from_timestamp(after).tick().to_timestamp()))
        shop.operations.resume("orders")
        shop.write(*range(50, 60))
        until(lambda: all(shop.counts[number] for number in range(50, 60)))
    assert shop.counts.keys() == {*range(40), *range(50, 60)}
    assert all(shop.counts[number] == counts[number] for number in range(40))
    assert all(shop.counts[number] == 1 for number in range(50, 60))
    gaps = [
        gap for name in shop.operations.find("orders").lanes for gap in shop.store.read(name).position.get("gaps", [])
    ]
    # A lane that was set back with handled changes uncommitted has those on record too.
    assert any(gap["to"] > after for gap in gaps), "what was passed over is on record"


def test_a_place_that_the_oplog_does_not_reach_is_refused(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    with shop.listener("first") as listener:
        begin(shop, listener)
    newest = ClusterTime.from_timestamp(shop.now())
    before = shop.store.read("orders")
    past = StreamPosition(at=Timestamp(newest.seconds - 100, 1))
    with pytest.raises(UsageError, match="lies before the oldest entry of the oplog"):
        shop.operations.seek("orders", past, oldest=newest)
    assert shop.cli("seek", "orders", "--time", "2100-01-01T00:00:00Z") == 1
    assert "lies in the future" in capsys.readouterr().err
    assert shop.store.read("orders") == before
    token = (shop.store.read("orders").position or {})["token"]["_data"]
    assert shop.cli("seek", "orders", "--token", token) == 0
    assert f"moved orders to {ClusterTime(int(token[2:18], 16))}; it was at " in capsys.readouterr().out
    assert shop.store.read("orders").owner is None
    for wrong in ((), ("--time", "2026-01-01T00:00:00Z", "--token", token), ("--token", "82")):
        assert shop.cli("seek", "orders", *wrong) == 1
    assert shop.cli("seek", "nothing", "--token", token) == 1


@pytest.mark.parametrize("partitions", [1, 3])
def test_the_change_that_fails_again_and_again_is_left_out(
    shop: Shop, partitions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.refuses = 7
    options: dict[str, Any] = {"partitions": partitions, "commit_every": 5}
    listener = shop.listener("first", on_error=lambda change, error, attempt: "retry", **options)
    with listener:
        begin(shop, listener)
        shop.write(*range(1, 30))
        until(lambda: listener.statistics.failures > 3)
        where = f"{shop.database.name}.letters"
        name = "orders"
        if partitions > 1:
            assert shop.cli("skip", "orders", "--letters", where) == 1
            assert "orders has 3 lanes: the next change of which one" in capsys.readouterr().err
            name = shop.failing
            assert name.startswith("orders/")
        assert shop.cli("skip", name, "--letters", where) == 0
        assert f"skipped one change of {name}" in capsys.readouterr().out
        until(lambda: len(shop.counts) == 29)
        assert listener.statistics.skipped == 1
    assert shop.counts == dict.fromkeys([*range(7), *range(8, 30)], 1)
    (letter,) = shop.letters.letters("orders")
    assert letter.document_key == {"_id": 7}
    assert (letter.error, letter.tries) == ("SkippedByOperator", 0)
    assert letter.whole_resource == "orders"
    assert [shop.store.read(one).skip for one in shop.operations.find("orders").lanes] == [None] * partitions
    assert [shop.store.read(one).paused_at for one in shop.operations.find("orders").lanes] == [None] * partitions


def test_the_change_at_which_a_listener_has_ended_is_left_out_when_it_is_started_again(shop: Shop) -> None:
    shop.refuses = 1
    listener = shop.listener("first")
    shop.write(1, 2)
    with pytest.raises(HandlerFailed):
        listener.run()
    shop.operations.pause("orders")
    where = f"{shop.database.name}.letters"
    assert shop.operations.skip("orders", where) == ["orders"]
    assert shop.store.read("orders").paused_at is not None, "it was paused before, and stays so"
    assert shop.operations.withdraw_skip("orders")
    assert not shop.operations.withdraw_skip("orders")
    shop.operations.skip("orders", where)
    shop.operations.resume("orders")
    with shop.listener("second"):
        until(lambda: shop.counts == {2: 1})
    assert [letter.document_key for letter in shop.letters.letters()] == [{"_id": 1}]
    assert shop.operations.pending(["orders"]) == []


def test_a_change_that_is_to_be_left_out_is_so_before_the_number_of_lanes_changes(shop: Shop) -> None:
    """The mark stayed on a lane that nobody took any more: the change was handled, and nobody was told. No test had
    changed the number of lanes in between."""
    with shop.listener("first", partitions=2):
        shop.write(*range(6))
        until(lambda: len(shop.counts) == 6)
    names = shop.operations.skip("orders", f"{shop.database.name}.letters", all_lanes=True)
    assert shop.operations.pending(names) == names
    with shop.listener("second", partitions=3):
        until(lambda: shop.operations.find("orders").plan.next_lanes == 3)
        with pytest.raises(UsageError, match="number of lanes of orders is being changed"):
            shop.operations.skip("orders", all_lanes=True)
        shop.write(*range(6, 20))
        until(lambda: len(shop.counts) == 18)
        until(lambda: len(shop.operations.find("orders").lanes) == 3)
    assert len(list(shop.letters.letters())) == 2
    assert shop.operations.pending(names) == []


def test_a_skip_that_can_no_longer_be_is_told(shop: Shop) -> None:
    with shop.listener("first", partitions=2):
        shop.write(*range(6))
        until(lambda: len(shop.counts) == 6)
    names = shop.operations.find("orders").lanes
    with shop.listener("second", partitions=3):
        until(lambda: len(shop.operations.find("orders").lanes) == 3)
    lane = shop.store.read(names[0])
    shop.store.amend(lane, replace(lane, skip={"letters": None}))  # in the moment before it was sealed
    with pytest.raises(UsageError, match=r"a lane of an earlier number of lanes.*none was left out"):
        shop.operations.pending(names)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_change_that_the_stream_cannot_give_is_left_out_too(shop: Shop, partitions: int) -> None:
    """Without an error policy the listener ends at it, however often it is started."""
    divides = [{"$addFields": {"x": {"$divide": [1, {"$subtract": ["$documentKey._id", 3]}]}}}]
    shop.write(*range(8))
    options: dict[str, Any] = {"partitions": partitions, "pipeline": divides}
    names: list[str] = []
    for _ in range(2):
        with pytest.raises(ServerError, match="divide by zero"):
            shop.listener("first", **options).run()
        names = shop.operations.find("orders").lanes
    # The lane that the change belongs to goes on; after that the next change of the other lane is left out.
    for name in names:
        shop.operations.skip(name, f"{shop.database.name}.letters")
    with shop.listener("second", **options):
        until(lambda: {3} <= {letter.document_key["_id"] for letter in shop.letters.letters("orders")})
        until(lambda: len(shop.counts) + len(list(shop.letters.letters("orders"))) >= 8)
    left_out = {letter.document_key["_id"]: letter.error for letter in shop.letters.letters("orders")}
    assert left_out[3] == "ServerError"
    assert shop.counts.keys() == set(range(8)) - left_out.keys()
    assert len(left_out) <= partitions


def test_an_asyncio_listener_is_paused_and_has_a_change_left_out(shop: Shop) -> None:
    async def handle(change: Any) -> None:
        if change.document_key["_id"] == shop.refuses:
            raise ValueError("not this one")
        shop.handled.append(("async", change.document_key["_id"]))

    async def retries(change: Any, error: Exception, attempt: int) -> str:
        return "retry"

    shop.refuses = 1
    listener = AsyncListener(
        shop.orders, handle, resource="orders", store=shop.store, on_error=retries, lease_seconds=2.0
    )
    running = threading.Thread(target=asyncio.run, args=(listener.run(),))
    running.start()
    try:
        shop.write(0, 1, 2)
        until(lambda: listener.statistics.failures)
        shop.operations.pause("orders")
        assert listener.statistics.paused == 1
        shop.operations.skip("orders", f"{shop.database.name}.letters")
        shop.operations.resume("orders")
        until(lambda: shop.counts == {0: 1, 2: 1})
        until(lambda: listener.statistics.paused == 0)
    finally:
        listener.stop()
        running.join(300)
    assert [letter.document_key for letter in shop.letters.letters()] == [{"_id": 1}]


def test_without_a_place_for_it_a_change_is_not_left_out(shop: Shop) -> None:
    with shop.listener("first") as listener:
        begin(shop, listener)
    shop.operations.skip("orders", None)
    shop.write(1)
    with pytest.raises(UsageError, match="no place for dead letters"):
        shop.listener("second").run()
    assert shop.counts == {0: 1}
    with shop.listener("third", on_error=shop.letters):
        until(lambda: list(shop.letters.letters()))
    assert shop.counts == {0: 1}


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_resource_is_deleted_once_nobody_works_on_it(
    shop: Shop, partitions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with shop.listener("first", partitions=partitions) as listener:
        begin(shop, listener)
        until(lambda: len(held(shop)) == partitions)
        assert shop.cli("delete", "orders") == 1
        assert "first holds the lease on orders" in capsys.readouterr().err
        assert len(held(shop)) == partitions
    assert all(record.paused_at is None for record in shop.store.leases()), "what is refused leaves nothing behind"
    shop.store.acquire("orders/else", "me", 1)
    assert shop.cli("delete", "orders") == 0
    assert [record.resource for record in shop.store.leases()] == ["orders/else"]
    shop.store.acquire("orders", "me", 600)
    shop.operations.delete("orders", force=True)
    with pytest.raises(UsageError, match="there is no lease on 'orders'"):
        shop.operations.delete("orders")


def test_every_lane_s_lag_is_listed_and_sealed_ones_are_folded_away(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    for partitions in (2, 3):
        with shop.listener("first", partitions=partitions):
            shop.write(*range(partitions * 10, partitions * 10 + 10))
            until(lambda partitions=partitions: len(shop.counts) == (10 if partitions == 2 else 20))
    assert shop.cli("list", "--json") == 0
    listed = {line["resource"]: line for line in json.loads(capsys.readouterr().out)}
    lanes = [line for name, line in listed.items() if name.startswith("orders/2.")]
    assert len(lanes) == 3
    assert all(line["lag"] is not None for line in lanes)
    assert listed["orders"]["lag"] == max(line["lag"] for line in lanes)
    assert (listed["orders"]["state"], listed["orders"]["position"]) == ("free", "3 lanes")
    assert not any(name.startswith("orders/1.") for name in listed)
    assert shop.cli("list") == 0
    assert "2 sealed lanes, left from an earlier number of lanes, are not shown" in capsys.readouterr().out
    assert shop.cli("show", "orders", "--sealed", "--json") == 0
    shown = {line["resource"]: line for line in json.loads(capsys.readouterr().out)}
    assert shown["orders/1.0"]["state"] == "sealed"
    assert all(line["token"] for name, line in shown.items() if name.startswith("orders/2."))
    assert shop.cli("pause", "orders") == 0
    assert shop.cli("release", "orders/2.1", "--to", "host9", "--within", "600") == 0
    capsys.readouterr()
    assert shop.cli("show", "orders") == 0
    said = capsys.readouterr().out
    assert f"orders: paused since {datetime.now(UTC):%Y}" in said
    assert "orders/2.1: reserved for host9 until" in said
    assert shop.cli("resume", "orders") == 0
    assert capsys.readouterr().out == "resumed orders\n"
    assert shop.cli("show", "orders", "--json") == 0
    shown = {line["resource"]: line for line in json.loads(capsys.readouterr().out)}
    assert [line["paused"] or line["reserved"] for line in shown.values()] == [None] * len(shown)


WRONG = {
    "a lane alone cannot be put elsewhere": (["seek", "orders/0", "--time", "2026-01-01"], "is a part of orders"),
    "a lane alone cannot be deleted": (["delete", "orders/1"], "is a part of orders"),
    "no such lane": (["pause", "orders/2"], "there is no lease on 'orders/2'"),
    "an option of another action": (["pause", "orders", "--force"], "--force belongs to delete, not to pause"),
    "a time without a next owner": (["release", "orders", "--within", "3"], "--within says how long"),
    "a time that cannot be": (["release", "orders", "--to", "x", "--within", "0"], "for 1 to 86400 s"),
    "no resource": (["pause"], "which lease is to be paused?"),
}


def test_what_cannot_be_is_refused_in_a_sentence(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    with shop.listener("first", partitions=2) as listener:
        begin(shop, listener)
    before = shop.store.leases()
    for name, (words, said) in WRONG.items():
        assert shop.cli(*words) == 1, name
        assert said in capsys.readouterr().err, name
    assert shop.store.leases() == before
