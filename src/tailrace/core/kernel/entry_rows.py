"""A run of oplog entries as columns of numbers, which compiled code fills in one row for each entry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tailrace.core.kernel.batch import address
from tailrace.core.kernel.compiled import entry_point, fingerprint
from tailrace.core.kernel.scan import document_end

Ints = npt.NDArray[np.int64]


def _make_count(sources: int) -> Callable[[int, int], int]:
    @entry_point("int64(int64, int64)")
    def count(start: int, limit: int) -> int:
        """How many documents lie in [start, limit); -1 where a length leads astray."""
        if sources == 0:
            return 0
        pos, found = start, 0
        while pos < limit:
            pos = document_end(pos, limit)
            if pos < 0:
                return -1
            found += 1
        return found

    return count


_count = _make_count(fingerprint(__name__))


def entry_rows(raw: bytes, width: int, fill: Callable[[int, int, int], bool]) -> list[Ints] | None:
    """``width`` columns, of which the first says where each entry begins, and at last where the run ends.

    ``fill`` is given the addresses of the run, of its end and of ``width`` zeros for each entry, and writes rows, with
    offsets into the run. ``None`` where it gives false, or a length leads astray.
    """
    buffer = np.frombuffer(raw, np.uint8)
    begin = address(buffer) if raw else 0
    count = _count(begin, begin + len(raw))
    if count < 0:
        return None
    rows = np.zeros((count, width), np.int64)
    if count and not fill(begin, begin + len(raw), address(rows)):
        return None
    columns = rows.T
    return [np.append(columns[0], len(raw)), *(np.ascontiguousarray(column) for column in columns[1:])]
