"""The types that a query names: by alias or by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tailrace.core.expression.language import pattern as regular
from tailrace.core.expression.language.registry import parse_failure
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

_BAD_VALUE: Final = 2
_TYPE_MISMATCH: Final = 14

ALIASES: Final[dict[str, frozenset[int]]] = {
    **{name: frozenset({kind}) for kind, name in v.TYPE_NAMES.items()},
    "number": v.NUMERIC,
}


class SchemaTypes(NamedTuple):
    """The types that a schema names, and whether by one name: ``number``, but not a list of the four numeric types."""

    types: frozenset[int]
    is_one: bool


class SchemaPattern(NamedTuple):
    """A regular expression of a schema, and whether it is read as servers from 7.0 on read it."""

    pattern: bytes
    later: bool

    def matcher(self) -> Callable[[bytes], bool]:
        return regular.compile_pattern(self.pattern, b"", later=self.later).matches


def types_of(value: Value) -> frozenset[int]:
    """The types that one argument of ``$type`` names: by alias or by number."""
    kind = value[0]
    if kind == v.STRING:
        name = v.text_of(value)
        found = ALIASES.get(name)
        if found is None or name == "missing":
            raise parse_failure(_BAD_VALUE, f"Unknown type name alias: {name}")
        return found
    if kind not in v.NUMERIC:
        raise parse_failure(_TYPE_MISMATCH, "type must be represented as a number or a string")
    number = v.number_of(value)
    if v.is_nan(number) or number != int(number):
        raise parse_failure(_BAD_VALUE, f"Invalid numerical type code: {number}")
    if number == 0:
        raise parse_failure(_BAD_VALUE, "Invalid numerical type code: 0. Instead use {$exists:false}.")
    code = 255 if number == -1 else int(number)
    if number == 255 or code not in v.TYPE_NAMES:
        raise parse_failure(_BAD_VALUE, f"Invalid numerical type code: {number}")
    return frozenset({code})
