"""Copies (snapshots and the seeds of exact images) of large documents, odd names, and another deployment's half copy.

None had caught these: no seed had a document of 4 kB, from which on PyMongo gives views of its replies; chunks were
tried with small documents alone; names came from drivers, which refuse what is not UTF-8; and a token went back to the
deployment that it came from.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from pymongo import MongoClient

import tailrace
from tailrace.cli.main import main
from tailrace.client.request import SNAPSHOT
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError, SourceError
from tailrace.oplog.namespace import Scope
from tailrace.oplog.selection import Selection
from tailrace.snapshot import SnapshotReader, begin
from tailrace.snapshot.chunk import READ_BYTES
from tests.differential.wire import Wire, raw_insert

pytestmark = pytest.mark.mongod

OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]


@pytest.fixture
def client(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        yield client
        client.drop_database("copies")


def seeds_of_every_size(uri: str, folder: Path) -> None:
    sizes = [100, 5_000, 1 << 20, (16 << 20) - 200]
    with MongoClient[dict[str, Any]](uri) as client, tailrace.connect(uri, images=folder) as ours:
        client.copies.orders.insert_many([{"_id": size, "text": "x" * size, "n": 0} for size in sizes[:-1]])
        client.copies.orders.insert_one({"_id": sizes[-1], "text": "x" * sizes[-1], "n": 0})
        with ours["copies"]["orders"].watch(full_document_before_change="exact") as stream:
            for size in sizes[:-1]:
                client.copies.orders.update_one({"_id": size}, {"$set": {"n": 1}})
                before = stream.next()["fullDocumentBeforeChange"]
                assert (before["n"], len(before["text"])) == (0, size)


def test_images_begin_with_documents_of_every_size(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    seeds_of_every_size(replica_set.uri, tmp_path)


@pytest.mark.slow
def test_the_same_on_an_older_server(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path) -> None:
    seeds_of_every_size(start_replica_set(1, version="5.0.4").uri, tmp_path)


@pytest.mark.parametrize("parallel", [1, 2])
def test_large_documents_come_in_chunks_of_few(client: MongoClient[Any], parallel: int) -> None:
    """The first chunk was of 100 documents, whatever their size, and later ones were sized by those before them."""
    large = b"x" * (3 << 20)
    for number in range(24):
        client.copies.orders.insert_one({"_id": number, "data": large})
    reader = SnapshotReader(client, Scope.of_collection("copies", "orders"), ranges=parallel, parallel=parallel)
    tracemalloc.start()
    seen: list[int] = []
    for chunk in reader:
        assert sum(map(len, chunk.documents)) <= READ_BYTES + (16 << 20)
        seen += [bson.decode(one)["_id"] for one in chunk.documents]
        reader.done(chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(seen) == list(range(24))
    assert peak < parallel * 3 * (READ_BYTES + (16 << 20))


def test_a_chunk_that_is_cut_misses_nothing_that_is_deleted_and_written_meanwhile(
    client: MongoClient[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.snapshot.chunk.READ_BYTES", 1_000)
    orders = client.copies.orders
    orders.insert_many([{"_id": number, "text": "x" * 500} for number in range(400)])
    reader = SnapshotReader(client, Scope.of_collection("copies", "orders"))
    seen: set[int] = set()
    for number, chunk in enumerate(reader):
        seen |= {bson.decode(one)["_id"] for one in chunk.documents}
        reader.done(chunk)
        orders.delete_one({"_id": max(seen)})  # the document by which the chunk's end was found
        assert number < 200
    assert seen == set(range(400))


def insert_raw(uri: str, database: bytes, collection: bytes) -> None:
    """An insert under a name that no driver sends."""
    with Wire.to(uri) as wire:
        reply = wire.exchange(raw_insert(database, collection, {"_id": 1}))
        assert bson.decode(reply, CodecOptions(unicode_decode_error_handler="replace"))["n"] == 1


@pytest.mark.parametrize("version", ["6.0.27", *OLDER])
def test_names_that_are_not_utf8_are_refused_by_name_and_can_be_left_out(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str
) -> None:
    uri = start_replica_set(1, version=version).uri
    with MongoClient[dict[str, Any]](uri) as client:
        client.shop.orders.insert_one({"_id": 1})
        insert_raw(uri, b"shop", b"odd\xff")
        with pytest.raises(SourceError, match=r"collection 'shop\.odd\\\\xff' is not UTF-8") as raised:
            begin(client, Scope.of_database("shop"))
        assert "left out" in str(raised.value.hint)
        assert begin(client, Scope.of_collection("shop", "orders")).collections[0].estimate == 1
        assert len(begin(client, Scope.cluster(), selection=Selection.of(["*.orders"])).collections) == 1
        insert_raw(uri, b"hr\xfe", b"people")
        with pytest.raises(SourceError, match=r"database 'hr\\\\xfe' is not UTF-8"):
            begin(client, Scope.cluster(), selection=Selection.of(["*.orders"]))
        assert len(begin(client, Scope.cluster(), selection=Selection.of(["shop.o*s"])).collections) == 1
        if version != "4.4.2":
            with tailrace.connect(uri, images=tmp_path) as ours, pytest.raises(SourceError, match="is not UTF-8"):
                ours.watch(full_document="exact")


def test_names_for_which_pymongo_has_no_object_are_copied(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    """The server takes "a..b" and "a."; the tests of names had gone through drivers, which refuse both. The fuzz of all
    products found it."""
    names = ["a..b", "a.", "plain"]
    for name in names:
        client.copies.command("create", name)
        client.copies.command("insert", name, documents=[{"_id": number, "n": 0} for number in range(60)])
    reader = SnapshotReader(client, Scope.of_database("copies"), ranges=2, parallel=2)
    copied: dict[str, int] = {}
    for chunk in reader:
        copied[chunk.namespace] = copied.get(chunk.namespace, 0) + len(chunk.documents)
        reader.done(chunk)
    assert copied == {f"copies.{name}": 60 for name in names}
    update = [{"q": {"_id": 7}, "u": {"$set": {"n": 1}}}]
    with (
        tailrace.connect(replica_set.uri, images=tmp_path / "images") as ours,
        ours["copies"].watch(full_document_before_change="exact", full_document="exact") as stream,
    ):
        for name in names:
            client.copies.command("update", name, updates=update)
            event = stream.next()
            assert event["ns"]["coll"] == name
            assert event["fullDocument"] == {"_id": 7, "n": 1}
            assert event["fullDocumentBeforeChange"] == {"_id": 7, "n": 0}
    tables = str(tmp_path / "tables")
    assert main(["tables", "--once", "write", replica_set.uri, tables, "copies.*"]) == 0
    assert main(["tables", "verify", replica_set.uri, tables]) == 0
    assert main(["doctor", replica_set.uri]) == 0


def half_copied(uri: str) -> Any:
    with (
        tailrace.connect(uri) as client,
        client["copies"].watch(start="snapshot", full_document="updateLookup") as stream,
    ):
        next(stream)
        return stream.resume_token


def test_a_half_copy_is_not_continued_on_another_deployment(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    """The other one has the same name, the same collections and a later clock."""
    one, other = start_replica_set(1), start_replica_set(1)
    for replica_set in (one, other):
        with MongoClient[dict[str, Any]](replica_set.uri) as client:
            client.copies.orders.insert_many([{"_id": number, "n": 0} for number in range(10)])
    token = half_copied(one.uri)
    with tailrace.connect(other.uri) as client, pytest.raises(OtherHistoryError, match="from another deployment"):
        client["copies"].watch(resume_after=token)
    place = token[SNAPSHOT]
    place["witness"]["replicaSets"]["rs0"] = ""  # as where the user may not read it
    with tailrace.connect(other.uri) as client, pytest.raises(OtherHistoryError, match=r"another history|was restored"):
        client["copies"].watch(resume_after=token)
    del place["witness"]  # as earlier versions gave it
    with tailrace.connect(one.uri) as client, client["copies"].watch(resume_after=token) as stream:
        assert next(stream)["operationType"] == "snapshot"
    with (
        tailrace.connect(one.uri, images=tmp_path) as client,
        client["copies"]["orders"].watch(full_document="exact") as stream,
    ):
        with MongoClient[dict[str, Any]](one.uri) as writer:
            writer.copies.orders.update_one({"_id": 1}, {"$set": {"n": 1}})
        assert next(stream)["fullDocument"] == {"_id": 1, "n": 1}
        after = stream.resume_token
    for mode in ("exact", "exactWhenAvailable"):
        for start in ({}, {"resume_after": after}):
            with tailrace.connect(other.uri, images=tmp_path) as client, pytest.raises(OtherHistoryError) as raised:
                client["copies"]["orders"].watch(full_document=mode, **start)
            assert str(tmp_path) in raised.value.message
    with tailrace.connect(one.uri, images=tmp_path) as client:
        client["copies"]["orders"].watch(full_document="exact", resume_after=after).close()
