"""Exact images beside the server's own (6.0: byte for byte), and on servers that have none beside the collection."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure

import tailrace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost, UsageError
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.images.bucket import ImageStateError
from tailrace.read.source.mongod import MongodSource
from tests import commands
from tests.amounts import amount
from tests.differential import documents as docs
from tests.differential.image_writes import raw_events, write
from tests.server_in_use import IN_BETWEEN

NAME = "exact_images"


@pytest.fixture
def client(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient(replica_set.uri, document_class=RawBSONDocument) as client:
        yield client
        client.drop_database(NAME)


MODES = [("exact", "exact", "required", "required"), ("exactWhenAvailable", None, "whenAvailable", None)]
MODES += [(None, "exact", None, "required")]


@pytest.mark.parametrize(("after", "before", "servers_after", "servers_before"), MODES)
def test_events_are_the_server_s_own(  # noqa: PLR0917
    replica_set: ReplicaSet,
    client: MongoClient[Any],
    tmp_path: Path,
    after: str | None,
    before: str | None,
    servers_after: str | None,
    servers_before: str | None,
) -> None:
    orders = client[NAME].create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    rng = docs.UniqueNames(7)
    write(orders, rng, 3)  # what is there before the streams begin
    with tailrace.connect(replica_set.uri, document_class=RawBSONDocument, images=tmp_path) as ours:
        mine = ours[NAME]["orders"].watch(full_document=after, full_document_before_change=before)
        token = mine.resume_token
        write(orders, rng, 25, fresh=False)
        orders.insert_one({"_id": "end"})
        with mine:
            found = raw_events(mine, "end")
        own = orders.watch(full_document=servers_after, full_document_before_change=servers_before, resume_after=token)
        with own:
            expected = raw_events(own, "end")
        assert len(expected) > 300
        assert found == expected
        # Again from the same token: the state goes back, and gives the same.
        with ours[NAME]["orders"].watch(
            full_document=after, full_document_before_change=before, resume_after=token
        ) as again:
            assert raw_events(again, "end") == expected


def test_an_asynchronous_client_computes_them_too(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    """It did not accept ``images``: the parameter had only been tried with the other client."""
    orders = client[NAME]["asyncio"]
    orders.insert_one({"_id": 1, "n": 0})

    async def program() -> Any:
        async with tailrace.AsyncClient(replica_set.uri, images=tmp_path) as ours:
            both = {"full_document": "exact", "full_document_before_change": "exact"}
            async with await ours[NAME]["asyncio"].watch(**both) as stream:
                orders.update_one({"_id": 1}, {"$set": {"n": 1}})
                return await asyncio.wait_for(stream.next(), 300)

    event = asyncio.run(program())
    assert (event["fullDocumentBeforeChange"], event["fullDocument"]) == ({"_id": 1, "n": 0}, {"_id": 1, "n": 1})


def reads(client: MongoClient[Any], namespace: str) -> int:
    """How many reads of a collection the server has counted."""
    found = client.admin.command("top")["totals"].get(namespace, {})
    return sum(found[name]["count"] for name in ("queries", "getmore", "commands") if name in found)


def test_without_a_setting_and_without_reads_of_the_collection(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    orders = client[NAME]["plain"]
    rng = docs.UniqueNames(11)
    with tailrace.connect(replica_set.uri, document_class=RawBSONDocument, images=tmp_path) as ours:
        with ours[NAME].watch(full_document="exact", full_document_before_change="exact") as stream:
            write(orders, rng, 5)
            stored = {bytes(document.raw) for document in orders.find()}
            before = reads(client, f"{NAME}.plain"), reads(client, "config.system.preimages")
            orders.insert_one({"_id": "end"})
            raw_events(stream, "end")
            after = reads(client, f"{NAME}.plain"), reads(client, "config.system.preimages")
            assert after == before
            orders.delete_many({"_id": {"$ne": "end"}})
            orders.insert_one({"_id": "the end"})
            gone = [RawBSONDocument(event) for event in raw_events(stream, "the end")[:-1]]
        assert {event["fullDocumentBeforeChange"].raw for event in gone} == stored


@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_servers_without_images(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str) -> None:
    """From the beginning of the collection, each image is what the change before it left, and the last one is what is
    stored."""
    running = start_replica_set(version=version)
    with (
        MongoClient(running.uri, document_class=RawBSONDocument) as client,
        tailrace.connect(running.uri, document_class=RawBSONDocument, images=tmp_path) as ours,
    ):
        orders = client[NAME]["orders"]
        start = client.admin.command("ping")["operationTime"]
        write(orders, docs.UniqueNames(13), 15)
        stored = {bytes(document.raw) for document in orders.find()}
        orders.delete_many({})
        orders.insert_one({"_id": "end"})
        with ours[NAME]["orders"].watch(
            full_document="exact", full_document_before_change="exact", start_at_operation_time=start
        ) as stream:
            events = [RawBSONDocument(event) for event in raw_events(stream, "end")]
        check_resuming(orders, ours[NAME]["orders"], events)
    last: dict[bytes, Any] = {}
    compared = 0
    for event in events[:-1]:
        key = event["documentKey"].raw
        if event["operationType"] != "insert":
            left = last.pop(key)
            assert event["fullDocumentBeforeChange"].raw == left or left[5:8] != b"_id"
            compared += 1
        if event["operationType"] != "delete":
            last[key] = event["fullDocument"].raw
    assert compared > 150
    deleted = {event["fullDocumentBeforeChange"].raw for event in events if event["operationType"] == "delete"}
    assert stored <= deleted


def check_resuming(server: Any, ours: Any, events: list[RawBSONDocument]) -> None:
    """Resume after the token of an update. Before 6.0 such a token has a witness, for which an image was required, and
    the stream ended. On these servers all tests had begun at a time; a SIGKILL in the longer tests found it."""
    updates = [place for place, event in enumerate(events) if event["operationType"] == "update"]
    for place in updates[:: len(updates) // 3]:
        token = events[place]["_id"]
        with ours.watch(full_document="exact", full_document_before_change="exact", resume_after=token) as stream:
            assert raw_events(stream, "end") == [event.raw for event in events[place + 1 :]]
    # Looked up, the witness has no document either.
    with (
        server.watch(full_document="updateLookup", resume_after=token) as own,
        ours.watch(full_document="updateLookup", resume_after=token) as stream,
    ):
        assert raw_events(stream, "end") == raw_events(own, "end")


def test_documents_of_a_collection_that_became_capped_are_known(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    """The server copies them by entries that are marked as a migration's, which no event shows, and renames the copy.
    Such entries were left out on a replica set, and the next update of a document ended the stream with 47: no workload
    of the images' own fuzzers has definitions."""
    orders = client[NAME]["orders"]
    orders.insert_many([{"_id": number, "n": 0} for number in range(3)])
    with (
        tailrace.connect(replica_set.uri, document_class=RawBSONDocument, images=tmp_path) as ours,
        ours.watch(full_document="exact", full_document_before_change="exact") as stream,
    ):
        client[NAME].command("convertToCapped", "orders", size=1 << 20)
        orders.update_one({"_id": 1}, {"$inc": {"n": 1}})
        kind = None
        while kind != "update":
            event = next(stream)
            kind = event["operationType"]
    images = [bson.decode(event[name].raw) for name in ("fullDocumentBeforeChange", "fullDocument")]
    assert images == [{"_id": 1, "n": 0}, {"_id": 1, "n": 1}]


def test_a_document_that_is_not_known_is_an_error_or_null(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    orders = client[NAME]["unknown"]
    orders.insert_one({"_id": 1, "n": 0})
    start = client.admin.command("ping")["operationTime"]
    start = start.__class__(start.time, start.inc + 1)
    orders.update_one({"_id": 1}, {"$set": {"n": 1}})
    orders.insert_one({"_id": "end"})
    with tailrace.connect(replica_set.uri, images=tmp_path) as ours:
        with ours[NAME]["unknown"].watch(full_document="exactWhenAvailable", start_at_operation_time=start) as stream:
            assert next(stream)["fullDocument"] is None
        with pytest.raises(OperationFailure) as raised:
            ours[NAME]["unknown"].watch(full_document="exact", start_at_operation_time=start).next()
        assert raised.value.code == 47


def test_a_start_before_the_state_begins_is_refused_and_harms_nothing(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    orders = client[NAME]["early"]
    earlier = client.admin.command("ping")["operationTime"]
    orders.insert_one({"_id": 1, "n": 0})
    modes = {"full_document": "exact", "full_document_before_change": "exact"}
    with tailrace.connect(replica_set.uri, images=tmp_path) as ours:
        with ours[NAME]["early"].watch(**modes) as stream:
            token = stream.resume_token
        with pytest.raises(ImageStateError, match="taken back to"):
            ours[NAME]["early"].watch(**modes, start_at_operation_time=earlier)
        orders.delete_one({"_id": 1})
        with ours[NAME]["early"].watch(**modes, resume_after=token) as stream:
            assert next(stream)["fullDocumentBeforeChange"] == {"_id": 1, "n": 0}


def test_what_does_not_go_together_is_refused(replica_set: ReplicaSet, tmp_path: Path) -> None:
    with tailrace.connect(replica_set.uri) as ours, pytest.raises(UsageError, match=r"connect\(images=DIRECTORY"):
        ours[NAME]["orders"].watch(full_document="exact")
    with tailrace.connect(replica_set.uri, images=tmp_path) as ours:
        with pytest.raises(UsageError, match="do not go together"):
            ours[NAME]["orders"].watch(full_document="exact", full_document_before_change="required")
        one = ours[NAME]["orders"].watch(full_document="exact")
        with one, pytest.raises(ImageStateError, match="another process"):
            ours[NAME]["orders"].watch(full_document="exact")
        with pytest.raises(UsageError, match="a directory of its own"):
            ours[NAME]["others"].watch(full_document="exact")


def test_the_command_line(replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path) -> None:
    orders = client[NAME]["cli"]
    start = client.admin.command("ping")["operationTime"]
    orders.insert_one({"_id": 1, "n": 0})
    orders.update_one({"_id": 1}, {"$set": {"n": 1}})
    command = ["watch", replica_set.uri, f"{NAME}.cli", "--format", "bson"]
    command += ["--full-document", "exact", "--full-document-before-change", "exact", "--images", str(tmp_path)]
    command += ["--start-at-operation-time", f"{start.time},{start.inc}", "--until", "2"]
    done = commands.run(*command)
    assert done.returncode == 0, done.stderr.decode()
    update = bson.decode_all(done.stdout)[1]
    assert update["fullDocument"] == {"_id": 1, "n": 1}
    assert update["fullDocumentBeforeChange"] == {"_id": 1, "n": 0}


def test_a_state_that_was_lost_is_made_again_from_the_archive(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream with exact images ignored the archive: each had been tried without the other."""

    def archive() -> None:
        policy = ArchivePolicy(from_oldest=False, once=True, limits=SegmentLimits(bytes=50_000))
        with MongoClient(replica_set.uri) as plain:
            Recorder(plain, None, tmp_path / "archive", policy).run()

    archive()
    orders = client[NAME].create_collection("recovered", changeStreamPreAndPostImages={"enabled": True})
    rng = docs.UniqueNames(19)
    write(orders, rng, 5)
    modes = {"full_document": "required", "full_document_before_change": "required"}
    with orders.watch(**modes) as own:
        token = own.resume_token
        write(orders, rng, 5, fresh=False)
        archive()
        begins = client.admin.command("ping")["operationTime"]
        write(orders, rng, 5, fresh=False)
        orders.insert_one({"_id": "end"})
        expected = raw_events(own, "end")
    archive()
    # From now on the oplog says to begin after the token.
    monkeypatch.setattr(MongodSource, "oldest", lambda self: (ClusterTime.from_timestamp(begins), False))
    exact = {"full_document": "exact", "full_document_before_change": "exact", "resume_after": token}
    ours: dict[str, Any] = {"document_class": RawBSONDocument, "images": tmp_path / "images"}
    with tailrace.connect(replica_set.uri, **ours) as plain, pytest.raises(ChangeStreamHistoryLost):
        plain[NAME]["recovered"].watch(**exact)
    with tailrace.connect(replica_set.uri, archive=tmp_path / "archive", **ours) as both:
        for _ in range(2):  # made anew, and taken back
            with both[NAME]["recovered"].watch(**exact) as stream:
                assert raw_events(stream, "end") == expected


_READER = """
import sys
from bson import decode
from bson.raw_bson import RawBSONDocument
import tailrace
uri, name, images, path, token = sys.argv[1:]
out = open(path, "ab")
known = open(path, "rb").read()
last = None
while known:
    size = int.from_bytes(known[:4], "little")
    if size > len(known):
        break
    last, known = known[:size], known[size:]
out.truncate(out.tell() - len(known))
client = tailrace.connect(uri, images=images, document_class=RawBSONDocument)
start = {"resume_after": {"_data": token} if last is None else RawBSONDocument(last)["_id"]}
modes = {"full_document": "exact", "full_document_before_change": "exact", "batch_size": 20}
with client[name]["killed"].watch(**modes, **start) as stream:
    print("ready", flush=True)
    for event in stream:
        out.write(event.raw)
        out.flush()
"""


def test_a_reader_that_is_killed_again_and_again_gives_each_event_once(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    """It goes on from the last event that it wrote down; the state may be ahead of that and is taken back."""
    orders = client[NAME].create_collection("killed", changeStreamPreAndPostImages={"enabled": True})
    path, rng = tmp_path / "events", docs.UniqueNames(17)
    own = orders.watch(full_document="required", full_document_before_change="required")
    token = own.resume_token["_data"]
    command = [sys.executable, "-c", _READER, replica_set.uri, NAME, str(tmp_path / "images"), str(path), token]
    turns = amount(4, 8)
    for turn in range(turns):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
            write(orders, rng, 6, fresh=turn == 0)
            if turn == turns - 1:
                orders.insert_one({"_id": "end"})
                waited_until = time.monotonic() + 300
                while b"end\0" not in path.read_bytes()[-600:] and time.monotonic() < waited_until:
                    time.sleep(0.05)
            else:
                time.sleep(rng.random() * 0.3)
            reader.kill()
    with own:
        expected = raw_events(own, "end")
    assert path.read_bytes() == b"".join(expected)
    assert len(expected) > 50 * turns
