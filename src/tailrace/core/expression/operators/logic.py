"""Comparison, boolean and conditional operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tailrace.core.expression.language.core import (
    check_arity,
    operator_of,
    ordered_binary,
    parse_arguments,
    parse_operand,
    unary,
)
from tailrace.core.expression.language.expression import Bindings, Evaluate, Expression, Frame, constant
from tailrace.core.expression.language.registry import failure, parse_failure, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import Order
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import UsageError

_COMPARISON: Final = "comparison"
_BOOLEAN: Final = "boolean"
_CONDITIONAL: Final = "conditional"


def _comparison(name: str, less: Value, equal: Value, greater: Value) -> None:
    """An operator that says something of the order of two values."""
    truths = (equal, greater, less)  # by 0, 1 and -1

    def make(order: Order) -> Callable[[Maybe, Maybe], Maybe]:
        compare = order.compare
        return lambda a, b: truths[compare(a, b)]

    ordered_binary(name, _COMPARISON, "2.2", make)


_comparison("$cmp", v.int32(-1), v.int32(0), v.int32(1))
_comparison("$eq", v.FALSE, v.TRUE, v.FALSE)
_comparison("$ne", v.TRUE, v.FALSE, v.TRUE)
_comparison("$gt", v.FALSE, v.FALSE, v.TRUE)
_comparison("$gte", v.FALSE, v.TRUE, v.TRUE)
_comparison("$lt", v.TRUE, v.FALSE, v.FALSE)
_comparison("$lte", v.TRUE, v.TRUE, v.FALSE)

unary("$not", _BOOLEAN, "2.2", lambda a: v.boolean(not v.truthy(a)))


def _junction(name: str, *, stop_at: bool) -> None:
    """``$and`` stops at the first false argument, ``$or`` at the first true one."""

    def parse(operand: Value, bindings: Bindings) -> Expression:
        args = parse_arguments(operand, bindings)
        if bindings.folding and any(each.constant and v.truthy(each.value) == stop_at for each in args):
            return constant(v.boolean(stop_at))  # the server moves constants together and folds this
        closures = [argument.evaluate for argument in args]

        def evaluate(frame: Frame) -> Maybe:
            for closure in closures:
                if v.truthy(closure(frame)) == stop_at:
                    return v.boolean(stop_at)
            return v.boolean(not stop_at)

        return operator_of(name, args, evaluate, bindings)

    register(name, _BOOLEAN, "2.2", parse)


_junction("$and", stop_at=False)
_junction("$or", stop_at=True)


def _cond(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        args = parse_arguments(operand, bindings)
        check_arity("$cond", len(args), 3, 3)
        return _conditional(args, bindings)
    parts: dict[bytes, Expression] = {}
    for name, kind, data in v.fields_of(operand[1]):
        if name not in (b"if", b"then", b"else"):
            raise parse_failure(17083, f"Unrecognized parameter to $cond: {name.decode('utf-8', 'replace')}")
        parts[name] = parse_operand((kind, data), bindings)
    for part, code in ((b"if", 17080), (b"then", 17081), (b"else", 17082)):
        if part not in parts:
            raise parse_failure(code, f"Missing '{part.decode()}' parameter to $cond")
    return _conditional([parts[b"if"], parts[b"then"], parts[b"else"]], bindings)


def _conditional(args: list[Expression], bindings: Bindings) -> Expression:
    if args[0].constant:
        return args[1] if v.truthy(args[0].value) else args[2]
    condition, then, otherwise = (argument.evaluate for argument in args)
    return operator_of(
        "$cond", args, lambda frame: then(frame) if v.truthy(condition(frame)) else otherwise(frame), bindings
    )


register("$cond", _CONDITIONAL, "2.6", _cond)


def _if_null(operand: Value, bindings: Bindings) -> Expression:
    args = parse_arguments(operand, bindings)
    if not bindings.knows("5.0"):
        check_arity("$ifNull", len(args), 2, 2)
    if len(args) < 2:
        raise parse_failure(1257300, f"$ifNull needs at least two arguments, had: {len(args)}")
    if bindings.folding:
        args = _without_constants(args)
        if len(args) == 1:
            return args[0]
    closures = [argument.evaluate for argument in args]
    last = closures.pop()

    def evaluate(frame: Frame) -> Maybe:
        for closure in closures:
            value = closure(frame)
            if not v.nullish(value):
                return value
        return last(frame)

    return operator_of("$ifNull", args, evaluate, bindings)


def _without_constants(args: list[Expression]) -> list[Expression]:
    """What the server leaves of the arguments beforehand: no null constant but the last, nothing after another one."""
    kept: list[Expression] = []
    for place, argument in enumerate(args):
        if not argument.constant:
            kept.append(argument)
        elif not v.nullish(argument.value):
            return [*kept, argument]
        elif place == len(args) - 1:
            kept.append(argument)
    return kept


register("$ifNull", _CONDITIONAL, "2.2", _if_null)


def _switch(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(40060, f"$switch requires an object as an argument, found: {v.type_name(operand)}")
    branches: list[_Branch] = []
    default: Expression | None = None
    for name, kind, data in v.fields_of(operand[1]):
        if name == b"branches":
            if kind != v.ARRAY:
                raise parse_failure(40061, f"$switch expected an array for 'branches', found: {v.TYPE_NAMES[kind]}")
            branches = [_branch(item, bindings) for item in v.elements_of((kind, data))]
        elif name == b"default":
            default = parse_operand((kind, data), bindings)
        else:
            raise parse_failure(40067, f"$switch found an unknown argument: {name.decode('utf-8', 'replace')}")
    if not branches:
        raise parse_failure(40068, "$switch requires at least one branch.")
    return _switch_of(branches, default, bindings)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A branch of ``$switch``, with the errors of constants inside it: they vanish with a branch never taken."""

    case: Expression
    then: Expression
    failures: tuple[UsageError, ...]


def _branch(value: Value, bindings: Bindings) -> _Branch:
    if value[0] != v.OBJECT:
        raise parse_failure(40062, f"$switch expected each branch to be an object, found: {v.type_name(value)}")
    parts: dict[bytes, Expression] = {}
    before = len(bindings.compilation.failures)
    for name, kind, data in v.fields_of(value[1]):
        if name not in (b"case", b"then"):
            raise parse_failure(
                40063, f"$switch found an unknown argument to a branch: {name.decode('utf-8', 'replace')}"
            )
        parts[name] = parse_operand((kind, data), bindings)
    for part, code in ((b"case", 40064), (b"then", 40065)):
        if part not in parts:
            raise parse_failure(code, f"$switch requires each branch have a '{part.decode()}' expression")
    return _Branch(parts[b"case"], parts[b"then"], tuple(bindings.compilation.failures[before:]))


def _switch_of(branches: list[_Branch], default: Expression | None, bindings: Bindings) -> Expression:
    """A branch whose case is constant is decided now: a false one goes, a true one is the default."""
    kept: list[_Branch] = []
    decided = False
    for branch in branches:
        if decided or (branch.case.constant and not v.truthy(branch.case.value)):
            _forget(branch.failures, bindings)
        elif branch.case.constant:
            default, decided = branch.then, True
        else:
            kept.append(branch)
    if not kept:
        if default is not None:
            return default
        bindings.fail_later(
            40069, "One cannot execute a switch statement where all the cases evaluate to false without a default."
        )
    return _switching([(branch.case, branch.then) for branch in kept], default, bindings)


def _forget(failures: tuple[UsageError, ...], bindings: Bindings) -> None:
    bindings.compilation.failures[:] = [error for error in bindings.compilation.failures if error not in failures]


def _switching(
    branches: list[tuple[Expression, Expression]], default: Expression | None, bindings: Bindings
) -> Expression:
    closures: list[tuple[Evaluate, Evaluate]] = [(case.evaluate, then.evaluate) for case, then in branches]
    otherwise = None if default is None else default.evaluate

    def evaluate(frame: Frame) -> Maybe:
        for case, then in closures:
            if v.truthy(case(frame)):
                return then(frame)
        if otherwise is None:
            raise failure(40066, "$switch could not find a matching branch for an input, and no default was specified.")
        return otherwise(frame)

    args = [expression for branch in branches for expression in branch]
    return operator_of("$switch", args if default is None else [*args, default], evaluate, bindings)


register("$switch", _CONDITIONAL, "3.4", _switch)
