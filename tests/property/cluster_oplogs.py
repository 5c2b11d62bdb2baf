"""Small oplogs of a cluster's members, made by hand: inserts, drops, no-ops, and shards that are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bson
from bson.binary import Binary

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.plan.request import Answer, Emit, NeedShard, OplogBatch, Running

UUID = Binary(bytes(range(16)), 4)
DATABASE, COLLECTION = "shop", "orders"


def at(tick: int) -> ClusterTime:
    """The cluster time that tests call by a number."""
    return ClusterTime.of(1_000, tick)


def _entry(tick: int, operation: str, namespace: str, o: dict[str, Any], **more: Any) -> bytes:
    time = at(tick).to_timestamp()
    return bson.encode({"op": operation, "ns": namespace, "ui": UUID, "o": o, **more, "ts": time, "wall": _WALL})


_WALL = bson.decode(bson.encode({"wall": bson.ObjectId("0" * 24).generation_time}))["wall"]


def insert(tick: int, key: Any, **fields: Any) -> bytes:
    return _entry(tick, "i", f"{DATABASE}.{COLLECTION}", {"_id": key, **fields}, o2={"_id": key})


def drop(tick: int) -> bytes:
    return _entry(tick, "c", f"{DATABASE}.$cmd", {"drop": COLLECTION})


def damaged(tick: int) -> bytes:
    """An entry that ends a stream: an insert without its document."""
    return bson.encode({"op": "i", "ns": f"{DATABASE}.{COLLECTION}", "ui": UUID, "ts": at(tick).to_timestamp()})


def no_op(tick: int) -> bytes:
    return bson.encode({"op": "n", "ns": "", "o": {"msg": "periodic noop"}, "ts": at(tick).to_timestamp()})


def shard_added(tick: int, name: str, host: str = "") -> bytes:
    shard = {"_id": name, "host": f"{host or name}/localhost:27017", "state": 1}
    return _entry(tick, "i", "config.shards", shard, o2={"_id": name})


def shard_removed(tick: int, name: str, *, plainly: bool = False) -> bytes:
    """As 5.0 and 6.0 log it: a command without a session, which tells another shard the time too. 4.4 logs it
    ``plainly``, as a deletion."""
    if plainly:
        return _entry(tick, "d", "config.shards", {"_id": name})
    kept = {"b": False, "ns": "config.shards", "ui": UUID}
    operations = [
        {"op": "d", **kept, "o": {"_id": name}},
        {"op": "u", **kept, "o": {"$set": {"topologyTime": at(tick - 1).to_timestamp()}}, "o2": {"_id": "kept"}},
    ]
    body = {"applyOps": operations, "alwaysUpsert": False, "writeConcern": {"w": 1, "wtimeout": 0}, "$db": "config"}
    entry = {"op": "c", "ns": "config.$cmd", "o": body, "ts": at(tick).to_timestamp(), "t": 1, "v": 2, "wall": _WALL}
    return bson.encode(entry)


def shard_drains(tick: int, name: str) -> bytes:
    """The removal is begun: a field of the shard's document is set."""
    change = {"$v": 2, "diff": {"i": {"draining": True}}}
    return _entry(tick, "u", "config.shards", change, o2={"_id": name})


def batch(entries: Sequence[bytes], promised: int) -> OplogBatch:
    return OplogBatch(b"".join(entries), at(promised))


def run(running: Running) -> tuple[list[bytes], list[bytes], list[NeedShard]]:
    """Drive a generator that asks for nothing but shards: what it gave as events and tokens, and the shards."""
    events: list[bytes] = []
    tokens: list[bytes] = []
    shards: list[NeedShard] = []
    answer: Answer = None
    while True:
        try:
            request = running.send(answer)
        except StopIteration:
            return events, tokens, shards
        if isinstance(request, Emit):
            events += [event.to_bson() for event in request.events]
            tokens += [event.token_bson for event in request.events]
        else:
            assert isinstance(request, NeedShard)
            shards.append(request)
