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


def test_an_hour_of_random_changes_stays_within_its_bounds() -> None:
    """Each document changes about every two minutes."""
    seen = ModelledTable(DOCUMENTS).run(3600, RATE)
    assert seen.multiple < 4.2, "bytes written, as a multiple of the changed ones"
    assert max(seen.shares) < 1.27, "rows read for each one that is there"
    assert max(seen.files) <= 15
    assert np.mean(seen.files) <= 12
    assert np.median(seen.apart) <= 2, "seconds between commits"
    assert max(seen.apart) <= 3
    assert seen.disk(KEPT_S) < 30 * DOCUMENTS * ROW_BYTES, "bytes of replaced files that lie there"


def test_few_documents_that_change_all_the_time_cost_no_more() -> None:
    """Nine in ten changes are of a hundredth of the documents."""
    rng = np.random.default_rng(2)

    def choose(count: int) -> np.ndarray:
        hot = rng.random(count) < 0.9
        return np.where(hot, rng.integers(0, DOCUMENTS // 100, count), rng.integers(0, DOCUMENTS, count))

    seen = ModelledTable(DOCUMENTS, choose).run(900, RATE)
    assert seen.multiple < 3
    assert max(seen.shares) < 1.27
    assert max(seen.files) <= 20
    assert max(seen.apart) <= 3


@pytest.mark.parametrize("rate", [20, 20_000])
def test_slow_and_fast_tables_stay_within_their_disk(rate: int) -> None:
    """A tenth of the documents each second is more than the budget has room for: changes wait, and each document is
    written once for all of its changes."""
    seen = ModelledTable(DOCUMENTS).run(900, rate)
    assert max(seen.shares) < (1.27 if rate == 20 else 3)
    assert max(seen.files) <= 20
    assert max(seen.apart) <= (5 if rate == 20 else 60)
    assert seen.disk(KEPT_S) < 45 * DOCUMENTS * ROW_BYTES


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
        (2_000_000, 100_000): (0, 1),
    }.items():
        now[0] += 1
        spacing.committed(Cost(rows=cost[0], vectors=cost[1]))
        assert wait[0] <= spacing.wait() <= wait[1], cost
        now[0] += spacing.wait()
        assert spacing.wait() == 0
