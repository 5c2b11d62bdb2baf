"""What a plan refuses, each time with a sentence that says what to do, and what it says about the rest. Nothing is
written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.act.sync.copying import Copy
from tailrace.act.sync.ownership import own
from tailrace.act.sync.plan import SyncPlan, make_plan
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.act.sync.views import collections_shown
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import Mongod, ReplicaSet, ShardedCluster, find_mongod
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import open_client
from tailrace.read.source.topology import Cluster

pytestmark = pytest.mark.used_servers
SETTINGS = SyncSettings(lease_s=10)


@pytest.fixture
def ends(start_replica_set: Callable[..., ReplicaSet]) -> tuple[MongoClient[Any], MongoClient[Any]]:
    """A source and a target, empty."""
    return MongoClient(start_replica_set().uri), MongoClient(start_replica_set().uri)


def only(plan: SyncPlan) -> str:
    """The one refusal."""
    assert len(plan.refusals) == 1, plan
    assert f"refused: {plan.refusals[0]}" in str(plan)
    assert plan.to_json()["refusals"] == plan.refusals
    return plan.refusals[0]


def databases(client: MongoClient[Any]) -> set[str]:
    return set(client.list_database_names()) - {"admin", "config", "local"}


def test_what_nothing_stands_in_the_way_of(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.shop.orders.insert_many([{"_id": n, "s": "x" * 100} for n in range(1_000)])
    source.shop.create_collection("v", viewOn="orders", pipeline=[])
    plan = make_plan(source, target, SETTINGS)
    assert not plan.refusals, plan
    assert (plan.collections, plan.views, plan.documents) == (1, 1, 1_000)
    assert plan.bytes == sum(len(one.raw) for one in source.shop.get_collection("orders").with_options(
        codec_options=source.codec_options.with_options(document_class=RawBSONDocument)).find())  # fmt: skip
    assert str(plan).splitlines()[-1] == "nothing stands in its way"
    assert plan.to_json()["keepsUuids"] is True
    assert databases(target) == set()


def test_a_target_that_holds_a_name(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.shop.orders.insert_one({})
    target.shop.orders.insert_one({})
    assert only(make_plan(source, target, SETTINGS)) == (
        "the target already holds shop.orders. Drop what is there, leave it out (--except) or give the copy another "
        "name (--rename)"
    )
    assert not make_plan(
        source, target, SyncSettings(renames={"shop": "store"}, excluded=Selection.of(["x.y"]))
    ).refusals


def test_a_target_that_holds_more(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.shop.orders.insert_one({})
    target.shop.others.insert_one({})
    assert "the target holds shop.others, which the source does not have" in only(make_plan(source, target, SETTINGS))
    assert not make_plan(source, target, SyncSettings(selection=Selection.of(["shop.orders"]))).refusals


def test_what_is_being_filled_is_told(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.shop["tmp.agg_out.1f"].insert_one({})
    plan = make_plan(source, target, SETTINGS)
    assert plan.refusals == []
    told = "shop.tmp.agg_out.1f is still being made into another collection: the copy waits until that is done"
    assert any(one.startswith(told) for one in plan.warnings)


def test_a_sync_that_is_there_already_goes_on(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.shop.orders.insert_one({})
    state = SyncState(target, SETTINGS)
    state.begin(places_of(source, 10).now(), members={}, witness=None)
    with own(state) as ownership:
        Copy(source, state, ownership, SETTINGS).run()
    plan = make_plan(source, target, SETTINGS)
    assert (plan.goes_on, plan.refusals) == (True, [])


def test_source_and_target_are_one(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, _ = ends
    assert only(make_plan(source, MongoClient(*source.address or ()), SETTINGS)) == (
        "source and target are the same deployment. Check the two connection strings"
    )


def test_two_names_become_one(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.a.c.insert_one({})
    source.b.c.insert_one({})
    assert only(make_plan(source, target, SyncSettings(renames={"a": "b"}))) == (
        "a.c and b.c would both be b.c on the target. Choose another name (--rename)"
    )


def test_database_names_that_differ_in_case_alone(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.Shop.c.insert_one({})
    target.shop.c.insert_one({})
    settings = SyncSettings(selection=Selection.of(["Shop.*"]))
    assert "the target has a database shop, so it cannot have another called Shop" in only(
        make_plan(source, target, settings)
    )


def test_collections_that_no_sync_keeps_equal(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.shop.create_collection("t", timeseries={"timeField": "t"})
    fields = {"fields": [{"path": "ssn", "bsonType": "string", "keyId": _uuid()}]}
    source.shop.command({"create": "e", "encryptedFields": fields})  # which PyMongo keeps from older servers
    first, second = sorted(make_plan(source, target, SETTINGS).refusals)
    assert first.startswith("shop.e is a collection of Queryable Encryption")
    assert second.startswith("shop.t is a time-series collection")
    assert all(one.endswith("Leave it out (--except)") for one in (first, second))
    assert not make_plan(source, target, SyncSettings(excluded=Selection.of(["shop.?"]))).refusals


def _uuid() -> Any:
    return Binary(b"0" * 16, 4)


def test_a_view_of_what_has_another_name(ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    source.shop.a.insert_one({})
    source.shop.create_collection("v", viewOn="b", pipeline=[{"$lookup": {"from": "a", "as": "x", "pipeline": []}}])
    refused = only(make_plan(source, target, SyncSettings(renames={"shop.a": "shop.b2"})))
    assert refused.startswith("the view shop.v shows shop.a, which has another name on the target")
    assert not make_plan(source, target, SyncSettings(renames={"shop": "store"})).refusals


def test_a_time_to_live_that_is_not_a_number(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set(version="4.4.2").uri)
    target = MongoClient(start_replica_set(version="5.0.4").uri)
    source.shop.c.create_index("a", expireAfterSeconds=float("nan"))
    source.shop.c.create_index([("g", "geoHaystack"), ("z", 1)], bucketSize=1)
    first, second = make_plan(source, target, SETTINGS).refusals
    assert first.startswith("the index a_1 of shop.c has NaN as expireAfterSeconds")
    assert second.startswith("the index g_geoHaystack_z_1 of shop.c is a geoHaystack index")


def test_an_older_target_and_a_lower_compatibility(start_replica_set: Callable[..., ReplicaSet]) -> None:
    newer, older = start_replica_set(), start_replica_set(version="5.0.4")
    assert only(make_plan(MongoClient(newer.uri), MongoClient(older.uri), SETTINGS)) == (
        "the target runs MongoDB 5.0 and the source 6.0: a sync goes to the same or a newer version. Upgrade the target"
    )
    lower = start_replica_set()
    lower.set_compatibility("5.0")
    assert "the target's feature compatibility version is 5.0 and the source's 6.0" in only(
        make_plan(MongoClient(newer.uri), MongoClient(lower.uri), SETTINGS)
    )
    assert not make_plan(MongoClient(older.uri), MongoClient(newer.uri), SETTINGS).refusals
    assert make_plan(MongoClient(older.uri), MongoClient(lower.uri), SETTINGS).warnings == [
        "the target runs MongoDB 6.0 with feature compatibility version 5.0"
    ]


@pytest.fixture
def standalone(tmp_path: Any) -> Iterator[MongoClient[Any]]:
    mongod = Mongod(find_mongod(), data_dir=tmp_path / "data", replica_set=None)
    mongod.start()
    try:
        yield MongoClient(mongod.uri)
    finally:
        mongod.stop()


def test_standalone_servers(standalone: MongoClient[Any], ends: tuple[MongoClient[Any], MongoClient[Any]]) -> None:
    source, target = ends
    assert "is a standalone server, which keeps no oplog" in only(make_plan(standalone, target, SETTINGS))
    assert "the target is a standalone server, which has no transactions" in only(
        make_plan(source, standalone, SETTINGS)
    )


def test_a_sharded_target_and_one_shard_as_a_source(
    start_sharded_cluster: Callable[..., ShardedCluster], ends: tuple[MongoClient[Any], MongoClient[Any]]
) -> None:
    source, target = ends
    cluster = start_sharded_cluster(shards=2)
    shard = MongoClient(cluster.shards["shard0"].uri)
    assert "Name a mongos of the cluster" in only(make_plan(source, shard, SETTINGS))
    assert "Name a mongos of the cluster" in only(make_plan(source, open_client(cluster.uri), SETTINGS))
    assert "the source is shard shard0 of a cluster" in only(make_plan(shard, target, SETTINGS))
    deployment = Cluster.discover(open_client(cluster.uri), cluster.uri, {})
    assert deployment is not None
    plan = make_plan(deployment, target, SETTINGS)
    assert not plan.refusals
    assert plan.source == "cluster of 2 shards, MongoDB 6.0"


def test_an_oplog_that_is_too_short_for_the_copy(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set(oplog_size_mb=990).uri)
    target = MongoClient(start_replica_set().uri)
    source.shop.c.insert_many([{"_id": n} for n in range(100)])
    settings = SyncSettings(documents_per_second=0.000_01)
    refused = only(make_plan(source, target, settings))
    assert refused.startswith("the copy takes about 2,777.8 hours, and the oplog reaches back")
    assert "(--archive DIR), enlarge it with replSetResizeOplog, copy less (--only)" in refused
    plan = make_plan(source, target, replace(settings, archive=Path("somewhere")))
    assert not plan.refusals
    assert any("somewhere keeps what the sync needs after that" in one for one in plan.warnings)


def _as(running: ReplicaSet, name: str, roles: list[Any]) -> MongoClient[Any]:
    root = MongoClient(running.uri)
    root.admin.command({"createUser": name, "pwd": "p", "roles": roles})
    host = running.uri.partition("@")[2]
    return MongoClient(f"mongodb://{name}:p@{host}")


def test_rights_of_the_targets_user(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    running = start_replica_set(root_password="secret")
    source.shop.c.insert_one({})
    settings = SyncSettings(selection=Selection.of(["shop.*"]))

    few = _as(running, "few", [{"role": "readWrite", "db": "shop"}])
    refusals = make_plan(source, few, settings).refusals
    assert "may not collMod, bypassDocumentValidation in the database shop of the target" in refusals[0]
    assert "in the sync's own database tailrace_sync. Grant it readWrite on tailrace_sync" in refusals[1]

    local = [{"role": "readWrite", "db": one} for one in ("shop", "tailrace_sync")] + [
        {"role": "dbAdmin", "db": "shop"}
    ]
    some = make_plan(source, _as(running, "some", local), settings)
    assert (some.refusals, some.keeps_uuids) == ([], False)
    assert "may not use applyOps with UUIDs" in some.warnings[0]
    assert "the target's user may not name collections by their UUIDs" in some.warnings[1]
    everywhere = make_plan(source, _as(running, "some2", local), SETTINGS)
    assert "in every database of the target" in everywhere.refusals[0]

    root = MongoClient(running.uri)
    by_uuid = {"resource": {"cluster": True}, "actions": ["applyOps", "forceUUID", "useUUID"]}
    root.admin.command({"createRole": "byUuid", "privileges": [by_uuid], "roles": []})
    roles = ["readWriteAnyDatabase", "dbAdminAnyDatabase", "byUuid"]
    all_ = make_plan(source, _as(running, "all", roles), SETTINGS)
    assert (all_.refusals, all_.warnings, all_.keeps_uuids) == ([], [], True)


def test_rights_of_the_sources_user(start_replica_set: Callable[..., ReplicaSet]) -> None:
    running = start_replica_set(root_password="secret")
    target = MongoClient(start_replica_set().uri)
    MongoClient(running.uri).shop.c.insert_one({})
    no_oplog = _as(running, "few", [{"role": "read", "db": "shop"}])
    assert "this user may not read the oplog" in only(make_plan(no_oplog, target, SETTINGS))
    part = _as(running, "part", [{"role": "read", "db": "shop"}, {"role": "read", "db": "local"}])
    assert "this user may not list all databases" in only(make_plan(part, target, SETTINGS))
    assert not make_plan(part, target, SyncSettings(selection=Selection.of(["shop.*"]))).refusals


def test_what_a_view_shows() -> None:
    pipeline = [
        {
            "$lookup": {
                "from": "a",
                "pipeline": [{"$unionWith": "b"}, {"$facet": {"x": [{"$unionWith": {"coll": "c"}}]}}],
            }
        },
        {"$graphLookup": {"from": "d"}},
        {"$lookup": {"from": {"db": "config", "coll": "cache.chunks"}}},
    ]
    found = collections_shown(bson.encode({"viewOn": "v", "pipeline": pipeline}))
    assert found == {"v", "a", "b", "c", "d"}
