"""Views over documents that nobody would write on purpose: identities of every type, fields named like ours, arrays in
the way, documents that are full."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import bson
import pytest
from bson.binary import Binary, UuidRepresentation
from bson.code import Code
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp

import tailrace
from tailrace.act.consumer.views.raw_value import RawValue
from tailrace.consumer import MemoryLeaseStore
from tailrace.consumer.views import View, ViewKeeper, ViewUpkeep
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.watch.client.client import operation_time
from tests.consumer.shops import until
from tests.consumer.test_views import Handed, Shop, Updates
from tests.server_in_use import SERVER_VERSION

pytestmark = pytest.mark.mongod

_UUID = Binary.from_uuid(UUID(int=7), UuidRepresentation.STANDARD)
#: Every type that an _id may have, and documents whose order of fields, or whose names, matter.
IDENTITIES: list[Any] = [
    1.5,
    float("nan"),
    float("-inf"),
    "text",
    "",
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    {"_data": "826B00"},
    {"_id": {"_data": "82"}},
    {},
    b"bytes",
    Binary(b"bytes", 128),
    _UUID,
    ObjectId("0" * 24),
    False,
    datetime(2026, 1, 1, tzinfo=UTC),
    Code("x"),
    Code("x", {"y": 1}),
    7,
    Int64(1 << 40),
    Timestamp(5, 6),
    Decimal128("1.10"),
    MinKey(),
    MaxKey(),
]


@pytest.fixture(scope="module", params=[SERVER_VERSION, pytest.param("5.0.4", marks=pytest.mark.slow), "4.4.2"])
def members(request: pytest.FixtureRequest, replica_set: ReplicaSet) -> Iterator[ReplicaSet]:
    if request.param == replica_set.version:
        yield replica_set
        return
    with ReplicaSet(version=request.param) as started:
        yield started


@pytest.fixture
def shop(members: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Shop]:
    name = f"hostile_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(members.uri) as client:
        yield Shop(client, name)
        client.drop_database(name)


def handle_all(shop: Shop, upkeep: ViewUpkeep | None = None, since: int = 0) -> int:
    """Handle all changes from the given number on; how many there are."""
    changes: list[Handed] = shop.changes()
    for change in changes[since:]:
        shop.handle(change, upkeep)
    return len(changes)


def test_an_identity_of_every_type_joins_with_itself_alone(shop: Shop) -> None:
    for number, identity in enumerate(IDENTITIES):
        shop.orders.insert_one({"_id": number, "customer_id": identity})
        shop.customers.insert_one({"_id": identity, "name": number, "account": {"tier": -number}})
    shop.orders.insert_one({"_id": "regex", "customer_id": Regex("^te")})
    done = handle_all(shop)
    for number in range(len(IDENTITIES)):
        assert shop.order(number) == {"name": number, "tier": -number}, IDENTITIES[number]
    assert shop.order("regex") is None
    assert shop.differences() == []
    for identity in IDENTITIES:
        shop.customers.update_one({"_id": {"$eq": identity}}, {"$set": {"name": "changed"}})
    handle_all(shop, since=done)
    assert shop.orders.count_documents({"customer.name": "changed"}) == len(IDENTITIES)
    shop.orders.update_many({}, {"$set": {"customer.name": "x"}})
    assert shop.upkeep.rebuild() == len(IDENTITIES) + 1
    assert shop.differences() == []


def test_a_customer_that_null_names_belongs_to_no_order(shop: Shop) -> None:
    shop.customers.insert_one({"_id": None, "name": "nobody's"})
    shop.orders.insert_many([{"_id": 1, "customer_id": None}, {"_id": 2}, {"_id": 3, "customer": {"name": "left"}}])
    handle_all(shop)
    assert [shop.order(number) for number in (1, 2, 3)] == [None, None, {}]
    assert shop.differences() == []


def test_an_order_that_gets_another_customer_or_none_lets_go_of_the_old_one(shop: Shop) -> None:
    shop.customers.insert_many([{"_id": "a", "name": "A", "account": {"tier": 1}}, {"_id": "b", "name": "B"}])
    shop.orders.insert_one({"_id": 1, "customer_id": "a"})
    done = handle_all(shop)
    assert shop.order() == {"name": "A", "tier": 1}
    shop.orders.update_one({"_id": 1}, {"$set": {"customer_id": "b"}})
    shop.customers.update_one({"_id": "a"}, {"$set": {"name": "A2"}})
    done = handle_all(shop, since=done)
    assert shop.order() == {"name": "B"}, "and no change of the old one comes through"
    for value in (["a"], None, [], "nobody"):
        shop.orders.update_one({"_id": 1}, {"$set": {"customer_id": value}})
        done = handle_all(shop, since=done)
        assert shop.order() == {}
        assert shop.differences() == [], value
    shop.orders.update_one({"_id": 1}, {"$set": {"customer_id": "b"}})
    done = handle_all(shop, since=done)
    shop.orders.update_one({"_id": 1}, {"$unset": {"customer_id": 1}})
    handle_all(shop, since=done)
    assert shop.order() == {}


def test_a_customer_that_is_deleted_and_made_again_has_its_new_fields_alone(shop: Shop) -> None:
    shop.customers.insert_one({"_id": "a", "name": "old", "account": {"tier": 1}})
    shop.orders.insert_one({"_id": 1, "customer_id": "a"})
    handle_all(shop)
    shop.customers.delete_one({"_id": "a"})
    done = handle_all(shop)
    assert shop.order() == {}
    shop.customers.insert_one({"_id": "a", "account": {"tier": None}})
    late = [change for change in shop.changes() if change.event["operationType"] == "delete"]
    handle_all(shop, since=done)
    shop.handle(late[0])  # once more, after the new one
    assert shop.order() == {"tier": None}
    assert shop.differences() == []


def test_an_array_in_the_way_is_written_over_and_holds_nobody_up(shop: Shop) -> None:
    """An empty array where the version belongs took no version: the targets of that source were looked for, found and
    updated for ever. An array where a field belongs got the field in each of its elements."""
    shop.customers.insert_one({"_id": "a", "name": "A", "account": {"tier": 1}})
    for number, way in enumerate(([], [{}], [{"customer_id": 1}], 5, None, "x", {"other": [1]})):
        shop.orders.insert_one({"_id": number, "customer_id": "a", "_views": way, "customer": way})
    shop.customers.update_one({"_id": "a"}, {"$set": {"name": "B"}})
    assert shop.upkeep.refresh("a", operation_time(shop.client).to_timestamp()) == 7
    assert shop.orders.count_documents({"customer.name": "B", "_views.customer_id": {"$type": "timestamp"}}) == 7
    assert shop.orders.find_one({"_id": 6})["customer"] == {"other": [1], "name": "B", "tier": 1}
    assert shop.differences() == []


def test_a_reference_inside_an_array_names_nobody(shop: Shop) -> None:
    """A query looks into arrays, and the view does not: one wrote what the other then called wrong, for ever."""
    view = View(shop.orders, shop.customers, "buyer.id", {"name": "name"})
    upkeep = ViewUpkeep(shop.client, view)
    shop.customers.insert_one({"_id": "a", "name": "A"})
    shop.orders.insert_one({"_id": 1, "buyer": [{"id": "a"}]})
    shop.orders.insert_one({"_id": 2, "buyer": {"id": "a"}})
    shop.orders.insert_one({"_id": 3, "buyer": [{"id": "a"}], "name": "left over"})
    handle_all(shop, upkeep)
    assert [one.get("name") for one in shop.orders.find(sort=[("_id", 1)])] == [None, "A", None]
    assert list(upkeep.verify(grace_s=0)) == []


@pytest.mark.parametrize(
    ("on", "document"),
    [
        ("buyer", {"buyer": ["a", "b"]}),
        ("buyer", {"buyer": []}),
        ("buyer.id", {"buyer": [{"id": "a"}]}),
        ("buyer.id", {"buyer": {"id": ["a"]}}),
    ],
)
def test_an_array_that_names_sources_is_refused_at_the_first_start(
    shop: Shop, on: str, document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The document lost its fields, and nobody was told."""
    view = View(shop.orders, shop.customers, on, {"name": "name"})
    shop.orders.insert_many([{"_id": 1}, {"_id": 2, **document}])
    store = MemoryLeaseStore()
    keeper = ViewKeeper(shop.client, view, store=store)
    with pytest.raises(UsageError, match=rf"the document with _id 2 of .* has an array in '{on}', and a view"):
        keeper.start()
    assert store.leases() == [], "a listener has begun"
    shop.orders.delete_one({"_id": 2})
    with ViewKeeper(shop.client, view, store=store):
        until(lambda: (lease := store.read(keeper.listeners[1].resource)) is not None and lease.position is not None)
        shop.orders.insert_many([{"_id": 3, **document}, {"_id": 4, **document}])
        until(lambda: "the document with _id 3 of" in caplog.text)
    with ViewKeeper(shop.client, view, store=store):
        pass  # it goes on with what it has begun
    assert caplog.text.count("has an array in") == 1


def test_fields_named_like_ours_are_the_user_s(shop: Shop, members: ReplicaSet) -> None:
    ours = {
        "version": 1,
        "token": {"_data": "82"},
        "_fence": {"orders": 1 << 60},
        "operationType": "delete",
        "documentKey": {"_id": 9},
        "fullDocument": None,
        "clusterTime": Timestamp(1 << 31, 0),
        "ns": {"coll": "customers"},
        "updateDescription": {"updatedFields": {}},
    }
    fields = {f"copied.{name}": name for name in ours}
    view = View(shop.orders, shop.customers, "documentKey", fields, name="version")
    upkeep = ViewUpkeep(shop.client, view)
    shop.customers.insert_one({"_id": {"_id": 9}, **ours})
    shop.orders.insert_one({"_id": {"_data": "82"}, **ours})
    handle_all(shop, upkeep)
    found = shop.orders.find_one()
    assert found["copied"] == ours
    assert {name: found[name] for name in ours} == ours
    assert list(upkeep.verify(grace_s=0)) == []


def test_values_with_dotted_and_dollared_names_are_carried_as_they_are(shop: Shop, members: ReplicaSet) -> None:
    value: dict[str, Any] = {"a.b": 1, "": 2, "in": {"$each": [1]}, "x": ["$name", "$$ROOT", {"$literal": 1}]}
    if members.version.startswith("4"):  # it inserts such names, and no update stores them
        shop.customers.insert_one({"_id": "b", "name": value})
        shop.orders.insert_one({"_id": 2, "customer_id": "b"})
        for change in shop.changes():
            with pytest.raises(SinkError, match=r"_id 2: .*not valid for storage"):
                shop.handle(change)
        shop.orders.delete_one({"_id": 2})
        value["in"], value["x"] = "$name", ["$name", "$$ROOT"]
    since = len(shop.changes())
    shop.customers.insert_one({"_id": "a", "name": value})
    shop.orders.insert_one({"_id": 1, "customer_id": "a"})
    handle_all(shop, since=since)
    assert shop.order() == {"name": value}
    assert list(shop.order()["name"]) == list(value)
    assert shop.differences() == []


def test_a_field_and_a_part_of_it_can_both_be_carried(shop: Shop) -> None:
    """The server refuses to project a path and one inside it: the first change ended the listener."""
    view = View(shop.orders, shop.customers, "customer_id", {"whole": "account", "tier": "account.tier", "key": "_id"})
    upkeep = ViewUpkeep(shop.client, view)
    shop.customers.insert_one({"_id": "a", "account": {"tier": 1, "more": 2}})
    shop.orders.insert_one({"_id": 1, "customer_id": "a"})
    handle_all(shop, upkeep)
    found = shop.orders.find_one()
    assert (found["whole"], found["tier"], found["key"]) == ({"tier": 1, "more": 2}, 1, "a")
    assert list(upkeep.verify(grace_s=0)) == []


def test_targets_that_share_the_identity_of_their_source(shop: Shop) -> None:
    view = View(shop.orders, shop.customers, "_id", {"name": "name"}, name="twin")
    upkeep = ViewUpkeep(shop.client, view)
    shop.customers.insert_many([{"_id": number, "name": number} for number in range(3)])
    shop.orders.insert_many([{"_id": number} for number in range(4)])
    handle_all(shop, upkeep)
    assert [one.get("name") for one in shop.orders.find(sort=[("_id", 1)])] == [0, 1, 2, None]
    assert upkeep.has_index()
    assert list(upkeep.verify(grace_s=0)) == []


def test_a_document_that_is_full_is_named_and_does_not_hold_up_the_others(shop: Shop) -> None:
    """One order of 16 MB kept the other orders of its customer from their fields."""
    room = (16 << 20) - len(bson.encode({"_id": "full", "customer_id": "a", "x": b""}))
    shop.orders.insert_many([{"_id": number, "customer_id": "a"} for number in range(3)])
    shop.orders.insert_one({"_id": "full", "customer_id": "a", "x": bytes(room)})
    shop.orders.insert_many([{"_id": number, "customer_id": "a"} for number in range(3, 6)])
    shop.customers.insert_one({"_id": "a", "name": "A"})
    inserted = shop.changes()[-1]
    with pytest.raises(SinkError, match=r"_id 'full': .*larger"):
        shop.handle(inserted)
    assert shop.orders.count_documents({"customer.name": "A"}) == 6
    (difference,) = shop.differences()
    assert (difference.document_key, difference.wanted) == ("full", "A")
    shop.orders.update_many({"_id": {"$ne": "full"}}, {"$set": {"customer.name": "x"}})
    with pytest.raises(SinkError, match="'full'"):
        shop.upkeep.rebuild()
    assert shop.orders.count_documents({"customer.name": "A"}) == 6
    shop.orders.update_one({"_id": "full"}, {"$set": {"x": b""}})
    assert shop.upkeep.rebuild() == 1
    assert shop.differences() == []


def test_a_target_is_looked_for_among_what_cannot_be_rolled_back(members: ReplicaSet, shop: Shop) -> None:
    """A target was skipped because another process had written it on a primary that was about to be rolled back: the
    target was read as that primary had it. No test looks at one process's writes from another process across a
    rollback."""
    levels = []

    class Finds(Updates):
        def started(self, event: Any) -> None:
            if event.command_name == "find":
                levels.append(event.command["readConcern"]["level"])

    with tailrace.connect(members.uri, event_listeners=[Finds()]) as client:
        shop.orders.insert_one({"_id": 1, "customer_id": "a"})
        ViewUpkeep(client, shop.view).refresh("a", operation_time(client).to_timestamp())
    assert levels
    assert set(levels) == {"majority"}


@pytest.mark.parametrize("fields_differ", [True, False], ids=["other fields", "the right fields"])
def test_a_version_ahead_of_every_clock_is_reported_and_mended(shop: Shop, fields_differ: bool) -> None:
    """Nothing that a keeper writes is newer, so the document kept its fields for ever. A rebuild changed nothing
    either, and a verification was content as long as the fields happened to be right: no test had written a version."""
    shop.customers.insert_one({"_id": "a", "name": "A", "account": {"tier": 1}})
    shop.orders.insert_many([{"_id": number, "customer_id": "a"} for number in range(2)])
    done = handle_all(shop)
    ahead = Timestamp(0xFFFFFFFF, 1)
    forged = {"_views.customer_id": ahead, **({"customer.name": "forged"} if fields_differ else {})}
    shop.orders.update_one({"_id": 0}, {"$set": forged})
    differences = shop.differences()
    assert {(one.document_key, one.path, one.found) for one in differences} == {
        (0, path, found) for path, found in (forged.items() if fields_differ else [("_views.customer_id", ahead)])
    }
    assert all(one.wanted < ahead for one in differences if one.path == "_views.customer_id")
    assert shop.upkeep.rebuild() == 1
    assert shop.differences() == []
    assert shop.upkeep.rebuild() == 0
    shop.customers.update_one({"_id": "a"}, {"$set": {"name": "B"}})
    handle_all(shop, since=done)
    assert [shop.order(number)["name"] for number in range(2)] == ["B", "B"]


@pytest.mark.parametrize("ahead", [[Timestamp(0xFFFFFFFF, 1)], MaxKey(), "z", float("inf")], ids=repr)
def test_a_version_of_another_type_holds_no_writer_up(shop: Shop, ahead: Any) -> None:
    """A comparison looks into arrays: a time within one was taken for the version."""
    shop.customers.insert_one({"_id": "a", "name": "A"})
    for number, views in enumerate(({"customer_id": ahead}, [{"customer_id": ahead}])):
        shop.orders.insert_one({"_id": number, "customer_id": "a", "_views": views})
    handle_all(shop)
    assert [shop.order(number) for number in range(2)] == [{"name": "A"}] * 2
    assert shop.orders.count_documents({"_views.customer_id": {"$type": "timestamp"}}) == 2
    assert shop.differences() == []


def test_a_rebuild_does_not_take_a_keeper_s_version_for_one_that_is_ahead(shop: Shop) -> None:
    """Whether a version is ahead is judged by the clock after the target was read, and what a keeper wrote meanwhile
    stays."""
    shop.customers.insert_one({"_id": "a", "name": "A"})
    shop.orders.insert_one({"_id": 0, "customer_id": "a", "_views": {"customer_id": Timestamp(0xFFFFFFFF, 1)}})
    (forged,) = shop.orders.find()
    now = operation_time(shop.client).to_timestamp()
    query = shop.upkeep._one(bson.encode({"_id": 0}), RawValue.of("a"), now, ahead=forged["_views"]["customer_id"])
    shop.orders.update_one({"_id": 0}, {"$set": {"_views.customer_id": Timestamp(now.time + 1, 1)}})
    assert shop.orders.find_one(query) is None
