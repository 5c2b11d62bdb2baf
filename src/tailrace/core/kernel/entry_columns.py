"""The places of oplog entries in a run, with their time, operation and namespace: what an archive sorts by.

``entry_columns`` takes a tenth of a microsecond for an entry; the plain walk (``archive/columns.py``) takes more than
two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.core.kernel.batch import address
from tailrace.core.kernel.compiled import entry_point, fingerprint
from tailrace.core.kernel.entry_rows import Ints, entry_rows
from tailrace.core.kernel.memory import load8, load64, store64
from tailrace.core.kernel.runs import copy_runs
from tailrace.core.kernel.scan import (
    STRING,
    TIMESTAMP,
    document_end,
    name_word,
    read_element,
    word_of,
)

#: int64 numbers for each entry: start, time, operation's start and end, namespace's start and end (0 where missing).
_ROW: Final = 6
_TS: Final = word_of(b"ts")
_OP: Final = word_of(b"op")
_NS: Final = word_of(b"ns")


class EntryColumns(NamedTuple):
    """``n`` entries of a run: where each begins (n + 1), its packed cluster time, and where the texts of its operation
    and its namespace lie."""

    offsets: Ints
    times: Ints
    operation_start: Ints
    operation_end: Ints
    namespace_start: Ints
    namespace_end: Ints


def _make_fill(sources: int) -> Callable[[int, int, int], bool]:
    @entry_point("boolean(int64, int64, int64)")
    def fill(start: int, limit: int, rows: int) -> bool:
        """Fill a row for each of the documents in [start, limit). False: one of them is no oplog entry."""
        if sources == 0:
            return False
        pos, row = start, rows
        while pos < limit:
            end = document_end(pos, limit)
            store64(row, pos - start)
            missing = 3
            element = pos + 4
            while missing != 0 and element < end - 1:
                name = element + 1
                type_ = load8(element)
                nul, element = read_element(element, end - 1)
                if element < 0:
                    return False
                if nul - name != 2:
                    continue
                value = nul + 1
                word = name_word(name, 2)
                if word == _TS and type_ == TIMESTAMP and load64(row + 8) == 0:
                    store64(row + 8, load64(value))
                elif word in (_OP, _NS) and type_ == STRING and load64(row + (16 if word == _OP else 32)) == 0:
                    column = 16 if word == _OP else 32
                    store64(row + column, value + 4 - start)
                    store64(row + column + 8, element - 1 - start)
                elif word in (_TS, _OP, _NS):
                    return False
                else:
                    continue
                missing -= 1
            if missing != 0:
                return False
            pos = end
            row += 48
        return True

    return fill


_fill = _make_fill(fingerprint(__name__))


def entry_columns(raw: bytes) -> EntryColumns | None:
    """The columns of a run of entries; ``None`` where one of them is none, which the plain walk tells more about."""
    columns = entry_rows(raw, _ROW, _fill)
    return None if columns is None else EntryColumns(*columns)


def gathered(raw: bytes, start: Ints, end: Ints) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Runs of bytes one after another, and where each begins (n + 1)."""
    offsets = np.zeros(len(start) + 1, np.int64)
    np.cumsum(end - start, out=offsets[1:])
    target = np.empty(max(1, int(offsets[-1])), np.uint8)
    if len(start):
        base = np.frombuffer(raw, np.uint8)
        parts = [len(start), address(base), address(start), address(end), address(target), address(offsets)]
        job = np.array(parts, np.int64)  # kept by its name: compiled code reads it while other threads allocate
        copy_runs(address(job))
    return target[: offsets[-1]], offsets.astype(np.int32)
