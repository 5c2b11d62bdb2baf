"""The workloads that recordings are made of, and the streams read over each.

Every function runs its operations on a fresh server and returns the streams to read afterwards. What a version cannot
do (images before 6.0, say) is left out for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson as rb
from tests.differential import documents as docs
from tests.differential.native import NativeStream
from tests.differential.wire import ANY_VALUE, CommandError, Wire

Scope = tuple[str, str | None]
Stage = Mapping[str, Any]
CLUSTER: Scope = ("admin", None)
IMAGES = {"changeStreamPreAndPostImages": {"enabled": True}}


@dataclass(frozen=True)
class StreamPlan:
    """A stream to record. ``stage`` may depend on streams read before it, by their names; without a start it begins
    where the workload began. ``batch_size`` is for every reply."""

    name: str
    scope: Scope
    stage: Stage | Callable[[Mapping[str, NativeStream]], Stage]
    v2: bool = False
    pipeline: tuple[Any, ...] = ()
    batch_size: int | None = None


def token_of(event: bytes) -> Any:
    return bson.decode(event, ANY_VALUE)["_id"]


def after(stream: str, index: int, option: str = "resumeAfter", **options: Any) -> Callable[..., Stage]:
    """A stage that starts after the event ``index`` of an earlier stream."""
    return lambda read: {option: token_of(read[stream].events[index]), **options}


class Runner:
    """Runs commands; those that a version refuses are named by the caller, so that no workload shrinks unseen."""

    def __init__(self, wire: Wire, version: tuple[int, ...]) -> None:
        self.wire = wire
        self.version = version
        self._transaction = 0
        self._session = {"id": bson.Binary(random.Random(version[0]).randbytes(16), 4)}

    def __call__(self, database: str, command: Mapping[str, Any], *, refused: int | None = None) -> RawBSONDocument:
        try:
            return self.wire.run(database, command)
        except CommandError as error:
            if error.code != refused:
                raise
            return RawBSONDocument(bson.encode({"ok": 0}))

    def insert(self, database: str, collection: str, *documents: Any) -> None:
        reply = self(database, {"insert": collection, "documents": list(documents)})
        assert "writeErrors" not in reply, reply["writeErrors"]

    def update(self, database: str, collection: str, id_: Any, update: Any, **options: Any) -> None:
        reply = self(database, {"update": collection, "updates": [{"q": {"_id": id_}, "u": update, **options}]})
        assert "writeErrors" not in reply, reply["writeErrors"]

    def delete(self, database: str, collection: str, id_: Any) -> None:
        self(database, {"delete": collection, "deletes": [{"q": {"_id": id_}, "limit": 1}]})

    def begin(self) -> dict[str, Any]:
        """The session fields of a new transaction; its first command is sent with ``startTransaction``."""
        self._transaction += 1
        return {"lsid": self._session, "txnNumber": Int64(self._transaction), "autocommit": False}

    def transaction(self, commands: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """Run commands in a new transaction and leave it open; its session fields."""
        fields = self.begin()
        for index, (database, command) in enumerate(commands):
            start = {"startTransaction": True, "readConcern": {"level": "local"}} if index == 0 else {}
            self(database, {**command, **fields, **start})
        return fields

    def retryable(self, database: str, command: Mapping[str, Any]) -> None:
        self._transaction += 1
        self(database, {**command, "lsid": self._session, "txnNumber": Int64(self._transaction)})


def inserts(collection: str, *documents: Any) -> dict[str, Any]:
    return {"insert": collection, "documents": list(documents)}


def update_command(collection: str, id_: Any, update: Any) -> dict[str, Any]:
    return {"update": collection, "updates": [{"q": {"_id": id_}, "u": update}]}


def deletes(collection: str, id_: Any) -> dict[str, Any]:
    return {"delete": collection, "deletes": [{"q": {"_id": id_}, "limit": 1}]}


def everywhere(database: str, collection: str, version: tuple[int, ...]) -> list[StreamPlan]:
    """Each scope, plain and with each kind of further events the version has."""
    kinds: dict[str, Stage] = {"plain": {}}
    if version >= (6, 0):
        kinds |= {
            "expanded": {"showExpandedEvents": True},
            "system": {"showSystemEvents": True},
            "system and expanded": {"showSystemEvents": True, "showExpandedEvents": True},
        }
    scopes: dict[str, Scope] = {"collection": (database, collection), "database": (database, None), "cluster": CLUSTER}
    plans = [
        StreamPlan(f"{where} {kind}", scope, stage) for where, scope in scopes.items() for kind, stage in kinds.items()
    ]
    if version >= (6, 0):
        plans.append(StreamPlan("cluster expanded v2", CLUSTER, {"showExpandedEvents": True}, v2=True))
    return plans


def identifiers(run: Runner) -> list[StreamPlan]:
    """An insert, an update and a delete for ``_id`` values of every type, including unusual numbers."""
    rng = random.Random("recorded identifiers")
    run("gr", {"create": "ids"})
    seen: set[tuple[int, bytes]] = set()
    while len(seen) < 150:
        type_, value = docs.value(rng, depth=2)
        if type_ in (rb.ARRAY, rb.REGEX, rb.UNDEFINED) or (type_, value) in seen:
            continue
        seen.add((type_, value))
        key = RawBSONDocument(rb.encode_document(rb.encode_element(type_, b"_id", value)))
        reply = run("gr", inserts("ids", key))
        if "writeErrors" in reply:  # equal to one before it, or with a name that an _id must not hold
            continue
        equal = rb.encode_document(rb.encode_element(type_, b"$eq", value))
        query = RawBSONDocument(rb.encode_document(rb.encode_element(rb.OBJECT, b"_id", equal)))
        run("gr", {"update": "ids", "updates": [{"q": query, "u": {"$set": {"x": 1}}}]})
        run("gr", {"delete": "ids", "deletes": [{"q": query, "limit": 1}]})
    plans = [StreamPlan("collection", ("gr", "ids"), {})]
    if run.version >= (6, 0):
        plans.append(StreamPlan("collection v2", ("gr", "ids"), {}, v2=True))
        plans.append(StreamPlan("collection expanded", ("gr", "ids"), {"showExpandedEvents": True}))
    return plans


_PADDING = "p" * 200
_DOCUMENT: dict[str, Any] = {
    "a": 1,
    "b": {"c": {"d": 2, "e": [1, 2, 3]}},
    "list": [1, 2, {"x": 1, "y": [5, 6]}, 4, 5],
    "0": {"1": 2},
    "u": {"d": 1},
    "pad": _PADDING,
}
_UPDATES: tuple[Any, ...] = (
    {"$set": {"a": 2}},
    {"$set": {"b.c.d": 3, "new": 1}},
    {"$unset": {"a": ""}},
    {"$set": {"list.1": "one"}, "$unset": {"list.0": ""}},
    {"$set": {"list.9": "far"}},
    {"$set": {"list.2.y.0": 7}},
    {"$unset": {"list.2.x": "", "b.c.d": ""}},
    {"$push": {"list": {"$each": [6, 7], "$position": 0}}},
    {"$push": {"list": {"$each": [], "$slice": 2}}},
    {"$pull": {"list": {"$gt": 3}}},
    {"$rename": {"a": "renamed", "b.c": "b.moved"}},
    {"$inc": {"a": Int64(2**40), "0.1": 1}},
    {"$set": {"u.d": 2, "u.i": 3, "s": {"u": 1}}},
    {"$currentDate": {"at": {"$type": "timestamp"}}},
    {"$set": {"a": 1}},
    [{"$set": {"list": {"$slice": ["$list", 2]}}}],
    [{"$set": {"list": {"$concatArrays": [{"$slice": ["$list", 1]}, [99], {"$slice": ["$list", 2, 2]}]}}}],
    [{"$set": {"b.c.e": {"$slice": ["$b.c.e", 1]}, "a": 5}}, {"$unset": "u"}],
    [{"$replaceWith": {"$mergeObjects": [{"pad": "$pad", "_id": "$_id", "z": 1}, {"list": "$list"}]}}],
    [{"$unset": ["a", "b", "list", "0", "u"]}],
    {"replaced": True, "pad": _PADDING},
    {},
)
_ODD_NAME_UPDATES = ("a.b", "$c", "", "0", "01", ".", "x.0.y")


def updates(run: Runner) -> list[StreamPlan]:
    """Update descriptions: each operator and pipeline once, and (from 5.0) fields whose names look like paths."""
    for number, update in enumerate(_UPDATES):
        run.insert("gr", "updates", {"_id": number, **_DOCUMENT})
        run.update("gr", "updates", number, update)
    if run.version >= (5, 0):
        for number, name in enumerate(_ODD_NAME_UPDATES, start=100):
            run.insert("gr", "updates", {"_id": number, **_DOCUMENT})
            for value in (1, {"k": 1}, "$$REMOVE"):
                changed = {"$setField": {"field": {"$literal": name}, "input": "$$ROOT", "value": value}}
                run.update("gr", "updates", number, [{"$replaceWith": changed}])
    plans = [StreamPlan("collection", ("gr", "updates"), {})]
    if run.version >= (6, 0):
        for name in ("showExpandedEvents", "showRawUpdateDescription"):
            plans.append(StreamPlan(f"collection {name}", ("gr", "updates"), {name: True}))
    return plans
