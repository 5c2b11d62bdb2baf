"""Literals, variables, and access to fields by name."""

from __future__ import annotations

from typing import Final

from tailrace.core.expression.language.core import check_variable_write, parse_operand
from tailrace.core.expression.language.expression import Bindings, Expression, Frame, constant
from tailrace.core.expression.language.registry import listed, parse_failure, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

_VARIABLE: Final = "variable"
_OBJECT: Final = "object"


def _literal(operand: Value, bindings: Bindings) -> Expression:
    return constant(operand)


register("$literal", "literal", "2.6", _literal)
register("$const", "literal", "2.6", _literal)


def _let(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(16874, "$let only supports an object as its argument")
    declared: Value | None = None
    body: Value | None = None
    for name, kind, data in v.fields_of(operand[1]):
        if name == b"vars":
            declared = (kind, data)
        elif name == b"in":
            body = (kind, data)
        else:
            raise parse_failure(16875, f"Unrecognized parameter to $let: {name.decode('utf-8', 'replace')}")
    if declared is None:
        raise parse_failure(16876, "Missing 'vars' parameter to $let")
    if body is None:
        raise parse_failure(16877, "Missing 'in' parameter to $let")
    if declared[0] != v.OBJECT:
        raise parse_failure(10065, "invalid parameter: expected an object (vars)")
    names, values = [], []
    for name, kind, data in v.fields_of(declared[1]):
        shown = name.decode("utf-8", "replace")
        check_variable_write(shown, bindings)
        names.append(shown)
        values.append(parse_operand((kind, data), bindings))
    inner, slots = bindings.bind(*names)
    return _bound(values, slots, parse_operand(body, inner))


def _bound(values: list[Expression], slots: list[int], body: Expression) -> Expression:
    if not slots:
        return body
    pairs = list(zip(slots, [value.evaluate for value in values], strict=True))
    evaluate_body = body.evaluate

    def evaluate(frame: Frame) -> Maybe:
        for slot, closure in pairs:  # no value sees another of the same $let: their slots are new
            frame[slot] = closure(frame)
        return evaluate_body(frame)

    return Expression(evaluate, "operator", name="$let", args=(*values, body))


register("$let", _VARIABLE, "2.6", _let)
listed(_VARIABLE, "2.2", "$$ROOT", "$$CURRENT")
listed(_VARIABLE, "3.6", "$$REMOVE")
listed(_VARIABLE, "4.2", "$$NOW", "$$CLUSTER_TIME", note="given by the caller: the core has no clock")
listed(_VARIABLE, "2.6", "$$DESCEND", "$$PRUNE", "$$KEEP", note="in $redact")
listed(_VARIABLE, "7.0", "$$USER_ROLES", note="refused: only the server knows them")
listed(_VARIABLE, "5.0", "$$<let>", note="the command's let parameters")
