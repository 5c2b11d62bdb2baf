"""Which parts of a ``$match`` may be asked before a stage or a look-up ahead of it, by what the server moves."""

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
    """The fields of each part that is asked before a stage that sets another field, and before the look-ups."""
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
