"""A schema and the query that is made of it are true of the same documents: random schemas, random documents."""

from __future__ import annotations

import random
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.expression.match.schema_query import as_query
from tailrace.core.expression.match.test import document_test
from tests.amounts import amount

SEED = 20261126
_NAMES = ("a", "b", "c", "")
_VALUES: tuple[Any, ...] = (
    0,
    1,
    2.5,
    -3,
    "",
    "a",
    "bbb",
    None,
    True,
    [],
    [1],
    [1, 1],
    ["a", 2],
    {},
    {"a": 1},
    {"b": "a"},
)
_TYPES = ("object", "array", "string", "number", "null", ["string", "array"], ["number", "object"])
_BSON_TYPES = ("int", "double", ["int", "double", "long", "decimal"], ["int", "string"])


def a_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    def inner() -> dict[str, Any]:
        return a_schema(rng, depth - 1) if depth else {}

    keywords = {
        "type": lambda: rng.choice(_TYPES),
        "bsonType": lambda: rng.choice(_BSON_TYPES),
        "enum": lambda: [rng.choice(_VALUES)],
        "minimum": lambda: rng.choice((0, 1)),
        "maximum": lambda: rng.choice((0, 2)),
        "multipleOf": lambda: 2,
        "minLength": lambda: 1,
        "maxLength": lambda: 2,
        "pattern": lambda: "^a",
        "minItems": lambda: 1,
        "maxItems": lambda: 1,
        "uniqueItems": lambda: rng.random() < 0.7,
        "items": lambda: inner() if rng.random() < 0.5 else [inner() for _ in range(rng.randrange(3))],
        "additionalItems": lambda: rng.choice((True, False, {"type": "string"})),
        "minProperties": lambda: 1,
        "maxProperties": lambda: 2,
        "required": lambda: rng.sample(_NAMES, rng.randint(1, 3)),
        "properties": lambda: {name: inner() for name in rng.sample(_NAMES, rng.randint(1, 3))},
        "patternProperties": lambda: {"^a": inner()},
        "additionalProperties": lambda: rng.choice((True, False, inner())),
        "dependencies": lambda: {rng.choice(_NAMES): rng.choice((["b"], inner()))},
        "allOf": lambda: [inner() for _ in range(rng.randint(1, 2))],
        "anyOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "oneOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "not": inner,
    }
    chosen = rng.sample(sorted(keywords), rng.randint(1, 3)) + rng.choices(("properties", "required"), k=depth)
    found = {name: keywords[name]() for name in dict.fromkeys(chosen)}
    if "type" in found:
        found.pop("bsonType", None)
    return found


@pytest.mark.long
def test_a_schema_and_its_query_are_true_of_the_same_documents() -> None:
    rng = random.Random(SEED)
    seen = {True: 0, False: 0}
    for _ in range(amount(1_500, 20_000)):
        match = {"$jsonSchema": a_schema(rng, 3)}
        if rng.random() < 0.2:
            match = {"$nor": [match, {"c": 7}]}
        parsed = compile_stages([bson.encode({"$match": match})]).stages[0].parsed
        schema = document_test(parsed)  # type: ignore[arg-type]
        query = document_test(as_query(parsed))  # type: ignore[arg-type]
        for _ in range(12):
            names = rng.sample(("a", "b", "c"), rng.randint(0, 3))
            document = {name: rng.choice(_VALUES) for name in names}
            raw = bson.encode(document)
            expected = schema(raw)
            assert query(raw) is expected, (match, document)
            seen[expected] += 1
    assert min(seen.values()) > 1_000
