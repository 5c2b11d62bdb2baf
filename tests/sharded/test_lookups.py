"""Images on a cluster: current documents from the shards that own them, pre-images from the shards of the events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pymongo
import pytest

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.errors import RESUMABLE_LABEL, ServerError, SourceError
from tests.amounts import amount
from tests.bounded_lookups import bounded_lookups
from tests.server_in_use import SERVER_VERSION
from tests.sharded.waiting import take, wait_for
from tests.sharded.workload import by_document, operation_of, spread, writers

pytestmark = pytest.mark.mongod
UPDATES = [{"$match": {"operationType": "update"}}]


def put_on(cluster: ShardedCluster, shard: str, namespace: str, document: dict[str, Any]) -> None:
    """A document that the shard does not own, as a chunk that has moved away leaves it."""
    database, _, collection = namespace.partition(".")
    with pymongo.MongoClient(cluster.shards[shard].uri) as client:
        client[database][collection].insert_one(document)


def test_an_update_shows_the_document_of_its_owner_and_no_orphan(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, "owners")
    router = sharded_cluster.router
    for number in range(3):
        router.insert_one(namespace, {"_id": number, "region": "a", "v": 0})
    start = router.fence()
    for number in range(3):
        router.update_one(namespace, {"region": "a", "_id": number}, {"$set": {"v": 1}})
    router.move_chunk(namespace, {"region": "a"}, to="shard1")
    router.update_one(namespace, {"region": "a", "_id": 0}, {"$set": {"v": 2}})
    router.delete_one(namespace, {"region": "a", "_id": 1})
    for number in range(3):
        put_on(sharded_cluster, "shard0", namespace, {"_id": number, "region": "a", "v": "an orphan"})
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client["owners"]["orders"].watch(
            UPDATES, full_document="updateLookup", start_at_operation_time=start
        ) as stream,
    ):
        events = take(stream, 4)
    shown = [(event["documentKey"]["_id"], event["fullDocument"]) for event in events]
    first = {"_id": 0, "region": "a", "v": 2}
    assert shown == [(0, first), (1, None), (2, {"_id": 2, "region": "a", "v": 1}), (0, first)]


def test_owners_are_found_by_hashes_and_for_what_is_not_sharded(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    router.create_database("hashes", "shard1")
    router.shard_collection("hashes.items", {"sku": "hashed"}, initial_chunks=6)
    skus: list[Any] = ["a", 1, 2.5, True, None]
    start = router.fence()
    for number, sku in enumerate(skus):
        router.insert_one("hashes.items", {"_id": number, "sku": sku, "v": 0})
        router.update_one("hashes.items", {"sku": sku, "_id": number}, {"$set": {"v": 1}})
    router.insert_one("hashes.plain", {"_id": 1, "v": 0})
    router.update_one("hashes.plain", {"_id": 1}, {"$set": {"v": 1}})
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client["hashes"].watch(UPDATES, full_document="updateLookup", start_at_operation_time=start) as stream,
    ):
        events = take(stream, len(skus) + 1)
    shown = [event["fullDocument"] for event in events]
    assert shown == [*({"_id": n, "sku": sku, "v": 1} for n, sku in enumerate(skus)), {"_id": 1, "v": 1}]
    assert len(router.table("hashes.items").owners) > 1


def test_events_older_than_the_shard_key_find_their_documents(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, "refined")
    router = sharded_cluster.router
    for number, region in enumerate("az"):
        router.insert_one(namespace, {"_id": number, "region": region, "w": 7, "v": 0})
    start = router.fence()
    for number, region in enumerate("az"):
        router.update_one(namespace, {"region": region, "_id": number}, {"$set": {"v": 1}})
    router.create_index(namespace, {"region": 1, "_id": 1, "w": 1}, "longer")
    router.refine_shard_key(namespace, {"region": 1, "_id": 1, "w": 1})
    put_on(sharded_cluster, "shard0", namespace, {"_id": 1, "region": "z", "w": 7, "v": "an orphan"})
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client["refined"]["orders"].watch(
            UPDATES, full_document="updateLookup", start_at_operation_time=start
        ) as stream,
    ):
        events = take(stream, 2)
    assert [event["fullDocument"] for event in events] == [
        {"_id": number, "region": region, "w": 7, "v": 1} for number, region in enumerate("az")
    ]


@pytest.mark.parametrize(
    "version", [SERVER_VERSION, *(pytest.param(v, marks=pytest.mark.slow) for v in ("5.0.4", "4.4.2"))]
)
def test_documents_are_looked_up_on_shards_that_were_added_meanwhile(
    version: str, start_sharded_cluster: Callable[..., ShardedCluster]
) -> None:
    """A chunk is on a new shard before the stream has read that the shard was added. No test had looked up documents
    while one was added: the list of shards from when the stream was opened did not have it, and the stream ended."""
    cluster = start_sharded_cluster(2, version=version)
    namespace = spread(cluster, "growing")
    move = cluster.router.move_chunk
    with (
        tailrace.connect(cluster.uri) as client,
        client["growing"]["orders"].watch(full_document="updateLookup") as stream,
    ):
        with writers(cluster, namespace) as running:
            wait_for(lambda: sum(len(writer.written) for writer in running) > 30, "the writers are stuck")
            for region in ("a", "n")[: amount(1, 2)]:
                added = cluster.add_shard()
                move(namespace, {"region": region}, to=added)
                # By now its name may stand for another replica set.
                cluster.remove_shard(added)
                assert cluster.add_shard(added) == added
                move(namespace, {"region": region}, to=added)
            written = sum(len(writer.written) for writer in running)
            wait_for(lambda: sum(len(writer.written) for writer in running) > written + 30, "the writers are stuck")
        expected = [operation for writer in running for operation in writer.written]
        events = take(stream, len(expected))
    assert by_document([operation_of(event) for event in events]) == by_document(expected)
    for event in events:
        if event["operationType"] == "update" and event["fullDocument"] is not None:
            assert event["fullDocument"]["v"] >= event["updateDescription"]["updatedFields"]["v"]
    gone = {number for number, operation, _ in expected if operation == "delete"}
    shown = [event for event in events if event["operationType"] == "update"]
    assert all(event["fullDocument"] is not None or event["documentKey"]["_id"] in gone for event in shown)


def test_what_cannot_be_looked_up_for_now_is_an_error_that_a_resume_heals(sharded_cluster: ShardedCluster) -> None:
    """As if a chunk were on a shard that is just being removed, for longer than anybody waits."""
    namespace = spread(sharded_cluster, "nowhere")
    router, key = sharded_cluster.router, {"region": "a", "_id": 1}
    router.insert_one(namespace, {**key, "v": 0})
    start = router.fence()
    router.update_one(namespace, key, {"$set": {"v": 1}})
    looking_up: dict[str, Any] = {"full_document": "updateLookup", "start_at_operation_time": start}
    with tailrace.connect(sharded_cluster.uri) as client, pymongo.MongoClient(sharded_cluster.config.uri) as config:
        chunks = config.config.chunks
        uuid = config.config.collections.find_one({"_id": namespace})["uuid"]
        owned = [chunk["_id"] for chunk in chunks.find({"uuid": uuid, "shard": "shard0"})]
        chunks.update_many({"_id": {"$in": owned}}, {"$set": {"shard": "nowhere"}})
        try:
            with (
                client["nowhere"]["orders"].watch(UPDATES, **looking_up) as stream,
                pytest.raises(SourceError) as caught,
            ):
                take(stream, 1)
        finally:
            chunks.update_many({"_id": {"$in": owned}}, {"$set": {"shard": "shard0"}})
        assert RESUMABLE_LABEL in caught.value.labels
        with client["nowhere"]["orders"].watch(UPDATES, **looking_up) as stream:
            assert take(stream, 1)[0]["fullDocument"] == {**key, "v": 1}


def test_pre_images_come_from_the_shard_that_had_the_event(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, "images")
    router = sharded_cluster.router
    router.coll_mod(namespace, changeStreamPreAndPostImages={"enabled": True})
    key = {"region": "a", "_id": 1}
    router.insert_one(namespace, {**key, "v": 0})
    start = router.fence()
    router.update_one(namespace, key, {"$set": {"v": 1}})
    router.move_chunk(namespace, {"region": "a"}, to="shard1")
    router.update_one(namespace, key, {"$set": {"v": 2}})
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client["images"]["orders"].watch(
            UPDATES,
            full_document="required",
            full_document_before_change="required",
            start_at_operation_time=start,
        ) as stream,
    ):
        events = take(stream, 2)
    shown = [(event["fullDocumentBeforeChange"]["v"], event["fullDocument"]["v"]) for event in events]
    assert shown == [(0, 1), (1, 2)]


def test_a_view_is_refused_as_its_primary_shard_says(sharded_cluster: ShardedCluster) -> None:
    sharded_cluster.router.create_database("views", "shard1")
    sharded_cluster.router.insert_one("views.base", {"_id": 1})
    with pymongo.MongoClient(sharded_cluster.shards["shard1"].uri) as shard:
        shard["views"].create_collection("seen", viewOn="base", pipeline=[])
    with tailrace.connect(sharded_cluster.uri) as client, pytest.raises(ServerError) as caught:
        client["views"]["seen"].watch()
    assert caught.value.code == 166


@pytest.mark.parametrize("key", ["region", "_id"])
def test_documents_that_have_grown(sharded_cluster: ShardedCluster, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Like ``test_older_servers_live`` for one oplog, with a shard key beside ``_id`` and with ``_id`` alone."""
    refused = bounded_lookups(monkeypatch, 10_000)
    database, count, router = f"grown{key}", 90, sharded_cluster.router
    router.create_database(database, "shard1")
    router.shard_collection(f"{database}.c", {key: "hashed"}, initial_chunks=6)
    for number in range(count):
        router.insert_one(f"{database}.c", {"_id": number, "region": number % 7})
    start = router.fence()
    for number in range(count):
        filter_ = {"_id": number, "region": number % 7}
        router.update_one(f"{database}.c", filter_, {"$set": {"text": "x" * 1_000}})
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client[database].watch(UPDATES, full_document="updateLookup", start_at_operation_time=start) as stream,
    ):
        events = take(stream, count)
    assert [event["fullDocument"] for event in events] == [
        {"_id": number, "region": number % 7, "text": "x" * 1_000} for number in range(count)
    ]
    assert refused
