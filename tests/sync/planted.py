"""Faults put back into the product, which the fuzz must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

PLANTED: Final[dict[str, Callable[[Any], None]]] = {}


@contextmanager
def planted_here(name: str) -> Iterator[None]:
    """Put a fault back for as long as the block lasts."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        PLANTED[name](patch)
        yield
