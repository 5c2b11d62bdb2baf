"""Random update commands: every update operator over nested and odd paths, pipelines that give deep diffs and
truncated arrays, and replacements."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson as rb
from tests.differential import documents as docs

NUMBER_PATHS = (
    "n",
    "o.x",
    "scores.0",
    "scores.2",
    "lines.0.q",
    "lines.1.q",
    "o.0",
    "o.01",
    "o.7",
    "5.n",
    "count",
    "a.b.c",
)
ANY_PATHS = (
    *NUMBER_PATHS,
    "a",
    "b",
    "name",
    "o",
    "o.y",
    "o.y.a",
    "o.y.b.c",
    "o.y.0",
    "5",
    "5.a",
    "5.0",
    "scores",
    "scores.9",
    "lines",
    "lines.0",
    "lines.2.sku",
    "lines.0.extra.deep",
    "pad",
    "i",
    "u",
    "d",
    "s.u",
    "l",
    "new",
    "01",
    "10.1",
    "ключ.x",
    "ts",
    "applyOps",
    "applyOps.0.op",
    "prepare",
    "token",
    "o2",
    "ui",
    "op",
    "ns.db",
    "_data",
    "diff.u",
    "lsid.id",
    "operationType",
    "documentKey._id",
)
ARRAY_PATHS = ("scores", "scores", "lines", "tags", "o.tags", "5.list")


def literal(rng: random.Random, *, depth: int = 1) -> RawBSONDocument:
    """``{v: <any value>}``: a value of any type, to be placed by ``embed``."""
    type_, data = docs.value(rng, depth=depth)
    return RawBSONDocument(rb.encode_document(rb.encode_element(type_, b"v", data)))


def number(rng: random.Random) -> Any:
    return rng.choice((1, -1, 2, 10, Int64(5), Int64(2**40), 0.5, -2.25, rng.randint(-50, 50)))


def raw_fields(fields: dict[str, tuple[int, bytes]]) -> RawBSONDocument:
    """A document from values that Python's types cannot hold."""
    return RawBSONDocument(rb.encode_document(*(rb.encode_element(t, k.encode(), v) for k, (t, v) in fields.items())))


def _set(rng: random.Random) -> dict[str, Any]:
    paths = rng.sample(ANY_PATHS, rng.randint(1, 3))
    return {"$set": raw_fields({path: docs.value(rng, depth=1) for path in paths})}


def _set_on_insert(rng: random.Random) -> dict[str, Any]:
    return {"$setOnInsert": {"fresh": rng.randint(0, 9)}, "$inc": {"count": 1}}


def _unset(rng: random.Random) -> dict[str, Any]:
    return {"$unset": dict.fromkeys(rng.sample(ANY_PATHS, rng.randint(1, 3)), "")}


def _arithmetic(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(("$inc", "$mul", "$min", "$max")): {rng.choice(NUMBER_PATHS): number(rng)}}


def _bit(rng: random.Random) -> dict[str, Any]:
    return {"$bit": {rng.choice(("n", "count")): {rng.choice(("and", "or", "xor")): rng.randint(0, 255)}}}


def _rename(rng: random.Random) -> dict[str, Any]:
    source, target = rng.sample(("a", "b", "n", "o.x", "o.y", "name", "new", "o.renamed", "5", "count"), 2)
    return {"$rename": {source: target}}


def _current_date(rng: random.Random) -> dict[str, Any]:
    return {"$currentDate": {"at": rng.choice((True, {"$type": "timestamp"}, {"$type": "date"}))}}


def _push(rng: random.Random) -> dict[str, Any]:
    path = rng.choice(ARRAY_PATHS)
    items = [rng.randint(0, 9) for _ in range(rng.randint(0, 3))]
    each: dict[str, Any] = {"$each": items}
    if rng.random() < 0.4:
        each["$slice"] = rng.choice((0, 2, -2, 5))
    if rng.random() < 0.3:
        each["$sort"] = rng.choice((1, -1))
    if rng.random() < 0.4:
        each["$position"] = rng.choice((0, 1, -1))
    if path == "lines":
        each = {"$each": [{"q": item, "sku": "s"} for item in items]}
    return {"$push": {path: each}}


def _array(rng: random.Random) -> dict[str, Any]:
    path = rng.choice(ARRAY_PATHS)
    return rng.choice(
        (
            {"$addToSet": {path: rng.randint(0, 9)}},
            {"$addToSet": {path: {"$each": [1, 2, "x"]}}},
            {"$pop": {path: rng.choice((1, -1))}},
            {"$pull": {path: rng.randint(0, 9)}},
            {"$pull": {"lines": {"q": {"$lt": rng.randint(0, 9)}}}},
            {"$pullAll": {path: [1, 2, 3]}},
            {"$set": {"scores.$[]": rng.randint(0, 9)}},
            {"$inc": {"lines.$[].q": 1}},
            {"$unset": {"scores.1": "", "lines.0": ""}},
        )
    )


_OPERATORS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    _set,
    _set,
    _set,
    _set_on_insert,
    _unset,
    _arithmetic,
    _arithmetic,
    _bit,
    _rename,
    _current_date,
    _push,
    _push,
    _array,
    _array,
)


def operators(rng: random.Random) -> dict[str, Any]:
    """An update document of one or two operators."""
    update = dict(rng.choice(_OPERATORS)(rng))
    if rng.random() < 0.3:
        for name, fields in rng.choice(_OPERATORS)(rng).items():
            update.setdefault(name, fields)
    return update


def pipeline(rng: random.Random) -> list[dict[str, Any]]:
    """An update pipeline of one or two stages."""
    return [_stage(rng) for _ in range(rng.choice((1, 1, 1, 2)))]


def _stage(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(11)
    if kind == 0:
        return {"$set": {rng.choice(("scores", "lines", "tags")): _sliced(rng)}}
    if kind == 1:
        path = rng.choice(("scores", "lines"))
        joined = [f"${path}", {"$literal": [literal(rng), rng.randint(0, 9)]}]
        return {"$set": {path: {"$cond": [{"$isArray": f"${path}"}, {"$concatArrays": joined}, []]}}}
    if kind == 2:
        return {
            "$unset": rng.sample(("n", "o.x", "o.y", "a", "b", "5", "lines.q", "scores", "name"), rng.randint(1, 3))
        }
    if kind == 3:
        return {
            "$set": {rng.choice(("o", "o.y", "5", "o.y.a", "new", "lines.q", "lines.deep")): {"$literal": literal(rng)}}
        }
    if kind in (4, 5, 6):  # the same shape with other values: the server logs the difference, field by field
        shape = RawBSONDocument(docs.everyday_document(rng, rb.encode_element(rb.NULL, b"_id", b"")))
        return {"$replaceWith": {"$mergeObjects": [{"$literal": shape}, {"_id": "$_id", "pad": "$pad"}]}}
    if kind == 7:
        name = rng.choice(docs.ODD_NAMES).decode()
        name = "$w" if name == "$v" and rng.random() < 0.95 else name  # why: see documents.document
        return {"$replaceWith": {"$setField": {"field": {"$literal": name}, "input": "$$ROOT", "value": _any(rng)}}}
    if kind == 8:
        name = rng.choice(docs.ODD_NAMES).decode()
        return {"$replaceWith": {"$unsetField": {"field": {"$literal": name}, "input": "$$ROOT"}}}
    if kind == 9:
        items = {
            "$map": {"input": "$scores", "in": {"$cond": [{"$eq": ["$$this", rng.randint(0, 9)]}, "hit", "$$this"]}}
        }
        return {"$set": {"scores": {"$cond": [{"$isArray": "$scores"}, items, []]}}}
    moved = {"$literal": RawBSONDocument(docs.document(rng, depth=1))}
    return {"$replaceWith": {"$mergeObjects": [{"pad": "$pad", "_id": "$_id"}, moved, "$$ROOT"]}}


def _sliced(rng: random.Random) -> dict[str, Any]:
    """An array cut at its end, sometimes with an element before the cut changed too."""
    path = rng.choice(("scores", "lines"))
    size = rng.randint(1, 3)
    cut = {"$slice": [f"${path}", size]}
    changed = {"$map": {"input": cut, "in": {"$cond": [{"$eq": ["$$this", rng.randint(0, 9)]}, 77, "$$this"]}}}
    return {"$cond": [{"$isArray": f"${path}"}, changed if rng.random() < 0.4 else cut, [1, 2, 3]]}


def _any(rng: random.Random) -> dict[str, Any]:
    return {"$literal": literal(rng)}


def replacement(rng: random.Random) -> RawBSONDocument:
    """A whole document without ``_id``."""
    if rng.random() < 0.5:
        whole = docs.everyday_document(rng, b"")
        return RawBSONDocument(whole)
    return RawBSONDocument(docs.document(rng))


def statement(rng: random.Random, query: RawBSONDocument, *, one: bool = False) -> dict[str, Any]:
    """One element of an update command's ``updates``; with ``one`` never a multi-update (retryable writes)."""
    kind = rng.random()
    update: Any
    if kind < 0.5:
        update = operators(rng)
    elif kind < 0.85:
        update = pipeline(rng)
    else:
        return {"q": query, "u": replacement(rng), "upsert": rng.random() < 0.2}
    result: dict[str, Any] = {"q": query, "u": update, "upsert": rng.random() < 0.15}
    if kind < 0.05:
        result["u"] = {"$set": {"scores.$[e]": rng.randint(0, 99)}}
        result["arrayFilters"] = [{"e": {"$lt": rng.randint(0, 9)}}]
    if not one and rng.random() < 0.06:
        result |= {"q": {"n": {"$lt": rng.randint(0, 40)}}, "multi": True, "upsert": False}
    return result
