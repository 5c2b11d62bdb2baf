"""Collections, views and indexes of every kind and every odd spelling, for the tests of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bson import Decimal128, Int64
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure

RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)

_BUCKETS = {"timeField": "t", "metaField": "m", "granularity": "minutes"}
COLLECTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "validated": {
        "validator": {"a": {"$gt": 1.0}, "$expr": {"$lt": ["$b", Int64(3)]}},
        "validationLevel": "moderate",
        "validationAction": "warn",
    },
    "schema": {"validator": {"$jsonSchema": {"bsonType": "object", "properties": {"a": {"bsonType": "int"}}}}},
    "collated": {"collation": {"locale": "de", "strength": 2}},
    "simple": {"collation": {"locale": "simple"}},
    "capped": {"capped": True, "size": 5000},
    "capped max": {"capped": True, "size": 5000.0, "max": Int64(7)},
    "clustered": {"clusteredIndex": {"key": {"_id": 1}, "unique": True}},
    "clustered named": {"clusteredIndex": {"key": {"_id": 1}, "unique": True, "name": "mine"}},
    "images": {"changeStreamPreAndPostImages": {"enabled": True}},
    "images 5.0": {"recordPreImages": True},
    "engine": {"storageEngine": {"wiredTiger": {"configString": "block_compressor=zlib"}}},
    "defaults": {"indexOptionDefaults": {"storageEngine": {"wiredTiger": {}}}},
    "ünï $x..y": {},
    "view": {"viewOn": "plain", "pipeline": [{"$match": {"a": 1.0}}]},
    "view of view": {"viewOn": "view", "pipeline": [{"$limit": Int64(3)}, {"$project": {"b": 0}}]},
    "view collated": {"viewOn": "nothing", "pipeline": [], "collation": {"locale": "fr"}},
}
#: Key, and the rest of the definition. Not every version accepts every one.
INDEXES: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
    ({"a": 1}, {}),
    ({"b": 1.0}, {"name": "double"}),
    ({"b": -1}, {}),
    ({"b2": Int64(1)}, {"name": "long"}),
    ({"c": -1.5}, {}),
    ({"c": Decimal128("1")}, {"name": "decimal"}),
    ({"d": 5}, {"name": "five"}),
    ({"a": 1, "b": -1}, {"unique": True}),
    ({"u1": 1}, {"unique": 1}),
    ({"u2": 1}, {"unique": False}),
    ({"h": 1}, {"hidden": True}),
    ({"h2": 1}, {"hidden": False}),
    ({"s": 1}, {"sparse": True}),
    ({"s2": 1}, {"sparse": False}),
    ({"s3": 1}, {"sparse": 1}),
    ({"p": 1}, {"partialFilterExpression": {"x": {"$gt": 5.0}}}),
    ({"p2": 1}, {"partialFilterExpression": {"x": {"$exists": True}}, "unique": True}),
    ({"$**": 1}, {}),
    ({"$**": 1}, {"name": "projected", "wildcardProjection": {"a": 1, "_id": 0}}),
    ({"w.$**": 1.0}, {}),
    ({"t1": "text", "t2": "text"}, {"weights": {"t1": 3}, "default_language": "german", "language_override": "lang"}),
    ({"g": "2dsphere"}, {}),
    ({"g2": "2dsphere", "x": 1}, {"2dsphereIndexVersion": 2}),
    ({"g1": "2dsphere"}, {"2dsphereIndexVersion": 1, "sparse": True}),
    ({"l": "2d"}, {"bits": 20, "min": -10, "max": 10.5}),
    ({"l2": "2d"}, {}),
    ({"hh": "hashed"}, {}),
    ({"x": 1, "hh": "hashed", "y": -1}, {}),
    ({"k": 1}, {"collation": {"locale": "fr", "strength": 1}}),
    ({"k": 1}, {"name": "k simple", "collation": {"locale": "simple"}}),
    ({"e": 1}, {"expireAfterSeconds": 60}),
    ({"e2": 1}, {"expireAfterSeconds": 60.5}),
    ({"e3": 1}, {"expireAfterSeconds": Int64(60)}),
    ({"e4": 1}, {"expireAfterSeconds": 0, "unique": True}),
    ({"v1": 1}, {"v": 1}),
    ({"bg": 1}, {"background": True}),
    ({"bg2": 1}, {"background": 1}),
    ({"se": 1}, {"storageEngine": {"wiredTiger": {"configString": "prefix_compression=false"}}}),
    ({"pu": 1}, {"prepareUnique": True}),
    ({"tt.x": 1, "tt.y": "2dsphere"}, {}),
    ({"comp": 1, "$**": -1}, {"wildcardProjection": {"comp": 0}}),
    ({"nm": 1}, {"name": "ünï $x.y"}),
)


def fill(client: MongoClient[Any], database: str) -> int:
    """Make everything that the server accepts. Returns how many collections and indexes it accepted."""
    made = 0
    for name, options in COLLECTIONS.items():
        made += _try(client, database, {"create": name, **options})
    for key, options in INDEXES:
        name = options.get("name", "_".join(f"{field}_{value}" for field, value in key.items()))
        spec = {"key": key, "name": name, **{field: value for field, value in options.items() if field != "name"}}
        for collection in ("texts", "collated") if "t1" in key else ("plain", "collated"):
            made += _try(client, database, {"createIndexes": collection, "indexes": [spec]})
    return made


def _try(client: MongoClient[Any], database: str, command: dict[str, Any]) -> bool:
    try:
        client[database].command(command)
    except OperationFailure:
        return False
    return True


def listed(client: MongoClient[Any], database: str) -> Iterator[tuple[str, bytes, list[bytes]]]:
    """For each collection and view: name, options and indexes as the server lists them."""
    there = client.get_database(database, codec_options=RAW)
    for one in sorted(there.cursor_command({"listCollections": 1}, codec_options=RAW), key=lambda found: found["name"]):
        if one["name"].startswith("system."):
            continue
        indexes: list[bytes] = []
        if one["type"] == "collection":
            indexes = [
                bytes(spec.raw) for spec in there.cursor_command({"listIndexes": one["name"]}, codec_options=RAW)
            ]
        yield one["name"], bytes(one["options"].raw), indexes
