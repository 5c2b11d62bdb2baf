"""A copy does not begin while a collection is being turned into another one: what is already in it would be missing.

A sync that began during a resharding ended with "nothing has told of its creation", or lost the collection. Tests had
begun their syncs before the resharding, and the campaign showed it only with one seed in many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.act.sync import at_rest
from tailrace.act.sync.at_rest import catalog_at_rest
from tailrace.act.sync.catalog import DeploymentCatalog, OnSource
from tailrace.act.sync.settings import SyncSettings
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import SourceError
from tailrace.read.source.topology import Cluster
from tests.server_in_use import SERVER_VERSION

pytestmark = pytest.mark.mongod


def chosen(*patterns: str) -> OnSource:
    return OnSource(SyncSettings(selection=Selection(patterns)))


def never(_: float) -> None:
    raise AssertionError("it waited")


@pytest.fixture
def client(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](replica_set.uri) as connected:
        yield connected
        connected.drop_database("resting")


@pytest.mark.parametrize("name", ["tmp.agg_out.1f", "tmp.mr.orders_1", "tmpA1b2C.renameCollection"])
def test_what_is_being_filled_is_waited_for(client: MongoClient[Any], name: str) -> None:
    client.resting[name].insert_one({"_id": 1})
    waits = list[float]()

    def filled(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            client.resting[name].rename("orders")

    found, time = catalog_at_rest(client, chosen("resting.orders"), wait=filled)
    assert (list(found.collections), len(waits)) == (["resting.orders"], 3)
    [renamed] = client.local["oplog.rs"].find({"o.to": "resting.orders"}, sort=[("ts", -1)], limit=1)
    assert time.to_timestamp() >= renamed["ts"]


def test_what_is_never_done_is_refused_with_its_name(client: MongoClient[Any]) -> None:
    client.resting["tmp.agg_out.left"].insert_one({"_id": 1})
    with pytest.raises(SourceError, match=r"resting\.tmp\.agg_out\.left is still being made") as refused:
        catalog_at_rest(client, chosen("resting.*"), wait=lambda _: None, patience_s=2)
    assert "drop what an abandoned attempt has left behind" in str(refused.value.hint)
    assert catalog_at_rest(client, chosen("another.*"), wait=never)[0].collections == {}


def test_a_list_of_a_primary_that_is_none_any_more_does_not_count(
    start_replica_set: Callable[..., ReplicaSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list may hold what no majority ever had: no entry tells that it was rolled back. Tests had begun their syncs
    when there was no election, and campaigns hit the moment of listing too rarely."""
    running = start_replica_set(1)
    reads = list[int]()

    def read(*arguments: Any) -> DeploymentCatalog:
        reads.append(1)
        found = read_catalog(*arguments)
        if len(reads) == 1:
            running.step_down()
        return found

    read_catalog = at_rest.read_catalog
    monkeypatch.setattr(at_rest, "read_catalog", read)
    with MongoClient[Any](running.uri) as client:
        client.resting.orders.insert_one({"_id": 1})
        found, _ = catalog_at_rest(client, chosen("resting.*"), wait=never)
    assert (list(found.collections), len(reads)) == (["resting.orders"], 2)


def test_definitions_all_the_time_are_waited_out_for_as_long_as_is_said(
    client: MongoClient[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty attempts took only a second, and a campaign's sync was refused."""
    client.resting.orders.insert_one({"_id": 1})
    tries = list[int]()

    def changed(*_: Any) -> bool:
        tries.append(1)
        return len(tries) < 80

    monkeypatch.setattr(at_rest, "definitions_changed", changed)
    found, _ = catalog_at_rest(client, chosen("resting.*"), wait=lambda _: None)
    assert (list(found.collections), len(tries)) == (["resting.orders"], 80)
    tries.clear()
    with pytest.raises(SourceError, match="changed during each attempt"):
        catalog_at_rest(client, chosen("resting.*"), wait=lambda _: None, listed_s=0)


@contextmanager
def opened(running: ShardedCluster) -> Iterator[Cluster]:
    with MongoClient[Any](running.uri) as client:
        cluster = Cluster.discover(client, running.uri, {})
        assert cluster is not None
        with closing(cluster):
            yield cluster


def test_a_database_that_is_on_its_way_to_another_shard_is_waited_for(sharded_cluster: ShardedCluster) -> None:
    """The other shard already has its collections, with other UUIDs, and nothing about them comes through the oplog."""
    router = sharded_cluster.router
    router.create_database("going", "shard0")
    router.insert_one("going.orders", {"_id": 1})
    router.shard_collection("going.spread", {"_id": 1})
    router.split("going.spread", {"_id": 5})
    router.move_chunk("going.spread", {"_id": 7}, to="shard1")
    waits = list[float]()
    try:
        with (
            opened(sharded_cluster) as cluster,
            MongoClient[Any](sharded_cluster.shards["shard1"].uri) as other,
        ):
            assert set(catalog_at_rest(cluster, chosen("going.*"), wait=never)[0].collections) == {
                "going.orders",
                "going.spread",
            }
            other.going.orders.insert_one({"_id": 1})
            with pytest.raises(SourceError, match=r"going\.orders, which is not sharded, is on shard1, while") as no:
                catalog_at_rest(cluster, chosen("going.*"), wait=waits.append, patience_s=1)
            assert "primary shard" in str(no.value.hint)
            assert len(waits) == 2
            catalog_at_rest(cluster, chosen("going.spread"), wait=never)
            other.going.orders.drop()
    finally:
        router.drop_database("going")


@pytest.mark.skipif(SERVER_VERSION.startswith("4."), reason="4.4 renames no sharded collection")
@pytest.mark.parametrize("shards", [["shard0"], ["shard0", "shard1"]])
def test_a_rename_that_the_config_server_does_not_know_yet_is_waited_for(
    sharded_cluster: ShardedCluster, shards: list[str]
) -> None:
    """Each shard renames for itself, and the config server learns of it at the end. A sync that began in between gave
    the collection its former name, or both, and no later entry corrected this. Tests had begun their syncs before the
    rename, and in campaigns renames are over too quickly."""
    router = sharded_cluster.router
    router.create_database("renaming", "shard0")
    router.insert_one("renaming.orders", {"_id": 1})
    router.shard_collection("renaming.orders", {"_id": 1})
    if "shard1" in shards:
        router.split("renaming.orders", {"_id": 5})
        router.move_chunk("renaming.orders", {"_id": 7}, to="shard1")

    def rename(before: str, after: str) -> None:
        for shard in shards:
            with MongoClient[Any](sharded_cluster.shards[shard].uri) as client:
                client.admin.command({"renameCollection": f"renaming.{before}", "to": f"renaming.{after}"})

    try:
        with opened(sharded_cluster) as cluster:
            rename("orders", "sales")
            for pattern in ("renaming.*", "renaming.sales", "renaming.orders"):
                with pytest.raises(SourceError, match=r"renaming\.sales on shard. is renaming\.orders on the config"):
                    catalog_at_rest(cluster, chosen(pattern), wait=lambda _: None, patience_s=1)
            catalog_at_rest(cluster, chosen("renaming.other"), wait=never)
            rename("sales", "orders")
            assert list(catalog_at_rest(cluster, chosen("renaming.*"), wait=never)[0].collections) == [
                "renaming.orders"
            ]
    finally:
        router.drop_database("renaming")
