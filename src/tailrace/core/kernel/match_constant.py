"""The constants of a compiled ``$match``, with what makes numbers of different types comparable exactly.

The server compares a double with a decimal as that double rounded to 34 digits. So a double carries that decimal, and a
decimal carries the doubles next to it: the largest that counts as less, and the smallest that counts as more.
"""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from typing import Final

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

_COEFFICIENT_MAX: Final = 10**34 - 1
_NEIGHBOURS: Final = 3


def beside(value: Value) -> bytes:
    """What stands next to a number in the pool: 16 bytes, or none where nothing is needed or can be said exactly."""
    kind, data = value
    if kind == v.DOUBLE:
        return v.decimal(_rounded(float(v.number_of(value))))[1]
    if kind != v.DECIMAL or not is_canonical(data):
        return b""
    number = v.number_of(value)
    return b"" if v.is_nan(number) else struct.pack("<2d", *_doubles_beside(Decimal(number)))


def is_canonical(decimal: bytes) -> bool:
    """Whether a decimal's coefficient has at most 34 digits, as every server writes it."""
    bits = int.from_bytes(decimal, "little")
    if bits >> 122 & 0x1E == 0x1E:
        return True  # an infinity or NaN
    return bits >> 125 & 3 != 3 and bits & (1 << 113) - 1 <= _COEFFICIENT_MAX


def _rounded(number: float) -> Decimal:
    return v.DECIMAL_CONTEXT.create_decimal(number)


def _doubles_beside(number: Decimal) -> tuple[float, float]:
    """The largest double below a decimal and the least above it; NaN where there is none."""
    nearest = float(number)
    candidates = [nearest]
    for towards in (-math.inf, math.inf):
        one = nearest
        for _ in range(_NEIGHBOURS):
            one = math.nextafter(one, towards)
            candidates.append(one)
    below = [one for one in candidates if _rounded(one) < number]
    above = [one for one in candidates if _rounded(one) > number]
    return max(below, default=math.nan), min(above, default=math.nan)


def holds_scoped_code(value: Value) -> bool:
    """Whether a value is JavaScript with a scope or holds one: ``$in`` compares these by their bytes."""
    kind, _ = value
    if kind in (v.OBJECT, v.ARRAY):
        return any(holds_scoped_code(inner) for inner in v.elements_of(value))
    return kind == v.CODE_WITH_SCOPE
