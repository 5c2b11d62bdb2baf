"""Small oplogs of a cluster's members, made by hand: inserts, drops, no-ops, and shards that are added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import bson
from bson.binary import Binary

from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import NeedShard, OplogBatch
from tailrace.core.stream.stream import Need, Stream
from tailrace.read.source.drive import drive
from tests.property.noted import check_noted

UUID = Binary(bytes(range(16)), 4)
DATABASE, COLLECTION = "shop", "orders"


def at(tick: int) -> ClusterTime:
    """The cluster time to which tests refer by a number."""
    return ClusterTime.of(1_000, tick)


def _entry(tick: int, operation: str, namespace: str, o: dict[str, Any], **more: Any) -> bytes:
    time = at(tick).to_timestamp()
    return bson.encode({"op": operation, "ns": namespace, "ui": UUID, "o": o, **more, "ts": time, "wall": _WALL})


_WALL = bson.decode(bson.encode({"wall": bson.ObjectId("0" * 24).generation_time}))["wall"]


def insert(tick: int, key: Any, **fields: Any) -> bytes:
    return _entry(tick, "i", f"{DATABASE}.{COLLECTION}", {"_id": key, **fields}, o2={"_id": key})


def update(tick: int, key: Any) -> bytes:
    return _entry(tick, "u", f"{DATABASE}.{COLLECTION}", {"$v": 2, "diff": {"u": {"n": tick}}}, o2={"_id": key})


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
    """The removal has begun: a field of the shard's document is set."""
    change = {"$v": 2, "diff": {"i": {"draining": True}}}
    return _entry(tick, "u", "config.shards", change, o2={"_id": name})


def batch(entries: Sequence[bytes], promised: int) -> OplogBatch:
    return OplogBatch(b"".join(entries), at(promised))


class Taken(NamedTuple):
    """What a stream gave: events and tokens, and the shards that it asked for."""

    events: list[bytes]
    tokens: list[bytes]
    shards: list[NeedShard]


def outputs(stream: Stream, shards: list[NeedShard]) -> Iterator[EventBlock]:
    """What a stream gives for what it was fed, if it asks for nothing but shards; these are put into the list."""

    def answer(need: Need) -> None:
        assert isinstance(need.request, NeedShard)
        shards.append(need.request)

    return drive(stream, answer)


def take(stream: Stream) -> Taken:
    """Everything that may leave now."""
    taken = Taken([], [], [])
    for block in outputs(stream, taken.shards):
        check_noted(block)
        taken.events.extend(block.events())
        taken.tokens.extend(block.tokens())
    return taken
