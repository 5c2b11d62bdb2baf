"""Which of the user's operators compiled code answers by itself.

The other tests compare answers, and answers from the plain code are right too, at twenty times the cost: so they would
not notice if an operator were no longer compiled.
"""

from __future__ import annotations

from typing import Any

import bson
import numpy as np
import pytest

from tailrace.core.expression import CompiledPipeline, compile_stages
from tailrace.core.kernel.plain_match import PlainMatch
from tailrace.core.kernel.project_program import FAILS, PASSES
from tailrace.core.kernel.user_stages import compile_user_stages

DOCUMENT = {
    "n": 5,
    "flags": 20,
    "text": "paid",
    "empty": None,
    "inner": {"path": 7, "list": [1, 2, 3]},
    "list": [2, 4, 6],
    "lines": [{"sku": "a", "count": 1}, {"sku": "b", "count": 3}],
}
QUERIES: list[dict[str, Any]] = [
    *({"fullDocument.n": {operator: 5}} for operator in ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")),
    {"fullDocument.text": {"$in": ["new", "paid"]}},
    {"fullDocument.text": {"$nin": ["new", "paid"]}},
    {"fullDocument.inner.path": {"$exists": True}},
    {"fullDocument.nothing": {"$exists": False}},
    {"fullDocument.inner": {"$type": "object"}},
    {"$and": [{"fullDocument.n": 5}, {"fullDocument.text": "paid"}]},
    {"$or": [{"fullDocument.n": 6}, {"fullDocument.text": "paid"}]},
    {"$nor": [{"fullDocument.n": 6}, {"fullDocument.text": "new"}]},
    {"fullDocument.n": {"$not": {"$gt": 6}}},
    {"fullDocument.lines": {"$elemMatch": {"sku": "b", "count": {"$gt": 2}}}},
    {"fullDocument.list": {"$elemMatch": {"$gt": 3, "$lt": 5}}},
    {"fullDocument.list": {"$size": 3}},
    {"fullDocument.list": {"$all": [2, 6]}},
    {"fullDocument.n": {"$mod": [3, 2]}},
    {"fullDocument.flags": {"$bitsAllSet": 20}},
    {"fullDocument.flags": {"$bitsAnySet": [2, 9]}},
    {"fullDocument.flags": {"$bitsAllClear": 3}},
    {"fullDocument.flags": {"$bitsAnyClear": [0, 2]}},
    {"fullDocument.lines.sku": "b"},
    {"fullDocument.lines.1.count": 3},
    {"fullDocument.inner": {"path": 7, "list": [1, 2, 3]}},
    {"fullDocument.empty": None},
    *({"$expr": {operator: ["$fullDocument.n", 5]}} for operator in ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")),
    {"$expr": {"$and": [{"$eq": ["$fullDocument.text", "paid"]}, {"$not": [{"$lt": ["$fullDocument.n", 1]}]}]}},
    {"$expr": {"$or": [{"$in": ["$operationType", ["insert"]]}, "$fullDocument.inner.path"]}},
    {"$expr": {"$eq": ["$fullDocument.lines.sku", ["a", "b"]]}},
]
STAGES: list[dict[str, Any]] = [
    {"$project": {"operationType": 1, "fullDocument.inner.path": 1, "fullDocument.lines.sku": 1}},
    {"$project": {"fullDocument.list": 0, "fullDocument.lines.count": 0}},
    {"$unset": ["fullDocument.text", "ns", "fullDocument.inner.list"]},
    {"$set": {"source": "shop", "fullDocument.copy": "$fullDocument.inner.path", "whole": "$fullDocument.inner"}},
    {"$addFields": {"fullDocument.n": 6, "kind": {"$literal": "$text"}}},
    {"$replaceRoot": {"newRoot": "$fullDocument"}},
    {"$replaceWith": "$fullDocument.inner"},
]


def events() -> list[bytes]:
    return [
        bson.encode(
            {
                "_id": {"_data": "8263"},
                "operationType": "insert",
                "ns": {"db": "shop", "coll": "orders"},
                "fullDocument": {"_id": number, **DOCUMENT},
                "documentKey": {"_id": number},
            }
        )
        for number in range(3)
    ]


@pytest.mark.parametrize(
    "stages", [*([{"$match": query}] for query in QUERIES), *([stage] for stage in STAGES)], ids=str
)
def test_it_is_compiled_and_nothing_is_left_to_the_plain_code(
    stages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    user = compile_stages([bson.encode(stage) for stage in stages])
    expected = [user.apply(event) for event in events()]
    compiled = compile_user_stages(user)
    assert compiled is not None
    assert compiled.compiled == 1
    assert not any(isinstance(step.program, PlainMatch) for step in compiled._steps)

    def asked(*_: object) -> None:
        raise AssertionError("the plain code is asked")

    monkeypatch.setattr(CompiledPipeline, "apply_rest", asked)
    buffer, offsets = np.frombuffer(b"".join(events()), np.uint8), np.cumsum([0, *map(len, events())])
    made = compiled.run(buffer, offsets, None, None)
    assert set(made.verdict.tolist()) <= {FAILS, PASSES}, "left to the plain stages"
    given = [made.buffer[low:high].tobytes() for low, high in zip(made.offsets, made.offsets[1:], strict=False)]
    got = [event if passes else None for event, passes in zip(given, made.verdict == PASSES, strict=True)]
    assert got == expected
