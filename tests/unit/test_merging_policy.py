"""What becomes of a table that is merged on read in an hour: bytes, files, rows that are gone, and how old it is.

It was seen only when an hour was measured that merging used up the budget of replaced bytes, and commits were 20
seconds apart: no test had a clock, a budget and merges together.
"""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.lake.tables.pace import Cost, Spacing
from tests.unit.merging_model import ROW_BYTES, ModelledTable

#: That of bench/tables_hour.py.
DOCUMENTS, RATE = 200_000, 2_000


def test_an_hour_of_random_changes_stays_within_its_bounds() -> None:
    """Each document changes every two minutes."""
    seen = ModelledTable(DOCUMENTS).run(3600, RATE)
    assert seen.multiple < 4.2, "bytes written, as a multiple of the changed ones"
    assert max(seen.shares) < 1.27, "rows read for each one that is there"
    assert max(seen.files) <= 15
    assert np.mean(seen.files) <= 12
    assert (np.median(seen.apart), max(seen.apart)) <= (2, 3), "seconds between commits"
    assert seen.disk(750) < 30 * DOCUMENTS * ROW_BYTES, "bytes of replaced files that lie there"
