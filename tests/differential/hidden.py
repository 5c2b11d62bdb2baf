"""A replica set with a hidden member, the kind from which careful operators read."""

from __future__ import annotations

import time
from typing import Any

from pymongo import MongoClient

from tailrace.embedded import ReplicaSet

_PATIENCE_S = 300


def hide_a_member(replica_set: ReplicaSet, *, delay_s: int = 0) -> str:
    """Hide a secondary, which then applies entries ``delay_s`` late; the URI of a direct connection to it."""
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        config = client.admin.command("replSetGetConfig")["config"]
        # The primary and one other member keep their votes, so that a majority commits without waiting for the delay.
        member = next(one for one in config["members"] if one["_id"] != replica_set.primary)
        member |= {"priority": 0, "hidden": True, "votes": 0}
        if delay_s:
            name = "slaveDelay" if replica_set.version.startswith("4.") else "secondaryDelaySecs"
            member |= {name: delay_s}
        config["version"] += 1
        client.admin.command("replSetReconfig", config)
    uri = f"mongodb://{member['host']}/?directConnection=true"
    with MongoClient[dict[str, Any]](uri) as client:
        deadline = time.monotonic() + _PATIENCE_S
        while not client.admin.command("hello").get("hidden"):
            assert time.monotonic() < deadline, "the member is not hidden"
            time.sleep(0.05)
    return uri
