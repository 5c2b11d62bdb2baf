"""Random entries of the kinds that came with 8.0 and later, among them odd ones."""

from __future__ import annotations

import random
from typing import Any

import bson
from bson.binary import Binary
from bson.int64 import Int64

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.property import random_entries

UUID = Binary(bytes(range(16)), 4)
_NAMESPACES = ("shop.orders", "shop.items", "shop.a.b", "other.orders", "shop.system.views", "admin.$cmd", "shop", "")
_COLLECTIONS = ("orders", "items", "a.b", "system.buckets.orders", "system.views", "")
_SESSION = {"id": Binary(bytes(16), 4), "uid": b"u" * 32}
_NO_OPS = ("reshardBlockingWrites", "reshardBegin", "reshardDoneCatchUp", "shardCollection", "moveChunk", "movePrimary")


def _end_of_transaction(rng: random.Random) -> dict[str, Any]:
    namespaces: Any = rng.sample(_NAMESPACES, rng.randrange(4))
    if rng.random() < 0.2:
        namespaces = rng.choice((*_NAMESPACES, 1, {"a": "shop.orders"}, [1, ["shop.orders"], "shop.items"]))
    o2 = {"endOfTransaction": namespaces, "lsid": _SESSION, "txnNumber": Int64(rng.randrange(9))}
    if rng.random() < 0.1:
        o2[rng.choice(("lsid", "txnNumber"))] = rng.choice((1, "x", None))
    if rng.random() < 0.1:
        del o2[rng.choice(("lsid", "txnNumber"))]
    return {"op": "n", "ns": rng.choice(_NAMESPACES), "o": {"msg": "end"}, "o2": o2}


def _announcement(rng: random.Random) -> dict[str, Any]:
    namespace = rng.choice(_NAMESPACES)
    name = rng.choice(_NO_OPS)
    o2: dict[str, Any] = {name: namespace, "reshardingUUID": UUID}
    if rng.random() < 0.3:
        o2 = {"type": rng.choice(("reshardFinalOp", "reshardBegin", "migrateChunkToNewShard", 1)), **o2}
    if rng.random() < 0.2:
        del o2[name]
    return {"op": "n", "ns": namespace, "ui": UUID, "o": {"msg": "x"}, "o2": o2}


def _command(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(_COLLECTIONS)
    indexes = [{"v": 2, "key": {"a": 1}, "name": "a_1"}]
    o: dict[str, Any] = rng.choice(
        (
            {"abortIndexBuild": name, "indexBuildUUID": UUID, "indexes": indexes, "cause": {"ok": False}},
            {"startIndexBuild": name, "indexBuildUUID": UUID, "indexes": indexes},
            {"create": name, "timeseries": {"timeField": "t"}, "idIndex": {"v": 2}},
            {"create": name, "timeserie": {"timeField": "t"}},
            {"createDatabaseMetadata": "shop", "db": {"_id": "shop", "version": {}}},
        )
    )
    return {"op": "c", "ns": rng.choice(("shop.$cmd",) * 3 + ("other.$cmd", "shop.x")), "ui": UUID, "o": o}


def _update(rng: random.Random) -> dict[str, Any]:
    version: Any = rng.choice((2, 2, 1, 3, Int64(2), "2", None))
    o: dict[str, Any] = {"diff": {"u": {"total": rng.randrange(9)}}} if rng.random() < 0.6 else {"x": 1}
    if version is not None:
        o = {"$v": version, **o} if rng.random() < 0.5 else {**o, "$v": version}
    if rng.random() < 0.7:
        o = {"_id": 1, **o} if rng.random() < 0.7 else {**o, "_id": 1}
    more = {"rid": Int64(7), "versionContext": {"OFCV": "8.1"}} if rng.random() < 0.3 else {}
    return {"op": "u", "ns": rng.choice(_NAMESPACES), "ui": UUID, "o": o, "o2": {"_id": 1}, **more}


def _of_a_container(rng: random.Random) -> dict[str, Any]:
    return {"op": rng.choice(("ci", "cd", "cu", "km")), "ns": "shop.orders", "ui": UUID, "o": {"_id": 1}}


def later_entry(rng: random.Random, time: ClusterTime) -> bytes:
    """An entry of one of these kinds, or now and then a write."""
    kind = rng.choice((_end_of_transaction, _end_of_transaction, _announcement, _command, _update, _update, None))
    if kind is None:
        return random_entries.entry(rng, time)
    if rng.random() < 0.05:
        kind = _of_a_container
    entry = kind(rng)
    if rng.random() < 0.05:
        entry["fromMigrate"] = True
    return bson.encode({**entry, "ts": time.to_timestamp(), "t": Int64(1), "v": Int64(2), "wall": _wall(rng)})


def _wall(rng: random.Random) -> Any:
    return bson.DatetimeMS(rng.randrange(1 << 41))


def later_run(seed: int, count: int) -> list[bytes]:
    """A run of them, in order."""
    rng = random.Random(seed)
    return [later_entry(rng, ClusterTime.of(2, number + 1)) for number in range(count)]
