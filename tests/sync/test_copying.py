"""The copy, from real servers to real servers: every byte, through kills, beside writers, by one owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.act.sync.copying import Copy
from tailrace.act.sync.ownership import own
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet
from tailrace.read.snapshot.reader import places_of

RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
SETTINGS = SyncSettings(selection=Selection.of(["shop.*"]), lease_s=10)


def begun(source: Any, target: MongoClient[Any], settings: SyncSettings = SETTINGS) -> SyncState:
    state = SyncState(target, settings)
    state.begin(places_of(source, 10).now(), members={}, witness=None)
    return state


def copied(source: Any, target: MongoClient[Any], settings: SyncSettings = SETTINGS) -> SyncState:
    """A whole copy, in this process."""
    state = begun(source, target, settings)
    with own(state, lanes=5) as ownership:
        assert Copy(source, state, ownership, settings).run()
    return state


def stored(client: MongoClient[Any], namespace: str) -> list[bytes]:
    """The documents in the order of ``_id``, as they are stored."""
    database, _, name = namespace.partition(".")
    found = client.get_database(database, codec_options=RAW)[name].find({}).hint([("_id", 1)])
    return [bytes(one.raw) for one in found]


def odd_documents(version: str) -> Iterator[bytes]:
    """Documents that a careless copy would change."""
    yield bson.encode({"_id": Timestamp(0, 0), "a": Timestamp(0, 0)})
    yield bson.encode({"_id": 1, "t": Timestamp(0, 0), "u": {"t": Timestamp(0, 0)}, "v": [Timestamp(0, 0)]})
    yield bson.encode({"_id": 2, "": Timestamp(0, 0), "z": 0.0})
    yield bson.encode({"_id": 3.5, "b": float("nan"), "a": 1, "long": bson.Int64(1), "int": 1, "double": 1.0})
    yield bson.encode({"_id": float("nan")})
    yield bson.encode({"_id": bson.MinKey()})
    yield bson.encode({"_id": bson.MaxKey(), "n": None})
    yield bson.encode({"_id": None, "d": bson.Decimal128("1E-5")})
    yield bson.encode({"_id": {"b": 1, "a": [1, {"c": 2}]}, "code": bson.Code("x", {"a": 1})})
    yield bson.encode({"_id": "text", "s": "x" * 100_000})
    once = bson.encode({"_id": 5, "a": 1})[4:-1] + bson.encode({"a": 2})[4:-1]
    yield len(once + b"12345").to_bytes(4, "little") + once + b"\0"
    yield bson.encode({"_id": 6, "s": "\x01"}).replace(b"\x01\x00\x00", b"\xff\x00\x00")
    if version != "4.4.2":
        yield bson.encode({"_id": 7, "$set": {"a": 1}, "a.b": 1, "t": Timestamp(0, 0)})
    size = 16 * 1024 * 1024 - len(bson.encode({"_id": 8, "s": ""}))
    yield bson.encode({"_id": 8, "s": "x" * size})
    yield bson.encode({"_id": 9, "s": "y" * size})


def put(client: MongoClient[Any], namespace: str, documents: list[bytes]) -> None:
    """Store documents as they are. An insert puts the time into Timestamps of 0; a pipeline does not."""
    database, _, name = namespace.partition(".")
    there = client[database]
    for one in documents:
        if len(one) < 1 << 20:
            query = {"_id": {"$eq": bson.decode(one, CodecOptions(unicode_decode_error_handler="replace"))["_id"]}}
            pipeline = [{"$replaceWith": {"$literal": RawBSONDocument(one)}}]
            updates: dict[str, Any] = {"updates": [{"q": query, "u": pipeline, "upsert": True}]}
            reply = there.command({"update": name, **updates, "bypassDocumentValidation": True})
        else:
            documents_ = {"documents": [RawBSONDocument(one)], "bypassDocumentValidation": True}
            reply = there.command({"insert": name, **documents_})
        assert "writeErrors" not in reply, reply


@pytest.mark.parametrize("version", ["6.0.27", "5.0.4", "4.4.2", "7.0.28"])
def test_every_byte_of_odd_documents_arrives(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    source = MongoClient(start_replica_set(version=version).uri)
    target = MongoClient(start_replica_set(version=version).uri)
    documents = list(odd_documents(version))
    for name in ("plain", "collated", "validated"):
        options = {"collated": {"collation": {"locale": "de", "strength": 1}}, "validated": {"validator": {"no": 1}}}
        source.shop.create_collection(name, **options.get(name, {}))
        put(source, f"shop.{name}", documents if name == "plain" else documents[:-2])

    copied(source, target)

    assert sorted(stored(source, "shop.plain")) == sorted(documents)
    for name in ("plain", "collated", "validated"):
        assert stored(target, f"shop.{name}") == stored(source, f"shop.{name}")
