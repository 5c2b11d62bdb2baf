"""Four processes on a real replica set and on a sharded cluster, through kills, stops, step-downs and moving chunks:
nothing is lost, each document's order is kept, and what a stopped process still writes changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pymongo
import pytest

import tailrace
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.consumer import ordeal_view
from tests.consumer.ordeal import Ordeal, check, check_history

pytestmark = pytest.mark.mongod


def writer(client: pymongo.MongoClient[Any], database: str) -> Callable[[int, dict[str, Any]], Any]:
    orders = client[database]["orders"]
    return lambda key, fields: orders.update_one({"_id": key}, {"$set": fields}, upsert=True)


def test_four_processes_through_a_kill_and_a_stop(replica_set: ReplicaSet, capsys: pytest.CaptureFixture[str]) -> None:
    """They keep a view beside it."""
    with tailrace.connect(replica_set.uri) as client:
        client["ordeal"]["carts"].create_index("customer_id")
        ordeal = Ordeal(
            replica_set.uri,
            replica_set.uri,
            "ordeal",
            writer(client, "ordeal"),
            800,
            20,
            pauses_one_in=20,
            beside=ordeal_view.acting_on(client["ordeal"]),
            has_settled=ordeal_view.settled(client),
        )
        ordeal.run()
        check(ordeal)
        check_view(client, replica_set.uri, capsys)
        for name in ("ordeal", "ordeal_effects"):
            client.drop_database(name)


def check_view(client: Any, uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    ordeal_view.verify(uri, capsys)
    carts = client["ordeal"]["carts"]
    assert carts.count_documents({"buyer": {"$exists": True}}) > 5
    assert carts.count_documents({"_views.customer_id": {"$type": "timestamp"}}) > 5


def test_a_history_that_is_wrong_is_found() -> None:
    """The checks of the ordeal can fail."""

    def one(n: int, version: int) -> dict[str, int]:
        return {"n": n, "version": version}

    check_history([one(1, 1), one(2, 1), one(2, 2), one(3, 2)], 3, exactly_once=False)
    for wrong in (
        [one(1, 1), one(3, 1)],
        [one(1, 1), one(3, 1), one(2, 1)],
        [one(1, 2), one(2, 1), one(3, 2)],
        [one(1, 1), one(2, 1), one(1, 1), one(3, 1)],
    ):
        with pytest.raises(AssertionError):
            check_history(wrong, 3, exactly_once=False)
    with pytest.raises(AssertionError):
        check_history([one(1, 1), one(2, 1), one(2, 2), one(3, 2)], 3, exactly_once=True)


@pytest.mark.slow
@pytest.mark.parametrize("in_transaction", [False, True], ids=["fenced", "transactions"])
@pytest.mark.parametrize(
    ("version", "changes"), [("6.0.27", 20_000), ("5.0.4", 3000), ("4.4.2", 3000)], ids=["6.0", "5.0", "4.4"]
)
def test_four_processes_through_step_downs_too(
    start_replica_set: Callable[..., ReplicaSet],
    capsys: pytest.CaptureFixture[str],
    version: str,
    changes: int,
    in_transaction: bool,
) -> None:
    """They keep a view beside it."""
    members = start_replica_set(members=3, version=version)
    with tailrace.connect(members.uri) as client:
        client["ordeal"]["carts"].create_index("customer_id")
        ordeal = Ordeal(
            members.uri,
            members.uri,
            "ordeal",
            writer(client, "ordeal"),
            changes,
            in_transaction=in_transaction,
            torments=4 if changes > 10_000 else 2,
            events=[members.step_down, members.step_down],
            pauses_one_in=200 if changes > 10_000 else 60,
            beside=ordeal_view.acting_on(client["ordeal"]),
            has_settled=ordeal_view.settled(client),
        )
        ordeal.run()
        check(ordeal)
        check_view(client, members.uri, capsys)
    print(f"{version}: {changes} changes, {ordeal.killed} kills, {ordeal.stopped} stops, {ordeal.refused} refused")


@pytest.mark.slow
@pytest.mark.parametrize("in_transaction", [False, True], ids=["fenced", "transactions"])
@pytest.mark.parametrize(
    ("version", "changes"), [("6.0.27", 20_000), ("5.0.4", 3000), ("4.4.2", 3000)], ids=["6.0", "5.0", "4.4"]
)
def test_four_processes_over_a_cluster_while_chunks_move(
    replica_set: ReplicaSet,
    start_sharded_cluster: Callable[..., ShardedCluster],
    version: str,
    changes: int,
    in_transaction: bool,
) -> None:
    cluster = start_sharded_cluster(shards=2, version=version)
    router, (first, second) = cluster.router, list(cluster.shards)
    namespace = "ordeal.orders"
    router.create_database("ordeal", first)
    router.shard_collection(namespace, {"_id": 1})
    for key in (25, 50, 75):
        router.split(namespace, {"_id": key})
    ended = threading.Event()
    moves: list[str] = []

    def move() -> None:
        while not ended.is_set():
            for key, shard in ((0, second), (60, second), (0, first), (60, first)):
                router.move_chunk(namespace, {"_id": key}, to=shard, wait=False)
                moves.append(shard)
                if ended.wait(1.0):
                    return

    ordeal = Ordeal(
        cluster.uri,
        replica_set.uri,
        "ordeal",
        lambda key, fields: router.update_one(namespace, {"_id": key}, {"$set": fields}, upsert=True),
        changes,
        in_transaction=in_transaction,
        torments=4 if changes > 10_000 else 2,
        pauses_one_in=200 if changes > 10_000 else 60,
    )
    mover = threading.Thread(target=move, daemon=True)
    mover.start()
    try:
        ordeal.run()
        check(ordeal)
    finally:
        ended.set()
        mover.join(60)
    assert len(moves) > 4
    print(f"{version}: {changes} changes, {ordeal.killed} kills, {ordeal.stopped} stops, {len(moves)} chunks moved")
