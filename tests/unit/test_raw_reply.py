"""Replies of the server taken apart without decoding what is in them."""

from __future__ import annotations

import bson
import pymongo
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import raw_bson
from tailrace.embedded import ReplicaSet
from tailrace.errors import OplogFormatError
from tailrace.source.raw_reply import RawReplyCursor, unpacked


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 99, 100, 101, 1000, 1001, 12_345])
@pytest.mark.parametrize("name", ["firstBatch", "nextBatch"])
def test_a_batch_comes_as_one_run_of_bytes_and_the_rest_decoded(count: int, name: str) -> None:
    documents = [{"_id": number, "x": "y" * (number % 7)} for number in range(count)]
    rest = {"id": 5, "ns": "local.oplog.rs", "postBatchResumeToken": {"ts": bson.Timestamp(1, 2)}}
    reply = {"cursor": {name: documents, **rest}, "ok": 1.0, "operationTime": bson.Timestamp(3, 4)}
    run = b"".join(map(bson.encode, documents))
    expected = {"cursor": {**rest, name: [run] if run else []}, "ok": 1.0, "operationTime": bson.Timestamp(3, 4)}
    assert unpacked(bson.encode(reply)) == expected


@pytest.mark.parametrize(
    "reply",
    [{"ok": 0.0, "code": 43, "errmsg": "cursor id 5 not found"}, {"cursor": 3, "ok": 1.0}, {"cursor": {}, "ok": 1.0}],
)
def test_a_reply_without_a_batch_is_decoded(reply: dict[str, object]) -> None:
    assert unpacked(bson.encode(reply)) == reply


@given(st.data())
def test_damage_is_an_error_and_never_a_crash(data: st.DataObject) -> None:
    array = bytearray(bson.encode({str(number): {"a": number} for number in range(12)}))
    for _ in range(data.draw(st.integers(1, 3))):
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.integers(0, 255))
    try:
        run = raw_bson.array_documents(bytes(array), 0)
    except OplogFormatError:
        return
    assert len(run) <= len(array)


@pytest.mark.mongod
@pytest.mark.parametrize("batch_size", [0, 1, 7])
def test_a_live_cursor_gives_what_pymongos_own_gives(replica_set: ReplicaSet, batch_size: int) -> None:
    with pymongo.MongoClient(replica_set.uri) as client:
        collection = client["raw_reply"]["c"]
        collection.drop()
        collection.insert_many([{"_id": number, "pad": "x" * (number % 300)} for number in range(250)])
        plain = list(collection.find_raw_batches({}, sort=[("_id", 1)], batch_size=batch_size))
        ours = list(RawReplyCursor(collection, {}, sort=[("_id", 1)], batch_size=batch_size))
        assert ours == plain
        assert b"".join(ours) == b"".join(bson.encode(document) for document in collection.find(sort=[("_id", 1)]))
        with pytest.raises(pymongo.errors.OperationFailure) as caught:
            list(RawReplyCursor(collection, {"$nonsense": 1}))
        assert caught.value.code == 2
        client.drop_database("raw_reply")
