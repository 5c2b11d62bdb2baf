"""``$redact``: keep, prune or descend, decided by one expression at each level of the document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tailrace.core.expression.language.core import parse_operand
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import failure
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import ServerError

DESCEND: Final = v.string("descend")
PRUNE: Final = v.string("prune")
KEEP: Final = v.string("keep")


class Redact:
    """A compiled ``$redact``. CURRENT is the level in hand; ROOT stays the whole document."""

    def __init__(self, specification: Value, bindings: Bindings) -> None:
        constants = {**bindings.constants, "DESCEND": DESCEND, "PRUNE": PRUNE, "KEEP": KEEP}
        inner = Bindings(bindings.compilation, bindings.bound, constants)
        inner, (self._current,) = inner.bind("CURRENT")
        self.expression: Expression = parse_operand(specification, inner)
        self._evaluate = self.expression.evaluate
        self._scope = inner
        self._names = _names_asked_for(self.expression)
        self._without_names = self._decision_without_names()

    def _decision_without_names(self) -> Maybe:
        """The decision at every level that has none of the fields that the expression asks for; ``None`` where it is
        not known."""
        if self._names is None:
            return None
        frame = self._scope.frame(v.EMPTY_OBJECT[1])
        frame[self._current] = v.EMPTY_OBJECT
        try:
            verdict = self._evaluate(frame)
        except ServerError:
            return None
        return next((known for known in (DESCEND, PRUNE, KEEP) if verdict == known), None)

    def apply(self, document: bytes) -> bytes | None:
        frame = self._scope.frame(document)
        kept = self._document(frame, (v.OBJECT, document))
        return None if kept is None else kept[1]

    def _document(self, frame: Frame, value: Value) -> Maybe:
        verdict = self._without_names
        data = value[1]
        # A name that is not among the bytes is at no level of the document.
        if verdict is None or any(name in data for name in self._names or ()):
            frame[self._current] = value
            verdict = self._evaluate(frame)
        elif verdict is DESCEND and v.numbers_its_arrays(data):
            return value  # nothing changes further down
        if verdict is not DESCEND and verdict != DESCEND:
            if verdict == KEEP:
                return value
            if verdict == PRUNE:
                return None
            raise failure(
                17053,
                "$redact's expression should not return anything aside from the variables $$KEEP, $$DESCEND, and "
                f"$$PRUNE, but returned a value of type {v.type_name(verdict)}",
            )
        nested = v.nested_of(data)
        kept = [self._value(frame, inner) for inner in nested]
        if not any(after is None or after[1] != before[1] for before, after in zip(nested, kept, strict=True)):
            return value
        return v.object_of(_with_nested(data, kept))

    def _value(self, frame: Frame, value: Value) -> Maybe:
        """A document or an array after the decision. Other elements of an array stay as they are."""
        if value[0] == v.OBJECT:
            return self._document(frame, value)
        kept = iter([self._value(frame, inner) for inner in v.nested_of(value[1])])
        after = [next(kept) if item[0] in v.NESTED else item for item in v.elements_of(value)]
        return v.array_of([item for item in after if item is not None])


#: Operators whose value depends on their arguments alone, all of which they list.
_PURE: Final = frozenset({
    "$allElementsTrue", "$and", "$anyElementTrue", "$cmp", "$cond", "$eq", "$gt", "$gte", "$ifNull", "$in", "$lt",
    "$lte", "$ne", "$not", "$or", "$setEquals", "$setIntersection", "$setIsSubset", "$size",
})  # fmt: skip


def _names_asked_for(expression: Expression) -> tuple[bytes, ...] | None:
    """The first names of the fields of CURRENT, where nothing else decides what the expression gives."""
    names: set[bytes] = set()
    waiting = [expression]
    while waiting:
        one = waiting.pop()
        if one.kind == "field" and one.name == "CURRENT" and one.path:
            names.add(one.path[0])
        elif one.kind in ("object", "array") or (one.kind == "operator" and one.name in _PURE):
            waiting += one.args
        elif not one.constant:
            return None
    return tuple(names)


def _with_nested(document: bytes, nested: list[Maybe]) -> Iterator[tuple[bytes, Value]]:
    """The fields of a document with these for its documents and arrays, in order; those that are missing left out."""
    kept = iter(nested)
    for name, kind, data in v.fields_of(document):
        value = next(kept) if kind in v.NESTED else (kind, data)
        if value is not None:
            yield name, value
