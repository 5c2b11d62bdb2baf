"""Writes through the router while chunks move, with a record of what was acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tailrace.embedded import ShardedCluster
from tailrace.embedded.sharding import Router, Transaction

KEY = {"region": 1, "_id": 1}
REGIONS = ("a", "g", "n", "t")
#: How long a writer rests, multiplied by the number of its operations so far: about 300 come in 6 s, and 1,000 in a
#: minute.
_REST_S = 0.0005


def spread(cluster: ShardedCluster, database: str, collection: str = "orders") -> str:
    """A collection sharded by region in four chunks, half of them on the second shard."""
    router, (first, second, *_) = cluster.router, cluster.shards
    namespace = f"{database}.{collection}"
    router.create_database(database, first)
    router.shard_collection(namespace, KEY)
    for region in REGIONS[1:]:
        router.split(namespace, {"region": region})
    for region in REGIONS[2:]:
        router.move_chunk(namespace, {"region": region}, to=second)
    return namespace


class Writer(threading.Thread):
    """One region's documents: each is inserted with ``v`` 1 and updated with ``v`` one higher each time, and some are
    deleted. Now and then a transaction writes to two regions. ``written`` has the acknowledged operations, in order.

    The more it has written, the longer it rests after each document. So it writes during every move of a chunk, however
    long the run, and a slow machine, whose moves take longer, does not have thousands of events to compare."""

    def __init__(self, router: Router, namespace: str, region: str, other: str, first_id: int) -> None:
        super().__init__(daemon=True)
        self.written: list[tuple[int, str, int]] = []
        self.failure: BaseException | None = None
        self._router = router
        self._namespace = namespace
        self._region = region
        self._other = other
        self._id = first_id
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self._one(self._id)
                if self._id % 4 == 0:
                    self._transaction(self._id)
                self._id += 1
                self._ended.wait(len(self.written) * _REST_S)
        except BaseException as error:  # noqa: BLE001  raised by end()
            self.failure = error

    def _one(self, number: int) -> None:
        key = {"region": self._region, "_id": number}
        self._router.insert_one(self._namespace, {"_id": number, "region": self._region, "v": 1})
        self.written.append((number, "insert", 1))
        for v in (2, 3):
            assert self._router.update_one(self._namespace, key, {"$set": {"v": v}}).count == 1
            self.written.append((number, "update", v))
        if number % 3 == 0:
            assert self._router.delete_one(self._namespace, key).count == 1
            self.written.append((number, "delete", 0))

    def _transaction(self, number: int) -> None:
        mine, theirs = number + 100_000, number + 200_000

        def body(transaction: Transaction) -> None:
            for id_, region in ((mine, self._region), (theirs, self._other)):
                transaction.insert_one(self._namespace, {"_id": id_, "region": region, "v": 1})

        self._router.run_transaction(body)
        self.written += [(mine, "insert", 1), (theirs, "insert", 1)]

    def end(self) -> None:
        self._ended.set()
        self.join(300)
        assert not self.is_alive(), "a writer does not end"
        if self.failure is not None:
            raise self.failure


@contextmanager
def writers(cluster: ShardedCluster, namespace: str, *, first_id: int = 0) -> Iterator[list[Writer]]:
    """Three writers until the block is left; their documents' ``_id`` is ``first_id`` or above."""
    pairs = (("a", "n"), ("g", "t"), ("n", "a"))
    running = [
        Writer(cluster.router, namespace, region, other, first_id + 1_000_000 * number)
        for number, (region, other) in enumerate(pairs)
    ]
    for writer in running:
        writer.start()
    try:
        yield running
    finally:
        for writer in running:
            writer.end()


def by_document(operations: list[tuple[int, str, int]]) -> dict[int, list[tuple[str, int]]]:
    found: dict[int, list[tuple[str, int]]] = {}
    for number, operation, v in operations:
        found.setdefault(number, []).append((operation, v))
    return found


def operation_of(event: dict[str, Any]) -> tuple[int, str, int]:
    """The operation of an event, as a ``Writer`` records it."""
    operation = event["operationType"]
    v = 0
    if operation == "insert":
        v = event["fullDocument"]["v"]
    elif operation == "update":
        v = event["updateDescription"]["updatedFields"]["v"]
    return event["documentKey"]["_id"], operation, v
