"""Look-ups in bulk with a small bound, and which of them were given up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tailrace.core.plan.request import AnswerTooLargeError
from tailrace.read.source import lookup


def bounded_lookups(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> list[int | None]:
    """Bound what a look-up in bulk may find to ``bytes_max`` bytes. The list gets the bound of each that was given
    up."""
    refused: list[int | None] = []

    def bounded(runs: Iterable[bytes], most: int | None) -> list[bytes]:
        try:
            return read(runs, most)
        except AnswerTooLargeError:
            refused.append(most)
            raise

    read = lookup._bounded
    monkeypatch.setattr(lookup, "_bounded", bounded)
    monkeypatch.setattr(lookup, "_FOUND_BYTES_MAX", bytes_max)
    return refused
