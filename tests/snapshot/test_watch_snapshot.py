"""``watch(start="snapshot")``: the existing documents, then every change since; a stream can go on from the resume
token of any moment."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import bson
import pymongo
import pytest
from bson.binary import Binary
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo.collation import Collation
from pymongo.errors import OperationFailure

import tailrace
from tailrace.act.consumer.snapshots import Copying, take_snapshot
from tailrace.core.event.resume_token import ResumeToken
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import ChangeStreamFatal, ChangeStreamHistoryLost, UsageError
from tailrace.read.snapshot import reader
from tailrace.read.snapshot.stages import compiled_for
from tailrace.watch.client import snapshot_stream
from tailrace.watch.client.client import operation_time
from tests.amounts import amount
from tests.server_in_use import IN_BETWEEN
from tests.snapshot.copies import Target, id_of, truth
from tests.snapshot.test_snapshot import fill, ids_of_every_type, write
from tests.snapshot.test_snapshot_sharded import REGIONS, held, move, spread_over
from tests.snapshot.test_snapshot_sharded import truth as routed_truth
from tests.snapshot.test_snapshot_sharded import write as routed_write

pytestmark = pytest.mark.mongod

DATABASE = "snapshots"


@pytest.fixture(scope="module")
def client(replica_set: ReplicaSet) -> Iterator[Any]:
    with tailrace.connect(replica_set.uri) as connected:
        yield connected
        connected.drop_database(DATABASE)


@pytest.fixture
def db(client: Any) -> Any:
    client.drop_database(DATABASE)
    return client[DATABASE]


@pytest.fixture(params=[1, 1000])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size: int = request.param
    monkeypatch.setattr(reader, "_FIRST_CHUNK", size)
    monkeypatch.setattr(snapshot_stream, "CHUNK_DOCUMENTS", size)
    return size


def kept(token: Any) -> Any:
    """A token after it was written down somewhere."""
    return bson.decode(bson.encode(token))


def watch(watched: Any, **options: Any) -> Any:
    return watched.watch(document_class=RawBSONDocument, max_await_time_ms=50, full_document="updateLookup", **options)


def copied(watched: Any, token: Any = None, most: int | None = None) -> tuple[list[bytes], Any]:
    """The events of the copy, ``most`` of them at most, and the token after them."""
    said: dict[str, Any] = {"start": "snapshot"} if token is None else {"resume_after": token}
    events: list[bytes] = []
    with watch(watched, **said) as stream:
        while "snapshot" in stream.resume_token and len(events) != most:
            event = stream.try_next()
            if event is not None:
                events.append(bytes(event.raw))
        return events, kept(stream.resume_token)


@pytest.mark.parametrize("kind", ["plain", "collation"])
def test_a_copy_goes_on_after_any_of_its_events(db: Any, kind: str, chunk_size: int) -> None:
    """With ids of every type, and in an order of the index that is not that of the bytes."""
    collation = Collation("en", strength=2) if kind == "collation" else None
    collection = db.create_collection("a", collation=collation)
    words = [{"_id": word} for word in ("a", "B", "c", "D", "ä", "zz", {"x": "B"}, {"x": "a"})]
    collection.insert_many(ids_of_every_type() if collation is None else words)
    whole, token = copied(collection)
    assert len(whole) == len(truth(collection))
    assert "snapshot" not in token
    found: list[bytes] = []
    token = None
    while token is None or "snapshot" in token:
        events, token = copied(collection, token, most=2 if chunk_size == 1 else 1)
        found += events
    keys = [id_of(bytes(RawBSONDocument(event)["documentKey"].raw)) for event in found]
    assert keys == [id_of(bytes(RawBSONDocument(event)["documentKey"].raw)) for event in whole]
    if chunk_size == 1000:
        assert [RawBSONDocument(event)["fullDocument"] for event in found] == list(
            collection.with_options(bson.codec_options.CodecOptions(document_class=RawBSONDocument)).find(
                hint=[("_id", 1)]
            )
        )


def drained(watched: Callable[[], Any], target: Target, until: Callable[[], Any], seed: int, crashes: int) -> int:
    """Apply all events up to ``until()``, in streams that are left at random points; how many were left."""
    chosen = random.Random(seed)
    token: Any = None
    seen: set[tuple[str, bytes]] = set()
    end = None
    for number in itertools.count():
        said: dict[str, Any] = {"start": "snapshot"} if token is None else {"resume_after": token}
        left = chosen.randrange(1, 150) if number < crashes else None
        with watch(watched(), **said) as stream:
            while left is None or left > 0:
                event = stream.try_next()
                if event is not None:
                    raw = bytes(event.raw)
                    target.apply(raw)
                    left = None if left is None else left - 1
                    if event["operationType"] == "snapshot":
                        time.sleep(0.001)  # writers write, and chunks move meanwhile
                        key = (event["ns"]["coll"], id_of(bytes(event["documentKey"].raw)))
                        assert key not in seen, "copied twice"
                        seen.add(key)
                token = kept(stream.resume_token)
                if "snapshot" not in token:
                    end = end or until()
                    if event is None and ResumeToken.parse(bson.encode(token)).cluster_time >= end:
                        return number
    raise AssertionError


class Writers:
    """Threads that write until ``stopped``, which gives a time after all their writes."""

    def __init__(self, works: list[Callable[[threading.Event], Any]], now: Callable[[], Any]) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work, args=(self._stop,)) for work in works]
        self._now = now

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def stopped(self) -> Any:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self._now()

    def __exit__(self, *_: object) -> None:
        self.stopped()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_stream, "CHUNK_DOCUMENTS", 40)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_there_and_every_change_are_the_collections(replica_set: ReplicaSet, db: Any, seed: int) -> None:
    """Four writers; the stream is left at twenty random points, and another client goes on."""
    names = ["a", "b"]
    fill(db, names)
    target, opened = Target(), []

    def another() -> Any:
        opened.append(tailrace.connect(replica_set.uri))
        return opened[-1][DATABASE]

    works = [lambda stop, seed=seed: write(db, seed, stop, names) for seed in range(4)]  # type: ignore[misc]
    with Writers(works, lambda: operation_time(db.client)) as writers:
        drained(another, target, writers.stopped, seed, amount(4, 20))
    for one in opened:
        one.close()
    for name in names:
        assert target.collections[f"{DATABASE}.{name}"] == truth(db[name])
    assert target.snapshots > 1000


@pytest.fixture
def namespace(sharded_cluster: ShardedCluster) -> Iterator[str]:
    yield spread_over(sharded_cluster, DATABASE, {"region": 1, "_id": 1})
    sharded_cluster.router.drop_database(DATABASE)


@pytest.mark.slow  # the copy: test_snapshot_sharded.py; the stream: the next test
@pytest.mark.usefixtures("small_chunks")
def test_the_same_on_a_cluster_while_chunks_move(sharded_cluster: ShardedCluster, namespace: str) -> None:
    for number in range(400):
        sharded_cluster.router.insert_one(namespace, {"_id": number, "region": REGIONS[number % 6]})
    moved: list[str] = []
    target = Target()
    works: list[Callable[[threading.Event], Any]] = [
        lambda stop: move(sharded_cluster, namespace, stop, moved),
        *(lambda stop, seed=seed: routed_write(sharded_cluster, namespace, seed, stop) for seed in range(4)),  # type: ignore[misc]
    ]
    with tailrace.connect(sharded_cluster.uri) as client:
        collection = client[DATABASE]["orders"]
        with Writers(works, lambda: operation_time(client)) as writers:
            drained(lambda: collection, target, writers.stopped, 3, 20)
    assert held(target, namespace) == routed_truth(sharded_cluster, namespace)
    assert target.snapshots > 100


def test_a_copy_of_a_cluster_goes_on_after_any_of_its_events(sharded_cluster: ShardedCluster, namespace: str) -> None:
    for number in range(30):
        sharded_cluster.router.insert_one(namespace, {"_id": number, "region": REGIONS[number % 6]})
    with tailrace.connect(sharded_cluster.uri) as client:
        found: list[bytes] = []
        token: Any = None
        while token is None or "snapshot" in token:
            events, token = copied(client[DATABASE]["orders"], token, most=4)
            found += events
    keys = [RawBSONDocument(event)["documentKey"]["_id"] for event in found]
    assert sorted(keys) == list(range(30))


#: Writes each event and the token after it in one piece; its parent kills it at some moment.
_FOLLOW = """
import sys, bson, tailrace
from bson.raw_bson import RawBSONDocument
uri, token = sys.argv[1], bytes.fromhex(sys.argv[2])
said = {"resume_after": bson.decode(token)} if token else {"start": "snapshot"}
with tailrace.connect(uri) as client, client["snapshots"].watch(
    document_class=RawBSONDocument, max_await_time_ms=20, full_document="updateLookup", **said) as stream:
    while True:
        event = stream.try_next()
        line = [b"" if event is None else bytes(event.raw), bytes(stream.resume_token.raw)]
        sys.stdout.write(" ".join(part.hex() for part in line) + "\\n")
        sys.stdout.flush()
"""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_goes_on_and_gives_nothing_twice(replica_set: ReplicaSet, db: Any, kills: int) -> None:
    """SIGKILL at random points of the copy and of the stream after it."""
    fill(db, ["a"])
    chosen = random.Random(kills)
    target = Target()
    token = b""
    seen: set[bytes] = set()
    end = None
    works = [lambda stop, seed=seed: write(db, seed, stop, ["a"]) for seed in range(4)]  # type: ignore[misc]
    with Writers(works, lambda: operation_time(db.client)) as writers:
        for number in itertools.count():
            command = [sys.executable, "-c", _FOLLOW, replica_set.uri, token.hex()]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                left = chosen.randrange(20, 120) if number < kills else None
                for line in process.stdout:
                    if not line.endswith("\n"):
                        break  # cut off by the kill
                    raw, token = (bytes.fromhex(part) for part in line.rstrip("\n").split(" "))
                    if raw:
                        event = RawBSONDocument(raw)
                        if event["operationType"] == "snapshot":
                            key = id_of(bytes(event["documentKey"].raw))
                            assert key not in seen
                            seen.add(key)
                        target.apply(raw)
                    left = None if left is None else left - 1
                    if left is not None and left <= 0:
                        break
                    if left is None and "snapshot" not in bson.decode(token):
                        end = end or writers.stopped()
                        if not raw and ResumeToken.parse(token).cluster_time >= end:
                            break
                os.kill(process.pid, signal.SIGKILL)
            if end is not None:
                break
    assert number == kills
    assert target.collections[f"{DATABASE}.a"] == truth(db.a)


def test_the_pipeline_is_for_the_copy_too(db: Any) -> None:
    db.a.insert_many([{"_id": number, "even": number % 2 == 0} for number in range(10)])
    pipeline = [{"$match": {"fullDocument.even": True}}, {"$set": {"mine": 1}}]
    with db.a.watch(pipeline, start="snapshot", max_await_time_ms=50) as stream:
        found = [next(stream) for _ in range(5)]
        assert stream.statistics.snapshot is None or stream.statistics.snapshot.documents == 10
        db.a.insert_many([{"_id": 10, "even": True}, {"_id": 11, "even": False}, {"_id": 12, "even": True}])
        found += [next(stream), next(stream)]
    assert [event["documentKey"]["_id"] for event in found] == [0, 2, 4, 6, 8, 10, 12]
    assert [event["operationType"] for event in found] == ["snapshot"] * 5 + ["insert"] * 2
    assert all(event["mine"] == 1 for event in found)
    with pytest.raises(ChangeStreamFatal) as caught, db.a.watch([{"$unset": "_id"}], start="snapshot") as stream:
        next(stream)
    assert caught.value.code == 280


def test_the_stages_of_a_copy_are_in_the_language_of_its_stream(replica_set: ReplicaSet, db: Any) -> None:
    """They were in the language of 6.0, whatever the version: `$bitAnd` was refused beside a stream of 7.0 that knows
    it, and what 4.4 reads differently was read as on 6.0. Each test of a copy's stages had used one version."""
    db.c.insert_many([{"_id": number} for number in range(8)])
    second_bit = {"$eq": [{"$bitAnd": ["$fullDocument._id", 2]}, 2]}
    pipeline = [{"$match": {"$expr": second_bit}}]
    with (
        tailrace.connect(replica_set.uri, server_version="6.0") as client,
        pytest.raises(OperationFailure, match="bitAnd"),
    ):
        client[db.name].c.watch(pipeline, start="snapshot")
    with tailrace.connect(replica_set.uri, server_version="7.0") as client:
        collection = client[db.name].c
        with collection.watch(pipeline, start="snapshot") as stream:
            assert [stream.next()["documentKey"]["_id"] for _ in range(4)] == [2, 3, 6, 7]
            collection.insert_many([{"_id": number} for number in range(8, 12)])
            assert [stream.next()["documentKey"]["_id"] for _ in range(2)] == [10, 11]
        copied = Copying(collection, take_snapshot(collection, None), {"pipeline": pipeline})
        pulled = itertools.takewhile(lambda one: one.event is not None, iter(copied.pull, None))
        assert [one.event["documentKey"]["_id"] for one in pulled] == [2, 3, 6, 7, 10, 11]


SORTED = {"$sortArray": {"input": [2, 1], "sortBy": 1}}
AND = {"$bitAnd": [3, 6]}


@pytest.mark.parametrize(
    ("version", "known", "unknown"),
    [
        ("4.4.2", [], [SORTED, AND]),
        ("6.0.27", [SORTED], [AND]),
        pytest.param("7.0.28", [SORTED, AND], [], marks=pytest.mark.slow),
    ],
)
def test_stages_are_in_the_language_of_the_server_that_is_read(
    start_replica_set: Callable[..., ReplicaSet], version: str, known: list[Any], unknown: list[Any]
) -> None:
    with pymongo.MongoClient[Any](start_replica_set(version=version).uri) as server:
        for expression in known:
            made = compiled_for(server, [bson.encode({"$set": {"made": expression}})]).apply(bson.encode({}))
            assert made is not None
            assert "made" in bson.decode(made)
        for expression in unknown:
            with pytest.raises(UsageError, match=next(iter(expression))[1:]):
                compiled_for(server, [bson.encode({"$set": {"made": expression}})])


def test_the_time_of_the_copy_is_limited_and_progress_is_told(db: Any) -> None:
    db.a.insert_many([{"_id": number} for number in range(40)])
    with db.a.watch(start="snapshot", snapshot_documents_per_second=10_000) as stream:
        next(stream)
        assert stream.statistics.snapshot is not None
        assert stream.statistics.snapshot.estimate == 40
        assert stream.has_next
        assert stream.explain()["oplogQuery"] is not None


@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_either_engine_follows_a_copy(replica_set: ReplicaSet, db: Any, engine: Any) -> None:
    db.a.insert_one({"_id": 1})
    with tailrace.connect(replica_set.uri, engine=engine) as client, client[DATABASE].watch(start="snapshot") as stream:
        assert next(stream)["operationType"] == "snapshot"
        db.a.insert_one({"_id": 2})
        assert next(stream)["operationType"] == "insert"
        token = stream.resume_token
        db.a.insert_one({"_id": 3})
    with client, db.watch(resume_after=token) as stream:
        assert next(stream)["documentKey"] == {"_id": 3}


def test_an_asynchronous_client_copies_too(replica_set: ReplicaSet, db: Any) -> None:
    db.a.insert_many([{"_id": number} for number in range(5)])

    async def follow() -> list[str]:
        async with tailrace.AsyncClient(replica_set.uri) as client:
            async with await client[DATABASE]["a"].watch(start="snapshot") as stream:
                kinds = [(await stream.next())["operationType"] for _ in range(3)]
                token = stream.resume_token
            async with await client[DATABASE]["a"].watch(resume_after=token) as stream:
                kinds += [(await stream.next())["operationType"] for _ in range(2)]
                await client[DATABASE]["a"].insert_one({"_id": 6})
                return [*kinds, (await stream.next())["operationType"]]

    assert asyncio.run(follow()) == ["snapshot"] * 5 + ["insert"]


def test_a_server_refuses_a_token_from_the_middle_of_a_copy(replica_set: ReplicaSet, db: Any) -> None:
    """It would pass over a field that it does not know, and with it over the rest of the copy."""
    db.a.insert_many([{"_id": number} for number in range(5)])
    _, token = copied(db.a, most=2)
    assert list(token) == ["snapshot"]
    with pymongo.MongoClient(replica_set.uri) as native, pytest.raises(OperationFailure):
        native[DATABASE]["a"].watch(resume_after=token)


def test_what_cannot_be_asked_is_refused(client: Any, db: Any) -> None:
    db.a.insert_many([{"_id": number} for number in range(5)])
    _, token = copied(db.a, most=2)
    for options, said in (
        ({"start": "now"}, "no start 'now'"),
        ({"start": "snapshot", "resume_after": token}, "do not go together"),
        ({"start": "snapshot", "full_document": "exact"}, "exact images"),
        ({"start": "snapshot", "snapshot_documents_per_second": 0}, "larger than 0"),
        ({"start": "snapshot", "snapshot_documents_per_second": float("inf")}, "larger than 0"),
        ({"start": "snapshot", "options": {"startAtOperationTime": Timestamp(1, 1)}}, "do not go together"),
        ({"resume_after": token, "start_at_operation_time": Timestamp(1, 1)}, "do not go together"),
        ({"resume_after": token, "start_after": token}, "do not go together"),
        ({"resume_after": token, "options": {"startAtOperationTime": None}}, "do not go together"),
        ({"resume_after": {**token, "_data": "82"}}, "alongside others"),
        ({"resume_after": {"snapshot": {}}}, "cannot be read"),
        ({"resume_after": {"snapshot": {"chunk": 1}}}, "cannot be read"),
        ({"resume_after": {"snapshot": 5}}, "cannot be read"),
        ({"start": "snapshot", "pipeline": [{"$bad": 1}]}, "Unrecognized pipeline stage"),
    ):
        with pytest.raises(UsageError, match=said):
            db.a.watch(**options)
    with pytest.raises(UsageError, match="not of"):
        db.b.watch(resume_after=token)


@pytest.mark.parametrize(
    "damage",
    [
        {"estimate": float("inf")},
        {"uuid": 16},
        {"uuid": Binary(bytes(16), 3)},
        {"uuid": Binary(bytes(15), 4)},
        {"ranges": []},
        {"ranges": [{"at": {"bson": 5}, "to": {"bson": 5}, "done": False}]},
        {"ranges": [{"at": {"bson": b""}, "to": {"bson": b""}, "done": False}]},
        {"ranges": [{"at": {"bson": bson.encode({"x": 1})}, "to": {"bson": bson.encode({"_id": 1})}, "done": False}]},
        {"outcome": "lost"},
    ],
)
def test_a_damaged_token_is_refused(db: Any, damage: dict[str, Any]) -> None:
    """Some were read: 16 as sixteen zeros, a UUID in another driver's order of bytes as another collection, whose
    documents then were none, and a collection without ranges, of which nothing is ever complete. Only tokens without
    their large parts had been tried."""
    db.a.insert_one({"_id": 1})
    with db.a.watch(start="snapshot") as stream:
        token = stream.resume_token
    token["snapshot"]["collections"][0].update(damage)
    with pytest.raises(UsageError, match="cannot be read"):
        db.a.watch(resume_after=token)


def test_a_copy_of_which_nothing_is_shown_gives_the_turn_back(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that case one call copied the whole collection, without checking the oplog's old end; the pipelines of the
    other tests let something of each chunk through."""
    db.a.insert_many([{"_id": number} for number in range(6)])
    monkeypatch.setattr(snapshot_stream, "CHUNK_DOCUMENTS", 2)
    pipeline = [{"$match": {"operationType": "insert"}}]
    with db.a.watch(pipeline, start="snapshot", max_await_time_ms=0) as stream:
        tokens = [stream.resume_token]
        while "snapshot" in stream.resume_token:
            assert stream.try_next() is None
            tokens.append(stream.resume_token)
        copied_each = [token["snapshot"]["collections"][0]["documents"] for token in tokens if "snapshot" in token]
        assert copied_each[:3] == [0, 2, 4]
        db.a.insert_one({"_id": 6})
        assert next(stream)["documentKey"] == {"_id": 6}
    with db.a.watch(pipeline, resume_after=tokens[1]) as stream:
        assert next(stream)["documentKey"] == {"_id": 6}


def test_the_id_of_a_copied_document_is_no_place_to_go_on_from(db: Any) -> None:
    """To go on from it would pass over the rest of the copy."""
    db.a.insert_many([{"_id": number} for number in range(3)])
    with db.a.watch(start="snapshot") as stream:
        event = next(stream)
    db.a.insert_one({"_id": 3})
    with pytest.raises(ChangeStreamFatal), db.a.watch(resume_after=event["_id"]) as stream:
        next(stream)


def test_an_oplog_that_has_lost_the_copys_time_is_noticed_while_it_runs(
    db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is noticed before everything has been copied in vain, and not only after the copy."""
    db.a.insert_many([{"_id": number} for number in range(5)])
    monkeypatch.setattr(snapshot_stream, "_LOOK_S", -1.0)
    monkeypatch.setattr(snapshot_stream, "CHUNK_DOCUMENTS", 2)
    with db.a.watch(start="snapshot") as stream:
        assert next(stream)["operationType"] == "snapshot"

        def lost(_: Any) -> Any:
            raise ChangeStreamHistoryLost("the oplog has lost it")

        stream._open_stream = lost
        with pytest.raises(ChangeStreamHistoryLost):
            list(stream)
        assert not stream.alive
        assert "snapshot" in stream.resume_token


@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_the_same_with_older_servers(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    running = start_replica_set(1, version=version)
    with tailrace.connect(running.uri) as client:
        db = client[DATABASE]
        fill(db, ["a"])
        target = Target()
        works = [lambda stop, seed=seed: write(db, seed, stop, ["a"]) for seed in range(2)]  # type: ignore[misc]
        with Writers(works, lambda: operation_time(client)) as writers:
            drained(lambda: db, target, writers.stopped, 1, 5)
        assert target.collections[f"{DATABASE}.a"] == truth(db.a)
