"""Which part of a predicate the server asks in its oplog query (measured on 6.0.27, by what ``explain`` shows).

This decides which events have their current document looked up: an event that the query has left out needs no look-up,
so none can fail. More may be asked of an entry (``terms.py``, ``entry_test.py``), but not if that would leave out a
look-up that fails on the server.
"""

from __future__ import annotations

from typing import Final

from tailrace.core.expression.language.expression import Expression
from tailrace.core.expression.match import tree
from tailrace.core.expression.values import value as v
from tailrace.core.plan.conjuncts import NOT_QUERIED, expression_fields

#: Fields that an entry has under another name, or does not have: asked with every operator, and negated too.
_RENAMED: Final = frozenset((b"clusterTime", b"lsid", b"txnNumber"))
_NAMESPACES: Final = frozenset((b"ns", b"to"))
_FIELDS: Final = _RENAMED | _NAMESPACES | {b"operationType", b"documentKey", b"fullDocument", b"updateDescription"}
#: Fields of which an entry does not say everything: never negated.
_INEXACT: Final = frozenset((b"fullDocument", b"updateDescription"))
_UPDATED_FIELDS: Final = b"updateDescription.updatedFields"
_REMOVED_FIELDS: Final = b"updateDescription.removedFields"
_ORDERINGS: Final = frozenset(("$gt", "$gte", "$lt", "$lte"))


def queried(node: tree.Node, *, exact: bool = False, negates_keys: bool = False) -> tree.Node | None:
    """The part of ``node`` that the oplog query asks; ``None``: no part of it.

    ``exact``         the node is negated, so either all of it is asked or nothing
    ``negates_keys``  it is asked too if that is a whole ``documentKey`` (7.0.28)
    """
    if isinstance(node, tree.And | tree.Or):
        children = [queried(child, exact=exact, negates_keys=negates_keys) for child in node.children]
        asked = tuple(child for child in children if child is not None)
        if len(asked) < len(children) and (exact or isinstance(node, tree.Or)):
            return None
        return type(node)(asked) if asked else None
    if isinstance(node, tree.Nor):
        children = [queried(child, exact=True, negates_keys=negates_keys) for child in node.children]
        asked = tuple(child for child in children if child is not None)
        return tree.Nor(asked) if asked and (len(asked) == len(children) or not exact) else None
    if isinstance(node, tree.Not):
        child = queried(node.child, exact=True, negates_keys=negates_keys)
        return None if child is None else tree.Not(child)
    if isinstance(node, tree.ExpressionIsTrue):
        return _expression(node, exact=exact)
    if isinstance(node, tree.Always) or (isinstance(node, tree.SchemaTest) and node.keyword in NOT_QUERIED):
        return None
    return node if _asks_leaf(node, node.path, exact=exact, negates_keys=negates_keys) else None


def _asks_leaf(node: tree.Node, path: bytes, *, exact: bool, negates_keys: bool) -> bool:
    name, _, rest = path.partition(b".")
    if name in _RENAMED:
        return True
    if name == b"documentKey":
        return bool(rest) or not exact or negates_keys
    if name == b"operationType":
        return bool(rest) or _is_equality(node)
    if name in _NAMESPACES:
        return isinstance(node, tree.Pattern) or (_is_equality(node, patterns=True) and _asks_for_names(node))
    if name == b"fullDocument":
        return not exact
    return name == b"updateDescription" and _asks_description(node, path, exact=exact)


def _asks_description(node: tree.Node, path: bytes, *, exact: bool) -> bool:
    """For ``updateDescription``: tests of one updated field are asked; others only if a missing field does not pass."""
    below = path.removeprefix(_UPDATED_FIELDS + b".")
    if below != path and b"." not in below:
        return True
    is_whole = below == path
    if is_whole and (isinstance(node, tree.Exists) or _is_null(node)):
        return True
    if _asks_for_null(node):
        return False
    return not exact or (path == _REMOVED_FIELDS and _is_equality(node) and _asks_for_names(node))


def _is_equality(node: tree.Node, *, patterns: bool = False) -> bool:
    if isinstance(node, tree.In):
        return patterns or not node.patterns
    return isinstance(node, tree.Compare) and node.operator == "$eq"


def _asks_for_names(node: tree.Node) -> bool:
    values = node.values if isinstance(node, tree.In) else (node.value,) if isinstance(node, tree.Compare) else ()
    return all(value[0] in (v.STRING, v.OBJECT) for value in values)


def _is_null(node: tree.Node) -> bool:
    return isinstance(node, tree.Compare) and node.operator == "$eq" and node.value == v.NULL


def _asks_for_null(node: tree.Node) -> bool:
    values = node.values if isinstance(node, tree.In) else ()
    return _is_null(node) or any(value == v.NULL for value in values)


def _expression(node: tree.ExpressionIsTrue, *, exact: bool) -> tree.Node | None:
    expression = node.expression
    if expression.name == "$and" and not exact:
        return queried(tree.And(tuple(tree.ExpressionIsTrue(argument, node.bindings) for argument in expression.args)))
    return node if _asks_expression(expression, exact=exact) else None


def _asks_expression(expression: Expression, *, exact: bool) -> bool:
    fields = expression_fields(expression)
    if fields is None or not fields <= _FIELDS:
        return False
    return not exact or (not fields & _INEXACT and (fields <= _RENAMED or not _orders(expression)))


def _orders(expression: Expression) -> bool:
    return expression.name in _ORDERINGS or any(map(_orders, expression.args))
