"""Expressions near the server's limits, for the fuzz: lengths of strings, arrays, numbers and paths, depth, exponents.

Large values are consumed where they are made: results stay small, and no event takes more than about 20 MB.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value
from tests.differential import expression_values as values

#: How often an expression of the grammar is one of these.
RATE = 0.008

LONGEST_STRING = 16 * 1024 * 1024
#: Numbers of digits at which some reader of numbers stops.
DIGITS = (9, 10, 11, 18, 19, 20, 34, 35, 308, 309, 310, 1000, 4300, 4301, 6144, 6145, 6177, 20_000)
EXPONENTS = (9, 308, 309, 323, 324, 325, 6111, 6112, 6144, 6145, 6176, 6177, 99_999)
LARGE = (
    v.int32(v.INT32_MAX), v.int32(v.INT32_MIN), v.int64(1 << 31), v.int64(-(1 << 31) - 1), v.int64(1 << 40),
    v.int64(v.INT64_MAX), v.int64(v.INT64_MIN), v.double(2.0**31), v.double(1e10), v.double(1e300), v.double(-1e300),
    v.double(5e-324), v.decimal(Decimal("2147483648")), v.decimal(Decimal("1E+6144")), v.int32(1000), v.int32(-1000),
)  # fmt: skip
PLACES = (-21, -20, -19, -18, 18, 19, 20, 33, 34, 35, 99, 100, 101, v.INT32_MAX, v.INT32_MIN)


def _doc(**fields: Value) -> Value:
    return v.object_of([(name.rstrip("_").encode(), value) for name, value in fields.items()])


def _op(name: str, *operands: Value) -> Value:
    return v.object_of([(name.encode(), operands[0] if len(operands) == 1 else v.array_of(list(operands)))])


def expression(rng: random.Random, kind: str) -> Value:
    """One expression near a limit, of the given kind if there is one."""
    return rng.choice(_BY_KIND.get(kind, _ALL))(rng)


def query(rng: random.Random) -> Value:
    """A predicate that is nested, or whose path is long, up to what the server accepts and a little more."""
    condition = _op("a", v.int32(1))
    if rng.random() < 0.5:
        return v.object_of([(path(rng, 178, 183).encode(), v.int32(1))])
    for _ in range(rng.randint(94, 101)):
        condition = v.object_of([(rng.choice((b"$and", b"$or", b"$nor")), v.array_of([condition]))])
    return condition


def path(rng: random.Random, fewest: int = 196, most: int = 202) -> str:
    return ".".join(rng.choice("abcd") for _ in range(rng.randint(fewest, most)))


# ── strings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _long_string(rng: random.Random) -> Value:
    """A string doubled until it has 16 MB, give or take a few bytes before the doubling."""
    doublings = rng.randint(10, 22)
    letter = rng.choice(("x", "é", "日"))
    length = max(1, (LONGEST_STRING >> doublings) + rng.choice((-2, -1, 0, 1)))
    start = v.string(letter * (length // len(letter.encode())) + "y" * (length % len(letter.encode())))
    if rng.random() < 0.5:  # not constant: the length differs from document to document
        start = _op("$concat", start, _op("$substrBytes", _op("$toString", v.string("$_id")), v.int32(1), v.int32(1)))
    both = _op("$concat", v.string("$$value"), v.string("$$value"))
    grown = _doc(input=_op("$range", v.int32(0), v.int32(doublings)), initialValue=start, in_=both)
    whole = _op("$reduce", grown)
    return _op("$concat", whole, values.text(rng)) if rng.random() < 0.2 else whole


def _length(rng: random.Random) -> Value:
    whole = _long_string(rng)
    if rng.random() < 0.2:
        return _op("$bsonSize", _doc(a=whole))
    if rng.random() < 0.3:
        return _op("$indexOfBytes", whole, v.string("y"), v.int32(LONGEST_STRING - rng.randint(1, 40)))
    return _op(rng.choice(("$strLenBytes", "$strLenBytes", "$strLenCP")), whole)


def _piece(rng: random.Random) -> Value:
    name = rng.choice(("$substr", "$substrBytes"))
    return _op(name, _long_string(rng), v.int32(LONGEST_STRING - rng.randint(0, 40)), v.int32(rng.choice((-1, 1, 5))))


def _substring(rng: random.Random) -> Value:
    name = rng.choice(("$substr", "$substrBytes", "$substrCP"))
    bounds = [rng.choice((v.int32(0), v.int32(1), rng.choice(LARGE))), rng.choice((v.int32(-1), rng.choice(LARGE)))]
    return _op(name, rng.choice((values.text(rng), v.string("$a"), v.string("$b"))), *bounds)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _digits(rng: random.Random) -> str:
    count = rng.choice(DIGITS) if rng.random() < 0.7 else rng.randint(1, 7000)
    digits = rng.choice(("1", "9", "5", "0")) * count if rng.random() < 0.5 else str(rng.randint(1, 9)) + "0" * count
    form = rng.choice(("{}", "{}", "-{}", "+{}", "0.{}", "{}7", "0{}.5", "{}e-{e}", "{}E+{e}", "1E{}", "0x{}", "{}x"))
    return form.format(digits, e=rng.choice(EXPONENTS)) if rng.random() < 0.8 else f"12345E-{rng.choice(EXPONENTS)}"


def _number_as_text(rng: random.Random) -> Value:
    text = v.string(_digits(rng))
    to = rng.choice(("int", "long", "double", "decimal", "bool"))
    if rng.random() < 0.3:
        return _op("$convert", _doc(input=text, to=v.string(to), onError=values.scalar(rng)))
    return _op(f"$to{to.capitalize()}", text)


def _rounded(rng: random.Random) -> Value:
    places = rng.choice((v.int32, v.int64, lambda n: v.double(float(n))))(rng.choice(PLACES))
    number = rng.choice((values.number(rng), rng.choice(LARGE), v.string("$a")))
    return _op(rng.choice(("$round", "$trunc")), number, places)


def _power(rng: random.Random) -> Value:
    base = rng.choice((values.number(rng), rng.choice(LARGE), v.int32(rng.choice((-2, -1, 0, 1, 2, 3, 10)))))
    exponent = rng.choice((rng.choice(LARGE), v.int32(rng.choice((30, 31, 32, 62, 63, 64, 1023, 1024, -1074, -1075)))))
    return _op("$pow", base, exponent)


# ── arrays and depth ─────────────────────────────────────────────────────────────────────────────────────────────────


def _range(rng: random.Random) -> Value:
    """Many items, or more than the server makes (which it says before it makes one)."""
    count = rng.choice((1000, 20_000, 6_553_598, 6_553_600, v.INT32_MAX))
    start = v.int32(rng.choice((0, 1, -5)))
    if rng.random() < 0.2:
        start, count = v.int32(v.INT32_MAX - rng.randint(0, 5)), v.INT32_MAX
    elif rng.random() < 0.2:
        return _op(
            "$range", v.int32(v.INT32_MIN), v.int32(v.INT32_MAX), v.int32(rng.choice((1 << 20, v.INT32_MAX, -1)))
        )
    end = v.int32(count)
    if count < v.INT32_MAX and rng.random() < 0.5:
        end = _op("$add", v.string("$_id"), end)
    return _op("$range", start, end, *([v.int32(rng.choice((1, 2, -1, 7)))] if rng.random() < 0.3 else []))


def _items(rng: random.Random) -> Value:
    items = _range(rng)
    roll = rng.random()
    if roll < 0.5:
        return _op(rng.choice(("$size", "$sum", "$avg", "$max", "$last")), items)
    if roll < 0.8:
        return _op("$arrayElemAt", items, rng.choice((v.int32(-1), v.int32(999), rng.choice(LARGE))))
    return _op("$size", _op("$slice", items, rng.choice((v.int32(-3), v.int32(1500), rng.choice(LARGE)))))


def _deep_value(rng: random.Random) -> Value:
    """Depth of a result: what the expression gives is nested about 200 levels deep."""
    inner = rng.choice((v.array_of([v.string("$$value")]), _doc(a=v.string("$$value"))))
    levels = rng.randint(190, 203)
    count = v.int32(levels) if rng.random() < 0.5 else _op("$add", v.string("$_id"), v.int32(levels - 12))
    return _op("$reduce", _doc(input=_op("$range", v.int32(0), count), initialValue=v.int32(1), in_=inner))


def _deep_expression(rng: random.Random) -> Value:
    """Depth of the expression itself: nested operators, variables, literals."""
    wrap, each = rng.choice(_WRAPS)
    inner = rng.choice((v.int32(-1), v.string("$_id"), v.string("$a")))
    for _ in range(rng.randint(186, 200) // each):
        inner = wrap(inner)
    return inner


_WRAPS: tuple[tuple[Callable[[Value], Value], int], ...] = (
    (lambda inner: v.array_of([inner]), 1),
    (lambda inner: _doc(a=inner), 1),
    (lambda inner: _op("$abs", inner), 1),
    (lambda inner: _op("$literal", _doc(a=inner)), 2),
    (lambda inner: _op("$let", _doc(vars=_doc(v=v.string("$a")), in_=inner)), 2),
    (lambda inner: _op("$map", _doc(input=v.array_of([v.int32(1)]), in_=inner)), 2),
    (lambda inner: _op("$cond", v.TRUE, inner, v.int32(0)), 2),
)


def _deep_judged(rng: random.Random) -> Value:
    name = rng.choice(("$eq", "$ne", "$cmp"))
    return _op(name, _deep_value(rng), rng.choice((v.string("$a"), _deep_value(rng))))


def _long_path(rng: random.Random) -> Value:
    return v.string(rng.choice(("$", "$$ROOT.", "$$CURRENT.")) + path(rng))


_Make = Callable[[random.Random], Value]
_BY_KIND: dict[str, tuple[_Make, ...]] = {
    "n": (_length, _number_as_text, _rounded, _power, _items),
    "s": (_piece, _substring),
    "b": (_deep_judged,),
    "i": (_items, _rounded, lambda rng: rng.choice(LARGE)),
}
_ALL: tuple[_Make, ...] = (
    _length, _piece, _substring, _number_as_text, _rounded, _power, _items, _deep_value, _deep_expression,
    _deep_judged, _long_path,
)  # fmt: skip
