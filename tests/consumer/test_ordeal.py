"""Four processes on a real replica set and on a sharded cluster, through kills, stops, step-downs and moving chunks:
nothing is lost, each document's order is kept, and what a stopped process still writes changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pymongo
import pytest

import tailrace
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.amounts import amount
from tests.consumer import ordeal_view
from tests.consumer.ordeal import Ordeal, check, check_history
from tests.server_in_use import SERVER_VERSION
from tests.sharded.mongos import Mongos

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
            amount(100, 800),
            20,
            pauses_one_in=5,
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
    assert len(list(carts.find({"buyer": {"$exists": True}}))) > 5
    assert len(list(carts.find({"_views.customer_id": {"$type": "timestamp"}}))) > 5


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
@pytest.mark.parametrize(("version", "changes"), [(SERVER_VERSION, 20_000), ("5.0.4", 3000), ("4.4.2", 3000)])
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


@dataclass
class Moves:
    """Chunks of what is watched, and of a side of the view, go to and fro between two shards while it is entered."""

    cluster: ShardedCluster
    count: int = 0

    def __post_init__(self) -> None:
        router, (first, second, *_) = self.cluster.router, list(self.cluster.shards)
        router.create_database("ordeal", first)
        router.shard_collection("ordeal.orders", {"_id": 1})
        router.shard_collection("ordeal.carts", {"_id": 1})
        router.shard_collection("ordeal.customers", {"_id": "hashed"})
        for key in (25, 50, 75):
            router.split("ordeal.orders", {"_id": key})
        router.split("ordeal.carts", {"_id": 20})
        self._steps = [("orders", 0, second), ("carts", 30, second), ("orders", 60, second)]
        self._steps += [("orders", 0, first), ("carts", 30, first), ("orders", 60, first)]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._move, daemon=True)

    def _move(self) -> None:
        while not self._ended.is_set():
            for name, key, shard in self._steps:
                self.cluster.router.move_chunk(f"ordeal.{name}", {"_id": key}, to=shard, wait=False)
                self.count += 1
                if self._ended.wait(1.0):
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(300)


def over_a_cluster(
    cluster: ShardedCluster, leases: ReplicaSet, capsys: pytest.CaptureFixture[str], changes: int, **options: Any
) -> str:
    """The ordeal over sharded collections, with a view between two of them that is written through a mongos."""
    router = cluster.router
    moves = Moves(cluster)
    with Mongos(cluster) as mongos, tailrace.connect(mongos.uri) as client:
        ordeal = Ordeal(
            mongos.uri,
            leases.uri,
            "ordeal",
            lambda key, fields: router.update_one("ordeal.orders", {"_id": key}, {"$set": fields}, upsert=True),
            changes,
            beside=ordeal_view.acting_on(client["ordeal"]),
            has_settled=ordeal_view.settled(client),
            **options,
        )
        with moves:
            ordeal.run()
        check(ordeal)
        check_view(client, mongos.uri, capsys)
    return f"{changes} changes, {ordeal.killed} kills, {ordeal.stopped} stops, {moves.count} chunks moved"


# Above is a replica set. Transactions are in test_once.py, and moving chunks in test_sharded_views.py.
@pytest.mark.slow
def test_transactions_over_a_cluster_while_chunks_move(
    replica_set: ReplicaSet, start_sharded_cluster: Callable[..., ShardedCluster], capsys: pytest.CaptureFixture[str]
) -> None:
    """A slice of the longer ones below."""
    cluster, options = start_sharded_cluster(shards=2), {"in_transaction": True, "pauses_one_in": 5}
    over_a_cluster(cluster, replica_set, capsys, amount(120, 500), documents=20, **options)
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        client.drop_database("ordeal_effects")


@pytest.mark.slow
@pytest.mark.parametrize("in_transaction", [False, True], ids=["fenced", "transactions"])
@pytest.mark.parametrize(("version", "changes"), [(SERVER_VERSION, 20_000), ("5.0.4", 3000), ("4.4.2", 3000)])
def test_four_processes_over_a_cluster_while_chunks_move(  # noqa: PLR0917
    replica_set: ReplicaSet,
    start_sharded_cluster: Callable[..., ShardedCluster],
    capsys: pytest.CaptureFixture[str],
    version: str,
    changes: int,
    in_transaction: bool,
) -> None:
    told = over_a_cluster(
        start_sharded_cluster(shards=2, version=version),
        replica_set,
        capsys,
        changes,
        in_transaction=in_transaction,
        torments=4 if changes > 10_000 else 2,
        pauses_one_in=200 if changes > 10_000 else 60,
    )
    print(f"{version}: {told}")
