"""What people write in options and files: sizes, durations, and names that are nearly right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

_SIZE: Final = re.compile(r"(\d{1,18})\s*([kmgt]?)b?", re.IGNORECASE | re.ASCII)
_FACTORS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) *(?:(s|m|h|d)|(second|minute|hour|day)s?)", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def byte_count(text: str) -> int | None:
    """The bytes that ``134217728``, ``128m``, ``128 MB`` or ``2g`` mean; ``None``: it is no size, or zero. Units are
    powers of 1024."""
    match = _SIZE.fullmatch(text)
    return None if match is None or not int(match[1]) else int(match[1]) * _FACTORS[match[2].lower()]


def seconds(text: str) -> float | None:
    """The seconds that ``30s``, ``12h``, ``7 days`` or ``1.5 hours`` mean; ``None``: it is no duration."""
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * _SECONDS[match[2] or match[3][0]]


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Which of the known names somebody may have meant, whatever its case; ``None``: none is near. ``cutoff``: how much
    alike they are to be, from 0 to 1."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None
