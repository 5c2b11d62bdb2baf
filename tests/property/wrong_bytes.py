"""What replaces one byte of something valid."""

from __future__ import annotations

import random

from tests.amounts import amount


def wrong_bytes(rng: random.Random, byte: int) -> list[int]:
    """All bits off, all on, a flipped bit at either end, and a random byte; two of these in a slice."""
    values = sorted({0, 0xFF, byte ^ 1, byte ^ 0x80, rng.randrange(256)})
    return rng.sample(values, amount(2, len(values)))
