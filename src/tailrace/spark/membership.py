"""When shards were added to a cluster, as the config server's oplog tells."""

from __future__ import annotations

from typing import Any

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.connection import Connection

_SHARDS = "config.shards"


def added_shards(config: Connection, after: ClusterTime) -> dict[str, ClusterTime]:
    """The shards that were added behind ``after`` and the cluster time of each, of several the first. One whose entry
    has left the config server's oplog is not in it."""
    query = {
        "ts": {"$gt": after.to_timestamp()},
        "$or": [{"op": "i", "ns": _SHARDS}, {"ns": "admin.$cmd", "o.applyOps.ns": _SHARDS}],
    }

    def read() -> list[dict[str, Any]]:
        return list(config.majority("local", "oplog.rs").find(query, {"ts": 1, "op": 1, "o": 1}))

    added: dict[str, ClusterTime] = {}
    for entry in config.retrying(read):
        # Newer servers add a shard in a transaction.
        operations = [entry] if entry["op"] == "i" else entry["o"]["applyOps"]
        for operation in operations:
            if operation["op"] == "i" and operation.get("ns", _SHARDS) == _SHARDS:
                added.setdefault(str(operation["o"]["_id"]), ClusterTime.from_timestamp(entry["ts"]))
    return added
