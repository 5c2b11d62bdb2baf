"""The kernel's ``$match`` beside the reference: the same answer, or none; and streams with a ``$match`` through it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import bson
import numpy as np
import pytest
from bson.errors import InvalidBSON
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.errors import UsageError
from tailrace.expression import compile_stages
from tailrace.expression.language.expression import Bindings
from tailrace.expression.match.parse import parse_match
from tailrace.expression.match.test import document_test
from tailrace.kernel.fast_path import process_batch
from tailrace.kernel.match import FAILS, PASSES, UNKNOWN
from tailrace.kernel.match_program import match_program
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.pipeline.shard import ChangeStreamPipeline
from tailrace.plan.request import OplogBatch
from tailrace.source.drive import drive_blocks, drive_by
from tests.differential.event_predicates import EventPredicates
from tests.property import random_values
from tests.property.guard_page import GuardedBuffer
from tests.property.test_kernel_events import no_answer
from tests.property.test_pushdown import CASES, events_of, match_of, plan_of, random_run

SEED = 20261123
GUARDED = GuardedBuffer(1 << 20)


def answers_to(query: dict[str, Any] | bytes, documents: list[bytes]) -> Counter[int]:
    """Ask both; gives how often each answer came."""
    raw = query if isinstance(query, bytes) else bson.encode(query)
    node = parse_match(raw, Bindings.of_document({}))
    program = match_program(node)
    if program is None:
        return Counter()
    reference = document_test(node)
    offsets = np.cumsum([0] + [len(document) for document in documents])
    answers = program.answers(b"".join(documents), offsets).tolist()
    for document, answer in zip(documents, answers, strict=True):
        assert answer == UNKNOWN or answer == reference(document), (bson.decode(raw), document.hex())
    return Counter(answers)


def test_random_queries_on_random_documents_have_the_answer_of_the_reference_or_none() -> None:
    rng = random.Random(SEED)
    documents = [random_values.document(rng) for _ in range(300)]
    predicates = EventPredicates(rng, documents)
    counted: Counter[int] = Counter()
    for _ in range(600):
        query = predicates.query()
        try:
            compile_stages([bson.encode({"$match": RawBSONDocument(query)})])
        except UsageError:
            continue  # what the server refuses is no query
        counted += answers_to(query, documents)
    assert counted[PASSES] > 5_000
    assert counted[FAILS] > 20_000


NUMBERS = [
    0, 1, -1, 2**31 - 1, -(2**31), Int64(2**53), Int64(2**53 + 1), Int64(2**63 - 1), Int64(-(2**63)), 0.0, -0.0, 0.5,
    -0.5, 1.0, float(2**53), float(2**53 + 2), float(2**63), -float(2**63), 1e300, -1e300, float("inf"), float("-inf"),
    float("nan"), 9007199254740993.0, bson.Decimal128("1"), bson.Decimal128("NaN"),
]  # fmt: skip
VALUES: list[Any] = [
    *NUMBERS, None, True, False, "", "a", "ab", "b", "é", "a\0b", bson.ObjectId(bytes(12)), bson.ObjectId(b"\xff" * 12),
    bson.Timestamp(1, 2), bson.Timestamp(2**32 - 1, 0), bson.datetime_ms.DatetimeMS(-5), bson.datetime_ms.DatetimeMS(5),
    {}, {"a": 1}, {"b": {"c": 1}}, [], [1, "a"], [[1]], bson.MinKey(), bson.MaxKey(), bson.Binary(b"a"),
    bson.Regex("a"), bson.Code("a"),
]  # fmt: skip


@pytest.mark.parametrize("operator", ["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"])
def test_every_value_is_compared_with_every_other_as_the_reference_does(operator: str) -> None:
    documents = [bson.encode({"x": value}) for value in VALUES]
    documents += [bson.encode({"x": {"y": value}}) for value in VALUES] + [bson.encode({"z": 1})]
    counted: Counter[int] = Counter()
    for value in VALUES:
        if operator != "$eq" and isinstance(value, bson.Regex):
            continue
        for path in ("x", "x.y", "x.y.z"):
            counted += answers_to({path: {operator: value}}, documents)
    assert counted[UNKNOWN] < counted[PASSES] + counted[FAILS]


def test_lists_of_values_existence_and_types() -> None:
    documents = [bson.encode({"x": value, "y": {"x": value}}) for value in VALUES] + [bson.encode({})]
    some = [value for value in VALUES if not isinstance(value, dict | list | bson.Regex | bson.MinKey | bson.MaxKey)]
    for path in ("x", "y.x", "y.x.z", "n"):
        for test in ({"$in": some[:5]}, {"$in": some}, {"$nin": ["a", None]}, {"$in": []}, {"$exists": True}):
            answers_to({path: test}, documents)
        for kind in (*range(1, 20), -1, 127):
            answers_to({path: {"$type": kind}}, documents)
        assert answers_to({path: {"$exists": False}}, documents)[UNKNOWN] <= 3, "arrays on the way"


def test_what_is_unknown_does_not_matter_where_the_rest_decides() -> None:
    documents = [bson.encode({"x": [1], "y": 1}), bson.encode({"x": [1], "y": 2})]
    assert answers_to({"x": 1, "y": 2}, documents) == Counter({FAILS: 1, UNKNOWN: 1})
    assert answers_to({"$or": [{"x": 1}, {"y": 2}]}, documents) == Counter({PASSES: 1, UNKNOWN: 1})
    assert answers_to({"$nor": [{"x": 1}, {"y": 2}]}, documents) == Counter({FAILS: 1, UNKNOWN: 1})


def test_what_could_fail_or_never_decides_has_no_program() -> None:
    for query in ({"$expr": {"$eq": ["$x", 1]}}, {"x": {"$regex": "a"}}, {"x": {"$elemMatch": {"y": 1}}}, {"": 1}):
        assert match_program(parse_match(bson.encode(query), Bindings.of_document({}))) is None


def test_a_damaged_document_is_answered_as_by_the_reference_or_not_at_all() -> None:
    rng = random.Random(SEED)
    sample = bson.encode({"a": 1, "b": {"c": "text", "d": 2.5}, "e": bson.ObjectId(bytes(12))})
    node = parse_match(bson.encode({"b.c": "text", "e": {"$gte": bson.ObjectId(bytes(12))}}), Bindings.of_document({}))
    program, reference = match_program(node), document_test(node)
    assert program is not None
    for place in range(len(sample)):
        for new in rng.randbytes(16):
            damaged = sample[:place] + bytes([new]) + sample[place + 1 :]
            answer = int(program.answers(GUARDED.place(damaged), np.array([0, len(damaged)]))[0])
            try:
                bson.decode(damaged)
            except InvalidBSON:
                continue  # an answer without a read outside the document is all that is asked
            assert answer in (UNKNOWN, reference(damaged)), damaged.hex()


@pytest.mark.parametrize("case", [case for case in CASES if not case[2]], ids=lambda case: f"{case[0]} {case[1].name}")
def test_a_stream_with_a_match_gives_the_same_events_and_token_through_the_kernel(case: Any) -> None:
    scope, profile, options = case
    plain = plan_of(scope, profile, options)
    # One bad entry ends a stream: only those that give events or nothing.
    entries = [raw for raw in random_run(SEED, 400) if events_of(plain, raw) is not None]
    given = [event for raw in entries for event in events_of(plain, raw) or ()]
    predicates = EventPredicates(random.Random(SEED), given)
    batch = OplogBatch(b"".join(entries), ClusterTime.of(9, 0))
    passed = 0
    for _ in range(40):
        plan = plan_of(scope, profile, options, match_of(predicates))
        one, other = (ChangeStreamPipeline(plan, mid_stream=True) for _ in range(2))
        wanted = [event.to_bson() for events in drive_by(one.process(batch), no_answer) for event in events]
        got = [event for block in drive_blocks(process_batch(other, batch), no_answer) for event in block.events()]
        assert got == wanted
        assert other.resume_token.to_bson() == one.resume_token.to_bson()
        passed += len(got)
    assert passed > 40
