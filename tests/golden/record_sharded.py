"""Record a sharded cluster anew, of a version whose mongods have the code of a mongos (6.0 and later):

    python -m tests.golden.record_sharded --version 7.0.28       into tests/golden/sharded

Three shards, one of them added during the recording: a resharding, chunks that move to shards that had none,
transactions, images, then definitions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.embedded.sharding import Transaction
from tests.differential.native import NativeStream, read
from tests.differential.wire import Wire
from tests.golden import sharded_recording
from tests.golden.record import everything
from tests.golden.sharded_recording import CONFIG_SERVER
from tests.sharded.native_router import NativeRouter, cluster_aggregate

_PARAMETERS: Final = {"maxNumberOfTransactionOperationsInSingleOplogEntry": 2}
_MERGING: Final = {"fromMongos": True, "needsMerge": True}
_EXPANDED: Final = {"showExpandedEvents": True}
_SYSTEM: Final = {**_EXPANDED, "showSystemEvents": True}
_MIGRATION: Final = {"showMigrationEvents": True}
_Target = tuple[str, str | int, Mapping[str, Any]]
#: What is read of each shard, as a mongos reads it and as a client of the shard alone does.
_OF_A_SHARD: Final[tuple[tuple[_Target, Mapping[str, Any]], ...]] = (
    (("shop", "orders", {}), _MERGING),
    (("shop", "orders", _EXPANDED), _MERGING),
    (("shop", "things", _SYSTEM), _MERGING),
    (("shop", 1, {}), _MERGING),
    (("shop", 1, _EXPANDED), _MERGING),
    (("shop", 1, _SYSTEM), _MERGING),
    (("shop", 1, {**_SYSTEM, **_MIGRATION}), _MERGING),
    (("admin", 1, {}), _MERGING),
    (("admin", 1, _SYSTEM), _MERGING),
    (("shop", "orders", {}), {}),
    (("shop", 1, _MIGRATION), {}),
    (("shop", 1, _SYSTEM), {}),
)
_OF_THE_CONFIG_SERVER: Final = ((("config", "shards", {"allowToRunOnConfigDB": True}), _MERGING),)
_MERGED: Final[tuple[tuple[_Target, tuple[Any, ...]], ...]] = (
    (("admin", 1, {}), ()),
    (("admin", 1, _EXPANDED), ()),
    (("shop", 1, {}), ()),
    (("shop", 1, _SYSTEM), ()),
    (("shop", "orders", {}), ()),
    (("shop", "orders", _EXPANDED), ({"$match": {"operationType": {"$in": ["insert", "delete", "modify"]}}},)),
)
_IMAGES: Final[tuple[Mapping[str, Any], ...]] = (
    {"fullDocument": "updateLookup"},
    {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"},
    {"fullDocument": "required"},
)


def record(version: str) -> dict[str, Any]:
    """Run it all on a cluster of this version; the recording."""
    with ShardedCluster(
        2, version=version, parameters=_PARAMETERS, enable_test_commands=True, noop_interval_s=1
    ) as cluster:
        cluster.router.create_database("shop", "shard0")
        start = _after(cluster.router.fence())
        _reshard(cluster)
        _write_and_move(cluster)
        written = cluster.router.fence()
        with NativeRouter(cluster) as router:
            images = [_merged(router, ("shop", "orders", stage), written, start) for stage in _IMAGES]
        _define(cluster)
        end = cluster.router.fence()
        with NativeRouter(cluster) as router:
            merged = [_merged(router, target, end, start, pipeline) for target, pipeline in _MERGED]
            resumes = [_resumed(router, merged[0], place, end) for place in (5, 15, len(merged[0]["events"]) - 1)]
        parts = {**cluster.shards, CONFIG_SERVER: cluster.config}
        streams = [
            _of_a_part(name, part, (start, end), target, merging)
            for name, part in parts.items()
            for target, merging in (_OF_THE_CONFIG_SERVER if part is cluster.config else _OF_A_SHARD)
        ]
        return {
            "server": version,
            "note": (__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[2].strip(),
            "start": start,
            "end": end,
            "shards": [*cluster.shards],
            "added": ["shard2"],
            "shardKeys": [],
            "oplogs": [{"member": name, "entries": _oplog(part)} for name, part in parts.items()],
            "streams": streams,
            "merged": merged,
            "resumes": resumes,
            "images": images,
            "live": None,
        }


def _reshard(cluster: ShardedCluster) -> None:
    """Indexes, and a resharding."""
    router = cluster.router
    router.shard_collection("shop.items", {"sku": "hashed"}, initial_chunks=4)
    router.insert_many("shop.items", [{"_id": number, "sku": number} for number in range(20)])
    router.create_index("shop.items", {"kind": 1}, "kind")
    router.drop_index("shop.items", "kind")
    router.reshard("shop.items", {"_id": 1})
    router.insert_many("shop.items", [{"_id": number, "sku": number} for number in range(20, 24)])


def _write_and_move(cluster: ShardedCluster) -> None:
    """Writes, while chunks move to shards that have none, one of them new; transactions, on one shard and on three."""
    router, namespace = cluster.router, "shop.orders"
    router.shard_collection(namespace, {"region": 1, "_id": 1})
    router.coll_mod(namespace, changeStreamPreAndPostImages={"enabled": True})
    router.insert_many(namespace, [{"_id": number, "region": "amz"[number % 3], "n": 0} for number in range(12)])
    router.split(namespace, {"region": "m"})
    router.split(namespace, {"region": "z"})
    router.move_chunk(namespace, {"region": "m"}, to="shard1")
    for number in range(6):
        router.update_one(namespace, {"region": "amz"[number % 3], "_id": number}, {"$set": {"n": number}})
    assert cluster.add_shard() == "shard2"
    router.move_chunk(namespace, {"region": "z"}, to="shard2")
    for region, number in (("a", 0), ("m", 1), ("z", 2)):
        router.replace_one(
            namespace, {"region": region, "_id": number}, {"region": region, "_id": number, "n": {"a": 1}}
        )
        router.delete_one(namespace, {"region": region, "_id": number + 3})

    def over_all(transaction: Transaction) -> None:
        for number, region in enumerate("amzamz", 100):
            transaction.insert_one(namespace, {"_id": number, "region": region})
        transaction.update_one(namespace, {"region": "a", "_id": 0}, {"$set": {"n": 3}})

    def on_one(transaction: Transaction) -> None:
        for number in range(200, 203):
            transaction.insert_one(namespace, {"_id": number, "region": "a"})

    router.run_transaction(over_all)
    router.run_transaction(on_one)
    aborted = router.transaction()
    aborted.insert_one(namespace, {"_id": 300, "region": "a"})
    aborted.insert_one(namespace, {"_id": 301, "region": "z"})
    aborted.prepare()
    aborted.abort()
    router.move_chunk(namespace, {"region": "m"}, to="shard0")


def _define(cluster: ShardedCluster) -> None:
    """A refined shard key, a collection that is renamed, another primary shard, drops."""
    router = cluster.router
    router.create_index("shop.orders", {"region": 1, "_id": 1, "n": 1}, "whole")
    router.refine_shard_key("shop.orders", {"region": 1, "_id": 1, "n": 1})
    router.insert_one("shop.orders", {"_id": 400, "region": "z", "n": 5})
    router.rename("shop.items", "shop.things")
    router.insert_one("shop.things", {"_id": 50})
    router.insert_one("shop.plain", {"_id": 1})
    router.move_primary("shop", "shard1")
    router.insert_one("shop.plain", {"_id": 2})
    router.drop_collection("shop.orders")
    router.drop_database("shop")


def _after(time: Timestamp) -> Timestamp:
    return Timestamp(time.time, time.inc + 1)


def _oplog(part: ReplicaSet) -> list[RawBSONDocument]:
    with Wire.to(part.uri) as wire:
        return everything(wire, "local", "oplog.rs", {})


def _of_a_part(
    name: str, part: ReplicaSet, times: tuple[Timestamp, Timestamp], target: _Target, merging: Mapping[str, Any]
) -> dict[str, Any]:
    (start, end), (database, collection, options) = times, target
    whole = {"allChangesForCluster": True} if database == "admin" else {}
    stage = {"startAtOperationTime": start, **whole, **options}
    command = {"aggregate": collection, "pipeline": [{"$changeStream": stage}], **merging}
    with Wire.to(part.uri) as wire:
        native = read(wire, database, command, ClusterTime.from_timestamp(end), batch_size=0)
    return _packed(name, database, command, native)


def _merged(
    router: NativeRouter, target: _Target, end: Timestamp, start: Timestamp, pipeline: Sequence[Any] = ()
) -> dict[str, Any]:
    database, collection, options = target
    stage = {"startAtOperationTime": start, **options}
    native = router.read(database, collection, end, tuple(pipeline), **stage)
    return _packed("", database, cluster_aggregate(database, collection, stage, pipeline), native)


def _resumed(router: NativeRouter, whole: Mapping[str, Any], place: int, end: Timestamp) -> dict[str, Any]:
    stage = {"resumeAfter": whole["events"][place]["_id"]}
    return _packed("", "admin", cluster_aggregate("admin", 1, stage), router.read("admin", 1, end, **stage))


def _packed(member: str, database: str, command: Mapping[str, Any], native: NativeStream) -> dict[str, Any]:
    assert native.error is None, (member, command, native.error)
    before = (0, *(count for count, _ in native.replies))
    return {
        "member": member,
        "beforeDrop": False,
        "database": database,
        "command": dict(command),
        "events": [RawBSONDocument(event) for event in native.events],
        "replies": [
            {"events": count - earlier, "postBatchResumeToken": RawBSONDocument(token)}
            for earlier, (count, token) in zip(before, native.replies, strict=False)
        ],
        "closed": native.invalidated,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record_sharded", description="Record a cluster.")
    parser.add_argument("--version", default="7.0.28", help="the servers' version (7.0.28)")
    options = parser.parse_args(arguments)
    packed = record(options.version)
    size = sharded_recording.save(f"cluster_{options.version}", packed)
    counts = {kind: [len(one["events"]) for one in packed[kind]] for kind in ("streams", "merged", "resumes", "images")}
    print(f"{options.version}: events {counts}, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
