"""Bad input to the user's pipeline: the server's code, and a message with the place in the pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.errors import ServerError, TailraceError, UsageError

EVENT = bson.encode({"_id": 1, "a": 1, "s": "x", "n": 0, "big": bson.Int64(2**63 - 1)})

BAD_PIPELINES: list[tuple[dict[str, Any], int, str]] = [
    ({"$match": {"a": {"$foo": 1}}}, 2, "pipeline[0].$match.a"),
    ({"$match": {"$where": "1"}}, 2, "pipeline[0].$match.$where"),
    ({"$match": {"$text": {"$search": "x"}}}, 17313, "pipeline[0].$match.$text"),
    ({"$match": {"$jsonSchema": {"required": ["a", "a.b"]}}}, 115, "pipeline[0].$match.$jsonSchema"),
    ({"$match": {"$jsonSchema": {"not": {"properties": {"a.b": {}}}}}}, 115, "pipeline[0].$match.$jsonSchema"),
    ({"$match": {"$jsonSchema": {"dependencies": {"a.b": ["a"]}}}}, 115, "pipeline[0].$match.$jsonSchema"),
    ({"$match": {"a": {"$near": [1, 1]}}}, 5626500, "pipeline[0].$match.a"),
    ({"$match": {"a": {"$regex": "["}}}, 51091, "pipeline[0].$match.a"),
    ({"$match": {"a": {"$regex": "(?R)"}}}, 51091, "pipeline[0].$match.a"),
    ({"$set": {"x": {"$foo": 1}}}, 168, "pipeline[0].$set.x.$foo"),
    ({"$set": {"x": {"y": {"$abs": [1, 2]}}}}, 16020, "pipeline[0].$set.x.y.$abs"),
    ({"$set": {"x": {"$divide": [1, 0]}}}, 2, "pipeline[0].$set.x.$divide"),
    ({"$set": {"x": {"$function": {"body": "f", "args": [], "lang": "js"}}}}, 115, "pipeline[0].$set.x.$function"),
    ({"$set": {"x": "$$nope"}}, 17276, "pipeline[0].$set.x"),
    ({"$set": {"x": {"$year": {"date": "$a", "timezone": {"$abs": "x"}}}}}, 28765, "pipeline[0].$set.x.$year"),
    ({"$project": {"a": 1, "b": 0}}, 31254, "pipeline[0].$project.b"),
    ({"$group": {"_id": 1}}, 20, "pipeline[0].$group"),
    ({"$sortByCount": "$a"}, 20, "pipeline[0].$sortByCount"),
    ({"$nope": 1}, 40324, "pipeline[0].$nope"),
]


@pytest.mark.parametrize(("stage", "code", "place"), BAD_PIPELINES)
def test_a_bad_pipeline_is_refused_with_the_servers_code_and_its_place(
    stage: dict[str, Any], code: int, place: str
) -> None:
    with pytest.raises(UsageError) as raised:
        compile_stages([bson.encode(stage)])
    assert raised.value.code == code
    assert place in str(raised.value)


def test_a_stage_that_is_not_permitted_is_named_as_the_server_expands_it() -> None:
    with pytest.raises(UsageError, match=r"^\$group is not permitted in a \$changeStream pipeline"):
        compile_stages([bson.encode({"$match": {}}), bson.encode({"$count": "n"})])


BAD_EVENTS: list[tuple[dict[str, Any], int]] = [
    ({"$divide": ["$a", "$n"]}, 2),
    ({"$mod": ["$a", "$n"]}, 16610),
    ({"$toInt": "$big"}, 241),
    ({"$toInt": "$s"}, 241),
    ({"$hour": {"date": {"$toDate": "$big"}, "timezone": "$s"}}, 40485),
    ({"$add": ["$a", "$s"]}, 14),
]


@pytest.mark.parametrize(("expression", "code"), BAD_EVENTS)
def test_an_expression_that_fails_on_an_event_names_its_stage(expression: dict[str, Any], code: int) -> None:
    pipeline = compile_stages([bson.encode({"$match": {"a": 1}}), bson.encode({"$set": {"x": expression}})])
    with pytest.raises(ServerError) as raised:
        pipeline.apply(EVENT)
    assert raised.value.code == code
    assert "stage 1 of the pipeline, $set" in str(raised.value)


def nested(levels: int, wrap: Callable[[Any], Any], core: Any) -> Any:
    for _ in range(levels):
        core = wrap(core)
    return core


@pytest.mark.parametrize(
    "stage",
    [
        {"$set": {"x": nested(220, lambda inner: {"$abs": inner}, 1)}},
        {"$match": nested(120, lambda inner: {"$and": [inner]}, {"a": 1})},
        {"$match": {"a": nested(220, lambda inner: {"$not": inner}, {"$gt": 1})}},
        {"$project": nested(220, lambda inner: {"p": inner}, 1)},
    ],
)
def test_a_pipeline_that_nests_too_deep_is_refused_before_anything_recurses(stage: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="depth") as raised:
        compile_stages([bson.encode(stage)])
    assert raised.value.code in (2, 15)


def test_a_document_178_levels_deep_is_projected_matched_and_redacted() -> None:
    deep = bson.encode({"_id": 1, "d": nested(178, lambda inner: {"d": inner}, {"x": 1})})
    path = ".".join(["d"] * 179 + ["x"])
    stages = [{"$match": {path: 1}}, {"$set": {path: 2}}, {"$redact": "$$DESCEND"}, {"$project": {path: 1}}]
    out = compile_stages([bson.encode(stage) for stage in stages]).apply(deep)
    expected = bson.encode({"_id": 1, "d": nested(178, lambda inner: {"d": inner}, {"x": 2})})
    assert out == expected


def test_a_nan_decimal_never_raises_a_foreign_error() -> None:
    nan = bson.Decimal128("NaN")
    event = bson.encode({"_id": 1, "a": nan, "b": math.nan})
    for expression in ({"$pow": [0, "$a"]}, {"$mod": ["$a", 2]}, {"$round": ["$a", 1]}, {"$max": ["$a", "$b"]}):
        try:
            compile_stages([bson.encode({"$set": {"x": expression}})]).apply(event)
        except TailraceError as error:
            assert error.code == 115  # noqa: PT017  a decimal power is refused by name, nothing else fails
    matching = {"$match": {"$jsonSchema": {"properties": {"a": {"minimum": 1, "multipleOf": 2}}}}}
    assert compile_stages([bson.encode(matching)]).apply(event) is None
