"""Bad input to the user's stages beside a running mongod: the same code, when opened or on the event, and the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.expression.language.version import Version
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import profile_for
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tests.differential import native
from tests.differential.wire import CommandError, Wire

pytestmark = pytest.mark.mongod

NAME = "bad_pipelines_live"


def nested(levels: int, wrap: Callable[[Any], Any], core: Any) -> Any:
    for _ in range(levels):
        core = wrap(core)
    return core


def computed(expression: Any) -> list[dict[str, Any]]:
    return [{"$match": {}}, {"$set": {"x": expression}}]


#: Faults: the stages, and the place that the message must give.
CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "unknown stage": ([{"$nope": 1}], "pipeline[0].$nope"),
    "unknown query operator": ([{"$match": {"fullDocument.a": {"$nope": 1}}}], "pipeline[0].$match.fullDocument.a"),
    "unknown operator at the top": ([{"$match": {"$nope": 1}}], "pipeline[0].$match.$nope"),
    "unknown expression": (computed({"$nope": 1}), "pipeline[1].$set.x.$nope"),
    "unknown argument": (computed({"$map": {"input": [], "in": 1, "nope": 1}}), "pipeline[1].$set.x.$map"),
    "unknown variable": (computed({"$add": [1, "$$nope"]}), "pipeline[1].$set.x.$add"),
    "arity, exactly": (computed({"$abs": [1, 2]}), "pipeline[1].$set.x.$abs"),
    "arity, a range": (computed({"$round": [1, 2, 3]}), "pipeline[1].$set.x.$round"),
    "arity, at least": (computed({"$ifNull": ["$a"]}), "pipeline[1].$set.x.$ifNull"),
    "arity, deep inside": (
        [{"$project": {"a": {"b": {"$cond": [{"$gt": [1]}, 1, 2]}}}}],
        "pipeline[0].$project.a.b.$cond.$gt",
    ),
    "type of a stage": ([{"$project": 5}], "pipeline[0].$project"),
    "type of $in": ([{"$match": {"a": {"$in": 5}}}], "pipeline[0].$match.a.$in"),
    "type of $and": ([{"$match": {"$and": {}}}], "pipeline[0].$match.$and"),
    "type of a constant": (computed({"$add": [1, "text"]}), "pipeline[1].$set.x.$add"),
    "type of a field": (computed({"$add": [1, "$fullDocument.text"]}), "stage 1 of the pipeline, $set"),
    "type of a new root": ([{"$replaceWith": "$operationType"}], "stage 0 of the pipeline, $replaceWith"),
    "type of a verdict": ([{"$redact": "$operationType"}], "stage 0 of the pipeline, $redact"),
    "pattern in a match": ([{"$match": {"a": {"$regex": "(a"}}}], "pipeline[0].$match.a"),
    "pattern in an expression": (
        computed({"$regexMatch": {"input": "$operationType", "regex": "[a"}}),
        "pipeline[1].$set.x.$regexMatch",
    ),
    "division by a constant zero": (computed({"$divide": [1, 0]}), "pipeline[1].$set.x.$divide"),
    "division by zero": (computed({"$divide": [1, "$fullDocument.zero"]}), "stage 1 of the pipeline, $set"),
    "remainder by zero": (computed({"$mod": [1, "$fullDocument.zero"]}), "stage 1 of the pipeline, $set"),
    "overflow of an int": (computed({"$toInt": "$fullDocument.big"}), "stage 1 of the pipeline, $set"),
    "overflow of a long": (computed({"$abs": "$fullDocument.low"}), "stage 1 of the pipeline, $set"),
    "overflow of a constant": (computed({"$toInt": bson.Int64(1 << 40)}), "pipeline[1].$set.x.$toInt"),
    "overflow of a date": (
        computed({"$dateAdd": {"startDate": "$wallTime", "unit": "year", "amount": bson.Int64(1 << 40)}}),
        "stage 1 of the pipeline, $set",
    ),
    "time zone": (computed({"$hour": {"date": "$wallTime", "timezone": "$operationType"}}), "stage 1 of the pipeline"),
    "time zone of a constant": (
        computed({"$hour": {"date": "$wallTime", "timezone": "Europe/Nowhere"}}),
        "stage 1 of the pipeline, $set",
    ),
    "not permitted": ([{"$match": {}}, {"$group": {"_id": 1}}], "pipeline[1].$group"),
}


#: What 7.0 finds when the stream opens, and earlier versions on the event.
_WHEN_OPENED = {"time zone of a constant": "pipeline[1].$set.x.$hour"}


@pytest.fixture(scope="module")
def stream(replica_set: ReplicaSet) -> Iterator[Callable[[list[dict[str, Any]]], native.NativeStream]]:
    """The server's own stream over one insert, with the stages given."""
    with Wire.to(replica_set.uri) as wire:
        begin = wire.run(NAME, {"insert": "c", "documents": [{"_id": 0}], "writeConcern": {"w": "majority"}})
        document = {"_id": 1, "text": "x", "zero": 0, "big": bson.Int64(1 << 40), "low": bson.Int64(-(1 << 63))}
        document |= {"as": "a" * 60 + "b", "deep": nested(150, lambda inner: {"d": inner}, 1)}
        end = wire.run(NAME, {"insert": "c", "documents": [document], "writeConcern": {"w": "majority"}})
        start = bson.Timestamp(begin["operationTime"].time, begin["operationTime"].inc + 1)
        until = ClusterTime.from_timestamp(end["operationTime"])

        def read(stages: list[dict[str, Any]]) -> native.NativeStream:
            database, command = native.aggregate((NAME, "c"), {"startAtOperationTime": start}, pipeline=tuple(stages))
            try:
                wire.run(database, {**command, "cursor": {"batchSize": 0}})
            except CommandError as error:
                opened = native.NativeStream()
                opened.fail(error)
                return opened
            found = native.read(wire, database, command, until)
            found.replies = found.replies or [(0, b"")]
            return found

        yield read
        wire.run(NAME, {"dropDatabase": 1})


@pytest.fixture(scope="module")
def version(replica_set: ReplicaSet) -> Version:
    """The version as in a plan's profile."""
    return profile_for(replica_set.version).version


def failure(stages: list[dict[str, Any]], event: bytes, version: Version) -> tuple[TailraceError, bool]:
    """Our error, and whether it came before any event."""
    try:
        pipeline = compile_stages([bson.encode(stage) for stage in stages], version=version)
    except TailraceError as error:
        return error, True
    with pytest.raises(TailraceError) as raised:
        pipeline.apply(event)
    return raised.value, False


Stream = Callable[[list[dict[str, Any]]], native.NativeStream]


@pytest.mark.parametrize("case", CASES)
def test_bad_stages_fail_as_on_the_server_and_the_message_says_where(
    stream: Stream, version: Version, case: str
) -> None:
    stages, place = CASES[case]
    theirs = stream(stages)
    event = stream([]).events[0]
    assert theirs.error is not None
    ours, at_opening = failure(stages, event, version)
    assert (ours.code, at_opening) == (theirs.error.code, not theirs.replies)
    assert (_WHEN_OPENED.get(case, place) if at_opening else place) in str(ours)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: {"$abs": inner},
        lambda inner: {"a": inner},
        lambda inner: [inner],
        lambda inner: {"$cond": [True, inner, 1]},
    ],
    ids=["operators", "objects", "arrays", "arguments"],
)
def test_an_expression_may_nest_as_deep_as_on_the_server(
    stream: Stream, version: Version, wrap: Callable[[Any], Any]
) -> None:
    for levels in (50, 90, 100, 150, 200, 250):
        stages = [{"$set": {"x": nested(levels, wrap, 1)}}]
        code = None
        try:
            made: list[bytes] = []
            out = compile_stages([bson.encode(stage) for stage in stages], version=version).apply(stream([]).events[0])
            made += [] if out is None else [out]
        except TailraceError as error:
            code = error.code
        theirs = stream(stages)
        assert code == (None if theirs.error is None else theirs.error.code), levels
        assert theirs.events == ([] if code else made), levels


def test_a_document_that_is_deep_goes_through_every_stage_as_on_the_server(stream: Stream, version: Version) -> None:
    path = "fullDocument.deep" + ".d" * 150
    for stages in (
        [{"$match": {path: 1}}],
        [{"$set": {path: 2}}],
        [{"$unset": path}],
        [{"$project": {path: 1}}],
        [{"$redact": "$$DESCEND"}],
        [{"$match": {"$expr": {"$eq": ["$fullDocument.deep", "$fullDocument.deep"]}}}],
        [{"$set": {"twice": {"$setUnion": [["$fullDocument.deep"], ["$fullDocument.deep"]]}}}],
    ):
        theirs = stream(stages)
        out = compile_stages([bson.encode(stage) for stage in stages], version=version).apply(stream([]).events[0])
        assert theirs.error is None
        assert theirs.events == [out]
