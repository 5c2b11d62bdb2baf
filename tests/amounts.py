"""How much a test that draws examples at random runs: a slice in ``make test-landing``, everything in ``make
test-whole``. And what ``make quick`` and ``make test`` leave to it. docs/development.md says how the slices are chosen.

A slice finds less than the whole: of thirteen faults planted in the kernel, the slices of the properties found nine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")

WHOLE: Final = os.environ.get("TAILRACE_TESTS") == "whole"
QUICK: Final = os.environ.get("TAILRACE_TESTS") == "quick"


def amount(quick: int, whole: int) -> int:
    """``whole`` where the environment variable TAILRACE_TESTS says ``whole``, ``quick`` otherwise."""
    return whole if WHOLE else quick


def half_in_quick(cases: Iterable[T]) -> list[T]:
    """All of them; in ``make quick`` and ``make test`` the first and the last of every four. Where tests take turns,
    that is one with the compiled kernel and one without it."""
    return [case for at, case in enumerate(cases) if not QUICK or at % 4 in (0, 3)]
