"""Recorded workloads about namespaces: definitions of every kind, scopes, invalidations."""

from __future__ import annotations

import datetime
from typing import Any

from tests.golden.workloads import CLUSTER, IMAGES, Runner, StreamPlan, after, everywhere


def definitions(run: Runner) -> list[StreamPlan]:
    """Collections of every kind, indexes, views, time series, renames, drops."""
    db, other = "gr", "gr2"
    run(db, {"create": "a"})
    run(db, {"create": "capped", "capped": True, "size": 8192, "max": 3})
    run(db, {"create": "checked", "validator": {"x": {"$gt": 1}}, "collation": {"locale": "fr"}})
    run(db, {"create": "view", "viewOn": "a", "pipeline": [{"$match": {"x": 1}}]})
    run.insert(db, "a", {"_id": 1, "x": 1}, {"_id": 2, "x": 2})
    run.insert(db, "capped", *({"_id": number} for number in range(5)))
    _indexes(run, db)
    run(db, {"collMod": "checked", "validator": {"x": {"$gt": 2}}, "validationLevel": "moderate"})
    run(db, {"collMod": "view", "viewOn": "a", "pipeline": []})
    if run.version >= (6, 0):
        run(db, {"create": "clustered", "clusteredIndex": {"key": {"_id": 1}, "unique": True}})
        run(db, {"create": "imaged", **IMAGES})
        run(db, {"collMod": "imaged", "changeStreamPreAndPostImages": {"enabled": False}})
    if run.version >= (5, 0):
        _series(run, db)
    run("admin", {"renameCollection": f"{db}.a", "to": f"{db}.b"})
    run(db, {"create": "target"})
    run("admin", {"renameCollection": f"{db}.b", "to": f"{db}.target", "dropTarget": True})
    run("admin", {"renameCollection": f"{db}.target", "to": f"{other}.moved"})
    run(db, {"convertToCapped": "checked", "size": 16384})
    run(other, {"aggregate": "moved", "pipeline": [{"$out": "out"}], "cursor": {}})
    run(other, {"aggregate": "moved", "pipeline": [{"$merge": {"into": "merged"}}], "cursor": {}})
    run.update(db, "system.js", "f", {"$set": {"value": 1}}, upsert=True)
    run(db, {"drop": "view"})
    run(db, {"drop": "checked"})
    if run.version >= (4, 4):
        _definitions_in_a_transaction(run, other)
    run(db, {"dropDatabase": 1})
    run(other, {"dropDatabase": 1})
    plans = everywhere(db, "a", run.version)
    for name in ("b", "target", "indexed", "capped"):
        stage = {"showExpandedEvents": True} if run.version >= (6, 0) else {}
        plans.append(StreamPlan(f"collection {name}", (db, name), stage))
    return plans


def _indexes(run: Runner, db: str) -> None:
    """On a collection with documents (built, then committed) and on an empty one (one entry an index)."""
    run(db, {"createIndexes": "a", "indexes": [{"key": {"x": 1, "y": -1}, "name": "xy", "unique": True}]})
    run(db, {"create": "indexed"})
    specifications: list[dict[str, Any]] = [
        {"key": {"p": 1}, "name": "p", "expireAfterSeconds": 10**6, "partialFilterExpression": {"p": {"$gt": 5}}},
        {"key": {"q": "hashed"}, "name": "q"},
        {"key": {"t": "text"}, "name": "t", "weights": {"t": 2}},
        {"key": {"$**": 1}, "name": "wild"},
        {"key": {"s": 1}, "name": "s", "sparse": True, "collation": {"locale": "de"}},
    ]
    run(db, {"createIndexes": "indexed", "indexes": specifications})
    run(db, {"collMod": "indexed", "index": {"name": "p", "expireAfterSeconds": 200}})
    run(db, {"collMod": "indexed", "index": {"name": "s", "hidden": True}})
    run(db, {"dropIndexes": "a", "index": "xy"})
    run(db, {"dropIndexes": "indexed", "index": ["p", "q"]})
    run(db, {"dropIndexes": "indexed", "index": "*"})


def _series(run: Runner, db: str) -> None:
    run(db, {"create": "series", "timeseries": {"timeField": "t", "metaField": "m"}})
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    for second in range(3):
        run.insert(db, "series", {"t": at + datetime.timedelta(seconds=second), "m": second % 2, "v": 1.5})
    run(db, {"collMod": "series", "timeseries": {"granularity": "hours"}})
    run(db, {"drop": "series"})


def _definitions_in_a_transaction(run: Runner, db: str) -> None:
    fields = run.transaction(
        [
            (db, {"create": "made"}),
            (db, {"createIndexes": "made", "indexes": [{"key": {"a": 1}, "name": "a_1"}]}),
            (db, {"insert": "made", "documents": [{"_id": 1}, {"_id": 2}]}),
        ]
    )
    run("admin", {"commitTransaction": 1, **fields})


def namespaces(run: Runner) -> list[StreamPlan]:
    """Similar names, names with characters that are special in a regular expression, other databases."""
    db = "gr"
    names = ("c", "cc", "c.d", "Xc", "c+(x)", "c*", "c|d", "c^", "[c]", "system", "tmp.x", "имя", "c system.d")
    for name in names:
        run.insert(db, name, {"_id": 1})
        run.update(db, name, 1, {"$set": {"x": 1}})
    for database in ("g", "grr", "gr_", "Xg"):
        run.insert(database, "c", {"_id": 2})
    run.update(db, "system.js", "f", {"$set": {"value": 1}}, upsert=True)
    run(db, {"create": "v", "viewOn": "c", "pipeline": []})
    run("config", {"insert": "mine", "documents": [{"_id": 1}]})
    run("config", {"delete": "mine", "deletes": [{"q": {"_id": 1}, "limit": 1}]})
    run(db, {"drop": "v"})
    plans = everywhere(db, "c", run.version)
    plans += [StreamPlan(f"collection {name}", (db, name), {}) for name in names[2:]]
    if run.version >= (6, 0):
        plans.append(StreamPlan("config database", ("config", None), {"allowToRunOnConfigDB": True}))
        plans.append(StreamPlan("config collection", ("config", "mine"), {"allowToRunOnConfigDB": True}))
        for name in ("system.js", "system.views"):
            plans.append(StreamPlan(name, (db, name), {"allowToRunOnSystemNS": True}))
    return plans


def invalidations(run: Runner) -> list[StreamPlan]:
    """Drop, rename from, rename onto, dropDatabase; after each, the streams continue with startAfter."""
    db = "gr"
    for round_ in range(2):
        run.insert(db, "c", {"_id": round_})
        run(db, {"drop": "c"})
    run.insert(db, "c", {"_id": 10})
    run("admin", {"renameCollection": f"{db}.c", "to": f"{db}.away"})
    run.insert(db, "c", {"_id": 11})
    run.insert(db, "onto", {"_id": 12})
    run("admin", {"renameCollection": f"{db}.onto", "to": f"{db}.c", "dropTarget": True})
    run.insert(db, "c", {"_id": 13})
    run(db, {"dropDatabase": 1})
    run.insert(db, "c", {"_id": 14})
    collection = (db, "c")
    plans = [StreamPlan("collection", collection, {})]
    for link in range(1, 6):
        name = "collection" if link == 1 else f"startAfter {link - 1}"
        plans.append(StreamPlan(f"startAfter {link}", collection, after(name, -1, "startAfter")))
    plans += [
        StreamPlan("resumeAfter an invalidate", collection, after("collection", -1)),
        StreamPlan("resumeAfter a drop", collection, after("collection", -2)),
        StreamPlan("startAfter a drop", collection, after("collection", -2, "startAfter")),
        StreamPlan("database", (db, None), {}),
        StreamPlan("database startAfter", (db, None), after("database", -1, "startAfter")),
        StreamPlan("database with a collection's invalidate", (db, None), after("collection", -1, "startAfter")),
        StreamPlan("collection with a database's invalidate", collection, after("database", -1, "startAfter")),
        StreamPlan("cluster", CLUSTER, {}),
    ]
    if run.version >= (6, 0):
        plans.append(StreamPlan("collection v2", collection, {"showExpandedEvents": True}, v2=True))
        plans.append(StreamPlan("startAfter v2", collection, after("collection v2", -1, "startAfter")))
    return plans
