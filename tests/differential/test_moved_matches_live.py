"""Which parts of a ``$match`` are evaluated before the stages ahead of it, compared with servers of four versions. A
``$set`` fails for every event unless the match is evaluated before it, and so does a look-up under a name that has
become a view's.

Why no test had caught what 7.0 does: the random workloads put a ``$match`` on a whole array after a stage that fails,
or before such a look-up, once in many hundreds of streams, and nearly all of them ran on 6.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tests.differential.compare import Bench, Case
from tests.differential.execute import note
from tests.differential.ours import SourceOplog, read_into_memory
from tests.differential.wire import Wire
from tests.server_in_use import major

pytestmark = pytest.mark.mongod

_DATABASE = "moved"
_FAILS = {"$set": {"z": {"$strLenCP": "$nothing"}}}
_VERSIONS = [
    "6.0.27",
    pytest.param("5.0.4", marks=pytest.mark.slow),
    pytest.param("4.4.2", marks=pytest.mark.slow),
    pytest.param("7.0.28", marks=pytest.mark.slow),
]


class Workload(NamedTuple):
    """The two sides, and where a stream over all of the workload begins."""

    bench: Bench
    begin: dict[str, Any]
    moves_array_tests: bool


@pytest.fixture(scope="module", params=_VERSIONS)
def workload(request: pytest.FixtureRequest) -> Iterator[Workload]:
    version = request.param
    with ExitStack() as own:
        if version == "6.0.27":
            running = request.getfixturevalue("replica_set")
        else:
            running = own.enter_context(ReplicaSet(1, version=version))
        source = MongodSource(running.uri)
        own.callback(source.close)
        wire = own.enter_context(Wire.to(running.uri))
        start = note(wire, "an update of what is a view later")
        for command in (
            {"create": "other"},
            {"insert": "c0", "documents": [{"_id": 0}]},
            {"update": "c0", "updates": [{"q": {"_id": 0}, "u": {"$set": {"a": 5}}}]},
            {"drop": "c0"},
            {"create": "c0", "viewOn": "other", "pipeline": []},
        ):
            wire.run(_DATABASE, command)
        end = note(wire, "it is one now")
        bench = Bench(wire, read_into_memory(wire, source, start, end), SourceOplog(source), version, end)
        yield Workload(bench, {"startAtOperationTime": start.to_timestamp()}, major(version) >= 7)
        wire.run(_DATABASE, {"dropDatabase": 1})


def _schema(**keywords: Any) -> dict[str, Any]:
    return {"$jsonSchema": keywords}


def _of_x(*, required: bool = True, **keywords: Any) -> dict[str, Any]:
    return _schema(properties={"x": keywords}, **({"required": ["x"]} if required else {}))


def _of_ns(**keywords: Any) -> dict[str, Any]:
    """A schema of ``ns``, which every event has, so that its own parts alone decide."""
    return _schema(required=["ns"], properties={"ns": keywords})


def _of_operation(**keywords: Any) -> dict[str, Any]:
    """The same of ``operationType``, which is always a text, so that the text's length decides and not its type."""
    return _schema(required=["operationType"], properties={"operationType": keywords})


#: Matches that no event passes, and which versions evaluate the deciding part early: "all", "7.0" or "none".
_MATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "$size": ({"x": {"$size": 1}}, "7.0"),
    "$elemMatch of documents": ({"x": {"$elemMatch": {"a": 1}}}, "7.0"),
    "$elemMatch of values": ({"x": {"$elemMatch": {"$eq": 1}}}, "7.0"),
    "$all of $elemMatch": ({"x": {"$all": [{"$elemMatch": {"a": 1}}]}}, "7.0"),
    "a negated one": ({"$nor": [{"x": {"$not": {"$size": 1}}}]}, "7.0"),
    "inside $or": ({"$or": [{"x": {"$size": 1}}, {"y": 1}]}, "7.0"),
    "beside a plain test": ({"ns": {"$size": 1}, "y": 1}, "all"),
    "$type": ({"x": {"$type": "array"}}, "all"),
    "nothing passes": ({"$alwaysFalse": 1}, "none"),
    "required": (_schema(required=["x"]), "all"),
    "required and what stays": (_of_x(type="object", minProperties=1), "all"),
    "required, negated": ({"$nor": [_schema(required=["ns"])]}, "all"),
    "required inside $or": ({"$or": [_schema(required=["x"]), {"y": 1}]}, "all"),
    "type": (_of_ns(type="array"), "7.0"),
    "type of what may be missing": (_schema(properties={"ns": {"bsonType": "int"}}), "7.0"),
    "enum": (_of_ns(enum=[1, "a"]), "all"),
    "enum of what may be missing": (_schema(properties={"ns": {"enum": [1]}}), "all"),
    "enum of the document": (_schema(enum=[{"a": 1}]), "none"),
    "maximum of a number": (_of_ns(type="number", maximum=3), "all"),
    "maximum of one type": (_of_ns(bsonType="int", maximum=3, exclusiveMaximum=True), "all"),
    "maximum of several types": (_of_ns(bsonType=["int", "double", "long", "decimal"], maximum=3), "7.0"),
    "maximum of a text": (_of_ns(type="string", maximum=3), "7.0"),
    "minLength of a text": (_of_ns(type="string", minLength=3), "all"),
    "minLength alone": (_of_operation(type="string", minLength=99), "all"),
    "maxLength alone": (_of_operation(type="string", maxLength=1), "all"),
    "not maxLength": (_of_ns(**{"not": {"maxLength": 3}}), "7.0"),
    "not multipleOf": (_of_ns(**{"not": {"multipleOf": 3}}), "7.0"),
    "pattern of a text": (_of_ns(type="string", pattern="^a"), "all"),
    "multipleOf of a number": (_of_ns(bsonType="double", multipleOf=3), "all"),
    "minItems": (_of_ns(type="array", minItems=1), "7.0"),
    "not minItems": (_of_ns(**{"not": {"minItems": 1}}), "7.0"),
    "not maxItems": (_of_ns(**{"not": {"maxItems": 1}}), "7.0"),
    "not additionalItems": (_of_ns(**{"not": {"items": [{}], "additionalItems": False}}), "7.0"),
    "uniqueItems": (_of_ns(type="array", uniqueItems=True), "7.0"),
    "items": (_of_ns(type="array", items={"type": "object", "required": ["a"]}), "7.0"),
    "a list of items": (_of_ns(type="array", items=[{}], additionalItems=False), "7.0"),
    "minProperties": (_of_ns(minProperties=9), "none"),
    "minProperties of a text": (_of_ns(type="string", minProperties=9), "7.0"),
    "maxProperties": (_of_ns(maxProperties=0), "none"),
    "additionalProperties": (_of_ns(additionalProperties=False), "none"),
    "patternProperties": (_of_ns(patternProperties={"^d": {"type": "array"}}), "none"),
    "nested properties": (_of_ns(properties={"db": {"enum": [1]}}), "none"),
    "nested required": (_of_ns(required=["nope"]), "none"),
    "nested dependencies": (_of_ns(dependencies={"db": ["nope"]}), "none"),
    "minProperties of the document": (_schema(minProperties=99), "none"),
    "maxProperties of the document": (_schema(maxProperties=1), "none"),
    "additionalProperties of the document": (_schema(additionalProperties=False), "none"),
    "patternProperties of the document": (_schema(patternProperties={"^ns": {"type": "array"}}), "none"),
    "dependencies": (_schema(dependencies={"ns": ["nope"]}), "none"),
    "allOf": (_schema(allOf=[{"minProperties": 1}, {"required": ["x"]}]), "all"),
    "anyOf": (_schema(anyOf=[{"required": ["x"]}, {"required": ["y"]}]), "all"),
    "anyOf that is one": (_schema(anyOf=[{"required": ["x"]}, {"type": "array"}]), "all"),
    "anyOf with a type": (_schema(anyOf=[{"required": ["x"]}, _of_ns(type="array")["$jsonSchema"]]), "7.0"),
    "oneOf": (_schema(oneOf=[{"required": ["x"]}, {"required": ["y"]}]), "all"),
    "oneOf with a type": (_schema(oneOf=[{"required": ["x"]}, _of_ns(type="array")["$jsonSchema"]]), "7.0"),
    "oneOf that can be false": (_schema(oneOf=[{"required": ["x"]}, {"type": "array"}]), "none"),
    "not": (_schema(**{"not": {"required": ["ns"]}}), "all"),
    "not of a type": (_of_ns(**{"not": {"type": "object"}}), "7.0"),
    "not of what is nested": (_of_ns(**{"not": {"required": ["db"]}}), "none"),
    "allOf of a field": (_of_ns(allOf=[{"minProperties": 1}, {"enum": [1]}]), "all"),
    "anyOf of a field": (_of_ns(anyOf=[{"enum": [1]}, {"type": "array"}]), "7.0"),
    "oneOf of a field": (_of_ns(oneOf=[{"enum": [1]}, {"enum": [2]}]), "all"),
}


@pytest.mark.parametrize("name", _MATCHES)
def test_a_match_is_asked_before_what_fails_where_the_servers_is(workload: Workload, name: str) -> None:
    match, moved = _MATCHES[name]
    early = moved == "all" or (moved == "7.0" and workload.moves_array_tests)
    stage = {**workload.begin, "fullDocument": "updateLookup"}
    for pipeline in (({"$match": match},), (_FAILS, {"$match": match})):
        result = workload.bench.compare(Case((_DATABASE, None), stage, pipeline=pipeline))
        assert result.difference is None
    assert bool(result.errors_met) is not early


@pytest.mark.parametrize(
    ("ahead", "moved"),
    [
        ({"$project": {"x": 1, "z": _FAILS["$set"]["z"]}}, True),
        ({"$project": {"y": 1, "z": _FAILS["$set"]["z"]}}, False),
        ({"$addFields": {"y": 1, **_FAILS["$set"]}}, True),
        ({"$addFields": {"x": 1, **_FAILS["$set"]}}, False),
        ({"$replaceWith": {"x": _FAILS["$set"]["z"]}}, False),
    ],
)
@pytest.mark.parametrize("match", [{"x": {"$size": 3}}, _of_x(type="array")])
def test_a_test_of_an_array_passes_the_stages_that_leave_its_field_alone(
    workload: Workload, match: dict[str, Any], ahead: dict[str, Any], moved: bool
) -> None:
    case = Case((_DATABASE, None), workload.begin, pipeline=(ahead, {"$match": match}))
    result = workload.bench.compare(case)
    assert result.difference is None
    early = moved and (workload.moves_array_tests or "$jsonSchema" in match)
    assert bool(result.errors_met) is not early
