"""Roots, powers, logarithms, rounding to places, and trigonometry.

Doubles use the C library, as the server does. Decimals are computed where the result is exactly rounded (square root,
rounding, special values); the server's other decimal functions come from a library whose last digit is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Final

from tailrace.core.expression.language.core import binary, unary, variadic
from tailrace.core.expression.language.registry import failure, not_exact
from tailrace.core.expression.operators.arithmetic import CONTEXT, float_of, numeric_argument, to_long, widest
from tailrace.core.expression.operators.array import as_int32
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

_ARITHMETIC: Final = "arithmetic"
_TRIGONOMETRY: Final = "trigonometry"
_NOTE: Final = "decimal arguments are refused when they are met"


def _sqrt(value: Maybe) -> Maybe:
    found = numeric_argument("$sqrt", value)
    if found is None:
        return v.NULL
    if found[0] == v.DECIMAL:
        number = v.decimal_of(found)
        if number.is_nan():
            return v.decimal(number)
        if number < 0:
            raise failure(28714, "$sqrt's argument must be greater than or equal to 0")
        return v.decimal(CONTEXT.sqrt(number))
    plain = float_of(found)
    if plain < 0:
        raise failure(28714, "$sqrt's argument must be greater than or equal to 0")
    return v.double(math.sqrt(plain))


unary("$sqrt", _ARITHMETIC, "3.2", _sqrt)


def _exp(value: Maybe) -> Maybe:
    number = numeric_argument("$exp", value)
    if number is None:
        return v.NULL
    if number[0] == v.DECIMAL:
        raise not_exact("$exp of a decimal")
    try:
        return v.double(math.exp(float_of(number)))
    except OverflowError:
        return v.double(math.inf)


unary("$exp", _ARITHMETIC, "3.2", _exp, note=_NOTE)


def _logarithm(name: str, code: int, function: Callable[[float], float]) -> None:
    def apply(value: Maybe) -> Maybe:
        found = numeric_argument(name, value)
        if found is None:
            return v.NULL
        number = v.number_of(found)
        if v.is_nan(number):
            return v.double(float(number))
        if number <= 0:
            raise failure(code, f"{name}'s argument must be a positive number, but is {number}")
        if found[0] == v.DECIMAL:
            raise not_exact(f"{name} of a decimal")
        return v.double(function(float(number)))

    unary(name, _ARITHMETIC, "3.2", apply, note=_NOTE)


_logarithm("$ln", 28766, math.log)
_logarithm("$log10", 28761, math.log10)


def _log(a: Maybe, b: Maybe) -> Maybe:
    if v.nullish(a) or v.nullish(b):
        return v.NULL
    for value, code, what in ((a, 28756, "argument"), (b, 28757, "base")):
        if value is None or value[0] not in v.NUMERIC:
            raise failure(code, f"$log's {what} must be numeric, not {v.type_name(value)}")
    argument, base = v.number_of(a), v.number_of(b)  # type: ignore[arg-type]
    # Errors are about doubles: a decimal below the least of them is 0 there, and the argument comes first.
    wrong_base = not v.is_nan(base) and (base <= 0 or base == 1)
    if not v.is_nan(argument) and (argument <= 0 or (wrong_base and float(argument) == 0)):
        raise failure(28758, f"$log's argument must be a positive number, but is {argument}")
    if wrong_base:
        raise failure(28759, f"$log's base must be a positive number not equal to 1, but is {base}")
    if isinstance(argument, Decimal) or isinstance(base, Decimal):
        raise not_exact("$log of a decimal")
    divisor = math.log(base)
    above = math.log(argument)
    return v.double(above / divisor if divisor else math.nan)


binary("$log", _ARITHMETIC, "3.2", _log, note=_NOTE)


def _pow(a: Maybe, b: Maybe) -> Maybe:
    if v.nullish(a) or v.nullish(b):
        return v.NULL
    for value, code, what in ((a, 28762, "base"), (b, 28763, "exponent")):
        if value is None or value[0] not in v.NUMERIC:
            raise failure(code, f"$pow's {what} must be numeric, not {v.type_name(value)}")
    base, exponent = v.number_of(a), v.number_of(b)  # type: ignore[arg-type]
    if base == 0 and exponent < 0:
        raise failure(28764, "$pow cannot take a base of 0 and a negative exponent")
    kind = widest(a[0], b[0])  # type: ignore[index]
    if kind == v.DECIMAL:
        raise not_exact("$pow of a decimal")
    if _signals(a) or _signals(b):
        return v.double(float(base if v.is_nan(base) else exponent))  # even to the power of 0, and of 1
    if isinstance(base, int) and isinstance(exponent, int):
        return _integer_power(base, exponent, kind)
    return v.double(_float_power(float(base), float(exponent)))


def _signals(value: Maybe) -> bool:
    """A signalling NaN, which a computation makes quiet."""
    number = int.from_bytes(value[1], "little") if value is not None and value[0] == v.DOUBLE else 0
    return number >> 51 & 0xFFF == 0xFFE and number << 13 & (1 << 64) - 1 != 0


def _integer_power(base: int, exponent: int, kind: int) -> Value:
    if exponent < 0 and base not in (1, -1):
        return v.double(_float_power(float(base), float(exponent)))
    whole = _bounded_power(base, exponent)
    if whole is None:
        return v.double(_float_power(float(base), float(exponent)))
    return v.int64(whole) if kind == v.INT64 else v.integer(whole)


def _bounded_power(base: int, exponent: int) -> int | None:
    """The power where it fits 64 bits."""
    if base in (0, 1, -1):
        return base ** (abs(exponent) % 2 if base == -1 else min(abs(exponent), 1)) if exponent else 1
    if exponent > 63:
        return None
    whole: int = base**exponent
    return whole if v.INT64_MIN <= whole <= v.INT64_MAX else None


def _float_power(base: float, exponent: float) -> float:
    if v.is_nan(base) and exponent % 2 == 1 and math.copysign(1.0, base) < 0:
        return -base  # Python gives the base itself, the server's library that of an odd power's sign
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf
    except ValueError:
        return -math.nan


binary("$pow", _ARITHMETIC, "3.2", _pow, note=_NOTE)


# ── $round and $trunc ────────────────────────────────────────────────────────────────────────────────────────────────


def _places(name: str, rounding: str, truncate: bool) -> None:
    def apply(args: Iterable[Maybe]) -> Maybe:
        given = iter(args)
        value = next(given)
        if value is None or value[0] in v.NULLISH:
            return v.NULL
        if value[0] not in v.NUMERIC:
            raise failure(51081, f"{name} only supports numeric types, not {v.type_name(value)}")
        places = 0
        for precision in given:
            if v.nullish(precision):
                return v.NULL
            places = _precision(name, precision)
        return _rounded(name, value, places, rounding)

    variadic(name, _ARITHMETIC, "3.2" if truncate else "4.2", apply, low=1, high=2)


def _precision(name: str, value: Maybe) -> int:
    if value is None or value[0] not in v.NUMERIC:
        raise failure(16004, f"can't convert from BSON type {v.type_name(value)} to long")
    to_long(value)
    number = as_int32(value)
    if number is None:
        raise failure(51082, f"precision argument to  {name} must be a integral value")
    if not -20 <= number <= 100:
        raise failure(51083, f"cannot apply {name} with precision value {number} value must be in [-20, 100]")
    return number


def _rounded(name: str, value: Value, places: int, rounding: str) -> Value:
    if value[0] == v.DECIMAL:
        number = v.decimal_of(value)
        return v.decimal(quantized(number, places, rounding) if number.is_finite() else number)
    if value[0] == v.DOUBLE:
        plain = float_of(value)
        if v.is_nan(plain):
            return v.double(_nan_by_way_of_decimal(plain))
        if places == 0:
            return v.double(_whole_double(plain, rounding))
        if not math.isfinite(plain):
            return value
        return v.double(float(quantized(CONTEXT.create_decimal(plain), places, rounding)))
    if places >= 0:
        return value
    whole = int(quantized(Decimal(v.integer_of(value)), places, rounding))
    if not v.INT64_MIN <= whole <= v.INT64_MAX:
        raise failure(51080, f"invalid conversion from Decimal128 result in {name}")
    if value[0] == v.INT64:
        return v.int64(whole)
    # Below the least int the server's result wraps around; above the greatest one it is a long.
    return v.int32(whole + (1 << 32)) if whole < v.INT32_MIN else v.integer(whole)


def _nan_by_way_of_decimal(number: float) -> float:
    """The server rounds doubles as decimals, in which a NaN's payload has 33 digits at most: a longer one is lost."""
    return number if v.decimal_of_double(number).as_tuple().digits else math.copysign(math.nan, number)


def _whole_double(number: float, rounding: str) -> float:
    if not math.isfinite(number):
        return number
    whole = float(round(number)) if rounding == ROUND_HALF_EVEN else float(math.trunc(number))
    return math.copysign(whole, number)


def quantized(number: Decimal, places: int, rounding: str) -> Decimal:
    """``number`` with ``places`` digits after the point; as many as 34 digits allow where they do not reach so far."""
    try:
        return number.quantize(Decimal((0, (1,), -places)), rounding=rounding, context=_QUANTIZING)
    except InvalidOperation:
        _, digits, exponent = number.as_tuple()
        fullest = max(int(exponent) - (CONTEXT.prec - len(digits)), -6176)
        return number.quantize(Decimal((0, (1,), fullest)), context=_QUANTIZING)


_QUANTIZING: Final = CONTEXT.copy()
_QUANTIZING.traps[InvalidOperation] = True

_places("$round", ROUND_HALF_EVEN, False)
_places("$trunc", ROUND_DOWN, True)


# ── trigonometry ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _trigonometric(name: str, function: Callable[[float], float], low: float, high: float) -> None:
    """``low`` and ``high`` bound the domain; an infinite bound of sine, cosine and tangent is outside of it."""
    open_ended = name in ("$sin", "$cos", "$tan")

    def apply(value: Maybe) -> Maybe:
        found = numeric_argument(name, value)
        if found is None:
            return v.NULL
        number = v.number_of(found)
        if v.is_nan(number):
            return found
        if number < low or number > high or (open_ended and abs(number) == math.inf):
            raise failure(50989, f"cannot apply {name} to {number}, value must be in [{low},{high}]")
        if found[0] == v.DECIMAL:
            raise not_exact(f"{name} of a decimal")
        try:
            return v.double(function(float(number)))
        except OverflowError:
            return v.double(-math.inf if number < 0 and name == "$sinh" else math.inf)
        except ValueError:  # the ends of $atanh, which the C library takes to infinity
            return v.double(math.copysign(math.inf, number))

    unary(name, _TRIGONOMETRY, "4.2", apply, note=_NOTE)


_ALL: Final = (-math.inf, math.inf)
_trigonometric("$sin", math.sin, *_ALL)
_trigonometric("$cos", math.cos, *_ALL)
_trigonometric("$tan", math.tan, *_ALL)
_trigonometric("$asin", math.asin, -1, 1)
_trigonometric("$acos", math.acos, -1, 1)
_trigonometric("$atan", math.atan, *_ALL)
_trigonometric("$sinh", math.sinh, *_ALL)
_trigonometric("$cosh", math.cosh, *_ALL)
_trigonometric("$tanh", math.tanh, *_ALL)
_trigonometric("$asinh", math.asinh, *_ALL)
_trigonometric("$acosh", math.acosh, 1, math.inf)
_trigonometric("$atanh", math.atanh, -1, 1)


def _atan2(args: Iterable[Maybe]) -> Maybe:
    numbers: list[Value] = []
    for value, code in zip(args, (51044, 51045), strict=True):
        if value is None or value[0] in v.NULLISH:
            return v.NULL
        if value[0] not in v.NUMERIC:
            raise failure(code, f"$atan2 only supports numeric types, not {v.type_name(value)}")
        numbers.append(value)
    if any(value[0] == v.DECIMAL for value in numbers):
        raise not_exact("$atan2 of a decimal")
    y, x = map(float_of, numbers)
    if v.is_nan(x) or v.is_nan(y):
        return v.double(x if v.is_nan(x) else y)  # with its sign and payload, which Python's function would drop
    return v.double(math.atan2(y, x))


variadic("$atan2", _TRIGONOMETRY, "4.2", _atan2, low=2, high=2, note=_NOTE)


def _degrees(name: str, factor: float, exact: Decimal) -> None:
    """``exact`` has 34 digits: the server multiplies by it."""

    def apply(value: Maybe) -> Maybe:
        number = numeric_argument(name, value)
        if number is None:
            return v.NULL
        if number[0] == v.DECIMAL:
            return v.decimal(CONTEXT.multiply(v.decimal_of(number), exact))
        return v.double(float_of(number) * factor)

    unary(name, _TRIGONOMETRY, "4.2", apply)


_degrees("$degreesToRadians", math.pi / 180, Decimal("0.01745329251994329576923690768488613"))
_degrees("$radiansToDegrees", 180 / math.pi, Decimal("57.29577951308232087679815481410517"))
