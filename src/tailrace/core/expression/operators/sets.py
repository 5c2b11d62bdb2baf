"""Set operators: equality by the server's order, results in that order where the server sorts them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final

from tailrace.core.expression.language.core import (
    check_arity,
    operator_of,
    ordered_binary,
    ordered_variadic,
    parse_arguments,
    runtime_operator,
    unary,
)
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import failure, parse_failure, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import Order
from tailrace.core.expression.values.value import Maybe, Value

_SET: Final = "set"


def _every(name: str, code: int, *, wanted: bool) -> None:
    def apply(value: Maybe) -> Maybe:
        if value is None or value[0] != v.ARRAY:
            raise failure(code, f"{name}'s argument must be an array, but is {v.type_name(value)}")
        combine = all if wanted else any
        return v.boolean(combine(v.truthy(item) for item in v.elements_of(value)))

    unary(name, _SET, "2.6", apply)


_every("$allElementsTrue", 17040, wanted=True)
_every("$anyElementTrue", 17041, wanted=False)


def _difference(order: Order) -> Callable[[Maybe, Maybe], Maybe]:
    identity = order.identity

    def apply(a: Maybe, b: Maybe) -> Maybe:
        if v.nullish(a) or v.nullish(b):
            return v.NULL
        left = _array(a, 17048, "both operands of $setDifference must be arrays. First")
        right = _array(b, 17049, "both operands of $setDifference must be arrays. Second")
        seen: set[Hashable] = {identity(item) for item in right}
        kept = []
        for item in left:
            key = identity(item)
            if key not in seen:
                seen.add(key)
                kept.append(item)
        return v.array_of(kept)

    return apply


def _array(value: Maybe, code: int, text: str) -> list[Value]:
    if value is None or value[0] != v.ARRAY:
        raise failure(code, f"{text} argument is of type: {v.type_name(value)}")
    return v.elements_of(value)


ordered_binary("$setDifference", _SET, "2.6", _difference)


def _is_subset(a: Maybe, b: Maybe, order: Order) -> Maybe:
    identity = order.identity
    left = _array(a, 17046, "both operands of $setIsSubset must be arrays. First")
    right = _array(b, 17042, "both operands of $setIsSubset must be arrays. Second")
    held = {identity(item) for item in right}
    return v.boolean(all(identity(item) in held for item in left))


def _subset(operand: Value, bindings: Bindings) -> Expression:
    """With a constant second argument the server prepares the set beforehand, with other codes."""
    args = parse_arguments(operand, bindings)
    check_arity("$setIsSubset", len(args), 2, 2)
    left, right, order = args[0].evaluate, args[1].evaluate, bindings.order
    if not args[1].constant or args[0].constant or not bindings.folding:
        return operator_of("$setIsSubset", args, lambda frame: _is_subset(left(frame), right(frame), order), bindings)
    superset = args[1].value
    if superset is None or superset[0] != v.ARRAY:
        kind = v.type_name(superset)
        bindings.fail_later(17311, f"both operands of $setIsSubset must be arrays. Second argument is of type: {kind}")
        superset = v.EMPTY_ARRAY
    identity = order.identity
    held = {identity(item) for item in v.elements_of(superset)}

    def evaluate(frame: Frame) -> Maybe:
        items = _array(left(frame), 17310, "both operands of $setIsSubset must be arrays. First")
        return v.boolean(all(identity(item) in held for item in items))

    return operator_of("$setIsSubset", args, evaluate, bindings)


register("$setIsSubset", _SET, "2.6", _subset)


def _equals(operand: Value, bindings: Bindings) -> Expression:
    args = parse_arguments(operand, bindings)
    if len(args) < 2:
        raise parse_failure(17045, f"$setEquals needs at least two arguments had: {len(args)}")
    closures, identity = [argument.evaluate for argument in args], bindings.order.identity
    for place, argument in enumerate(args):
        if bindings.folding and argument.constant and v.type_name(argument.value) != "array":
            kind = v.type_name(argument.value)
            bindings.fail_later(
                5887502, f"All operands of $setEquals must be arrays. {place + 1}-th argument is of type: {kind}"
            )
            break

    def evaluate(frame: list[Maybe]) -> Maybe:
        first: set[Hashable] | None = None
        for place, closure in enumerate(closures):
            value = closure(frame)
            if value is None or value[0] != v.ARRAY:
                kind = v.type_name(value)
                raise failure(
                    17044, f"All operands of $setEquals must be arrays. {place + 1}-th argument is of type: {kind}"
                )
            keys = {identity(item) for item in v.elements_of(value)}
            if first is None:
                first = keys
            elif first != keys:
                return v.FALSE
        return v.TRUE

    return runtime_operator("$setEquals", args, evaluate)


register("$setEquals", _SET, "2.6", _equals)


def _union(order: Order) -> Callable[[Iterable[Maybe]], Maybe]:
    identity = order.identity

    def apply(args: Iterable[Maybe]) -> Maybe:
        found: dict[Hashable, Value] = {}
        for value in args:
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            for item in _array(value, 17043, "All operands of $setUnion must be arrays. One"):
                found.setdefault(identity(item), item)
        return v.array_of(order.sorted(found.values()))

    return apply


# Under a collation the first of several equal values is the one kept, so the server leaves the arguments in place.
ordered_variadic("$setUnion", _SET, "2.6", _union, commutative=lambda order: order.simple)


def _intersection(order: Order) -> Callable[[Iterable[Maybe]], Maybe]:
    identity = order.identity

    def apply(args: Iterable[Maybe]) -> Maybe:
        found: dict[Hashable, Value] | None = None
        for value in args:
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            items = _array(value, 17047, "All operands of $setIntersection must be arrays. One")
            these: dict[Hashable, Value] = {}
            for item in items:
                these.setdefault(identity(item), item)
            if found is None:
                found = these
            elif found:  # of two equal values that of the smaller set stays
                small, large = (these, found) if len(these) < len(found) else (found, these)
                found = {key: item for key, item in small.items() if key in large}
        return v.array_of(order.sorted((found or {}).values()))

    return apply


ordered_variadic("$setIntersection", _SET, "2.6", _intersection, commutative=lambda order: True)
