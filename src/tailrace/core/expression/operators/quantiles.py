"""``$median`` and ``$percentile``: over a number, or over the numbers of an array."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from tailrace.core.expression.language.core import parse_operand, runtime_operator
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import NOT_SUPPORTED, not_exact, parse_failure, register, unsupported
from tailrace.core.expression.operators.arithmetic import float_of
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

_ACCUMULATOR: Final = "accumulator"
#: Up to this many numbers are sorted by insertion on every machine, so that zeros of both signs keep their order.
_STABLE_MAX: Final = 16


def _arguments(name: str, operand: Value, needed: tuple[str, ...], code: int) -> dict[str, Value]:
    """The named arguments, with what the server finds wrong with them before it parses an expression."""
    if operand[0] != v.OBJECT:
        raise parse_failure(code, f"specification must be an object; found {name} with {v.type_name(operand)}")
    given: dict[str, Value] = {}
    for key, kind, data in v.fields_of(operand[1]):
        shown = key.decode("utf-8", "replace")
        if shown not in needed:
            raise parse_failure(40415, f"BSON field '{name}.{shown}' is an unknown field.")
        if shown in given:
            raise parse_failure(40413, f"BSON field '{name}.{shown}' is a duplicate field")
        if shown == "method" and kind in v.NULLISH:
            continue
        if shown == "method" and kind != v.STRING:
            raise parse_failure(14, f"BSON field '{name}.method' is the wrong type, expected type 'string'")
        given[shown] = (kind, data)
    for each in needed:
        if each not in given:
            raise parse_failure(40414, f"BSON field '{name}.{each}' is missing but a required field")
    if v.bytes_of(given["method"]) != b"approximate":
        raise parse_failure(2, "Currently only 'approximate' can be used as percentile 'method'.")
    return given


def _shares(operand: Value, bindings: Bindings) -> list[float]:
    """The ``p`` of ``$percentile``: constants from 0 to 1."""
    failures = bindings.compilation.failures
    before = len(failures)
    parsed = parse_operand(operand, bindings)
    if len(failures) > before:  # here the server evaluates constants at once
        raise parse_failure(failures[before].code or NOT_SUPPORTED, failures[before].message)
    if not parsed.constant:
        raise parse_failure(7750300, "The $percentile 'p' field must be an array of constant values")
    wrong = "The $percentile 'p' field must be an array of numbers from [0.0, 1.0]"
    value = parsed.value
    items = v.elements_of(value) if value is not None and value[0] == v.ARRAY else []
    if not items:
        raise parse_failure(7750301, wrong)
    shares = []
    for item in items:
        if item[0] not in v.NUMERIC:
            raise parse_failure(7750302, wrong)
        share = float_of(item)
        if math.isnan(share):
            raise unsupported("$percentile with NaN as a share", "mongod 7.0.28 ends when it evaluates it")
        if not 0 <= share <= 1:
            raise parse_failure(7750303, wrong)
        shares.append(share)
    return shares


def _quantiles(value: Maybe, shares: list[float]) -> list[Value]:
    """The values at these shares, as doubles; null for all where there is no number."""
    if value is not None and value[0] in v.NUMERIC:
        return [v.double(float_of(value))] * len(shares)
    items = v.elements_of(value) if value is not None and value[0] == v.ARRAY else []
    numbers = [float_of(item) for item in items if item[0] in v.NUMERIC]
    numbers = sorted(number for number in numbers if not math.isnan(number))
    if not numbers:
        return [v.NULL] * len(shares)
    last = len(numbers) - 1
    found = [numbers[min(last, max(0, math.ceil(share * len(numbers)) - 1))] for share in shares]
    if 0.0 in found and len(numbers) > _STABLE_MAX and len({math.copysign(1, n) for n in numbers if n == 0}) > 1:
        raise not_exact("a quantile that is zero, of many numbers with zeros of both signs,")
    return [v.double(number) for number in found]


def _register(name: str, needed: tuple[str, ...], code: int, finish: Callable[[list[Value]], Value]) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        given = _arguments(name, operand, needed, code)
        source = parse_operand(given["input"], bindings.unfolded())  # the server does not optimize it
        shares = _shares(given["p"], bindings) if "p" in given else [0.5]

        def evaluate(frame: Frame) -> Maybe:
            return finish(_quantiles(source.evaluate(frame), shares))

        return runtime_operator(name, [source], evaluate)

    register(name, _ACCUMULATOR, "7.0", parse)


_register("$median", ("input", "method"), 7436201, lambda values: values[0])
_register("$percentile", ("input", "p", "method"), 7436200, v.array_of)
