"""Current documents (``updateLookup``) of a real server: found as the server compares keys, many by one query."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import bson
import numpy as np
import pytest
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from tailrace.core.event.image import CollectionLookups, DocumentRuns
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import AnswerTooLargeError, DocumentLookup
from tailrace.embedded import ReplicaSet
from tailrace.errors import ServerError
from tailrace.read.source import lookup
from tailrace.read.source.mongod import MongodSource

pytestmark = pytest.mark.mongod


class Commands(CommandListener):
    """The names of the commands that a client sends."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.names.append(event.command_name)

    def succeeded(self, event: CommandSucceededEvent) -> None: ...

    def failed(self, event: CommandFailedEvent) -> None: ...


def in_bulk(database: str, name: str, ids: list[Any], now: ClusterTime) -> CollectionLookups:
    """Look-ups as the kernel makes them: the keys in one buffer."""
    documents = [bson.encode({"_id": key}) for key in ids]
    ends = np.cumsum([len(document) for document in documents])
    starts = ends - [len(document) for document in documents]
    runs = DocumentRuns(np.frombuffer(b"".join(documents), np.uint8), starts, ends)
    return CollectionLookups(database, name, runs, np.full(len(ids), int(now), np.uint64), None)


def test_current_documents_are_found_as_the_server_compares_keys(replica_set: ReplicaSet) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        database = source.client.source_documents
        keys = [1, 2.0, bson.Int64(3), "a", bson.ObjectId(), {"a": 1, "b": [1.5]}, Timestamp(1, 1), True, b"x", None]
        database.c.insert_many([{"_id": key, "n": number} for number, key in enumerate(keys)])
        database.create_collection("loose", collation={"locale": "en", "strength": 2})
        database.loose.insert_one({"_id": "A"})
        database.c.insert_many([{"_id": f"many{number}"} for number in range(1100)])
        now = source.newest()

        def asked_for(key: Any, name: str = "c", uuid: bytes | None = None) -> DocumentLookup:
            return DocumentLookup("source_documents", name, bson.encode({"_id": key}), now, uuid)

        found = source.documents([asked_for(key) for key in reversed(keys)])
        assert [bson.decode(document)["n"] for document in found if document] == list(reversed(range(len(keys))))
        # other types that compare equal: alone, and beside the exact one
        assert [bool(each) for each in source.documents([asked_for(1.0)])] == [True]
        assert [
            bool(each) for each in source.documents([asked_for(2), asked_for(2.0), asked_for(1), asked_for(7)])
        ] == [
            *(True, True, True),
            False,
        ]
        assert [bool(each) for each in source.documents([asked_for("a", "loose"), asked_for("A", "loose")])] == [
            True,
            True,
        ]
        assert source.documents([asked_for(1, "absent"), asked_for("missing")]) == [None, None]
        many = source.documents([asked_for(f"many{number}") for number in range(1100)])
        assert [bson.decode(each)["_id"] for each in many if each] == [f"many{number}" for number in range(1100)]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param([1, 2, 9, 1], id="one type"),
        pytest.param([1, 2.0, 3], id="numbers"),
        pytest.param([3.0, 9.0], id="equal to another type"),
        pytest.param(["a", "missing", True, b"x", None], id="by bytes"),
        pytest.param([{"a": 1, "b": [1.5]}, {"a": 1.0, "b": [1.5]}], id="documents"),
    ],
)
@pytest.mark.parametrize("name", ["c", "loose", "absent", "a..b"])
def test_a_look_up_in_bulk_finds_what_single_ones_find(replica_set: ReplicaSet, name: str, asked: list[Any]) -> None:
    """The kernel's requests hold their keys in one buffer, and are answered in compiled code where bytes decide."""
    with closing(MongodSource(replica_set.uri)) as source:
        database = source.client.source_bulk
        if not database.list_collection_names():
            database.create_collection("loose", collation={"locale": "en", "strength": 2})
            keys = [1, 2.0, bson.Int64(3), "A", {"a": 1, "b": [1.5]}, True, b"x", None]
            for collection in ("c", "loose"):
                database[collection].insert_many([{"_id": key, "n": number} for number, key in enumerate(keys)])
            database.command("insert", "a..b", documents=[{"_id": 1}, {"_id": "a"}])
        lookups = in_bulk("source_bulk", name, asked, source.newest())
        assert list(source.documents(lookups)) == list(source.documents(list(lookups)))
        assert any(source.documents(lookups)) or name in ("absent", "a..b")


@pytest.mark.parametrize("key", [int, float, str, lambda number: {"_id": number}])
def test_a_look_up_in_bulk_that_finds_too_much_is_given_up(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch, key: Callable[[int], Any]
) -> None:
    """With keys that are compared by their bytes and with others. No test had documents that grow."""
    monkeypatch.setattr(lookup, "_FOUND_BYTES_MAX", 10_000)
    with closing(MongodSource(replica_set.uri)) as source:
        collection = source.client.source_too_much.c
        collection.drop()
        collection.insert_many([{"_id": key(number), "text": "x" * 1_000} for number in range(20)])
        few, many = (
            in_bulk("source_too_much", "c", [key(number) for number in range(count)], source.newest())
            for count in (9, 20)
        )
        assert all(source.documents(few))
        with pytest.raises(AnswerTooLargeError):
            source.documents(many)
        assert all(source.documents(list(many)))  # callers other than the kernel are answered


def test_current_documents_of_another_collection_under_the_name_are_none_when_the_uuid_is_given(
    replica_set: ReplicaSet,
) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        database = source.client.source_uuid
        database.c.insert_one({"_id": 1})
        uuid = next(database.list_collections(filter={"name": "c"}))["info"]["uuid"]
        key, now = bson.encode({"_id": 1}), source.newest()
        known = DocumentLookup("source_uuid", "c", key, now, bytes(getattr(uuid, "bytes", uuid)))
        other = DocumentLookup("source_uuid", "c", key, now, b"\x01" * 16)
        anyone = DocumentLookup("source_uuid", "c", key, now, None)
        assert [bool(each) for each in source.documents([known, other, anyone])] == [True, False, True]
        database.command("create", "v", viewOn="c", pipeline=[])
        with pytest.raises(ServerError, match=r"Namespace source_uuid\.v is a view, not a collection") as caught:
            source.documents([DocumentLookup("source_uuid", "v", key, now, None)])
        assert caught.value.code == 166


def test_keys_with_shard_key_fields_find_their_document(replica_set: ReplicaSet) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        database = source.client.source_shard_keys
        database.c.insert_many([{"_id": 1, "x": {"$y": 5}}, {"_id": 2, "x": 7}])
        now = source.newest()
        keys = [{"x": {"$y": 5}, "_id": 1}, {"x": 7, "_id": 2}, {"x": 8, "_id": 2}]
        lookups = [DocumentLookup("source_shard_keys", "c", bson.encode(key), now, None) for key in keys]
        assert [bool(each) for each in source.documents(lookups)] == [True, True, False]


def test_keys_with_shard_key_fields_are_looked_up_together(replica_set: ReplicaSet) -> None:
    """The result is as if the server compared single keys, but with one query if their bytes decide. Each look-up was
    once a query of its own, and no test counted them: a stream of updates on a cluster gave a few hundred events a
    second."""
    found: list[Any] = [
        {"_id": 1, "x": "a", "y": {"z": 1}},
        {"_id": 2, "x": 7.0, "y": {"z": 2}},
        {"_id": 3, "y": {"z": 3}},
        {"_id": 4, "x": 4, "y": [{"z": 4}]},
        {"_id": 5.0, "x": 5, "y": {"z": 5}},
        {"_id": bson.MinKey(), "x": bson.MaxKey(), "y.z": 6, "y": {"z": 6}},
        *({"_id": f"many{number}", "x": number, "y": {"z": {"a": number}}} for number in range(4100)),
    ]
    in_bytes = [{"x": each["x"], "y.z": each["y"]["z"], "_id": each["_id"]} for each in [found[0], *found[6:]]]
    others: list[Any] = [
        {"x": 7, "_id": 2},  # 7.0
        {"x": 7, "_id": 2.0, "y.z": 2},
        {"x": None, "_id": 3},  # the document has no such field
        {"x": 1, "_id": 3},
        {"y.z": 4, "_id": 4},  # in an array
        {"x": 5, "_id": 5},
        {"x": 6, "_id": 5},
        {"x": bson.MaxKey(), "y.z": 6, "_id": bson.MinKey()},
        {"x": "b", "_id": 1},
        {"x": "a", "_id": "nobody"},
        {"_id": 1},
        {"x": "a"},  # no _id
    ]
    commands = Commands()
    with (
        MongoClient[Any](replica_set.uri, event_listeners=[commands]) as client,
        closing(MongodSource(client)) as source,
    ):
        collection = client.source_sharded_bulk.c
        collection.insert_many(found)
        now = source.newest()

        def looked_up(keys: list[Any]) -> list[Any]:
            lookups = [DocumentLookup("source_sharded_bulk", "c", bson.encode(key), now, None) for key in keys]
            return [document and bson.decode(document) for document in source.documents(lookups)]

        single = [collection.find_one({name: {"$eq": value} for name, value in key.items()}) for key in others]
        assert looked_up(others) == [looked_up([key])[0] for key in others] == single
        assert [each is None for each in single] == [key in others[3:4] + others[6:7] + others[8:10] for key in others]
        commands.names.clear()
        assert looked_up([*in_bytes, *others[9:10]]) == [found[0], *found[6:], None]
        assert commands.names == ["listCollections", "find", "find"]
