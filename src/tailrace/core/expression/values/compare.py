"""The server's total order over BSON values, and equality by it.

Types are compared by their class first (all numbers are one class, strings and symbols another), then by value. The
order of the classes and the rules inside each are those of mongod 6.0, measured by the differential fuzz.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cmp_to_key
from typing import Final, TypeAlias, TypeVar

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

#: The order of the type classes. A missing value ranks with undefined.
RANK: Final[dict[int, int]] = {
    v.MIN_KEY: -1,
    v.UNDEFINED: 0,
    v.NULL_TYPE: 5,
    v.DOUBLE: 10,
    v.INT32: 10,
    v.INT64: 10,
    v.DECIMAL: 10,
    v.STRING: 15,
    v.SYMBOL: 15,
    v.OBJECT: 20,
    v.ARRAY: 25,
    v.BINARY: 30,
    v.OBJECT_ID: 35,
    v.BOOL: 40,
    v.DATE: 45,
    v.TIMESTAMP: 47,
    v.REGEX: 50,
    v.DB_POINTER: 55,
    v.CODE: 60,
    v.CODE_WITH_SCOPE: 65,
    v.MAX_KEY: 127,
}
_VALUELESS: Final = frozenset({v.UNDEFINED, v.NULL_TYPE, v.MIN_KEY, v.MAX_KEY})


CompareData: TypeAlias = Callable[[bytes, bytes], int]
StringKey: TypeAlias = Callable[[bytes], bytes]

_Ordered = TypeVar("_Ordered", int, bytes, tuple[bytes, ...])


def rank(value: Maybe) -> int:
    """The place of the value's type class in the order."""
    return 0 if value is None else RANK[value[0]]


def _sign(left: _Ordered, right: _Ordered) -> int:
    return (left > right) - (left < right)


def compare_numbers(left: Value, right: Value) -> int:
    """The order of two numeric values: NaN first and equal to itself, then by value whatever the types."""
    a, b = v.number_of(left), v.number_of(right)
    if v.DECIMAL not in (left[0], right[0]) and (a < b or a >= b):
        return (a > b) - (a < b)
    if v.is_nan(a) or v.is_nan(b):
        return v.is_nan(b) - v.is_nan(a)
    if isinstance(a, Decimal) != isinstance(b, Decimal):
        a, b = _as_decimal(a), _as_decimal(b)
    return (a > b) - (a < b)


def _as_decimal(number: v.Number) -> Decimal:
    """The server compares a double with a decimal after rounding it to 34 digits."""
    return v.DECIMAL_CONTEXT.create_decimal(number)


def _compare_strings(a: bytes, b: bytes) -> int:
    return _sign(a[4:], b[4:])


def _compare_binary(a: bytes, b: bytes) -> int:
    return _sign(len(a), len(b)) or _sign(a[4:], b[4:])


def _compare_bytes(a: bytes, b: bytes) -> int:
    return _sign(a, b)


def _compare_dates(a: bytes, b: bytes) -> int:
    return _sign(v.integer_of((v.DATE, a)), v.integer_of((v.DATE, b)))


def _compare_timestamps(a: bytes, b: bytes) -> int:
    return _sign(v.unsigned_of((v.TIMESTAMP, a)), v.unsigned_of((v.TIMESTAMP, b)))


def _compare_regexes(a: bytes, b: bytes) -> int:
    return _sign(tuple(a.split(b"\x00")), tuple(b.split(b"\x00")))


def _compare_pointers(a: bytes, b: bytes) -> int:
    """By the length of the namespace, then its bytes, then the object id."""
    return _sign(len(a), len(b)) or _sign(a[4:], b[4:])


def split_code(data: bytes) -> tuple[bytes, bytes]:
    """The code and the scope document of a JavaScript value with scope."""
    size = int.from_bytes(data[4:8], "little")
    return data[8 : 7 + size], data[8 + size :]


#: The types whose order does not depend on a collation.
_PLAIN: Final[dict[int, CompareData]] = {
    30: _compare_binary,
    35: _compare_bytes,
    40: _compare_bytes,
    45: _compare_dates,
    47: _compare_timestamps,
    50: _compare_regexes,
    55: _compare_pointers,
    60: _compare_strings,
}


def _comparing(compare_strings: CompareData) -> Callable[[Maybe, Maybe], int]:
    """The order of values in which strings are ordered by ``compare_strings``."""

    def compare(left: Maybe, right: Maybe) -> int:
        if left is None or right is None:
            return _sign(rank(left), rank(right))
        kind, other = left[0], right[0]
        if kind == other:
            if left[1] == right[1]:
                return 0
        else:
            order = _sign(RANK[kind], RANK[other])
            if order:
                return order
        if kind in v.NUMERIC:
            return compare_numbers(left, right)
        if kind in _VALUELESS:
            return 0
        return by_rank[RANK[kind]](left[1], right[1])

    def documents(a: bytes, b: bytes) -> int:
        """Field by field: the type class, then the name, then the value; the shorter document first."""
        left, right = v.fields_of(a), v.fields_of(b)
        for (name, kind, data), (other_name, other_kind, other_data) in zip(left, right, strict=False):
            order = _sign(RANK[kind], RANK[other_kind]) or _sign(name, other_name)
            order = order or compare((kind, data), (other_kind, other_data))
            if order:
                return order
        return _sign(len(left), len(right))

    def arrays(a: bytes, b: bytes) -> int:
        left, right = v.fields_of(a), v.fields_of(b)
        for (_, kind, data), (_, other_kind, other_data) in zip(left, right, strict=False):
            order = compare((kind, data), (other_kind, other_data))
            if order:
                return order
        return _sign(len(left), len(right))

    def scopes(a: bytes, b: bytes) -> int:
        """Code first, then the scope as a document."""
        code_a, scope_a = split_code(a)
        code_b, scope_b = split_code(b)
        return _sign(code_a, code_b) or documents(scope_a, scope_b)

    by_rank = {**_PLAIN, 15: compare_strings, 20: documents, 25: arrays, 65: scopes}
    return compare


def _identifying(string_key: StringKey | None) -> Callable[[Maybe], Hashable]:
    """Keys in which strings stand for their ``string_key``, or for themselves."""

    def identity(value: Maybe) -> Hashable:
        if value is None:
            return (0,)
        kind, data = value
        place = RANK[kind]
        if place == 10:
            number = v.number_of(value)
            return (10, "NaN") if v.is_nan(number) else (10, number)
        if place == 15:
            return (15, data if string_key is None else string_key(data))
        if place == 20:
            return (20, tuple((name, identity((k, d))) for name, k, d in v.fields_of(data)))
        if place == 25:
            return (25, tuple(identity((k, d)) for _, k, d in v.fields_of(data)))
        return (place, data)

    return identity


@dataclass(frozen=True, slots=True)
class Order:
    """A total order over values: the simple one, or one with the strings in a collation's order.

    ``compare``   -1, 0 or 1 for two values
    ``identity``  a key with which a set holds values that compare equal as one: two keys are equal when the values are
    ``simple``    whether strings are compared by their bytes
    """

    compare: Callable[[Maybe, Maybe], int]
    identity: Callable[[Maybe], Hashable]
    simple: bool = False

    def equal(self, left: Maybe, right: Maybe) -> bool:
        return self.compare(left, right) == 0

    def sorted(self, values: Iterable[Value], *, descending: bool = False) -> list[Value]:
        """The values in this order; equal ones keep their order, in either direction."""
        return sorted(values, key=cmp_to_key(self.compare), reverse=descending)


compare: Final = _comparing(_compare_strings)
identity: Final = _identifying(None)
SIMPLE: Final = Order(compare, identity, simple=True)


def collated(string_key: StringKey) -> Order:
    """The order in which strings are compared by ``string_key`` of their BSON data (length, UTF-8, NUL)."""

    def compare_strings(a: bytes, b: bytes) -> int:
        return _sign(string_key(a), string_key(b))

    return Order(_comparing(compare_strings), _identifying(string_key))
