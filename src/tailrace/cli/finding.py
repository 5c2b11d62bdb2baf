"""What a check of a deployment has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One check: its result, what was found, and what to do about it."""

    check: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
