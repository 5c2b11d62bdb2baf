"""A stream over a live cluster, compared with the streams of its shards and with what was written."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.watch.client.sharded_stream import ShardedChangeStream
from tests.sharded import native
from tests.sharded.waiting import PATIENCE_S, take, wait_for
from tests.sharded.workload import by_document, operation_of, spread, writers

pytestmark = pytest.mark.mongod


def until(stream: tailrace.ChangeStream, end: Callable[[list[bytes]], bool]) -> list[bytes]:
    """The events' bytes up to the first one after which ``end`` holds."""
    events: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while not end(events):
        assert time.monotonic() < deadline, f"{len(events)} events came, the last: {bson.decode(events[-1])}"
        event = stream.try_next()
        if event is not None:
            events.append(event.raw)
            deadline = time.monotonic() + PATIENCE_S
        assert stream.alive
    return events


@dataclass
class Run:
    """What happened on a cluster, and what a stream gave that was open throughout. ``mark`` ends it."""

    cluster: ShardedCluster
    namespace: str
    start: Timestamp
    end: Timestamp
    written: list[tuple[int, str, int]]
    live: list[bytes]


def is_mark(event: bytes) -> bool:
    return b"the mark" in event


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Writers and cross-shard transactions on two shards while chunks move to and fro; then a third shard is added, and
    a chunk moves to it."""
    with ShardedCluster(2) as cluster, tailrace.connect(cluster.uri) as client:
        namespace = spread(cluster, "live")
        start = cluster.router.fence()
        with client["live"]["orders"].watch(document_class=RawBSONDocument) as stream:
            with writers(cluster, namespace) as running:
                for region, to in (("a", "shard1"), ("n", "shard0"), ("a", "shard0")):
                    cluster.router.move_chunk(namespace, {"region": region}, to=to)
                added = cluster.add_shard()
                for region, to in (("n", added), ("a", added), ("n", "shard1")):
                    cluster.router.move_chunk(namespace, {"region": region}, to=to)
                wait_for(lambda: sum(len(writer.written) for writer in running) > 200, "the writers are stuck")
            cluster.router.insert_one(namespace, {"_id": "the mark", "region": "z"})
            live = until(stream, lambda events: bool(events) and is_mark(events[-1]))
            assert isinstance(stream, ShardedChangeStream)
            assert set(stream.statistics.shards) == {"shard0", "shard1", "shard2", "config.shards"}
        end = cluster.router.fence()
        written = [operation for writer in running for operation in writer.written]
        yield Run(cluster, namespace, start, end, written, live)


def test_the_stream_is_the_union_of_the_shards_own_streams(run: Run) -> None:
    assert run.live == native.union(run.cluster, "live", "orders", run.start, run.end)


def test_what_was_written_comes_once_and_each_document_in_order(run: Run) -> None:
    given = [operation_of(bson.decode(event)) for event in run.live[:-1]]
    assert len(given) == len(run.written) > 200
    assert by_document(given) == by_document(run.written)


@pytest.mark.parametrize("seed", range(4))
def test_a_resume_gives_exactly_the_rest(run: Run, seed: int) -> None:
    at = random.Random(seed).randrange(len(run.live) - 1)
    token = bson.decode(run.live[at])["_id"]
    with (
        tailrace.connect(run.cluster.uri) as client,
        client["live"]["orders"].watch(resume_after=token, document_class=RawBSONDocument) as stream,
    ):
        rest = until(stream, lambda events: bool(events) and is_mark(events[-1]))
    same = max(index for index, event in enumerate(run.live) if bson.decode(event)["_id"] == token)
    assert rest == run.live[same + 1 :]


def test_a_database_and_the_cluster_are_streams_too(run: Run) -> None:
    with tailrace.connect(run.cluster.uri) as client:
        for target, database, collection, options in (
            (client["live"], "live", 1, {}),
            (client, "admin", 1, {"allChangesForCluster": True}),
        ):
            with target.watch(start_at_operation_time=run.start, document_class=RawBSONDocument) as stream:
                events = until(stream, lambda events: bool(events) and is_mark(events[-1]))
            assert events == native.union(run.cluster, database, collection, run.start, run.end, **options)


def test_shards_given_as_a_list_are_read_without_their_config_server(run: Run) -> None:
    uris = [shard.uri for shard in run.cluster.shards.values()]
    with (
        tailrace.connect(uris) as client,
        client["live"]["orders"].watch(start_at_operation_time=run.start, document_class=RawBSONDocument) as stream,
    ):
        assert until(stream, lambda events: bool(events) and is_mark(events[-1])) == run.live
        assert isinstance(stream, ShardedChangeStream)
        assert set(stream.statistics.shards) == {"shard0", "shard1", "shard2"}


def test_an_update_here_a_move_and_an_update_there_come_in_order(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, "causal")
    router = sharded_cluster.router
    key = {"region": "b", "_id": 1}
    router.insert_one(namespace, {**key, "v": 0})
    rounds = 4
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client["causal"].watch([{"$match": {"operationType": "update"}}], document_class=RawBSONDocument) as stream,
    ):
        shards = []
        for v in range(1, 2 * rounds, 2):
            shards.append(router.update_one(namespace, key, {"$set": {"v": v}}).shard)
            router.move_chunk(namespace, {"region": "b"}, to="shard1" if shards[-1] == "shard0" else "shard0")
            shards.append(router.update_one(namespace, key, {"$set": {"v": v + 1}}).shard)
        events = until(stream, lambda events: len(events) == 2 * rounds)
    assert len(set(shards)) == 2
    given: list[Any] = [bson.decode(event)["updateDescription"]["updatedFields"]["v"] for event in events]
    assert given == list(range(1, 2 * rounds + 1))


def test_a_drop_ends_a_collection_s_stream_after_every_shard_s_invalidate(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, "dropped")
    start = sharded_cluster.router.fence()
    with (
        tailrace.connect(sharded_cluster.uri) as client,
        client["dropped"]["orders"].watch(document_class=RawBSONDocument) as stream,
    ):
        sharded_cluster.router.insert_one(namespace, {"_id": 1, "region": "a"})
        sharded_cluster.router.drop_collection(namespace)
        events: list[bytes] = []
        wait_for(lambda: _took_the_last(stream, events), "the stream does not end")
        assert stream.resume_token["_data"] == native.token(events[-1]).data
    end = sharded_cluster.router.fence()
    expected = native.union(sharded_cluster, "dropped", "orders", start, end)
    first = next(index for index, event in enumerate(expected) if b"invalidate" in event)
    same = [event for event in expected[first:] if native.token(event) == native.token(expected[first])]
    assert events == expected[:first] + same
    assert [bson.decode(event)["operationType"] for event in events[:2]] == ["insert", "drop"]


def _took_the_last(stream: tailrace.ChangeStream, events: list[bytes]) -> bool:
    event = stream.try_next()
    if event is not None:
        events.append(event.raw)
    return not stream.alive


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.4.2", "5.0.4"])
def test_older_clusters_are_read_the_same_way(
    version: str, start_sharded_cluster: Callable[..., ShardedCluster]
) -> None:
    cluster = start_sharded_cluster(2, version=version)
    namespace = spread(cluster, "older")
    start = cluster.router.fence()
    regions = ["a", "g", "n", "t"] * 5
    with (
        tailrace.connect(cluster.uri) as client,
        client["older"]["orders"].watch(document_class=RawBSONDocument) as stream,
        client["older"]["orders"].watch(full_document="updateLookup") as looking_up,
    ):
        for number, region in enumerate(regions):
            cluster.router.insert_one(namespace, {"_id": number, "region": region, "v": 0})
        cluster.router.move_chunk(namespace, {"region": "a"}, to="shard1")
        for number, region in enumerate(regions):
            cluster.router.update_one(namespace, {"_id": number, "region": region}, {"$set": {"v": 1}})
        events = until(stream, lambda events: len(events) == 2 * len(regions))
        shown = take(looking_up, 2 * len(regions))[len(regions) :]
    assert events == native.union(cluster, "older", "orders", start, cluster.router.fence())
    assert [event["fullDocument"] for event in shown] == [
        {"_id": number, "region": region, "v": 1} for number, region in enumerate(regions)
    ]
