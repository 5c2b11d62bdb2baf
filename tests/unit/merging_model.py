"""An hour of a table that is merged on read, without a file: which files it has, how many of their rows are gone, what
is written and when. ``to_merge``, ``part_rows`` and ``Pacing`` decide, as in a writer; the clock is the
model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tailrace.lake.tables import merge_on_read
from tailrace.lake.tables.delta_commit import TableFile
from tailrace.lake.tables.pace import Cost, Pacing

#: As bench/tables_hour.py measures them: a row's bytes in a large file, and what a file has besides.
ROW_BYTES, FILE_BYTES = 112, 4000
#: What a commit has in the log besides vectors, for itself and for each file that it names.
_COMMIT_BYTES, _ACTION_BYTES = 1200, 700
#: A checkpoint every so many versions holds the vectors of all files once more, compressed.
_CHECKPOINT_EVERY = 10


@dataclass
class Seen:
    """What there was so far. ``shares``, ``files``: of each version, the rows that a reader reads for each one that is
    there, and how many files; ``apart``: the seconds between commits of changes."""

    written: float = 0.0
    changed: int = 0
    log: float = 0.0
    shares: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    replaced: list[tuple[float, float]] = field(default_factory=list)

    @property
    def multiple(self) -> float:
        """Bytes written, as a multiple of the changed rows'."""
        return self.written / (self.changed * ROW_BYTES)

    def disk(self, grace_s: float) -> float:
        """The most bytes that were replaced within ``grace_s`` seconds."""
        times = np.array([at for at, _ in self.replaced])
        sums = np.concatenate([[0.0], np.cumsum([size for _, size in self.replaced])])
        return float(np.max(sums[1:] - sums[np.searchsorted(times, times - grace_s)]))


class ModelledTable:
    """``documents`` documents, whose rows lie in one file at first."""

    def __init__(self, documents: int, choose: Callable[[int], Any] | None = None, *, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self._choose = choose or (lambda count: self._rng.integers(0, documents, count))
        self._where = np.zeros(documents, np.int64)
        self._rows, self._live = {0: documents}, {0: documents}
        self._following, self._version = 1, 0
        self._now = 0.0
        self._pacing = Pacing(lambda: self._now, merges=True)
        self._latest = 0.0
        self._waiting: list[Any] = []
        self.seen = Seen()

    def run(self, seconds: int, rate: int, *, inserted: float = 0.1) -> Seen:
        """So many seconds with ``rate`` changes each: ``inserted`` of them make a row and as many remove one, which is
        one document here; the others do both."""
        for _ in range(seconds):
            self._now += 1
            self.seen.changed += rate
            self._waiting.append(self._choose(round(rate * (1 - inserted))))
            if self._pacing.wait() <= 0:
                self._publish()
        return self.seen

    def _publish(self) -> None:
        documents = np.unique(np.concatenate(self._waiting))
        self._waiting.clear()
        vectors = 0.0
        for name, count in zip(*np.unique(self._where[documents], return_counts=True), strict=True):
            vectors += self._vector(name)
            self._live[name] -= int(count)
            if self._live[name]:
                vectors += self._vector(name)
            else:
                self._gone(name)
        self._where[documents] = name = self._added(len(documents))
        cost = Cost(rows=self._size(name), vectors=round(vectors))
        self.seen.apart.append(self._now - self._latest)
        self._latest = self._now
        self._committed(cost.rows, vectors, len(self._rows))
        cost.add(self._merge())
        self._pacing.committed(cost, sum(map(self._size, self._rows)))

    def _merge(self) -> Cost:
        files, cost = self.listed(), Cost()
        groups = merge_on_read.to_merge(files)
        if not groups:
            return cost
        at_most, rows, vectors = merge_on_read.part_rows(files), 0, 0.0
        for group in groups:
            names = [int(one) for one in group]
            cost.replaced += sum(map(self._size, names))
            vectors += sum(map(self._vector, names))
            chosen = np.zeros(self._following + 1, np.bool_)
            chosen[names] = True
            moved = np.flatnonzero(chosen[self._where])
            for name in names:
                self._gone(name)
            parts = max(1, round(len(moved) / at_most))
            for begin, end in pairwise(len(moved) * part // parts for part in range(parts + 1)):
                self._where[moved[begin:end]] = name = self._added(end - begin)
                rows += self._size(name)
        self.seen.replaced.append((self._now, float(cost.replaced)))
        self._committed(rows, vectors, sum(map(len, groups)))
        return cost

    def _committed(self, data: float, vectors: float, named: int) -> None:
        self._version += 1
        log = vectors + _COMMIT_BYTES + _ACTION_BYTES * named
        if self._version % _CHECKPOINT_EVERY == 0:
            log += sum(map(self._vector, self._rows))
        self.seen.written += data + log
        self.seen.log += log
        self.seen.shares.append(sum(self._rows.values()) / sum(self._live.values()))
        self.seen.files.append(len(self._rows))

    def listed(self) -> Sequence[TableFile]:
        """The files of the newest version."""
        return [
            TableFile(str(name), self._size(name), rows, {"cardinality": rows - self._live[name]})
            for name, rows in self._rows.items()
        ]

    def _added(self, rows: int) -> int:
        self._following += 1
        self._rows[self._following] = self._live[self._following] = rows
        return self._following

    def _gone(self, name: int) -> None:
        del self._rows[name], self._live[name]

    def _size(self, name: int) -> int:
        return FILE_BYTES + ROW_BYTES * self._rows[name]

    def _vector(self, name: int) -> float:
        """The bytes of a file's deletion vector, as text."""
        containers = -(-self._rows[name] // 65_536)
        gone = (self._rows[name] - self._live[name]) / containers
        return 1.25 * containers * min(2 * gone, 8192)
