"""Positions that are kept outside of their deployment, when that is restored from an older backup.

Any history accepted them: the token of a change was looked for, but a high-water mark, the position of a quiet stream,
names no change. No test had restored a deployment's data under a listener.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.consumer import Change, Listener, MongoLeaseStore
from tailrace.core.event.resume_token import ResumeToken
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import OtherHistoryError
from tests.consumer.test_lanes import eventually
from tests.server_in_use import SERVER_VERSION

pytestmark = pytest.mark.mongod

LANES = {"alone": 1, "lanes": 2}
#: How long to wait for a listener that should be refused and is not.
WAIT_S = 60


class Shop:
    """Listeners on ``shop.orders`` of the deployment at ``uri``, with leases in another."""

    def __init__(self, uri: str, store: MongoLeaseStore) -> None:
        self.uri = uri
        self.store = store
        self.seen: dict[str, list[Any]] = {name: [] for name in LANES}

    def listen(self, name: str, client: Any) -> Listener:
        def handle(change: Change) -> None:
            if change.operation_type == "insert":
                self.seen[name].append((change.document_key or {})["_id"])

        options: dict[str, Any] = {"resource": name, "store": self.store, "partitions": LANES[name]}
        return Listener(client["shop"]["orders"], handle, lease_seconds=2, commit_idle=0.2, **options)

    def positions(self) -> list[Mapping[str, Any]]:
        """The positions of one listener and of the other one's lanes."""
        of_streams = [one for one in self.store.leases() if one.resource == "alone" or "/1." in one.resource]
        return [one.position for one in of_streams if one.position is not None]

    def run_to_a_high_water_mark(self, seen: list[int]) -> None:
        """Run both listeners until every position is after all present changes, and is not that of a change."""

        def all_there() -> bool:
            tokens = [ResumeToken.parse(one["token"]) for one in self.positions() if "token" in one]
            return len(tokens) == 3 and all(token.is_high_water_mark and token.cluster_time >= now for token in tokens)

        with tailrace.connect(self.uri) as client:
            now = client._deployment.operation_time(client)
            with self.listen("alone", client), self.listen("lanes", client):
                eventually(all_there, "the positions of a quiet stream")
        assert {name: sorted(found) for name, found in self.seen.items()} == dict.fromkeys(LANES, seen)

    def refuse(self) -> None:
        """Neither listener goes on, and nothing is committed or handled."""
        committed, seen = self.positions(), {name: list(found) for name, found in self.seen.items()}
        with tailrace.connect(self.uri) as client:
            for name in LANES:
                said = r"the changes before the committed position were read from another history"
                with pytest.raises(OtherHistoryError, match=said), self.listen(name, client) as running:
                    running.join(WAIT_S)
        assert self.positions() == committed
        assert self.seen == seen


def insert(uri: str, collection: str, number: int) -> None:
    with tailrace.connect(uri) as client:
        client["shop"][collection].insert_one({"_id": number})


@pytest.fixture
def leases(replica_set: ReplicaSet) -> Iterator[Any]:
    """The collection of leases, in the deployment of all tests, which is not the one that is watched."""
    with tailrace.connect(replica_set.uri) as client:
        yield client["consumer_restored"]["leases"]
        client.drop_database("consumer_restored")


@pytest.mark.parametrize(
    "version", [SERVER_VERSION, *(pytest.param(one, marks=pytest.mark.slow) for one in ("5.0.4", "4.4.2"))]
)
def test_a_listener_at_a_high_water_mark_does_not_go_on_over_another_history(
    start_replica_set: Callable[..., ReplicaSet],
    leases: Any,
    tmp_path: Path,
    version: str,
) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    watched = start_replica_set(data_dir=data, version=version)
    shop = Shop(watched.uri, MongoLeaseStore(leases))
    insert(watched.uri, "orders", 1)
    shop.run_to_a_high_water_mark([1])
    watched.stop(0)
    shutil.copytree(data, backup)
    watched.restart(0)
    # No refusal: the same history goes on, after a restart.
    insert(watched.uri, "orders", 2)
    shop.run_to_a_high_water_mark([1, 2])
    insert(watched.uri, "others", 3)
    shop.run_to_a_high_water_mark([1, 2])

    watched.stop(0)
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    watched.restart(0)
    insert(watched.uri, "orders", 4)
    shop.refuse()
    with tailrace.connect(watched.uri) as client:
        # Positions of an earlier version have no entry.
        leases.update_many({}, {"$unset": {"position.entries": 1}})
        with shop.listen("alone", client), shop.listen("lanes", client):
            eventually(lambda: shop.seen == {name: [1, 2, 4] for name in LANES}, "what came after the restore")


def test_a_listener_goes_on_after_a_shards_name_was_given_to_another_replica_set(
    start_sharded_cluster: Callable[..., ShardedCluster], leases: Any
) -> None:
    """It was refused for ever, as one of another history."""
    cluster = start_sharded_cluster(2)
    cluster.router.create_database("shop", "shard0")
    shop = Shop(cluster.uri, MongoLeaseStore(leases))
    cluster.router.insert_one("shop.orders", {"_id": 1})
    shop.run_to_a_high_water_mark([1])
    assert all("shard1" in position["entries"] for position in shop.positions())
    cluster.remove_shard("shard1")
    cluster.add_shard("shard1")
    cluster.router.insert_one("shop.orders", {"_id": 2})
    shop.run_to_a_high_water_mark([1, 2])
