"""The deployments of a run: of which kind a seed's is, and those that are up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.differential.hidden import hide_a_member
from tests.products.writes import ROOT_PASSWORD

SINGLE: Final = "one member"
#: And a hidden one beside them, which has no vote.
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
    """Those of one version, of one kind at a time: they stay up for the next seed where it is of the same kind.

    ``only``: the kind of every seed; by default one of three seeds is of each.
    """

    def __init__(self, version: str, only: str = "") -> None:
        self.version = version
        self._only = only
        self._kind = ""
        self._running = ExitStack()
        self._found: tuple[ReplicaSet | None, ReplicaSet | ShardedCluster] | None = None

    def kind(self, seed: int) -> str:
        """Of the deployment that a seed is played on."""
        return self._only or _KINDS[seed % len(_KINDS)]

    def of(self, kind: str) -> tuple[ReplicaSet | None, ReplicaSet | ShardedCluster]:
        """One to play on, and another one to point at. A cluster is not there to play on: each seed has its own, since
        its shards go."""
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
        """End those that are up."""
        self._running.close()
        self._found = None
