"""The stages that are forbidden in a change stream: the server parses them before it says so, and so a malformed one
gives the error of its own parser. (What these check was measured on mongod 6.0.27, stage by stage.)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tailrace.core.expression.language.core import check_field_name, parse_operand, split_path
from tailrace.core.expression.language.expression import Bindings
from tailrace.core.expression.language.registry import parse_failure
from tailrace.core.expression.stages.projection import parse_project
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

_INVALID_NAMESPACE: Final = 73

#: What the server names when it refuses a stage: some are shorthand for others.
EXPANDED: Final[dict[str, str]] = {
    "$bucket": "$group",
    "$count": "$group",
    "$sortByCount": "$group",
    "$densify": "$sort",
    "$setWindowFields": "$_internalSetWindowFields",
}
_ATLAS: Final = (6047401, "stage is only allowed on MongoDB Atlas")
_INTERNAL: Final = (5491300, "is not allowed in user requests")
#: Stages that the server refuses for another reason before it looks at the change stream.
REFUSED_OTHERWISE: Final[dict[str, tuple[int, str]]] = {
    "$changeStream": (40602, "is only valid as the first stage in a pipeline"),
    "$currentOp": (73, "must be run against the 'admin' database with {aggregate: 1}"),
    "$listSessions": (73, "may only be run against config.system.sessions"),
    "$listLocalSessions": (73, "must be run against the database with {aggregate: 1}"),
    "$listSampledQueries": (73, "must be run against the 'admin' database with {aggregate: 1}"),
    "$queryStats": (73, "must be run against the 'admin' database with {aggregate: 1}"),
    "$listCachedAndActiveUsers": (224, "is not allowed with this server's settings"),
    "$operationMetrics": (115, "needs a server parameter that is off"),
    "$shardedDataDistribution": (6789101, "can only be run on a mongos"),
    **dict.fromkeys(("$search", "$searchMeta", "$vectorSearch", "$listSearchIndexes"), _ATLAS),
    **dict.fromkeys(("$queue", "$setVariableFromSubPipeline", "$mergeCursors"), _INTERNAL),
    **dict.fromkeys(
        (
            "$_internalBoundedSort",
            "$_internalChangeStreamAddPostImage",
            "$_internalChangeStreamAddPreImage",
            "$_internalChangeStreamCheckInvalidate",
            "$_internalChangeStreamCheckResumability",
            "$_internalChangeStreamCheckTopologyChange",
            "$_internalChangeStreamHandleTopologyChange",
            "$_internalChangeStreamOplogMatch",
            "$_internalChangeStreamTransform",
            "$_internalChangeStreamUnwindTransaction",
            "$_internalDensify",
            "$_internalFindAndModifyImageLookup",
            "$_internalReshardingIterateTransaction",
            "$_internalReshardingOwnershipMatch",
            "$_addReshardingResumeId",
        ),
        _INTERNAL,
    ),
}
#: Stages that exist and may not stand in a change stream.
NOT_PERMITTED: Final = frozenset(
    [
        "$bucket",
        "$bucketAuto",
        "$collStats",
        "$count",
        "$densify",
        "$documents",
        "$facet",
        "$fill",
        "$geoNear",
        "$graphLookup",
        "$group",
        "$indexStats",
        "$limit",
        "$listCatalog",
        "$lookup",
        "$merge",
        "$out",
        "$planCacheStats",
        "$sample",
        "$setWindowFields",
        "$skip",
        "$sort",
        "$sortByCount",
        "$unionWith",
        "$unwind",
        "$_internalSplitPipeline",
    ]
)

#: Stages that came later than 4.4: a server before that version does not know their names.
STAGES_SINCE: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "$_internalFindAndModifyImageLookup",
            "$_internalReshardingIterateTransaction",
            "$_internalReshardingOwnershipMatch",
            "$documents",
            "$operationMetrics",
            "$queue",
            "$setWindowFields",
        ),
        "5.0",
    ),
    **dict.fromkeys(
        (
            "$_addReshardingResumeId",
            "$_internalBoundedSort",
            "$_internalChangeStreamAddPostImage",
            "$_internalChangeStreamAddPreImage",
            "$_internalChangeStreamCheckInvalidate",
            "$_internalChangeStreamCheckResumability",
            "$_internalChangeStreamCheckTopologyChange",
            "$_internalChangeStreamHandleTopologyChange",
            "$_internalChangeStreamOplogMatch",
            "$_internalChangeStreamTransform",
            "$_internalChangeStreamUnwindTransaction",
            "$_internalDensify",
            "$changeStreamSplitLargeEvent",
            "$densify",
            "$fill",
            "$listCachedAndActiveUsers",
            "$listCatalog",
            "$listSearchIndexes",
            "$queryStats",
            "$search",
            "$searchMeta",
            "$setVariableFromSubPipeline",
            "$shardedDataDistribution",
            "$vectorSearch",
        ),
        "6.0",
    ),
    "$listSampledQueries": "7.0",
}


def refused_name(name: str, specification: Value) -> str | None:
    """The stage that the server names when it refuses ``name``; ``None`` when it would take what it expands to."""
    sorts = specification[0] == v.OBJECT and v.field(specification[1], b"sortBy") is not None
    if name in ("$fill", "$setWindowFields") and sorts:
        return "$sort"
    return None if name == "$fill" else EXPANDED.get(name, name)


# ── what each parser asks for ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Shape:
    """An object with known fields, of which some are needed: the code for each way to miss that."""

    not_object: int
    unknown: int = 0
    known: frozenset[str] = field(default_factory=frozenset)
    missing: int = 0
    needed: tuple[str, ...] = ()
    #: The server looks for these before it looks at the other fields.
    first: tuple[str, ...] = ()

    def check(self, name: str, specification: Value) -> dict[str, Value]:
        if specification[0] != v.OBJECT:
            _refuse(self.not_object, f"{name} must take an object, got {v.type_name(specification)}")
        given = {n.decode("utf-8", "replace"): (kind, data) for n, kind, data in v.fields_of(specification[1])}
        for one in self.first:
            if one not in given:
                _refuse(self.not_object, f"missing '{one}' option to {name} stage specification")
        for one in given:
            if self.unknown and one not in self.known:
                _refuse(self.unknown, f"Unrecognized option to {name}: {one}")
        for one in self.needed:
            if one not in given:
                _refuse(self.missing, f"{name} requires '{one}' to be specified")
        return given


def _refuse(code: int, message: str) -> None:
    raise parse_failure(code, message)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHAPES: Final[dict[str, _Shape]] = {
    "$bucket": _Shape(40201, 40197, _names("groupBy boundaries default output"), 40198, ("groupBy", "boundaries")),
    "$bucketAuto": _Shape(40240),
    "$changeStream": _Shape(
        6188500,
        40415,
        _names(
            "fullDocument fullDocumentBeforeChange resumeAfter startAfter startAtOperationTime allChangesForCluster "
            "showExpandedEvents showMigrationEvents showSystemEvents allowToRunOnConfigDB showRawUpdateDescription"
        ),
    ),
    "$collStats": _Shape(5447000, 40415, _names("latencyStats storageStats count queryExecStats")),
    "$currentOp": _Shape(14),
    "$densify": _Shape(9, 40415, _names("field range partitionByFields"), 40414, ("field", "range")),
    "$fill": _Shape(9, 40415, _names("sortBy partitionBy partitionByFields output"), 40414, ("output",)),
    "$graphLookup": _Shape(
        9,
        40104,
        _names("from as startWith connectFromField connectToField maxDepth depthField restrictSearchWithMatch"),
        40105,
        ("as", "startWith", "connectFromField", "connectToField"),
        first=("from",),
    ),
    "$listSampledQueries": _Shape(6876000),
    "$listLocalSessions": _Shape(14, 40415, _names("users allUsers")),
    "$listSessions": _Shape(14, 40415, _names("users allUsers")),
    "$lookup": _Shape(9, 9, _names("from as localField foreignField let pipeline"), 9, ("as",)),
    "$queryStats": _Shape(9, 40415, _names("transformIdentifiers")),
    "$setWindowFields": _Shape(9, 40415, _names("partitionBy sortBy output"), 40414, ("output",)),
}
#: Stages that take nothing but an empty object, and their code for everything else.
_EMPTY: Final[dict[str, int]] = {
    "$indexStats": 28803,
    "$listCatalog": 6200600,
    "$planCacheStats": 9,
    "$shardedDataDistribution": 6789100,
}


def check_refused(name: str, specification: Value, bindings: Bindings) -> None:
    """Raise what the server's parser of a stage raises for ``specification``; nothing where it is well formed."""
    shape = _SHAPES.get(name)
    given = {} if shape is None else shape.check(name, specification)
    if name in _EMPTY and specification != v.EMPTY_OBJECT:
        _refuse(_EMPTY[name], f"{name} takes an empty object")
    own = _OWN.get(name)
    if own is not None:
        own(name, specification, given, bindings)


_Check = Callable[[str, Value, "dict[str, Value]", Bindings], None]


def _accumulators(output: Value) -> None:
    for key, kind, data in v.fields_of(output[1]) if output[0] == v.OBJECT else []:
        inner = v.fields_of(data) if kind == v.OBJECT else []
        if not inner or inner[0][0][:1] != b"$":
            _refuse(40234, f"The field '{key.decode('utf-8', 'replace')}' must be an accumulator object")


def _count(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] != v.STRING:
        _refuse(40156, "the count field must be a non-empty string")
    text = v.bytes_of(specification)
    if not text:
        _refuse(40157, "the count field must be a non-empty string")
    if text[:1] == b"$":
        _refuse(40158, "the count field cannot be a $-prefixed path")
    if b"\x00" in text:
        _refuse(40159, "the count field cannot contain a null byte")
    if b"." in text:
        _refuse(40160, "the count field cannot contain '.'")


def _bucket(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    by, boundaries = given["groupBy"], given["boundaries"]
    named = v.fields_of(by[1])[:1] if by[0] == v.OBJECT else []
    if not (by[0] == v.STRING and by[1][4:5] == b"$") and not (named and named[0][0][:1] == b"$"):
        _refuse(40202, "The $bucket 'groupBy' field must be defined as a $-prefixed path or an expression")
    if boundaries[0] != v.ARRAY:
        _refuse(40200, "The $bucket 'boundaries' field must be an array")
    if len(v.elements_of(boundaries)) < 2:
        _refuse(40192, "The $bucket 'boundaries' field must have at least 2 values")


def _bucket_auto(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    for key, value in given.items():
        if key == "output":
            _accumulators(value)
        elif key not in ("groupBy", "buckets", "granularity"):
            _refuse(40245, f"Unrecognized option to $bucketAuto: {key}")
    if not {"groupBy", "buckets"} <= given.keys():
        _refuse(40246, "$bucketAuto requires 'groupBy' and 'buckets' to be specified")
    buckets = given["buckets"]
    if buckets[0] not in v.NUMERIC:
        _refuse(40241, "The $bucketAuto 'buckets' field must be a numeric value")
    if not 0 < v.number_of(buckets) <= v.INT32_MAX:
        _refuse(40243, "The $bucketAuto 'buckets' field must be greater than 0")


def _documents(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if not bindings.knows("6.0"):
        _refuse(5491300, "$documents is not allowed in user requests")
    parse_project(v.object_of([(b"documents", specification)])[1], bindings)


def _facet(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] != v.OBJECT or specification == v.EMPTY_OBJECT:
        _refuse(40169, "the $facet specification must be a non-empty object")
    for facet, kind, data in v.fields_of(specification[1]):
        check_field_name(facet)
        if kind != v.ARRAY:
            _refuse(40170, f"arguments to $facet must be arrays, {facet!r} is type {v.type_name((kind, data))}")
        for stage in v.elements_of((kind, data)):
            if stage[0] != v.OBJECT:
                _refuse(40171, "elements of arrays in $facet spec must be objects")
            if len(inner := v.fields_of(stage[1])) != 1:
                _refuse(40323, "A pipeline stage specification object must contain exactly one field.")
            _check_inner(stage, bindings)
            if inner[0][0] in _NOT_IN_FACET:
                _refuse(40600, f"{inner[0][0].decode()} is not allowed to be used within a $facet stage")


_NOT_IN_FACET: Final = frozenset({b"$out", b"$merge", b"$facet", b"$geoNear", b"$indexStats", b"$collStats"})
_ORDINARY: Final = _names("$addFields $match $project $redact $replaceRoot $replaceWith $set $unset")


def _check_inner(stage: Value, bindings: Bindings) -> None:
    """The name of a stage in a pipeline of its own."""
    name = v.fields_of(stage[1])[0][0].decode("utf-8", "replace")
    known = name in _ORDINARY or name in NOT_PERMITTED or name in REFUSED_OTHERWISE
    if not known or not bindings.knows(STAGES_SINCE.get(name, "3.6")):
        _refuse(40324, f"Unrecognized pipeline stage name: '{name}'")


def _fill(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    output = given["output"]
    for _, kind, data in v.fields_of(output[1]) if output[0] == v.OBJECT else []:
        for option, inner_kind, inner in v.fields_of(data) if kind == v.OBJECT else []:
            if option not in (b"value", b"method"):
                _refuse(40415, f"BSON field '$fill.{option.decode('utf-8', 'replace')}' is an unknown field.")
            if option == b"method" and (inner_kind != v.STRING or inner[4:-1] not in (b"locf", b"linear")):
                _refuse(6050202, "Method must be either locf or linear")


def _geo_near(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] not in (v.OBJECT, v.ARRAY):
        _refuse(10065, "invalid parameter: expected an object ($geoNear)")
    if v.field(specification[1], b"near") is None:
        _refuse(5860400 if bindings.knows("6.0") else 16605, "$geoNear requires a 'near' argument")


def _group(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] != v.OBJECT:
        _refuse(15947, "a group's fields must be specified in an object")
    fields = v.fields_of(specification[1])
    for key, kind, data in fields:
        if key == b"_id":
            continue
        inner = v.fields_of(data) if kind == v.OBJECT else []
        if not inner or inner[0][0][:1] != b"$":
            _refuse(40234, f"The field '{key.decode('utf-8', 'replace')}' must be an accumulator object")
        named = inner[0][0].decode("utf-8", "replace")
        if not bindings.knows(_ACCUMULATORS.get(named, "99.0")):
            _refuse(15952, f"unknown group operator {named!r}")
        if named in ("$median", "$percentile"):
            parse_operand((kind, data), bindings)
        if b"." in key:
            _refuse(40235, f"The field name '{key.decode('utf-8', 'replace')}' cannot contain '.'")
    if all(key != b"_id" for key, _, _ in fields):
        _refuse(15955, "a group specification must include an _id")


#: By the version that brought them.
_ACCUMULATORS: Final = {
    **dict.fromkeys(
        _names(
            "$accumulator $addToSet $avg $first $last $max $mergeObjects $min $push $stdDevPop $stdDevSamp $sum "
            "$_internalJsReduce"
        ),
        "4.4",
    ),
    "$count": "5.0",
    **dict.fromkeys(_names("$bottom $bottomN $firstN $lastN $maxN $minN $top $topN"), "5.2"),
    **dict.fromkeys(_names("$median $percentile"), "7.0"),
}


def _limit(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if not bindings.knows("5.0"):
        if specification[0] not in v.NUMERIC:
            _refuse(15957, "the limit must be specified as a number")
        if not v.number_of(specification) >= 1:
            _refuse(15958, "the limit must be positive")
        return
    number = v.number_of(specification) if specification[0] in v.NUMERIC else -1
    if not 0 <= number <= v.INT64_MAX or number != int(number):
        _refuse(5107201, "invalid argument to $limit stage: Expected a non-negative number")
    if number == 0:
        _refuse(15958, "the limit must be positive")


def _skip(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if not bindings.knows("5.0"):
        if specification[0] not in v.NUMERIC:
            _refuse(15972, f"Argument to $skip must be a number not a {v.type_name(specification)}")
        if v.number_of(specification) < 0:
            _refuse(15956, "Argument to $skip cannot be negative")
        return
    number = v.number_of(specification) if specification[0] in v.NUMERIC else -1
    if not 0 <= number <= v.INT64_MAX or number != int(number):
        _refuse(5107200, "invalid argument to $skip stage: Expected a non-negative number")


def _lookup(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    for one in ("from", "as", "localField", "foreignField"):
        if one in given and given[one][0] not in (v.STRING, v.OBJECT):
            _refuse(9, f"$lookup argument '{one}' must be a string")
    if "pipeline" not in given and not {"localField", "foreignField", "from"} <= given.keys():
        _refuse(9, "$lookup requires either 'pipeline' or both 'localField' and 'foreignField' to be specified")
    pipeline = given.get("pipeline", v.EMPTY_ARRAY)
    for stage in v.elements_of(pipeline) if pipeline[0] == v.ARRAY else []:
        if stage[0] == v.OBJECT and (inner := v.fields_of(stage[1])):
            _check_inner(stage, bindings)
            if inner[0][0] in (b"$out", b"$merge"):
                _refuse(51047, f"{inner[0][0].decode()} is not allowed within a $lookup's sub-pipeline")
    for one in ("as", "localField", "foreignField"):
        if one in given:
            split_path(v.bytes_of(given[one]))


def _merge(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] == v.STRING:
        _check_collection(specification)
        return
    if specification[0] != v.OBJECT:
        _refuse(14, f"$merge only supports a string or object argument, not {v.type_name(specification)}")
    known = _names("into on let whenMatched whenNotMatched targetCollectionVersion targetCollectionPlacementVersion")
    _Shape(14, 40415, known, 40414, ("into",)).check(name, specification)


def _out(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] == v.STRING:
        _check_collection(specification)
    elif specification[0] != v.OBJECT:
        _refuse(16990, f"$out only supports a string or object argument, but found {v.type_name(specification)}")
    elif bindings.knows("7.0"):
        given = _Shape(16990, 40415, _names("db coll timeseries"), 40414, ("coll", "db")).check(name, specification)
        if any(given[each][0] != v.STRING for each in ("db", "coll")):
            _refuse(14, "BSON field '$out' is the wrong type, expected type 'string'")
    elif {key for key, _, _ in v.fields_of(specification[1])} != {b"db", b"coll"}:
        _refuse(16994, "If an object is passed to $out it must have exactly 2 fields: 'db' and 'coll'")


def _check_collection(value: Value) -> None:
    text = v.bytes_of(value)
    if not text or b"\x00" in text:
        _refuse(_INVALID_NAMESPACE, f"Invalid collection name: {text.decode('utf-8', 'replace')!r}")


def _sample(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] != v.OBJECT:
        _refuse(28745, "the $sample stage specification must be an object")
    size: Value | None = None
    for key, kind, data in v.fields_of(specification[1]):
        if key != b"size":
            _refuse(28748, f"unrecognized option to $sample: {key.decode('utf-8', 'replace')}")
        size = (kind, data)
        if kind not in v.NUMERIC:
            _refuse(28746, "size argument to $sample must be a number")
        if v.number_of(size) < 0:
            _refuse(28747, "size argument to $sample must not be negative")
    if size is None:
        _refuse(28749, "$sample stage must specify a size")


def _window(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    output = given["output"]
    for key, kind, data in v.fields_of(output[1]) if output[0] == v.OBJECT else []:
        names = [inner for inner, _, _ in v.fields_of(data)] if kind == v.OBJECT else []
        if not any(inner[:1] == b"$" for inner in names):
            _refuse(9, f"Expected a $-prefixed window function, {key.decode('utf-8', 'replace')}")


def _sort(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] != v.OBJECT:
        _refuse(15973, "the $sort key specification must be an object")
    fields = v.fields_of(specification[1])
    if not fields:
        _refuse(15976, "$sort stage must have at least one sort key")
    for key, kind, data in fields:
        if kind == v.OBJECT:
            if v.field(data, b"$meta") is None:
                _refuse(17312, "$meta is the only expression supported by $sort right now")
            continue
        if kind not in v.NUMERIC:
            _refuse(15974, "$sort key ordering must be specified using a number or {$meta: 'textScore'}")
        split_path(key)
        if v.number_of((kind, data)) not in (1, -1):
            _refuse(15975, "$sort key ordering must be 1 (for ascending) or -1 (for descending)")


def _sort_by_count(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    kind, data = specification
    if kind == v.STRING:
        if data[4:5] != b"$":
            _refuse(40148, "the sortByCount field must be defined as a $-prefixed path")
    elif kind != v.OBJECT:
        _refuse(40149, "the sortByCount field must be specified as a string or as an object")
    elif not (fields := v.fields_of(data)) or fields[0][0][:1] != b"$":
        _refuse(40147, "the sortByCount field must be defined as a $-prefixed path or an expression")
    parse_operand(specification, bindings)


def _union_with(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    if specification[0] == v.STRING:
        if b"\x00" in v.bytes_of(specification):
            _refuse(_INVALID_NAMESPACE, "Invalid collection name")
    else:
        given = _Shape(9, 40415, _names("coll pipeline")).check(name, specification)
        if "coll" not in given:
            _refuse(9 if bindings.knows("5.0") else 40414, "$unionWith stage needs 'coll'")


def _unwind(name: str, specification: Value, given: dict[str, Value], bindings: Bindings) -> None:
    path: Value | None = specification
    if specification[0] == v.OBJECT:
        path = None
        for key, kind, data in v.fields_of(specification[1]):
            if key not in (b"path", b"preserveNullAndEmptyArrays", b"includeArrayIndex"):
                _refuse(28811, f"unrecognized option to $unwind stage: {key.decode('utf-8', 'replace')}")
            if key == b"path":
                path = (kind, data)
                if kind != v.STRING:
                    _refuse(28808, "expected a string as the path for $unwind stage")
    elif specification[0] != v.STRING:
        _refuse(15981, "expected either a string or an object as specification for $unwind stage")
    if path is None or not v.bytes_of(path):
        raise parse_failure(28812, "no path specified to $unwind stage")
    if v.bytes_of(path)[:1] != b"$":
        _refuse(28818, "path option to $unwind stage should be prefixed with a '$'")
    split_path(v.bytes_of(path)[1:])


_OWN: Final[dict[str, _Check]] = {
    "$bucket": _bucket,
    "$bucketAuto": _bucket_auto,
    "$count": _count,
    "$documents": _documents,
    "$facet": _facet,
    "$fill": _fill,
    "$geoNear": _geo_near,
    "$group": _group,
    "$limit": _limit,
    "$lookup": _lookup,
    "$merge": _merge,
    "$out": _out,
    "$sample": _sample,
    "$setWindowFields": _window,
    "$skip": _skip,
    "$sort": _sort,
    "$sortByCount": _sort_by_count,
    "$unionWith": _union_with,
    "$unwind": _unwind,
}
