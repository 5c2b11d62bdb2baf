"""The kernel's ``$match`` compared with the reference: the same answer, or none; and whole streams with a
``$match``."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import partial
from typing import Any

import bson
import numpy as np
import pytest
from bson.errors import InvalidBSON
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.expression import compile_stages
from tailrace.core.expression.language.expression import Bindings
from tailrace.core.expression.match.parse import parse_match
from tailrace.core.expression.match.test import document_test
from tailrace.core.expression.values import value as v
from tailrace.core.kernel.fast_path import process_batch
from tailrace.core.kernel.match_program import match_program
from tailrace.core.kernel.match_test import FAILS, PASSES, UNKNOWN
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import UsageError
from tests.amounts import amount
from tests.differential.event_predicates import EventPredicates
from tests.differential.expression_grammar import Grammar
from tests.differential.expression_predicates import query
from tests.differential.expression_values import any_value, whole_document
from tests.property import random_values
from tests.property.guard_page import GuardedBuffer
from tests.property.test_kernel_events import no_answer
from tests.property.test_pushdown import CASES, events_of, match_of, plan_of, random_run
from tests.property.working import drive_blocks, drive_by

SEED = 20261123
GUARDED = GuardedBuffer(1 << 20)
BINDINGS = Bindings.of_document({"REMOVE": None})


def answers_to(query: dict[str, Any] | bytes, documents: list[bytes]) -> Counter[int]:
    """Ask both. Returns how often each answer came."""
    raw = query if isinstance(query, bytes) else bson.encode(query)
    node = parse_match(raw, BINDINGS)
    program = match_program(node)
    if program is None:
        return Counter()
    reference = document_test(node)
    offsets = np.cumsum([0] + [len(document) for document in documents])
    answers = program.answers(GUARDED.place(b"".join(documents)), offsets).tolist()
    for document, answer in zip(documents, answers, strict=True):
        assert answer == UNKNOWN or answer == reference(document), (raw.hex(), document.hex())
    return Counter(answers)


def test_random_queries_on_random_documents_have_the_answer_of_the_reference_or_none() -> None:
    rng = random.Random(SEED)
    documents = [random_values.document(rng) for _ in range(300)]
    predicates = EventPredicates(rng, documents)
    counted: Counter[int] = Counter()
    queries = amount(120, 600)
    for _ in range(queries):
        asked_for = predicates.query()
        try:
            compile_stages([bson.encode({"$match": RawBSONDocument(asked_for)})])
        except UsageError:
            continue  # what the server refuses is no query
        counted += answers_to(asked_for, documents)
    assert counted[PASSES] > 8 * queries
    assert counted[FAILS] > 33 * queries


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
    assert counted[UNKNOWN] == 0


def test_lists_of_values_existence_and_types() -> None:
    documents = [bson.encode({"x": value, "y": {"x": value}}) for value in VALUES] + [bson.encode({})]
    some = [value for value in VALUES if not isinstance(value, dict | list | bson.Regex | bson.MinKey | bson.MaxKey)]
    for path in ("x", "y.x", "y.x.z", "n"):
        for test in ({"$in": some[:5]}, {"$in": some}, {"$nin": ["a", None]}, {"$in": []}, {"$exists": True}):
            answers_to({path: test}, documents)
        for kind in (*range(1, 20), -1, 127):
            answers_to({path: {"$type": kind}}, documents)
        assert answers_to({path: {"$exists": False}}, documents)[UNKNOWN] == 0


def test_what_is_unknown_does_not_matter_where_the_rest_decides() -> None:
    documents = [bson.encode({"x": "a", "y": 1}), bson.encode({"x": "a", "y": 2})]
    unknown = {"x": {"$regex": "a+"}}
    assert answers_to({**unknown, "y": 2}, documents) == Counter({FAILS: 1, UNKNOWN: 1})
    assert answers_to({"$or": [unknown, {"y": 2}]}, documents) == Counter({PASSES: 1, UNKNOWN: 1})
    assert answers_to({"$nor": [unknown, {"y": 2}]}, documents) == Counter({FAILS: 1, UNKNOWN: 1})


def test_what_never_decides_has_no_program() -> None:
    queries: list[dict[str, Any]] = [
        {"$expr": {"$add": ["$x", 1]}},
        {"x": {"$regex": "a+"}},
        {"$jsonSchema": {"minProperties": 1}},
    ]
    for each in queries:
        assert match_program(parse_match(bson.encode(each), BINDINGS)) is None


def test_a_field_without_a_name_is_not_there_for_a_query_or_left_to_the_stage_that_takes_it_out() -> None:
    """If the query names such a field, the stage removes it from what it tests, so a test of the parsed query alone
    would answer differently."""
    documents = [bson.encode(document) for document in ({"x": 1}, {"": 1, "x": 1})]
    for asked_for in ({"": 1}, {"": None}, {"": {"$exists": True}}, {".x": {"$ne": 1}}):
        stage = compile_stages([bson.encode({"$match": asked_for})]).stages[0]
        program = match_program(stage.parsed)  # type: ignore[arg-type]
        assert program is not None
        answers = [int(program.answers(one, np.array([0, len(one)]))[0]) for one in documents]
        assert answers == [stage.apply(documents[0]) is not None, UNKNOWN]


def test_an_expression_that_could_fail_is_only_passed_over_where_the_reference_passes_it_over() -> None:
    """In the reference, an ``$and`` with something false after such an expression still ends in an error."""
    documents = [bson.encode({"x": "text", "y": y}) for y in (1, 2)]
    failing = {"$expr": {"$add": ["$x", 1]}}
    assert answers_to({"y": 2, **failing}, documents[:1]) == Counter({FAILS: 1})
    assert answers_to({"$or": [{"y": 1}, failing]}, documents[:1]) == Counter({PASSES: 1})
    for each in ({"y": 1, **failing}, {**failing, "y": 2}, {"$or": [failing, {"y": 1}]}, {"$nor": [failing, {"y": 1}]}):
        program = match_program(parse_match(bson.encode(each), BINDINGS))
        assert program is not None
        assert program.answers(documents[0], np.array([0, len(documents[0])])).tolist() == [UNKNOWN]


def random_document(rng: random.Random, number: int) -> bytes:
    """A document of the expression fuzz; now and then with names twice, numbers as names, or nested deep."""
    document = whole_document(rng, number)
    roll = rng.random()
    if roll < 0.2:
        fields = [(name, (kind, data)) for name, kind, data in v.fields_of(document)]
        fields += [(rng.choice(fields)[0], any_value(rng)), (rng.choice((b"", b"0", b"a.b", b"$a")), any_value(rng))]
        rng.shuffle(fields)
        return v.object_of(fields)[1]
    if roll < 0.25:
        value = any_value(rng)
        for _ in range(rng.choice((30, 127, 140))):
            value = v.array_of([value]) if rng.random() < 0.2 else v.object_of([(rng.choice((b"a", b"b")), value)])
        return v.object_of([(b"a", value), (b"b", value)])[1]
    return document


def logical_expression(grammar: Grammar) -> v.Value:
    """An expression of comparisons and logic, sometimes of anything."""
    if grammar.rng.random() < 0.2:
        return grammar.top()
    names = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$cmp", "$and", "$or", "$not", "$in", "$ifNull", "$cond")
    return grammar.operator(grammar.rng.choice(names), 2)


def test_random_queries_of_every_operator_have_the_answer_of_the_reference_or_none() -> None:
    """Before this test, arrays on a path, decimals and whole documents occurred only by chance, as events have few of
    them."""
    rng = random.Random(SEED)
    counted: Counter[int] = Counter()
    asked = 0
    rounds = amount(2, 8)
    for _ in range(rounds):
        documents = [random_document(rng, number) for number in range(40)]
        grammar = Grammar(rng)
        for _ in range(120):
            asked_for = query(rng, documents, partial(logical_expression, grammar))[1]
            try:
                compile_stages([bson.encode({"$match": RawBSONDocument(asked_for)})])
            except (UsageError, InvalidBSON):
                continue  # what the server refuses is no query
            counted += answers_to(asked_for, documents)
            asked += len(documents)
    assert counted[PASSES] > 350 * rounds
    assert counted[FAILS] > 3_000 * rounds
    assert counted[PASSES] + counted[FAILS] > 0.93 * asked


def test_every_order_of_two_random_values_is_that_of_the_reference() -> None:
    """Compared as whole values in ``$expr``, inside documents, and by every comparison of a query."""
    rng = random.Random(SEED)
    undecided = 0
    rounds = amount(15, 60)
    for _ in range(rounds):
        chosen = [any_value(rng, 3) for _ in range(12)]
        documents = [v.object_of([(b"x", one), (b"y", other)])[1] for one in chosen for other in chosen]
        for operator in ("$lt", "$eq"):
            undecided += answers_to({"$expr": {operator: ["$x", "$y"]}}, documents)[UNKNOWN]
    assert undecided < 0.02 * rounds * 2 * 144


def test_doubles_are_compared_with_decimals_as_the_reference_does() -> None:
    """When the server compares a double with a decimal, it rounds the double to 34 digits."""
    rng = random.Random(SEED)
    count = amount(12, 30)
    numbers = [random_values.double(rng) for _ in range(count)]
    numbers += [random_values.decimal(rng) for _ in range(count)]
    for kind, data in numbers[:count]:
        number = v.number_of((kind, data))
        if isinstance(number, float) and math.isfinite(number):
            exact = v.DECIMAL_CONTEXT.create_decimal(number)
            numbers += [v.decimal(each) for each in (exact, exact.next_plus(), exact.next_minus())]
    documents = [v.object_of([(b"x", number)])[1] for number in numbers]
    for operator in (b"$eq", b"$gt", b"$lte"):
        for number in numbers:
            answers_to(v.object_of([(b"x", v.object_of([(operator, number)]))])[1], documents)
    answers_to(v.object_of([(b"x", v.object_of([(b"$in", v.array_of(numbers))]))])[1], documents)


def test_texts_and_beginnings_are_found_as_the_reference_finds_them() -> None:
    texts = [
        b"",
        b"a",
        b"ab.c",
        b"xab.c",
        b"abxc",
        "é".encode(),
        b"\xff" + b"ab.c",
        b"a\0b",
        b"ab.c\xc3",
        b"a\n",
        b"a\n\n",
        b"a\r\n",
        b"\n",
        b"ab.c\n",
        b"aa",
        b"a\na",
        b"a\r",
        "a\u2028".encode(),
    ]
    documents = [
        v.object_of([(b"x", (kind, v.string_of(text)[1]))])[1] for text in texts for kind in (v.STRING, v.SYMBOL)
    ]
    documents += [v.object_of([(b"x", (v.REGEX, data))])[1] for data in (b"ab\\.c\0\0", b"a\0i\0")]
    documents += [v.object_of([(b"x", v.array_of([v.string_of(b"zab.c"), v.int32(1)]))])[1]]
    for pattern in ("", "a", "^a", "ab\\.c", "^ab\\.c", "^", "é", "^é", "x]}", "a$", "^a$", "$", "^$", "c$", "é$"):
        for options in ("", "s", "m", "i"):
            counted = answers_to({"x": {"$regex": pattern, "$options": options}}, documents)
            assert options == "i" or (options == "m" and set(pattern) & set("^$")) or counted[UNKNOWN] == 0
        answers_to({"x": {"$in": [1, bson.Regex(pattern)]}}, documents)


def test_a_damaged_document_is_answered_as_by_the_reference_or_not_at_all() -> None:
    rng = random.Random(SEED)
    sample = bson.encode({"a": 1, "b": {"c": "text", "d": 2.5}, "e": bson.ObjectId(bytes(12))})
    node = parse_match(bson.encode({"b.c": "text", "e": {"$gte": bson.ObjectId(bytes(12))}}), BINDINGS)
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


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if not case[2]], ids=lambda case: f"{case[0]} {case[1].name}")
def test_a_stream_with_a_match_gives_the_same_events_and_token_through_the_kernel(case: Any) -> None:
    scope, profile, options = case
    plain = plan_of(scope, profile, options)
    # One bad entry ends a stream, so only entries that give events or nothing are used.
    entries = [raw for raw in random_run(SEED, 400) if events_of(plain, raw) is not None]
    given = [event for raw in entries for event in events_of(plain, raw) or ()]
    predicates = EventPredicates(random.Random(SEED), given)
    batch = OplogBatch(b"".join(entries), ClusterTime.of(9, 0))
    passed = 0
    queries = amount(8, 40)
    for _ in range(queries):
        plan = plan_of(scope, profile, options, match_of(predicates))
        one, other = (ChangeStreamPipeline(plan, mid_stream=True) for _ in range(2))
        wanted = [event.to_bson() for events in drive_by(one.process(batch), no_answer) for event in events]
        got = [event for block in drive_blocks(process_batch(other, batch), no_answer) for event in block.events()]
        assert got == wanted
        assert other.resume_token.to_bson() == one.resume_token.to_bson()
        passed += len(got)
    assert passed > queries
