"""What the driver's side asks the server before it plans: counts, what a scope could see, what ends a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import bson
import pymongo
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo.collection import Collection

import tailrace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.errors import SourceError
from tailrace.lake.spark.planning import planner
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.options import parse
from tailrace.read.source import outline
from tailrace.read.source.connection import Connection
from tailrace.read.source.outline import Bucket, OplogOutline, Weights, invalidating, scope_filter
from tests.differential import named_fields, native
from tests.differential.wire import Wire
from tests.golden import recording
from tests.golden.recording import RecordedStream
from tests.property.plain_columns import CODEC
from tests.server_in_use import IN_BETWEEN
from tests.spark.streams import newest

pytestmark = pytest.mark.mongod


@pytest.fixture
def scratch(replica_set: ReplicaSet) -> Iterator[Collection[Mapping[str, Any]]]:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        yield client["planning"]["oplog"]
        client.drop_database("planning")


def scope_of(stream: RecordedStream) -> Scope:
    if stream.command["aggregate"] != 1:
        return Scope.of_collection(stream.database, stream.command["aggregate"])
    return Scope.cluster() if stream.database == "admin" else Scope.of_database(stream.database)


@pytest.mark.parametrize("name", recording.names())
def test_no_entry_that_gave_an_event_is_left_out_of_its_scope(
    name: str, scratch: Collection[Mapping[str, Any]]
) -> None:
    recorded = recording.load(name)
    scratch.insert_many([RawBSONDocument(bytes(entry)) for entry in recorded.oplog])
    for stream in recorded.streams:
        query = scope_filter(scope_of(stream))
        passed = {entry["ts"] for entry in scratch.find(query, {"ts": 1})}
        needed = {
            bson.decode(event, CODEC)["clusterTime"] for event in stream.events if b"\x11clusterTime\x00" in event
        }
        assert needed <= passed, stream.name


@pytest.mark.parametrize("name", recording.names())
def test_the_entry_that_ended_a_recorded_stream_is_found(name: str, scratch: Collection[Mapping[str, Any]]) -> None:
    recorded = recording.load(name)
    scratch.insert_many([RawBSONDocument(bytes(entry)) for entry in recorded.oplog])
    for stream in recorded.streams:
        events = [bson.decode(event, CODEC) for event in stream.events]
        ends = [event["clusterTime"] for event in events if event.get("operationType") == "invalidate"]
        if not ends or "startAfter" in stream.command["pipeline"][0]["$changeStream"]:
            continue
        cause = invalidating(scope_of(stream))
        assert cause is not None
        first = events[0]["clusterTime"]
        found = scratch.find_one({"op": "c", **cause, "ts": {"$gte": first}}, sort=[("ts", 1)])
        assert found is not None, stream.name
        assert found["ts"] == ends[0], stream.name


def test_nothing_ends_a_stream_of_the_whole_cluster() -> None:
    assert invalidating(Scope.cluster()) is None


@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2"])
def test_buckets_count_every_entry_once_in_order(
    start_replica_set: Callable[..., ReplicaSet], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outline, "_PAGE", 2500)  # several pages
    monkeypatch.setattr(outline, "_SHORT", 2000)
    monkeypatch.setattr(outline, "MOST", 0.05)
    running = start_replica_set(1, version=version)
    with pymongo.MongoClient[dict[str, Any]](running.uri) as client:
        client.d.c.insert_one({"_id": "created"})
        start = newest(running.uri)
        for block in range(4):
            client.d.c.insert_many([{"_id": 1000 * block + i, "pad": "x" * (i % 50)} for i in range(1000)])
            client.d.elsewhere.insert_many([{"i": i} for i in range(500)])
            client.d.elsewhere.drop()
        with client.start_session() as session, session.start_transaction():
            client.d.c.insert_many([{"_id": -1 - i} for i in range(30)], session=session)
        until = newest(running.uri)
        after, last = start.to_timestamp(), until.to_timestamp()
        oplog = client.local["oplog.rs"].with_options(bson.CodecOptions(document_class=RawBSONDocument))
        own = list(oplog.find({"ts": {"$gt": after, "$lte": last}, "ns": {"$in": ["d.c", "d.$cmd", "admin.$cmd"]}}))
    connection = Connection(running.uri)
    numbers = tuple(map(int, version.split(".")))
    found = OplogOutline(connection, Scope.of_collection("d", "c"), numbers)
    buckets = list(found.buckets(start, until))
    assert sum(bucket.entries for bucket in buckets) == len(own)
    assert sum(bucket.bytes for bucket in buckets) == sum(len(entry.raw) for entry in own)
    assert sum(bucket.events for bucket in buckets) == len(own) + 29, "a transaction gives all its operations"
    assert len(buckets) > 3
    edges = [time for bucket in buckets for time in (bucket.first, bucket.last)]
    assert edges == sorted(edges)
    # What was counted is remembered, in whole and in part.
    middle = buckets[2].last
    refined = found.entries(buckets[-2])
    inside = refined[len(refined) // 2].last
    for low, high in ((start, until), (start, middle), (middle, until), (middle, inside), (inside, until)):
        fresh = OplogOutline(connection, Scope.of_collection("d", "c"), numbers)
        assert _sums(found.buckets(low, high)) == _sums(fresh.buckets(low, high)), (low, high)
    for bucket in buckets[:2]:
        entries = found.entries(bucket)
        assert len(entries) == bucket.entries
        assert sum(entry.bytes for entry in entries) == bucket.bytes
    assert found.any(start, until)
    assert not found.any(until, ClusterTime(until + 5))
    _check_weights(OplogOutline(connection, Scope.of_collection("d", "c"), numbers), start, until, monkeypatch)
    dropped = OplogOutline(connection, Scope.of_collection("d", "elsewhere"), numbers)
    drops = [entry["ts"] for entry in own if entry["op"] == "c" and "drop" in entry["o"]]
    for place, low in enumerate((start, *map(ClusterTime.from_timestamp, drops))):
        # A long range is scanned from two places at once.
        expected = [*map(ClusterTime.from_timestamp, drops), None][place]
        assert dropped.first_invalidating(low, until, show_migration_events=False) == expected
    fresh = OplogOutline(connection, Scope.of_collection("d", "c"), numbers)
    _check_even_buckets(fresh, connection.client["local"]["oplog.rs"], start, until)
    assert found.is_smaller_than(1 << 40)
    assert not found.is_smaller_than(sum(len(entry.raw) for entry in own))
    connection.close()


@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2"])
def test_users_fields_are_not_asked_what_a_commit_says(
    start_replica_set: Callable[..., ReplicaSet], version: str
) -> None:
    """A document whose fields have every name of an entry's or a command's field, with values of every type, counts as
    one event.

    No test had caught that a document's own ``count`` was read as a transaction's: all documents here had fields named
    like a shop's.
    """
    running = start_replica_set(1, version=version)
    start = newest(running.uri)
    with Wire.to(running.uri) as wire:
        written = named_fields.write(wire, "named", version)
    until = newest(running.uri)
    connection = Connection(running.uri)
    numbers = tuple(map(int, version.split(".")))
    for scope in (Scope.of_database("named"), Scope.cluster()):
        found = OplogOutline(connection, scope, numbers)
        buckets = list(found.buckets(start, until))
        commands = 3  # two collections made, and a table of the server's for transactions at most
        assert written <= sum(bucket.events for bucket in buckets) <= written + commands
        assert found.first_invalidating(start, until, show_migration_events=False) is None
        for bucket in buckets[:2]:
            assert sum(entry.events for entry in found.entries(bucket)) == bucket.events
    connection.close()


@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2"])
def test_what_is_sent_beside_apply_ops_ends_no_stream(
    start_replica_set: Callable[..., ReplicaSet], version: str
) -> None:
    """The server logs the command with the fields that its user sent, and its own streams then end with 40532 at each
    start (a documented difference). No test had sent any."""
    running = start_replica_set(1, version=version)
    with pymongo.MongoClient[dict[str, Any]](running.uri) as client:
        client.named.c.insert_one({"_id": "created"})
        start = newest(running.uri)
        for beside in ({"drop": "c"}, {"dropDatabase": 1}, {"renameCollection": "named.c", "to": "named.c"}):
            operations = [{"op": "i", "ns": "named.c", "o": {"_id": name}} for name in beside]
            client.named.command({"applyOps": operations, **beside})
        client.named.c.insert_one({"_id": "behind"})
    until = newest(running.uri)
    connection = Connection(running.uri)
    for scope in (Scope.of_collection("named", "c"), Scope.of_database("named")):
        found = OplogOutline(connection, scope, tuple(map(int, version.split("."))))
        assert found.first_invalidating(start, until, show_migration_events=False) is None
    connection.close()
    options = {"startAtOperationTime": start.tick().to_timestamp()}
    with Wire.to(running.uri) as wire:
        stream = native.read(wire, *native.aggregate(("named", None), options), until)
    assert stream.error is not None
    assert stream.error.code == 40532
    with (
        tailrace.connect(running.uri) as ours,
        ours["named"].watch(start_at_operation_time=options["startAtOperationTime"]) as own,
    ):
        assert next(own)["documentKey"] == {"_id": "behind"}


def _sums(buckets: Iterable[Bucket]) -> tuple[int, int, int]:
    held = list(buckets)
    return tuple(sum(bucket[field] for bucket in held) for field in (2, 3, 4))


def _check_weights(
    found: OplogOutline, start: ClusterTime, until: ClusterTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long range of which most matches consists of buckets of known size; everything else is counted."""
    buckets, matching = found.weigh(start, until)
    assert 0.05 < matching <= 1, "two thirds, as far as a random sample of some pages tells"
    assert buckets[-1].last == until
    times = [time for bucket in buckets for time in (bucket.first, bucket.last)]
    assert times == sorted(times)
    assert times[0] > start
    with monkeypatch.context() as patch:
        patch.setattr(planner, "SLICE_BYTES_MIN", 1)
        edges = [start, *planner.cuts(buckets, 4), until]
    sums = [_sums(found.buckets(low, high))[0] for low, high in pairwise(edges)]
    assert len(sums) == 4
    assert max(sums) < 1.5 * min(sums), sums
    assert found.weigh(until, ClusterTime(until + 5)) == ([], 0.0), "nothing there"
    short = found.weigh(buckets[-1].first, until)
    assert short.matching == 0, "counted"
    assert _sums(short.buckets) == _sums(found.buckets(buckets[-1].first, until))


def _check_even_buckets(found: OplogOutline, oplog: Collection[Any], start: ClusterTime, until: ClusterTime) -> None:
    """Every entry of the oplog is in one of them, whatever part of the range is asked for, and in which order."""

    def entries(low: ClusterTime, high: ClusterTime) -> int:
        return oplog.count_documents({"ts": {"$gt": low.to_timestamp(), "$lte": high.to_timestamp()}})

    first = list(found.even_buckets(start, until))
    assert len(first) > 30
    inside = ClusterTime(first[3].last - 1)
    later = ClusterTime(until + 5)
    for low, high in ((start, until), (start, first[2].last), (start, inside), (inside, until), (start, later)):
        buckets = list(found.even_buckets(low, high))
        assert [bucket.first for bucket in buckets] == [low.tick(), *(bucket.last.tick() for bucket in buckets[:-1])]
        assert buckets[-1].last == high
        for bucket in buckets:
            counted = entries(ClusterTime(bucket.first - 1), bucket.last)
            assert bucket.entries == max(1, counted)
            assert bucket.bytes >= bucket.entries


def test_slices_are_planned_while_spark_writes_down_the_offset(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They used to be planned only when Spark asked, which took a tenth of a query's time. They are the same as those
    planned at any other moment. If planning fails, the next request plans again, and gets the error."""
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.slices_ahead.c.insert_one({"_id": "created"})
        start = newest(replica_set.uri)
        client.slices_ahead.c.insert_many([{"_id": i} for i in range(600)])
    options = parse(
        {"uri": replica_set.uri, "database": "slices_ahead", "collection": "c", "partitions": "2"}
        | {"startAtOperationTime": f"{start.seconds},{start.increment}"}
    )
    weigh, weighed = OplogOutline.weigh, []

    def watched(self: OplogOutline, after: ClusterTime, until: ClusterTime) -> Weights:
        weighed.append(threading.current_thread().name)
        if len(weighed) == 2:
            raise SourceError("no server")
        return weigh(self, after, until)

    monkeypatch.setattr(OplogOutline, "weigh", watched)
    planning, late = open_deployment(options), open_deployment(options)
    try:
        begin = planning.start("now")
        end = planning.end(begin, newest(replica_set.uri), None)
        made = planning.slices(begin, end)
        assert weighed == ["tailrace-slices"]
        assert [made[0].after, made[-1].until] == [begin.cluster_time, end.cluster_time]
        assert planning.end(begin, end.cluster_time, None) == end
        assert list(map(vars, planning.slices(begin, end))) == list(map(vars, made))
        assert weighed[1:] == ["tailrace-slices", threading.current_thread().name]
        # After a restart Spark asks for slices alone.
        assert list(map(vars, late.slices(begin, end))) == list(map(vars, made))
    finally:
        planning.close()
        late.close()


@pytest.mark.parametrize(
    ("size", "count"), [(500, 9_000), (200_000, 30)], ids=["small documents", "large ones at once"]
)
def test_a_full_micro_batch_is_cut_into_the_slices_that_were_asked_for(
    replica_set: ReplicaSet, size: int, count: int
) -> None:
    """It had one slice, so a single task did all the work: slices had at least 2 MB, and were cut between buckets of a
    thousand entries. No test had both bounded the bytes of a micro-batch and asked for slices."""
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.slices_asked.c.drop()
        start = newest(replica_set.uri)
        client.slices_asked.c.insert_many([{"pad": b"x" * size} for _ in range(count)])
    options = {"uri": replica_set.uri, "database": "slices_asked", "maxBytesPerTrigger": "4m", "partitions": "4"}
    options["startAtOperationTime"] = f"{start.seconds},{start.increment}"
    planning = open_deployment(parse(options))
    try:
        begin = planning.start("now")
        end = planning.end(begin, newest(replica_set.uri), planner.Limits(None, 4 << 20))
        made = planning.slices(begin, end)
        assert len(made) == 4
        weights = [sum(one.bytes for one in planning.outline.buckets(part.after, part.until)) for part in made]
        assert max(weights) < 2 * min(weights)
        assert sum(weights) > 3 << 20
    finally:
        planning.close()
