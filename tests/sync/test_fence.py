"""An old owner that was stopped for longer than its lease and wakes up again changes nothing, wherever it was
stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, DuplicateKeyError

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.sync import ownership as ownership_module
from tailrace.act.sync.ownership import SyncOwnership, own
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.act.sync.target import UNKNOWN_COMMIT
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tests.commands import Piped
from tests.sync.follow import LOST
from tests.sync.following import begun, following, now, unequal
from tests.sync.programs import program

pytestmark = [pytest.mark.mongod, pytest.mark.used_servers]
Start = Callable[..., ReplicaSet]
OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]
VERSIONS = ["6.0.27", *OLDER, pytest.param("7.0.28", marks=[pytest.mark.slow, pytest.mark.wine])]


def held(client: MongoClient[Any], **options: Any) -> tuple[SyncState, SyncOwnership]:
    state = SyncState(client, SyncSettings(lease_s=1, **options))
    state.begin(ClusterTime.of(5, 1), members={}, witness=None)
    return state, own(state)


def outlived(ownership: SyncOwnership) -> None:
    """The lease runs out while its process does nothing, and the process does not notice."""
    ownership._closed.set()
    time.sleep(1.3)
    ownership._deadline = float("inf")


def test_the_next_owner_leaves_alone_what_the_one_before_does_after_it_has_given_the_lease_back(
    start_replica_set: Start,
) -> None:
    """The driver reused an owner's sessions for later operations of its process, and the next owner killed these: a
    verification ended with 11601. No test had used an owner's client for anything else."""
    uri = start_replica_set().uri
    with MongoClient[Any](uri) as client, MongoClient[Any](uri) as another:
        client.shop.create_collection("orders")
        state, first = held(client)
        ids = [session.session_id for session in first._sessions]
        first.close()
        with client.start_session() as session, session.start_transaction():
            client.shop.orders.insert_one({"_id": 1}, session=session)
            assert session.session_id in ids, "the driver's pool gives the one that was used last"
            with own(SyncState(another, state.settings), wait_s=10):
                client.shop.orders.insert_one({"_id": 2}, session=session)
        assert client.shop.orders.count_documents({}) == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_owner_writes_nothing_in_any_lane_and_defines_nothing(version: str, start_replica_set: Start) -> None:
    with MongoClient[Any](start_replica_set(version=version).uri) as client:
        client.shop.create_collection("orders")
        state, old = held(client, lanes=2)
        outlived(old)
        with own(state, wait_s=10) as new:
            for lane in range(old.lanes):
                old._lost = None
                with pytest.raises(LeaseLost):
                    old.run(
                        lambda session: client.shop.orders.insert_one({}, session=session),
                        lane=lane,
                        sets={"time": Timestamp(9, 9)},
                    )
            drop = {"op": "c", "ns": "shop.$cmd", "o": {"drop": "orders"}}
            with pytest.raises(DuplicateKeyError):
                client.admin.command({"applyOps": [old.fence_operation(), drop]})
            assert client.shop.orders.count_documents({}) == 0
            assert client.shop.list_collection_names() == ["orders"]
            found = state.read()
            assert found is not None
            assert (found.time, found.epoch) == (ClusterTime.of(5, 1), 2)
            new.run(lambda session: client.shop.orders.insert_one({}, session=session), lane=1)
            client.admin.command({"applyOps": [new.fence_operation(), drop]})
            assert client.shop.list_collection_names() == []


def test_the_lease_is_not_given_while_it_is_held_and_is_free_after_close(start_replica_set: Start) -> None:
    with MongoClient[Any](start_replica_set().uri) as client:
        state, first = held(client)
        time.sleep(2)
        with pytest.raises(LeaseLost, match="another owner"):
            own(state)
        first.check()
        first.close()
        own(state).close()


def test_a_lease_that_runs_out_during_a_transaction_is_taken_up_again(start_replica_set: Start) -> None:
    """The transaction keeps the sync's document, so nothing refreshes the lease. If the transaction had to be retried
    in another way, the next owner got to the same place, and so on for ever."""
    with MongoClient[Any](start_replica_set().uri) as client:
        client.shop.create_collection("orders")
        state, owner = held(client)
        owner._closed.set()  # nothing else refreshes it
        owner.run(lambda session: time.sleep(1.3))
        owner.run(lambda session: client.shop.orders.insert_one({}, session=session))
        assert client.shop.orders.count_documents({}) == 1
        with pytest.raises(LeaseLost, match="another owner"):
            own(SyncState(client, state.settings))
        time.sleep(1.3)
        with own(SyncState(client, state.settings)), pytest.raises(LeaseLost, match="another owner"):
            owner.check()


def test_a_transaction_of_a_process_that_died_holds_nobody_up(start_replica_set: Start) -> None:
    """The server would keep it for a minute."""
    with MongoClient[Any](start_replica_set().uri) as client:
        client.shop.create_collection("orders")
        state, old = held(client)

        def died(session: Any) -> None:
            client.shop.orders.insert_one({}, session=session)
            raise KeyboardInterrupt

        session = old._sessions[0]
        session.abort_transaction = lambda: None  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            old.run(died)
        old._closed.set()
        with own(state, wait_s=50) as new:
            new.run(lambda session: None)
        assert client.shop.orders.count_documents({}) == 0


def test_a_commit_whose_answer_was_lost_is_not_done_twice(start_replica_set: Start) -> None:
    with MongoClient[Any](start_replica_set().uri) as client:
        client.shop.create_collection("orders")
        _, ownership = held(client)
        session = ownership._sessions[0]
        commit = session.commit_transaction
        answers = iter([False])

        def lost() -> None:
            commit()
            if not next(answers, True):
                raise AutoReconnect("the answer was lost")

        session.commit_transaction = lost  # type: ignore[method-assign]
        done = ownership.run(lambda session: client.shop.orders.insert_one({"n": 1}, session=session).inserted_id)
        assert [one["_id"] for one in client.shop.orders.find()] == [done]
        ownership.run(lambda session: client.shop.orders.insert_one({"n": 2}, session=session))
        assert client.shop.orders.count_documents({}) == 2
        ownership.close()


@pytest.mark.parametrize("lane", [0, 1])
def test_a_commit_whose_outcome_is_not_known_and_that_was_none_is_done_again(
    lane: int, start_replica_set: Start
) -> None:
    """If it counted as done, the position would be there and the document would be missing."""
    with MongoClient[Any](start_replica_set().uri) as client:
        client.shop.create_collection("orders")
        state, ownership = held(client, lanes=2)
        session = ownership._sessions[lane]
        commit, left = session.commit_transaction, [ownership_module._COMMIT_TRIES]

        def lost() -> None:
            if not left[0]:
                commit()
                return
            left[0] -= 1
            if session.in_transaction:
                session.abort_transaction()  # as an election does
            error = AutoReconnect("the answer was lost")
            error._add_error_label(UNKNOWN_COMMIT)
            raise error

        session.commit_transaction = lost  # type: ignore[method-assign]
        for number in (1, 2):
            ownership.run(
                lambda session, number=number: client.shop.orders.insert_one({"_id": number}, session=session),
                lane=lane,
                sets={"time": Timestamp(9, number)},
            )
            assert client.shop.orders.count_documents({}) == number
        assert left == [0]
        fence = state.syncs if lane == 0 else state.lanes
        assert [one["time"] for one in fence.find({"time": Timestamp(9, 2)})] == [Timestamp(9, 2)]
        ownership.close()


def asleep(process: Piped) -> None:
    """Wait until a process has stopped itself."""
    end = time.monotonic() + 60
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("place", ["commit", "transaction", "definition"])
def test_one_that_slept_past_its_lease_changes_nothing_when_it_wakes(place: str, start_replica_set: Start) -> None:
    source, target = start_replica_set(), start_replica_set()
    settings = SyncSettings(lease_s=1)
    begun(source.uri, target.uri, settings)
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        client.shop.orders.insert_many([{"_id": one} for one in range(10)])
        old = program("follow", source.uri, target.uri, "sync", 1, 1, place)
        try:
            asleep(old)
            with following(source.uri, target.uri, settings) as follower:
                follower.run_until(now(source.uri))
                client.shop.orders.update_many({}, {"$set": {"n": 1}})
                client.shop.orders.delete_one({"_id": 3})
                client.shop.orders.rename("sold")
                client.shop.orders.insert_one({"_id": "new"})
                follower.run_until(now(source.uri))
                before = SyncState(there, settings).read()
                os.kill(old.pid, signal.SIGCONT)
                assert old.wait(60) == LOST
                after = SyncState(there, settings).read()
                assert before is not None
                assert after is not None
                assert (before.time, before.epoch, before.batch) == (after.time, after.epoch, after.batch)
                assert unequal(source.uri, target.uri, settings) == []
        finally:
            old.kill()
            old.wait()
