"""Which parts of a ``$match`` may be evaluated before a stage or a look-up ahead of it, according to what the server
moves."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.plan.conjuncts import FULL_DOCUMENT, Conjunct, leading_conjuncts

_AHEAD = bson.encode({"$set": {"z": 1}})


def conjuncts(match: dict[str, Any], *, moves_array_tests: bool, ahead: tuple[bytes, ...] = ()) -> tuple[Conjunct, ...]:
    pipeline = compile_stages([*ahead, bson.encode({"$match": match})])
    return leading_conjuncts(pipeline, moves_array_tests=moves_array_tests)


def moved(match: dict[str, Any], *, moves_array_tests: bool) -> list[list[str]]:
    """The fields of each part that is evaluated before a stage that sets another field, and before the look-ups."""
    found = conjuncts(match, moves_array_tests=moves_array_tests, ahead=(_AHEAD,))
    assert all(one.passes_stages_of(frozenset((FULL_DOCUMENT,))) for one in found)
    return sorted(sorted(name.decode() for name in one.fields or ()) for one in found)


def schema(**keywords: Any) -> dict[str, Any]:
    return {"$jsonSchema": keywords}


@pytest.mark.parametrize(
    ("match", "before", "since"),
    [
        ({"x": {"$size": 1}}, [], [["x"]]),
        ({"x": {"$elemMatch": {"a": 1}}}, [], [["x"]]),
        ({"x": {"$elemMatch": {"$gt": 1}}}, [], [["x"]]),
        ({"x": {"$not": {"$size": 1}}}, [], [["x"]]),
        ({"$or": [{"x": {"$size": 1}}, {"y": 1}]}, [], [["x", "y"]]),
        ({"x": {"$size": 1}, "y": 1}, [["y"]], [["x"], ["y"]]),
        ({"z": {"$size": 1}}, [], []),
        ({"$alwaysFalse": 1}, [], []),
        (schema(required=["x", "y", "z"]), [["x"], ["y"]], [["x"], ["y"]]),
        (schema(properties={"x": {"type": "array"}, "y": {"enum": [1]}}), [["y"]], [["x"], ["y"]]),
        (schema(required=["x"], properties={"x": {"minItems": 1}}), [["x"]], [["x"], ["x"]]),
        (schema(required=["x"], properties={"x": {"type": "string", "maxLength": 1}}), [["x"]] * 3, [["x"]] * 4),
        (schema(required=["x"], properties={"x": {"minProperties": 1}}, maxProperties=3), [["x"]], [["x"]]),
        (schema(anyOf=[{"required": ["x"]}, {"required": ["y"]}]), [["x", "y"]], [["x", "y"]]),
        (schema(oneOf=[{"required": ["x"]}, {"required": ["y"]}]), [["x", "y"]], [["x", "y"]]),
        (schema(oneOf=[{"required": ["x"]}, {"properties": {"y": {"type": "array"}}}]), [], [["x", "y"]]),
        (schema(dependencies={"x": ["y"]}), [], []),
        (schema(required=[""]), [], []),
    ],
)
def test_what_is_moved_is_the_version_s(match: dict[str, Any], before: list[Any], since: list[Any]) -> None:
    assert moved(match, moves_array_tests=False) == before
    assert moved(match, moves_array_tests=True) == since


@pytest.mark.parametrize("keywords", [{"enum": [1]}, {"minLength": 3}, {"maxLength": 3}, {"multipleOf": 2}])
def test_what_a_schema_asks_of_a_single_value_is_moved_on_all_versions(keywords: dict[str, Any]) -> None:
    """A stream that does not move such a part looks up documents that the server does not, and may fail at one
    (measured in tests/differential/test_moved_matches_live.py). Before 7.0 a test of the type stays, so the schema
    states the type: without it, both would be one part. ``make mutants`` found that no test without a server noticed
    when ``minLength`` or ``multipleOf`` was left out."""
    types = {} if "enum" in keywords else {"type": "number" if "multipleOf" in keywords else "string"}
    match = schema(required=["x"], properties={"x": {**types, **keywords}})
    parts = [["x"]] * (3 if types else 2)
    assert moved(match, moves_array_tests=False) == parts
    assert moved(match, moves_array_tests=True) == parts + [["x"]] * len(types)


@pytest.mark.parametrize(
    "keywords",
    [
        {"type": "array"},
        {"bsonType": "array"},
        {"minItems": 1},
        {"maxItems": 1},
        {"uniqueItems": True},
        {"items": {"type": "object"}},
        {"items": [{}], "additionalItems": False},
    ],
)
def test_what_a_schema_asks_of_a_whole_array_is_moved_since_7_0(keywords: dict[str, Any]) -> None:
    match = schema(required=["x"], properties={"x": keywords})
    assert moved(match, moves_array_tests=False) == [["x"]]
    assert moved(match, moves_array_tests=True) == [["x"]] * (1 + len(keywords))


@pytest.mark.parametrize(
    ("match", "asked"),
    [
        ({"documentKey": {"$size": 0}}, True),
        (schema(required=["lsid"], properties={"lsid": {"type": "object"}}), True),
        (schema(properties={"clusterTime": {"bsonType": "timestamp"}}), True),
        (schema(properties={"documentKey": {"type": "object"}}), False),
        (schema(properties={"lsid": {"oneOf": [{"type": "object"}, {"enum": [1]}]}}), False),
        (schema(dependencies={"lsid": ["txnNumber"]}), False),
        (schema(properties={"wallTime": {"type": "object"}}), False),
    ],
)
def test_what_stays_may_still_be_asked_by_the_oplog_query(match: dict[str, Any], asked: bool) -> None:
    found = conjuncts(match, moves_array_tests=False)
    assert all(one.passes_stages_of(frozenset((FULL_DOCUMENT,))) for one in found) is asked
