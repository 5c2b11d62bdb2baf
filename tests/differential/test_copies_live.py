"""Copies (snapshots and the seeds of exact images) of large documents, odd names, and another deployment's half copy.

Earlier tests had not caught these: no seed had a document of 4 kB, the size from which PyMongo gives views of its
replies; chunks were tried with small documents only; names came from drivers, which refuse what is not UTF-8; and a
token always went back to the deployment that it came from.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError, SourceError, UsageError
from tailrace.read.images import seed
from tailrace.read.snapshot import SnapshotReader, begin
from tailrace.read.snapshot.chunk import READ_BYTES
from tailrace.read.snapshot.places import ReplicaSetPlaces
from tailrace.read.source.listing import UnreadableNameError
from tailrace.watch.client.request import SNAPSHOT
from tests.differential.wire import Wire, raw_command, raw_insert
from tests.server_in_use import SERVER_VERSION
from tests.snapshot.copies import Target, truth
from tests.tables.equality import in_collection, in_table

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
    """The first chunk had 100 documents, whatever their size, and the size of later ones depended on those before
    them."""
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
    monkeypatch.setattr("tailrace.read.snapshot.chunk.READ_BYTES", 1_000)
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


def rename_raw(uri: str, namespace: bytes, to: bytes) -> None:
    """A rename from and to names that no driver sends."""
    field = b"\x02to\0" + struct.pack("<i", len(to) + 1) + to + b"\0"
    with Wire.to(uri) as wire:
        reply = wire.exchange(raw_command("renameCollection", b"admin", namespace, field))
        assert bson.decode(reply, CodecOptions(unicode_decode_error_handler="replace"))["ok"] == 1


@pytest.mark.parametrize("version", [SERVER_VERSION, *OLDER, pytest.param("7.0.28", marks=pytest.mark.slow)])
def test_names_that_are_not_utf8_are_left_out_of_every_copy_and_named(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One such collection stopped everybody's copies, and the test of these names had even required that."""
    uri = start_replica_set(1, version=version).uri
    with MongoClient[dict[str, Any]](uri) as client:
        orders = client.shop.orders
        orders.insert_one({"_id": 1, "n": 0})
        insert_raw(uri, b"shop", b"odd\xff")
        insert_raw(uri, b"hr\xfe", b"people")
        for scope, patterns in (
            (Scope.of_database("shop"), None),
            (Scope.cluster(), None),
            (Scope.cluster(), ["*.o*"]),
        ):
            caplog.clear()
            state = begin(client, scope, selection=Selection.of(patterns) if patterns else None)
            assert [one.namespace for one in state.collections] == ["shop.orders"]
            assert "'shop.odd\\xff'" in caplog.text
            assert ("'hr\\xfe'" in caplog.text) == (scope == Scope.cluster())
        with tailrace.connect(uri) as ours, ours.watch(start="snapshot") as stream:
            assert next(stream)["ns"] == {"db": "shop", "coll": "orders"}
            orders.update_one({"_id": 1}, {"$inc": {"n": 1}})
            assert next(stream)["operationType"] == "update"
        caplog.clear()
        exact = {"full_document": "exact", "full_document_before_change": "exact"}
        with tailrace.connect(uri, images=tmp_path / "images") as ours, ours.watch(**exact) as stream:
            assert caplog.text.count("'shop.odd\\xff'") == caplog.text.count("'hr\\xfe'") == 1
            orders.update_one({"_id": 1}, {"$inc": {"n": 1}})
            event = next(stream)
            assert (event["fullDocumentBeforeChange"], event["fullDocument"]) == (
                {"_id": 1, "n": 1},
                {"_id": 1, "n": 2},
            )
        tables = str(tmp_path / "tables")
        assert main(["tables", "--once", "write", uri, tables, "*.*"]) == 0
        assert main(["tables", "resync", tables, "shop.orders"]) == 0
        orders.insert_one({"_id": 2})
        assert main(["tables", "--once", "write", uri, tables, "*.*"]) == 0
        assert in_table(tmp_path / "tables", "shop.orders") == in_collection(orders)
        assert main(["tables", "verify", uri, tables]) == 0


def test_a_name_that_is_not_utf8_is_refused_where_it_is_asked_for_by_itself(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    insert_raw(replica_set.uri, b"copies", b"odd\xff")
    odd = os.fsdecode(b"odd\xff")
    for scope in (Scope.of_collection("copies", odd), Scope.of_database(odd)):
        with pytest.raises(UsageError, match="not valid UTF-8") as raised:
            begin(client, scope)
        assert raised.value.code == 73
    assert main(["tables", "--once", "write", replica_set.uri, str(tmp_path / "tables"), f"copies.{odd}"]) != 0
    assert "not valid UTF-8" in capsys.readouterr().err
    with tailrace.connect(replica_set.uri, images=tmp_path / "images") as ours, pytest.raises(UsageError) as refused:
        ours["copies"][odd].watch(full_document="exact")
    assert refused.value.code == 73


def test_a_collection_that_gets_such_a_name_while_it_is_copied_ends_the_copy(
    replica_set: ReplicaSet, client: MongoClient[Any]
) -> None:
    """It may later get a name that streams show, and then what was not copied would be missing."""
    client.copies.orders.insert_many([{"_id": number} for number in range(300)])
    reader = SnapshotReader(client, Scope.of_database("copies"), chunk_documents=100)
    chunks = iter(reader)
    reader.done(next(chunks))
    rename_raw(replica_set.uri, b"copies.orders", b"copies.odd\xff")
    with pytest.raises(UnreadableNameError, match=r"'copies\.odd\\xff' is not UTF-8") as raised:
        next(chunks)
    assert "begin the copy again" in str(raised.value.hint)
    assert not reader.state.is_complete
    assert begin(client, Scope.of_database("copies")).collections == ()


@pytest.mark.parametrize("comes_back", ["in the middle of the copy", "before the next run"])
def test_tables_forget_a_collection_that_gets_such_a_name_and_copy_it_when_it_comes_back(
    replica_set: ReplicaSet,
    client: MongoClient[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    comes_back: str,
) -> None:
    monkeypatch.setattr("tailrace.read.snapshot.reader._FIRST_CHUNK", 50)
    monkeypatch.setattr("tailrace.lake.tables.copying._NOTED_BYTES", 0)
    first, second = client.copies.first, client.copies.second
    first.insert_many([{"_id": number} for number in range(150)])
    second.insert_many([{"_id": number} for number in range(150)])
    renames = [(b"copies.first", b"copies.odd\xff")]
    if comes_back == "in the middle of the copy":
        renames.append((b"copies.odd\xff", b"copies.first"))

    def copied(step: str) -> None:
        if step == "tables.copied" and renames:
            rename_raw(replica_set.uri, *renames.pop(0))

    command = ["tables", "--once", "write", replica_set.uri, str(tmp_path), "copies.*"]
    durable.observe_steps(copied)
    try:
        assert main(command) == 0
    finally:
        durable.observe_steps(None)
    assert not renames
    assert in_table(tmp_path, "copies.second") == in_collection(second)
    if comes_back == "before the next run":
        assert not in_table(tmp_path, "copies.first")
        rename_raw(replica_set.uri, b"copies.odd\xff", b"copies.first")
        assert main(command) == 0
    assert in_table(tmp_path, "copies.first") == in_collection(first)


def swapped(database: Any) -> None:
    database.first.rename("between")
    database.second.rename("first")
    database.between.rename("second")


RENAMES: dict[str, Callable[[Any], Any]] = {
    "two swap their names": swapped,
    "one gets a new name": lambda database: database.first.rename("third"),
    "one takes the place of another": lambda database: database.first.rename("second", dropTarget=True),
}
VERSIONS = ["6.0.27", *OLDER, pytest.param("7.0.28", marks=pytest.mark.slow)]


def once(act: Callable[[], Any]) -> Callable[[], None]:
    left = [act]
    return lambda: None if not left else left.pop()()


@pytest.fixture(params=VERSIONS)
def uri(request: pytest.FixtureRequest, start_replica_set: Callable[..., ReplicaSet]) -> str:
    version = request.param
    here = request.getfixturevalue("replica_set") if version == "6.0.27" else start_replica_set(1, version=version)
    return str(here.uri)


@pytest.fixture
def database(uri: str) -> Iterator[Any]:
    """Documents of two collections, with the same keys."""
    with MongoClient[dict[str, Any]](uri) as client:
        client.drop_database("renamed_copies")
        for name in ("first", "second"):
            client.renamed_copies[name].insert_many([{"_id": number, "of": name} for number in range(300)])
        yield client.renamed_copies
        client.drop_database("renamed_copies")


@pytest.mark.parametrize("rename", RENAMES)
def test_a_rename_just_after_the_beginning_of_a_copy_loses_nothing(
    uri: str, database: Any, monkeypatch: pytest.MonkeyPatch, rename: str
) -> None:
    """The copy gave documents the name that their collection got a moment later, and the stream renamed that again: all
    of them were gone. Tests had renamed collections while they were copied, but not before the copy first read them."""
    now = ReplicaSetPlaces.now
    act = once(lambda: RENAMES[rename](database))

    def just_before(places: ReplicaSetPlaces) -> Any:
        time = now(places)
        act()
        return time

    monkeypatch.setattr(ReplicaSetPlaces, "now", just_before)
    assert collections_by_events(uri) == stored(database)


@pytest.mark.parametrize("rename", RENAMES)
def test_who_may_not_read_the_oplog_looks_twice(
    uri: str, database: Any, monkeypatch: pytest.MonkeyPatch, rename: str
) -> None:
    """As with ``engine="server"``, whose users need no right to the oplog."""

    def refused(*_: Any) -> Any:
        raise SourceError("not authorized on local", code=13)

    now = ReplicaSetPlaces.now
    act = once(lambda: RENAMES[rename](database))

    def just_before(places: ReplicaSetPlaces) -> Any:
        time = now(places)
        act()
        return time

    monkeypatch.setattr(ReplicaSetPlaces, "now", just_before)
    monkeypatch.setattr("tailrace.read.snapshot.beginning._renamed", refused)
    assert collections_by_events(uri) == stored(database)


def collections_by_events(uri: str) -> dict[str, dict[bytes, bytes]]:
    """What a consumer has that carries out a copy and the stream after it."""
    target = Target()
    with (
        tailrace.connect(uri, document_class=RawBSONDocument) as ours,
        ours["renamed_copies"].watch(start="snapshot", full_document="updateLookup") as stream,
    ):
        with MongoClient[Any](uri) as client:
            last = client.renamed_copies.end.insert_one({"_id": "end"}).inserted_id
        for event in stream:
            target.apply(bytes(event.raw))
            if event["operationType"] == "insert" and event["documentKey"]["_id"] == last:
                break
    return {name: documents for name, documents in target.collections.items() if documents}


def stored(database: Any) -> dict[str, dict[bytes, bytes]]:
    return {f"{database.name}.{name}": truth(database[name]) for name in database.list_collection_names()}


@pytest.mark.parametrize("mode", ["exact", "exactWhenAvailable"])
@pytest.mark.parametrize("rename", RENAMES)
def test_a_rename_just_after_the_beginning_of_exact_images_gives_no_other_documents(  # noqa: PLR0917
    uri: str, database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rename: str, mode: str
) -> None:
    """On 7.0, which reads the collection that had a name at a given time, the documents of one collection were taken
    for those of another."""
    now = seed._now
    act = once(lambda: RENAMES[rename](database))

    def just_before(client: Any) -> Any:
        time = now(client)
        act()
        return time

    monkeypatch.setattr(seed, "_now", just_before)
    modes = {"full_document": mode, "full_document_before_change": mode}
    with tailrace.connect(uri, images=tmp_path) as ours, ours["renamed_copies"].watch(**modes) as stream:
        for name in database.list_collection_names():
            before = database[name].find_one({"_id": 7})
            database[name].update_one({"_id": 7}, {"$set": {"n": 1}})
            event = next(one for one in stream if one["operationType"] == "update")
            assert (event["ns"]["coll"], event["fullDocumentBeforeChange"]) == (name, before)
            assert event["fullDocument"] == {**before, "n": 1}


@pytest.mark.parametrize("mode", ["exact", "exactWhenAvailable"])
@pytest.mark.parametrize("what", [*RENAMES, "one is dropped"])
def test_what_is_renamed_or_dropped_before_its_turn_ends_the_copy_for_exact_images(  # noqa: PLR0917
    uri: str, database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, mode: str
) -> None:
    """A server before 7.0 finds nothing under a name that no longer exists: the copy was then empty, and the
    collection's documents were missing under its new name."""
    documents = seed._documents
    act = once(lambda: RENAMES.get(what, lambda one: one.first.drop())(database))

    def just_before(*args: Any) -> Any:
        act()
        return documents(*args)

    monkeypatch.setattr(seed, "_documents", just_before)
    with (
        tailrace.connect(uri, images=tmp_path) as ours,
        pytest.raises(
            SourceError, match=r"was dropped, renamed or converted while it was copied|as it was at one time"
        ),
    ):
        ours["renamed_copies"].watch(full_document=mode)
    monkeypatch.undo()
    with tailrace.connect(uri, images=tmp_path) as ours, ours["renamed_copies"].watch(full_document=mode) as stream:
        database.second.update_one({"_id": 7}, {"$set": {"n": 1}})
        assert next(stream)["fullDocument"] == database.second.find_one({"_id": 7})


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
