"""A sync to a sharded cluster that is killed (SIGKILL) while chunks move and primaries step down: a short campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.kills.syncing_to_cluster import KilledToCluster
from tests.sync.mongos import WritingMongos

pytestmark = [pytest.mark.mongod, pytest.mark.slow]
KILLS = 8


def test_a_killed_sync_to_a_cluster_is_equal_at_its_end(tmp_path: Path) -> None:
    with ReplicaSet() as source, ShardedCluster(2) as cluster, WritingMongos(cluster) as mongos:
        killed = KilledToCluster(source, cluster, mongos, tmp_path, seed=35)
        killed.run(KILLS, moves=4, step_downs=4)
    assert killed.wrong == []
    assert killed.kills.total() == KILLS
    assert killed.harms == {"chunk move": 4, "step-down of the target": 4}
