"""What a listener does while a lease is in force, and what it can no longer do afterwards: the commit before the next
change, the thread that keeps the lease, an owner that comes too late, a store that no majority backs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient, WriteConcern
from pymongo.errors import WTimeoutError
from pymongo.monitoring import CommandListener, CommandStartedEvent

import tailrace
from tailrace.consumer import Change, Fenced, Lease, LeaseStoreUnavailable, Listener, MongoLeaseStore
from tailrace.embedded import ReplicaSet
from tests.consumer.shops import WAIT_S, new_shop, until

pytestmark = pytest.mark.mongod

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "listener.md"


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    with new_shop(replica_set.uri, request, "in_force") as made:
        yield made


def key_of(change: Change) -> Any:
    return (change.document_key or {})["_id"]


class Unreliable(MongoLeaseStore):
    """Fails when it is told to, and notes when commits succeed."""

    def __init__(self, collection: Any, notes: list[Any]) -> None:
        super().__init__(collection)
        self.notes = notes
        self.commits_to_fail = 0
        self.refreshes_fail = False

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        if "token" in position and self.commits_to_fail:
            self.commits_to_fail -= 1
            self.notes.append("no answer")
            raise LeaseStoreUnavailable("the store does not answer")
        after = super().commit(lease, position, seconds)
        if "token" in position:
            self.notes.append("committed")
        return after

    def refresh(self, lease: Lease, seconds: float) -> Lease:
        if self.refreshes_fail:
            raise LeaseStoreUnavailable("the store does not answer")
        return super().refresh(lease, seconds)


def test_the_next_change_waits_until_the_commit_of_this_one_has_succeeded(shop: Any) -> None:
    """The simulation shows it with a store of its own; no test had shown it on a server, with the threads."""
    notes: list[Any] = []
    store = Unreliable(shop["leases"], notes)
    shop.orders.insert_many([{"_id": number} for number in range(3)])

    def handle(change: Change) -> None:
        record = store.read("orders")
        assert record is not None
        assert record.position is not None
        before = record.position.get("token", {}).get("_data")
        notes.append((key_of(change), before == handled[-1] if handled else before is None))
        handled.append(change.message_id)
        if len(handled) == 1:
            store.commits_to_fail = 3
        if len(handled) == 3:
            listener.stop()

    handled: list[str] = []
    listener = Listener(shop["orders"], handle, resource="orders", store=store, lease_seconds=600)
    listener.run()
    assert notes == [(0, True), *["no answer"] * 3, "committed", (1, True), "committed", (2, True), "committed"]
    assert listener.statistics.leases_lost == 0


def test_a_commit_is_tried_until_the_lease_is_gone_and_then_its_change_comes_again(shop: Any) -> None:
    notes: list[Any] = []
    store = Unreliable(shop["leases"], notes)
    shop.orders.insert_many([{"_id": 0}, {"_id": 1}])
    store.commits_to_fail, store.refreshes_fail = 1 << 30, True

    def handle(change: Change) -> None:
        notes.append((key_of(change), change.version))
        if change.version > notes[0][1]:
            store.commits_to_fail, store.refreshes_fail = 0, False
        if key_of(change) == 1:
            listener.stop()

    listener = Listener(shop["orders"], handle, resource="orders", store=store, lease_seconds=4)
    listener.run()
    assert notes[0][0] == 0
    assert notes.count("no answer") >= 2
    told = [note for note in notes if note != "no answer"]
    first = told.index("committed")
    assert {key for key, _ in told[:first]} == {0}, "the next change waits for the commit"
    versions = [version for _, version in told[:first]]
    # Not one after the other: a busy machine may lose a lease before its change comes.
    assert len(versions) >= 2
    assert versions == sorted(set(versions)), "each time under a new lease"
    assert (told[-2][0], told[-1]) == (1, "committed")
    assert listener.statistics.leases_lost >= 1


def test_a_thread_keeps_the_lease_while_a_handler_takes_longer_than_the_lease(shop: Any) -> None:
    store = MongoLeaseStore(shop["leases"])
    shop.orders.insert_one({"_id": 0})
    versions: list[int] = []

    def handle(change: Change) -> None:
        first = store.read("orders")
        assert first is not None
        assert first.expires_at is not None
        ends = first.expires_at
        until(lambda: store.now() > ends)
        assert store.acquire("orders", "rival", 600) is None
        record = store.read("orders")
        assert record is not None
        assert record.expires_at is not None
        assert record.expires_at > ends
        versions.append(record.version)
        listener.stop()

    listener = Listener(shop["orders"], handle, resource="orders", store=store, lease_seconds=6)
    listener.run()
    assert versions == [1]
    assert (listener.statistics.leases_lost, listener.statistics.commits) == (0, 2)


def test_who_has_lost_the_lease_neither_writes_nor_commits_whatever_its_handler_does(shop: Any) -> None:
    """It stands still where it cannot be told: it has just checked its lease, and now the next owner works."""
    store = MongoLeaseStore(shop["leases"])
    shop.orders.insert_many([{"_id": 0}, {"_id": 1}])
    shop.copies.insert_one({"_id": 0})
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()
    refused: list[Fenced] = []

    def late(change: Change) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        change.fence._check = lambda: None
        with pytest.raises(Fenced) as raised:
            change.fence.update_one(shop.copies, {"_id": 0}, {"$set": {"by": change.version}})
        refused.append(raised.value)  # then the handler returns as if nothing had happened

    def next_owner(change: Change) -> None:
        change.fence.update_one(shop.copies, {"_id": 0}, {"$set": {"by": change.version}})
        if key_of(change) == 1:
            done.set()

    first = Listener(shop["orders"], late, resource="orders", store=store, owner="first", lease_seconds=600)
    second = Listener(shop["orders"], next_owner, resource="orders", store=store, owner="second", lease_seconds=600)
    with first:
        assert begun.wait(WAIT_S)
        store.revoke("orders")
        with second:
            assert done.wait(WAIT_S)
            until(lambda: second.statistics.commits >= 2)
            before = shop.leases.find_one({"_id": "orders"}, {"owner": 1, "version": 1, "position": 1})
            go_on.set()
            until(lambda: first.statistics.leases_lost == 1)
            assert shop.leases.find_one({"_id": "orders"}, {"owner": 1, "version": 1, "position": 1}) == before
            assert (before["owner"], before["version"]) == ("second", 2)
            first.stop()
    assert len(refused) == 1
    assert shop.copies.find_one() == {"_id": 0, "by": 2, "_fence": {"orders": 2}}
    assert first.statistics.commits == 1, "the start, and nothing after it"


def test_an_outside_service_that_keeps_the_newest_token_refuses_the_owner_that_comes_late(shop: Any) -> None:
    """The example of the page, as printed. The page's own test runs it too, but there no owner is late."""
    found = re.search(r"(?ms)^class Mailbox:.*?(?=\n\n\n)", PAGE.read_text())
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[0], names)
    mailbox = names["Mailbox"]()
    store = MongoLeaseStore(shop["leases"])
    shop.orders.insert_one({"_id": 0})
    begun, go_on = threading.Event(), threading.Event()
    refused: list[str] = []

    def send(change: Change) -> None:
        mailbox.send(str(change.document_key), "thanks", token=change.version, message_id=change.message_id)

    def late(change: Change) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        with pytest.raises(ValueError, match="token 1 is older than 2") as raised:
            send(change)
        refused.append(str(raised.value))
        first.stop()

    def next_owner(change: Change) -> None:
        send(change)
        second.stop()

    first = Listener(shop["orders"], late, resource="orders", store=store, lease_seconds=600)
    second = Listener(shop["orders"], next_owner, resource="orders", store=store, lease_seconds=600)
    with first:
        assert begun.wait(WAIT_S)
        store.revoke("orders")
        second.run()
        go_on.set()
    assert len(refused) == len(mailbox.sent) == 1


def test_however_many_lanes_a_process_holds_it_reads_the_oplog_once(replica_set: ReplicaSet, shop: Any) -> None:
    """The server is asked which cursors there are on its oplog."""
    store = MongoLeaseStore(shop["leases"])
    seen: list[Any] = []

    def cursors(admin: Any) -> set[int]:
        idle = {"$currentOp": {"idleCursors": True, "localOps": True}}
        found = admin.aggregate([idle, {"$match": {"ns": "local.oplog.rs", "cursor": {"$exists": True}}}])
        return {one["cursor"]["cursorId"] for one in found}

    with tailrace.connect(replica_set.uri) as client, MongoClient[Any](replica_set.uri) as asking:
        before = cursors(asking.admin)
        listener = Listener(
            client[shop.name]["orders"],
            lambda change: seen.append(key_of(change)),
            resource="orders",
            store=store,
            partitions=4,
        )
        with listener:
            for part in ("first", "second"):
                shop.orders.insert_many([{"_id": f"{part} {number}"} for number in range(50)])
                until(lambda part=part: {f"{part} {number}" for number in range(50)} <= {*seen})
                until(lambda: len(cursors(asking.admin) - before) == 1)


def test_nothing_goes_on_while_no_majority_takes_the_commit(start_replica_set: Callable[..., ReplicaSet]) -> None:
    """The secondaries stop replicating while a change is handled: its commit has no majority, so the next change waits.
    When they go on, everything is handled."""
    members = start_replica_set(3, enable_test_commands=True)
    with tailrace.connect(members.uri) as client, MongoClient[Any](members.uri) as asking:
        shop = client["majority"]
        durable = shop.orders.with_options(write_concern=WriteConcern("majority"))
        durable.insert_many([{"_id": 0}, {"_id": 1}])
        weak = asking["majority"]["leases"].with_options(write_concern=WriteConcern(1))
        store = MongoLeaseStore(weak, timeout_s=2)
        handled: list[Any] = []

        def replication(mode: str) -> None:
            for number, member in enumerate(members.members):
                if number != members.primary:
                    with MongoClient[Any](member.uri) as secondary:
                        secondary.admin.command("configureFailPoint", "stopReplProducer", mode=mode)

        def has_majority() -> bool:
            probe = shop.probe.with_options(write_concern=WriteConcern("majority", wtimeout=3000))
            try:
                probe.insert_one({})
            except WTimeoutError:
                return False
            return True

        def handle(change: Change) -> None:
            if not handled:
                replication("alwaysOn")
                until(lambda: not has_majority())
            handled.append(key_of(change))
            if key_of(change) == 1:
                listener.stop()

        listener = Listener(shop["orders"], handle, resource="orders", store=store, lease_seconds=4)
        listener.start()
        try:
            until(lambda: handled)
            until(lambda: listener.statistics.leases_lost)
            assert handled == [0]
        finally:
            replication("off")
            joined = listener.join(WAIT_S)
        assert joined
        assert handled[0] == 0
        assert list(dict.fromkeys(handled)) == [0, 1]


class Commands(CommandListener):
    """The commands that are sent to a collection of leases."""

    def __init__(self) -> None:
        self.names: list[str] = []
        #: Those of them that are retryable writes, for which the server keeps a record.
        self.retryable: list[str] = []

    def started(self, event: CommandStartedEvent) -> None:
        if "leases" in (event.command.get(event.command_name), event.command.get("collection")):
            self.names.append(event.command_name)
            if "txnNumber" in event.command:
                self.retryable.append(event.command_name)

    def succeeded(self, event: Any) -> None:
        pass

    def failed(self, event: Any) -> None:
        pass


def test_a_commit_of_a_listener_without_lanes_is_no_retryable_write(replica_set: ReplicaSet, shop: Any) -> None:
    """It was a findAndModify, for which the server keeps an image: 1.77 times the cost of an update."""
    commands = Commands()
    shop.orders.insert_many([{"_id": number} for number in range(30)])

    def handle(change: Change) -> None:
        if key_of(change) == 29:
            listener.stop()

    with MongoClient(replica_set.uri, event_listeners=[commands]) as client:
        store = MongoLeaseStore(client[shop.name]["leases"])
        listener = Listener(shop.orders, handle, resource="orders", store=store)
        listener.run()
    assert listener.statistics.commits == 31, "the start, and each change"
    assert commands.names.count("findAndModify") < 5
    assert commands.names.count("update") >= 30
    assert commands.retryable.count("update") < 5
