"""Compiled tests: a node of the parsed ``$match`` becomes a closure over the bytes of a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from tailrace.core.expression.language import pattern as regular
from tailrace.core.expression.match import schema, tree
from tailrace.core.expression.match.bits import bits_test
from tailrace.core.expression.match.schema import ValueTest
from tailrace.core.expression.match.traverse import values_at
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import RANK, SIMPLE, Order, compare_numbers
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import InternalError

DocumentTest: TypeAlias = Callable[[bytes], bool]


def document_test(node: tree.Node, order: Order = SIMPLE) -> DocumentTest:
    """The test of a whole document; values are compared in ``order``."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return _logical(node, order)
    if isinstance(node, tree.Not):
        inner = document_test(node.child, order)
        return lambda document: not inner(document)
    if isinstance(node, tree.Always):
        truth = node.truth
        return lambda document: truth
    if isinstance(node, tree.ExpressionIsTrue):
        evaluate, frame = node.expression.evaluate, node.bindings.frame
        return lambda document: v.truthy(evaluate(frame(document)))
    if isinstance(node, tree.SchemaTest) and not node.path:
        whole = schema.value_test(node)
        return lambda document: whole((v.OBJECT, document))
    return _on_path(node, order)


def _on_path(node: tree.Node, order: Order) -> DocumentTest:
    leaf = value_test(node, order)
    if isinstance(node, tree.And | tree.Or | tree.Nor | tree.Not | tree.Always | tree.ExpressionIsTrue):
        raise InternalError("a node without a path was asked for its path")
    names = tuple(node.path.split(b"."))
    traverse = not isinstance(node, tree.Size | tree.ElementMatchesObject | tree.ElementMatchesValue | tree.SchemaTest)
    if len(names) > 1:
        return lambda document: any(map(leaf, values_at(document, names, 0, traverse)))
    name, lookup, elements = names[0], v.field, v.elements_of

    def test(document: bytes) -> bool:
        found = lookup(document, name)
        if traverse and found is not None and found[0] == v.ARRAY:
            return any(map(leaf, elements(found))) or leaf(found)
        return leaf(found)

    return test


def _logical(node: tree.And | tree.Or | tree.Nor, order: Order) -> DocumentTest:
    tests = [document_test(child, order) for child in _cheap_first(node.children)]
    if len(tests) == 1:
        only = tests[0]
        return (lambda document: not only(document)) if isinstance(node, tree.Nor) else only
    if isinstance(node, tree.And):

        def every(document: bytes) -> bool:
            for test in tests:  # noqa: SIM110  a generator costs more than the tests
                if not test(document):
                    return False
            return True

        return every
    wanted = isinstance(node, tree.Or)

    def some(document: bytes) -> bool:
        for test in tests:
            if test(document):
                return wanted
        return not wanted

    return some


def _cheap_first(children: tuple[tree.Node, ...]) -> list[tree.Node]:
    """Tests of one top-level field first. Nothing moves where an ``$expr`` could then fail, or no longer fail."""
    if any(_may_fail(child) for child in children):
        return list(children)
    return sorted(
        children, key=lambda child: not (isinstance(child, tree.Compare | tree.In) and b"." not in child.path)
    )


def _may_fail(node: tree.Node) -> bool:
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(_may_fail(child) for child in node.children)
    return isinstance(node, tree.ExpressionIsTrue) or (isinstance(node, tree.Not) and _may_fail(node.child))


# ── tests of one value ───────────────────────────────────────────────────────────────────────────────────────────────


def value_test(node: tree.Node, order: Order = SIMPLE) -> ValueTest:
    """The test of a single value, as a path or an ``$elemMatch`` finds it."""
    maker = _VALUE_TESTS.get(type(node))
    if maker is None:
        raise InternalError(f"{type(node).__name__} does not test a value")
    test: ValueTest = maker(node, order)
    return test


def _compare_test(node: tree.Compare, order: Order) -> ValueTest:
    value, operator, compare = node.value, node.operator, order.compare
    kind = value[0]
    if kind == v.NULL_TYPE and operator not in ("$gt", "$lt"):
        return lambda found: found is None or found[0] in v.NULLISH
    if kind in (v.MIN_KEY, v.MAX_KEY):
        return _extreme_test(kind, operator)
    wanted = RANK[kind]
    if operator == "$eq":
        if kind in (v.OBJECT_ID, v.BOOL) or (kind == v.STRING and order.simple):
            data = value[1]
            return lambda found: found is not None and found[1] == data and RANK[found[0]] == wanted
        return lambda found: found is not None and RANK[found[0]] == wanted and compare(found, value) == 0
    if wanted == RANK[v.INT32]:
        return _number_test(value, operator)
    passes = _ORDERINGS[operator]
    return lambda found: found is not None and RANK[found[0]] == wanted and compare(found, value) in passes


_ORDERINGS: Final = {"$gt": (1,), "$gte": (0, 1), "$lt": (-1,), "$lte": (-1, 0)}


def _number_test(value: Value, operator: str) -> ValueTest:
    """Inequalities of numbers: NaN is equal to NaN and neither above nor below anything."""
    passes = _ORDERINGS[operator]
    bound = v.number_of(value)

    def test(found: Maybe) -> bool:
        if found is None or found[0] not in v.NUMERIC:
            return False
        number = v.number_of(found)
        if v.is_nan(number) or v.is_nan(bound):
            return v.is_nan(number) and v.is_nan(bound) and 0 in passes
        return compare_numbers(found, value) in passes

    return test


def _extreme_test(kind: int, operator: str) -> ValueTest:
    """MinKey is below and MaxKey above every value of another type, a missing one included."""
    equal = operator in ("$eq", "$gte", "$lte")
    other = operator in (("$gt", "$gte") if kind == v.MIN_KEY else ("$lt", "$lte"))
    return lambda found: equal if found is not None and found[0] == kind else other


def _pattern_test(node: tree.Pattern, _: Order) -> ValueTest:
    search = regular.compile_pattern(node.pattern, node.options, later=node.later).matches
    data = node.pattern + b"\x00" + node.options + b"\x00"

    def test(found: Maybe) -> bool:
        if found is None:
            return False
        if found[0] in (v.STRING, v.SYMBOL):
            return search(v.bytes_of(found))
        return found[0] == v.REGEX and found[1] == data

    return test


def _in_test(node: tree.In, order: Order) -> ValueTest:
    identity = order.identity
    keys = {identity(value) for value in node.values}
    with_null = any(value[0] == v.NULL_TYPE for value in node.values)
    patterns = [_pattern_test(pattern, order) for pattern in node.patterns]

    def test(found: Maybe) -> bool:
        if found is None:
            return with_null
        if (with_null and found[0] == v.UNDEFINED) or identity(found) in keys:
            return True
        return any(matches(found) for matches in patterns)

    return test


def _exists_test(node: tree.Exists, _: Order) -> ValueTest:
    return lambda found: found is not None


def _type_test(node: tree.TypeIs, _: Order) -> ValueTest:
    types = node.types
    return lambda found: found is not None and found[0] in types


def _size_test(node: tree.Size, _: Order) -> ValueTest:
    size = node.size
    return lambda found: found is not None and found[0] == v.ARRAY and len(v.fields_of(found[1])) == size


def _mod_test(node: tree.Mod, _: Order) -> ValueTest:
    divisor, remainder = node.divisor, node.remainder

    def test(found: Maybe) -> bool:
        if found is None or found[0] not in v.NUMERIC:
            return False
        number = v.number_of(found)
        if not isinstance(number, int):
            if v.is_nan(number) or abs(number) == float("inf"):
                return False
            number = int(number)
        if not v.INT64_MIN <= number <= v.INT64_MAX:
            return False
        rest = abs(number) % abs(divisor)
        return (-rest if number < 0 else rest) == remainder

    return test


def _object_test(node: tree.ElementMatchesObject, order: Order) -> ValueTest:
    inner = document_test(node.child, order)

    def test(found: Maybe) -> bool:
        if found is None or found[0] != v.ARRAY:
            return False
        return any(inner(data) for kind, data in v.elements_of(found) if kind in (v.OBJECT, v.ARRAY))

    return test


def _element_test(node: tree.ElementMatchesValue, order: Order) -> ValueTest:
    tests = [value_test(child, order) for child in node.children]

    def test(found: Maybe) -> bool:
        if found is None or found[0] != v.ARRAY:
            return False
        return any(all(passes(element) for passes in tests) for element in v.elements_of(found))

    return test


def _not_test(node: tree.Not, order: Order) -> ValueTest:
    inner = value_test(node.child, order)
    return lambda found: not inner(found)


def _and_test(node: tree.And, order: Order) -> ValueTest:
    tests = [value_test(child, order) for child in node.children]
    return lambda found: all(test(found) for test in tests)


def _or_test(node: tree.Or, order: Order) -> ValueTest:
    tests = [value_test(child, order) for child in node.children]
    return lambda found: any(test(found) for test in tests)


def _always_test(node: tree.Always, _: Order) -> ValueTest:
    truth = node.truth
    return lambda found: truth


def _schema_test(node: tree.SchemaTest, _: Order) -> ValueTest:
    return schema.value_test(node)


_VALUE_TESTS: Final[dict[type, Callable[..., ValueTest]]] = {
    tree.Compare: _compare_test,
    tree.Pattern: _pattern_test,
    tree.In: _in_test,
    tree.Exists: _exists_test,
    tree.TypeIs: _type_test,
    tree.Size: _size_test,
    tree.Mod: _mod_test,
    tree.Bits: lambda node, _: bits_test(node),
    tree.ElementMatchesObject: _object_test,
    tree.ElementMatchesValue: _element_test,
    tree.Not: _not_test,
    tree.And: _and_test,
    tree.Or: _or_test,
    tree.Always: _always_test,
    tree.SchemaTest: _schema_test,
}
