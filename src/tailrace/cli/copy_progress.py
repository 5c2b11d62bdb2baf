"""How far the copy of a lake with ``startingFrom=snapshot`` has come, from the offsets that Spark reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """Documents copied, about how many there are, and about how many seconds the rest takes (``None``: not known)."""

    documents: int
    estimate: int
    seconds_left: float | None

    def to_json(self) -> dict[str, Any]:
        left = None if self.seconds_left is None else round(self.seconds_left)
        return {"copied": self.documents, "ofAbout": self.estimate, "secondsLeft": left}

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", about {self.seconds_left:.0f} s left"
        return f"copied {self.documents:,} of about {self.estimate:,} documents{left}"


class CopyWatch:
    """Reports a copy's progress whenever it has grown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._told = -1

    def look(self, end_offset: object) -> CopyProgress | None:
        """``end_offset`` is a micro-batch's, as JSON text. ``None`` if no copy is under way or nothing is new."""
        collections = _collections(end_offset)
        if collections is None:
            return None
        documents = sum(one["documents"] for one in collections)
        estimate = sum(
            one["documents"] if one["outcome"] else max(one["estimate"], one["documents"]) for one in collections
        )
        now = self._clock()
        if self._first is None:
            self._first = now, documents
        if documents == self._told:
            return None
        self._told = documents
        begun, before = self._first
        left = (now - begun) / (documents - before) * (estimate - documents) if documents > before else None
        return CopyProgress(documents, estimate, left)


def _collections(end_offset: object) -> list[dict[str, Any]] | None:
    try:
        found: list[dict[str, Any]] = json.loads(str(end_offset))["snapshot"]["state"]["collections"]
    except (ValueError, KeyError, TypeError):
        return None
    return found
