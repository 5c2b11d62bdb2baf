"""A verification names every planted difference, and finds none while writers write."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import bson
import pytest
from bson import Int64
from bson.max_key import MaxKey
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.act.sync import verification
from tailrace.act.sync.comparing import how_they_differ
from tailrace.act.sync.indexes import restore_held
from tailrace.act.sync.ownership import own
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.verification import VerificationProgress, verify
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import SinkError, UsageError
from tests.amounts import amount
from tests.pace import BETWEEN_WRITES_S
from tests.server_in_use import IN_BETWEEN
from tests.sync.running import Following, following

pytestmark = pytest.mark.used_servers
SETTINGS = SyncSettings(selection=Selection.of(["shop.*"]), lease_s=10)

#: What is done to the target, and what must be reported.
PLANTED: list[tuple[Callable[[MongoClient[Any]], Any], str]] = [
    (lambda t: _set(t, 7, s="changed"), "7: the value of s"),
    (lambda t: t.shop.c.delete_one({"_id": 8}), "8: missing"),
    (lambda t: t.shop.c.insert_one({"_id": 1e9}), "1000000000.0: extra"),
    (lambda t: t.shop.c.replace_one({"_id": 9}, {"s": "x" * 50, "n": 9, "v": 0}), "9: the order of the fields"),
    (lambda t: _set(t, 10, v=Int64(0)), "10: v is int at the source, long at the target"),
    (lambda t: t.shop.c.update_one({"_id": 11}, {"$unset": {"v": 1}}), "11: the target lacks v"),
    (lambda t: _set(t, 12, w=1), "12: the target also has w"),
    (lambda t: _set(t, MaxKey(), n=-1.0), '{"$maxKey": 1}: n is int at the source, double at the target'),
    (lambda t: _other_type(t, 13), "13: missing\n13.0: extra"),
    (lambda t: _set(t, 14, d={"a": [1, {"b": 2.0}]}), "14: d.a.1.b is int at the source, double at the target"),
    (lambda t: t.shop.c.drop_index("n_1"), "index n_1: "),
    (lambda t: _alter(t, "c", index={"name": "v_1", "hidden": True}), "index v_1: "),
    (lambda t: _alter(t, "c", validator={"n": 5}), "options: "),
    (lambda t: _alter(t, "view", viewOn="c", pipeline=[{"$limit": 1}]), "options: "),
    (lambda t: t.shop.create_collection("more"), "only the target has it"),
]


def _set(target: MongoClient[Any], key: Any, **fields: Any) -> None:
    target.shop.c.update_one({"_id": key}, {"$set": fields})


def _alter(target: MongoClient[Any], name: str, **changes: Any) -> None:
    target.shop.command({"collMod": name, **changes})


def _other_type(target: MongoClient[Any], number: int) -> None:
    found = target.shop.c.find_one_and_delete({"_id": number})
    assert found is not None
    target.shop.c.insert_one({"_id": float(number), **{name: value for name, value in found.items() if name != "_id"}})


def fill(source: MongoClient[Any], count: int = 3_000) -> None:
    source.shop.create_collection("c", validator={"n": {"$ne": "no"}})
    source.shop.c.create_index("n")
    source.shop.c.create_index("v")
    source.shop.c.insert_many([{"_id": n, "n": n, "s": "x" * 50, "v": 0} for n in range(count)])
    source.shop.c.insert_one({"_id": MaxKey(), "n": -1})
    source.shop.c.update_one({"_id": 14}, {"$set": {"d": {"a": [1, {"b": 2}]}}})
    source.shop.create_collection("view", viewOn="c", pipeline=[{"$limit": 2}])


def found(run: Following, **options: Any) -> set[str]:
    result = verify(run.source, run.state, SETTINGS, **options)
    assert result.good is not bool(result.differences)
    return {str(one) for one in result.differences}


# For 7.0, test_copying.py and test_catalog.py cover what differs.
@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2", pytest.param("7.0.28", marks=pytest.mark.slow)])
def test_each_planted_difference_is_named(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    there, here = start_replica_set(version=version), start_replica_set(version=version)
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    fill(source)
    with following(there.uri, here.uri, SETTINGS) as run:
        run.settle()
        result = verify(run.source, run.state, SETTINGS)
        assert (result.differences, result.documents, result.collections) == ((), 3_001, 1)
        assert result.good
        for plant, _ in PLANTED:
            plant(target)
        said = found(run)
    expected = sorted(line for _, lines in PLANTED for line in lines.split("\n"))
    parts = sorted(one.partition(": ")[2] for one in said)
    assert len(parts) == len(expected)
    assert all(part.startswith(line) for part, line in zip(parts, expected, strict=True)), (parts, expected)


def test_nothing_differs_beside_writers_and_definitions(start_replica_set: Callable[..., ReplicaSet]) -> None:
    there, here = start_replica_set(), start_replica_set()
    source = MongoClient(there.uri)
    count = amount(6_000, 20_000)
    fill(source, count)
    stop = threading.Event()

    def write() -> None:
        chosen = random.Random(3)
        while not stop.wait(BETWEEN_WRITES_S / 5):
            number = chosen.randrange(count)
            match chosen.randrange(40):
                case 0:
                    source.shop.d.rename(f"d{number}")
                case 1:
                    source.shop.d.insert_one({"n": number})
                case 2:
                    source.shop.d.drop()
                case one if one < 20:
                    source.shop.c.update_one({"_id": number}, {"$inc": {"v": 1}})
                case one if one < 30:
                    source.shop.c.delete_one({"_id": number})
                case _:
                    source.shop.c.replace_one({"_id": number}, {"v": 1, "n": number}, upsert=True)

    def patient() -> None:
        while not stop.is_set():
            try:
                write()
            except Exception as error:
                if "NamespaceNotFound" not in str(error) and "does not exist" not in str(error):
                    raise

    with following(there.uri, here.uri, SETTINGS) as run:
        writer = threading.Thread(target=patient)
        writer.start()
        try:
            for _ in range(3):
                result = verify(run.source, run.state, SETTINGS)
                assert result.good, result.differences
                assert result.documents > count // 2
        finally:
            stop.set()
            writer.join()
        run.settle()
        MongoClient(here.uri).shop.c.update_one({"_id": MaxKey()}, {"$set": {"n": 1}})
        source.other.c.insert_one({})
        run.settle()
        assert found(run) == {'shop.c: {"$maxKey": 1}: the value of n'}


def test_a_sample_and_chosen_names(start_replica_set: Callable[..., ReplicaSet]) -> None:
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    fill(source)
    source.shop.d.insert_many([{"_id": n} for n in range(500)])
    with following(there.uri, here.uri, SETTINGS) as run:
        run.settle()
        result = verify(run.source, run.state, SETTINGS, sample=300)
        assert result.good
        assert 200 < result.documents <= 600
        target.shop.d.update_many({}, {"$set": {"v": 1}})
        assert verify(run.source, run.state, SETTINGS, sample=100).more + len(
            verify(run.source, run.state, SETTINGS, sample=100).differences
        )
        assert verify(run.source, run.state, SETTINGS, names=["shop.c"]).good
        result = verify(run.source, run.state, SETTINGS, names=["shop.d"])
        assert (len(result.differences), result.more) == (100, 400)
        with pytest.raises(UsageError, match=r"shop.e is not a collection of the sync 'sync'"):
            verify(run.source, run.state, SETTINGS, names=["shop.e"])


def test_one_that_was_stopped_goes_on(
    start_replica_set: Callable[..., ReplicaSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = amount(20_000, 200_000)
    monkeypatch.setattr(verification, "_RANGE_DOCUMENTS", count // 4)
    monkeypatch.setattr(verification, "_CHUNK_DOCUMENTS", count // 100)
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    source.shop.c.insert_many([{"_id": n} for n in range(count)])
    with following(there.uri, here.uri, SETTINGS) as run:
        run.settle()
        target.shop.c.update_many({"_id": {"$in": [0, count - 1]}}, {"$set": {"v": 1}})
        source.other.c.insert_one({})
        run.settle()
        stop = threading.Event()

        def halfway(progress: VerificationProgress) -> None:
            if progress.documents > count // 10:
                stop.set()

        first = verify(run.source, run.state, SETTINGS, stop=stop, on_progress=halfway)
        assert not first.complete
        assert 0 < first.documents < count
        whole = verify(run.source, run.state, SETTINGS, resume=True)
        assert (whole.complete, whole.documents) == (True, count)
        assert {str(one) for one in whole.differences} == {
            "shop.c: 0: the target also has v",
            f"shop.c: {count - 1}: the target also has v",
        }


def test_a_cluster(
    start_sharded_cluster: Callable[..., ShardedCluster], start_replica_set: Callable[..., ReplicaSet]
) -> None:
    cluster, here = start_sharded_cluster(shards=2), start_replica_set()
    router, target = cluster.router, MongoClient(here.uri)
    router.create_database("shop", "shard0")
    router.shard_collection("shop.c", {"_id": 1})
    router.split("shop.c", {"_id": 300})
    router.move_chunk("shop.c", {"_id": 300}, to="shard1")
    router.insert_many("shop.c", [{"_id": number} for number in range(600)])
    router.insert_one("shop.plain", {"_id": 1})
    with MongoClient(cluster.shards["shard0"].uri) as shard:
        shard.shop.c.insert_one({"_id": 400, "orphan": True})
    with following(cluster.uri, here.uri, SETTINGS) as run:
        run.settle()
        result = verify(run.source, run.state, SETTINGS)
        assert (result.good, result.documents) == (True, 601), result.differences
        router.move_chunk("shop.c", {"_id": 0}, to="shard1")
        router.move_chunk("shop.c", {"_id": 300}, to="shard0")
        run.settle()
        assert found(run) == set()
        target.shop.c.delete_one({"_id": 400})
        target.shop.plain.update_one({"_id": 1}, {"$set": {"a": 1}})
        router.insert_one("shop.plain", {"_id": 2})
        run.settle()
        assert found(run) == {"shop.c: 400: missing", "shop.plain: 1: the target also has a"}


def test_a_sync_that_does_not_run_is_compared_as_long_as_nobody_writes(
    start_replica_set: Callable[..., ReplicaSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    fill(source)
    with following(there.uri, here.uri, SETTINGS) as run:
        run.settle()
    source.admin.command({"setParameter": 1, "minSnapshotHistoryWindowInSeconds": 0})
    assert verify(run.source, run.state, SETTINGS).good
    for _ in range(3):  # the server forgets the past; nobody writes anything
        source.admin.command({"appendOplogNote": 1, "data": {}})
        source.admin.command({"fsync": 1})
    target.shop.c.update_one({"_id": 7}, {"$set": {"s": "changed"}})
    assert found(run) == {"shop.c: 7: the value of s"}
    source.shop.c.update_one({"_id": 8}, {"$set": {"s": "changed"}})
    for _ in range(3):
        source.admin.command({"appendOplogNote": 1, "data": {}})
        source.admin.command({"fsync": 1})
    monkeypatch.setattr("tailrace.act.sync.verification._WAIT_S", 1.0)
    with pytest.raises(SinkError, match=r"the sync has stayed at .* UTC .*and the source has gone on"):
        verify(run.source, run.state, SETTINGS)


def test_a_sync_that_has_not_caught_up_cannot_be_verified(
    start_replica_set: Callable[..., ReplicaSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.sync.test_copying import copied

    source, target = MongoClient(start_replica_set().uri), MongoClient(start_replica_set().uri)
    fill(source)
    state = copied(source, target)
    monkeypatch.setattr("tailrace.act.sync.verification._WAIT_S", 1.0)
    with pytest.raises(SinkError, match=r"equals the source at no position.*needs a running sync"):
        verify(source, state, SETTINGS)


def test_how_two_documents_differ() -> None:
    def differ(mine: Any, theirs: Any) -> str:
        return how_they_differ(bson.encode(mine), bson.encode(theirs))

    assert differ({"_id": 1, "a": 1, "b": {"c": 1}}, {"_id": 1, "a": 1, "b": {"c": 2}}) == "the value of b.c"
    assert differ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}) == "the order of the fields of a."
    twice = bson.encode({"a": 1})[4:-1] + bson.encode({"a": 1})[4:-1]
    twice = (len(twice) + 5).to_bytes(4, "little") + twice + b"\0"
    assert how_they_differ(bson.encode({"a": 1}), twice) == "how often a field occurs"
    assert RawBSONDocument(twice)


def test_a_clustered_collection_expires_again_after_the_cut_over(start_replica_set: Callable[..., ReplicaSet]) -> None:
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    clustered = {"key": {"_id": 1}, "unique": True}
    source.shop.create_collection("c", clusteredIndex=clustered, expireAfterSeconds=3_600)
    source.shop.c.create_index("at", expireAfterSeconds=60)
    source.shop.c.insert_many([{"_id": n} for n in range(100)])

    def listed(client: MongoClient[Any]) -> list[Any]:
        options = [one["options"] for one in client.shop.list_collections()]
        return [*options, *client.shop.c.list_indexes()]

    with following(there.uri, here.uri, SETTINGS) as run:
        run.settle()
        assert listed(target)[0] == {"clusteredIndex": {"v": 2, "name": "_id_", **clustered}}
        assert verify(run.source, run.state, SETTINGS).good
    with own(run.state) as ownership:
        assert sorted(restore_held(run.state, ownership)) == ["shop.c: $clustered", "shop.c: at_1"]
    assert run.state.indexes() == []
    assert listed(target) == listed(source)
    assert verify(run.source, run.state, SETTINGS).good
