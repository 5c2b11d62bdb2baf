"""Sources of a sync that is killed: a replica set and a cluster, each with its writers, its harms and what it holds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.embedded import EmbeddedError, ReplicaSet, ShardedCluster
from tests.products.cluster_writes import ClusterWrites
from tests.snapshot.test_snapshot_sharded import REGIONS, spread_over
from tests.sync.both import STATE_DB, ClusterSource, beside, is_users
from tests.sync.equality import Held, held
from tests.sync.workload import Kinds, Writes

#: Rounds of a cluster's workload: a shard joins in the third, and one leaves in the fourth.
_ROUNDS: Final = 40
_STEPS: Final = 12
_SPREAD: Final = "spread"
#: Between two steps of a writer, for each member of the source: a target of that many members takes so much longer to
#: commit, and a sync that is always behind its source is killed at few positions that can be compared.
_STEP_PAUSE_S: Final = 0.2


class WrittenSet:
    """A replica set and its five writers."""

    can_be_read_at = True

    def __init__(self, deployment: ReplicaSet, seed: int, *, capped: bool, columns: bool = True) -> None:
        self.uri, self.version = deployment.uri, deployment.version
        self._deployment = deployment
        old = self.version.startswith("4.")
        alone = len(deployment.members) == 1
        kinds = Kinds(capped=capped and not old, large=False, columns=columns, forged_deletes=alone)
        self._writes = Writes(deployment.uri, seed, self.version, kinds=kinds)
        if old:
            self.can_be_read_at = False

    @property
    def sent(self) -> int:
        return self._writes.sent

    def begin(self) -> None:
        """The documents that the copy finds."""
        self._writes.run(300)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The writers write until the block ends."""
        with self._writes.running(pause_s=_STEP_PAUSE_S * len(self._deployment.members)):
            yield

    def step_down(self, _: random.Random) -> str:
        return f"member {self._deployment.step_down()} is the source's primary"

    def move_chunk(self, _: random.Random) -> str:
        raise NotImplementedError("a replica set has no chunks")

    def holds(self) -> dict[str, Held]:
        return held(self.uri, but=[STATE_DB], selected=is_users)

    def close(self) -> None:
        with suppress(Exception):
            self._writes.clear()
        self._writes.close()


class WrittenCluster:
    """A cluster with the workload of ``make fuzz-products`` (operators, transactions, definitions, shards that come and
    go), and a collection beside it whose chunks move when they are told to, with writers of its own.

    ``quiet`` is held while chunks and primaries move: definitions of a cluster are made by our own router, and one that
    is cut off in its middle would be the test's fault and not the sync's. The same goes for an ``applyOps`` of that
    workload that waits for a prepared transaction whose coordinator waits for it.
    """

    can_be_read_at = False

    def __init__(self, cluster: ShardedCluster, seed: int) -> None:
        self.uri, self.version = cluster.uri, cluster.version
        self._cluster, self._seed = cluster, seed
        self._source = _Spread(cluster, seed)
        self._quiet = threading.Lock()
        self._lost = 0
        self._namespace = ""

    @property
    def sent(self) -> int:
        return self._source.sent

    def begin(self) -> None:
        self._source.write(_STEPS)
        router = self._cluster.router
        self._namespace = spread_over(self._cluster, _SPREAD, {"region": 1, "_id": 1})
        router.create_index(self._namespace, {"v": 1}, "v_1")
        for number in range(300):
            router.insert_one(self._namespace, {"_id": number, "region": REGIONS[number % len(REGIONS)], "v": [1, 2]})

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        works = (self._definitions, partial(self._write, 1), partial(self._write, 2), self._transact)
        with ExitStack() as stack:
            for work in works:
                stack.enter_context(beside(partial(work, stop)))
            stack.callback(stop.set)
            yield

    def _definitions(self, stop: threading.Event) -> None:
        for _ in range(_ROUNDS - 1):
            begun = time.monotonic()
            with self._quiet:
                self._source.write(_STEPS)
            # A sync begins at a moment without definitions. On a busy machine it needs a longer one to list them all.
            if stop.wait(max(2.0, time.monotonic() - begun)):
                return
        stop.wait()

    def _write(self, number: int, stop: threading.Event) -> None:
        """The documents whose numbers have this remainder, so that nobody else writes them."""
        rng = random.Random(f"spread {self._seed} {number}")
        changes: tuple[dict[str, Any], ...] = (
            {"$inc": {"n": 1}},
            {"$push": {"v": {"$each": [7], "$position": 0}}},
            {"$pop": {"v": 1}},
            {"$set": {"o.a": number, "t": "x" * 50}},
            {"$unset": {"o": 1}},
        )
        while not stop.wait(0.02):
            chosen = rng.randrange(200) * 2 + number % 2
            key = {"region": REGIONS[chosen % len(REGIONS)], "_id": chosen}
            change = rng.choice(changes) if rng.random() < 0.8 else None
            self._tried(lambda key=key, change=change: self._one(key, change))
            self._source.sent += 1

    def _one(self, key: dict[str, Any], change: dict[str, Any] | None) -> None:
        router = self._cluster.router
        if change is None:
            router.delete_one(self._namespace, key)
        else:
            router.update_one(self._namespace, key, change, upsert=True)

    def _transact(self, stop: threading.Event) -> None:
        rng, router = random.Random(f"spread {self._seed}"), self._cluster.router

        def body(transaction: Any) -> None:
            for number in range(900, 900 + len(REGIONS)):
                key = {"region": REGIONS[number % len(REGIONS)], "_id": number}
                transaction.update_one(self._namespace, key, {"$set": {"v": rng.random()}}, upsert=True)

        while not stop.wait(0.1):
            with self._quiet:
                self._tried(lambda: router.run_transaction(body))
            self._source.sent += 1

    def _tried(self, write: Callable[[], object]) -> None:
        """A write during a step-down may be lost, and nobody knows."""
        try:
            write()
        except (PyMongoError, EmbeddedError):
            self._lost += 1
            assert self._lost < 5_000, "no write of the cluster's succeeds"

    def step_down(self, rng: random.Random) -> str:
        with self._quiet:
            name = rng.choice(list(self._cluster.shards))
            self._cluster.step_down(name)
        return f"the primary of {name}"

    def move_chunk(self, rng: random.Random) -> str:
        """A writer of the collection that is spread over the shards."""
        router = self._cluster.router
        with self._quiet:
            key = {"region": rng.choice(REGIONS), "_id": 1}
            owner = router.owner(self._namespace, key)
            to = rng.choice([one for one in self._cluster.shards if one != owner])
            router.move_chunk(self._namespace, key, to=to)
            assert router.owner(self._namespace, key) == to
        return f"region {key['region']} from {owner} to {to}"

    def holds(self) -> dict[str, Held]:
        return self._source.holds()

    def close(self) -> None:
        """Each sync has a cluster of its own."""


class _Spread(ClusterSource):
    """The workload with more rounds than a fuzz has."""

    def __init__(self, cluster: ShardedCluster, seed: int) -> None:
        self.uri, self.version = cluster.uri, cluster.version
        self._cluster = cluster
        self._writes = ClusterWrites(cluster, seed, _ROUNDS)
        self.databases = self._writes.databases
        self.sent = 0


def clear(uri: str) -> None:
    """Drop all databases but the server's own."""
    with MongoClient[Any](uri) as client:
        for name in client.list_database_names():
            if name not in ("admin", "config", "local"):
                client.drop_database(name)
