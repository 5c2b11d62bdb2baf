"""What stands behind the pages' URIs: a shop that somebody is working in all the while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

from tailrace.embedded import ReplicaSet, ShardedCluster

#: Two such shops at twenty orders a second took a fifth of a processor while the pages ran.
_PAUSE_S = 0.2


def order(number: int) -> dict[str, Any]:
    return {
        "_id": number,
        "customer": {"name": "Ann", "city": "Oslo"},
        "status": ("open", "paid")[number % 2],
        "total": 12.5 * number,
        "placed": datetime(2026, 11, 21, tzinfo=UTC),
    }


@contextmanager
def _working(act: Callable[[int], None]) -> Iterator[None]:
    over = threading.Event()

    def work() -> None:
        number = 0
        while not over.wait(_PAUSE_S):
            number += 1
            act(number)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(300)


@contextmanager
def open_shop(replica_set: ReplicaSet) -> Iterator[None]:
    """Orders come in, are paid and are deleted on a replica set."""
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        shop = client["shop"]
        shop.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})

        def act(number: int) -> None:
            try:
                shop["orders"].insert_one(order(number))
                shop["orders"].update_one({"_id": number}, {"$set": {"status": "paid", "paid": True}})
                if number % 3 == 0:
                    shop["orders"].delete_one({"_id": number})
            except PyMongoError:
                pass  # a page may drop the shop

        act(1)
        with _working(act):
            yield


@contextmanager
def open_sharded_shop(cluster: ShardedCluster) -> Iterator[None]:
    """The same, with the orders spread over two shards."""
    router = cluster.router
    router.create_database("shop", primary="shard0")
    router.shard_collection("shop.orders", {"_id": 1})
    router.split("shop.orders", at={"_id": 0})
    router.move_chunk("shop.orders", find={"_id": 0}, to="shard1")
    with _working(lambda number: router.insert_many("shop.orders", [order(number), order(-number)])):
        yield
    router.drop_database("shop")
