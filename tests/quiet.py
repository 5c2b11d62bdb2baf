"""Deployments that write nothing to the oplog by themselves.

A stream's token after the last event of a batch is the batch's own: the event's, or a later one where the oplog had
more when it was read. A no-op, which comes every ten seconds, makes this a matter of luck on a busy machine, for the
server's own stream too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pymongo import MongoClient

from tailrace.embedded import ReplicaSet

#: Parameters of a deployment whose oplog holds what the test writes, and nothing else.
QUIET: Final = {"writePeriodicNoops": False, "disableLogicalSessionCacheRefresh": True, "ttlMonitorEnabled": False}


@contextmanager
def without_noops(replica_set: ReplicaSet) -> Iterator[ReplicaSet]:
    """Keep a running deployment from writing no-ops meanwhile."""
    with MongoClient[Any](replica_set.uri) as client:
        before = client.admin.command("setParameter", 1, writePeriodicNoops=False)["was"]
        try:
            yield replica_set
        finally:
            client.admin.command("setParameter", 1, writePeriodicNoops=before)
