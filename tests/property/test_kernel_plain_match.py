"""A ``$match`` without a program: plain code tests the values that compiled code finds."""

from __future__ import annotations

import random
from typing import Any

import bson
import numpy as np
import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.expression import compile_stages
from tailrace.core.kernel.plain_match import PlainMatch
from tailrace.core.kernel.project_program import FAILS, NOT_KNOWN, PASSES
from tailrace.core.kernel.user_stages import compile_user_stages
from tailrace.errors import TailraceError
from tests.property import random_values
from tests.property.test_kernel_events import PlainStages, plan_of, random_run

SEED = 41
QUERIES: list[dict[str, Any]] = [
    {path: {"$regex": pattern, "$options": options}}
    for path in ("a", "b.c", "a.b", "a.b.c", "s.0", "a.", "né", "", ".a")
    for pattern, options in (("[a-m]+", "i"), ("^.?x*$", ""), ("", "s"), ("(a|b)+?", "m"))
]
QUERIES += [
    {"$expr": {"$gt": [{"$add": ["$a", "$b.c"]}, 1]}},
    {"$expr": {"$add": ["$a.b.c", 0]}},
    {"$expr": {"$concat": ["$a", "$s"]}},
    {"$expr": {"$size": "$a"}},
    {"$expr": {"$toLong": "$a.b"}},
    {"$expr": {"$regexMatch": {"input": {"$ifNull": ["$s", ""]}, "regex": "[a-c]"}}},
    {"$expr": {"$mod": [{"$strLenBytes": {"$toString": "$_id"}}, 2]}},
    {"$expr": {"$isArray": ["$a"]}},
    {"$expr": {"$gt": [{"$bsonSize": "$$ROOT"}, 40]}},
]


def documents(count: int) -> list[bytes]:
    """Random ones whose fields the queries name, of every type, inside documents and arrays; an empty run stays out."""
    rng = random.Random(SEED)
    names = (b"a", b"b", b"c", b"s", "né".encode(), b"0", b"", b"_id")

    def made(depth: int) -> bytes:
        parts = []
        for _ in range(rng.randrange(5)):
            name = rng.choice(names)
            if depth < 3 and rng.random() < 0.5:
                parts.append(rb.encode_element(rng.choice((rb.OBJECT, rb.ARRAY)), name, made(depth + 1)))
            else:
                kind, value = random_values.value(rng)
                parts.append(rb.encode_element(kind, name, value))
        return rb.encode_document(*parts)

    return [made(0) for _ in range(count)]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_the_answer_is_that_of_the_reference(query: dict[str, Any]) -> None:
    user = compile_stages([bson.encode({"$match": query})])
    stages = compile_user_stages(user)
    assert stages is not None
    given = documents(400)
    given.insert(7, b"")
    offsets = np.cumsum([0] + [len(document) for document in given])
    staged = stages.run(np.frombuffer(b"".join(given), np.uint8), offsets, None, None)
    for document, verdict in zip(given, staged.verdict.tolist(), strict=True):
        try:
            expected = PASSES if document and user.apply_rest(document, 0) is not None else FAILS
        except TailraceError:
            expected = NOT_KNOWN
        assert verdict == expected, document.hex()


@pytest.mark.parametrize(
    "stages",
    [
        [{"$match": {"ns.coll": {"$regex": "^[a-o]+"}}}, {"$project": {"fullDocument": 0}}],
        [
            {"$set": {"fullDocument.note": "$ns.coll", "ns": {"db": "x"}}},
            {"$match": {"fullDocument.note": {"$regex": "d.r"}}},
        ],
        [{"$unset": ["ns.db", "wallTime"]}, {"$match": {"$expr": {"$gt": [{"$size": {"$objectToArray": "$ns"}}, 0]}}}],
        [{"$match": {"$expr": {"$add": ["$fullDocument.a", 1]}}}, {"$set": {"seen": True}}],
    ],
    ids=str,
)
def test_stages_around_it_stay_compiled(stages: list[dict[str, Any]]) -> None:
    plain = PlainStages(plan_of(None)[0])
    events = [event for entry in random_run(SEED, 600) for event in plain.events(entry) or []]
    user = compile_stages([bson.encode(stage) for stage in stages])
    made = compile_user_stages(user)
    assert made is not None
    assert made.compiled == len(stages)
    assert any(isinstance(step.program, PlainMatch) for step in made._steps)
    offsets = np.cumsum([0] + [len(event) for event in events])
    tokens = [rb.find(event, b"_id") for event in events]
    start = np.array([token.value_start for token in tokens if token is not None]) + offsets[:-1]
    end = np.array([token.end for token in tokens if token is not None]) + offsets[:-1]
    staged = made.run(np.frombuffer(b"".join(events), np.uint8), offsets, start, end)
    passed = 0
    for index, event in enumerate(events):
        try:
            expected = user.apply(event)
        except TailraceError:
            assert staged.verdict[index] == NOT_KNOWN
            continue
        if staged.verdict[index] != NOT_KNOWN:
            got = staged.buffer[staged.offsets[index] : staged.offsets[index + 1]].tobytes()
            assert (got if staged.verdict[index] == PASSES else None) == expected
            passed += expected is not None
    assert passed
