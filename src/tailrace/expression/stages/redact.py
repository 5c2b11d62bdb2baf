"""``$redact``: keep, prune or descend, decided by one expression at each level of the document."""

from __future__ import annotations

from typing import Final

from tailrace.expression.language.core import parse_operand
from tailrace.expression.language.expression import Bindings, Expression, Frame
from tailrace.expression.language.registry import failure
from tailrace.expression.values import value as v
from tailrace.expression.values.value import Maybe, Value

DESCEND: Final = v.string("descend")
PRUNE: Final = v.string("prune")
KEEP: Final = v.string("keep")


class Redact:
    """A compiled ``$redact``. CURRENT is the level that is looked at; ROOT stays the whole document."""

    def __init__(self, specification: Value, bindings: Bindings) -> None:
        constants = {**bindings.constants, "DESCEND": DESCEND, "PRUNE": PRUNE, "KEEP": KEEP}
        inner = Bindings(bindings.compilation, bindings.bound, constants)
        inner, (self._current,) = inner.bind("CURRENT")
        self.expression: Expression = parse_operand(specification, inner)
        self._evaluate = self.expression.evaluate
        self._scope = inner

    def apply(self, document: bytes) -> bytes | None:
        frame = self._scope.frame(document)
        kept = self._document(frame, (v.OBJECT, document))
        return None if kept is None else kept[1]

    def _document(self, frame: Frame, value: Value) -> Maybe:
        frame[self._current] = value
        verdict = self._evaluate(frame)
        if verdict == KEEP:
            return value
        if verdict == PRUNE:
            return None
        if verdict != DESCEND:
            raise failure(
                17053,
                "$redact's expression should not return anything aside from the variables $$KEEP, $$DESCEND, and "
                f"$$PRUNE, but returned a value of type {v.type_name(verdict)}",
            )
        fields = []
        changed = False
        for name, kind, data in v.fields_of(value[1]):
            if kind not in (v.OBJECT, v.ARRAY):
                fields.append((name, (kind, data)))
                continue
            kept = self._value(frame, (kind, data))
            changed = changed or kept is None or kept[1] != data
            if kept is not None:
                fields.append((name, kept))
        return v.object_of(fields) if changed else value

    def _value(self, frame: Frame, value: Value) -> Maybe:
        kind = value[0]
        if kind == v.OBJECT:
            return self._document(frame, value)
        if kind == v.ARRAY:
            kept = [self._value(frame, item) for item in v.elements_of(value)]
            return v.array_of([item for item in kept if item is not None])
        return value
