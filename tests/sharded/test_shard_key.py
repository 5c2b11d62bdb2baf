"""The value of a shard key, and its hash compared with the server's own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import bson
import pymongo
import pytest
from bson import Binary, Code, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp

from tailrace.core import raw_bson
from tailrace.embedded import ReplicaSet
from tailrace.read.source.shard_key import hashed, shard_key
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

NUMBERS: list[Any] = [
    *(0, 1, -1, 1.0, 2.5, -2.5, 1e18, 1e300, -1e300, float("nan"), float("inf"), float("-inf")),
    *(Int64(1), Int64(1 << 62), Int64(-1 << 63), 9.3e18, -9.3e18),
    *map(
        Decimal128,
        (
            "1",
            "1.5",
            "0.5",
            "7.4",
            "7.9",
            "-7.9",
            "2.5",
            "3.5",
            "-2.5",
            "-3.5",
            "NaN",
            "1E+400",
            "-1E+400",
            "9223372036854775807",
            "Infinity",
        ),
    ),
]
VALUES: list[Any] = [
    *("", "a", "ü x", None, True, False, {}, {"a": 1}, {"a": {"b": [1, "x", None]}, "c": 2.0}),
    *(Binary(b"abc"), Binary(b"abcdefghijklmnop", 4), ObjectId("0123456789abcdef01234567")),
    *(datetime(2020, 1, 2, tzinfo=UTC), Timestamp(5, 6), Regex("a", "i"), Code("x"), MinKey(), MaxKey()),
]


@pytest.mark.mongod
@pytest.mark.parametrize("version", [SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def test_hashes_are_the_server_s(version: str, start_replica_set: Callable[..., ReplicaSet]) -> None:
    running = start_replica_set(version=version, enable_test_commands=True)
    with pymongo.MongoClient(running.uri) as client:
        different = []
        for value in (*NUMBERS, *VALUES):
            raw = bson.encode({"": value})
            element = next(raw_bson.elements(raw))
            expected = client.admin.command({"_hashBSONElement": value, "seed": 0})["out"]
            if hashed(element.type, raw_bson.value(raw, element)) != expected:
                different.append(value)
        assert different == []


@pytest.mark.parametrize(
    ("document", "pattern", "whole", "expected"),
    [
        ({"_id": 1, "region": "a", "v": 2}, {"region": 1, "_id": 1}, True, {"region": "a", "_id": 1}),
        ({"_id": 1}, {"region": 1, "_id": 1}, True, None),
        ({"_id": 1}, {"region": 1, "_id": 1}, False, {"region": None, "_id": 1}),
        ({"a": {"b": 3}, "_id": 1}, {"a.b": 1}, True, {"a.b": 3}),
        ({"a.b": 3, "_id": 1}, {"a.b": 1}, True, {"a.b": 3}),
        ({"a": 5}, {"a.b": 1}, True, None),
    ],
)
def test_the_fields_of_a_shard_key(
    document: dict[str, Any], pattern: dict[str, Any], whole: bool, expected: dict[str, Any] | None
) -> None:
    found = shard_key(bson.encode(document), pattern, whole=whole)
    # In the order of the key: encoding a dict would move _id to the front.
    assert (None if found is None else list(bson.decode(found).items())) == (
        None if expected is None else list(expected.items())
    )


def test_a_hashed_field_is_its_hash() -> None:
    found = shard_key(bson.encode({"sku": "x", "_id": 1}), {"sku": "hashed", "_id": 1}, whole=True)
    assert found is not None
    element = next(raw_bson.elements(found))
    assert element.type == raw_bson.INT64
    assert raw_bson.read_int64(found, element.value_start) == hashed(raw_bson.STRING, raw_bson.encode_string("x"))
