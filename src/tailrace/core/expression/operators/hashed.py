"""``$toHashedIndexKey``: the number under which a hashed index keeps a value."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from tailrace.core.expression.language.core import parse_operand, runtime_operator
from tailrace.core.expression.language.expression import Bindings, Expression
from tailrace.core.expression.language.registry import failure, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import RANK
from tailrace.core.expression.values.value import Maybe, Value

_SEED: Final = bytes(4)
_END: Final = bytes(4)
_SIZE_BYTES: Final = 4
#: Of the document that the server hashes, which holds the value.
_DEPTH_MAX: Final = 200
_TOO_LARGE: Final = 2.0**63


def hash_of(value: Maybe) -> Value:
    """The first half of an MD5, as a long. Numbers of any type that become the same long have the same hash, and so
    have values of one type class, such as strings and symbols. A missing value is hashed as null."""
    digest = hashlib.md5(_SEED, usedforsecurity=False)
    _add(digest.update, value if value is not None else v.NULL)
    return (v.INT64, digest.digest()[:8])


def _add(update: Callable[[bytes], None], value: Value, name: bytes = b"", depth: int = 1) -> None:
    kind, data = value
    update(RANK[kind].to_bytes(_SIZE_BYTES, "little", signed=True) + name)
    if kind in v.NUMERIC:
        update(_whole(value).to_bytes(8, "little", signed=True))
        return
    if kind == v.CODE_WITH_SCOPE:
        code = data[2 * _SIZE_BYTES :]
        size = int.from_bytes(data[_SIZE_BYTES : 2 * _SIZE_BYTES], "little")
        update(code[:size])
        data = code[size:]
    elif kind not in v.NESTED:
        update(data)
        return
    if depth == _DEPTH_MAX:
        raise failure(15, f"BSONObj exceeded maximum nested object depth: {_DEPTH_MAX}")
    for field, inner, content in v.fields_of(data):
        _add(update, (inner, content), field + b"\x00", depth + 1)
    update(_END)


def _whole(value: Value) -> int:
    """A double cut to a long, a decimal rounded to one, and the nearest long of what none holds; 0 for NaN. The double
    2^63 becomes the smallest long, as the processor's conversion has it."""
    number = v.number_of(value)
    if isinstance(number, int):
        return number
    if v.is_nan(number):
        return 0
    if number == _TOO_LARGE and isinstance(number, float):
        return v.INT64_MIN
    if not v.INT64_MIN <= number <= v.INT64_MAX:
        return v.INT64_MAX if number > 0 else v.INT64_MIN
    return int(number.to_integral_value() if isinstance(number, Decimal) else number)


def _parse(operand: Value, bindings: Bindings) -> Expression:
    """The server does not optimize it: constants below it are evaluated for each document."""
    argument = parse_operand(operand, bindings.unfolded())
    return runtime_operator("$toHashedIndexKey", [argument], lambda frame: hash_of(argument.evaluate(frame)))


register("$toHashedIndexKey", "data size", "5.0", _parse)
