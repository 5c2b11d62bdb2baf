"""Values of a pipeline file, checked: each is what its key asks for, or a UsageError that names the key."""

from __future__ import annotations

import json

from tailrace.core.user_text import byte_count
from tailrace.errors import UsageError


def whole_number(value: object, key: str, *, least: int = 0) -> int:
    """A whole number that is at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{key} must be a whole number, {least} or more, not {shown(value)}")
    return value


def size(value: object, key: str) -> int:
    """A number of bytes, as a number or with a unit."""
    found = byte_count(str(value)) if isinstance(value, int | str) and not isinstance(value, bool) else None
    if found is None:
        raise UsageError(f"{key} must be a number of bytes such as 134217728 or 128m, not {shown(value)}")
    return found


def shown(value: object) -> str:
    """The value in an error: as JSON, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
