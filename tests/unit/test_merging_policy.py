"""What becomes of a table that is merged on read in an hour: bytes, files, rows that are gone, and how old it is.

Only when an hour was measured was it seen that merging used up the budget of replaced bytes, and that commits were 20
seconds apart: no test had a clock, the budget and merges together.
"""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.lake.tables.pace import Cost, Spacing
from tests.unit.merging_model import ROW_BYTES, ModelledTable

#: Those of bench/tables_hour.py.
DOCUMENTS, RATE = 200_000, 2_000
#: With the default ``grace``, replaced files lie there for so many seconds at most.
KEPT_S = 750


@pytest.mark.parametrize("seconds", [600, pytest.param(3600, marks=pytest.mark.long)])
def test_random_changes_stay_within_their_bounds(seconds: int) -> None:
    """Each document changes about every two minutes."""
    seen = ModelledTable(DOCUMENTS).run(seconds, RATE)
    assert seen.multiple < 4.5, "bytes written, as a multiple of the changed ones"
    assert max(seen.shares) < 1.21, "rows read for each one that is there"
    assert max(seen.files) <= 16
    assert np.mean(seen.files) <= 9
    assert max(seen.apart) <= 4, "seconds between commits"
    assert seen.disk(KEPT_S) < 35 * DOCUMENTS * ROW_BYTES, "bytes of replaced files that lie there"


def test_few_documents_that_change_all_the_time_cost_no_more() -> None:
    """Nine in ten changes are of a hundredth of the documents."""
    rng = np.random.default_rng(2)

    def choose(count: int) -> np.ndarray:
        hot = rng.random(count) < 0.9
        return np.where(hot, rng.integers(0, DOCUMENTS // 100, count), rng.integers(0, DOCUMENTS, count))

    seen = ModelledTable(DOCUMENTS, choose).run(600, RATE)
    assert seen.multiple < 2
    assert max(seen.shares) < 1.25
    assert max(seen.files) <= 20
    assert max(seen.apart) <= 5


@pytest.mark.parametrize(("rate", "share", "apart"), [(20, 1.25, 5), (8000, 1.7, 30)])
def test_slow_and_fast_tables_stay_within_their_disk(rate: int, share: float, apart: float) -> None:
    """4 % of the documents in a second are more than the budget has room for: changes wait, and each document is
    written once for all of its changes."""
    seen = ModelledTable(DOCUMENTS).run(400, rate)
    assert max(seen.shares) < share
    assert max(seen.files) <= 20
    assert max(seen.apart) <= apart
    assert seen.disk(KEPT_S) < 50 * DOCUMENTS * ROW_BYTES


def test_a_commit_waits_while_it_would_say_much_and_bring_little() -> None:
    now = [0.0]
    spacing = Spacing(lambda: now[0])
    assert spacing.wait() == 0, "nothing was written yet"
    for cost, wait in {
        (1_000, 500): (0, 0.1),
        (200_000, 0): (0, 0),
        (200_000, 100_000): (1, 3),
        (1_000, 100_000): (2, 4),
        (200_000, 10_000_000): (5, 5),
        (2_000_000, 100_000): (1, 2),
    }.items():
        now[0] += 1
        spacing.committed(Cost(rows=cost[0], vectors=cost[1]))
        assert wait[0] <= spacing.wait() <= wait[1], cost
        now[0] += spacing.wait()
        assert spacing.wait() == 0
