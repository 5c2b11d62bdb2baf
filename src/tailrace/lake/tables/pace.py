"""How often tables take over rows under load, so that replaced files do not fill the disk.

A commit replaces each file that holds a changed row. A small change replaces little, and tables may take over rows each
second. Where each commit replaces nearly everything, it may do so once a minute: changes wait in the state meanwhile,
and a row that has changed many times is written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: In a minute as many bytes may be replaced as the tables have.
_PERIOD_S: Final = 60.0
#: How many times the tables' bytes may be replaced at once after a rest.
_BURST: Final = 2
#: What may be replaced of tables however small: bytes a second, and bytes at once.
_LEAST_RATE, _LEAST_BURST = 32 << 10, 8 << 20


class Pace:
    """A budget of replaced bytes that grows with time. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._debt = 0.0
        self._rate, self._burst = float(_LEAST_RATE), float(_LEAST_BURST)
        self._at = clock()

    def spent(self, replaced: int, live: int) -> None:
        """Files of ``replaced`` bytes were replaced in tables that have ``live`` bytes now."""
        self._settle()
        self._debt += replaced
        self._rate = max(_LEAST_RATE, live / _PERIOD_S)
        self._burst = max(_LEAST_BURST, live * _BURST)

    def wait(self) -> float:
        """The seconds until the tables may take over rows again."""
        self._settle()
        return max(0.0, (self._debt - self._burst) / self._rate)

    def _settle(self) -> None:
        now = self._clock()
        self._debt = max(0.0, self._debt - (now - self._at) * self._rate)
        self._at = now
