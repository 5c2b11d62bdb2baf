"""Copies of a replica set's collections, beside writers, through crashes, drops and renames."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import bson
import pymongo
import pytest
from bson.binary import Binary
from bson.code import Code
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo.collation import Collation

import tailrace
from tailrace.core import raw_bson
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.errors import ServerError, UsageError
from tailrace.read.snapshot import SnapshotReader, SnapshotState, begin
from tailrace.watch.client.client import operation_time
from tests.pace import BETWEEN_WRITES_S
from tests.server_in_use import IN_BETWEEN
from tests.snapshot.copies import Target, copy_all, id_of, persisted, stream_after, truth

pytestmark = pytest.mark.mongod

DATABASE = "snapshots"


@pytest.fixture(scope="module")
def client(replica_set: ReplicaSet) -> Iterator[tailrace.watch.client.client.Client]:
    with tailrace.connect(replica_set.uri) as connected:
        yield connected
        connected.drop_database(DATABASE)


@pytest.fixture
def db(client: Any) -> Any:
    client.drop_database(DATABASE)
    return client[DATABASE]


def scope_of(name: str | None) -> Scope:
    return Scope.of_database(DATABASE) if name is None else Scope.of_collection(DATABASE, name)


def reader_of(client: Any, name: str | None, **options: Any) -> SnapshotReader:
    return SnapshotReader(client, scope_of(name), **options)


def raw_id(type_: int, value: bytes) -> RawBSONDocument:
    return RawBSONDocument(raw_bson.encode_document(raw_bson.encode_element(type_, b"_id", value)))


def ids_of_every_type() -> list[Any]:
    """Documents with an ``_id`` of each type that the server takes: no array, regular expression or undefined."""
    nan = bytes.fromhex("010000000000f87f")  # with a payload, which Python would not keep
    text = raw_bson.encode_string("symbol")
    values = [
        MinKey(),
        None,
        float("-inf"),
        -1.5,
        -0.0,
        1,
        Int64(2),
        Decimal128("3.000"),
        2**40,
        1e300,
        Decimal128("9.99E+6000"),
        float("inf"),
        "",
        "a",
        "ä",
        "a\0b",
        {},
        {"a": 1},
        {"a": {"b": [1, {"c": None}]}},
        {"a": 1, "b": 2},
        {"$ref": "c", "$id": 1},
        b"",
        b"x",
        Binary(b"x" * 16, 4),
        Binary(b"y", 128),
        ObjectId("0" * 24),
        ObjectId("f" * 24),
        False,
        True,
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1, tzinfo=UTC),
        bson.DatetimeMS(1 << 60),
        bson.DatetimeMS(-(1 << 60)),
        Timestamp(0, 1),
        Timestamp(2**32 - 1, 5),
        Code("f()"),
        Code("f()", {"x": 1}),
        MaxKey(),
    ]
    made = [RawBSONDocument(bson.encode({"_id": value, "n": number})) for number, value in enumerate(values)]
    pointer = text + bytes(12)
    return [*made, raw_id(raw_bson.DOUBLE, nan), raw_id(raw_bson.SYMBOL, text), raw_id(raw_bson.DB_POINTER, pointer)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_documents_with_ids_of_every_type_are_copied_exactly(client: Any, db: Any, size: int) -> None:
    documents = ids_of_every_type()
    random.Random(size).shuffle(documents)
    db.types.insert_many(documents)
    target = Target()
    state = copy_all(reader_of(client, "types", chunk_documents=size, ranges=3), target)
    assert state.is_complete
    assert target.collections[f"{DATABASE}.types"] == truth(db.types)
    assert target.snapshots == len(documents) == state.collections[0].documents


def test_chunks_follow_one_another_without_a_gap_after_every_crash(client: Any, db: Any) -> None:
    """Each chunk is read by a reader of its own, from the state that was kept."""
    documents = ids_of_every_type()
    db.types.insert_many(documents)
    state = persisted(begin(client, scope_of("types")))
    seen = []
    while not state.is_complete:
        reader = reader_of(client, "types", state=state, chunk_documents=1)
        chunk = next(iter(reader))
        seen += chunk.documents
        state = persisted(reader.done(chunk))
    assert len(seen) == len(documents) == len({id_of(one) for one in seen})
    assert all(first != second for first, second in pairwise(seen))


def test_an_event_of_a_snapshot_names_its_document(client: Any, db: Any) -> None:
    """Users' fields that are named like ours stay theirs."""
    document = {"_id": {"a": 1}, "ts": 5, "token": "x", "_id._data": "82", "count": 3, "key": 4, "documentKey": 5}
    db.named.insert_one(document)
    db.named.insert_one({"_id": 2})
    events = [bson.decode(event) for chunk in reader_of(client, "named") for event in chunk.events()]
    event = next(one for one in events if one["documentKey"] == {"_id": {"a": 1}})
    assert event["operationType"] == "snapshot"
    assert event["ns"] == {"db": DATABASE, "coll": "named"}
    assert event["fullDocument"] == document
    tokens = [one["_id"]["_data"] for one in events]
    assert len(set(tokens)) == 2
    with client[DATABASE].watch() as stream:
        db.named.insert_one({"_id": 3})
        assert max(tokens) < next(stream)["_id"]["_data"]


@pytest.mark.parametrize("kind", ["collation", "capped", "clustered"])
def test_collections_of_every_kind_are_copied(client: Any, db: Any, kind: str) -> None:
    options: dict[str, Any] = {
        "collation": {"collation": Collation("en", strength=2)},
        "capped": {"capped": True, "size": 1 << 20},
        "clustered": {"clusteredIndex": {"key": {"_id": 1}, "unique": True}},
    }[kind]
    collection = db.create_collection("kind", **options)
    words = ["b", "A", "c", "D", "ä", "Z", "zz", "É", 1, 2.5, {"x": "a"}, {"x": "B"}, MaxKey(), MinKey(), None]
    documents = [{"_id": word, "n": number} for number, word in enumerate(words)]
    random.Random(3).shuffle(documents)
    collection.insert_many(documents)
    for size, ranges in ((1, 1), (2, 4), (100, 1)):
        target = Target()
        assert copy_all(reader_of(client, "kind", chunk_documents=size, ranges=ranges), target).is_complete
        assert target.collections[f"{DATABASE}.kind"] == truth(collection)
        assert target.snapshots == len(words)


def test_views_and_time_series_are_refused_and_left_out_of_a_database(client: Any, db: Any) -> None:
    db.orders.insert_one({"_id": 1})
    db.create_collection("view", viewOn="orders", pipeline=[])
    db.create_collection("series", timeseries={"timeField": "t"})
    db.series.insert_one({"t": datetime.now(UTC)})
    for name in ("view", "series"):
        with pytest.raises(ServerError, match=rf"{DATABASE}\.{name} is a") as caught:
            begin(client, scope_of(name))
        assert caught.value.code == 166
    state = begin(client, scope_of(None))
    assert [one.namespace for one in state.collections] == [f"{DATABASE}.orders"]
    assert begin(client, scope_of("nothing")).is_complete


def write(db: Any, seed: int, stop: threading.Event, names: list[str]) -> None:
    """Inserts, updates, replacements and deletes on documents that four writers share, until it is told to stop."""
    chosen = random.Random(seed)
    types: list[Callable[[int], Any]] = [int, str, float, lambda n: {"n": n}, lambda n: Int64(n * 1000)]
    while not stop.wait(BETWEEN_WRITES_S):
        collection = db[chosen.choice(names)]
        id_ = chosen.choice(types)(chosen.randrange(600))
        try:
            match chosen.randrange(4):
                case 0:
                    collection.update_one({"_id": id_}, {"$set": {"v": chosen.random()}}, upsert=True)
                case 1:
                    collection.update_one({"_id": id_}, {"$inc": {"n": 1}})
                case 2:
                    collection.replace_one({"_id": id_}, {"r": seed}, upsert=True)
                case 3:
                    collection.delete_one({"_id": id_})
        except pymongo.errors.DuplicateKeyError:
            continue  # two upserts at once


def in_the_middle(db: Any, names: list[str], work: Callable[[], Any], writers: int = 4) -> Any:
    """The result of ``work`` while writers write."""
    stop = threading.Event()
    threads = [threading.Thread(target=write, args=(db, seed, stop, names)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        return work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def fill(db: Any, names: list[str]) -> None:
    for name in names:
        db[name].insert_many(
            [{"_id": make(number)} for number in range(300) for make in (int, str, lambda n: {"n": n})]  # type: ignore[list-item]
        )


def follow(client: Any, scope: Scope, state: SnapshotState, target: Target) -> None:
    for event in stream_after(client, scope, state, operation_time(client)):
        target.apply(event)


@pytest.mark.parametrize(("parallel", "seed"), [(1, 1), (1, 2), (3, 3)])
def test_a_snapshot_and_the_stream_after_it_lose_nothing(client: Any, db: Any, parallel: int, seed: int) -> None:
    """Four writers; the copy is cut off at random points, with chunks delivered whose ``done`` was never kept."""
    names = ["a", "b"]
    fill(db, names)
    target = Target()
    chosen = random.Random(seed)

    def copy() -> SnapshotState:
        state = persisted(begin(client, scope_of(None), ranges=parallel))
        crashes = 0
        while not state.is_complete:
            reader = reader_of(client, None, state=state, parallel=parallel, chunk_documents=20)
            left = chosen.randrange(1, 12) if crashes < 20 else 1 << 30
            chunks = iter(reader)
            for chunk in chunks:
                for event in chunk.events():
                    target.apply(event)
                left -= 1
                if left <= 0 and chosen.random() < 0.5:
                    break  # the crash came before the state was kept
                state = persisted(reader.done(chunk))
                if left <= 0:
                    break
            chunks.close()  # type: ignore[attr-defined]
            crashes += 1
        assert crashes >= 10
        return state

    state = in_the_middle(db, names, copy)
    db.later.insert_many([{"_id": 1}, {"_id": 2}])  # what is new comes with the stream
    follow(client, scope_of(None), state, target)
    for name in (*names, "later"):
        assert target.collections[f"{DATABASE}.{name}"] == truth(db[name])


def test_a_collection_that_is_dropped_in_the_middle_has_a_clear_outcome(
    client: Any, db: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(db, ["a", "b"])
    target = Target()
    reader = reader_of(client, None, chunk_documents=50)
    for number, chunk in enumerate(reader):
        for event in chunk.events():
            target.apply(event)
        reader.done(chunk)
        if number == 2:
            db.a.drop()
    assert [one.outcome for one in reader.state.collections] == ["dropped", "copied"]
    assert f"{DATABASE}.a was dropped before all of it was copied" in caplog.text
    follow(client, scope_of(None), reader.state, target)
    assert {name: documents for name, documents in target.collections.items() if documents} == {
        f"{DATABASE}.b": truth(db.b)
    }


@pytest.mark.parametrize("again", [False, True])
def test_a_collection_that_is_replaced_or_renamed_in_the_middle_is_copied_whole(
    client: Any, db: Any, again: bool
) -> None:
    fill(db, ["a"])
    target = Target()
    reader = reader_of(client, None, chunk_documents=50)
    for number, chunk in enumerate(reader):
        for event in chunk.events():
            target.apply(event)
        reader.done(chunk)
        if number == 2:
            if again:
                db.a.drop()
                db.a.insert_many([{"_id": n, "new": True} for n in range(200)])
            else:
                db.a.rename("c")
    assert reader.state.is_complete
    assert reader.state.collections[0].restarts == int(again)
    follow(client, scope_of(None), reader.state, target)
    assert target.collections[f"{DATABASE}.{'a' if again else 'c'}"] == truth(db["a" if again else "c"])


def test_progress_and_throttle(client: Any, db: Any) -> None:
    db.a.insert_many([{"_id": n} for n in range(500)])
    waited: list[float] = []
    reader = reader_of(client, "a", chunk_documents=100, documents_per_second=1e6)
    assert reader.progress.documents == 0
    assert reader.progress.seconds_left is None
    for chunk in reader:
        reader.done(chunk)
        waited.append(reader.progress.seconds_left or 0.0)
    assert waited[0] > 0
    assert waited[-1] == 0
    assert str(reader.progress).startswith("500 of about 500 documents (100 %)")


def test_a_reader_can_be_told_to_stop(client: Any, db: Any) -> None:
    db.a.insert_many([{"_id": n} for n in range(500)])
    stop = threading.Event()
    reader = reader_of(client, "a", chunk_documents=10, stopped=stop.is_set)
    for chunk in reader:
        reader.done(chunk)
        if reader.state.collections[0].documents >= 100:
            stop.set()
    assert reader.state.collections[0].documents == 100
    assert not reader.state.is_complete


def test_a_state_that_is_none_is_refused(client: Any, db: Any) -> None:
    db.a.insert_one({"_id": 1})
    good = begin(client, scope_of("a")).to_document()
    assert SnapshotState.from_document(good).to_document() == good
    for broken in (
        {},
        {**good, "format": 2},
        {**good, "startAt": 5},
        {**good, "collections": [{}]},
        {**good, "collections": [{**good["collections"][0], "uuid": b"1"}]},
        {**good, "collections": [{**good["collections"][0], "outcome": "lost"}]},
        {**good, "collections": [{**good["collections"][0], "ranges": [{"at": {"bson": b"x"}}]}]},
    ):
        with pytest.raises(UsageError, match="cannot be read"):
            SnapshotState.from_document(broken)
    with pytest.raises(UsageError, match="not of"):
        reader_of(client, "b", state=SnapshotState.from_document(good))
    with pytest.raises(UsageError, match="larger than 0"):
        reader_of(client, "a", parallel=0)


def test_a_snapshot_goes_on_when_the_primary_steps_down(start_replica_set: Callable[..., ReplicaSet]) -> None:
    running = start_replica_set(3)
    with tailrace.connect(running.uri) as client:
        db = client[DATABASE]
        fill(db, ["a"])
        target = Target()
        reader = reader_of(client, "a", chunk_documents=50)
        for number, chunk in enumerate(reader):
            for event in chunk.events():
                target.apply(event)
            reader.done(chunk)
            if number == 2:
                running.step_down()
        assert target.collections[f"{DATABASE}.a"] == truth(db.a)


@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_the_same_on_older_servers(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    running = start_replica_set(1, version=version)
    with tailrace.connect(running.uri) as client:
        db = client[DATABASE]
        db.types.insert_many(ids_of_every_type())
        fill(db, ["a"])
        target = Target()
        state = in_the_middle(
            db, ["a"], lambda: copy_all(reader_of(client, None, chunk_documents=20, parallel=2), target), writers=2
        )
        follow(client, scope_of(None), state, target)
        for name in ("types", "a"):
            assert target.collections[f"{DATABASE}.{name}"] == truth(db[name])
