"""Arithmetic with the server's result types: int to long to double where it overflows, decimal where one is present."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Final

from tailrace.core.expression.language.core import binary, unary, variadic
from tailrace.core.expression.language.registry import failure
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Number, Value

_ARITHMETIC: Final = "arithmetic"
CONTEXT: Final = v.DECIMAL_CONTEXT


class DoubleSum:
    """A sum of doubles and integers kept in two doubles, so that little is lost on the way (Knuth's two-sum)."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.addend = 0.0
        self.special = 0.0

    def add(self, number: float) -> None:
        """What was lost before is added to ``number`` first, as the server does it: a sum that comes to zero is zero
        then, whatever was lost. Of what this loses in turn, it keeps the part that the shorter method sees."""
        self.special = plus(self.special, number)
        joined = number + self.addend
        lost = self.addend - (joined - number)
        self.sum, self.addend = _two_sum(self.sum, joined)
        self.addend += lost

    def add_long(self, number: int) -> None:
        high = (abs(number) >> 32 << 32) * (1 if number >= 0 else -1)
        self.add(float(number - high))
        self.add(float(high))

    def pair(self) -> tuple[float, float]:
        if self.sum != self.sum or math.isinf(self.sum):
            return (self.special, 0.0)
        return (self.sum, self.addend)

    def double(self) -> float:
        return self.pair()[0]

    def decimal(self) -> Decimal:
        high, low = self.pair()
        if v.is_nan(high) or math.isinf(high):
            return v.decimal_of_double(high)
        return CONTEXT.add(CONTEXT.create_decimal(high), CONTEXT.create_decimal(low))

    def long(self) -> int | None:
        """The sum as a 64-bit integer, cut, or ``None`` where it does not fit."""
        high, low = self.pair()
        if v.is_nan(high) or math.isinf(high):
            return None
        total = int(Decimal(high) + Decimal(low))
        return total if v.INT64_MIN <= total <= v.INT64_MAX else None


def plus(a: float, b: float) -> float:
    """The sum; of two NaNs ``b`` stays, as on servers since 5.0.

    Python leaves that to its C compiler, and so it changes with the build, and within one process: code that has run
    often enough is specialised, and then adds the other way round.
    """
    total = a + b
    return total if total == total else _nan_of(a, b, total)  # noqa: PLR0124


def times(a: float, b: float) -> float:
    """The product; of two NaNs ``b`` stays, as on servers."""
    product = a * b
    return product if product == product else _nan_of(a, b, product)  # noqa: PLR0124


def _nan_of(a: float, b: float, computed: float) -> float:
    if v.is_nan(b):
        return b + 0.0  # which makes a signalling one quiet
    return a + 0.0 if v.is_nan(a) else computed


def _two_sum(a: float, b: float) -> tuple[float, float]:
    """The sum, and what its rounding lost."""
    total = a + b
    shifted = total - a
    return total, (a - (total - shifted)) + (b - shifted)


def widest(*kinds: int) -> int:
    """The type of a result: decimal before double before long before int."""
    for kind in _BY_WIDTH:
        if kind in kinds:
            return kind
    return v.INT32


_BY_WIDTH: Final = (v.DECIMAL, v.DOUBLE, v.INT64)
_WIDTH: Final = {kind: width for width, kind in enumerate((v.INT32, v.INT64, v.DOUBLE, v.DECIMAL))}


def float_of(value: Value) -> float:
    """A number as double; a decimal is rounded."""
    return float(v.number_of(value))


class _Addition:
    """The running total of ``$add``: it widens as wider numbers come; a date takes what came before as its offset."""

    def __init__(self) -> None:
        self.kind = v.INT32
        self.total: Number = 0
        self.dated = False

    def add(self, value: Value) -> None:
        if value[0] == v.DATE:
            if self.dated:
                raise failure(16612, "only one date allowed in an $add expression")
            before = self.result()
            self.dated, self.total = True, 0
            self._shift(before)
            self._shift(v.int64(v.integer_of(value)))
            return
        if self.dated:
            self._shift(value)
            return
        before_kind, self.kind = self.kind, widest(self.kind, value[0])
        if self.kind == v.DECIMAL:
            if before_kind != v.DECIMAL:
                plain = self.total
                self.total = v.decimal_of_double(plain) if isinstance(plain, float) else Decimal(plain)
            self.total = CONTEXT.add(Decimal(self.total), v.decimal_of(value))
        elif self.kind == v.DOUBLE:
            self.total = plus(float(self.total), float_of(value))
        else:
            exact = int(self.total) + v.integer_of(value)
            if v.INT64_MIN <= exact <= v.INT64_MAX:
                self.total = exact
            else:
                self.kind, self.total = v.DOUBLE, float(self.total) + float_of(value)

    def _shift(self, value: Value) -> None:
        """Add milliseconds to a date."""
        self.total = _checked(int(self.total) + _milliseconds(value, "$add"), "$add")

    def result(self) -> Value:
        if self.dated:
            return v.date(int(self.total))
        if self.kind == v.DECIMAL:
            return v.decimal(Decimal(self.total))
        if self.kind == v.DOUBLE:
            return v.double(float(self.total))
        return v.int64(int(self.total)) if self.kind == v.INT64 else v.integer(int(self.total))


def _add(args: Iterable[Maybe]) -> Maybe:
    addition = _Addition()
    for value in args:
        if value is None or value[0] in v.NULLISH:
            return v.NULL
        if value[0] not in v.NUMERIC and value[0] != v.DATE:
            raise failure(14, f"$add only supports numeric or date types, not {v.type_name(value)}")
        addition.add(value)
    return addition.result()


def decimal_to_long(number: Decimal) -> int:
    """A decimal rounded to 64 bits as the server's conversion does; out of range gives the smallest long."""
    if not number.is_finite():
        return v.INT64_MIN
    whole = int(number.to_integral_value())
    return whole if v.INT64_MIN <= whole <= v.INT64_MAX else v.INT64_MIN


def _add_two(a: Value, b: Value) -> Value:
    """The same of two numbers, neither of which is a decimal."""
    left, right = v.PLAIN_NUMBERS[a[0]](a[1])[0], v.PLAIN_NUMBERS[b[0]](b[1])[0]
    if v.DOUBLE in (a[0], b[0]):
        return v.double(plus(0.0 + left, float(right)))  # from zero, so that no sum is -0.0
    total = left + right
    if not v.INT64_MIN <= total <= v.INT64_MAX:
        return v.double(float(left) + float(right))
    return v.int64(total) if v.INT64 in (a[0], b[0]) else v.integer(total)


variadic("$add", _ARITHMETIC, "2.2", _add, associative=True, commutative=True, two=_add_two, left_since="7.0")


def _multiply(args: Iterable[Maybe]) -> Maybe:
    kind = v.INT32
    product: Number = 1
    as_double = 1.0
    for value in args:
        if value is None or value[0] not in v.NUMERIC:
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            raise failure(14, f"$multiply only supports numeric types, not {v.type_name(value)}")
        before = kind
        if _WIDTH[value[0]] > _WIDTH[kind]:
            kind = value[0]
        if kind == v.DECIMAL:
            if before != v.DECIMAL:
                product = v.decimal_of_double(as_double) if before == v.DOUBLE else Decimal(int(product))
            product = CONTEXT.multiply(Decimal(product), v.decimal_of(value))
            continue
        number = v.number_of(value)
        as_double = times(as_double, float(number))
        if kind != v.DOUBLE:
            product = int(product) * int(number)
            if not v.INT64_MIN <= product <= v.INT64_MAX:
                kind = v.DOUBLE
    if kind == v.DECIMAL:
        return v.decimal(Decimal(product))
    if kind == v.DOUBLE:
        return v.double(as_double)
    return v.int64(int(product)) if kind == v.INT64 else v.integer(int(product))


def _multiply_two(a: Value, b: Value) -> Value:
    """The same of two numbers, neither of which is a decimal."""
    left, right = v.PLAIN_NUMBERS[a[0]](a[1])[0], v.PLAIN_NUMBERS[b[0]](b[1])[0]
    if v.DOUBLE in (a[0], b[0]):
        return v.double(times(float(left), float(right)))
    product = left * right
    if not v.INT64_MIN <= product <= v.INT64_MAX:
        return v.double(float(left) * float(right))
    return v.int64(product) if v.INT64 in (a[0], b[0]) else v.integer(product)


variadic(
    "$multiply", _ARITHMETIC, "2.2", _multiply, associative=True, commutative=True, two=_multiply_two, left_since="7.0"
)


def _subtract(a: Maybe, b: Maybe) -> Maybe:
    if a is None or b is None or a[0] in v.NULLISH or b[0] in v.NULLISH:
        return v.NULL
    if a[0] in v.NUMERIC and b[0] in v.NUMERIC:
        kind = widest(a[0], b[0])
        if kind == v.DECIMAL:
            return v.decimal(CONTEXT.subtract(v.decimal_of(a), v.decimal_of(b)))
        if kind == v.DOUBLE:
            return v.double(float_of(a) - float_of(b))
        difference = v.integer_of(a) - v.integer_of(b)
        if not v.INT64_MIN <= difference <= v.INT64_MAX:
            return v.double(float_of(a) - float_of(b))
        return v.int64(difference) if kind == v.INT64 else v.integer(difference)
    if a[0] == v.DATE and b[0] == v.DATE:
        return v.int64(_checked(v.integer_of(a) - v.integer_of(b), "$subtract"))
    if a[0] == v.DATE and b[0] in v.NUMERIC:
        return v.date(_checked(v.integer_of(a) - _milliseconds(b, "$subtract"), "$subtract"))
    raise failure(14, f"can't $subtract {v.type_name(b)} from {v.type_name(a)}")


def to_long(value: Value) -> int:
    """A number as 64-bit integer, as the server coerces it: cut, or 31109 where it does not fit."""
    if value[0] == v.DECIMAL:
        return decimal_to_long(v.decimal_of(value))
    number = v.number_of(value)
    if isinstance(number, int):
        return number
    if not -(2.0**63) <= number < 2.0**63:
        raise failure(31109, f"Can't coerce out of range value {number} to long")
    return int(number)


def _milliseconds(value: Value, name: str) -> int:
    """A number to shift a date by, as whole milliseconds: a double is rounded half away from zero, a decimal half to
    even. What fits no long overflows the date, whatever the date."""
    number = v.number_of(value)
    if v.is_nan(number) or abs(number) == math.inf:
        raise failure(15, f"date overflow in {name}")
    if isinstance(number, float):
        number = int(math.copysign(math.floor(abs(number) + 0.5), number))
    elif isinstance(number, Decimal):
        number = int(number.to_integral_value())
    return _checked(number, name)


def _checked(number: int, name: str) -> int:
    if not v.INT64_MIN <= number <= v.INT64_MAX:
        raise failure(15, f"date overflow in {name}")
    return number


binary("$subtract", _ARITHMETIC, "2.2", _subtract, right_first=True)


def _divide(a: Maybe, b: Maybe) -> Maybe:
    if a is not None and b is not None and a[0] in v.NUMERIC and b[0] in v.NUMERIC:
        if v.number_of(b) == 0:
            raise failure(2, "can't $divide by zero")
        if v.DECIMAL in (a[0], b[0]):
            return v.decimal(CONTEXT.divide(v.decimal_of(a), v.decimal_of(b)))
        return v.double(float_of(a) / float_of(b))
    if v.nullish(a) or v.nullish(b):
        return v.NULL
    raise failure(14, f"$divide only supports numeric types, not {v.type_name(a)} and {v.type_name(b)}")


binary("$divide", _ARITHMETIC, "2.2", _divide, right_first=True)


def _mod(a: Maybe, b: Maybe) -> Maybe:
    if a is not None and b is not None and a[0] in v.NUMERIC and b[0] in v.NUMERIC:
        kind = widest(a[0], b[0])
        if v.number_of(b) == 0:
            raise failure(5733415 if kind == v.DECIMAL else 16610, "can't $mod by zero")
        if kind == v.DECIMAL:
            return v.decimal(decimal_remainder(v.decimal_of(a), v.decimal_of(b)))
        if kind == v.DOUBLE and not (a[0] != v.DOUBLE and _is_int(float_of(b))):
            left, right = float_of(a), float_of(b)
            if v.is_nan(left) or v.is_nan(right):
                return v.double((left if v.is_nan(left) else right) + 0.0)  # of two NaNs the first one stays here
            return v.double(-math.nan if math.isinf(left) else math.fmod(left, right))
        left_whole, right_whole = v.integer_of(a), int(v.number_of(b))
        rest = abs(left_whole) % abs(right_whole) * (-1 if left_whole < 0 else 1)
        return v.int64(rest) if v.INT64 in (a[0], b[0]) else v.int32(rest)
    if v.nullish(a) or v.nullish(b):
        return v.NULL
    raise failure(16611, f"$mod only supports numeric types, not {v.type_name(a)} and {v.type_name(b)}")


def _is_int(number: float) -> bool:
    """A double that is an int: as divisor of an integer it counts as one."""
    return number.is_integer() and v.INT32_MIN <= number <= v.INT32_MAX


def decimal_remainder(a: Decimal, b: Decimal) -> Decimal:
    """The remainder with the sign of the dividend, exact whatever the exponents."""
    if a.is_nan() or b.is_nan():
        return a if a.is_nan() else b
    if a.is_infinite():
        return Decimal("NaN")
    if b.is_infinite():
        return a
    exponent = min(a.as_tuple().exponent, b.as_tuple().exponent)
    scale = -int(exponent)
    left, right = int(a.scaleb(scale, _WIDE)), int(b.scaleb(scale, _WIDE))
    rest = abs(left) % abs(right)
    result = Decimal((int(a.is_signed()), tuple(map(int, str(rest))), int(exponent)))
    return CONTEXT.create_decimal(result)


_WIDE: Final = CONTEXT.copy()
_WIDE.prec = 14000
_WIDE.Emax = 999999
_WIDE.Emin = -999999

binary("$mod", _ARITHMETIC, "2.2", _mod)


def numeric_argument(name: str, value: Maybe) -> Value | None:
    """The number that a one-argument operator got, ``None`` for null and missing; else 28765."""
    if value is None or value[0] in v.NULLISH:
        return None
    if value[0] not in v.NUMERIC:
        raise failure(28765, f"{name} only supports numeric types, not {v.type_name(value)}")
    return value


def _abs(value: Maybe) -> Maybe:
    found = numeric_argument("$abs", value)
    if found is None:
        return v.NULL
    if found[0] == v.DOUBLE:
        return (v.DOUBLE, _without_sign(found[1]))
    if found[0] == v.DECIMAL:
        return (v.DECIMAL, _without_sign(found[1]))
    number = abs(v.integer_of(found))
    if found[0] == v.INT64:
        if number > v.INT64_MAX:
            raise failure(28680, "can't take $abs of long long min")
        return v.int64(number)
    return v.integer(number)


def _without_sign(data: bytes) -> bytes:
    """A double or a decimal with the sign's bit cleared, which leaves even a signalling NaN as it is."""
    return data[:-1] + bytes((data[-1] & 0x7F,))


unary("$abs", _ARITHMETIC, "3.2", _abs)


def _rounding(name: str, rounding: str) -> None:
    def apply(value: Maybe) -> Maybe:
        found = numeric_argument(name, value)
        if found is None:
            return v.NULL
        if found[0] == v.DOUBLE:
            number = float_of(found)
            return v.double(_rounded_double(number, rounding) if math.isfinite(number) else number)
        if found[0] == v.DECIMAL:
            exact = v.decimal_of(found)
            # quantized, not merely integral: the server gives the exponent 0, and NaN where 34 digits do not reach
            return v.decimal(exact if exact.is_nan() else exact.quantize(_ONE, rounding, CONTEXT))
        return found

    unary(name, _ARITHMETIC, "3.2", apply)


_ONE: Final = Decimal(1)


def _rounded_double(number: float, rounding: str) -> float:
    return math.copysign(float(math.ceil(number) if rounding == ROUND_CEILING else math.floor(number)), number)


_rounding("$ceil", ROUND_CEILING)
_rounding("$floor", ROUND_FLOOR)
