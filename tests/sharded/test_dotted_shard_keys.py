"""Shard keys with dots: the document keys of inserts, which 4.4 does not log and takes from its catalog.

No test had seen this: the recordings of 4.4 have no dotted key, and a published text was used instead of a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.embedded.sharding import Transaction
from tests.server_in_use import SERVER_VERSION
from tests.sharded import native
from tests.sharded.waiting import take

pytestmark = pytest.mark.mongod

KEYS: dict[str, dict[str, Any]] = {
    "one": {"y.z": 1},
    "several": {"y.z": 1, "y.w": 1, "a.b.c": 1},
    "hashed": {"y.z": "hashed"},
    "behind_id": {"_id": 1, "y.z": 1},
    "inside_id": {"y.z": 1, "_id.k": 1},
}
#: Whole keys, parts of them, none, and values where a path would lead on.
FIELDS: list[dict[str, Any]] = [
    {"y": {"z": 2, "w": 3}, "a": {"b": {"c": 4}}},
    {"a": {"b": {"c": "x"}}, "y": {"z": None}},
    {"y": {"w": 1}},
    {"y": 5, "a": {"b": 1}},
    {"y": None},
    {},
]


@pytest.mark.parametrize(
    "version", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("4.4.2", "5.0.4")), SERVER_VERSION]
)
def test_dotted_shard_keys_are_the_shards_own_and_their_tokens_too(
    version: str, start_sharded_cluster: Callable[..., ShardedCluster]
) -> None:
    cluster = start_sharded_cluster(2, version=version)
    router = cluster.router
    router.create_database("dots", "shard0")
    for name, key in KEYS.items():
        router.shard_collection(f"dots.{name}", key)
    start = router.fence()
    for name in KEYS:
        for number, fields in enumerate(FIELDS):
            router.insert_one(f"dots.{name}", {"_id": {"k": number} if name == "inside_id" else number, **fields})
    router.update_one("dots.one", {"y.z": 2, "_id": 0}, {"$set": {"v": 1}})
    router.replace_one("dots.one", {"y.z": 2, "_id": 0}, {"_id": 0, "y": {"z": 2}, "v": 2})
    router.delete_one("dots.one", {"y.z": 2, "_id": 0})

    def body(transaction: Transaction) -> None:
        transaction.insert_one("dots.several", {"_id": 100, "y": {"z": 5}})
        transaction.insert_one("dots.one", {"_id": 100, "y": {"z": 5}})
        transaction.update_one("dots.one", {"y.z": 5, "_id": 100}, {"$set": {"v": 1}})

    router.run_transaction(body)
    expected = native.union(cluster, "dots", 1, start, router.fence())
    keys = [bson.decode(event).get("documentKey") for event in expected]
    if version != "5.0.4":  # which gives _id alone for inserts
        assert {"y.z": 2, "y.w": 3, "a.b.c": 4, "_id": 0} in keys
    with tailrace.connect(cluster.uri) as client:

        def read(count: int, **begin: Any) -> list[bytes]:
            with client["dots"].watch(document_class=RawBSONDocument, **begin) as stream:
                return [bytes(event.raw) for event in take(stream, count)]

        assert read(len(expected), start_at_operation_time=start) == expected
        for place in range(0, len(expected) - 1, 5):
            token = bson.decode(expected[place])["_id"]
            assert read(len(expected) - place - 1, resume_after=token) == expected[place + 1 :]
