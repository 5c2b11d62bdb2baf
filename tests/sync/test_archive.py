"""A copy that takes longer than the source's oplog reaches back: an archive keeps what the sync needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.act.sync import archiving
from tailrace.act.sync.settings import SyncSettings
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import ChangeStreamHistoryLost, SourceError, UsageError
from tailrace.read.archive.layout import CONFIG_OPLOG
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.mongod import MongodSource
from tailrace.sync import Sync
from tests.commands import Piped
from tests.patience import PATIENCE_S
from tests.sync.following import unequal
from tests.sync.programs import program

pytestmark = [pytest.mark.mongod, pytest.mark.used_servers]
DOCUMENTS = 2_000


def test_an_archive_of_a_cluster_begins_before_the_sync_does(
    sharded_cluster: ShardedCluster, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    router, target = sharded_cluster.router, start_replica_set()
    router.create_database("archived", "shard0")
    try:
        router.insert_many("archived.orders", [{"_id": number} for number in range(20)])
        with Sync(sharded_cluster.uri, target.uri, only=["archived.*"], archive=tmp_path / "archive") as sync:
            sync.run(to_present=True)
            router.insert_one("archived.orders", {"_id": 20})
            sync.run(to_present=True)
    finally:
        router.drop_database("archived")
    with MongoClient[Any](target.uri) as there:
        assert [one["_id"] for one in there.archived.orders.find(sort=[("_id", 1)])] == list(range(21))
        copied = ClusterTime.from_timestamp(there.tailrace_sync.syncs.find_one()["copied"])
    for name in (*sharded_cluster.shards, CONFIG_OPLOG):
        assert ArchiveSource(tmp_path / "archive", name).start < copied


def until(what: Callable[[], Any], process: Piped | None = None) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.05)
    return found


def overtaken(source: MongodSource, folder: Path, beyond: ClusterTime) -> None:
    """Change copied documents until the oplog has lost ``beyond``, and never more than the archive already holds."""
    shop, number = source.client.shop, 0
    while source.oldest()[0] <= beyond:
        number += 1
        shop.orders.update_many({"_id": {"$mod": [3, number % 3]}}, {"$set": {"pad": f"{number:04}" * 250}})
        shop.orders.delete_one({"_id": number})
        shop.later.insert_one({"_id": number, "pad": "x" * 1_500_000})
        newest = source.newest()
        until(lambda newest=newest: _reaches(folder, newest))


def _reaches(folder: Path, newest: ClusterTime) -> bool:
    try:
        return ArchiveSource(folder).newest() >= newest
    except (SourceError, UsageError):
        return False


def test_a_copy_that_takes_longer_than_the_oplog_reaches_goes_on_from_the_archive(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1")), start_replica_set()
    folder = tmp_path / "archive"
    monkeypatch.setattr(archiving, "_PUBLISHED_S", 0.3)
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        client.shop.orders.insert_many([{"_id": one, "pad": "p" * 1000} for one in range(DOCUMENTS)])
        with program("archived_process", source.uri, target.uri, folder, 20) as process:
            try:
                state = until(lambda: there.tailrace_sync.syncs.find_one({"prepared": True}), process)
                with closing(MongodSource(source.uri)) as oplog:
                    overtaken(oplog, folder, ClusterTime.from_timestamp(state["time"]))
                assert process.poll() is None
            finally:
                process.kill()
        [left] = there.tailrace_sync.syncs.find()
        assert left["phase"] == "copy"
        assert left["time"] == state["time"]
        with Sync(source.uri, target.uri, lease_s=2) as sync, pytest.raises(ChangeStreamHistoryLost, match="oplog"):
            sync.run(to_present=True)
        with Sync(source.uri, target.uri, lease_s=2, archive=folder) as sync:
            assert sync.run(to_present=True).is_consistent
        assert unequal(source.uri, target.uri, SyncSettings()) == []
        client.shop.orders.update_many({}, {"$set": {"after": 1}})
        with Sync(source.uri, target.uri, lease_s=2, archive=folder) as sync:
            sync.run(to_present=True)
        assert unequal(source.uri, target.uri, SyncSettings()) == []
