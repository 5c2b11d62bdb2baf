"""A line of ``tailrace run --dry-run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlanLine:
    """``what`` a run would do, in the part ``part`` (reads, writes, costs, warning); ``facts`` for programs."""

    part: str
    what: str
    facts: Mapping[str, Any]
