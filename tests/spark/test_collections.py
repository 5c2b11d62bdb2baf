"""The option ``collections``: a list of names and patterns gives the events of the server's stream over the whole
cluster whose namespace is in the list, byte for byte; and a copy of exactly those collections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import bson
import bson.json_util
import pymongo
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.embedded.sharding import Transaction
from tailrace.errors import UsageError
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.source.batch_reader import TailraceBatchReader
from tailrace.read.source.outline import scope_filter
from tests.server_in_use import IN_BETWEEN
from tests.sharded import native
from tests.snapshot.copies import Target, truth
from tests.spark.readers import CrashingQuery
from tests.spark.streams import newest, server_events
from tests.spark.test_snapshot import run_to

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

LISTS = [
    ["listed_a.orders"],
    ["listed_a.orders", "listed_b.orders", "listed_a.a.b.c"],
    ["listed_a.*"],
    ["listed_?.or*", "listed_b.x+y(z)[1]|^"],
    ["*.orders"],
    ["listed_*.größe-??", "listed_a.b*c"],
    ["listed_a.pay$day", "listed_c.*", "listed_b.*d*"],
    ["listed_a.view", "listed_b.target"],
    ["*.*"],
    ["listed_none.nothing"],
]
#: A name with a dollar is accepted by no version (73), but may be asked for.
ODD = ("a.b.c", "größe-日本", "x+y(z)[1]|^", "b c", "bXc", "c\n", "c", "orders\n", "Orders", "order")


def has_form(pattern: str, text: str) -> bool:
    """The meaning of a pattern, implemented once more in the plainest way."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(has_form(pattern[1:], text[start:]) for start in range(len(text) + 1))
    return bool(text) and pattern[0] in ("?", text[0]) and has_form(pattern[1:], text[1:])


def chosen(patterns: Sequence[str], event: bytes) -> bool:
    found = bson.decode(event)
    for pattern in patterns:
        database, _, collection = pattern.partition(".")
        for ns in (found["ns"], found.get("to")):
            if ns and has_form(database, ns["db"]):
                if "coll" in ns and has_form(collection, ns["coll"]):
                    return True
                if "coll" not in ns and collection == "*":
                    return True
    return False


def server_match(patterns: Sequence[str]) -> dict[str, Any]:
    """The same for the server, with nothing but regular expressions."""

    def expression(pattern: str) -> dict[str, str]:
        signs = {"*": ".*", "?": "."}
        return {"$regex": "^" + "".join(signs.get(one, re.escape(one)) for one in pattern) + "\\z", "$options": "s"}

    branches = []
    for pattern in patterns:
        database, _, collection = pattern.partition(".")
        for field in ("ns", "to"):
            branch = {f"{field}.db": expression(database)}
            branches.append(branch if collection == "*" else {**branch, f"{field}.coll": expression(collection)})
    return {"$match": {"$or": branches}}


def write(client: pymongo.MongoClient[dict[str, Any]]) -> None:
    """Writes of every kind to three databases, to collections of ordinary and of odd names."""
    a, b, c = client["listed_a"], client["listed_b"], client["listed_c"]
    for database in (a, b):
        database.orders.insert_many([{"_id": number, "n": number} for number in range(4)])
        database.orders.update_one({"_id": 1}, {"$set": {"n": 7}})
        database.orders.replace_one({"_id": 2}, {"n": 9})
        database.orders.delete_one({"_id": 3})
        for name in ODD:
            database.command("insert", name, documents=[{"_id": 1}])
    a.other.insert_one({"_id": 1})
    a.other.rename("orders_2025")  # into a pattern
    b.orders_2025.insert_one({"_id": 1})
    b.orders_2025.rename("elsewhere")  # out of it
    b.source.insert_one({"_id": 1})
    b.source.rename("target")
    b.source.insert_one({"_id": 2})
    b.source.rename("target", dropTarget=True)
    a.orders.aggregate([{"$out": "made"}])
    a.create_collection("view", viewOn="orders", pipeline=[])
    a.orders.create_index("n")
    a.command("collMod", "orders", validationLevel="moderate")
    with client.start_session() as session, session.start_transaction():
        for collection in (a.orders, b.orders, a.made, b["a.b.c"], a["a.b.c"]):
            collection.insert_one({"_id": "t"}, session=session)
        a.orders.delete_one({"_id": 0}, session=session)
    a.system.views.find_one({})
    c.late.insert_one({"_id": 1})  # a database that was not there
    a.orders.drop_index("n_1")
    b.orders.drop()
    b.orders.insert_one({"_id": "again"})
    client.drop_database("listed_c")
    client.drop_database("listed_a")


@pytest.fixture(scope="module", params=["6.0", IN_BETWEEN, "4.4.2"])
def written(request: pytest.FixtureRequest) -> Iterator[tuple[str, ClusterTime, ClusterTime, bool]]:
    """A replica set of each version: its address, the span of the writes, whether it is a 6.0."""

    def run(uri: str, *, is_new: bool) -> Iterator[tuple[str, ClusterTime, ClusterTime, bool]]:
        with pymongo.MongoClient[dict[str, Any]](uri) as client:
            start = newest(uri)
            write(client)
            yield uri, start, newest(uri), is_new
            client.drop_database("listed_b")

    if request.param == "6.0":
        yield from run(request.getfixturevalue("replica_set").uri, is_new=True)
        return
    with ReplicaSet(1, version=request.param) as older:
        yield from run(older.uri, is_new=False)


def options_of(
    uri: str, patterns: Sequence[str], start: ClusterTime, until: ClusterTime, **more: str
) -> dict[str, str]:
    return {
        "uri": uri,
        "collections": bson.json_util.dumps(patterns),
        "columns": "event",
        "partitions": "2",
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "endAtOperationTime": f"{until.seconds},{until.increment}",
        **more,
    }


def read(options: dict[str, str]) -> list[bytes]:
    """A batch read, slice by slice, as Spark's workers do it."""
    reader = TailraceBatchReader(parse(options))
    batches = [batch for slice_ in reader.partitions() for batch in reader.read(slice_)]
    return [event for batch in batches for event in batch.column("event").to_pylist()]


def test_the_events_are_those_of_the_clusters_stream_with_a_match(written: Any) -> None:
    uri, start, until, is_new = written
    for stage in ({}, {"fullDocument": "updateLookup"}, *([{"showExpandedEvents": True}] if is_new else ())):
        every = server_events(uri, ("admin", None), start, until, stage=stage)
        assert len(every) > 60
        more = {name: "true" if value is True else str(value) for name, value in stage.items()}
        for patterns in LISTS:
            expected = [event for event in every if chosen(patterns, event)]
            assert read(options_of(uri, patterns, start, until, **more)) == expected, patterns
            match = server_match(patterns)
            assert server_events(uri, ("admin", None), start, until, stage=stage, pipeline=(match,)) == expected
            assert bool(expected) is (patterns != LISTS[-1])


def test_a_pipeline_comes_after_the_list(written: Any) -> None:
    uri, start, until, _ = written
    stages = [{"$match": {"operationType": {"$in": ["insert", "rename"]}}}, {"$unset": "wallTime"}]
    patterns = ["listed_?.or*"]
    expected = server_events(uri, ("admin", None), start, until, pipeline=(server_match(patterns), *stages))
    assert expected
    found = read(options_of(uri, patterns, start, until, pipeline=bson.json_util.dumps(stages)))
    assert found == expected


def test_planning_counts_no_entry_of_other_collections_and_leaves_none_out(written: Any) -> None:
    uri, start, until, is_new = written
    stage = {"showExpandedEvents": True} if is_new else {}
    every = server_events(uri, ("admin", None), start, until, stage=stage)
    span = {"$gt": start.to_timestamp(), "$lte": until.to_timestamp()}
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        oplog = client.local["oplog.rs"]
        for patterns in LISTS:
            query = scope_filter(Selection.of(patterns))
            passed = {entry["ts"]: entry for entry in oplog.find({"ts": span, **query})}
            needed = {bson.decode(event)["clusterTime"] for event in every if chosen(patterns, event)}
            assert needed <= passed.keys()
            writes = [entry for entry in passed.values() if entry["op"] in "iud" and "system.views" not in entry["ns"]]
            assert all(
                any(has_form(one.replace("?", "*"), entry["ns"].removesuffix("\n")) for one in patterns)
                for entry in writes
            )


def test_shards_give_the_union_of_their_streams_with_the_same_choice(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    first, second, *_ = sharded_cluster.shards
    start = router.fence()
    router.create_database("listed_a", first)
    router.shard_collection("listed_a.orders", {"_id": 1})
    router.split("listed_a.orders", {"_id": 5})
    router.move_chunk("listed_a.orders", {"_id": 5}, to=second)
    router.create_database("listed_b", second)
    router.insert_many("listed_a.orders", [{"_id": number} for number in range(10)])
    router.insert_many("listed_b.orders_2025", [{"_id": number} for number in range(3)])
    router.insert_one("listed_b.x+y(z)[1]|^", {"_id": 1})
    router.insert_one("listed_b.other", {"_id": 1})

    def body(transaction: Transaction) -> None:
        for name in ("listed_a.orders", "listed_b.other", "listed_b.orders_2025"):
            transaction.insert_one(name, {"_id": 100})

    router.run_transaction(body)
    router.drop_database("listed_a")
    router.drop_database("listed_b")
    end = router.fence()
    low, high = ClusterTime.from_timestamp(start), ClusterTime.from_timestamp(end)
    for expanded in (False, True):
        options: dict[str, Any] = {"allChangesForCluster": True, **({"showExpandedEvents": True} if expanded else {})}
        every = native.union(sharded_cluster, "admin", 1, start, end, **options)
        more = {"showExpandedEvents": "true"} if expanded else {}
        for patterns in (LISTS[0], LISTS[2], LISTS[3], ["listed_b.*r*"], ["*.orders*"]):
            expected = [event for event in every if low < native.token(event).cluster_time and chosen(patterns, event)]
            assert read(options_of(sharded_cluster.uri, patterns, low, high, **more)) == expected, patterns
            assert expected


def test_a_copy_has_the_listed_collections_and_those_that_come_later(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lake.spark.planning.snapshot.CHUNK_BYTES", 2_000)
    monkeypatch.setattr("tailrace.lake.spark.planning.snapshot.BATCH_BYTES", 6_000)
    names = ("listed_d", "listed_e")
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        d, e = (client[name] for name in names)
        wanted = [d.orders, d["c.1"], e["c.x"], e["größe"]]
        for collection in (*wanted, d.other, e.orders, e.c):
            collection.insert_many([{"_id": number, "text": "x" * 40} for number in range(60)])
        d.create_collection("c.view", viewOn="orders", pipeline=[])
        patterns = ["listed_d.orders", "listed_?.c.*", "listed_e.gr*"]
        options = {"uri": replica_set.uri, "startingFrom": "snapshot", "collections": ",".join(patterns)}
        query = CrashingQuery({**options, "fullDocument": "updateLookup"}, seed=7, chance=0.15)
        try:
            while len(query.checkpoint.planned) < 3:
                query.step()
            d["c.later"].insert_many([{"_id": number} for number in range(5)])
            d.other.insert_one({"_id": "later"})
            e.grown.insert_one({"_id": 1})
            d.orders.update_one({"_id": 7}, {"$set": {"text": "new"}})
            run_to(query, newest(replica_set.uri))
        finally:
            query.close()
        target = Target()
        for row in query.rows:
            target.apply(row["event"])
        assert target.snapshots == 60 * len(wanted)
        expected = {one.full_name: truth(one) for one in (*wanted, d["c.later"], e.grown)}
        assert {name: held for name, held in target.collections.items() if held} == expected
        for name in names:
            client.drop_database(name)


def test_a_cluster_copies_the_listed_collections(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    router.create_database("listed_d", next(iter(sharded_cluster.shards)))
    router.shard_collection("listed_d.orders", {"_id": 1})
    for name in ("orders", "c1", "other"):
        router.insert_many(f"listed_d.{name}", [{"_id": number} for number in range(20)])
    options = {"uri": sharded_cluster.uri, "startingFrom": "snapshot", "collections": "listed_d.orders, listed_d.c?"}
    query = CrashingQuery({**options, "fullDocument": "updateLookup"})
    try:
        query.step()
        router.insert_one("listed_d.c2", {"_id": 1})
        router.insert_one("listed_d.c10", {"_id": 1})
        run_to(query, ClusterTime.from_timestamp(router.fence()))
    finally:
        query.close()
        router.drop_database("listed_d")
    target = Target()
    for row in query.rows:
        target.apply(row["event"])
    assert {name: len(held) for name, held in target.collections.items() if held} == {
        "listed_d.orders": 20,
        "listed_d.c1": 20,
        "listed_d.c2": 1,
    }


def test_a_checkpoint_of_another_list_is_refused(replica_set: ReplicaSet) -> None:
    def offset(collections: str) -> tuple[Any, Offset]:
        deployment = open_deployment(parse({"uri": replica_set.uri, "collections": collections}))
        try:
            return deployment, deployment.start("now")
        finally:
            deployment.close()

    _, one = offset("a.b, c.*")
    same, _ = offset("c.*, a.b")  # in any order
    same.offset(one.to_json())
    other, _ = offset("a.b")
    with pytest.raises(UsageError, match="collections"):
        other.offset(one.to_json())
