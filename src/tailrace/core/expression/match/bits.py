"""The bitwise tests: positions in a number's two's complement (the sign is extended for ever) or in binary data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

if TYPE_CHECKING:
    from tailrace.core.expression.match import tree


def bits_test(node: tree.Bits) -> Callable[[Maybe], bool]:
    """The test of one value; a number that is not a whole number of 64 bits never passes."""
    operator, positions, mask = node.operator, node.positions, node.mask
    clear = operator.endswith("Clear")
    every = "All" in operator

    def test(found: Maybe) -> bool:
        if found is None:
            return False
        if found[0] == v.BINARY:
            bits = int.from_bytes(found[1][5:], "little")
            hits = ((bits >> position & 1) != clear for position in positions)
            return all(hits) if every else any(hits)
        number = _exact_int64(found)
        if number is None:
            return False
        common = (~number if clear else number) & mask
        return common == mask if every else common != 0

    return test


def _exact_int64(found: Value) -> int | None:
    if found[0] not in v.NUMERIC:
        return None
    number = v.number_of(found)
    if not isinstance(number, int):
        if v.is_nan(number) or abs(number) == float("inf") or number != int(number):
            return None
        number = int(number)
    return number if v.INT64_MIN <= number <= v.INT64_MAX else None
