"""Counts and sums of the documents that name a target: equal to what the server's own aggregation gives.

Handlers are killed between their steps and go on from further back, and processes that stood still write late. Each
part of the rule is also removed once, which the tests must find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import bson
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

import tailrace
from tailrace.act.consumer.views import ledger as ledger_module
from tailrace.act.consumer.views import totals_upkeep
from tailrace.act.consumer.views.ledger import Ledger, Naming
from tailrace.act.consumer.views.raw_value import RawValue, value_at
from tailrace.act.consumer.views.view import View
from tailrace.consumer.views import Totals, TotalsUpkeep
from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.consumer.test_views import Handed, Shop

pytestmark = pytest.mark.mongod

CUSTOMERS = ["a", 1, 2.5, {"k": 1}, {"k": 2}, True, Int64(1 << 60)]
NAMED = [*CUSTOMERS, 1.0, Int64(1), Decimal128("2.5"), Decimal128("1.00"), "nobody", None, ["a"]]
AMOUNTS = [
    *(1, 7, -3, 2**31 - 1, Int64(2**63 - 1), 0.1, 1e16, -1e16, Decimal128("0.1"), Decimal128("1E+3")),
    *("12", None, [1, 2], True, {"a": 1}, float("nan"), float("inf")),
]
TOTALS = {"count": "stats.orders", "sums": {"stats.total": "amount", "stats.tax": "tax.amount"}}


class CountingShop(Shop):
    """Customers with the number of their orders, and the sum of their amounts."""

    def __init__(self, client: Any, name: str) -> None:
        super().__init__(client, name)
        self.totals = Totals(self.customers, self.orders, "customer_id", **TOTALS)  # type: ignore[arg-type]
        self.counting = TotalsUpkeep(client, self.totals, batch=5)
        self.counting.check_deployment()
        self.counting.begin()
        raw = bson.CodecOptions(document_class=RawBSONDocument)
        self.raw_customers = self.customers.with_options(codec_options=raw)

    def totals_wanted(self) -> dict[Any, Any]:
        """By the server: a ``$lookup`` with a ``$group``."""
        zero = {"n": 0, "t": 0, "x": 0}
        group = {"_id": None, "n": {"$sum": 1}, "t": {"$sum": "$amount"}, "x": {"$sum": "$tax.amount"}}
        pipeline = [{"$match": {"$expr": {"$eq": ["$customer_id", "$$c"]}}}, {"$group": group}]
        stages = [
            {"$lookup": {"from": "orders", "let": {"c": "$_id"}, "pipeline": pipeline, "as": "found"}},
            {"$set": {"found": {"$ifNull": [{"$arrayElemAt": ["$found", 0]}, zero]}}},
            {"$project": {"stats": {"orders": "$found.n", "total": "$found.t", "tax": "$found.x"}}},
        ]
        return _totals_of(self.raw_customers.aggregate(stages))

    def totals_found(self) -> dict[Any, Any]:
        return _totals_of(self.raw_customers.find({}, {"stats": 1}))

    def check_totals(self) -> None:
        assert self.totals_found() == self.totals_wanted()
        assert list(self.counting.verify(grace_s=0)) == []


def _totals_of(documents: Any) -> dict[Any, Any]:
    paths = ("stats.orders", "stats.total", "stats.tax")
    return {value_at(one.raw, "_id"): [value_at(one.raw, path) for path in paths] for one in documents}


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[CountingShop]:
    name = f"totals_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield CountingShop(client, name)
        client.drop_database(name)


def act(shop: Shop, chosen: random.Random) -> None:
    """One random write of a user."""
    order, customer = chosen.randrange(9), chosen.choice(CUSTOMERS)
    where = {"_id": order}
    whole = {"customer_id": chosen.choice(NAMED), "amount": chosen.choice(AMOUNTS)}
    match chosen.randrange(14):
        case 0 | 1 | 2:
            shop.orders.replace_one(where, whole, upsert=True)
        case 3 | 4:
            shop.orders.update_one(where, {"$set": {"customer_id": whole["customer_id"]}}, upsert=True)
        case 5:
            shop.orders.update_one(where, {"$set": {"amount": whole["amount"]}})
        case 6:
            shop.orders.update_one(where, [{"$set": {"amount": {"$cond": [{"$isNumber": "$amount"}, 5, "x"]}}}])
        case 7:
            shop.orders.update_one(where, {"$set": {"tax.amount": chosen.randrange(9)}})
        case 8:
            shop.orders.update_one(where, {"$unset": {chosen.choice(("customer_id", "amount", "tax")): 1}})
        case 9 | 10:
            shop.orders.delete_one(where)
        case 11:
            transaction(shop, order, chosen)
        case 12:
            shop.customers.replace_one({"_id": {"$eq": customer}}, {"name": 1}, upsert=True)
        case 13:
            change_customer(shop, customer, chosen)


def transaction(shop: Shop, order: int, chosen: random.Random) -> None:
    """One order moves twice, or comes again, at one time."""
    with shop.client.start_session() as session, session.start_transaction():
        shop.orders.delete_one({"_id": order}, session=session)
        for _ in range(chosen.randrange(3)):
            named = {"$set": {"customer_id": chosen.choice(NAMED), "amount": 2}}
            shop.orders.update_one({"_id": order}, named, upsert=True, session=session)


def change_customer(shop: Shop, customer: Any, chosen: random.Random) -> None:
    where = {"_id": {"$eq": customer}}
    match chosen.randrange(4):
        case 0:
            shop.customers.delete_one(where)
        case 1:
            shop.customers.update_one(where, {"$set": {"stats.total": "overwritten"}})
        case 2:
            shop.customers.update_one(where, {"$set": {"stats": 5}})
        case 3:  # a part of what an order names
            shop.orders.update_one({"customer_id": {"$type": "object"}}, {"$set": {"customer_id.k": 2}})


class KilledError(Exception):
    """The process was killed between two steps."""


class Killed(TotalsUpkeep):
    """Is killed now and then before one of its steps."""

    chosen = random.Random(0)

    def _compute(self, *arguments: Any) -> None:
        self._maybe()
        super()._compute(*arguments)
        self._maybe()

    def _write_totals(self, keys: Any, version: Any) -> None:
        if self.chosen.random() < 0.1:
            super()._write_totals(keys[:1], version)
            raise KilledError
        super()._write_totals(keys, version)

    def _maybe(self) -> None:
        if self.chosen.random() < 0.1:
            raise KilledError


class StoodStill(TotalsUpkeep):
    """Computed long ago, with what the ledger said then, and goes on only now."""

    def __init__(self, shop: CountingShop, changes: list[Handed]) -> None:
        super().__init__(shop.client, shop.totals)
        self.check_deployment()
        self._changes = changes
        self._remembered: dict[Any, bytes] | None = None
        self._written: list[Callable[[], None]] = []
        self.sources_changed(changes)  # type: ignore[arg-type]

    def go_on(self) -> None:
        for write in self._written:
            write()

    def _compute(self, keys: Any, version: Timestamp, check: Any) -> None:
        keys = list({key.identity: key for key in keys}.values())
        documents = dict(zip(keys, self._sources(keys, version), strict=True))
        self._written.append(lambda: self._write_late(documents, version))

    def _write_late(self, documents: dict[RawValue, bytes], version: Timestamp) -> None:
        for key, document in documents.items():
            self._target.update_one(self.view.outdated(key, version), self.view.update(document, version))

    def rebuild(self, **options: Any) -> int:
        """Left to another keeper."""
        return 0


class LateLedger(Ledger):
    """The ledger of a process that stands still before it settles."""

    def settle(self, entries: Any) -> None:
        entries = list(entries)
        self.late = lambda: super(LateLedger, self).settle(entries)


def play(shop: CountingShop, seed: int, upkeep: TotalsUpkeep, rounds: int = 6) -> None:
    """Users write, changes are handled in parts, some of them several times and some very late."""
    chosen = random.Random(seed)
    Killed.chosen = random.Random(f"killed {seed}")
    handled: dict[str, int] = {"orders": 0, "customers": 0}
    late: list[Callable[[], Any]] = []
    for turn in range(rounds + 1):
        for _ in range(12 if turn < rounds else 0):
            act(shop, chosen)
        changes = without_lookups(shop.changes())
        by_name = {name: [one for one in changes if one.event["ns"]["coll"] == name] for name in handled}
        orders, customers = by_name["orders"], by_name["customers"]
        if chosen.random() < 0.5 and orders:
            begin = chosen.randrange(len(orders))
            late.append(stand_still(shop, orders[begin : begin + 4]))
        else:
            begin = chosen.randrange(len(orders) + 1)
            again = orders[begin : begin + chosen.randrange(6)]
            late += [lambda again=again: shop.counting.sources_changed(again)] if again else []  # type: ignore[misc]
        waiting = customers[handled["customers"] :]
        chosen.shuffle(waiting)
        keep_back = waiting[: len(waiting) // 3] if turn < rounds else []
        for change in waiting[len(keep_back) :]:
            upkeep.target_changed(change)  # type: ignore[arg-type]
        late += [lambda change=change: shop.counting.target_changed(change) for change in keep_back]  # type: ignore[misc]
        handled["customers"] = len(customers)
        done = handled["orders"]
        while done < len(orders):
            part = orders[done : done + chosen.randrange(1, 7)]
            try:
                done += upkeep.sources_changed(part)  # type: ignore[arg-type]
            except KilledError:
                done = max(handled["orders"], done - chosen.randrange(4))
        handled["orders"] = done
        while late and (turn == rounds or chosen.random() < 0.6):
            late.pop(chosen.randrange(len(late)))()
    handle_the_rest(shop, handled["customers"], upkeep)


def stand_still(shop: CountingShop, changes: list[Handed]) -> Callable[[], None]:
    """A process takes these changes, and stands still before it writes; what it does when it goes on."""
    stood = StoodStill.__new__(StoodStill)
    ledger: list[LateLedger] = []

    def late_ledger(*arguments: Any) -> LateLedger:
        ledger.append(LateLedger(*arguments))
        return ledger[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tailrace.act.consumer.views.totals_upkeep.Ledger", late_ledger)
        stood.__init__(shop, changes)  # type: ignore[misc]

    def go_on() -> None:
        stood.go_on()
        if hasattr(ledger[0], "late"):
            ledger[0].late()

    return go_on


def without_lookups(changes: list[Handed]) -> list[Handed]:
    """As a keeper sees changes of the source."""
    for change in changes:
        if change.event["ns"]["coll"] == "orders" and change.event["operationType"] == "update":
            change.event.pop("fullDocument", None)
    return changes


def handle_the_rest(shop: CountingShop, handled: int, upkeep: TotalsUpkeep) -> None:
    changes = [one for one in shop.changes() if one.event["ns"]["coll"] == "customers"]
    for change in changes[handled:]:
        upkeep.target_changed(change)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(amount(4, 40)))
def test_totals_are_what_the_server_computes_whatever_went_wrong(shop: CountingShop, seed: int) -> None:
    play(shop, seed, Killed(shop.client, shop.totals, batch=3))
    shop.check_totals()


# ── One scene for each part of the rule, and the same scene without it ───────────────────────────────────────────────


def handle_orders(shop: CountingShop, upkeep: TotalsUpkeep | None = None, *, last: int | None = None) -> list[Handed]:
    """The changes of orders so far; ``last``: so many of them are handled, else all."""
    changes = [one for one in without_lookups(shop.changes()) if one.event["ns"]["coll"] == "orders"]
    (upkeep or shop.counting).sources_changed(changes[-last:] if last else changes)  # type: ignore[arg-type]
    return changes


def an_order_is_deleted(shop: CountingShop) -> None:
    shop.orders.insert_one({"_id": 1, "customer_id": "a", "amount": 3})
    handle_orders(shop)
    assert shop.customers.find_one({"_id": "a"})["stats"] == {"orders": 1, "total": 3, "tax": 0}
    shop.orders.delete_one({"_id": 1})
    handle_orders(shop, last=1)


def killed_after_the_ledger_has_learnt_of_a_move(shop: CountingShop) -> None:
    shop.orders.insert_one({"_id": 1, "customer_id": "a", "amount": 3})
    handle_orders(shop)
    shop.orders.update_one({"_id": 1}, {"$set": {"customer_id": "b"}})
    with pytest.raises(KilledError):
        handle_orders(shop, AlwaysKilled(shop.client, shop.totals), last=1)
    handle_orders(shop, last=1)


class AlwaysKilled(TotalsUpkeep):
    """Is killed before it computes anything."""

    def _compute(self, *_arguments: Any) -> None:
        raise KilledError


def an_older_change_is_handled_again(shop: CountingShop) -> None:
    shop.orders.insert_one({"_id": 1, "customer_id": "a", "amount": 3})
    shop.orders.update_one({"_id": 1}, {"$set": {"customer_id": "b"}})
    first, *_ = handle_orders(shop)
    shop.counting.sources_changed([first])  # type: ignore[list-item]
    shop.orders.delete_one({"_id": 1})
    handle_orders(shop, last=1)


def one_stands_still_before_it_settles(shop: CountingShop) -> None:
    shop.orders.insert_one({"_id": 1, "customer_id": "a", "amount": 3})
    handle_orders(shop)
    shop.orders.delete_one({"_id": 1})
    changes = [one for one in shop.changes() if one.event["ns"]["coll"] == "orders"]
    go_on = stand_still(shop, changes[-1:])
    shop.orders.insert_one({"_id": 1, "customer_id": "b", "amount": 3})
    handle_orders(shop, last=2)
    go_on()
    shop.orders.delete_one({"_id": 1})
    handle_orders(shop, last=1)


def one_stands_still_before_it_writes(shop: CountingShop) -> None:
    shop.orders.insert_one({"_id": 1, "customer_id": "a", "amount": 3})
    changes = [one for one in shop.changes() if one.event["ns"]["coll"] == "orders"]
    go_on = stand_still(shop, changes)
    shop.orders.update_one({"_id": 1}, {"$set": {"amount": 5}})
    handle_orders(shop)
    go_on()


def shards_tell_of_one_time_in_no_order(shop: CountingShop) -> None:
    """A document whose shard key changes is deleted on one shard and inserted on another at one time."""
    for together in (True, False):
        for number in (1, 2):
            shop.orders.replace_one({"_id": number}, {"customer_id": "a", "amount": 3}, upsert=True)
        handle_orders(shop)
        with shop.client.start_session() as session, session.start_transaction():
            shop.orders.delete_one({"_id": 1}, session=session)
            shop.orders.insert_one({"_id": 1, "customer_id": "b", "amount": 3}, session=session)
        deleted, inserted = [one for one in shop.changes() if one.event["ns"]["coll"] == "orders"][-2:]
        for part in ([inserted, deleted],) if together else ([inserted], [deleted]):
            shop.counting.sources_changed(part)  # type: ignore[arg-type]
        shop.orders.update_one({"_id": 1}, {"$set": {"customer_id": "a"}})
        handle_orders(shop, last=1)
        assert agree(shop), "together" if together else "apart"


def agree(shop: CountingShop) -> bool:
    return shop.totals_found() == shop.totals_wanted()


def a_part_of_what_is_named_is_changed(shop: CountingShop) -> None:
    shop.orders.insert_many([{"_id": n, "customer_id": {"k": 1}, "amount": n} for n in range(3)])
    handle_orders(shop)
    shop.orders.update_many({"_id": {"$lt": 2}}, {"$set": {"customer_id.k": 2}})
    handle_orders(shop, last=2)
    shop.orders.delete_one({"_id": 1})
    handle_orders(shop, last=1)


def numbers_are_named_in_other_types(shop: CountingShop) -> None:
    named = [Decimal128("1.00"), 1.0, Int64(1), 1, Decimal128("2.50"), 2.5, True, float(1 << 60), Int64(1 << 60)]
    shop.orders.insert_many([{"_id": n, "customer_id": one, "amount": 1} for n, one in enumerate(named)])
    handle_orders(shop)


def an_array_names_nobody(shop: CountingShop) -> None:
    named = ["a", ["a", "b"], 2.5, [2.5]]
    shop.orders.insert_many([{"_id": n, "customer_id": one} for n, one in enumerate(named)])
    handle_orders(shop)


def sums_grow_out_of_their_types(shop: CountingShop) -> None:
    groups: Any = ([2**31 - 1, 1], [Int64(2**63 - 1), 1], [0.1, 7, "x"], [Decimal128("0.1"), 0.5], [1, 2])
    for number, group in enumerate(groups):
        named = CUSTOMERS[number]
        shop.orders.insert_many([{"customer_id": named, "amount": one, "tax": {"amount": [one]}} for one in group])
    handle_orders(shop)


SAID, COMPUTED = ledger_module._said, Totals.computed


def _said_whatever_came_before(named: Any, at: Any) -> Any:
    (stage,) = SAID(named, at)
    return [{"$set": {name: {"$cond": [True, *value["$cond"][1:]]} for name, value in stage["$set"].items()}}]


def _said_and_nothing_left(named: Any, at: Any) -> Any:
    (stage,) = SAID(named, at)
    return [{"$set": {**stage["$set"], "left": []}}]


def _said_last(self: Naming, named: Any, at: Any) -> None:
    self.at, self.now = at, list(named)
    self.ever += named


def _said_over(named: Any, at: Any) -> Any:
    (stage,) = SAID(named, at)
    said = stage["$set"]["named"]["$cond"][1]
    older_or_same = {"$lte": ["$at", at]}
    return [{"$set": {**stage["$set"], "named": {"$cond": [older_or_same, said, "$named"]}}}]


def _settled_whatever_came_since(self: Ledger, entries: Any) -> None:
    for entry in entries:
        if not entry.named:
            self._collection.delete_one({"_id": entry.key.condition()})


def _settled_before_it_is_written(self: TotalsUpkeep, namings: Any, version: Any, check: Any) -> None:
    with self._session(version) as session:
        self._ledger.write(namings, session)
        entries = self._ledger.entries(namings, session)
    self._ledger.settle(entries)
    keys = [key for naming in namings.values() for key in naming.ever]
    self._compute([*keys, *(key for entry in entries for key in (*entry.named, *entry.left))], version, check)


def _added_up(self: Totals, key: RawValue, group: bytes | None) -> bytes:
    """As if the counter always had one type."""
    document = bson.decode(COMPUTED(self, key, group))
    return bson.encode({**document, "s0": Int64(int(document["s0"]))} if isinstance(document["s0"], int) else document)


SCENES = (
    an_order_is_deleted,
    killed_after_the_ledger_has_learnt_of_a_move,
    an_older_change_is_handled_again,
    one_stands_still_before_it_settles,
    one_stands_still_before_it_writes,
    shards_tell_of_one_time_in_no_order,
    a_part_of_what_is_named_is_changed,
    numbers_are_named_in_other_types,
    an_array_names_nobody,
    sums_grow_out_of_their_types,
)
#: What is planted, where, and the scene that shows it.
FAULTS: dict[str, tuple[Any, str, Any, Callable[[CountingShop], None]]] = {
    "no ledger": (Ledger, "entries", lambda *_: [], an_order_is_deleted),
    "settled before it is written": (
        *(TotalsUpkeep, "_write_changed", _settled_before_it_is_written),
        killed_after_the_ledger_has_learnt_of_a_move,
    ),
    "what was left is not kept": (
        *(ledger_module, "_said", _said_and_nothing_left),
        killed_after_the_ledger_has_learnt_of_a_move,
    ),
    "an older change overwrites the ledger": (
        *(ledger_module, "_said", _said_whatever_came_before),
        an_older_change_is_handled_again,
    ),
    "settled by one that stood still": (
        *(Ledger, "settle", _settled_whatever_came_since),
        one_stands_still_before_it_settles,
    ),
    "an older version is written": (View, "older", lambda *_: {}, one_stands_still_before_it_writes),
    "the last one of a time counts": (Naming, "says", _said_last, shards_tell_of_one_time_in_no_order),
    "the last one in the ledger counts": (ledger_module, "_said", _said_over, shards_tell_of_one_time_in_no_order),
    "a part is no change": (Totals, "changes_a_part", lambda *_: False, a_part_of_what_is_named_is_changed),
    "equal bytes": (totals_upkeep, "_equality", lambda value: value, numbers_are_named_in_other_types),
    "arrays count": (Totals, "with_array", {"_id": "nobody"}, an_array_names_nobody),
    "a sum of one type": (Totals, "computed", _added_up, sums_grow_out_of_their_types),
}


def fill_customers(shop: CountingShop) -> None:
    shop.customers.insert_many([{"_id": customer} for customer in (*CUSTOMERS, "b")])
    for change in shop.changes():
        shop.counting.target_changed(change)  # type: ignore[arg-type]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_each_part_of_the_rule(shop: CountingShop, scene: Callable[[CountingShop], None]) -> None:
    fill_customers(shop)
    scene(shop)
    shop.check_totals()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(shop: CountingShop, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name, planted, scene = FAULTS[fault]
    fill_customers(shop)
    monkeypatch.setattr(holder, name, planted)
    with suppress(AssertionError):
        scene(shop)
    assert not agree(shop)
