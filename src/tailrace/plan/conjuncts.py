"""Which parts of a pipeline may be asked before their place: the parts of its ``$match`` stages, and what each depends
on.

The server moves a ``$match`` towards the oplog past every stage that leaves alone what the match looks at, in parts
where only parts can go (measured on 6.0.27: an expression that would fail on an event that the match after it
excludes does not fail; nor does the look-up of an image that is required and missing). Only ``$replaceRoot``,
``$replaceWith`` and ``$redact`` stop it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from tailrace.expression import CompiledPipeline
from tailrace.expression.language.expression import Bindings, Expression
from tailrace.expression.match import tree
from tailrace.expression.stages.projection import Projection
from tailrace.expression.values import value as v

FULL_DOCUMENT: Final = b"fullDocument"
BEFORE_CHANGE: Final = b"fullDocumentBeforeChange"
SESSION: Final = frozenset((b"lsid", b"txnNumber"))

#: What the server's oplog query asks for, tests of whole arrays among it; and of this, what one name below it names.
_QUERIED: Final = (b"documentKey.", b"clusterTime.", b"lsid.", b"txnNumber.")
_UPDATED_FIELDS: Final = b"updateDescription.updatedFields."

#: Operators that never fail, so that asking one early cannot be noticed.
_NEVER_FAIL: Final = frozenset(
    ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$cmp", "$and", "$or", "$not", "$ifNull", "$cond")
)

#: Comparisons of which the server makes predicates.
_PREDICATES: Final = frozenset(("$eq", "$gt", "$gte", "$lt", "$lte"))


@dataclass(frozen=True, slots=True)
class Conjunct:
    """One part of a ``$match``: an event that fails it is not given.

    ``fields``  top-level fields of the event that it depends on; ``None``: it may depend on anything
    ``stage``   the place of its ``$match`` in the user's pipeline
    ``moved``   whether it passes another stage on its way to the front
    ``fails``   whether asking it of an event could raise an error
    """

    node: tree.Node
    fields: frozenset[bytes] | None
    stage: int
    moved: bool
    fails: bool

    @property
    def stays(self) -> bool:
        """Whether it is asked behind all images although it asks for none: the server neither moves it nor asks its
        oplog query for it."""
        return _stays(self.node) and not _is_queried(self.node)

    def passes_stages_of(self, names: frozenset[bytes]) -> bool:
        """Whether it may be asked before the stages that fill these fields."""
        if not names:
            return True
        return self.fields is not None and self.fields.isdisjoint(names) and not self.stays

    def implied(self) -> Iterator[Conjunct]:
        """Parts that must be true too where this one, an ``$expr``, is. The server makes predicates of comparisons
        between a path and a constant, and moves these even where it leaves the expression (measured on 6.0.27 with
        look-ups that fail)."""
        node = self.node
        while isinstance(node, tree.Or) and len(node.children) == 1:
            node = node.children[0]
        if isinstance(node, tree.ExpressionIsTrue) and not self.fails:
            found = _implied(node.expression, node.bindings)
            for part in () if found is None else parts_of(found):
                yield replace(self, node=part, fields=fields_of(part))


def leading_conjuncts(pipeline: CompiledPipeline) -> tuple[Conjunct, ...]:
    """The parts of the pipeline's ``$match`` stages that ask only for what no stage before them has touched."""
    found: list[Conjunct] = []
    touched = _Touched()
    for place, stage in enumerate(pipeline.stages):
        if stage.name == "$match":
            assert stage.parsed is not None
            for node in parts_of(stage.parsed):  # type: ignore[arg-type]
                fields = fields_of(node)
                if not touched.anything or (touched.leaves(fields) and not _stays(node)):
                    found.append(Conjunct(node, fields, place, touched.anything, may_fail(node)))
        elif isinstance(stage.parsed, Projection):
            touched.add(stage.parsed)
        else:
            break
    return tuple(found)


def parts_of(node: tree.Node) -> Iterator[tree.Node]:
    """The parts that must all be true, taken out of ``$and`` and ``$nor`` on every level."""
    if isinstance(node, tree.And):
        for child in node.children:
            yield from parts_of(child)
    elif isinstance(node, tree.Nor):
        for child in node.children:
            yield tree.Not(child)
    else:
        yield node


def fields_of(node: tree.Node) -> frozenset[bytes] | None:
    """The top-level fields that a node looks at; ``None``: it may look at anything."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return _union(fields_of(child) for child in node.children)
    if isinstance(node, tree.Not):
        return fields_of(node.child)
    if isinstance(node, tree.Always):
        return frozenset()
    if isinstance(node, tree.ExpressionIsTrue):
        return expression_fields(node.expression)
    if isinstance(node, tree.SchemaTest) and not node.path:
        return None
    return frozenset((node.path.partition(b".")[0],))


def expression_fields(expression: Expression) -> frozenset[bytes] | None:
    """The top-level fields that an expression looks at. A variable that an operator binds holds what comes from the
    operator's other arguments."""
    if expression.kind == "field" and expression.name == "ROOT":
        return frozenset(expression.path[:1]) or None
    return _union(expression_fields(argument) for argument in expression.args)


def _union(parts: Iterable[frozenset[bytes] | None]) -> frozenset[bytes] | None:
    result: frozenset[bytes] = frozenset()
    for fields in parts:
        if fields is None:
            return None
        result |= fields
    return result


def _implied(expression: Expression, bindings: Bindings) -> tree.Node | None:
    """The predicate on single fields that an expression implies; ``None``: none is known."""
    if expression.name in ("$and", "$or"):
        parts = [_implied(argument, bindings) for argument in expression.args]
        found = tuple(part for part in parts if part is not None)
        if expression.name == "$and":
            return tree.And(found) if found else None
        return tree.Or(found) if found and len(found) == len(parts) else None
    if expression.name not in _PREDICATES or len(expression.args) != 2:
        return None
    path, constant = sorted(expression.args, key=lambda one: one.constant)
    if path.kind != "field" or path.name != "ROOT" or not path.path:
        return None
    if not constant.constant or constant.value is None or constant.value[0] in (v.ARRAY, v.UNDEFINED):
        return None
    # The server's predicate leaves an array on the way, or at the end of it, to the expression.
    names = [b".".join(path.path[: end + 1]) for end in range(len(path.path))]
    arrays = (tree.TypeIs(name, frozenset((v.ARRAY,))) for name in names)
    return tree.Or((tree.ExpressionIsTrue(expression, bindings), *arrays))


def may_fail(node: tree.Node) -> bool:
    """Whether asking the node of an event could raise an error."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(map(may_fail, node.children))
    if isinstance(node, tree.Not):
        return may_fail(node.child)
    return isinstance(node, tree.ExpressionIsTrue) and _may_fail(node.expression)


def _may_fail(expression: Expression) -> bool:
    if expression.kind == "operator" and expression.name not in _NEVER_FAIL:
        return True
    return any(map(_may_fail, expression.args))


def _stays(node: tree.Node) -> bool:
    """Whether the server leaves the node where it is: it does not move tests of a whole array, schemas, and predicates
    that are always false."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(map(_stays, node.children))
    if isinstance(node, tree.Not):
        return _stays(node.child)
    if isinstance(node, tree.Always):
        return not node.truth
    whole = tree.Size | tree.ElementMatchesObject | tree.ElementMatchesValue | tree.SchemaTest
    return isinstance(node, whole)


def _is_queried(node: tree.Node, negated: bool = False) -> bool:
    """Whether the server's oplog query asks for it, although the test itself stays where it is (measured on 6.0.27 with
    look-ups that fail)."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return all(_is_queried(child, negated or isinstance(node, tree.Nor)) for child in node.children)
    if isinstance(node, tree.Not):
        return _is_queried(node.child, negated=True)
    path: bytes = getattr(node, "path", b"")
    if negated and path == b"documentKey":
        return False
    field = path.removeprefix(_UPDATED_FIELDS)
    return (field != path and b"." not in field) or (path + b".").startswith(_QUERIED)


class _Touched:
    """Which top-level fields the stages so far may have changed."""

    def __init__(self) -> None:
        self._changed: set[bytes] = set()
        self._kept: set[bytes] | None = None
        self.anything = False

    def add(self, projection: Projection) -> None:
        self.anything = True
        named = projection.children.keys() | projection.expressions.keys()
        if projection.mode == "include":
            kept = projection.names - named
            self._kept = kept if self._kept is None else self._kept & kept
        else:
            self._changed |= named | projection.names

    def leaves(self, fields: frozenset[bytes] | None) -> bool:
        """Whether these fields are still as the event has them."""
        if fields is None or not self._changed.isdisjoint(fields):
            return False
        return self._kept is None or fields <= self._kept


def drops_unseen(pipeline: CompiledPipeline, name: bytes) -> bool:
    """Whether the pipeline takes the field ``name`` away before anything has looked at it."""
    for stage in pipeline.stages:
        if stage.name == "$match":
            fields = fields_of(stage.parsed)  # type: ignore[arg-type]
            if fields is None or name in fields:
                return False
        elif isinstance(stage.parsed, Projection):
            projection = stage.parsed
            if projection.expressions or any(child.computes for child in projection.children.values()):
                return False
            if projection.mode == "include":
                return name not in projection.names and name not in projection.children
            if projection.mode == "exclude" and name in projection.names:
                return True
        else:
            return False
    return False
