"""How hypothesis runs here: the same examples every time, and no clock, so that a loaded machine fails nothing."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

STEADY = settings(deadline=None, derandomize=True, suppress_health_check=(HealthCheck.too_slow,))
