"""What is written while Debezium is recorded: every type of BSON, as a value, in an update and as an ``_id``."""

from __future__ import annotations

import random
import struct
import unicodedata
from datetime import UTC, datetime
from typing import Any

from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from bson.regex import Regex
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.database import Database

from tailrace.core import raw_bson
from tests.differential.fuzz_images import corpus_values

OID = ObjectId("65a000000000000000000001")
MOMENT = datetime(2024, 1, 2, 3, 4, 5, 678000, UTC)


def characters() -> str:
    """Three of each category of Unicode, and some that are easily got wrong."""
    found: dict[str, list[str]] = {}
    rare = (0xE000, 0xFDD0, 0xFEFF, 0xFFFF, 0x1F600, 0x10FFFF, 0x2028, 0x2029)
    for code in (*range(0x80, 0x3000), *rare):
        category = unicodedata.category(chr(code))
        # Which points are assigned differs between the versions of Unicode.
        if category != "Cn" and len(found.setdefault(category, [])) < 3:
            found[category].append(chr(code))
    return "".join(one for three in found.values() for one in three)


def doubles() -> list[float]:
    """Numbers whose shortest text Java and Python write in different ways, and random bits."""
    random_ = random.Random(5)
    found = [struct.unpack("<d", random_.randbytes(8))[0] for _ in range(200)]
    known = [1.5, 5.0, 1e300, 5e-324, 1 / 3, -0.0, 1e21, 1e7, 123456.0, 0.001, 0.0001, 1e16, 2e-3, 1e23, 2.0**-44]
    return [*known, 1e-5, 123456789.0, 1e15, 4.35e-320, *(one for one in found if one == one)]  # noqa: PLR0124


def decimals() -> list[Decimal128]:
    plain = ("0", "0.00", "0E+5", "-0", "-0.0", "1.10", "0.000001", "0.0000001", "1E-7", "-1.5E-10", "1E+3")
    ends = ("NaN", "-Infinity", "1E+6000", "1E-6176", "9.999999999999999999999999999999999E+6144")
    return [*map(Decimal128, plain), *map(Decimal128, ends)]


def dates() -> list[Any]:
    moments = (0, 500, 120, 1000, -315619199999, 253402300799999, 253402300800000, -(1 << 62))
    return [MOMENT, *map(DatetimeMS, moments)]


def everything() -> dict[str, Any]:
    return {
        "doubles": doubles(),
        "nan": float("nan"),
        "inf": float("inf"),
        "-inf": float("-inf"),
        "string": 'text "q" \\ / \n\t\b\f\r \u0001 \u001f \u007f é <>&\'',
        "characters": characters(),
        "empty": "",
        "document": {"a": 1, "b": {}},
        "array": [1, "x", [], {}],
        "binary": [Binary(b"\0\1", 0), Binary(b"\0\1", 2), Binary(b"\1" * 16, 4), Binary(b"\xff", 128), Binary(b"", 0)],
        "old": [Binary(b"0" * 16, 3), Binary(b"1" * 16, 5), Binary(b"", 2)],
        "oid": OID,
        "bool": [True, False],
        "null": None,
        "dates": dates(),
        "regex": [Regex('a/b"c\\', "imsx"), Regex("", "")],
        "code": [Code("f()"), Code('g("")', {"x": 1, "y": Int64(1)})],
        "ref": [DBRef("c", OID), DBRef("c", 1, "d"), {"x": 1, "$ref": "c", "$id": 1, "z": 2}],
        "int": [5, -(1 << 31)],
        "long": [Int64(5), Int64((1 << 63) - 1), Int64(-(1 << 63))],
        "timestamp": [Timestamp(1700000000, 5), Timestamp(4294967295, 4294967295)],
        "decimals": decimals(),
        "ends": [MinKey(), MaxKey()],
        "op": "x",
        "after": {"op": 1},
        "ts_ms": {"$numberLong": "no number"},
        "uni é": 1,
    }


def lookalikes() -> dict[str, Any]:
    """Names that mean something elsewhere."""
    return {"$dollar": 1, "a.b": {"$c": 2, "d.e": 3}, "$oid": "a lie", "$date": "another", "": "an empty name"}


def keys() -> list[Any]:
    numbers = [Int64(5_000_000_000), 7, 1.5, 5.0, 1e16, float("nan"), Decimal128("1.10")]
    texts = ['text "q" é/', "", "\u0301\u2028😀"]
    binary = [Binary(b"\1\2"), Binary(b"\1" * 16, 4), Binary(b"1" * 16, 5)]
    moments = [MOMENT, *map(DatetimeMS, (-315619199999, 253402300800000, 1500))]
    documents = [{"a": 1, "b": {"c": Int64(2)}}, {"b": 1, "a": Binary(b"1", 5)}, {}, Code("f()", {"x": 1})]
    return [*numbers, *texts, OID, *binary, *moments, *documents, True, None, Timestamp(5, 6), MinKey(), MaxKey()]


def old_types(number: int) -> RawBSONDocument:
    """Types that PyMongo decodes but no longer writes: a symbol, undefined and a pointer."""
    pointer = raw_bson.encode_string("d.c") + b"\1" * 12
    return RawBSONDocument(
        raw_bson.encode_document(
            raw_bson.encode_element(raw_bson.INT32, b"_id", number.to_bytes(4, "little")),
            raw_bson.encode_element(raw_bson.SYMBOL, b"symbol", raw_bson.encode_string("sym")),
            raw_bson.encode_element(raw_bson.UNDEFINED, b"undefined", b""),
            raw_bson.encode_element(raw_bson.DB_POINTER, b"pointer", pointer),
        )
    )


def corpus() -> RawBSONDocument:
    """Every valid value of PyMongo's BSON corpus; none where PyMongo's source cannot be fetched."""
    values = enumerate(corpus_values())
    elements = [raw_bson.encode_element(type_, f"v{number}".encode(), value) for number, (type_, value) in values]
    return RawBSONDocument(raw_bson.encode_document(*elements))


def not_utf8(number: int) -> list[RawBSONDocument]:
    """A string, and a field's name, that are not UTF-8."""
    value = raw_bson.encode_element(raw_bson.STRING, b"s", b"\3\0\0\0\xffa\0")
    name = raw_bson.encode_element(raw_bson.INT32, b"n\xff", b"\1\0\0\0")
    return [
        RawBSONDocument(
            raw_bson.encode_document(
                raw_bson.encode_element(raw_bson.INT32, b"_id", (number + at).to_bytes(4, "little")), element
            )
        )
        for at, element in enumerate((value, name))
    ]


def write(client: MongoClient[Any], shop: Database[Any]) -> None:
    """The workload."""
    orders: Any = shop["orders"]
    orders.insert_one({"_id": "all", **everything(), **lookalikes()})
    orders.insert_one({"_id": "set"})
    orders.update_one({"_id": "set"}, {"$set": everything()})
    orders.update_one({"_id": "set"}, {"$set": {"document": {"": 1, "$c": 2, "d.e": [3, {"x": None}]}}})
    orders.update_one({"_id": "set"}, {"$unset": {"uni é": 1}})
    orders.insert_one({"_id": 10, "list": [1, 2, 3, 4, 5], "sub": {"a": 1, "b": {"c": [1, 2, 3]}}, "at": None})
    orders.update_one({"_id": 10}, {"$set": {"list.1": "x", "sub.t": 20, "d": 0.1}, "$unset": {"at": 1}})
    orders.update_one({"_id": 10}, [{"$set": {"list": {"$slice": ["$list", 2]}, "sub.b.c": [1]}}])
    orders.update_one({"_id": 10}, {"$set": {"1": 5}})
    orders.update_one({"_id": 10}, {"$unset": {"1": 1, "d": 1}})
    orders.update_one({"_id": 10}, [{"$replaceWith": {"$setField": {"field": "a.b", "input": "$$ROOT", "value": 1}}}])
    orders.update_one({"_id": 10}, {"$set": {"op": "u", "after": 1, "before": None}})
    orders.replace_one({"_id": 10}, {"whole": True})
    orders.delete_one({"_id": 10})
    for key in keys():
        orders.insert_one({"_id": key, "k": 1})
    with client.start_session() as session, session.start_transaction():
        orders.insert_many([{"_id": f"t{number}"} for number in range(2)], session=session)
        shop["others"].insert_one({"_id": "t9"}, session=session)
        orders.update_one({"_id": "t0"}, {"$inc": {"n": 1}}, session=session)
        orders.delete_one({"_id": "t1"}, session=session)
    with client.start_session() as session, session.start_transaction():
        shop["others"].insert_one({"_id": "t10"}, session=session)
    shop["plain"].insert_one({"_id": 1})
    shop["plain"].update_one({"_id": 1}, {"$set": {"x": 1}})
    shop["plain"].delete_one({"_id": 1})
    orders.insert_one(old_types(900))
    orders.update_one({"_id": 10.5}, {"$set": {"old": old_types(900)}}, upsert=True)
    orders.update_one({"_id": 10.5}, {"$set": {"old.more": old_types(900)}})
    orders.insert_many(not_utf8(901))
    orders.insert_one({"_id": "corpus"})
    orders.update_one({"_id": "corpus"}, {"$set": {"values": corpus()}})
    shop["dots.and-dash é😀"].insert_one({"_id": 1})
    orders.create_index("n")
    shop["plain"].rename("plain2")
    shop["plain2"].drop()
