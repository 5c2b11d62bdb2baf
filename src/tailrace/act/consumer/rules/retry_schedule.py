"""How often, and after how long, a change that a handler has failed at is tried again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tailrace.errors import UsageError

#: Waits do not grow further: numbers have an end.
_DOUBLINGS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """How often a change is tried again, and after how long.

    Attributes:
        retries: how often a change is tried again before ``on_error`` is asked
        first: seconds before the second try
        factor: how much longer each wait is than the one before
        longest: seconds; no wait is longer
    """

    retries: int = 0
    first: float = 0.05
    factor: float = 2.0
    longest: float = 5.0

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise UsageError(f"retries must be a whole number, 0 or more, not {self.retries!r}")
        for name, least in (("first", 0.0), ("factor", 1.0), ("longest", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise UsageError(f"{name} of a retry schedule must be a number, {least:g} or more, not {value!r}")
        if self.first > self.longest:
            raise UsageError(
                f"the first wait of a retry schedule, {self.first:g} s, is longer than the longest, {self.longest:g} s"
            )

    @classmethod
    def of(cls, given: object) -> RetrySchedule:
        """A schedule, or a number of retries with the ordinary waits. Raises UsageError."""
        return given if isinstance(given, RetrySchedule) else cls(given)  # type: ignore[arg-type]

    def wait(self, attempt: int) -> float:
        """Seconds after the ``attempt``-th try, from 1 on, has failed."""
        return float(min(self.longest, self.first * self.factor ** min(attempt - 1, _doublings(self.factor))))


def _doublings(factor: float) -> float:
    """A power that no number is too large for."""
    return _DOUBLINGS_MAX / max(1.0, math.log2(factor)) if factor > 1 else _DOUBLINGS_MAX
