"""Tables while databases get other primary shards, shards are drained, and collections are redistributed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.errors import SourceError
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.state import TableState
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.window.oplogs import same_replica_set
from tests.pace import BETWEEN_MOVES_S
from tests.server_in_use import IN_BETWEEN
from tests.tables.equality import in_table
from tests.tables.test_as_of import rows_of
from tests.tables.test_sharded_equality import truth

pytestmark = pytest.mark.mongod

OLDER = [
    pytest.param("5.0.4", marks=pytest.mark.slow),
    pytest.param("4.4.2", marks=pytest.mark.slow),
]


@pytest.fixture(params=[None, *OLDER])
def cluster(request: pytest.FixtureRequest) -> ShardedCluster:
    """The shared cluster, and one of each older version."""
    if request.param is None:
        found: ShardedCluster = request.getfixturevalue("sharded_cluster")
        return found
    started: ShardedCluster = request.getfixturevalue("start_sharded_cluster")(3, version=request.param)
    return started


@contextmanager
def database(cluster: ShardedCluster, name: str) -> Iterator[TableSettings]:
    cluster.router.create_database(name, "shard0")
    try:
        yield TableSettings(Path(), (TableRule(f"{name}.*"),), every_s=0.0)
    finally:
        cluster.router.drop_database(name)


def brought_up(cluster: ShardedCluster, root: Path, pattern: str) -> ClusterTime:
    with TablesWriter(cluster.uri, TableSettings(root, (TableRule(pattern),), every_s=0.0)) as writer:
        return writer.run_to_present(ClusterTime.from_timestamp(cluster.router.fence()))


def test_a_table_follows_its_database_to_another_primary_shard(cluster: ShardedCluster, tmp_path: Path) -> None:
    """The new primary's collections were taken for empty ones, and the old one's drop removed the rows: one row of
    eleven was left. (In the tests of tables chunks had moved, but never a database.)"""
    root, router = tmp_path / "t", cluster.router
    recorded: list[tuple[ClusterTime, dict[bytes, bytes]]] = []

    def note() -> None:
        recorded.append((ClusterTime.from_timestamp(router.fence()), truth(cluster, "moved_db.plain")))

    with database(cluster, "moved_db"):
        router.insert_many("moved_db.plain", [{"_id": number} for number in range(10)])
        router.insert_many("moved_db.other", [{"_id": number, "v": "x" * number} for number in range(20)])
        router.shard_collection("moved_db.spread", {"_id": 1})
        router.split("moved_db.spread", {"_id": 5})
        router.insert_many("moved_db.spread", [{"_id": number} for number in range(10)])
        brought_up(cluster, root, "moved_db.*")
        for turn, to in enumerate(("shard1", "shard2", "shard0")):
            router.update_one("moved_db.plain", {"_id": 3}, {"$inc": {"n": 1}}, upsert=True)
            note()
            router.move_primary("moved_db", to)
            note()
            router.insert_one("moved_db.plain", {"_id": 100 + turn})
            router.delete_one("moved_db.other", {"_id": turn})
            router.move_chunk("moved_db.spread", {"_id": 7}, to=to) if to != "shard0" else None
            router.insert_one("moved_db.spread", {"_id": 100 + turn})
            note()
            if turn != 1:
                brought_up(cluster, root, "moved_db.*")
            for name in ("plain", "other", "spread") if turn != 1 else ():
                assert in_table(root, f"moved_db.{name}") == truth(cluster, f"moved_db.{name}"), (name, turn)
        found = [rows_of(as_of(root, "moved_db.plain", time, uri=cluster.uri).rows) for time, _ in recorded]
        assert found == [documents for _, documents in recorded]
    brought_up(cluster, root, "moved_db.*")
    assert not in_table(root, "moved_db.plain")


def test_what_has_moved_with_its_database_is_sharded_then(cluster: ShardedCluster, tmp_path: Path) -> None:
    """From then on the migration entries of its shard copy documents, and delete ranges that were moved away."""
    root, router = tmp_path / "t", cluster.router
    with database(cluster, "moved_then"):
        router.insert_many("moved_then.plain", [{"_id": number, "n": 0} for number in range(10)])
        brought_up(cluster, root, "moved_then.*")
        router.move_primary("moved_then", "shard1")
        router.shard_collection("moved_then.plain", {"_id": 1})
        router.split("moved_then.plain", {"_id": 5})
        router.move_chunk("moved_then.plain", {"_id": 7}, to="shard2")
        router.update_one("moved_then.plain", {"_id": 7}, {"$inc": {"n": 1}})
        router.move_chunk("moved_then.plain", {"_id": 7}, to="shard1")
        router.update_one("moved_then.plain", {"_id": 7}, {"$inc": {"n": 1}})
        router.move_chunk("moved_then.plain", {"_id": 2}, to="shard0")
        brought_up(cluster, root, "moved_then.*")
        assert in_table(root, "moved_then.plain") == truth(cluster, "moved_then.plain")


def test_tables_that_begin_while_a_database_moves(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    """Whatever part of a move comes before the tables' first read: what they cannot know they copy."""
    cluster, router = sharded_cluster, sharded_cluster.router
    with database(cluster, "moved_meanwhile"):
        router.insert_many("moved_meanwhile.plain", [{"_id": number, "s": "x" * 500} for number in range(4000)])
        names = itertools.cycle(("shard1", "shard2", "shard0"))
        stop = threading.Event()

        def move() -> None:
            while not stop.wait(BETWEEN_MOVES_S):
                router.move_primary("moved_meanwhile", next(names))

        thread = threading.Thread(target=move)
        thread.start()
        try:
            for turn in range(3):
                brought_up(cluster, tmp_path / f"t{turn}", "moved_meanwhile.*")
        finally:
            stop.set()
            thread.join()
        router.insert_one("moved_meanwhile.plain", {"_id": -1})
        for turn in range(3):
            brought_up(cluster, tmp_path / f"t{turn}", "moved_meanwhile.*")
            assert in_table(tmp_path / f"t{turn}", "moved_meanwhile.plain") == truth(cluster, "moved_meanwhile.plain")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2"])
def test_tables_while_shards_come_and_go(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, version: str
) -> None:
    cluster = start_sharded_cluster(2, version=version)
    router = cluster.router
    with database(cluster, "drained"):
        router.insert_many("drained.plain", [{"_id": number} for number in range(10)])
        router.shard_collection("drained.spread", {"_id": 1})
        router.split("drained.spread", {"_id": 5})
        router.insert_many("drained.spread", [{"_id": number} for number in range(10)])
        brought_up(cluster, tmp_path, "drained.*")
        for turn, gone in enumerate(("shard0", "shard1")):
            added = cluster.add_shard()
            router.insert_one("drained.plain", {"_id": 50 + turn})
            router.move_chunk("drained.spread", {"_id": 7}, to=added)
            router.insert_one("drained.spread", {"_id": 50 + turn})
            cluster.remove_shard(gone)
            router.insert_one("drained.plain", {"_id": 100 + turn})
            router.insert_one("drained.spread", {"_id": 100 + turn})
            brought_up(cluster, tmp_path, "drained.*")
            for name in ("plain", "spread"):
                assert in_table(tmp_path, f"drained.{name}") == truth(cluster, f"drained.{name}"), (name, turn)


@pytest.mark.parametrize(
    "version", ["6.0.27", *(pytest.param(one, marks=pytest.mark.slow) for one in ("5.0.4", "4.4.2"))]
)
def test_a_shard_comes_and_goes_between_two_runs(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, version: str
) -> None:
    """It was in no list that the tables read, so what was written there was lost: other shards got it only by
    migration. In every earlier test the tables ran while the shard was there, or the shard that left was an original
    one."""
    cluster = start_sharded_cluster(2, version=version)
    router = cluster.router
    runs, late = tmp_path / "runs", tmp_path / "late"
    with database(cluster, "passing"):
        router.shard_collection("passing.spread", {"_id": 1})
        router.split("passing.spread", {"_id": 5})
        router.insert_many("passing.spread", [{"_id": number} for number in range(10)])
        for root in (runs, late):
            brought_up(cluster, root, "passing.*")
        added = cluster.add_shard()
        router.move_chunk("passing.spread", {"_id": 7}, to=added)
        router.insert_one("passing.spread", {"_id": 50})
        router.update_one("passing.spread", {"_id": 8}, {"$set": {"n": 1}})
        router.delete_one("passing.spread", {"_id": 9})
        time, held = ClusterTime.from_timestamp(router.fence()), truth(cluster, "passing.spread")
        gone = cluster.remove_shard(added)
        router.insert_one("passing.spread", {"_id": 100})
        router.update_one("passing.spread", {"_id": 50}, {"$set": {"n": 2}})
        brought_up(cluster, runs, "passing.*")
        assert in_table(runs, "passing.spread") == truth(cluster, "passing.spread")
        assert rows_of(as_of(runs, "passing.spread", time, uri=cluster.uri).rows) == held
        gone.stop(0)
        with pytest.raises(SourceError, match=f"the shard {added} was removed from the cluster at .* have not read it"):
            brought_up(cluster, late, "passing.*")
        with pytest.raises(SourceError, match=f"the shard {added} was removed"):
            as_of(runs, "passing.spread", time, uri=cluster.uri)


def test_tables_follow_a_collection_that_is_distributed_by_another_key(
    sharded_cluster: ShardedCluster, tmp_path: Path
) -> None:
    """The page said that they are not, and no test had tried."""
    router = sharded_cluster.router
    with database(sharded_cluster, "resharded"):
        router.shard_collection("resharded.things", {"_id": 1})
        router.insert_many("resharded.things", [{"_id": number, "k": number % 3} for number in range(30)])
        brought_up(sharded_cluster, tmp_path, "resharded.*")
        router.update_one("resharded.things", {"_id": 3}, {"$set": {"v": 1}})
        router.create_index("resharded.things", {"k": 1, "_id": 1}, "k_1__id_1")
        router.reshard("resharded.things", {"k": 1, "_id": 1})
        router.update_one("resharded.things", {"k": 1, "_id": 4}, {"$set": {"v": 2}})
        brought_up(sharded_cluster, tmp_path, "resharded.*")
        assert in_table(tmp_path, "resharded.things") == truth(sharded_cluster, "resharded.things")
        state = TableState(tmp_path / "_tailrace" / "state", readonly=True)
        assert [one.namespace for one in state.collections()] == ["resharded.things"]
        state.close()


@pytest.mark.parametrize("version", ["6.0.27", *OLDER])
@pytest.mark.slow
def test_a_shards_name_is_given_to_another_replica_set(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, version: str
) -> None:
    """The former servers were read under its name, and the present ones were not. A shard that is added with data
    brings it into the cluster, and no oplog entry that is read mentions it."""
    cluster = start_sharded_cluster(2, version=version)
    router = cluster.router
    settings = TableSettings(tmp_path, (TableRule("*.*"),), every_s=0.0)

    def equal(*namespaces: str) -> None:
        for namespace in namespaces:
            assert in_table(tmp_path, namespace) == truth(cluster, namespace), namespace

    router.create_database("named", "shard1")
    router.insert_many("named.plain", [{"_id": number} for number in range(10)])
    router.shard_collection("named.spread", {"_id": 1})
    router.insert_many("named.spread", [{"_id": number} for number in range(10)])
    brought_up(cluster, tmp_path, "*.*")
    # Between two runs.
    router.update_one("named.plain", {"_id": 1}, {"$set": {"n": 1}})
    cluster.remove_shard("shard1")
    added_with_data(cluster, "shard1", "brought")
    router.move_primary("named", "shard1")
    router.insert_one("named.plain", {"_id": 100})
    brought_up(cluster, tmp_path, "*.*")
    equal("named.plain", "named.spread", "brought.along")
    # While it runs.
    with TablesWriter(cluster.uri, settings) as writer:
        writer.begin()
        router.insert_one("named.plain", {"_id": 101})
        cluster.remove_shard("shard1")
        added_with_data(cluster, "shard1", "later")
        router.move_primary("named", "shard1")
        router.insert_one("named.plain", {"_id": 102})
        writer.run_to_present(ClusterTime.from_timestamp(router.fence()))
    equal("named.plain", "named.spread", "brought.along", "later.along")


def added_with_data(cluster: ShardedCluster, name: str, database: str) -> None:
    """Add a replica set that already has a collection."""
    register = cluster._register

    def filled(shard: str, timeout_s: float) -> None:
        with MongoClient[Any](cluster.shards[shard].uri) as client:
            client[database]["along"].insert_many([{"_id": number} for number in range(5)])
        register(shard, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_register", filled)
        cluster.add_shard(name)


def test_a_replica_set_is_known_again_after_its_members_have_changed() -> None:
    """The config server remembers where a shard was when it was added."""
    added = "rs1/a:1,b:1"
    assert same_replica_set(added, "rs1/b:1,c:1")
    assert not same_replica_set(added, "rs1/c:1,d:1")
    assert not same_replica_set(added, "rs2/a:1,b:1")
