"""``make kills`` as a test, and what it would report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.embedded import ReplicaSet
from tests.kills.__main__ import divided, run
from tests.kills.parts import PARTS, Verdict


@pytest.mark.slow
@pytest.mark.mongod
@pytest.mark.spark
def test_fifty_kills_lose_nothing_and_leave_nothing_twice(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    kills, holds = run(start_replica_set(1, oplog_size_mb=2000), tmp_path, seed=50, kills=50)
    assert kills >= 50
    assert holds


@pytest.mark.slow
@pytest.mark.mongod
@pytest.mark.spark
def test_step_downs_lose_nothing_and_leave_nothing_twice(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    replica_set = start_replica_set(3, oplog_size_mb=2000)
    assert run(replica_set, tmp_path, seed=51, kills=0, step_downs=5) == (0, True)


@pytest.mark.parametrize(
    ("found", "lost", "twice", "wrong"),
    [
        (["a", "b", "c"], 0, 0, 0),
        (["a", "c"], 1, 0, 0),
        (["a", "b", "b", "c"], 0, 1, 0),
        (["b", "a", "c"], 0, 0, 1),
        (["a", "b", "c", "d"], 0, 0, 1),
        ([], 3, 0, 0),
    ],
)
def test_what_is_lost_twice_strange_or_out_of_order_is_told(
    found: list[str], lost: int, twice: int, wrong: int
) -> None:
    verdict = Verdict()
    verdict.compare("letters", [b"a", b"b", b"c"], [one.encode() for one in found])
    assert (verdict.lost, verdict.twice, len(verdict.wrong)) == (lost, twice, wrong)
    assert verdict.holds is (found == ["a", "b", "c"])


def test_kills_are_divided_without_a_rest() -> None:
    weights = [part.weight for part in PARTS]
    assert sum(weights) == 50
    for kills in (1, 7, 50, 333):
        assert sum(divided(kills, weights)) == kills
    assert divided(50, weights) == weights
