"""Resume tokens against a running mongod: the bytes of every ``_id`` in its own stream, and its parse errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import BulkWriteError, OperationFailure

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken, encode_event_token
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tests.property import random_values
from tests.unit.test_resume_token import REFUSED

pytestmark = pytest.mark.mongod

RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)  # nothing inside an event is decoded


def insert_random_ids(client: MongoClient[Any], database: str, seed: int, count: int) -> ClusterTime:
    """Insert documents with random ``_id``s of every type; the cluster time before the first. Equal ones are dropped by
    the unique index."""
    rng = random.Random(seed)
    before = client.admin.command("ping")["operationTime"]
    collection = client[database]["ids"]
    for _ in range(0, count, 1000):
        documents = []
        for _ in range(min(1000, count)):
            type_, value = random_values.value(rng)
            documents.append(RawBSONDocument(raw_bson.encode_document(raw_bson.encode_element(type_, b"_id", value))))
        try:
            collection.insert_many(documents, ordered=False)
        except BulkWriteError as error:  # equal to one before: 1 and 1.0, null and null
            if any(failed["code"] != 11000 for failed in error.details["writeErrors"]):
                raise
    return ClusterTime.from_timestamp(before)


def native_events(client: MongoClient[Any], database: str, after: ClusterTime, **options: Any) -> Iterator[bytes]:
    """The server's own events of a database's collection ``ids``, from ``after`` to the first empty batch."""
    collection = client[database].get_collection("ids", codec_options=RAW)
    stage = {"$changeStream": {"startAtOperationTime": after.tick().to_timestamp()}}
    with collection.aggregate([stage], batchSize=5000, **options) as cursor:
        while (event := cursor.try_next()) is not None:
            yield bytes(event.raw)


def asking_for(version: int, server: str) -> dict[str, bool]:
    """What a command must contain so that the server's stream has tokens of this version. 7.0 writes those of version 2
    and refuses to be asked for them; the others are asked for where test commands are on."""
    series = int(server.partition(".")[0])
    if version == (2 if series >= 7 else 1):
        return {}
    if series < 6:
        pytest.skip(f"{server} has no tokens of version 2")
    return {"$_generateV2ResumeTokens": version == 2}


def token_differences(events: Iterator[bytes], version: int) -> tuple[int, list[str]]:
    """How many events there were, and the tokens that we do not make of their parts or do not read back to them."""
    seen, different = 0, []
    for event in events:
        seen += 1
        theirs = field(event, b"_id")
        key = field(event, b"documentKey")
        operation = raw_bson.find(event, b"operationType")
        assert operation is not None
        kind = raw_bson.read_string(event, operation.value_start)
        identifier = key if version == 1 else v2_identifier(kind, key)
        parsed = ResumeToken.parse(theirs)
        ours = encode_event_token(
            ClusterTime.from_bytes_le(field(event, b"clusterTime")),
            version=version,
            txn_op_index=0,
            from_invalidate=False,
            uuid=parsed.uuid,
            identifier=identifier,
        )
        if ours != theirs or canonical(parsed.event_identifier) != canonical(identifier):
            different.append(f"{key.hex()}: ours {ours.hex()} theirs {theirs.hex()}")
    return seen, different


def canonical(identifier: bytes | None) -> str:
    """Keys keep no NaN payloads and no invalid encodings: identifiers are compared by key bytes and type bits."""
    token = ResumeToken(0, version=1, event_identifier=identifier)
    return f"{token.data} {token.type_bits!r}"


def field(event: bytes, name: bytes) -> bytes:
    element = raw_bson.find(event, name)
    assert element is not None
    return raw_bson.value(event, element)


def v2_identifier(kind: bytes, key: bytes) -> bytes:
    return raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.STRING, b"operationType", raw_bson.encode_string(kind)),
        raw_bson.encode_element(raw_bson.OBJECT, b"documentKey", key),
    )


@pytest.mark.parametrize("version", [1, 2])
def test_tokens_of_random_ids_equal_the_servers(replica_set: ReplicaSet, version: int) -> None:
    # The server's duplicate key errors may also contain dates of any year.
    with MongoClient(replica_set.uri, datetime_conversion="DATETIME_AUTO") as client:
        database = f"tokens_live_{version}"
        before = insert_random_ids(client, database, seed=version, count=4000)
        options = asking_for(version, replica_set.version)
        seen, different = token_differences(native_events(client, database, before, **options), version)
        assert seen == client[database]["ids"].estimated_document_count() > 2500
    assert different == []


def test_a_running_mongod_refuses_bad_tokens_with_the_same_codes_and_words(replica_set: ReplicaSet) -> None:
    with MongoClient(replica_set.uri) as client:
        collection = client["tokens_live_refused"]["ids"]
        collection.insert_one({})
        for document, code, message in REFUSED:
            with pytest.raises(OperationFailure) as refused:
                collection.aggregate([{"$changeStream": {"resumeAfter": document}}])
            assert (refused.value.code, (refused.value.details or {})["errmsg"]) == (code, message), document
