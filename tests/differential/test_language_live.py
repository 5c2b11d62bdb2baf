"""Names in the language, beside a running mongod: degenerate operators, the fields of a DBRef, what is refused.

No earlier test had used an empty operator below a field, a name that begins with a dollar and is no operator, or a
stage that is both forbidden and malformed: the fuzz makes stages that are allowed and well formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.expression import compile_stages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.read.source.mongod import MongodSource
from tailrace.watch.client.change_stream import OplogChangeStream
from tailrace.watch.client.request import WatchRequest
from tests.differential import native
from tests.differential.wire import CommandError, Wire
from tests.server_in_use import IN_BETWEEN, LANGUAGE

pytestmark = pytest.mark.mongod

NAME = "language_live"
_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
Outcome = list[bytes] | int


class Streams:
    """The same four events, through the server's stream and through ours."""

    def __init__(self, uri: str) -> None:
        self.wire = Wire.to(uri)
        self.source = MongodSource(uri)
        note = {"appendOplogNote": 1, "data": {"msg": NAME}, "writeConcern": {"w": "majority"}}
        begin = self.wire.run("admin", note)["operationTime"]
        document = {"_id": 1, "a": [1, {"b": 1}, "x", []], "n": 5, "e": {}, "l": [], "u": {"$id": 7}}
        document |= {"r": bson.SON([("$ref", "c"), ("$id", 1), ("$db", "d")])}
        document |= {"b": bson.Binary(b"\x01" + bytes(16) + b"\x02abc", 6)}
        self.wire.run(NAME, {"insert": "c", "documents": [document]})
        self.wire.run(NAME, {"update": "c", "updates": [{"q": {"_id": 1}, "u": {"$set": {"n": 6, "a.0": 2}}}]})
        self.wire.run(NAME, {"update": "c", "updates": [{"q": {"_id": 1}, "u": {"z": None}}]})
        self.wire.run(NAME, {"delete": "c", "deletes": [{"q": {"_id": 1}, "limit": 1}]})
        end = self.wire.run("admin", note)["operationTime"]
        self.start = bson.Timestamp(begin.time, begin.inc + 1)
        self.end = ClusterTime.from_timestamp(end)
        self.events = self.native([])

    def close(self) -> None:
        self.wire.run(NAME, {"dropDatabase": 1})
        self.wire.close()
        self.source.close()

    def native(self, stages: list[dict[str, Any]], **more: Any) -> Any:
        _, command = native.aggregate((NAME, "c"), {"startAtOperationTime": self.start}, pipeline=tuple(stages))
        try:
            reply = self.wire.run(NAME, {**command, **more})
        except CommandError as error:
            return error.details["code"]
        return [event.raw for event in reply["cursor"]["firstBatch"]]

    def ours(self, stages: list[dict[str, Any]], *, pushes_down: bool) -> Outcome:
        request = WatchRequest(
            scope=Scope.of_collection(NAME, "c"),
            codec_options=_RAW,
            pipeline=stages,
            max_await_time_ms=20,
            start_at_operation_time=self.start,
        )
        found: list[bytes] = []
        try:
            with closing(OplogChangeStream(self.source, request, pushes_down=pushes_down)) as stream:
                while self._behind(stream):
                    event = stream.try_next()
                    found += [] if event is None else [event.raw]
        except TailraceError as error:
            return error.code or -1
        return found

    def _behind(self, stream: Any) -> bool:
        token = stream.resume_token
        return ResumeToken.parse(
            token.raw if isinstance(token, RawBSONDocument) else bson.encode(token)
        ).cluster_time < (self.end)

    def compiled(self, stages: list[dict[str, Any]], let: dict[str, Any] | None = None) -> Outcome:
        """Ours without a stream around it."""
        try:
            pipeline = compile_stages([bson.encode(stage) for stage in stages], let=let, version=LANGUAGE)
            return [out for event in self.events if (out := pipeline.apply(event)) is not None]
        except TailraceError as error:
            return error.code or -1


@pytest.fixture(scope="module")
def streams(replica_set: ReplicaSet) -> Iterator[Streams]:
    with closing(Streams(replica_set.uri)) as both:
        yield both


#: Operators with an empty argument, or with one that decides the result at once.
DEGENERATE: list[dict[str, Any]] = [
    {"$in": []},
    {"$nin": []},
    {"$all": []},
    {"$all": [{"$elemMatch": {}}]},
    {"$elemMatch": {}},
    {"$elemMatch": {"$and": [{}]}},
    {"$elemMatch": {"$or": [{}]}},
    {"$elemMatch": {"$nor": [{}]}},
    {"$elemMatch": {"$in": []}},
    {"$elemMatch": {"$elemMatch": {}}},
    {"$elemMatch": {"$comment": "x"}},
    {"$elemMatch": {"$id": 7}},
    {"$elemMatch": {"$ref": "c", "$id": 1}},
    {"$not": {"$elemMatch": {}}},
    {"$not": {"$all": []}},
    {"$not": {}},
    {},
    {"$size": -1},
    {"$size": 1.5},
    {"$mod": [0, 0]},
    {"$mod": [1]},
    {"$mod": [1.5, 0.5]},
    {"$type": []},
    {"$type": 0},
    {"$bitsAllSet": []},
    {"$bitsAnySet": []},
    {"$bitsAllClear": bson.Binary(b"")},
    {"$exists": []},
    {"$id": 7},
    {"$ref": "c"},
    {"$eq": {"$id": 7}},
    {"$in": [{"$id": 7}]},
    {"$near": [0, 0]},
    {"$near": 1},
    {"$geoWithin": {}},
    {"$text": {"$search": "x"}},
    {"$where": "1"},
]
_PATHS = ("fullDocument.a", "fullDocument.n", "fullDocument.u", "operationType", "updateDescription.removedFields")
WHOLE: list[dict[str, Any]] = [
    {},
    {"$and": [{}]},
    {"$nor": [{}]},
    {"$or": [{"$and": [{}]}]},
    {"$and": []},
    {"$expr": {}},
    {"$expr": {"$and": []}},
    {"$expr": {"$or": []}},
    {"$jsonSchema": {}},
    {"$nor": [{"fullDocument.a": {"$elemMatch": {}}}]},
    {"$or": [{"fullDocument.a": {"$elemMatch": {}}}, {"operationType": {"$in": []}}]},
    {"$id": 1},
    {"$ref": {"$exists": False}},
    {"$id": None},
    {"$db": {"$nope": 1}},
    {"$id": {"$gt": 0}},
    {"$ref": bson.Regex("c")},
    {"fullDocument.u.$id": 7},
    {"fullDocument.r.$ref": {"$in": ["c"]}},
    *[{name: [0, 0]} for name in ("$near", "$nearSphere", "$geoNear", "$geoWithin", "$geoIntersects", "$within")],
    {"$sampleRate": 1},
    {"$sampleRate": 0},
    {"$sampleRate": 2},
    {"$text": 1},
    {"$text": {"$search": 1}},
]


def check_degenerate(streams: Streams) -> None:
    wrong = []
    for query in [*[{path: test} for test in DEGENERATE for path in _PATHS], *WHOLE]:
        stages = [{"$match": query}]
        theirs = streams.native(stages)
        if not theirs == streams.ours(stages, pushes_down=True) == streams.ours(stages, pushes_down=False):
            wrong.append((query, theirs if isinstance(theirs, int) else len(theirs)))
    assert wrong == []


def test_a_degenerate_match_gives_the_servers_events_with_and_without_pushdown(streams: Streams) -> None:
    check_degenerate(streams)


@pytest.mark.slow  # the test above, on 6.0
@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_a_degenerate_match_does_so_on_older_servers(
    start_replica_set: Callable[..., ReplicaSet], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for ``$near``, which has code 2 there: the language is that of 6.0."""
    monkeypatch.setattr("tests.differential.test_language_live.DEGENERATE", [d for d in DEGENERATE if "$near" not in d])
    with closing(Streams(start_replica_set(version=version).uri)) as streams:
        check_degenerate(streams)


#: Stages that name the fields of a DBRef.
DBREFS: list[dict[str, Any]] = [
    {"$set": {"x": "$fullDocument.r.$id"}},
    {"$set": {"x": "$$ROOT.fullDocument.$ref"}},
    {"$set": {"x": "$fullDocument.r.$nope"}},
    {"$set": {"fullDocument.r.$id": 9}},
    {"$set": {"x.$id": 1}},
    {"$set": {"x": {"$id": 1}}},
    {"$set": {"x": {"$ref": "c", "$id": 1}}},
    {"$set": {"$db": 1}},
    {"$project": {"fullDocument.r.$id": 1}},
    {"$project": {"fullDocument.r": {"$id": 0, "$db": 0}}},
    {"$project": {"x": {"$ref": "c"}}},
    {"$project": {"x": {"$ref": "$operationType", "$id": 1}}},
    {"$project": {"y": 1, "x": {"$ref": 0}}},
    {"$project": {"y": 0, "x": {"$id": 1}}},
    {"$unset": ["fullDocument.r.$ref", "$db"]},
    {"$unset": "a\x00"},
    {"$replaceWith": {"_id": "$_id", "$id": "$fullDocument.u.$id"}},
    {"$replaceWith": {"_id": "$_id", "x": {"$id": 1}}},
    {"$match": {"$expr": {"$eq": ["$fullDocument.u.$id", 7]}}},
]
#: Names that are no expressions, or not allowed here, and malformed ones, in every place where an expression may stand.
NAMES = ("$where", "$near", "$geoWithin", "$text", "$sampleRate", "$exists", "$elemMatch", "$nor", "$nope", "$ref")
EXPRESSIONS: list[Any] = [
    *[{name: 1} for name in (*NAMES, "$function", "$rand", "$meta", "$firstN", "$minN")],
    {"$function": {}},
    {"$rand": [1]},
    {"$toHashedIndexKey": {"$nope": 1}},
    *[{"$meta": name} for name in ("textScore", "geoNearPoint", "nope", "searchScore", "searchHighlights")],
    *["$$IS_MR", "$$JS_SCOPE.a", "$$SEARCH_META", "$$SEARCH_META.count", "$$USER_ROLES"],
]
PLACES: list[Callable[[Any], dict[str, Any]]] = [
    lambda each: {"$set": {"x": each}},
    lambda each: {"$set": {"x": {"y": [each]}}},
    lambda each: {"$project": {"x": each}},
    lambda each: {"$project": {"x": {"$ifNull": [each, 1]}}},
    lambda each: {"$match": {"$expr": each}},
]


def test_the_fields_of_a_dbref_are_names_where_they_are_on_the_server(streams: Streams) -> None:
    wrong = [stage for stage in DBREFS if streams.compiled([stage]) != streams.native([stage])]
    assert wrong == []


def test_what_is_no_expression_gets_the_servers_code_in_every_place(streams: Streams) -> None:
    stages = [place(each) for each in EXPRESSIONS for place in PLACES]
    if LANGUAGE >= (7, 0):  # only the server knows a user's roles
        refused = [stage for stage in stages if "$$USER_ROLES" in str(stage)]
        assert {streams.compiled([stage]) for stage in refused} == {115}
        stages = [stage for stage in stages if stage not in refused]
    wrong = [stage for stage in stages if streams.compiled([stage]) != streams.native([stage])]
    assert wrong == []


def test_a_variable_of_let_sees_those_before_it(streams: Streams) -> None:
    """``$$REMOVE`` and ``$$NOW`` had been tried in ``let``; a user's own variable in the next one had not."""
    stages = [{"$set": {"y": "$$b"}}]
    lets: list[dict[str, Any]] = [
        {"a": 1, "b": "$$a"},
        {"a": 2, "b": {"$add": ["$$a", 1]}},
        {"a": {"c": 3}, "b": ["$$a.c"]},
        {"b": "$$a", "a": 1},
        {"b": "$$b"},
    ]
    for let in lets:
        assert streams.compiled(stages, let) == streams.native(stages, let=let), let


SPECIFICATIONS: list[Any] = [
    *[1, 0, -1, 1.5, "x", "$x", "", "a.b", "\0", None, True, [], [1], [{}], {}, {"a": 1}, {"x": "$a"}, {"nope": 1}],
    *[{"from": "x"}, {"from": "x", "as": "y", "pipeline": [{"$nope": 1}]}, {"from": "x", "as": "y", "pipeline": []}],
    {"from": "x", "as": "$y", "localField": "a", "foreignField": "b"},
    *[{"size": 1}, {"size": -1}, {"path": "$a"}, {"path": "a"}, {"near": [0, 0], "distanceField": "d"}],
    *[{"groupBy": "$a", "boundaries": [0, 1]}, {"groupBy": "$a", "buckets": 0}, {"groupBy": "$a", "boundaries": [0]}],
    *[{"_id": "$a", "n": {"$sum": 1}}, {"_id": 1, "n": 1}, {"output": {"n": {"$sum": "$a"}}}, {"coll": "x"}],
    *[{"a": [{"$match": {}}]}, {"a": [{"$nope": {}}]}, {"a": [{"$out": "x"}]}, {"into": "x"}, {"count": {}}, {"": 1}],
]
STAGES = (
    "$bucket $bucketAuto $changeStream $collStats $count $currentOp $densify $documents $facet $geoNear $graphLookup "
    "$group $indexStats $limit $listCatalog $listLocalSessions $listSearchIndexes "
    "$listSessions $lookup $merge $operationMetrics $out $planCacheStats $queryStats $queue $sample $search "
    "$setWindowFields $shardedDataDistribution $skip $sort $sortByCount $unionWith $unwind $vectorSearch "
    "$listSampledQueries $rankFusion $_internalInhibitOptimization $_internalChangeStreamTransform"
)


@pytest.mark.parametrize("name", STAGES.split())
def test_a_stage_that_is_forbidden_and_malformed_gets_the_error_of_its_parser(streams: Streams, name: str) -> None:
    wrong = []
    for specification in SPECIFICATIONS:
        stages = [{name: specification}]
        theirs, ours = streams.native(stages), streams.compiled(stages)
        if theirs != ours:
            wrong.append((specification, theirs, ours))
    assert wrong == []


SCHEMAS: list[dict[str, Any]] = [
    {"encrypt": {}},
    *[{"properties": {"fullDocument": {"properties": {name: {"encrypt": {}}}}}} for name in ("a", "b", "nope")],
    *[
        {"properties": {"fullDocument": {"properties": {"b": {"encrypt": {"bsonType": types}}}}}}
        for types in ("string", ["int", "string"], "int", "number", "nope", 1)
    ],
    *[{"properties": {"a": {"encrypt": given}}} for given in (1, {"nope": 1}, {"algorithm": "x"}, {"keyId": "x"})],
    *[{"properties": {"a": {"encrypt": {"keyId": key}}}} for key in (1, [1], [], "/x")],
    *[{"properties": {"a": {"encrypt": {}, name: "string"}}} for name in ("type", "bsonType", "title", "pattern")],
    *[{"encryptMetadata": given} for given in ({}, 1, {"nope": 1}, {"keyId": "/k"}, {"algorithm": "x"})],
    {"encrypt": {}, "encryptMetadata": {"keyId": "/k"}},
    {"not": {"properties": {"fullDocument": {"properties": {"b": {"encrypt": {}}}}}}},
]


def test_a_schema_of_encrypted_fields_is_the_servers(streams: Streams) -> None:
    stages = [{"$match": {"$jsonSchema": schema}} for schema in SCHEMAS]
    wrong = [stage for stage in stages if streams.compiled([stage]) != streams.native([stage])]
    assert wrong == []
