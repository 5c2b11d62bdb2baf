"""Whether a deployment is one shard of a cluster: then only its part of the cluster is seen."""

from __future__ import annotations

from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

#: What to do instead, for people.
ONE_SHARD_HINT: Final = "Give the URI of the cluster's config server or of a mongos to see all of it"


def shard_name(client: MongoClient[Any]) -> str | None:
    """The name of the shard that ``client`` is connected to; ``None`` for a replica set of its own, where the user may
    not see it, and for a config server. From 7.0 on that one has the identity of a shard too (measured on 7.0.28), but
    a caller with its URI reads all shards."""
    preference = client.read_preference
    try:
        if "configsvr" in client.admin.command("hello", read_preference=preference):
            return None
        system = client.get_database("admin", read_preference=preference)["system.version"]
        document = system.find_one({"_id": "shardIdentity"}, {"shardName": 1})
        if document is not None:
            return str(document.get("shardName"))
    except PyMongoError:
        pass
    try:
        state = client.admin.command("shardingState", read_preference=preference)
    except PyMongoError:
        return None
    return str(state["shardName"]) if state.get("enabled") and state.get("shardName") else None
