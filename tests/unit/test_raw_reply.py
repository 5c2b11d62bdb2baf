"""Replies of the server taken apart without decoding what is in them."""

from __future__ import annotations

import bson
import pymongo
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core import raw_bson
from tailrace.core.kernel import reply
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.embedded import ReplicaSet
from tailrace.errors import OplogFormatError
from tailrace.read.source.batch import cut
from tailrace.read.source.raw_reply import RawReplyCursor, unpacked


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


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 99, 100, 101, 1000, 1001, 12_345])
def test_compiled_code_moves_the_same_bytes_together(count: int) -> None:
    documents = [{"_id": number, "x": "y" * (number % 7)} for number in range(count)]
    array = bson.encode({str(number): document for number, document in enumerate(documents)})
    run = b"".join(map(bson.encode, documents))
    assert reply.array_documents(b"before" + array, 6) == raw_bson.array_documents(array, 0) == run


def test_compiled_code_finds_the_last_entry() -> None:
    entries = [bson.encode({"ts": bson.Timestamp(5, number), "x": "y" * (number % 7)}) for number in range(300)]
    run = b"".join(entries)
    assert reply.last_document(run) == len(run) - len(entries[-1])
    assert list(cut(run, len(run))) == [(OplogBatch(run, ClusterTime.of(5, 299)), entries[-1])]
    assert reply.last_document(run[:-1]) is None
    with pytest.raises(OplogFormatError):
        list(cut(run[:-1], len(run)))


@given(st.data())
def test_damage_is_an_error_and_never_a_crash(data: st.DataObject) -> None:
    array = bytearray(bson.encode({str(number): {"a": number} for number in range(12)}))
    for _ in range(data.draw(st.integers(1, 3))):
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.integers(0, 255))
    try:
        compiled = reply.array_documents(bytes(array), 0)
        run = raw_bson.array_documents(bytes(array), 0)
    except OplogFormatError:
        return
    assert len(run) <= len(array)
    assert compiled in (None, run)


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
