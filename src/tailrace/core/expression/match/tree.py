"""The parsed form of a ``$match``: plain data, made to be read again by the pushdown and by ``explain``.

A ``path`` is the dotted path of the query as bytes. Values are BSON values with their types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tailrace.core.expression.language.expression import Bindings, Expression
from tailrace.core.expression.values.value import Value


@dataclass(frozen=True, slots=True)
class And:
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Nor:
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    child: Node


@dataclass(frozen=True, slots=True)
class Always:
    """True or false whatever the document; ``$comment`` and ``$alwaysTrue``, an empty ``$all``."""

    truth: bool


@dataclass(frozen=True, slots=True)
class Compare:
    """``operator`` is "$eq", "$gt", "$gte", "$lt" or "$lte" (``$ne`` is ``Not`` of "$eq")."""

    path: bytes
    operator: str
    value: Value


@dataclass(frozen=True, slots=True)
class Pattern:
    """``$regex``: the pattern's and the options' bytes as they stand in BSON."""

    path: bytes
    pattern: bytes
    options: bytes
    #: Whether it is read as servers from 7.0 on read it.
    later: bool = False


@dataclass(frozen=True, slots=True)
class In:
    """``$in`` (``$nin`` is ``Not`` of it): equal to a value, or matched by a pattern."""

    path: bytes
    values: tuple[Value, ...]
    patterns: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Exists:
    path: bytes


@dataclass(frozen=True, slots=True)
class TypeIs:
    """``$type``: BSON type bytes."""

    path: bytes
    types: frozenset[int]


@dataclass(frozen=True, slots=True)
class Size:
    path: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Mod:
    path: bytes
    divisor: int
    remainder: int


@dataclass(frozen=True, slots=True)
class Bits:
    """``operator`` is "$bitsAllSet", "$bitsAllClear", "$bitsAnySet" or "$bitsAnyClear"; ``positions`` counted from 0
    are for binary data, the 64-bit ``mask`` for numbers."""

    path: bytes
    operator: str
    positions: tuple[int, ...]
    mask: int


@dataclass(frozen=True, slots=True)
class ElementMatchesObject:
    """``$elemMatch`` with a query: some element that is a document or an array passes ``child``."""

    path: bytes
    child: Node


@dataclass(frozen=True, slots=True)
class ElementMatchesValue:
    """``$elemMatch`` with operators: some element passes all ``children`` (their paths are empty)."""

    path: bytes
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ExpressionIsTrue:
    """``$expr``: ``expression`` with the bindings that it was parsed in."""

    expression: Expression
    bindings: Bindings


@dataclass(frozen=True, slots=True)
class SchemaTest:
    """A ``$jsonSchema``, or one of its parts: ``keyword`` with its argument in the shape that its test needs."""

    path: bytes
    keyword: str
    argument: object


Node: TypeAlias = (
    And
    | Or
    | Nor
    | Not
    | Always
    | Compare
    | Pattern
    | In
    | Exists
    | TypeIs
    | Size
    | Mod
    | Bits
    | ElementMatchesObject
    | ElementMatchesValue
    | ExpressionIsTrue
    | SchemaTest
)
