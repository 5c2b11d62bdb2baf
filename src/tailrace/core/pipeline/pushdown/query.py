"""Query text: the parsed form of a ``$match`` back into BSON, and the few operators that an oplog filter is made of.

A filter is a query document's bytes as a ``Value``, or a boolean for the filter that passes everything or nothing.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from tailrace.core.expression.match import tree
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

Filter: TypeAlias = Value | bool

_TYPE_NUMBERS: Final = {kind: kind for kind in v.TYPE_NAMES} | {v.MIN_KEY: -1}


def field(path: bytes, **operators: Value) -> Value:
    """``{path: {$operator: value}}``; the operators are named without their dollar."""
    tests = [(b"$" + name.rstrip("_").encode(), value) for name, value in operators.items()]
    return v.object_of([(path, v.object_of(tests))])


def equal(path: bytes, text: bytes) -> Value:
    """``{path: text}`` for a string."""
    return v.object_of([(path, v.string_of(text))])


def one_of(path: bytes, values: list[Value]) -> Filter:
    """Equal to one of ``values``, or matched by one of the regular expressions among them."""
    if not values:
        return False
    if len(values) == 1:
        return v.object_of([(path, values[0])])
    return field(path, in_=v.array_of(values))


def exists(path: bytes, truth: bool = True) -> Value:
    return field(path, exists=v.boolean(truth))


def not_equal(path: bytes, value: Value) -> Value:
    return field(path, ne=value)


def regex(pattern: bytes) -> Value:
    """A regular expression as a value. ``pattern`` must hold no NUL."""
    return (v.REGEX, pattern + b"\x00\x00")


def every(*filters: Filter) -> Filter:
    """All of the filters; fields of different names share a document."""
    kept: list[Value] = []
    for one in filters:
        if one is False:
            return False
        if not isinstance(one, bool) and one not in kept:
            kept.append(one)
    if not kept:
        return True
    fields = [part for one in kept for part in v.fields_of(one[1])]
    if len({name for name, _, _ in fields}) == len(fields):
        return v.object_of([(name, (kind, data)) for name, kind, data in fields])
    return kept[0] if len(kept) == 1 else v.object_of([(b"$and", v.array_of(kept))])


def any_of(*filters: Filter) -> Filter:
    """At least one of the filters."""
    kept: list[Value] = []
    for one in filters:
        if one is True:
            return True
        if not isinstance(one, bool) and one not in kept:
            kept.append(one)
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else v.object_of([(b"$or", v.array_of(kept))])


def element(path: bytes, inner: Filter) -> Filter:
    """Some element of the array passes ``inner``."""
    return inner if inner is False else field(path, elemMatch=v.EMPTY_OBJECT if inner is True else inner)


def none_of(one: Filter) -> Filter:
    """The negation of a filter."""
    return not one if isinstance(one, bool) else v.object_of([(b"$nor", v.array_of([one]))])


def text_of(node: tree.Node, path: bytes | None = None) -> Value | None:
    """The query that ``node`` was parsed from, or one that means the same; ``None`` where none is known.

    ``path``  asks this path instead of the node's own
    """
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        children = [text_of(child) for child in node.children]
        if not children:
            return v.EMPTY_OBJECT  # a query without a test; $and takes no empty array
        name = {tree.And: b"$and", tree.Or: b"$or", tree.Nor: b"$nor"}[type(node)]
        return None if None in children else v.object_of([(name, v.array_of(children))])
    if isinstance(node, tree.Not):
        child = text_of(node.child, path)
        return None if child is None else v.object_of([(b"$nor", v.array_of([child]))])
    if isinstance(node, tree.Always):
        return v.object_of([(b"$alwaysTrue" if node.truth else b"$alwaysFalse", v.int32(1))])
    tests = _tests_of(node)
    if tests is None:
        return None
    own = getattr(node, "path", b"")
    return v.object_of([(own if path is None else path, v.object_of([tests]))])


def _tests_of(node: tree.Node) -> tuple[bytes, Value] | None:
    """The operator of a node on a path, and its argument."""
    if isinstance(node, tree.Compare):
        return node.operator.encode(), node.value
    if isinstance(node, tree.In):
        return b"$in", v.array_of([*node.values, *(_regex_of(pattern) for pattern in node.patterns)])
    if isinstance(node, tree.Pattern):
        return b"$regex", _regex_of(node)
    if isinstance(node, tree.Exists):
        return b"$exists", v.TRUE
    if isinstance(node, tree.Size):
        return b"$size", v.int64(node.size)
    if isinstance(node, tree.Mod):
        return b"$mod", v.array_of([v.int64(node.divisor), v.int64(node.remainder)])
    if isinstance(node, tree.TypeIs) and node.types <= _TYPE_NUMBERS.keys():
        return b"$type", v.array_of([v.int32(_TYPE_NUMBERS[kind]) for kind in sorted(node.types)])
    if isinstance(node, tree.ElementMatchesObject):
        inner = text_of(node.child)
        return None if inner is None else (b"$elemMatch", inner)
    return None


def _regex_of(pattern: tree.Pattern) -> Value:
    return (v.REGEX, pattern.pattern + b"\x00" + pattern.options + b"\x00")
