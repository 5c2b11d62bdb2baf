"""Leases in MongoDB: the promises of a store on each server version, and what becomes of edited documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import MongoClient, WriteConcern, monitoring

from tailrace.act.consumer.lease import LeaseCommit
from tailrace.consumer import Lease, LeaseDocumentError, LeaseLost, LeaseStoreUnavailable, MongoLeaseStore
from tailrace.embedded import Mongod, ReplicaSet
from tailrace.errors import UsageError
from tailrace.testing import check_lease_store
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = pytest.mark.mongod


class Commands(monitoring.CommandListener):
    """The commands that were sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.sent.append(event.command)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


@pytest.fixture
def leases(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    with MongoClient(replica_set.uri) as client:
        name = f"leases_{abs(hash(request.node.nodeid)) % 10**9}"
        yield client[name]["leases"]
        client.drop_database(name)


@pytest.mark.parametrize("version", [SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def test_the_store_keeps_every_promise(
    version: str, replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet]
) -> None:
    running = replica_set if version == SERVER_VERSION else start_replica_set(1, version=version)
    with ExitStack() as stack:

        def new_store() -> MongoLeaseStore:
            client = stack.enter_context(MongoClient(running.uri))
            return MongoLeaseStore(client["check"]["leases"])

        check_lease_store(new_store)
        new_store()._plain.drop()


def test_no_time_of_the_client_s_reaches_the_server(replica_set: ReplicaSet) -> None:
    """A lease must be judged by one clock. The check of a store cannot change a client's clock, so the commands are
    inspected."""
    commands = Commands()
    with MongoClient(replica_set.uri, event_listeners=[commands]) as client:
        store = MongoLeaseStore(client["client_clock"]["leases"])
        lease = store.acquire("orders", "a", 5)
        assert lease is not None
        lease = store.commit(lease, {"token": {"_data": "82"}}, 5)
        lease = store.refresh(lease, 5)
        assert store.commit_together([LeaseCommit(lease, {"token": {"_data": "83"}}, 5)]) == [None]
        with store.transaction(lease, {"token": {"_data": "84"}}, 5):
            pass
        store.release(lease)
        client.drop_database("client_clock")

    def dates(value: Any) -> Iterator[datetime]:
        if isinstance(value, datetime):
            yield value
        elif isinstance(value, dict):
            for inner in value.values():
                yield from dates(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                yield from dates(inner)

    writes = [dict(command) for command in commands.sent if {"findAndModify", "update"} & set(command)]
    # acquire, commit and refresh; two commits in one request; a commit inside a transaction; release
    assert [next(iter(command)) for command in writes] == [
        *["findAndModify"] * 3,
        "update",
        "findAndModify",
        "update",
    ]
    assert {command.get("upsert", False) for command in writes} == {True, False}
    assert list(dates(writes)) == []
    assert str(writes).count("$$NOW") >= 5
    concerns = [command["writeConcern"]["w"] for command in writes if "autocommit" not in command]
    assert concerns == ["majority"] * 5


EDITED: dict[str, dict[str, Any]] = {
    "a version that is no number": {"version": "7"},
    "a version below zero": {"version": -1},
    "a version with a fraction": {"version": 1.5},
    "a version that is not a number": {"version": float("nan")},
    "a version without end": {"version": float("inf")},
    "a version that is true": {"version": True},
    "a version that is null": {"version": None},
    "an owner that is a number": {"owner": 5},
    "a position that is a text": {"position": "8265"},
    "an expiry that is a text": {"expiresAt": "2026-01-01"},
    "an expiry that is a number": {"expiresAt": 5},
    "another field": {"expires_at": 5},
}


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_document_is_an_error_and_stays_as_it_is(name: str, leases: Any) -> None:
    store = MongoLeaseStore(leases)
    lease = store.acquire("orders", "a", 600)
    assert lease is not None
    leases.update_one({"_id": "orders"}, {"$set": EDITED[name]})
    before = leases.find_one()
    for owner in ("a", "b"):
        if name == "another field" and owner == "a":
            continue
        with pytest.raises(LeaseDocumentError, match="'orders'"):
            store.acquire("orders", owner, 600)
    with pytest.raises(LeaseDocumentError):
        store.read("orders")
    if name == "another field":
        return
    assert repr(leases.find_one()) == repr(before)
    if EDITED[name].keys() & {"position", "expiresAt"}:
        # Owner and version still say whose it is: the owner's next commit corrects the fields that it writes anyway.
        assert store.commit(lease, {"token": {"_data": "1"}}, 600).position == {"token": {"_data": "1"}}
        return
    with pytest.raises((LeaseDocumentError, LeaseLost)):
        store.commit(lease, {"token": {"_data": "1"}}, 600)
    assert repr(leases.find_one()) == repr(before)


def test_a_version_that_was_removed_is_an_error(leases: Any) -> None:
    store = MongoLeaseStore(leases)
    store.acquire("orders", "a", 600)
    leases.update_one({"_id": "orders"}, {"$unset": {"version": 1}})
    with pytest.raises(LeaseDocumentError, match="version is not a whole number"):
        store.acquire("orders", "a", 600)


def test_a_whole_number_that_a_shell_has_written_as_a_double_is_taken(leases: Any) -> None:
    leases.insert_one({"_id": "orders", "version": 6.0, "owner": None, "position": {"token": {"_data": "82"}}})
    lease = MongoLeaseStore(leases).acquire("orders", "a", 600)
    assert lease is not None
    assert lease.version == 7
    assert isinstance(leases.find_one()["version"], Int64)


def test_a_record_that_was_deleted_is_a_lost_lease(leases: Any) -> None:
    store = MongoLeaseStore(leases)
    lease = store.acquire("orders", "a", 600)
    assert lease is not None
    leases.delete_one({})
    with pytest.raises(LeaseLost, match="its record is gone"):
        store.commit(lease, {"token": {"_data": "1"}}, 600)


def test_a_weaker_write_concern_of_the_collection_is_not_used(leases: Any) -> None:
    weak = leases.with_options(write_concern=WriteConcern(0))
    lease = MongoLeaseStore(weak).acquire("orders", "a", 600)
    assert isinstance(lease, Lease)


def test_commits_together_that_no_majority_has_are_not_known_to_be_done(leases: Any) -> None:
    """The command itself succeeds then, and PyMongo raises nothing."""
    store = MongoLeaseStore(leases)
    lease = store.acquire("orders", "a", 600)
    assert lease is not None
    admin = leases.database.client.admin
    failure = {"code": 64, "codeName": "WriteConcernFailed", "errmsg": "waiting for replication timed out"}
    admin.command(
        "configureFailPoint",
        "failCommand",
        mode={"times": 1},
        data={"failCommands": ["update"], "writeConcernError": failure, "namespace": leases.full_name},
    )
    with pytest.raises(LeaseStoreUnavailable, match="waiting for replication timed out"):
        store.commit_together([LeaseCommit(lease, {"token": {"_data": "82"}}, 600)])
    assert store.commit_together([LeaseCommit(lease, {"token": {"_data": "83"}}, 600)]) == [None]
    assert store.read("orders").position == {"token": {"_data": "83"}}  # type: ignore[union-attr]


def test_a_standalone_server_is_refused() -> None:
    with Mongod() as alone, MongoClient(alone.uri) as client:
        store = MongoLeaseStore(client["check"]["leases"])
        with pytest.raises(UsageError, match="standalone"):
            store.acquire("orders", "a", 600)
        assert client["check"]["leases"].find_one() is None


@pytest.mark.parametrize("step", ["acquire", "refresh", "commit"])
def test_what_no_majority_has_is_not_granted(step: str, leases: Any) -> None:
    """The server carries the command out and reports that it could not wait for the majority. That ended the listener,
    as if a retry could not help; only joint commits had been tried."""
    store = MongoLeaseStore(leases)
    lease = None if step == "acquire" else store.acquire("orders", "a", 600)
    failure = {"code": 64, "codeName": "WriteConcernFailed", "errmsg": "waiting for replication timed out"}
    leases.database.client.admin.command(
        "configureFailPoint",
        "failCommand",
        mode={"times": 1},
        data={"failCommands": ["findAndModify"], "writeConcernError": failure, "namespace": leases.full_name},
    )
    calls: dict[str, Any] = {
        "acquire": lambda: store.acquire("orders", "a", 600),
        "refresh": lambda: store.refresh(lease, 600),  # type: ignore[arg-type]
        "commit": lambda: store.commit(lease, {"token": {"_data": "82"}}, 600),  # type: ignore[arg-type]
    }
    with pytest.raises(LeaseStoreUnavailable, match="waiting for replication timed out"):
        calls[step]()


def test_a_server_that_is_away_is_asked_again_by_the_caller() -> None:
    with MongoClient("mongodb://127.0.0.1:9/?serverSelectionTimeoutMS=200") as client:
        store = MongoLeaseStore(client["check"]["leases"], timeout_s=0.5)
        with pytest.raises(LeaseStoreUnavailable, match="cannot acquire the lease on 'orders'"):
            store.acquire("orders", "a", 600)


def test_what_is_no_collection_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a PyMongo collection"):
        MongoLeaseStore("mongodb://localhost")  # type: ignore[arg-type]


def test_a_commit_that_arrives_after_newer_ones_changes_nothing(replica_set: ReplicaSet) -> None:
    """A server that was frozen goes on with commands whose client has given them up and sent others since. Their order
    is chance; here the same command is sent once more after the newer ones. In every earlier test, commands were
    carried out at once or never."""
    commands = Commands()
    old, new = ({"token": {"_data": f"82{number:016X}2B02"}} for number in (5, 6))
    with MongoClient(replica_set.uri, event_listeners=[commands]) as client:
        database = client["late_commits"]
        store = MongoLeaseStore(database["leases"])
        lease = store.acquire("orders", "a", 600)
        assert lease is not None
        store.commit(lease, old, 600)
        assert store.commit_together([LeaseCommit(lease, old, 600)]) == [None]
        late = [sent for sent in commands.sent if {"findAndModify", "update"} & sent.keys()][-2:]
        assert store.commit_together([LeaseCommit(lease, new, 600)]) == [None]
        before = database["leases"].find_one()
        of_session = {"lsid", "txnNumber", "$clusterTime", "$db", "maxTimeMS"}
        replies = [database.command({name: sent[name] for name in sent if name not in of_session}) for sent in late]
        assert [replies[0]["value"], replies[1]["nModified"]] == [None, 0]
        assert database["leases"].find_one() == before
        client.drop_database("late_commits")
