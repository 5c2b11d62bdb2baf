"""Which parts of a pipeline may be asked before their place: the parts of its ``$match`` stages, and what each depends
on.

The server moves a ``$match`` towards the oplog past every stage that leaves alone what the match looks at, in parts
where only parts can go (measured on 6.0.27: an expression that would fail on an event that the match after it excludes
does not fail; nor does the look-up of an image that is required and missing). Only ``$replaceRoot``, ``$replaceWith``
and ``$redact`` stop it here. A ``$jsonSchema`` is moved in parts too. The server leaves some tests where they are;
``_stays`` says which ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from tailrace.core.expression import CompiledPipeline
from tailrace.core.expression.language.expression import Bindings, Expression
from tailrace.core.expression.match import tree
from tailrace.core.expression.match.schema_query import alternatives_of, as_query
from tailrace.core.expression.stages.projection import Projection
from tailrace.core.expression.values import value as v

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

#: What a schema asks of a whole array, and its types, which the server treats alike.
_SCHEMA_OF_ARRAYS: Final = frozenset(
    ("type", "bsonType", "minItems", "maxItems", "uniqueItems", "items", "additionalItems")
)
#: What a schema asks that the oplog query never does.
NOT_QUERIED: Final = frozenset(("schema", "oneOf", "dependencies"))
#: What a schema asks of a single value.
_SCHEMA_OF_VALUES: Final = frozenset(("enum", "minLength", "maxLength", "multipleOf"))


@dataclass(frozen=True, slots=True)
class Conjunct:
    """One part of a ``$match``: an event that fails it is not given.

    ``fields``  top-level fields of the event that it depends on; ``None``: it may depend on anything
    ``stage``   the place of its ``$match`` in the user's pipeline
    ``moved``   whether it passes another stage on its way to the front
    ``fails``   whether asking it of an event could raise an error
    ``arrays``  whether the server moves tests of whole arrays
    """

    node: tree.Node
    fields: frozenset[bytes] | None
    stage: int
    moved: bool
    fails: bool
    arrays: bool

    @property
    def stays(self) -> bool:
        """Whether it is asked after all images although it asks for none: the server neither moves it nor asks its
        oplog query for it."""
        return _stays(self.node, self.arrays) and not _is_queried(self.node)

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


def leading_conjuncts(pipeline: CompiledPipeline, *, moves_array_tests: bool) -> tuple[Conjunct, ...]:
    """The parts of the pipeline's ``$match`` stages that ask only for what no stage before them has touched.

    ``moves_array_tests``  as the server's profile has it
    """
    found: list[Conjunct] = []
    touched = _Touched()
    for place, stage in enumerate(pipeline.stages):
        if stage.name == "$match":
            assert stage.parsed is not None
            for node in parts_of(as_query(stage.parsed)):  # type: ignore[arg-type]
                fields = fields_of(node)
                if not touched.anything or (touched.leaves(fields) and not _stays(node, moves_array_tests)):
                    found.append(Conjunct(node, fields, place, touched.anything, may_fail(node), moves_array_tests))
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
        return _union(map(fields_of, alternatives_of(node))) if _is_one_of(node) else None
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


def _stays(node: tree.Node, arrays: bool) -> bool:
    """Whether the server leaves the node where it is: predicates that are always false, what a schema asks of fields in
    a field or of the whole document, and, unless it moves ``arrays``, tests of a whole array and a schema's types."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(_stays(child, arrays) for child in node.children)
    if isinstance(node, tree.Not):
        return _stays(node.child, arrays)
    if isinstance(node, tree.Always):
        return not node.truth
    if isinstance(node, tree.SchemaTest):
        if _is_one_of(node):
            return any(_stays(one, arrays) for one in alternatives_of(node))
        moves = node.keyword in _SCHEMA_OF_VALUES or (arrays and node.keyword in _SCHEMA_OF_ARRAYS)
        return not (node.path and moves)
    return not arrays and isinstance(node, tree.Size | tree.ElementMatchesObject | tree.ElementMatchesValue)


def _is_one_of(node: tree.SchemaTest) -> bool:
    """Whether it is a ``oneOf``: of a field, or by itself of the document."""
    if node.path:
        return node.keyword == "oneOf"
    schema: tuple[tree.SchemaTest, ...] = node.argument  # type: ignore[assignment]
    return node.keyword == "schema" and len(schema) == 1 and schema[0].keyword == "oneOf"


def _is_queried(node: tree.Node, negated: bool = False) -> bool:
    """Whether the server's oplog query asks for it, although the test itself stays where it is (measured on 6.0.27 with
    look-ups that fail, schemas by what ``explain`` shows)."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return all(_is_queried(child, negated or isinstance(node, tree.Nor)) for child in node.children)
    if isinstance(node, tree.Not):
        return _is_queried(node.child, negated=True)
    if isinstance(node, tree.SchemaTest) and node.keyword in NOT_QUERIED:
        return False
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
    """Whether the pipeline takes the field ``name`` away before anything has read it."""
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
