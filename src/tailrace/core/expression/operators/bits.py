"""``$bitAnd``, ``$bitOr``, ``$bitXor`` and ``$bitNot``, on ints and longs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Final

from tailrace.core.expression.language.core import unary, variadic
from tailrace.core.expression.language.registry import failure
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe

_BITWISE: Final = "bitwise"
_WHOLE: Final = frozenset((v.INT32, v.INT64))


def _register(name: str, start: int, combine: Callable[[int, int], int]) -> None:
    def together(values: Iterable[Maybe]) -> Maybe:
        """The first null ends it; a long makes the result one."""
        result, longs = start, False
        for value in values:
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            if value[0] not in _WHOLE:
                raise failure(14, f"{name} only supports int and long operands.")
            result = combine(result, v.integer_of(value))
            longs = longs or value[0] == v.INT64
        return v.int64(result) if longs else v.int32(result)

    variadic(name, _BITWISE, "6.3", together, associative=True, commutative=True)


_register("$bitAnd", -1, operator.and_)
_register("$bitOr", 0, operator.or_)
_register("$bitXor", 0, operator.xor)


def _not(value: Maybe) -> Maybe:
    if value is None or value[0] in v.NULLISH:
        return v.NULL
    if value[0] not in v.NUMERIC:
        raise failure(28765, f"$bitNot only supports numeric types, not {v.type_name(value)}")
    if value[0] not in _WHOLE:
        raise failure(14, f"$bitNot only supports int and long, not: {v.type_name(value)}.")
    made = v.int64 if value[0] == v.INT64 else v.int32
    return made(~v.integer_of(value))


unary("$bitNot", _BITWISE, "6.3", _not)
