"""Figure 4: what is written before the first listener, and between its start and its crash, is handled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.act.consumer.snapshots import oldest_time
from tailrace.consumer import Change, Listener, MongoLeaseStore
from tailrace.embedded import ReplicaSet
from tests.consumer.shops import new_shop, until
from tests.forked import Forked
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = pytest.mark.mongod

HANDLER = """
import time
from pathlib import Path

def hangs(change):
    Path("begun").touch()
    time.sleep(1000)
"""


@pytest.fixture(scope="module", params=[SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def members(request: pytest.FixtureRequest, replica_set: ReplicaSet) -> Iterator[ReplicaSet]:
    if request.param == replica_set.version:
        yield replica_set
        return
    with ReplicaSet(version=request.param) as started:
        yield started


@pytest.fixture
def shop(members: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    with new_shop(members.uri, request, "bootstrap") as made:
        yield made


def handled(shop: Any, last: tuple[str, Any], start: Any) -> list[tuple[str, Any]]:
    """What a listener handles up to ``last``."""
    seen: list[tuple[str, Any]] = []

    def handle(change: Change) -> None:
        seen.append((change.operation_type, (change.document_key or {})["_id"]))

    store = MongoLeaseStore(shop["leases"])
    with Listener(shop["orders"], handle, resource="orders", store=store, start=start, lease_seconds=6):
        until(lambda: last in seen)
    return seen


def test_the_oldest_entry_is_the_first_that_is_no_no_op(shop: Any) -> None:
    """A replica set's oplog begins with the no-op of its initiation."""
    oplog = shop.client["local"]["oplog.rs"]
    begins = oplog.find_one({}, sort=[("$natural", 1)])
    expected = oplog.find_one({"op": {"$ne": "n"}}, sort=[("$natural", 1)])
    assert begins["op"] == "n"
    assert begins["ts"] < expected["ts"]
    assert oldest_time(shop.client) == expected["ts"]


@pytest.mark.parametrize("start", ["oldest", "snapshot"])
def test_figure_4a_what_was_written_before_the_first_listener_is_handled(shop: Any, start: str) -> None:
    shop.orders.insert_one({"_id": "t1"})
    first = ("insert" if start == "oldest" else "snapshot", "t1")
    assert handled(shop, first, start) == [first]


@pytest.mark.parametrize("start", ["oldest", "now", "snapshot"])
def test_figure_4b_what_was_written_between_the_start_and_the_crash_is_handled(
    shop: Any, members: ReplicaSet, tmp_path: Path, start: str
) -> None:
    """The first listener is a process that is killed while it handles the change. With a snapshot, more is written
    while it copies."""
    (tmp_path / "handlers.py").write_text(HANDLER)
    if start == "snapshot":
        shop.orders.insert_many([{"_id": number} for number in range(300)])
    where = ["--database", shop.name, "--collection", "orders", "--resource", "orders", "--start", start]
    where += ["--store", f"{shop.name}.leases", "--lease-seconds", "1"]
    env = {**os.environ, "TAILRACE_URI": members.uri}
    process = Forked("tailrace", ["listen", "handlers:hangs", *where], cwd=tmp_path, env=env)
    try:
        store = MongoLeaseStore(shop["leases"])
        until(lambda: (lease := store.read("orders")) is not None and lease.position is not None)
        if start == "snapshot":
            until((tmp_path / "begun").exists)
            shop.orders.delete_one({"_id": 299})
            shop.orders.update_one({"_id": 0}, {"$set": {"n": 1}})
        shop.orders.insert_one({"_id": "t2"})
        until((tmp_path / "begun").exists)
    finally:
        process.kill()
        process.wait()
    shop.orders.insert_one({"_id": "t3"})
    seen = handled(shop, ("insert", "t3"), start)
    changes = [one for one in seen if one[0] != "snapshot"]
    assert changes[-2:] == [("insert", "t2"), ("insert", "t3")]
    if start == "snapshot":  # what was there when it began, and every change since, in order
        assert changes == [("delete", 299), ("update", 0), ("insert", "t2"), ("insert", "t3")]
        copied = {id_ for kind, id_ in seen if kind == "snapshot"}
        assert copied | {299} >= set(range(300))
