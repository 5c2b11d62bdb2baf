"""Where a table's files hold rows with some keys: files whose keys lie elsewhere are passed over, and of the others
only the keys are read at first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.data_files import key_range, opened, without
from tailrace.lake.tables.deletion_vector import RowNumbers
from tailrace.lake.tables.delta_commit import TableFile
from tailrace.lake.tables.live_files import gone_of
from tailrace.lake.tables.names import KEY


class WantedKeys(NamedTuple):
    """Keys of rows, and the least and the greatest of them."""

    keys: pa.Array
    low: bytes
    high: bytes

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> WantedKeys:
        """Of at least one key."""
        return cls(pa.array(keys, pa.binary()), min(keys), max(keys))


class RowSearch:
    """Looks for rows in the files of the table at ``root``, and remembers which keys a file has."""

    def __init__(self, root: TablePlace) -> None:
        self._root = root
        self._ranges: dict[str, tuple[bytes, bytes] | None] = {}

    def forget(self, names: Iterable[str]) -> None:
        """These files are no longer in the table."""
        for name in names:
            self._ranges.pop(name, None)

    def divided(self, file: TableFile, wanted: WantedKeys) -> tuple[pa.Table, pa.Table] | None:
        """A file's rows without those with the keys, and those with them; ``None`` if it has none of them. Rows that
        are gone are in neither."""
        if self._lies_elsewhere(file.name, wanted):
            return None
        with opened(self._root, file.name) as opening:
            found = self._found(file.name, opening, wanted)
            if found is None:
                return None
            gone = gone_of(self._root, file)
            found = without(pa.table({KEY: found}), gone).column(KEY)
            if not pc.any(found).as_py():
                return None
            rows = without(opening.read(), gone)
            return rows.filter(pc.invert(found)), rows.filter(found)

    def numbered(self, file: TableFile, wanted: WantedKeys, *, read: bool) -> tuple[RowNumbers, pa.Table | None] | None:
        """The numbers of a file's rows that are gone once those with the keys are gone too, and these rows themselves
        if ``read``; ``None`` if it has none of them that is not gone already."""
        if self._lies_elsewhere(file.name, wanted):
            return None
        with opened(self._root, file.name) as opening:
            found = self._found(file.name, opening, wanted)
            if found is None:
                return None
            gone = gone_of(self._root, file)
            numbers = np.setdiff1d(np.flatnonzero(found.to_numpy()), gone, assume_unique=True)
            if not len(numbers):
                return None
            rows = _rows(opening, numbers) if read else None
            return np.union1d(gone, numbers), rows

    def _lies_elsewhere(self, name: str, wanted: WantedKeys) -> bool:
        known = self._ranges.get(name)
        return known is not None and (known[0] > wanted.high or known[1] < wanted.low)

    def _found(self, name: str, file: pq.ParquetFile, wanted: WantedKeys) -> pa.ChunkedArray | None:
        """Which rows have one of the keys; ``None`` if the file says that none has."""
        self._ranges[name] = key_range(file)
        if self._lies_elsewhere(name, wanted):
            return None
        return pc.is_in(file.read(columns=[KEY]).column(KEY), value_set=wanted.keys)


def _rows(file: pq.ParquetFile, numbers: RowNumbers) -> pa.Table:
    """The rows with these numbers. Row groups that have none of them are not read."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    ends = np.cumsum(sizes)
    groups = np.unique(np.searchsorted(ends, numbers, side="right"))
    pieces = []
    for group in groups.tolist():
        first = int(ends[group]) - sizes[group]
        here = numbers[(numbers >= first) & (numbers < ends[group])] - first
        pieces.append(file.read_row_group(group).take(pa.array(here)))
    return pa.concat_tables(pieces)
