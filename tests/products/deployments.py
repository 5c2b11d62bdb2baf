"""The deployments of a run: the kind of each seed's, and those that are running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.differential.hidden import hide_a_member
from tests.products.writes import ROOT_PASSWORD

SINGLE: Final = "one member"
#: And one more, hidden and without a vote.
THREE: Final = "three members"
CLUSTER: Final = "cluster"
#: By the remainder of a seed.
_KINDS: Final = (CLUSTER, SINGLE, THREE)
_PARAMETERS: Final = {
    "maxNumberOfTransactionOperationsInSingleOplogEntry": 3,
    "ttlMonitorEnabled": False,
    "ttlMonitorSleepSecs": 1,
    "diagnosticDataCollectionEnabled": False,
    "disableLogicalSessionCacheRefresh": True,
}
_SHARD_PARAMETERS: Final = {
    "ttlMonitorEnabled": False,
    "ttlMonitorSleepSecs": 1,
    "diagnosticDataCollectionEnabled": False,
}


@contextmanager
def replica_set(version: str, members: int = 1) -> Iterator[ReplicaSet]:
    """A deployment for the workload."""
    with ReplicaSet(
        members,
        version=version,
        parameters=_PARAMETERS,
        enable_test_commands=True,
        oplog_size_mb=2000,
        root_password=ROOT_PASSWORD,
    ) as running:
        yield running


@contextmanager
def cluster_of(version: str) -> Iterator[ShardedCluster]:
    """A cluster for the workload, whose shards come and go."""
    with ShardedCluster(
        2, version=version, parameters=_SHARD_PARAMETERS, enable_test_commands=True, root_password=ROOT_PASSWORD
    ) as running:
        yield running


class Deployments:
    """Those of one version, of one kind at a time: they keep running if the next seed has the same kind.

    ``only``: the kind of every seed; by default each kind has one of three seeds.
    """

    def __init__(self, version: str, only: str = "") -> None:
        self.version = version
        self._only = only
        self._kind = ""
        self._running = ExitStack()
        self._found: tuple[ReplicaSet | None, ReplicaSet | ShardedCluster] | None = None

    def kind(self, seed: int) -> str:
        """The kind of deployment on which a seed is played."""
        return self._only or _KINDS[seed % len(_KINDS)]

    def of(self, kind: str) -> tuple[ReplicaSet | None, ReplicaSet | ShardedCluster]:
        """One to play on, and another one to point at. There is no cluster to play on here: each seed has its own,
        since its shards leave."""
        if self._found is None or kind != self._kind:
            self.close()
            self._kind, self._found = kind, self._start(kind)
        return self._found

    def _start(self, kind: str) -> tuple[ReplicaSet | None, ReplicaSet | ShardedCluster]:
        enter = self._running.enter_context
        if kind == CLUSTER:
            return None, enter(cluster_of(self.version))
        here = enter(replica_set(self.version, 1 if kind == SINGLE else 4))
        if kind == THREE:
            hide_a_member(here)
        return here, enter(replica_set(self.version))

    def close(self) -> None:
        """End those that are running."""
        self._running.close()
        self._found = None
