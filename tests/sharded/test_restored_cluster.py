"""A whole sharded cluster that was restored from an older backup, and the products that are built on it: refused, or
equal.

Replica sets had been restored under each product, but never a cluster: nobody had seen which of its oplogs each product
compares, and what a cluster's copy needs to run again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.consumer import MongoLeaseStore
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import OtherHistoryError, TailraceError
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.archive.verification import verify
from tailrace.watch.client.request import SNAPSHOT
from tests.consumer.test_restored import Shop
from tests.differential.test_archive_live import archive_now
from tests.server_in_use import SERVER_VERSION
from tests.sharded.workload import KEY
from tests.spark.readers import CrashingQuery
from tests.tables.equality import in_table
from tests.tables.test_sharded_equality import truth

pytestmark = pytest.mark.mongod

NAMESPACE = "shop.orders"
REGIONS = "at"
#: From when on exact images can be computed.
IMAGES_SINCE = (5, 0)


class Products:
    """Everything that is made from ``shop.orders`` of one cluster. ``seen`` are the ``_id``s of the inserts."""

    def __init__(self, root: Path, leases: Any, version: str, uri: str) -> None:
        self.root = root
        self.shop = Shop(uri, MongoLeaseStore(leases))
        self.seen: list[int] = []
        self.has_images = tuple(map(int, version.split(".")[:2])) >= IMAGES_SINCE
        self.copy: Any = None
        self.images: Any = None
        self.token: Any = None
        rate = {"startingFrom": "snapshot", "snapshotDocumentsPerSecond": "1"}
        self.query = CrashingQuery({"uri": uri, "database": "shop", **rate})

    def insert(self, cluster: ShardedCluster, first: int) -> None:
        """A document on each shard, twice."""
        for number in range(first, first + 4):
            cluster.router.insert_one(NAMESPACE, {"_id": number, "region": REGIONS[number % 2], "n": 0})
            self.seen.append(number)

    def tables(self, cluster: ShardedCluster) -> None:
        settings = TableSettings(self.root / "tables", (TableRule("shop.*"),), every_s=0.0)
        with TablesWriter(cluster.uri, settings) as writer:
            writer.run_to_present(ClusterTime.from_timestamp(cluster.router.fence()))

    def archive(self, cluster: ShardedCluster) -> None:
        archive_now(cluster.uri, self.root / "archive")
        assert [fault for report in verify(self.root / "archive") for fault in report.faults] == []

    def snapshot(self, cluster: ShardedCluster) -> None:
        """One document further in the middle of a copy."""
        start = {"start": "snapshot"} if self.copy is None else {"resume_after": self.copy}
        with tailrace.connect(cluster.uri) as client, client["shop"].watch(**start) as stream:
            assert next(stream)["operationType"] == "snapshot"
            self.copy = stream.resume_token
        assert SNAPSHOT in self.copy

    def spark_copy(self, cluster: ShardedCluster) -> None:
        """Two micro-batches further, in the middle of a copy."""
        self.query.begin_again()
        for _ in range(2):
            assert self.query.step()
        assert "snapshot" in self.query.offset

    def exact_images(self, cluster: ShardedCluster) -> None:
        if not self.has_images:
            return
        start = {} if self.images is None else {"resume_after": self.images}
        with (
            tailrace.connect(cluster.uri, images=self.root / "images") as client,
            client["shop"]["orders"].watch(full_document="exact", **start) as stream,
        ):
            number = self.seen[-1]
            document = {"_id": number, "region": REGIONS[number % 2]}
            cluster.router.update_one(NAMESPACE, document, {"$inc": {"n": 1}})
            event = next(one for one in stream if one["operationType"] == "update")
            assert event["fullDocument"]["n"] >= 1
            self.images = stream.resume_token

    def listeners(self, cluster: ShardedCluster) -> None:
        self.shop.run_to_a_high_water_mark(self.seen)

    def change(self, cluster: ShardedCluster) -> None:
        """The token of a change, which is looked for by itself."""
        start = {} if self.token is None else {"resume_after": self.token}
        with tailrace.connect(cluster.uri) as client, client["shop"]["orders"].watch(**start) as stream:
            number = self.seen[-1]
            document = {"_id": number, "region": REGIONS[number % 2]}
            cluster.router.update_one(NAMESPACE, document, {"$inc": {"n": 1}})
            self.token = next(stream)["_id"]

    def go_on(self, cluster: ShardedCluster) -> None:
        runs = (self.tables, self.archive, self.snapshot, self.spark_copy, self.exact_images, self.change)
        for run in (*runs, self.listeners):
            run(cluster)
        self.tables(cluster)
        assert in_table(self.root / "tables", NAMESPACE) == truth(cluster, NAMESPACE)

    def refuse(self, cluster: ShardedCluster) -> None:
        said = {"tables": "the tables in", "archive": "the entries in", "snapshot": "the documents of the snapshot of"}
        said["spark_copy"] = "the events so far"
        if self.has_images:
            said["exact_images"] = "the images in"
        outcomes = {name: outcome_of(partial(getattr(self, name), cluster)) for name in said}
        for name, what in said.items():
            assert re.search(rf"{what} .*were read (from another history|up to)", outcomes[name]), (name, outcomes)
        self.shop.refuse()
        with pytest.raises(TailraceError) as caught:
            self.change(cluster)
        assert caught.value.code in (280, 286)


def outcome_of(run: Callable[[], None]) -> str:
    """The message of the refusal, or that it went on."""
    try:
        run()
    except OtherHistoryError as error:
        return str(error)
    return "it went on"


@pytest.fixture
def leases(replica_set: ReplicaSet) -> Iterator[Any]:
    with tailrace.connect(replica_set.uri) as client:
        yield client["sharded_restored"]["leases"]
        client.drop_database("sharded_restored")


def distributed(cluster: ShardedCluster) -> None:
    """``shop.orders`` on two shards, or on the only one."""
    first, *others = cluster.shards
    cluster.router.create_database("shop", first)
    cluster.router.shard_collection(NAMESPACE, KEY)
    cluster.router.split(NAMESPACE, {"region": REGIONS[1]})
    for other in others:
        cluster.router.move_chunk(NAMESPACE, {"region": REGIONS[1]}, to=other)


@pytest.mark.parametrize(
    "kind",
    [
        (SERVER_VERSION, 1),
        *(pytest.param((one, 2), marks=pytest.mark.slow) for one in (SERVER_VERSION, "5.0.4", "4.4.2")),
    ],
    ids=lambda kind: f"{kind[0]} with {kind[1]} shard{'s' if kind[1] > 1 else ''}",
)
def test_nothing_goes_on_over_the_history_of_a_cluster_that_was_restored_from_an_older_backup(
    start_sharded_cluster: Callable[..., ShardedCluster],
    leases: Any,
    tmp_path: Path,
    kind: tuple[str, int],
) -> None:
    version, shards = kind
    data, backup = tmp_path / "data", tmp_path / "backup"

    def start() -> ShardedCluster:
        return start_sharded_cluster(shards, data_dir=data, version=version, noop_interval_s=1)

    cluster = start()
    distributed(cluster)
    products = Products(tmp_path, leases, version, cluster.uri)
    products.insert(cluster, 0)
    products.go_on(cluster)
    cluster.close()
    shutil.copytree(data, backup)
    # No refusal: the same history goes on, after a restart.
    cluster = start()
    products.insert(cluster, 10)
    products.go_on(cluster)
    cluster.close()
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    cluster = start()
    for number in range(100, 104):
        cluster.router.insert_one(NAMESPACE, {"_id": number, "region": REGIONS[number % 2], "n": 0})
    products.refuse(cluster)
    products.query.close()
