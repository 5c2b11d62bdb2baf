"""Keepers of totals, what they refuse, and the commands."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tailrace.cli.main import main
from tailrace.consumer import HandlerFailed, MongoLeaseStore
from tailrace.consumer.views import Totals, ViewKeeper
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tests.consumer.shops import until
from tests.consumer.test_totals import CUSTOMERS, CountingShop, act, agree, handle_orders
from tests.consumer.test_totals import shop as shop  # noqa: PLC0414  a fixture
from tests.consumer.test_views import is_kept

pytestmark = pytest.mark.mongod


def keeper_of(shop: CountingShop) -> ViewKeeper:
    return ViewKeeper(shop.client, shop.totals, store=MongoLeaseStore(shop.db["leases"]), lease_seconds=5)


def test_keepers_that_come_and_go_keep_totals(shop: CountingShop) -> None:
    """Documents from before the first keeper, and those written while none ran, count too."""
    shop.orders.create_index("customer_id")
    chosen = random.Random(3)
    shop.orders.insert_many([{"customer_id": chosen.choice(CUSTOMERS), "amount": n} for n in range(50)])
    shop.customers.insert_many([{"_id": customer} for customer in CUSTOMERS])
    for _ in range(2):
        with keeper_of(shop), keeper_of(shop):
            for _ in range(40):
                act(shop, chosen)
            until(lambda: agree(shop))
        for _ in range(15):
            act(shop, chosen)
    with keeper_of(shop):
        until(lambda: agree(shop))
    shop.check_totals()


def test_totals_are_right_again_after_a_collection_is_dropped_renamed_or_replaced(shop: CountingShop) -> None:
    """Documents that replace a collection have no events of their own, and the ledger has what their deletion must take
    away."""
    shop.orders.insert_many([{"_id": n, "customer_id": "ab"[n % 2], "amount": n} for n in range(20)])
    shop.customers.insert_many([{"_id": name} for name in "abc"])
    moved = {"$set": {"customer_id": {"$cond": [{"$lt": ["$_id", 5]}, "c", "$customer_id"]}, "amount": 1}}
    steps = {
        "the source is replaced": lambda: shop.orders.aggregate([moved, {"$out": "orders"}]),
        "what took its place is deleted": lambda: shop.orders.delete_many({"_id": {"$lt": 3}}),
        "the source is renamed": lambda: shop.orders.rename("old_orders"),
        "another is renamed to it": lambda: shop.db.old_orders.rename("orders"),
        "it is deleted from": lambda: shop.orders.delete_many({"_id": {"$lt": 9}}),
        "the source is dropped": shop.orders.drop,
        "it is written again": lambda: shop.orders.insert_one({"_id": 1, "customer_id": "a", "amount": 4}),
        "the target is replaced": lambda: shop.customers.aggregate(
            [{"$project": {"_id": 1}}, {"$match": {"_id": {"$ne": "b"}}}, {"$out": "customers"}]
        ),
    }
    keeper = keeper_of(shop)
    with keeper:
        until(lambda: agree(shop))
        for what, step in steps.items():
            step()
            until(lambda: agree(shop) or not is_kept(keeper))
            assert is_kept(keeper), what
    shop.check_totals()


def test_a_ledger_that_is_gone_ends_the_keeper(shop: CountingShop) -> None:
    """Otherwise nobody would know which total a deletion lowers, and nobody would be told."""
    shop.customers.insert_one({"_id": "a"})
    shop.orders.insert_many([{"_id": n, "customer_id": "a", "amount": n} for n in range(3)])
    keeper = keeper_of(shop)
    with keeper:
        until(lambda: agree(shop) or not is_kept(keeper))
    shop.db.drop_collection("customers.orders.ledger")
    shop.orders.delete_one({"_id": 2})
    again = keeper_of(shop).start()
    with pytest.raises(HandlerFailed, match="is gone, or was emptied"):
        again.join(300)
    anew = ViewKeeper(shop.client, shop.totals, store=MongoLeaseStore(shop.db["leases"]), resource="anew")
    with anew:
        until(lambda: agree(shop) or not is_kept(anew))


def test_a_keeper_that_is_stopped_while_it_starts_ends(shop: CountingShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the end of its second listener, which had not begun."""
    shop.customers.insert_one({"_id": "a"})
    keeper = keeper_of(shop)
    monkeypatch.setattr(keeper, "_source_has_begun", lambda: keeper.stop() is not None)
    keeper.start()
    assert keeper.join(60)


def test_a_target_that_refuses_its_totals_does_not_hold_up_the_others(shop: CountingShop) -> None:
    shop.customers.insert_many([{"_id": name} for name in "abc"])
    shop.db.command("collMod", "customers", validator={"stats.total": {"$ne": 7}})
    shop.orders.insert_many([{"_id": n, "customer_id": "abc"[n], "amount": 6 + n} for n in range(3)])
    changes = [one for one in shop.changes() if one.event["ns"]["coll"] == "orders"]
    assert shop.counting.sources_changed(changes) == 1, "the one before it"  # type: ignore[arg-type]
    with pytest.raises(SinkError, match="does not accept the fields of the view for the document with _id 'b'"):
        shop.counting.sources_changed(changes[1:])  # type: ignore[arg-type]
    assert shop.counting.sources_changed(changes[2:]) == 1  # type: ignore[arg-type]
    assert {one["_id"]: one["stats"]["total"] for one in shop.customers.find({"stats": {"$exists": True}})} == {
        "a": 6,
        "c": 8,
    }


def test_what_totals_cannot_do_is_refused(shop: CountingShop) -> None:
    shop.orders.insert_one({"_id": 9, "customer_id": ["a", "b"]})
    with pytest.raises(UsageError, match=r"the document with _id 9 .* has an array in 'customer_id'"):
        keeper_of(shop).start()
    shop.db.drop_collection("orders")
    shop.db.create_collection("orders", collation={"locale": "en", "strength": 2})
    with pytest.raises(UsageError, match="different collations"):
        keeper_of(shop).start()


def test_totals_compare_as_their_collections_do(shop: CountingShop) -> None:
    for name in ("orders", "customers"):
        shop.db.create_collection(name, collation={"locale": "en", "strength": 2})
    shop.counting.check_deployment()
    shop.customers.insert_many([{"_id": "Ann"}, {"_id": "bob"}])
    shop.orders.insert_many(
        [{"_id": n, "customer_id": one, "amount": 1} for n, one in enumerate(("ANN", "ann", "Bob"))]
    )
    handle_orders(shop)
    found = {one["_id"]: one["stats"]["orders"] for one in shop.customers.find()}
    assert found == {"Ann": 2, "bob": 1}


def test_the_commands_know_totals(
    shop: CountingShop, replica_set: ReplicaSet, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.customers.insert_many([{"_id": name} for name in "ab"])
    shop.orders.insert_many([{"_id": n, "customer_id": "a", "amount": n} for n in range(3)])
    where = [replica_set.uri, "--target", f"{shop.name}.customers", "--source", f"{shop.name}.orders"]
    totals = ["--on", "customer_id", "--count", "stats.orders", "--sum", "stats.total=amount"]
    assert main(["view", "verify", *where, *totals, "--grace", "0"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        '"a"  stats.orders: nothing, but the source has 3',
        '"a"  stats.total: nothing, but the source has 3',
        '"b"  stats.orders: nothing, but the source has 0',
        '"b"  stats.total: nothing, but the source has 0',
        "differences: 4",
    ]
    assert main(["view", "rebuild", *where, *totals]) == 0
    assert capsys.readouterr().out == "2 documents rewritten\n"
    assert main(["view", "verify", *where, *totals, "--grace", "0"]) == 0
    capsys.readouterr()
    for wrong, words in (
        (["--on", "customer_id"], "would carry nothing"),
        ([*totals, "--field", "name=name"], "carries fields, or counts"),
        (["--on", "customer_id", "--sum", "total"], "is not TARGET=SOURCE"),
    ):
        assert main(["view", "verify", *where, *wrong]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": "orders"}, "a collection"),
        ({"source": "s.customers"}, "two different collections"),
        ({"on": "customer.id"}, "at the top of the document"),
        ({"on": "_id"}, "one document at most"),
        ({"count": None, "sums": {}}, "a count or at least one sum"),
        ({"count": "n", "sums": {"n": "amount"}}, "a count and a sum"),
        ({"count": "n", "sums": {"n.x": "amount"}}, "cannot write"),
        ({"count": "_id"}, "cannot write"),
        ({"sums": {"t": "a..b"}}, "is not a field"),
        ({"name": "a.b"}, "cannot name"),
        ({"ledger": "s.orders"}, "a collection of its own"),
    ],
)
def test_totals_that_cannot_be_are_refused(changed: dict[str, Any], words: str) -> None:
    declared = {"target": "s.customers", "source": "s.orders", "on": "customer_id", "count": "n"}
    with pytest.raises(UsageError, match=words):
        Totals(**{**declared, **changed})
