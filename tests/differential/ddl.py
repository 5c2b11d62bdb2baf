"""Random definitions: collections of every kind, indexes, views, time series, renames, and what turns images on."""

from __future__ import annotations

import datetime
import random
from typing import Any

VIEWS = ("v0", "v1")
SERIES = ("ts0", "ts1")
Made = list[tuple[str, dict[str, Any]]]

_INDEXES: tuple[dict[str, Any], ...] = (
    {"key": {"a": 1}, "name": "a_1"},
    {"key": {"n": -1, "o.x": 1}, "name": "n_x", "hidden": True},
    {"key": {"uniq": 1}, "name": "uniq_1", "unique": True, "sparse": True},
    {"key": {"count": 1}, "name": "count_1", "partialFilterExpression": {"count": {"$gt": 5}}},
    {"key": {"at": 1}, "name": "at_1", "expireAfterSeconds": 10**7},
    {"key": {"name": 1}, "name": "name_fr", "collation": {"locale": "fr"}},
    {"key": {"geo": "2dsphere"}, "name": "geo_2d"},
    {"key": {"hash": "hashed"}, "name": "hashed_1"},
    {"key": {"words": "text"}, "name": "words_text", "weights": {"words": 3}},
    {"key": {"wild.$**": 1}, "name": "wild"},
)
_CREATE_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"changeStreamPreAndPostImages": {"enabled": True}},
    {"changeStreamPreAndPostImages": {"enabled": True}},
    {"capped": True, "size": 16384, "max": 20},
    {"validator": {"n": {"$exists": True}}, "validationAction": "warn"},
    {"collation": {"locale": "de", "strength": 2}},
    {"clusteredIndex": {"key": {"_id": 1}, "unique": True, "name": "clustered"}},
    {"storageEngine": {"wiredTiger": {"configString": "block_compressor=zlib"}}},
    {"indexOptionDefaults": {"storageEngine": {"wiredTiger": {"configString": ""}}}},
)


def definition(rng: random.Random, database: str, collection: str, second: str, other_database: str) -> Made:
    """One definition command, with the commands that belong to it, as ``(database, command)``."""
    kind = rng.random()
    if kind < 0.2:
        return [(database, {"create": collection, **rng.choice(_CREATE_OPTIONS)})]
    if kind < 0.34:
        return [(database, _create_indexes(rng, collection))]
    if kind < 0.42:
        return [(database, {"dropIndexes": collection, "index": _dropped_index(rng)})]
    if kind < 0.62:
        return [(database, _coll_mod(rng, collection))]
    if kind < 0.65:
        return [(database, {"drop": collection})]
    if kind < 0.71:
        return [("admin", _rename(rng, database, collection, second, other_database))]
    if kind < 0.82:
        return [_view(rng, database, collection)]
    if kind < 0.92:
        return [_series(rng, database)]
    if kind < 0.95:
        return [(database, {"convertToCapped": collection, "size": 65536})]
    return [(database, _written_aggregate(rng, collection, second))]


def _create_indexes(rng: random.Random, collection: str) -> dict[str, Any]:
    return {"createIndexes": collection, "indexes": rng.sample(_INDEXES, rng.choice((1, 1, 1, 2, 3)))}


def _dropped_index(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.3:
        return "*"
    index = rng.choice(_INDEXES)
    if kind < 0.6:
        return index["name"]
    if kind < 0.8:
        return index["key"]
    return [chosen["name"] for chosen in rng.sample(_INDEXES, 2)]


def _coll_mod(rng: random.Random, collection: str) -> dict[str, Any]:
    change: dict[str, Any] = rng.choice(
        (
            {"changeStreamPreAndPostImages": {"enabled": True}},
            {"changeStreamPreAndPostImages": {"enabled": True}},
            {"changeStreamPreAndPostImages": {"enabled": False}},
            {"validator": {"n": {"$gte": -(10**9)}}, "validationAction": "warn", "validationLevel": "moderate"},
            {"validator": {}},
            {"index": {"name": "a_1", "hidden": rng.random() < 0.5}},
            {"index": {"name": "at_1", "expireAfterSeconds": 10**7 + rng.randint(0, 9)}},
            {"index": {"name": "a_1", "prepareUnique": True}},
            {"index": {"keyPattern": {"n": -1, "o.x": 1}, "hidden": rng.random() < 0.5}},
            {"cappedSize": 32768},
        )
    )
    return {"collMod": collection, **change}


def _rename(rng: random.Random, database: str, collection: str, second: str, other_database: str) -> dict[str, Any]:
    target = other_database if rng.random() < 0.25 else database
    return {
        "renameCollection": f"{database}.{collection}",
        "to": f"{target}.{second}",
        "dropTarget": rng.random() < 0.6,
    }


def _view(rng: random.Random, database: str, collection: str) -> tuple[str, dict[str, Any]]:
    view = rng.choice(VIEWS)
    pipeline = [{"$match": {"n": {"$gt": rng.randint(0, 9)}}}]
    kind = rng.random()
    if kind < 0.5:
        options = {"collation": {"locale": "sv"}} if rng.random() < 0.2 else {}
        return database, {"create": view, "viewOn": collection, "pipeline": pipeline, **options}
    if kind < 0.75:
        return database, {"collMod": view, "viewOn": collection, "pipeline": pipeline}
    return database, {"drop": view}


def _series(rng: random.Random, database: str) -> tuple[str, dict[str, Any]]:
    series = rng.choice(SERIES)
    kind = rng.random()
    if kind < 0.3:
        options: dict[str, Any] = {"timeField": "t", "metaField": "m"}
        if rng.random() < 0.5:
            options["granularity"] = rng.choice(("seconds", "minutes"))
        extra = {"expireAfterSeconds": 10**8} if rng.random() < 0.3 else {}
        return database, {"create": series, "timeseries": options, **extra}
    if kind < 0.7:
        start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        measurements = [
            {"t": start + datetime.timedelta(seconds=rng.randint(0, 5000)), "m": rng.randint(0, 2), "v": rng.random()}
            for _ in range(rng.randint(1, 4))
        ]
        return database, {"insert": series, "documents": measurements}
    if kind < 0.8:
        return database, {"createIndexes": series, "indexes": [{"key": {"m": 1, "t": 1}, "name": "m_t"}]}
    if kind < 0.9:
        return database, {"collMod": series, "timeseries": {"granularity": "hours"}}
    return database, {"drop": series}


def _written_aggregate(rng: random.Random, collection: str, second: str) -> dict[str, Any]:
    """An aggregation that writes: $out goes through a temporary collection, $merge writes documents."""
    if rng.random() < 0.5:
        last: dict[str, Any] = {"$out": second}
    else:
        last = {"$merge": {"into": second, "whenMatched": rng.choice(("replace", "merge", "keepExisting"))}}
    return {"aggregate": collection, "pipeline": [{"$match": {"n": {"$lt": 30}}}, last], "cursor": {}}
