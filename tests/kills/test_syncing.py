"""A small part of what ``make kills`` does to a sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.kills.syncing import Killed, Wanted
from tests.sync.both import replica_set

pytestmark = pytest.mark.mongod


@pytest.mark.slow  # tests/sync kills each part: test_copying.py, test_follower.py
def test_a_killed_sync_is_equal_at_its_positions_and_at_its_end(tmp_path: Path) -> None:
    with replica_set("6.0.27") as source, replica_set("6.0.27") as target:
        result = Killed(source, target, tmp_path, seed=1).run(Wanted(amount(4, 20)))
    assert result.wrong == []
    assert result.kills.total() >= 4


@pytest.mark.slow
def test_step_downs_of_both_ends_change_nothing(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path) -> None:
    source, target = (start_replica_set(3, enable_test_commands=True, oplog_size_mb=2000) for _ in range(2))
    result = Killed(source, target, tmp_path, seed=3).run(Wanted(3, step_downs=3))
    assert result.wrong == []
    assert result.kills.total() == 3
    assert result.harms.total() == 6
