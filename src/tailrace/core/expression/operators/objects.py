"""Fields by name, sizes, and what looks inside a timestamp."""

from __future__ import annotations

from typing import Final

from tailrace.core.expression.language.core import parse_operand, runtime_operator, unary
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import failure, parse_failure, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

_OBJECT: Final = "object"


def _field_name(name: str, operand: Value, codes: tuple[int, int, int], bindings: Bindings) -> bytes:
    """The constant name of a field; ``codes`` are those for a path, for no constant, for another type."""
    if operand[0] == v.STRING and operand[1][4:5] == b"$":
        parse_operand(operand, bindings)
        raise parse_failure(codes[0], "a field path reference is not allowed in this context; use $literal")
    expression = parse_operand(operand, bindings)
    if not _is_literal(operand):
        raise parse_failure(
            codes[1], f"{name} requires 'field' to evaluate to a constant, but got a non-constant argument"
        )
    if expression.value is None or expression.value[0] != v.STRING:
        raise parse_failure(
            codes[2], f"{name} requires 'field' to evaluate to type String, but got {v.type_name(expression.value)}"
        )
    return v.bytes_of(expression.value)


def _is_literal(operand: Value) -> bool:
    """A constant before anything is folded: a plain value, or ``$literal``."""
    if operand[0] == v.ARRAY:
        return False
    if operand[0] != v.OBJECT:
        return True
    names = [name for name, _, _ in v.fields_of(operand[1])]
    return names in ([b"$literal"], [b"$const"])


def _get_field(operand: Value, bindings: Bindings) -> Expression:
    name_operand: Value | None = operand
    input_operand: Value | None = v.string("$$CURRENT")
    if operand == v.EMPTY_OBJECT or _named(operand):
        name_operand = input_operand = None
        for name, kind, data in v.fields_of(operand[1]):
            if name == b"field":
                name_operand = (kind, data)
            elif name == b"input":
                input_operand = (kind, data)
            else:
                raise parse_failure(3041701, f"$getField found an unknown argument: {name.decode('utf-8', 'replace')}")
        if name_operand is None:
            raise parse_failure(3041702, "$getField requires 'field' to be specified")
        if input_operand is None:
            raise parse_failure(3041703, "$getField requires 'input' to be specified")
    field_name = _field_name("$getField", name_operand, (5654600, 5654601, 5654602), bindings)  # type: ignore[arg-type]
    source = parse_operand(input_operand, bindings.unfolded())  # type: ignore[arg-type]
    read = source.evaluate

    def evaluate(frame: Frame) -> Maybe:
        value = read(frame)
        if value is not None and value[0] in v.NULLISH:
            return v.NULL
        return v.field(value[1], field_name) if value is not None and value[0] == v.OBJECT else None

    return runtime_operator("$getField", [source], evaluate)


def _named(operand: Value) -> bool:
    fields = v.fields_of(operand[1]) if operand[0] == v.OBJECT else []
    return bool(fields) and fields[0][0][:1] != b"$"


register("$getField", _OBJECT, "5.0", _get_field)


def _changing(name: str, *, sets: bool) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        if operand[0] != v.OBJECT:
            raise parse_failure(4161100, f"{name} only supports an object as its argument")
        allowed = (b"field", b"input", b"value") if sets else (b"field", b"input")
        given: dict[bytes, Value] = {}
        for key, kind, data in v.fields_of(operand[1]):
            if key not in allowed:
                raise parse_failure(4161101, f"{name} found an unknown argument: {key.decode('utf-8', 'replace')}")
            given[key] = (kind, data)
        if b"field" not in given:
            raise parse_failure(4161102, f"{name} requires 'field' to be specified")
        if sets and b"value" not in given:
            raise parse_failure(4161103, f"{name} requires 'value' to be specified")
        if b"input" not in given:
            raise parse_failure(4161109, f"{name} requires 'input' to be specified")
        field_name = _field_name(name, given[b"field"], (4161108, 4161106, 4161107), bindings)
        source = parse_operand(given[b"input"], bindings.unfolded())
        new = parse_operand(given[b"value"], bindings.unfolded()) if sets else None
        return runtime_operator(
            name,
            [source, *([] if new is None else [new])],
            _Change(name, field_name, source, new, keep=bindings.compilation.places),
        )

    register(name, _OBJECT, "5.0", parse)


class _Change:
    """``$setField`` and ``$unsetField``. A field that goes leaves its place behind, and one that comes back in an
    outer ``$setField`` stands there again; so nested changes hand each other places, not documents."""

    def __init__(self, name: str, field_name: bytes, source: Expression, new: Expression | None, *, keep: bool) -> None:
        self._keep = keep
        self._name, self._field, self._source, self._new = name, field_name, source.evaluate, new

    def __call__(self, frame: Frame) -> Maybe:
        places = self.places(frame)
        if places is None:
            return v.NULL
        if self._keep:
            return v.object_with_places(places)
        return v.object_of([(name, value) for name, value in places if value is not None])

    def places(self, frame: Frame) -> list[tuple[bytes, Maybe]] | None:
        """The changed fields with ``None`` for those that went; ``None`` altogether for null."""
        inner = self._source
        if isinstance(inner, _Change):
            found = inner.places(frame)
            if found is None:
                return None
        else:
            value = inner(frame)
            if value is None or value[0] in v.NULLISH:
                return None
            if value[0] != v.OBJECT:
                raise failure(4161105, f"{self._name} requires 'input' to evaluate to type Object")
            found = v.places_of(value[1])
        replacement = None if self._new is None else self._new.evaluate(frame)
        for place, (name, _) in enumerate(found):
            if name == self._field:
                found[place] = (name, replacement)
                return found
        return [*found, (self._field, replacement)]


_changing("$setField", sets=True)
_changing("$unsetField", sets=False)


def _bson_size(value: Maybe) -> Maybe:
    if value is None or value[0] in v.NULLISH:
        return v.NULL
    if value[0] != v.OBJECT:
        raise failure(31393, f"$bsonSize requires a document input, found: {v.type_name(value)}")
    return v.int32(len(v.stripped(value[1])))


def _binary_size(value: Maybe) -> Maybe:
    if value is None or value[0] in v.NULLISH:
        return v.NULL
    if value[0] == v.STRING:
        return v.int32(len(v.bytes_of(value)))
    if value[0] != v.BINARY:
        raise failure(51276, f"$binarySize requires a string or BinData argument, found: {v.type_name(value)}")
    return v.int32(len(value[1]) - 5)


unary("$bsonSize", "data size", "4.4", _bson_size)
unary("$binarySize", "data size", "4.4", _binary_size)


def _timestamp_part(name: str, code: int, shift: int) -> None:
    def apply(value: Maybe) -> Maybe:
        if value is None or value[0] in v.NULLISH:
            return v.NULL
        if value[0] != v.TIMESTAMP:
            raise failure(code, f" Argument to {name} must be a timestamp, but is {v.type_name(value)}")
        return v.int64(v.unsigned_of(value) >> shift & 0xFFFFFFFF)

    unary(name, "timestamp", "5.1", apply)


_timestamp_part("$tsSecond", 5687301, 32)
_timestamp_part("$tsIncrement", 5687302, 0)
