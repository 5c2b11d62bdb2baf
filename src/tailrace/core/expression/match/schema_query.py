"""A ``$jsonSchema`` as the query that the server makes of it, whose parts it moves one by one (measured on 4.4.2,
5.0.4, 6.0.27 and 7.0.28, by what ``explain`` shows).

A property becomes tests of its path. What stands inside a property stays a ``SchemaTest`` of that path, and so does
what no other node says. The query is true of the same documents as the schema. A single part may be true of more of
them than the server's: of an array under ``minLength``, ``maxLength`` or ``multipleOf``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias, cast

from tailrace.core.expression.match import tree
from tailrace.core.expression.match.schema import fate_of
from tailrace.core.expression.match.types import SchemaPattern, SchemaTypes
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

Schema: TypeAlias = tuple[tree.SchemaTest, ...]

_ARRAYS: Final = frozenset({v.ARRAY})
_OBJECTS: Final = frozenset({v.OBJECT})
_STRINGS: Final = frozenset({v.STRING})
_OF_ARRAYS: Final = frozenset(("minItems", "maxItems", "uniqueItems", "items", "additionalItems"))
_OF_OBJECTS: Final = frozenset(
    ("minProperties", "maxProperties", "properties", "required", "patternProperties", "additionalProperties")
)


def as_query(node: tree.Node) -> tree.Node:
    """``node`` with every schema in it taken apart."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return type(node)(tuple(map(as_query, node.children)))
    if isinstance(node, tree.Not):
        return tree.Not(as_query(node.child))
    if isinstance(node, tree.SchemaTest) and not node.path and node.keyword == "schema":
        return _of_document(cast("Schema", node.argument))
    return node


def alternatives_of(node: tree.SchemaTest) -> tuple[tree.Node, ...]:
    """The schemas of a ``oneOf`` that ``as_query`` has left, as queries."""
    argument = node.argument
    if node.keyword == "schema":
        argument = cast("Schema", argument)[0].argument
    of = _of_property(node.path) if node.path else _of_document
    return tuple(map(of, cast("tuple[Schema, ...]", argument)))


def _every(parts: Iterable[tree.Node]) -> tree.Node:
    found = tuple(part for part in parts if part != tree.Always(True))
    if len(found) == 1:
        return found[0]
    return tree.And(found) if found else tree.Always(True)


def _any(parts: Iterable[tree.Node]) -> tree.Node:
    found = tuple(part for part in parts if part != tree.Always(False))
    if tree.Always(True) in found:
        return tree.Always(True)
    if len(found) == 1:
        return found[0]
    return tree.Or(found) if found else tree.Always(False)


def _combined(test: tree.SchemaTest, of: Callable[[Schema], tree.Node]) -> tree.Node | None:
    """A keyword that combines schemas of the same value."""
    if test.keyword == "not":
        return tree.Not(of(cast("Schema", test.argument)))
    if test.keyword not in ("allOf", "anyOf", "oneOf"):
        return None
    schemas = cast("tuple[Schema, ...]", test.argument)
    if test.keyword == "allOf":
        return _every(map(of, schemas))
    if test.keyword == "anyOf" or len(schemas) == 1:
        return _any(map(of, schemas))
    return None


def _of_document(schema: Schema) -> tree.Node:
    return _every(_parts_of_document(schema))


def _parts_of_document(schema: Schema) -> Iterator[tree.Node]:
    required = [
        name for test in schema if test.keyword == "required" for name in cast("tuple[bytes, ...]", test.argument)
    ]
    for test in schema:
        fate = fate_of(test)
        combined = _combined(test, _of_document)
        if fate is not None:
            yield tree.Always(fate)
        elif combined is not None:
            yield combined
        elif test.keyword in ("required", "properties"):
            yield from _fields(test, required)
        else:
            yield _of_whole_document(test)


def _of_whole_document(*schema: tree.SchemaTest) -> tree.SchemaTest:
    """A schema that is asked of the whole document."""
    return tree.SchemaTest(b"", "schema", schema)


def _fields(test: tree.SchemaTest, required: list[bytes]) -> Iterator[tree.Node]:
    if test.keyword == "required":
        for name in cast("tuple[bytes, ...]", test.argument):
            yield tree.Exists(name) if _is_path(name) else _of_whole_document(tree.SchemaTest(b"", "required", (name,)))
        return
    for name, schema in cast("tuple[tuple[bytes, Schema], ...]", test.argument):
        if not _is_path(name):
            yield _of_whole_document(tree.SchemaTest(b"", "properties", ((name, schema),)))
            continue
        query = _of_property(name)(schema)
        yield query if name in required else _any((tree.Not(tree.Exists(name)), query))


def _is_path(name: bytes) -> bool:
    """Whether a query names the field of this name by it."""
    return name != b""


def _of_property(path: bytes) -> Callable[[Schema], tree.Node]:
    return lambda schema: _every(_parts_of_property(path, schema))


def _parts_of_property(path: bytes, schema: Schema) -> Iterator[tree.Node]:
    """The parts of a schema that is asked of the value at ``path``. Only where there is one: of a missing value each
    may be true or false."""
    stated = next((cast("SchemaTypes", one.argument) for one in schema if one.keyword in ("type", "bsonType")), None)
    for test in schema:
        combined = _combined(test, _of_property(path))
        leaf = tree.SchemaTest(path, test.keyword, test.argument)
        if combined is not None:
            yield combined
        elif test.keyword in _OF_ARRAYS:
            if _says_something(test) and _concerns(stated, _ARRAYS):
                yield leaf
        elif test.keyword in _OF_OBJECTS:
            if _concerns(stated, _OBJECTS):
                yield leaf
        elif test.keyword in _LEAVES:
            types, make = _LEAVES[test.keyword]
            if not _concerns(stated, types):
                continue
            query = make(path, test.argument)
            untyped = tree.Not(tree.SchemaTest(path, "type", SchemaTypes(types, is_one=True)))
            yield query if stated is not None and stated.is_one else tree.Or((untyped, query))
        else:
            yield leaf


def _says_something(test: tree.SchemaTest) -> bool:
    """Whether the server makes a test of it: it does not of ``uniqueItems: false``, of ``additionalItems`` without a
    list of items, and of an empty list of items."""
    if test.keyword == "additionalItems":
        return cast("tuple[int | None, object]", test.argument)[0] is not None
    return test.argument is not False and test.argument != ("each", ())


def _concerns(stated: SchemaTypes | None, types: frozenset[int]) -> bool:
    """Whether a keyword for values of ``types`` says more than the type that the schema states."""
    return stated is None or not stated.is_one or stated.types <= types


def _bound(strict: str, loose: str) -> Callable[[bytes, object], tree.Node]:
    def make(path: bytes, argument: object) -> tree.Node:
        value, exclusive = cast("tuple[Value, bool]", argument)
        return tree.Compare(path, strict if exclusive else loose, value)

    return make


def _pattern(path: bytes, argument: object) -> tree.Node:
    found = cast("SchemaPattern", argument)
    return tree.Pattern(path, found.pattern, b"", found.later)


def _typed(keyword: str, types: frozenset[int]) -> Callable[[bytes, object], tree.Node]:
    return lambda path, argument: tree.And((tree.TypeIs(path, types), tree.SchemaTest(path, keyword, argument)))


#: Keywords of values that are no arrays and no documents: the types that each is for, and the server's predicate.
_LEAVES: Final[dict[str, tuple[frozenset[int], Callable[[bytes, object], tree.Node]]]] = {
    "maximum": (v.NUMERIC, _bound("$lt", "$lte")),
    "minimum": (v.NUMERIC, _bound("$gt", "$gte")),
    "multipleOf": (v.NUMERIC, _typed("multipleOf", v.NUMERIC)),
    "pattern": (_STRINGS, _pattern),
    "maxLength": (_STRINGS, _typed("maxLength", _STRINGS)),
    "minLength": (_STRINGS, _typed("minLength", _STRINGS)),
}
