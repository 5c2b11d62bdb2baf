"""Accumulators used as expressions: over their arguments, or over the elements of one array argument."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Final, TypeAlias

from tailrace.core.expression.language.core import operator_of, parse_arguments, regroup
from tailrace.core.expression.language.expression import Bindings, Evaluate, Expression, Frame
from tailrace.core.expression.language.registry import failure, register
from tailrace.core.expression.operators.arithmetic import CONTEXT, DoubleSum, float_of, plus, times, widest
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import Order
from tailrace.core.expression.values.value import Maybe, Value

_ACCUMULATOR: Final = "accumulator"
#: The sum of this many ints, and every sum on the way to it, is exact in a double.
_INTS_MAX: Final = 1 << 21
_INT32: Final = struct.Struct("<i").unpack


Several: TypeAlias = Callable[[str, Sequence[Expression], Bindings], Expression]


def _accumulator(
    name: str,
    since: str,
    total: Callable[[Iterable[Maybe]], Maybe],
    *,
    associative: bool = False,
    commutative: bool = False,
    several: Several | None = None,
) -> None:
    """One argument that is an array stands for its elements; several stand for themselves (and have their own way with
    ``several``)."""
    _ordered_accumulator(
        name, since, lambda order: total, associative=associative, commutative=commutative, several=several
    )


def _ordered_accumulator(
    name: str,
    since: str,
    make: Callable[[Order], Callable[[Iterable[Maybe]], Maybe]],
    *,
    associative: bool = False,
    commutative: bool = False,
    several: Several | None = None,
) -> None:
    """The same for one that compares values: ``make`` gives it for an order."""

    def build(args: Sequence[Expression], bindings: Bindings) -> Expression:
        total = make(bindings.order)
        closures = [argument.evaluate for argument in args]
        if len(closures) != 1 and several is not None:
            return several(name, args, bindings)
        if len(closures) != 1:
            return operator_of(name, args, lambda frame: total(evaluate(frame) for evaluate in closures), bindings)
        only = closures[0]

        def evaluate(frame: Frame) -> Maybe:
            value = only(frame)
            if value is not None and value[0] == v.ARRAY:
                return total(list(v.elements_of(value)))
            return total([value])

        return operator_of(name, args, evaluate, bindings)

    def parse(operand: Value, bindings: Bindings) -> Expression:
        args = parse_arguments(operand, bindings)
        if associative and bindings.folding and len(args) > 1 and not all(argument.constant for argument in args):
            args = regroup(name, args, build, bindings, commutative=commutative, least=2)
        return build(args, bindings)

    register(name, _ACCUMULATOR, since, parse)


def _numbers(values: Iterable[Maybe]) -> list[Value]:
    return [value for value in values if value is not None and value[0] in v.NUMERIC]


def _totals(numbers: list[Value]) -> tuple[DoubleSum, Decimal, int]:
    total, decimal_total, kind = DoubleSum(), Decimal(0), v.INT32
    for value in numbers:
        kind = widest(kind, value[0])
        number = v.number_of(value)
        if value[0] == v.DECIMAL:
            decimal_total = CONTEXT.add(decimal_total, v.decimal_of(value))
        elif value[0] == v.INT64:
            total.add_long(int(number))
        else:
            total.add(float(number))
    return total, decimal_total, kind


def _sum(values: Iterable[Maybe]) -> Maybe:
    numbers = _numbers(values)
    if len(numbers) <= _INTS_MAX and all(kind == v.INT32 for kind, _ in numbers):
        return v.integer(sum([_INT32(data)[0] for _, data in numbers]))
    total, decimal_total, kind = _totals(numbers)
    if kind == v.DECIMAL:
        return v.decimal(CONTEXT.add(decimal_total, total.decimal()))
    if kind == v.DOUBLE:
        return v.double(total.double())
    whole = total.long()
    if whole is None:
        return v.double(total.double())
    return v.int64(whole) if kind == v.INT64 else v.integer(whole)


_accumulator("$sum", "2.6", _sum, associative=True, commutative=True)


def _average(values: Iterable[Maybe]) -> Maybe:
    numbers = _numbers(values)
    if not numbers:
        return v.NULL
    total, decimal_total, kind = _totals(numbers)
    if kind == v.DECIMAL:
        whole = CONTEXT.add(decimal_total, total.decimal())
        return v.decimal(CONTEXT.divide(whole, Decimal(len(numbers))))
    return v.double(total.double() / len(numbers))


_accumulator("$avg", "2.6", _average)


def _extreme(sign: int, order: Order) -> Callable[[Iterable[Maybe]], Maybe]:
    compare = order.compare

    def choose(values: Iterable[Maybe]) -> Maybe:
        best: Maybe = None
        for value in values:
            if value is None or value[0] in v.NULLISH:
                continue
            if best is None or compare(value, best) * sign > 0:
                best = value
        return v.NULL if best is None else best

    return choose


_ordered_accumulator("$min", "2.6", lambda order: _extreme(-1, order), associative=True, commutative=True)
_ordered_accumulator("$max", "2.6", lambda order: _extreme(1, order), associative=True, commutative=True)


def _deviation(sample: bool) -> Callable[[Iterable[Maybe]], Maybe]:
    """Welford's method in doubles, as the server does it."""

    def apply(values: Iterable[Maybe]) -> Maybe:
        count, mean, squares = 0, 0.0, 0.0
        for value in _numbers(values):
            number = float_of(value)
            count += 1
            delta = number - mean
            if delta != 0:
                mean = plus(mean, delta / count)  # in this order, here and below: of two NaNs the second one stays
                squares = plus(squares, times(number - mean, delta))
        least = count - 1 if sample else count
        if least <= 0:
            return v.NULL
        return v.double(math.sqrt(squares / least) if not v.is_nan(squares) and squares != math.inf else squares)

    return apply


_accumulator("$stdDevPop", "3.2", _deviation(False))
_accumulator("$stdDevSamp", "3.2", _deviation(True))


def _merge_objects(values: Iterable[Maybe]) -> Maybe:
    fields: dict[bytes, bytes] = {}
    for value in values:
        fields = _merged(fields, value)
    return v.document_of(list(fields.values()))


def _merged(fields: dict[bytes, bytes], value: Maybe) -> dict[bytes, bytes]:
    """``fields`` with those of a value, which may be the same dictionary."""
    if value is None or value[0] in v.NULLISH:
        return fields
    if value[0] != v.OBJECT:
        raise failure(40400, f"$mergeObjects requires object inputs, but an input is of type {v.type_name(value)}")
    found = v.elements_by_name(value[1])
    if not fields:
        return found
    fields.update(found)
    return fields


_Accumulate: TypeAlias = Callable[[Frame, dict[bytes, bytes]], dict[bytes, bytes]]


def _merge_of_several(name: str, args: Sequence[Expression], bindings: Bindings) -> Expression:
    """Merged as they come: of an object that stands in the pipeline no document is made first."""
    steps = [_fields_of_literal(each) if each.kind == "object" else _fields_of_value(each.evaluate) for each in args]

    def evaluate(frame: Frame) -> Maybe:
        fields: dict[bytes, bytes] = {}
        for step in steps:
            fields = step(frame, fields)
        return v.document_of(list(fields.values()))

    return operator_of(name, args, evaluate, bindings)


def _fields_of_value(evaluate: Evaluate) -> _Accumulate:
    return lambda frame, fields: _merged(fields, evaluate(frame))


def _fields_of_literal(literal: Expression) -> _Accumulate:
    parts = [(name, name + b"\x00", part.evaluate) for name, part in zip(literal.names, literal.args, strict=True)]

    def step(frame: Frame, fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
        for name, ended, evaluate in parts:
            value = evaluate(frame)
            if value is not None:
                fields[name] = v.BYTES[value[0]] + ended + value[1]
        return fields

    return step


_accumulator("$mergeObjects", "3.6", _merge_objects, several=_merge_of_several)
