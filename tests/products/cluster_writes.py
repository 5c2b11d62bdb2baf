"""What is written meanwhile on a sharded cluster, while its chunks, primaries and shards move."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any, Final

import bson
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.embedded import ShardedCluster
from tailrace.oplog.cluster_time import ClusterTime
from tests.products import typed
from tests.products.truth import Truth, time_of
from tests.products.writes import ROOT_PASSWORD, with_partial_rights
from tests.sharded import native
from tests.sharded.fuzz import tied
from tests.sharded.random_workload import RandomWorkload
from tests.tables.equality import key_of

#: Writers of a round, and what of a round's operations each does.
_WRITERS: Final = 2


class ClusterWrites:
    """One seed's. Each round has a database of its own; the ones before are changed a little too, when they move."""

    def __init__(self, cluster: ShardedCluster, seed: int, rounds: int, *, salt: int = 0) -> None:
        self.deployment = cluster
        self._salt = salt
        self.version = cluster.version
        self.seed = seed
        self.databases = tuple(f"fuzz{seed}r{number}" for number in range(rounds))
        self.followed = f"fuzz{seed}v"
        self.hidden_uri = ""
        unsharded = ("plain", typed.DECLARED, typed.INFERRED)
        self.moved = tuple(f"{database}.{name}" for database in self.databases for name in unsharded)
        self._rng = random.Random(f"tailrace products cluster {seed + salt}")
        self._round = 0
        self._former: dict[str, Timestamp] = {}
        self.start = ClusterTime.from_timestamp(cluster.router.fence())
        self._recorded = self.start
        #: Exact images do not know what a resharded collection holds (docs/reference/exact-images.md).
        self.reshards = seed % 2 == 0 and cluster.version.startswith("6.")

    def run(self, count: int) -> None:
        """A round: a shard joins in the third, and one leaves in the fourth."""
        number, router = self._round, self.deployment.router
        self._round += 1
        database = self.databases[number]
        workload = RandomWorkload(
            self.deployment,
            (self.seed + self._salt) * 100 + number,
            max(5, count // _WRITERS),
            _WRITERS,
            adds_shard=number == 2,
            removes_shard=number == 3,
            database=database,
        )
        ran = workload.run(workload.prepare())
        self._former |= dict(ran.former)
        for _ in range(count // 2):
            self._typed(database, typed.write(self._rng))
        for one in self.databases[: number + 1]:
            if self._rng.random() < 0.5:
                self._move_primary(one)
            router.update_one(f"{one}.plain", {"_id": "first"}, {"$inc": {"n": 1}}, upsert=True)
        if self.reshards and self._rng.random() < 0.5:
            router.create_index(f"{database}.orders", {"_id": 1, "region": 1}, "other")
            router.reshard(f"{database}.orders", {"_id": 1, "region": 1})

    def _typed(self, database: str, write: typed.Write) -> None:
        router, namespace, query = self.deployment.router, f"{database}.{write.collection}", {"_id": write.id}
        if write.kind == "delete":
            router.delete_one(namespace, query)
        elif write.kind == "replace":
            router.replace_one(namespace, query, write.change, upsert=True)
        else:
            router.update_one(namespace, query, write.change, upsert=True)

    def _move_primary(self, database: str) -> None:
        router = self.deployment.router
        primary = router.catalog.database(database)["primary"]
        others = [name for name in self.deployment.shards if name != primary]
        with suppress(OperationFailure):  # where something of it is still under way
            router.move_primary(database, self._rng.choice(others))

    def disturb(self, rng: random.Random) -> str | None:
        """Nothing: enough moves by itself."""

    @property
    def can_be_restored(self) -> bool:
        """A cluster's data are those of several servers."""
        return False

    def expire(self) -> None:
        """Nothing expires here."""

    def partial_uri(self) -> str | None:
        """The address with the name of a user who may read the oplogs and one of the databases; ``None`` where the
        servers know no users."""
        if f"root:{ROOT_PASSWORD}@" not in self.deployment.uri:
            return None
        for shard in self.deployment.shards.values():
            with_partial_rights(shard.uri, self.seed, self.databases[0])
        return with_partial_rights(self.deployment.config.uri, self.seed, self.databases[0])

    def clear(self) -> None:
        """Drop what was written."""
        for database in self.databases[: self._round]:
            self.deployment.router.drop_database(database)

    def close(self) -> None:
        """Nothing is open."""

    def pause(self, truth: Truth) -> ClusterTime:
        """Record what is there now."""
        end = self.deployment.router.fence()
        time = ClusterTime.from_timestamp(end)
        since = self._recorded.tick().to_timestamp()
        events = native.union(self.deployment, "admin", 1, since, end, former=self._former, allChangesForCluster=True)
        truth.record(time, self._collections(), tied([one for one in events if time_of(one) <= time]), [])
        self._recorded = time
        return time

    def _collections(self) -> dict[str, dict[bytes, bytes]]:
        found = {}
        for namespace in sorted(self._namespaces()):
            documents = [bson.encode(one) for one in self.deployment.router.find(namespace)]
            found[namespace] = {key_of(one): one for one in documents}
        return found

    def _namespaces(self) -> set[str]:
        names = set()
        for shard in self.deployment.shards.values():
            with MongoClient[Any](shard.uri) as client:
                for database in self.databases[: self._round]:
                    listed = client[database].list_collections(filter={"type": "collection"})
                    names |= {f"{database}.{one['name']}" for one in listed if not one["name"].startswith("system.")}
        return names
