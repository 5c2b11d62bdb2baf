"""An archive from which documents were erased gives the server's events of all the others, token by token."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.cli.main import main
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError, UsageError
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.archive.verification import verify
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.source.mongod import MongodSource
from tests.differential.stored_archives import archive, assert_equal, events_of
from tests.tables.object_server import SECRET, ObjectServer, held_in
from tests.traces import traces

pytestmark = pytest.mark.mongod

WHO = "Anna Musterfrau"


def live_through(people: Any) -> None:
    """Document 1 is inserted, changed in every way and deleted, and others beside it."""
    client = people.database.client
    people.insert_many([{"_id": 1, "who": WHO}, {"_id": 2, "who": "Bertha"}])
    people.update_many({}, {"$set": {"n": 1}})
    people.find_one_and_replace({"_id": 1}, {"who": WHO, "n": 2})
    with client.start_session() as session, session.start_transaction():
        people.update_one({"_id": 1}, {"$set": {"address": WHO}}, session=session)
        people.insert_one({"_id": 3, "who": "Clara"}, session=session)
        people.update_one({"_id": 1}, {"$unset": {"address": 1}}, session=session)
        people.update_one({"_id": 2}, {"$set": {"n": 2}}, session=session)
    people.delete_one({"_id": 1})
    people.update_one({"_id": 3}, {"$set": {"n": 3}})


def servers_own(people: Any, start: Any) -> list[bytes]:
    """The server's events since ``start``, up to that of a document that is inserted here."""
    people.insert_one({"_id": "last", "pad": os.urandom(20)})
    options = {"start_at_operation_time": start, "full_document_before_change": "whenAvailable"}
    with MongoClient[Any](people.database.client.address[0], people.database.client.address[1]) as client:
        raw = client.get_database(people.database.name, bson.CodecOptions(document_class=RawBSONDocument))[people.name]
        found: list[bytes] = []
        with raw.watch(**options) as stream:
            while not found or bson.decode(found[-1])["documentKey"]["_id"] != "last":
                found.append(bytes(stream.next().raw))
    return found


def is_erased(event: dict[str, Any]) -> bool:
    return bool(event["documentKey"] == {"_id": 1} and event["operationType"] != "delete")


def without(events: list[bytes]) -> list[bytes]:
    """The server's events without those that are erased, and without the pre-image of the delete."""
    left = [(bson.decode(one), one) for one in events if not is_erased(bson.decode(one))]
    return [raw if found["documentKey"] != {"_id": 1} else without_image(raw) for found, raw in left]


def without_image(event: bytes) -> bytes:
    """PyMongo writes ``_id`` first, wherever it was."""
    parts = [
        raw_bson.encode_element(raw_bson.NULL, one.name, b"")
        if one.name == b"fullDocumentBeforeChange"
        else event[one.start : one.end]
        for one in raw_bson.elements(event)
    ]
    return raw_bson.encode_document(*parts)


def erase(people: Any, root: Path | ObjectPlace, *more: str, of: object = 1) -> int:
    return main(["erase", "--document", people.full_name, str(of), "--archive", str(root), *more])


def test_all_other_events_are_the_server_s(collection: Any, replica_set: ReplicaSet, tmp_path: Path) -> None:
    root = tmp_path / "archive"
    archive(collection, root)
    start = collection.database.command("ping")["operationTime"]
    live_through(collection)
    events = servers_own(collection, start)
    archive(collection, root, limits=SegmentLimits())  # one segment, whose end the oplog still has
    assert events_of(root, collection, start) == events
    assert sum(is_erased(bson.decode(one)) for one in events) == 5
    assert erase(collection, root) == 0
    assert traces(root, WHO.encode()) == []
    assert verify(root)[0].faults == []
    assert events_of(root, collection, start) == without(events)
    # A stream that resumes at an erased event is refused, as if the oplog no longer had it.
    gone = next(found for found in map(bson.decode, events) if is_erased(found))
    with (
        tailrace.connect(replica_set.uri, archive=root) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        first, last = (ClusterTime.from_timestamp(bson.decode(events[n])["clusterTime"]) for n in (0, -1))
        patch.setattr(MongodSource, "oldest", lambda self: (ClusterTime(last - 1), False))
        watched = client[collection.database.name][collection.name]
        with pytest.raises(TailraceError) as caught, watched.watch(resume_after=gone["_id"]) as stream:
            stream.next()
        assert caught.value.code == 280
        patch.setattr(MongodSource, "oldest", lambda self: (first, False))
        # Across the seam, where both archive and oplog have the entries that were erased.
        with watched.watch(start_at_operation_time=start) as stream:
            assert [stream.next()["_id"] for _ in without(events)] == [
                bson.decode(one)["_id"] for one in without(events)
            ]
            collection.insert_one({"_id": "live"})
            assert stream.next()["documentKey"] == {"_id": "live"}
        images = {"full_document_before_change": "exact", "start_at_operation_time": start}
        with (
            tailrace.connect(replica_set.uri, archive=root, images=tmp_path / "images") as exact,
            pytest.raises(TailraceError, match="were erased"),
            exact[collection.database.name][collection.name].watch(**images) as stream,
        ):
            stream.next()
    # The writer goes on, even if the last entry that it wrote was erased.
    collection.insert_one({"_id": 5, "who": WHO})
    archive(collection, root)
    collection.delete_one({"_id": 5})
    archive(collection, root)
    assert erase(collection, root, of=5) == 0
    collection.insert_one({"_id": 6})
    archive(collection, root)
    assert verify(root)[0].faults == []
    assert traces(root, WHO.encode()) == []


def test_a_table_of_a_time_whose_changes_were_erased_is_refused(
    collection: Any, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """Before, the table had the document as it was before the erased changes."""
    settings = TableSettings(tmp_path / "t", (TableRule(collection.full_name),))
    root = tmp_path / "archive"
    archive(collection, root)

    def now() -> ClusterTime:
        return ClusterTime.from_timestamp(collection.database.command("ping")["operationTime"])

    def follow() -> None:
        with TablesWriter(replica_set.uri, settings) as writer:
            writer.run_to_present(now())

    collection.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}])
    follow()
    collection.update_one({"_id": 2}, {"$set": {"n": 1}})
    before = now()
    collection.update_one({"_id": 1}, {"$set": {"n": 1}})
    between = now()
    collection.delete_one({"_id": 1})
    after = now()
    collection.insert_one({"_id": 3})
    follow()
    end = now()
    archive(collection, root)
    assert as_of(tmp_path / "t", collection.full_name, between, archive=root).rows.num_rows == 2
    assert erase(collection, root) == 0
    assert as_of(tmp_path / "t", collection.full_name, before, archive=root).rows.num_rows == 2
    for moment in (between, after):
        with pytest.raises(UsageError, match="were erased from the archive"):
            as_of(tmp_path / "t", collection.full_name, moment, archive=root)
    assert as_of(tmp_path / "t", collection.full_name, end, archive=root).rows.num_rows == 2


def ended_at(number: int) -> Callable[[str], None]:
    left = iter(range(number))

    def observe(name: str) -> None:
        if name.startswith("archive") and next(left, None) is None:
            raise KeyboardInterrupt

    return observe


def test_an_archive_in_an_object_store(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each step in turn, until it comes to its end: the archive is whole each time."""
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    state = tmp_path / "state"
    root = object_store.place(prefix, state)
    archive(collection, root)
    start = collection.database.command("ping")["operationTime"]
    live_through(collection)
    events = servers_own(collection, start)
    archive(collection, root)
    where = object_store.uri(prefix)
    assert erase(collection, where) == 1  # no --state
    assert erase(collection, where, "--state", str(tmp_path / "other")) == 1  # another one's
    assert events_of(root, collection, start) == events
    for number in range(1, 40):
        durable.observe_steps(ended_at(number))
        try:
            status = erase(collection, where, "--state", str(state))
        finally:
            durable.observe_steps(None)
        assert verify(root)[0].faults == []
        if status != 130:
            break
        assert without(events_of(root, collection, start)) == without(events)
    assert status == 0
    assert number > 4
    assert events_of(root, collection, start) == without(events)
    written = tmp_path / "copy"
    for name, content in held_in(root).items():
        (written / name).parent.mkdir(parents=True, exist_ok=True)
        (written / name).write_bytes(content)
    assert traces(written, WHO.encode()) == []
    assert SECRET not in str(sorted(held_in(root)))
    collection.insert_one({"_id": 7})
    archive(collection, root)
    assert verify(root)[0].faults == []


def test_what_holds_nothing_of_the_documents_is_left_alone(collection: Any, tmp_path: Path) -> None:
    """Nothing is rewritten for documents that an archive does not hold."""
    archive(collection, tmp_path / "archive")
    live_through(collection)
    archive(collection, tmp_path / "archive")
    assert erase(collection, tmp_path / "archive", of=99) == 0
    assert_equal(tmp_path / "archive", collection)
