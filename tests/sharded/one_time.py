"""Events of several shards with the same token: the shards' clocks are set to the same time, and each drops a database.

The token of a ``dropDatabase`` holds the cluster time and no name. So these are different events, and none may be taken
for another one's repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import bson
import pymongo
from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.embedded import ShardedCluster
from tests.sharded import native

_TRIES = 30


def drop_at_one_time(
    cluster: ShardedCluster, prefix: str, before: Callable[[list[str]], object] = lambda _: None
) -> list[str]:
    """Make databases ``<prefix><n>_<shard>`` on each shard, call ``before`` with their names, and drop them, until all
    shards have logged their drop at the same time. Returns the names of those. Earlier attempts have events too."""
    for number in range(_TRIES):
        names = [f"{prefix}{number}_{shard}" for shard in cluster.shards]
        start = cluster.router.fence()
        with ExitStack() as stack:
            clients: list[MongoClient[Any]] = [
                stack.enter_context(pymongo.MongoClient(shard.uri)) for shard in cluster.shards.values()
            ]
            for client, name in zip(clients, names, strict=True):
                client[name].c.insert_one({"_id": name})
            before(names)
            _set_clocks(clients)
            for client, name in zip(clients, names, strict=True):
                client.drop_database(name)
        events = native.union(cluster, "admin", 1, start, cluster.router.fence(), allChangesForCluster=True)
        decoded = [bson.decode(event) for event in events]
        tokens = [one["_id"]["_data"] for one in decoded if one["ns"]["db"] in names and "coll" not in one["ns"]]
        assert len(tokens) == len(names)
        if len(set(tokens)) == 1:
            return names
    raise AssertionError(f"in {_TRIES} tries something else was written in between")


def _set_clocks(clients: Sequence[MongoClient[Any]]) -> None:
    """Set the clocks of all shards to the same time, a second after the latest: what they write next has the same
    time."""
    times = [client.admin.command("ping")["$clusterTime"]["clusterTime"] for client in clients]
    ahead = Timestamp(max(time.time for time in times) + 1, 1)
    for client in clients:
        with client.start_session() as session:
            session.advance_cluster_time({"clusterTime": ahead, "signature": {"hash": bytes(20), "keyId": Int64(0)}})
            client.admin.command("ping", session=session)
