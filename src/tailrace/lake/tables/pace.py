"""How often tables take over rows under load, so that replaced files do not fill the disk, and what is written for a
change stays in proportion to it.

A commit replaces each file that holds a changed row. A small change replaces little, and tables may take over rows each
second. Where each commit replaces nearly everything, it may do so once a minute: changes wait in the state meanwhile,
and a row that has changed many times is written once.

Tables that are merged on read replace files when they are merged, in proportion to what has changed. They may replace
three times as many bytes, so that their commits wait for a merge only where the whole table changes within a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: In so many seconds as many bytes may be replaced as the tables have.
REWRITTEN_S: Final = 60.0
#: The same for tables that are merged on read.
MERGED_S: Final = 20.0
#: How many times the tables' bytes may be replaced at once after a rest.
_BURST: Final = 2
#: What may be replaced of tables however small: bytes a second, and bytes at once.
_LEAST_RATE, _LEAST_BURST = 32 << 10, 8 << 20
#: A commit's deletion vectors may have this share of the bytes of its new rows, and so many bytes a second besides.
_VECTORS_SHARE: Final = 0.1
_VECTORS_RATE: Final = 32 << 10
#: Whatever the vectors take, the next commit waits no longer than this.
_APART_MAX_S: Final = 5.0


@dataclass
class Cost:
    """What commits have written: bytes of files that others ``replaced``, of new ``rows``, and of deletion
    ``vectors``."""

    replaced: int = 0
    rows: int = 0
    vectors: int = 0

    def add(self, other: Cost) -> None:
        """Those of others too."""
        self.replaced += other.replaced
        self.rows += other.rows
        self.vectors += other.vectors


class Pace:
    """A budget of replaced bytes that grows with time. ``clock`` gives seconds; in ``period_s`` of them as many bytes
    may be replaced as the tables have."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, period_s: float = REWRITTEN_S) -> None:
        self._clock = clock
        self._period_s = period_s
        self._debt = 0.0
        self._rate, self._burst = float(_LEAST_RATE), float(_LEAST_BURST)
        self._at = clock()

    def spent(self, replaced: int, live: int) -> None:
        """Files of ``replaced`` bytes were replaced in tables that have ``live`` bytes now."""
        self._settle()
        self._debt += replaced
        self._rate = max(_LEAST_RATE, live / self._period_s)
        self._burst = max(_LEAST_BURST, live * _BURST)

    def wait(self) -> float:
        """The seconds until the tables may take over rows again."""
        self._settle()
        return max(0.0, (self._debt - self._burst) / self._rate)

    def _settle(self) -> None:
        now = self._clock()
        self._debt = max(0.0, self._debt - (now - self._at) * self._rate)
        self._at = now


class Spacing:
    """How far apart commits are that say which rows are gone. Each one says it anew of every file that it changes,
    however few rows are new, so a commit waits until there are enough of them, some seconds at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock() - _APART_MAX_S
        self._apart = 0.0

    def committed(self, cost: Cost) -> None:
        """The tables have taken over rows."""
        now = self._clock()
        passed = max(now - self._at, 1e-3)
        earned = _VECTORS_RATE + _VECTORS_SHARE * cost.rows / passed
        self._at, self._apart = now, min(_APART_MAX_S, cost.vectors / earned)

    def wait(self) -> float:
        """The seconds until the next commit."""
        return max(0.0, self._at + self._apart - self._clock())


class Pacing:
    """When tables may take over rows again. ``merges``: they are merged on read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, merges: bool) -> None:
        self._pace = Pace(clock, period_s=MERGED_S if merges else REWRITTEN_S)
        self._spacing = Spacing(clock)

    def committed(self, cost: Cost, live: int) -> None:
        """They have taken over rows, and were merged if need be. They have ``live`` bytes now."""
        self._pace.spent(cost.replaced, live)
        self._spacing.committed(cost)

    def wait(self) -> float:
        """The seconds until then."""
        return max(self._pace.wait(), self._spacing.wait())
