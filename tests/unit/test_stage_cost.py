"""Which stages are plain, so that the gateway carries them out itself. Stages that may compute for long never are."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bson
import pytest

from tailrace.core import raw_bson
from tailrace.core.cursor import OplogRead
from tailrace.core.event.image import FoundDocuments
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.watch.gateway.cost import cost_of
from tailrace.watch.gateway.local_acting import LocalActing, size_of
from tailrace.watch.gateway.reading import INLINE_BYTES


def cost(*stages: dict[str, Any], **others: Any) -> Any:
    pipeline = [{"$changeStream": {}}, *stages]
    return cost_of(bson.encode({"aggregate": "c", "pipeline": pipeline, "cursor": {}, **others}))


def match(query: dict[str, Any]) -> Any:
    return cost({"$match": query})


PLAIN = [
    [],
    [{"$match": {"operationType": "insert"}}],
    [{"$match": {"operationType": {"$in": ["insert", "delete"]}, "ns.coll": {"$ne": "a"}}}],
    [{"$match": {"$or": [{"a": 1}, {"$and": [{"b": {"$gt": 1, "$lt": 9}}, {"c": {"$not": {"$exists": True}}}]}]}}],
    [{"$match": {"fullDocument.a": {"b": 1}}}, {"$project": {"_id": 1, "a": {"b": 1}, "c.d": True}}],
    [{"$unset": ["a", "b"]}, {"$changeStreamSplitLargeEvent": {}}],
]
NOT_PLAIN = [
    [{"$match": {"$expr": {"$gt": [1, 2]}}}],
    [{"$match": {"$and": [{"a": 1}, {"$expr": 1}]}}],
    [{"$match": {"a": bson.Regex("(a+)+b")}}],
    [{"$match": {"a": {"$regex": "(a+)+b"}}}],
    [{"$match": {"a": {"$in": [bson.Regex("(a+)+b")]}}}],
    [{"$match": {"a": {"$all": [{"$elemMatch": {"b": bson.Regex("(a+)+b")}}]}}}],
    [{"$match": {"a": {"$not": bson.Regex("(a+)+b")}}}],
    [{"$match": {"a": {"$not": {"$regex": "(a+)+b"}}}}],
    [{"$match": {"a": {"$gt": 1, "$elemMatch": {"b": 1}}}}],
    [{"$match": {"$jsonSchema": {}}}],
    [{"$match": {"a.0.0": 1}}],
    [{"$match": {"$nor": [{"a.0.0": 1}]}}],
    [{"$project": {"a": "$b"}}],
    [{"$project": {"a": {"b": {"$add": [1, 2]}}}}],
    [{"$set": {"a": 1}}],
    [{"$replaceRoot": {"newRoot": "$a"}}],
    [{"$redact": "$$KEEP"}],
    [{"$match": {f"a{number}": 1 for number in range(65)}}],
    [{"$match": {"a": {"$in": list(range(3000))}}}],
    [{"$match": {"a": 1}}, {"$addFields": {"b": 1}}],
]


@pytest.mark.parametrize("stages", PLAIN, ids=str)
def test_plain_stages_are_known(stages: list[dict[str, Any]]) -> None:
    assert cost(*stages).is_plain


@pytest.mark.parametrize("stages", NOT_PLAIN, ids=lambda stages: str(stages)[:60])
def test_what_may_compute_is_not_plain(stages: list[dict[str, Any]]) -> None:
    assert not cost(*stages).is_plain


def test_variables_and_collations_are_computed_too() -> None:
    assert not cost(let={"a": {"$range": [0, 3_000_000]}}).is_plain
    assert not cost(collation={"locale": "de"}).is_plain


def test_deep_nesting_is_not_plain() -> None:
    query: dict[str, Any] = {"a": 1}
    shape: dict[str, Any] = {"a": 1}
    negated: dict[str, Any] = {"$gt": 1}
    for _ in range(80):
        query, shape, negated = {"$and": [query]}, {"a": shape}, {"$not": negated}
    assert not match(query).is_plain
    assert not match({"a": negated}).is_plain
    assert not cost({"$project": shape}).is_plain


def test_what_is_no_command_is_plain() -> None:
    assert cost_of(bson.encode({"aggregate": "c"})).is_plain
    assert cost_of(bson.encode({"aggregate": "c", "pipeline": 1})).is_plain
    assert cost_of(bson.encode({"aggregate": "c", "pipeline": [1, 2]})).is_plain
    damaged = bytearray(bson.encode({"aggregate": "c", "pipeline": [{"$changeStream": {}}, {"$match": {"a": "b"}}]}))
    damaged[-14] = 0x7E
    assert cost_of(bytes(damaged)).is_plain


def test_a_want_of_memory_is_not_taken_for_damage() -> None:
    """It was expanded: a document inside a pipeline may contain markers that are not BSON."""
    error = MemoryError()
    assert raw_bson.explained([b"damaged"], error) is error


def test_fields_weigh() -> None:
    assert match({"a": 1}).weight == 1
    assert match({f"a{number}": 1 for number in range(40)}).weight == 11


@pytest.mark.parametrize(("size", "weight", "aside"), [(INLINE_BYTES, 1, False), (INLINE_BYTES // 4, 5, True)])
def test_many_fields_send_a_small_batch_into_a_thread(size: int, weight: int, *, aside: bool) -> None:
    """Before, only the number of bytes decided."""

    def acting() -> Any:
        yield threading.get_ident()

    async def advanced(pool: ThreadPoolExecutor) -> Any:
        return await LocalActing(acting(), pool, weight).advance(size, None, None)

    with ThreadPoolExecutor(1) as pool:
        assert (asyncio.run(advanced(pool)) != threading.get_ident()) == aside


def test_images_in_one_buffer_have_a_size() -> None:
    """They counted as nothing, so any number of them was processed in the event loop."""
    assert size_of(FoundDocuments.of([b"abc", None, b"de"])) == 5
    assert size_of([b"abc", None]) == 3
    assert size_of(OplogRead(OplogBatch(b"abcd", ClusterTime(1)), True, 0)) == 4
    assert size_of(None) == 0


def test_the_digest_is_of_the_stages_and_not_of_the_start() -> None:
    stages = [{"$match": {"a": 1}}]

    def of(start: dict[str, Any], *then: dict[str, Any], **others: Any) -> bytes:
        pipeline = [{"$changeStream": start}, *then]
        digest: bytes = cost_of(bson.encode({"aggregate": "c", "pipeline": pipeline, **others})).digest
        return digest

    assert of({}, *stages) == of({"resumeAfter": {"_data": "82"}}, *stages)
    assert of({}, *stages) != of({}, {"$match": {"a": 2}})
    assert of({}, *stages) != of({}, *stages, let={"a": 1})
