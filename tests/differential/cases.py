"""Which streams are read over a workload: scopes times options, resumes at random points, tokens that are not whole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import bson
from bson.binary import Binary
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.expression import compile_stages
from tailrace.errors import UsageError
from tests.differential.compare import Case, Compared
from tests.differential.event_predicates import EventPredicates
from tests.differential.wire import ANY_VALUE
from tests.differential.workload import COLLECTIONS, Workload
from tests.golden.replay import EVERYTHING

FULL_DOCUMENT = ("default", "updateLookup", "whenAvailable", "required")
BEFORE_CHANGE = ("off", "whenAvailable", "required")
SPLIT = ({"$changeStreamSplitLargeEvent": {}},)
#: Options that the server's rewriting of a ``$match`` does not know of: it loses events of a stream on a system
#: collection (by ``ns``) and of updates shown raw (by ``updateDescription``).
REWRITTEN_WRONGLY = frozenset(("allowToRunOnSystemNS", "showRawUpdateDescription"))
#: Options that came after 4.4, and those of them that each older version knows.
_NEW_OPTIONS = frozenset(
    (
        "fullDocumentBeforeChange",
        "showExpandedEvents",
        "showSystemEvents",
        "showRawUpdateDescription",
        "matchCollectionUUIDForUpdateLookup",
        "allowToRunOnSystemNS",
    )
)
#: In this version a null option counts as not given.
_NULL_IS_UNSAID = "4.4"
_KNOWN: dict[str, frozenset[str]] = {"4.4": frozenset(), "5.0": frozenset(("allowToRunOnSystemNS",))}
_EXPANDED = {"showExpandedEvents": True}
_SYSTEM = {"showSystemEvents": True}
_BATCH_SIZES = (EVERYTHING, EVERYTHING, 100, 7, 2, 1)
INVALIDATE_CHAIN_MAX = 12


def base_cases(rng: random.Random, workload: Workload, start: Any) -> Iterator[Case]:
    """Streams over the whole workload: every scope plain, expanded and with system events, then random mixtures."""
    first, second = workload.databases
    scopes: tuple[tuple[str, str | None], ...] = (("admin", None), (first, None), (first, "c0"))
    begin = {"startAtOperationTime": start}
    for scope in scopes:
        for options in ({}, _EXPANDED, _EXPANDED | _SYSTEM):
            yield Case(scope, begin | options, entries_max=rng.choice(_BATCH_SIZES))
    yield Case(("admin", None), begin | _EXPANDED, v2=True, entries_max=rng.choice(_BATCH_SIZES))
    yield Case(("admin", None), begin | _SYSTEM, entries_max=rng.choice(_BATCH_SIZES))
    yield Case((first, None), begin | {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"})
    for collection in rng.sample(COLLECTIONS[1:], 3):
        yield Case((first, collection), begin | options_of(rng), v2=rng.random() < 0.5)
    for scope in (*scopes, (first, "c1"), (second, None), (second, "c0")):
        for _ in range(2):
            batch = rng.choice(_BATCH_SIZES)
            yield Case(
                scope, begin | options_of(rng), v2=rng.random() < 0.3, entries_max=batch, live=rng.random() < 0.3
            )
    yield Case((first, None), begin | options_of(rng), pipeline=SPLIT, entries_max=rng.choice(_BATCH_SIZES))
    for hidden in ("system.js", "system.views", "system.buckets.ts0"):
        yield Case((first, hidden), begin | options_of(rng) | {"allowToRunOnSystemNS": True})
    yield Case(("config", workload.settings), begin | options_of(rng) | {"allowToRunOnConfigDB": True})
    yield Case(("config", None), begin | options_of(rng) | {"allowToRunOnConfigDB": True})


def options_of(rng: random.Random) -> dict[str, Any]:
    """A random mixture of the options that change what a stream shows."""
    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        options["fullDocument"] = rng.choice(FULL_DOCUMENT)
    if rng.random() < 0.6:
        options["fullDocumentBeforeChange"] = rng.choice(BEFORE_CHANGE)
    for name, chance in (
        ("showExpandedEvents", 0.5),
        ("showSystemEvents", 0.3),
        ("showRawUpdateDescription", 0.2),
        ("showMigrationEvents", 0.2),
        ("matchCollectionUUIDForUpdateLookup", 0.3),
    ):
        if rng.random() < chance:
            options[name] = True
    return options


def resume_cases(rng: random.Random, base: Case, read: Compared, count: int) -> Iterator[Case]:
    """Resumes at random events and high-water marks of a stream: mostly the same stream again, sometimes another one,
    which may not know the token. Half of the tokens are taken from our events, half from the server's."""
    assert read.ours is not None
    tokens = [bson.decode(event, ANY_VALUE)["_id"] for event in _events(rng, read)]
    marks = [bson.decode(token) for _, token in read.native.replies]
    kept = {name: value for name, value in base.stage.items() if name != "startAtOperationTime"}
    for _ in range(count if tokens else 0):
        token = rng.choice(marks) if rng.random() < 0.1 else rng.choice(tokens)
        name = rng.choice(("resumeAfter", "startAfter"))
        options, scope, v2 = kept, base.scope, base.v2
        kind = rng.random()
        if kind < 0.15:
            options = options_of(rng)
        elif kind < 0.25:
            v2 = not v2
        elif kind < 0.35:
            database = base.scope[0] if base.scope[0] != "admin" else "fuzz"
            scope = rng.choice((("admin", None), (database, None), (database, "c0"), (database, "c1")))
        yield Case(
            scope,
            {**options, name: token},
            v2,
            base.pipeline,
            entries_max=rng.choice(_BATCH_SIZES),
            live=rng.random() < 0.2,
        )


def match_cases(rng: random.Random, base: Case, read: Compared, count: int, version: str) -> Iterator[Case]:
    """The same stream with a random ``$match``, sometimes after or before a stage that changes the event. What can fail
    is left out, because one side may evaluate an expression less often than the other, and then an error is missing
    without being a difference."""
    predicates = EventPredicates(rng, read.native.events)
    for number in range(count):
        match = accepted_match(predicates, version)
        stages = rng.choice(
            ((match,), (match,), (match, accepted_match(predicates, version)), ({"$set": {"x.y": "$ns.db"}}, match),
             ({"$unset": ["wallTime", "fullDocument.a"]}, match), ({"$project": {"operationType": 1, "ns": 1}}, match),
             (_redact(rng),), (match, _redact(rng)))
        )  # fmt: skip
        images: dict[str, Any] = {}
        if rng.random() < 0.4:
            # Whether a required image is missed depends on how much of the query the server rewrites. That has tests of
            # its own.
            images = {
                "fullDocument": rng.choice(FULL_DOCUMENT[:-1]),
                "fullDocumentBeforeChange": rng.choice(BEFORE_CHANGE[:-1]),
            }
        elif "required" in base.stage.values():
            images = {"fullDocument": "default", "fullDocumentBeforeChange": "off"}
        size = rng.choice(_BATCH_SIZES)
        yield Case(base.scope, {**base.stage, **images}, base.v2, stages, entries_max=size, live=number % 3 == 0)


def _redact(rng: random.Random) -> dict[str, Any]:
    """Leaves events out by their type."""
    types = rng.sample(("insert", "update", "replace", "delete", "drop", "rename"), rng.randint(1, 3))
    return {"$redact": {"$cond": [{"$in": [{"$ifNull": ["$operationType", ""]}, types]}, "$$PRUNE", "$$KEEP"]}}


def accepted_match(predicates: EventPredicates, version: str) -> dict[str, Any]:
    """A ``$match`` that the server would take."""
    while True:
        stage = {"$match": RawBSONDocument(predicates.query())}
        try:
            compile_stages([bson.encode(stage)])
        except UsageError:
            continue
        # On 4.4.2 null among other values of $in is not undefined, as it is alone and from 5.0 on.
        if version.startswith("4.") and _null_beside_others(bson.decode(stage["$match"].raw, ANY_VALUE)):
            continue
        return stage


def _null_beside_others(value: Any, name: str = "") -> bool:
    """Whether a query has ``$in`` or ``$nin`` of null and something else."""
    if isinstance(value, Mapping):
        return any(_null_beside_others(inner, key) for key, inner in value.items())
    if isinstance(value, list):
        if name in ("$in", "$nin") and None in value and len(value) > 1:
            return True
        return any(_null_beside_others(inner) for inner in value)
    return False


def for_version(case: Case, version: str) -> Case | None:
    """The case as a server of that version understands it; ``None`` if it would understand none of it.

    Before 6.0 there are no images but ``updateLookup``: streams that ask for others, or for expanded events, look up.
    """
    known = _KNOWN.get(version[:3])
    if known is None:
        return case
    stage = {
        name: value
        for name, value in case.stage.items()
        if name not in _NEW_OPTIONS - known and (value is not None or version[:3] != _NULL_IS_UNSAID)
    }
    asks = case.stage.get("showExpandedEvents") is True or case.stage.get("fullDocument") in FULL_DOCUMENT[2:]
    if asks:
        stage["fullDocument"] = "updateLookup"
    if (case.scope[1] or "").startswith("system.") and "allowToRunOnSystemNS" not in known:
        return None
    pipeline = tuple(one for one in case.pipeline if one not in SPLIT)
    return replace(case, stage=stage, v2=False, pipeline=pipeline)


def after_invalidate(case: Case, token: bytes) -> Case:
    """The stream after an invalidation."""
    kept = {name: value for name, value in case.stage.items() if name not in ("startAtOperationTime", "resumeAfter")}
    return Case(case.scope, {**kept, "startAfter": bson.decode(token)}, case.v2, case.pipeline, case.entries_max)


def broken_tokens(rng: random.Random, whole: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Tokens with digits changed, cut, added; with other type bits; of other types."""
    data: str = whole["_data"]
    for _ in range(count):
        kind = rng.randrange(8)
        token = dict(whole)
        if kind <= 2:
            at = rng.randrange(len(data))
            token["_data"] = data[:at] + rng.choice("0123456789ABCDEF") + data[at + 1 :]
        elif kind == 3:
            token["_data"] = data[: rng.randrange(len(data))]
        elif kind == 4:
            token["_data"] = data + rng.choice(("00", "04", "2904", "FF"))
        elif kind == 5:
            at = rng.randrange(9, len(data) // 2) * 2
            token["_data"] = (
                data[:at] + rng.choice(("00", "0A", "14", "29", "2B02", "46", "5A", "6E", "FF")) + data[at + 2 :]
            )
        elif kind == 6:
            token["_typeBits"] = rng.choice(
                (Binary(rng.randbytes(rng.randint(0, 4)), rng.choice((0, 0, 4))), "00", 1, None)
            )
        else:
            token["_data"] = rng.choice(("", "zz", data.lower(), 5, None, data[:-1], Int64(3)))
        yield token


def odd_stages(rng: random.Random) -> dict[str, Any]:
    """Options that a server refuses, and some that it only just accepts."""
    value: Any = rng.choice((1, "x", "default", None, True, False, 1.5, {}, [], "required", b"", Int64(1)))
    name = rng.choice(
        (
            "fullDocument",
            "fullDocumentBeforeChange",
            "showExpandedEvents",
            "showSystemEvents",
            "showMigrationEvents",
            "showRawUpdateDescription",
            "allChangesForCluster",
            "allowToRunOnConfigDB",
            "matchCollectionUUIDForUpdateLookup",
            "resumeAfter",
            "startAfter",
            "startAtOperationTime",
            "fulldocument",
            "unknown",
        )
    )
    return {name: value}


def _events(rng: random.Random, read: Compared) -> list[bytes]:
    assert read.ours is not None
    source = read.ours.events if rng.random() < 0.5 else read.native.events
    return source[: read.equal_events] if source else []
