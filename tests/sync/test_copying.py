"""The copy, from real servers to real servers: every byte, through kills, with writers, by one owner."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.dbref import DBRef
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.sync import indexes
from tailrace.act.sync.catalog import read_catalog
from tailrace.act.sync.copying import Copy
from tailrace.act.sync.ownership import own
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import SinkError
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import open_client
from tailrace.read.source.topology import Cluster
from tests.amounts import amount
from tests.commands import Piped
from tests.pace import BETWEEN_WRITES_S
from tests.server_in_use import IN_BETWEEN
from tests.sync.copy_process import LOST
from tests.sync.programs import program

pytestmark = pytest.mark.used_servers
RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
SETTINGS = SyncSettings(selection=Selection.of(["shop.*"]), lease_s=10)


def begun(source: Any, target: MongoClient[Any], settings: SyncSettings = SETTINGS) -> SyncState:
    state = SyncState(target, settings)
    state.begin(places_of(source, 10).now(), members={}, witness=None)
    return state


def copied(source: Any, target: MongoClient[Any], settings: SyncSettings = SETTINGS) -> SyncState:
    """Make a whole copy, in this process."""
    state = begun(source, target, settings)
    with own(state, lanes=5) as ownership:
        assert Copy(source, state, ownership, settings).run()
    return state


def stored(client: MongoClient[Any], namespace: str) -> list[bytes]:
    """The documents in the order of ``_id``, as they are stored."""
    database, _, name = namespace.partition(".")
    found = client.get_database(database, codec_options=RAW)[name].find({}).hint([("_id", 1)])
    return [bytes(one.raw) for one in found]


def odd_documents(version: str) -> Iterator[bytes]:
    """Documents that a careless copy would change."""
    yield bson.encode({"_id": Timestamp(0, 0), "a": Timestamp(0, 0)})
    yield bson.encode({"_id": 1, "t": Timestamp(0, 0), "u": {"t": Timestamp(0, 0)}, "v": [Timestamp(0, 0)]})
    yield bson.encode({"_id": 2, "": Timestamp(0, 0), "z": 0.0})
    yield bson.encode({"_id": 3.5, "b": float("nan"), "a": 1, "long": bson.Int64(1), "int": 1, "double": 1.0})
    yield bson.encode({"_id": float("nan")})
    yield bson.encode({"_id": bson.MinKey()})
    yield bson.encode({"_id": bson.MaxKey(), "n": None})
    yield bson.encode({"_id": None, "d": bson.Decimal128("1E-5")})
    yield bson.encode({"_id": {"b": 1, "a": [1, {"c": 2}]}, "code": bson.Code("x", {"a": 1})})
    yield bson.encode({"_id": "text", "s": "x" * 100_000})
    once = bson.encode({"_id": 5, "a": 1})[4:-1] + bson.encode({"a": 2})[4:-1]
    yield len(once + b"12345").to_bytes(4, "little") + once + b"\0"
    yield bson.encode({"_id": 6, "s": "\x01"}).replace(b"\x01\x00\x00", b"\xff\x00\x00")
    if version != "4.4.2":
        yield bson.encode({"_id": 7, "$set": {"a": 1}, "a.b": 1, "t": Timestamp(0, 0)})
    yield bson.encode({"_id": {"r": DBRef("c", 1)}, "r": DBRef("c", 1)})
    if version in ("6.0.27", "7.0.28"):
        yield bson.encode({"_id": {"x": {"$a": 1}}, "t": Timestamp(0, 0)})
    size = 16 * 1024 * 1024 - len(bson.encode({"_id": 8, "s": ""}))
    yield bson.encode({"_id": 8, "s": "x" * size})
    yield bson.encode({"_id": 9, "s": "y" * size})


def put(client: MongoClient[Any], namespace: str, documents: list[bytes]) -> None:
    """Store documents as they are. An insert replaces Timestamps of 0 by the time; a pipeline does not."""
    database, _, name = namespace.partition(".")
    there = client[database]
    for one in documents:
        if len(one) < 1 << 20:
            query = {"_id": {"$eq": bson.decode(one, CodecOptions(unicode_decode_error_handler="replace"))["_id"]}}
            pipeline = [{"$replaceWith": {"$literal": RawBSONDocument(one)}}]
            updates: dict[str, Any] = {"updates": [{"q": query, "u": pipeline, "upsert": True}]}
            reply = there.command({"update": name, **updates, "bypassDocumentValidation": True})
        else:
            documents_ = {"documents": [RawBSONDocument(one)], "bypassDocumentValidation": True}
            reply = there.command({"insert": name, **documents_})
        assert "writeErrors" not in reply, reply


@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2", pytest.param("7.0.28", marks=pytest.mark.slow)])
def test_every_byte_of_odd_documents_arrives(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    source = MongoClient(start_replica_set(version=version).uri)
    target = MongoClient(start_replica_set(version=version).uri)
    documents = list(odd_documents(version))
    for name in ("plain", "collated", "validated"):
        options = {"collated": {"collation": {"locale": "de", "strength": 1}}, "validated": {"validator": {"no": 1}}}
        source.shop.create_collection(name, **options.get(name, {}))
        put(source, f"shop.{name}", documents if name == "plain" else documents[:-2])

    copied(source, target)

    assert sorted(stored(source, "shop.plain")) == sorted(documents)
    for name in ("plain", "collated", "validated"):
        assert stored(target, f"shop.{name}") == stored(source, f"shop.{name}")


def _process(source: ReplicaSet, target: ReplicaSet, per_second: int, lease_s: float) -> Piped:
    return program("copy_process", source.uri, target.uri, per_second, lease_s)


def _fill(client: MongoClient[Any], count: int) -> None:
    for name in ("first", "second", "third"):
        for first in range(0, count, 1_000):
            client.shop[name].insert_many([{"_id": n, "n": n, "s": "x" * 200} for n in range(first, first + 1_000)])
        client.shop[name].create_index("n", unique=name == "second")


def test_through_many_kills_every_document_is_there_once(start_replica_set: Callable[..., ReplicaSet]) -> None:
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    count = amount(20_000, 60_000)
    _fill(source, count)
    settings = SyncSettings(selection=Selection.of(["shop.*"]), lease_s=1)
    state = begun(source, target, settings)
    chosen = random.Random(1)

    def copied_so_far() -> int:
        return sum(one["documents"] for one in state.ranges.find({}))

    phases, documents = set(), set()
    for kill in range(amount(8, 20)):
        running = _process(there, here, 25_000, 1)  # fast enough to be killed mostly at work, and not while it waits
        assert running.stdout.readline() == b"owner\n"
        if kill < 4:
            time.sleep(chosen.uniform(0, 0.25))
        else:  # however slow the machine is, some are killed at work
            before = copied_so_far()
            while copied_so_far() == before and running.poll() is None:
                time.sleep(0.01)
            time.sleep(chosen.uniform(0, 0.15 if count < 60_000 else 1.0))
        running.send_signal(signal.SIGKILL)
        running.wait()
        found = state.read()
        assert found is not None
        phases.add((found.phase, bool(found.extra.get("prepared"))))
        documents.add(copied_so_far())

    running = _process(there, here, 1_000_000, 30)
    assert running.wait() == 0

    assert {("copy", False), ("copy", True)} <= phases
    assert len(documents) > amount(3, 8), documents  # the kills came at various moments
    for name in ("first", "second", "third"):
        assert stored(target, f"shop.{name}") == stored(source, f"shop.{name}")
    assert copied_so_far() == 3 * count
    assert [one["_id"]["name"] for one in state.indexes()] == ["n_1"]  # the unique one waits
    with own(state) as ownership:
        indexes.build_waiting(state, ownership)
    for name in ("first", "second", "third"):
        assert list(target.shop[name].list_indexes()) == list(source.shop[name].list_indexes())


def test_an_owner_that_was_stopped_beyond_its_lease_writes_nothing_more(
    start_replica_set: Callable[..., ReplicaSet],
) -> None:
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    _fill(source, amount(5_000, 20_000))
    begun(source, target, SyncSettings(selection=Selection.of(["shop.*"]), lease_s=1))
    old = _process(there, here, 10_000, 1)
    assert old.stdout.readline() == b"owner\n"
    while not target.shop.first.estimated_document_count():
        time.sleep(0.05)
    old.send_signal(signal.SIGSTOP)
    try:
        assert _process(there, here, 1_000_000, 1).wait() == 0
        for name in ("first", "second", "third"):
            target.shop[name].delete_many({"_id": {"$gte": 1_000}})  # documents that the old one would bring back
    finally:
        old.send_signal(signal.SIGCONT)
    assert old.wait() == LOST
    assert [target.shop[name].count_documents({}) for name in ("first", "second", "third")] == [1_000] * 3


def test_documents_that_nobody_changes_are_exact_beside_writers(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    count = amount(10_000, 40_000)
    source.shop.c.insert_many([{"_id": n, "v": 0, "s": "x" * 300} for n in range(count)])
    stop = threading.Event()

    def write() -> None:
        chosen = random.Random(5)
        while not stop.wait(BETWEEN_WRITES_S / 5):
            number = 2 * chosen.randrange(count // 2)  # the odd ones stay as they are
            match chosen.randrange(3):
                case 0:
                    source.shop.c.update_one({"_id": number}, {"$inc": {"v": 1}})
                case 1:
                    source.shop.c.delete_one({"_id": number})
                case 2:
                    source.shop.c.replace_one({"_id": number}, {"_id": number, "v": -1}, upsert=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        state = copied(source, target)
    finally:
        stop.set()
        writer.join()
    found = state.read()
    assert found is not None
    assert found.phase == "catchUp"
    assert found.hold > found.time
    odd = {"_id": {"$mod": [2, 1]}}
    assert list(target.shop.c.find(odd)) == list(source.shop.c.find(odd))
    assert target.shop.c.count_documents({}) <= count


def test_a_foreign_document_on_the_target_is_not_overwritten(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    source.shop.c.insert_many([{"_id": n} for n in range(100)])
    target.shop.c.insert_one({"_id": 5, "mine": True})
    with pytest.raises(SinkError, match=r"the target has a collection shop.c already.*--except"):
        copied(source, target)
    assert list(target.shop.c.find()) == [{"_id": 5, "mine": True}]


def test_new_names_and_what_is_left_out(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    for name in ("a", "b", "c"):
        source.shop[name].insert_one({"_id": name})
    source.other.d.insert_one({"_id": "d"})
    settings = SyncSettings(
        excluded=Selection.of(["shop.c"]), renames={"shop.a": "store.x", "other": "another"}, lease_s=10
    )
    copied(source, target, settings)
    names = set(target.list_database_names()) - {"admin", "config", "local", "tailrace_sync"}
    held = {f"{database}.{name}" for database in names for name in target[database].list_collection_names()}
    assert held == {"store.x", "shop.b", "another.d"}
    assert [target.store.x.find_one(), target.another.d.find_one()] == [{"_id": "a"}, {"_id": "d"}]


def test_a_clusters_documents_come_from_their_owners(
    start_sharded_cluster: Callable[..., ShardedCluster], start_replica_set: Callable[..., ReplicaSet]
) -> None:
    cluster = start_sharded_cluster(shards=2)
    router = cluster.router
    router.create_database("shop", "shard0")
    router.shard_collection("shop.orders", {"_id": 1})
    router.split("shop.orders", {"_id": 500})
    router.move_chunk("shop.orders", {"_id": 500}, to="shard1")
    router.insert_many("shop.orders", [{"_id": number, "v": number} for number in range(1_000)])
    router.insert_one("shop.plain", {"_id": 1})
    with MongoClient(cluster.shards["shard0"].uri) as shard:
        shard.shop.orders.insert_one({"_id": 700, "orphan": True})
    client = open_client(cluster.uri)
    deployment = Cluster.discover(client, cluster.uri, {})
    target = MongoClient(start_replica_set().uri)

    copied(deployment, target)

    assert list(target.shop.orders.find()) == [{"_id": number, "v": number} for number in range(1_000)]
    assert list(target.shop.plain.find()) == [{"_id": 1}]


def test_one_id_on_two_shards_is_refused(
    start_sharded_cluster: Callable[..., ShardedCluster], start_replica_set: Callable[..., ReplicaSet]
) -> None:
    cluster = start_sharded_cluster(shards=2)
    router = cluster.router
    router.create_database("shop", "shard0")
    router.shard_collection("shop.orders", {"region": 1})
    router.split("shop.orders", {"region": "m"})
    router.move_chunk("shop.orders", {"region": "n"}, to="shard1")
    router.insert_one("shop.orders", {"_id": 1, "region": "a"})
    router.insert_one("shop.orders", {"_id": 1, "region": "z"})
    client = open_client(cluster.uri)
    deployment = Cluster.discover(client, cluster.uri, {})
    target = MongoClient(start_replica_set().uri)
    with pytest.raises(SinkError, match=r"two shards have documents with the same _id in shop.orders.*--except"):
        copied(deployment, target)


def test_an_old_owner_makes_and_drops_nothing(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    source.shop.c.insert_one({"_id": 1})
    source.shop.late.insert_one({"_id": 1})
    state = begun(source, target, SyncSettings(selection=Selection.of(["shop.*"]), lease_s=60))
    definitions = read_catalog(source, SETTINGS.selection).collections
    with own(state, lanes=2) as old:
        state.syncs.update_one({"_id": "sync"}, {"$set": {"expiresAt": None}})  # as if its lease had run out
        with own(state, lanes=2) as new:
            indexes.create(target, definitions["shop.c"], (6, 0), ownership=new)
            old.check()  # by its own clock it is still the owner
            with pytest.raises(LeaseLost):
                indexes.create(target, definitions["shop.late"], (6, 0), ownership=old)
            with pytest.raises(LeaseLost):
                indexes.drop(target, "shop.c", ownership=old)
            assert target.shop.list_collection_names() == ["c"]
            indexes.drop(target, "shop.c", ownership=new)
            assert target.shop.list_collection_names() == []
