"""What stands in place of one byte of something sound."""

from __future__ import annotations

import random

from tests.amounts import amount


def wrong_bytes(rng: random.Random, byte: int) -> list[int]:
    """Nothing, all, a bit more or less at either end, anything; two of these in a slice."""
    values = sorted({0, 0xFF, byte ^ 1, byte ^ 0x80, rng.randrange(256)})
    return rng.sample(values, amount(2, len(values)))
