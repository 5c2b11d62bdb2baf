"""A slice of ``make fuzz-sync``, and faults put back that it must find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.server_in_use import SERVER_VERSION
from tests.sync.both import replica_set
from tests.sync.fuzz import Chosen, Report, run_seed
from tests.sync.planted import PLANTED, planted_here

pytestmark = pytest.mark.mongod

STEPS = amount(50, 250)


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[ReplicaSet, ReplicaSet]]:
    with replica_set(SERVER_VERSION) as source, replica_set(SERVER_VERSION) as target:
        yield source, target


def played(ends: tuple[ReplicaSet, ReplicaSet], seed: int, steps: int = STEPS, **options: Any) -> Report:
    report = Report()
    old = SERVER_VERSION.startswith("4.")
    run_seed(*ends, Chosen(seed, steps, rounds=2, capped=not old, **options), report)
    return report


@pytest.mark.parametrize("seed", range(1, 1 + amount(1, 20)))
def test_a_seed_is_equal_at_each_pause(ends: tuple[ReplicaSet, ReplicaSet], seed: int) -> None:
    report = played(ends, seed)
    assert report.differences == []
    assert report.comparisons >= 2


#: ``make test-landing`` looks for the fault that is found soonest: test_equality.py tests that the oracle sees
#: differences.
QUICK = "an index without its options"


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=pytest.mark.slow) if one != QUICK else one for one in PLANTED]
)
def test_a_fault_that_is_put_back_is_found(ends: tuple[ReplicaSet, ReplicaSet], fault: str) -> None:
    with planted_here(fault):
        report = played(ends, 4, steps=100, large=False, to_first=True)
    assert report.differences
