"""A short slice of the differential fuzzing: the long version is ``make fuzz``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tailrace.source.mongod import MongodSource
from tests.differential.fuzz import Totals, run_seed, server
from tests.differential.wire import Wire
from tests.differential.workload import Workload

pytestmark = pytest.mark.mongod

_OPERATIONS = 250


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Wire, MongodSource]]:
    with server() as pair:
        yield pair


@pytest.mark.parametrize(("seed", "matches"), [(101, 0), (102, 0), (103, 2)])
def test_every_stream_of_a_random_workload_is_the_servers(
    sides: tuple[Wire, MongodSource], seed: int, matches: int
) -> None:
    totals = Totals()
    run_seed(*sides, totals, seed=seed, ops=_OPERATIONS, matches=matches)
    assert not totals.differences, "\n\n".join(totals.differences[:3])
    assert totals.streams >= 40
    assert totals.events >= 2000


def test_the_same_seed_gives_the_same_operations() -> None:
    assert _operations(5) == _operations(5)
    assert _operations(5) != _operations(6)


def _operations(seed: int) -> list[str]:
    """In words. The session is fresh in every run, so that a replay on the same server is not taken for a retry."""
    return [re.sub(r"'lsid': \{'id': Binary\(.*?, 4\)\}", "", repr(one)) for one in Workload(seed).operations(300)]
