"""How listeners are doing, on a real replica set: the one that works, and the one that stands by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from bson.timestamp import Timestamp

import tailrace
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.standing import Standing
from tailrace.consumer import Change, Listener, MemoryLeaseStore, MongoLeaseStore
from tailrace.embedded import ReplicaSet

pytestmark = pytest.mark.mongod


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end, "it has not come so far"
        time.sleep(0.05)


def test_a_quiet_listener_is_not_behind_and_who_stands_by_shows_what_is_committed(replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri) as client:
        database = client["standing"]
        store = MongoLeaseStore(database["leases"])
        handled: list[Change] = []
        first = Listener(database["orders"], handled.append, resource="r", store=store, start="now")
        other = Listener(database["orders"], handled.append, resource="r", store=store, start="now")
        standing = Standing([first, other], client, store)
        assert standing.health().trouble == "; ".join(["the listener on 'r' has not asked for its lease yet"] * 2)
        with first:
            until(lambda: first.statistics.lease_version)
            with other:
                until(lambda: other.has_begun)
                for _ in range(3):  # other writes: the oplog grows, and the stream gives nothing
                    database["elsewhere"].insert_one({})
                    standing.look()
                    now = client.admin.command("ping")["operationTime"].time
                    until(lambda now=now: first.statistics.position_time >= now)
                    assert standing.lag(first) == (0, True)
                seconds, holds = standing.lag(other)
                assert seconds is not None
                assert (seconds >= 0, holds) == (True, False)
                assert standing.health().trouble is None
        client.drop_database("standing")


@pytest.mark.parametrize("lanes", [False, True])
def test_a_position_that_is_older_than_the_oplog_is_told_by_who_stands_by(
    replica_set: ReplicaSet, lanes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tailrace.connect(replica_set.uri) as client:
        store = MemoryLeaseStore()
        lease = store.acquire("r", "somebody", 600)
        assert lease is not None
        old = StreamPosition(at=Timestamp(1_000_000, 1))
        store.commit(lease, LanePlan(2, old).to_document() if lanes else old.to_document(), 600)
        listener = Listener(client["standing"]["orders"], print, resource="r", store=store, owner="me")
        standing = Standing([listener], client, store)
        listener._logic.begun = True
        standing.look()
        assert standing.health().unready is None, "the first entry of this oplog is that of its set"
        seconds, holds = standing.lag(listener)
        assert seconds is not None
        assert (seconds > 1_000_000, holds) == (True, False)
        monkeypatch.setattr(
            "tailrace.read.source.mongod.MongodSource.oldest", lambda self: (self.operation_time(), False)
        )
        standing.look()
        assert "older than the oldest entry of the oplog" in str(standing.health().unready)


def test_what_does_not_answer_is_told_without_waiting() -> None:
    with tailrace.connect("mongodb://127.0.0.1:9/?replicaSet=rs", serverSelectionTimeoutMS=200) as client:
        store = MemoryLeaseStore()
        listener = Listener(client["standing"]["orders"], print, resource="r", store=store)
        listener._logic.begun = True
        standing = Standing([listener], client, store)
        standing.look()
        assert standing.health().trouble is None
        standing._deployment.at -= 60
        assert "there was no answer from the deployment: " in str(standing.health().unready)
        assert standing.lag(listener) == (None, False)
