"""How Hypothesis runs here: the same examples every time, and without deadlines, so that nothing fails on a loaded
machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.amounts import amount

STEADY = settings(
    deadline=None, derandomize=True, max_examples=amount(25, 100), suppress_health_check=(HealthCheck.too_slow,)
)
