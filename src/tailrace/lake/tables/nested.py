"""Column types that hold others: objects as structs and arrays as lists, declared or inferred.

A type is written as in Spark's DDL: ``array<struct<sku: string, n: int>>``; a name that is no plain word is in
backquotes. Fields are known by their names in the documents. Their names in the column are made of these, in their
order, so a type that gets more fields at its end leaves the others' names alone.

``void`` is the element of an array that has held nothing yet, and an object without fields is as empty. Parquet has
neither, so what has no leaf is text in Extended JSON (``[]``, ``{}``) until it gets one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import pyarrow as pa
from bson.dbref import DBRef

from tailrace.errors import UsageError
from tailrace.lake.tables.column_values import (
    SCALARS,
    FarDateError,
    MisfitError,
    json_text,
    scalar_arrow,
    scalar_maker,
    type_of,
)
from tailrace.lake.tables.names import free_name

#: How many objects and arrays may be inside each other; what is deeper is text in Extended JSON.
DEPTH_MAX: Final = 16
#: An object with more fields than this is a map, whose keys are data: it is text in Extended JSON.
FIELDS_MAX: Final = 100
#: The columns of a table that hold others have no more scalars in them than this, all together.
LEAVES_MAX: Final = 1000
#: How many characters may describe an inferred type: each commit with other columns holds those of all of them.
TEXT_MAX: Final = 100_000
#: The documents that are made into columns together, and each of them alone, have no more scalars than this in a column
#: that holds others: an empty object in an array takes as much room as its type has fields.
VALUES_MAX: Final = 4_000_000
#: The types that a type becomes when a value does not fit, before it becomes text in Extended JSON.
WIDER: Final = {"int": ("long", "double"), "long": ("double",), "date": ("timestamp",)}
_TOKEN: Final = re.compile(r"\s*(?:`((?:[^`]|``)*)`|(decimal\s*\([^)]*\))|([^\s<>:,`()]+)|([<>:,]))")
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NESTED: Final = ("struct<", "array<")

ValueMaker: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class LeafType:
    """A scalar type."""

    name: str


@dataclass(frozen=True, slots=True)
class ObjectType:
    """The fields of an object: names in the documents, with their types."""

    fields: tuple[tuple[str, NestedType], ...] = ()


@dataclass(frozen=True, slots=True)
class ListType:
    """An array."""

    element: NestedType


NestedType: TypeAlias = LeafType | ObjectType | ListType
VOID: Final = LeafType("void")
JSON_LEAF: Final = LeafType("json")


class InnerMisfitError(MisfitError):
    """A value inside a column that its type there cannot hold. ``steps``: names and places on the way to it."""

    def __init__(self, value: Any, type_: str) -> None:
        super().__init__()
        self.value = value
        self.type = type_
        self.steps: list[str] = []


class TooManyValuesError(Exception):
    """Documents have too many values to be made into columns together."""


# --- types -----------------------------------------------------------------------------------------------------------


def is_nested(type_: str) -> bool:
    """Whether a column's type holds others."""
    return type_.startswith(_NESTED)


def declared_type(text: str) -> str:
    """A type as the user writes it, in the one way in which tables keep it. Raises UsageError."""
    try:
        type_ = parsed(text)
        if not _is_declarable(type_):
            raise ValueError(text)
    except ValueError:
        raise UsageError(
            f"'{text}' is not a column type",
            hint=f"Types: {', '.join(SCALARS)}, decimal(p,s), array<TYPE>, struct<NAME: TYPE, ...>",
        ) from None
    if depth_of(type_) > DEPTH_MAX or leaves_of(type_) > LEAVES_MAX:
        raise UsageError(
            f"the column type '{text[:60]}...' is too large",
            hint=f"At most {DEPTH_MAX} objects and arrays inside each other, and {LEAVES_MAX:,} scalars",
        )
    return text_of(type_)


def _is_declarable(type_: NestedType) -> bool:
    """What is declared has leaves, and each name once."""
    if isinstance(type_, LeafType):
        return type_ != VOID
    if isinstance(type_, ListType):
        return _is_declarable(type_.element)
    names = [name for name, _ in type_.fields]
    return bool(names) and len(set(names)) == len(names) and all(_is_declarable(one) for _, one in type_.fields)


@lru_cache(maxsize=4096)
def parsed(text: str) -> NestedType:
    """The type that a text describes. Raises ValueError."""
    tokens: list[tuple[str, bool]] = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(text)
        word = match[2] or match[3] or match[4]
        tokens.append((match[1].replace("``", "`"), True) if word is None else (word, False))
        at = match.end()
    found, end = _parse(tokens, 0, 0)
    if end != len(tokens):
        raise ValueError(text)
    return found


def _parse(tokens: Sequence[tuple[str, bool]], at: int, depth: int) -> tuple[NestedType, int]:
    if depth > 4 * DEPTH_MAX:
        raise ValueError("too deep")
    word = _word(tokens, at)
    if word in ("array", "struct") and _is(tokens, at + 1, "<"):
        return _parse_list(tokens, at + 2, depth) if word == "array" else _parse_object(tokens, at + 2, depth)
    word = re.sub(r"\s", "", word)
    if word != VOID.name and scalar_arrow(word) is None:
        raise ValueError(word)
    return LeafType(word), at + 1


def _parse_list(tokens: Sequence[tuple[str, bool]], at: int, depth: int) -> tuple[NestedType, int]:
    element, at = _parse(tokens, at, depth + 1)
    if not _is(tokens, at, ">"):
        raise ValueError(">")
    return ListType(element), at + 1


def _parse_object(tokens: Sequence[tuple[str, bool]], at: int, depth: int) -> tuple[NestedType, int]:
    fields: list[tuple[str, NestedType]] = []
    while not _is(tokens, at, ">"):
        if fields:
            if not _is(tokens, at, ","):
                raise ValueError(",")
            at += 1
        name = tokens[at][0] if at < len(tokens) and tokens[at][1] else _word(tokens, at)
        if not _is(tokens, at + 1, ":"):
            raise ValueError(name)
        type_, at = _parse(tokens, at + 2, depth + 1)
        fields.append((name, type_))
    return ObjectType(tuple(fields)), at + 1


def _is(tokens: Sequence[tuple[str, bool]], at: int, sign: str) -> bool:
    return at < len(tokens) and tokens[at] == (sign, False)


def _word(tokens: Sequence[tuple[str, bool]], at: int) -> str:
    if at >= len(tokens) or tokens[at][1] or tokens[at][0] in ("<", ">", ":", ","):
        raise ValueError("a name is missing")
    return tokens[at][0]


def text_of(type_: NestedType) -> str:
    """A type as text, which ``parsed`` reads."""
    if isinstance(type_, LeafType):
        return type_.name
    if isinstance(type_, ListType):
        return f"array<{text_of(type_.element)}>"
    return f"struct<{','.join(f'{_quoted(name)}:{text_of(one)}' for name, one in type_.fields)}>"


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def has_leaf(type_: NestedType) -> bool:
    """Whether there is a scalar in it. What has none is text in Extended JSON."""
    if isinstance(type_, LeafType):
        return type_ != VOID
    return has_leaf(type_.element) if isinstance(type_, ListType) else bool(type_.fields)


def leaves_of(type_: NestedType) -> int:
    """How many scalars there are in it."""
    if isinstance(type_, ListType):
        return leaves_of(type_.element)
    return sum(leaves_of(one) for _, one in type_.fields) or 1 if isinstance(type_, ObjectType) else 1


def is_too_large(type_: NestedType, room: int) -> bool:
    """Whether an inferred type has more than ``room`` scalars, or names as long as only data are."""
    return leaves_of(type_) > room or len(text_of(type_)) > TEXT_MAX


def depth_of(type_: NestedType) -> int:
    """How many objects and arrays are inside each other."""
    if isinstance(type_, ListType):
        return 1 + depth_of(type_.element)
    return 1 + max((depth_of(one) for _, one in type_.fields), default=0) if isinstance(type_, ObjectType) else 0


@lru_cache(maxsize=4096)
def names_of(type_: ObjectType) -> tuple[str, ...]:
    """The names of an object's fields in its column."""
    found: list[str] = []
    for name, _ in type_.fields:
        found.append(free_name(name, found, ()))
    return tuple(found)


def nested_arrow(type_: NestedType) -> pa.DataType:
    """The Arrow type."""
    if not has_leaf(type_):
        return pa.string()
    if isinstance(type_, LeafType):
        return scalar_arrow(type_.name)
    if isinstance(type_, ListType):
        return pa.list_(pa.field("element", nested_arrow(type_.element)))
    both = zip(names_of(type_), type_.fields, strict=True)
    return pa.struct([pa.field(name, nested_arrow(one)) for name, (_, one) in both])


# --- how types grow --------------------------------------------------------------------------------------------------


def extends(new: NestedType, old: NestedType) -> bool:
    """Whether rows that were written as ``old`` can be read as ``new``: it only has further fields."""
    if not (has_leaf(new) or has_leaf(old)):
        return True
    if isinstance(new, LeafType) or isinstance(old, LeafType) or has_leaf(new) != has_leaf(old):
        return new == old
    if isinstance(new, ListType) or isinstance(old, ListType):
        return isinstance(new, ListType) and isinstance(old, ListType) and extends(new.element, old.element)
    first = new.fields[: len(old.fields)]
    return len(first) == len(old.fields) and all(
        one[0] == other[0] and extends(one[1], other[1]) for one, other in zip(first, old.fields, strict=True)
    )


def inferred_type(value: Any, depth: int = 0) -> NestedType:
    """The type for a value that is not null."""
    value = _plain(value)
    if not isinstance(value, (dict, list)):
        return LeafType(type_of(value))
    if depth == DEPTH_MAX:
        return JSON_LEAF
    return wider(ObjectType() if isinstance(value, dict) else ListType(VOID), value, grows=True, depth=depth)


def wider(type_: NestedType, value: Any, *, grows: bool, depth: int = 0) -> NestedType:
    """The narrowest type for what ``type_`` holds and this value. ``grows``: objects get further fields."""
    if value is None:
        return type_
    if isinstance(type_, LeafType):
        return inferred_type(value, depth) if type_ == VOID else _wider_leaf(type_, value)
    value = _plain(value)
    if isinstance(type_, ListType):
        if not isinstance(value, list):
            return JSON_LEAF
        element = type_.element
        for one in value:
            element = wider(element, one, grows=grows, depth=depth + 1)
        return ListType(element)
    if not isinstance(value, dict):
        return JSON_LEAF
    fields = dict(type_.fields)
    for name, one in value.items():
        if one is not None and name in fields:
            fields[name] = wider(fields[name], one, grows=grows, depth=depth + 1)
        elif one is not None and grows:
            fields[name] = inferred_type(one, depth + 1)
    return JSON_LEAF if grows and len(fields) > FIELDS_MAX else ObjectType(tuple(fields.items()))


def _wider_leaf(type_: LeafType, value: Any) -> LeafType:
    for name in (type_.name, *WIDER.get(type_.name, ())):
        try:
            scalar_maker(name)(value)
        except FarDateError:
            return LeafType(name)
        except (MisfitError, ArithmeticError, ValueError):
            continue
        return LeafType(name)
    return JSON_LEAF


def settled(type_: NestedType) -> NestedType:
    """The type of a column that becomes no wider: what has no leaf yet can hold anything, as text."""
    if isinstance(type_, LeafType):
        return JSON_LEAF if type_ == VOID else type_
    if isinstance(type_, ListType):
        return ListType(settled(type_.element))
    return ObjectType(tuple((name, settled(one)) for name, one in type_.fields)) if type_.fields else JSON_LEAF


# --- values ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def nested_maker(text: str, *, far_is_null: bool, grows: bool) -> ValueMaker:
    """What makes a column's value of a document's, which is not null. It raises InnerMisfitError.

    ``far_is_null``  a date that readers fail on is NULL at its place
    ``grows``        an object with a field that the type does not have does not fit
    """
    return _maker(parsed(text), far_is_null=far_is_null, grows=grows)


def _maker(type_: NestedType, *, far_is_null: bool, grows: bool) -> ValueMaker:
    if not has_leaf(type_):
        return _empty_maker(type_, grows=grows)
    if isinstance(type_, LeafType):
        return _leaf_maker(type_.name, far_is_null=far_is_null)
    if isinstance(type_, ListType):
        return _list_maker(type_, _maker(type_.element, far_is_null=far_is_null, grows=grows))
    return _object_maker(
        type_, [_maker(one, far_is_null=far_is_null, grows=grows) for _, one in type_.fields], grows=grows
    )


def _leaf_maker(name: str, *, far_is_null: bool) -> ValueMaker:
    make_scalar = scalar_maker(name)

    def make(value: Any) -> Any:
        try:
            return make_scalar(value)
        except FarDateError:
            if far_is_null:
                return None
            raise InnerMisfitError(value, name) from None
        except (MisfitError, ArithmeticError, ValueError):
            raise InnerMisfitError(value, name) from None

    return make


def _list_maker(type_: ListType, element: ValueMaker) -> ValueMaker:
    def make(value: Any) -> Any:
        if not isinstance(value, list):
            raise InnerMisfitError(value, text_of(type_))
        found: list[Any] = []
        try:
            for one in value:
                found.append(None if one is None else element(one))
        except InnerMisfitError as error:
            error.steps.append(f"[{len(found)}]")
            raise
        return found

    return make


def _object_maker(type_: ObjectType, makers: Sequence[ValueMaker], *, grows: bool) -> ValueMaker:
    known = {name for name, _ in type_.fields}
    parts = [(one[0], column, make) for one, column, make in zip(type_.fields, names_of(type_), makers, strict=True)]

    def make(value: Any) -> Any:
        value = _plain(value)
        if not isinstance(value, dict) or (grows and _has_others(value, known)):
            raise InnerMisfitError(value, text_of(type_))
        found: dict[str, Any] = {}
        for name, column, make_field in parts:
            one = value.get(name)
            try:
                found[column] = None if one is None else make_field(one)
            except InnerMisfitError as error:
                error.steps.append(f".{name}")
                raise
        return found

    return make


def _has_others(value: dict[str, Any], known: set[str]) -> bool:
    return any(one is not None and name not in known for name, one in value.items())


def _empty_maker(type_: NestedType, *, grows: bool) -> ValueMaker:
    def make(value: Any) -> str:
        if not _is_empty(type_, value, grows=grows):
            raise InnerMisfitError(value, text_of(type_))
        return json_text(value)

    return make


def _is_empty(type_: NestedType, value: Any, *, grows: bool) -> bool:
    """Whether a value has no more in it than its type."""
    if value is None:
        return True
    value = _plain(value)
    if isinstance(type_, ListType):
        return isinstance(value, list) and all(_is_empty(type_.element, one, grows=grows) for one in value)
    return isinstance(type_, ObjectType) and isinstance(value, dict) and not (grows and _has_others(value, set()))


@lru_cache(maxsize=1024)
def values_counter(text: str) -> Callable[[Any], int]:
    """What counts the scalars that a column of that type has for a value, those that are NULL as well."""
    return _counter(parsed(text))


def _counter(type_: NestedType) -> Callable[[Any], int]:
    alike = leaves_of(type_)
    if isinstance(type_, ListType):
        if not _has_list(type_.element):
            return lambda value: alike * len(value) if isinstance(value, list) else 1
        count = _counter(type_.element)
        return lambda value: sum(map(count, value)) if isinstance(value, list) else 1
    if not isinstance(type_, ObjectType) or not _has_list(type_):
        return lambda _: alike
    parts = [(name, _counter(one)) for name, one in type_.fields]

    def count_fields(value: Any) -> int:
        value = _plain(value)
        return sum(count(value.get(name)) for name, count in parts) if isinstance(value, dict) else alike

    return count_fields


def _has_list(type_: NestedType) -> bool:
    if isinstance(type_, ListType):
        return True
    return isinstance(type_, ObjectType) and any(_has_list(one) for _, one in type_.fields)


def _plain(value: Any) -> Any:
    """PyMongo makes references of objects with the field ``$ref``."""
    return value.as_doc() if isinstance(value, DBRef) else value
