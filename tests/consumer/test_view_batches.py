"""The first start of a view, and many changes of its targets: read and written together.

Each target was read and written by itself, which took seven times as long as a rebuild. No test counted the commands.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo.monitoring import CommandListener, CommandStartedEvent

import tailrace
from tailrace.consumer import MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.views import View, ViewKeeper
from tailrace.embedded import ReplicaSet
from tests.consumer.first_start_process import keeper_of as same_keeper_of
from tests.consumer.shops import until
from tests.forked import Forked

pytestmark = pytest.mark.mongod

ORDERS = 500
ROOT = Path(__file__).parents[2]
BAD = frozenset({7, 8, 300})


class Updates(CommandListener):
    """Counts the update commands to a collection."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, event: CommandStartedEvent) -> None:
        self.count += event.command_name == "update" and event.command.get("update") == "orders"

    def succeeded(self, event: Any) -> None:
        pass

    def failed(self, event: Any) -> None:
        pass


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"batches_{abs(hash(request.node.nodeid)) % 10**9}"
    updates = Updates()
    with tailrace.connect(replica_set.uri, event_listeners=[updates]) as client:
        shop = client[name]
        shop.customers.insert_many([{"_id": number, "name": f"name {number}"} for number in range(20)])
        shop.customers.insert_one({"_id": "bad", "name": "bad"})
        shop.orders.insert_many(
            [{"_id": number, "customer_id": "bad" if number in BAD else number % 20} for number in range(ORDERS)]
        )
        yield shop, updates
        client.drop_database(name)


def keeper_of(shop: Any, **options: Any) -> ViewKeeper:
    view = View(shop.orders, shop.customers, "customer_id", {"customer.name": "name"})
    return ViewKeeper(shop.client, view, store=MongoLeaseStore(shop.leases), **options)


def test_the_first_start_takes_a_command_for_many_targets(shop: Any) -> None:
    database, updates = shop
    keeper = keeper_of(database)
    with keeper:
        until(lambda: database.orders.count_documents({"customer.name": {"$exists": True}}) == ORDERS or keeper.join(0))
        assert updates.count < 20
        database.orders.update_many({"_id": {"$lt": 200}}, {"$set": {"customer_id": 1}})
        until(lambda: database.orders.count_documents({"customer.name": "name 1"}) >= 200 or keeper.join(0))
    assert list(keeper.upkeep.verify(grace_s=0)) == []


def test_the_first_start_makes_no_events_of_the_documents(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making events and taking them apart again took as long as everything else together."""
    database, _ = shop
    made: list[bytes] = []
    monkeypatch.setattr("tailrace.act.consumer.copied.snapshot_event", lambda document, *_: made.append(document))
    with keeper_of(database) as keeper:
        until(lambda: database.orders.count_documents({"customer.name": {"$exists": True}}) == ORDERS or keeper.join(0))
    assert made == []
    assert list(keeper.upkeep.verify(grace_s=0)) == []


def test_a_first_start_that_is_killed_in_the_middle_of_a_chunk_misses_no_target(shop: Any) -> None:
    database, _ = shop
    database.orders.insert_many([{"_id": number, "customer_id": number % 20} for number in range(ORDERS, 2_600)])
    for turn, at in enumerate([3, 3, 2]):  # the third write of a run is that of the second half of a chunk
        arguments = [uri_of(database), database.name, str(at)]
        process = Forked("tests.consumer.first_start_process", arguments, cwd=ROOT)
        assert process.wait(120) == -signal.SIGKILL
        database.customers.update_one({"_id": turn}, {"$set": {"name": f"renamed {turn}"}})
        database.orders.update_one({"_id": turn}, {"$set": {"customer_id": turn + 5}})
    lacking = {"customer.name": {"$exists": False}}
    assert 0 < database.orders.count_documents(lacking) < 2_600
    with same_keeper_of(database) as keeper:
        position = MongoLeaseStore(database.leases).read
        until(lambda: "snapshot" not in position(keeper.listeners[1].resource).position or keeper.join(0))
        assert database.orders.count_documents(lacking) == 0
        until(lambda: list(keeper.upkeep.verify(grace_s=0)) == [] or keeper.join(0))


def uri_of(database: Any) -> str:
    host, port = database.client.address
    return f"mongodb://{host}:{port}/?directConnection=true"


def test_targets_that_refuse_the_fields_are_dead_letters_and_the_others_of_their_batch_are_written(shop: Any) -> None:
    database, _ = shop
    database.command("collMod", "orders", validator={"customer.name": {"$ne": "bad"}})
    letters = DeadLetters(database.letters, tries=1)
    keeper = keeper_of(database, on_error=letters)
    with keeper:
        wanted = ORDERS - len(BAD)
        until(lambda: database.orders.count_documents({"customer.name": {"$exists": True}}) == wanted or keeper.join(0))
        until(lambda: len(list(letters.letters())) == len(BAD) or keeper.join(0))
    assert sorted(letter.event["documentKey"]["_id"] for letter in letters.letters()) == sorted(BAD)
    assert {difference.document_key for difference in keeper.upkeep.verify(grace_s=0)} == BAD
