"""What is written meanwhile on a sharded cluster, while its chunks, primaries and shards move."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import bson
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.embedded.sharding import Router, Transaction
from tests.differential.wire import CommandError, Wire
from tests.products.own_writes import EXPIRING, OwnWrites
from tests.products.truth import Truth, time_of
from tests.products.writes import ORDERS, OUTBOX, ROOT_PASSWORD, authenticated, with_partial_rights
from tests.sharded import native
from tests.sharded.fuzz import tied
from tests.sharded.random_workload import RandomWorkload
from tests.tables.equality import collections, key_of

#: The number of writers in a round, and how many of a round's operations each carries out.
_WRITERS: Final = 2


class ClusterWrites:
    """The writes of one seed. Each round has a database of its own; earlier ones are changed a little too, when they
    move.

    ``leases``: the URI of a replica set beside the cluster, for positions and effects.
    """

    def __init__(self, cluster: ShardedCluster, seed: int, rounds: int, *, salt: int = 0, leases: str = "") -> None:
        self.leases = leases
        self.deployment = cluster
        self._salt = salt
        self.version = cluster.version
        self.seed = seed
        self._each = tuple(f"fuzz{seed}r{number}" for number in range(rounds))
        self.own = f"fuzz{seed}s"
        self.databases = (*self._each, self.own)
        self.followed = f"fuzz{seed}v"
        self.hidden_uri = ""
        # Names that nobody can copy would stay behind when a primary shard moves: they exist only during the pauses.
        self._mine = OwnWrites(self.own, f"cluster {seed} {salt}", self.version, unreadable=0.0, unique_names=True)
        self.eventless, self.unlogged = self._mine.eventless, self._mine.unlogged
        self.moved = (*(f"{database}.plain" for database in self.databases), *self._mine.namespaces)
        self._rng = random.Random(f"tailrace products cluster {seed + salt}")
        self._round = 0
        self._has_orders = False
        self._former: dict[str, Timestamp] = {}
        self.start = ClusterTime.from_timestamp(cluster.router.fence())
        self._recorded = self.start
        self._reshards = seed % 2 == 0 and cluster.version.startswith("6.")
        #: Where exact images are null (docs/design/exact-images.md).
        self.resharded = tuple(f"{database}.orders" for database in self._each) if self._reshards else ()

    def run(self, count: int) -> None:
        """A round: a shard joins in the third, and one leaves in the fourth."""
        number, router = self._round, self.deployment.router
        self._round += 1
        database = self._each[number]
        if number == 0:
            for name in (self.own, self.followed):
                router.create_database(name, self._rng.choice(list(self.deployment.shards)))
        self._at_own(self._mine.end_pause)
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
        self._write_mine(count)
        for _ in range(count // 3):
            self._message()
        for one in (*self._each[: number + 1], self.own):
            if self._rng.random() < 0.5:
                self._move_primary(one)
            router.update_one(f"{one}.plain", {"_id": "first"}, {"$inc": {"n": 1}}, upsert=True)
        if self._reshards and self._rng.random() < 0.5:
            router.create_index(f"{database}.orders", {"_id": 1, "region": 1}, "other")
            router.reshard(f"{database}.orders", {"_id": 1, "region": 1})
        if not self._salt:
            self._at_own(self._mine.begin_pause)

    def _at_own(self, act: Callable[[Callable[[bytes], object]], None]) -> None:
        """On the primary shard of our own database."""
        with authenticated(self._primary_of(self.own).uri) as wire:
            act(wire.exchange)

    def write_more(self) -> None:
        """Write a little, whatever was written so far."""
        self._write_mine(20)
        for _ in range(5):
            self._message()

    def _write_mine(self, count: int) -> None:
        """Write to the primary shard itself, which accepts what cannot be said to a router."""
        with authenticated(self._primary_of(self.own).uri) as wire:
            self._mine.begin_round(partial(self._send, wire), wire.exchange)
            for _ in range(count):
                self._mine.write(partial(self._send, wire))

    def _send(self, wire: Wire, command: dict[str, Any]) -> None:
        database = str(command.pop("$db", self.own))
        with suppress(CommandError):
            wire.run(database, command)

    def _message(self) -> None:
        """An order and the message about it, in one transaction."""
        rng, number = self._rng, self._rng.randrange(12)
        payload = {"n": rng.randrange(1000)}
        letter = {"_id": rng.getrandbits(60), "topic": "orders", "key": str(number), "payload": payload}

        def body(to: Router | Transaction) -> None:
            to.update_one(f"{self.followed}.{ORDERS}", {"_id": number}, {"$inc": {"n": 1}}, upsert=True)
            to.insert_one(f"{self.followed}.{OUTBOX}", letter)

        if not self._has_orders:  # a transaction does not make collections
            self._has_orders = True
            body(self.deployment.router)
        else:
            self.deployment.router.run_transaction(body)

    def _primary_of(self, database: str) -> ReplicaSet:
        return self.deployment.shards[self.deployment.router.catalog.database(database)["primary"]]

    def _move_primary(self, database: str) -> None:
        router = self.deployment.router
        primary = router.catalog.database(database)["primary"]
        others = [name for name in self.deployment.shards if name != primary]
        with suppress(OperationFailure):  # if something of it is still running
            router.move_primary(database, self._rng.choice(others))

    def disturb(self, rng: random.Random) -> str | None:
        """Let a shard's or the config server's primary step down, or be killed and come back."""
        if rng.random() < 0.5:
            return None
        parts = [*self.deployment.shards.values(), self.deployment.config]
        part = rng.choice(parts)
        if rng.random() < 0.5:
            part.step_down()
            return "step-down of a shard"
        part.restart(part.kill())
        return "crash of a shard"

    @property
    def can_be_restored(self) -> bool:
        """No: a cluster's data is on several servers."""
        return False

    def expire(self) -> None:
        """Documents that a shard removes by itself when they expire."""
        with authenticated(self._primary_of(self.own).uri) as wire:
            if wire.run("admin", {"getParameter": 1, "ttlMonitorSleepSecs": 1})["ttlMonitorSleepSecs"] > 1:
                return
            for command in self._mine.expiring():
                self._send(wire, command)
            wire.run("admin", {"setParameter": 1, "ttlMonitorEnabled": True})
            deadline = time.monotonic() + 120
            while wire.run(self.own, {"count": EXPIRING})["n"] and time.monotonic() < deadline:
                time.sleep(0.1)
            wire.run("admin", {"setParameter": 1, "ttlMonitorEnabled": False})

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
        for database in (*self._each[: self._round], self.own, self.followed):
            self.deployment.router.drop_database(database)

    def drop_leases(self) -> None:
        """Drop what is beside the cluster."""
        if self.leases:
            with MongoClient[Any](self.leases) as client:
                client.drop_database(f"{self.followed}_leases")

    def close(self) -> None:
        """Close nothing: nothing is open."""

    def pause(self, truth: Truth) -> ClusterTime:
        """Record what is there now."""
        end = self.deployment.router.fence()
        at = ClusterTime.from_timestamp(end)
        since = self._recorded.tick().to_timestamp()
        self._remind_shards()
        found = [self._events(since, end, for_merge=True)]
        if self.deployment.version >= "6.":
            # A mongos adds the images itself, after its merge; here they come from a client of the shard alone.
            kept = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}
            found.append(self._events(since, end, for_merge=False, **kept))
        truth.record(at, self._collections(), found[0], found[-1] if len(found) > 1 else [])
        self._recorded = at
        return at

    def _remind_shards(self) -> None:
        """Shards of 4.4 take an insert's shard key from what they know about the collection when they make the event;
        one that was restarted knows nothing, and gives only the ``_id``."""
        if not self.deployment.version.startswith("4."):
            return
        namespaces = self._namespaces()
        for shard in self.deployment.shards.values():
            with authenticated(_as_member(shard.uri)) as wire:
                for namespace in namespaces:
                    wire.run("admin", {"_flushRoutingTableCacheUpdates": namespace, "syncFromConfig": True})

    def _events(self, since: Timestamp, end: Timestamp, **options: Any) -> list[bytes]:
        former = {"former": self._former, "allChangesForCluster": True}
        events = native.union(self.deployment, "admin", 1, since, end, **former, **options)
        return tied([one for one in events if time_of(one) <= ClusterTime.from_timestamp(end)])

    def _collections(self) -> dict[str, dict[bytes, bytes]]:
        found = {}
        for namespace in sorted(self._namespaces()):
            documents = [bson.encode(one) for one in self.deployment.router.find(namespace)]
            found[namespace] = {key_of(one): one for one in documents}
        with MongoClient[Any](self._primary_of(self.own).uri) as client:
            return found | collections(client, (self.own,))

    def _namespaces(self) -> set[str]:
        names = set()
        for shard in self.deployment.shards.values():
            with MongoClient[Any](shard.uri) as client:
                for database in self._each[: self._round]:
                    listed = client[database].list_collections(filter={"type": "collection"})
                    names |= {f"{database}.{one['name']}" for one in listed if not one["name"].startswith("system.")}
        return names


def _as_member(uri: str) -> str:
    """The address of a shard; if it has users, with one who may send what members send to each other."""
    root = f"root:{ROOT_PASSWORD}@"
    if root not in uri:
        return uri
    with MongoClient[Any](uri) as client, suppress(OperationFailure):  # it is there already
        client.admin.command("createUser", "member", pwd=ROOT_PASSWORD, roles=["__system"])
    return uri.replace(root, f"member:{ROOT_PASSWORD}@")
