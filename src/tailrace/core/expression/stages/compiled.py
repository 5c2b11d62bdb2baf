"""The stages that a change stream's own pipeline may contain, compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tailrace.core.expression.language.core import parse_operand
from tailrace.core.expression.language.expression import Bindings, Compilation, Expression
from tailrace.core.expression.language.registry import failure, listed, parse_failure
from tailrace.core.expression.match import tree
from tailrace.core.expression.match.parse import parse_match
from tailrace.core.expression.match.test import document_test
from tailrace.core.expression.stages.projection import Projection, parse_add_fields, parse_project, parse_unset
from tailrace.core.expression.stages.redact import Redact
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

Apply: TypeAlias = Callable[[bytes], bytes | None]


@dataclass(frozen=True, slots=True)
class Stage:
    """One compiled stage: its name, its specification as it was given, and what it does to an event.

    ``apply`` gives ``None`` for an event that is filtered out. ``parsed`` is the parsed form that a plan may look at:
    the tree of a ``$match``, a ``Projection``, the ``Expression`` of a replacement or a ``$redact``.
    ``compilation`` holds what its expressions share.
    """

    name: str
    specification: Value
    parsed: tree.Node | Projection | Expression | None
    apply: Apply
    compilation: Compilation = field(default_factory=Compilation)


def _match(specification: Value, bindings: Bindings) -> tuple[tree.Node, Apply]:
    if specification[0] != v.OBJECT:
        raise parse_failure(15959, "the match filter must be an expression in an object")
    node = parse_match(specification[1], bindings)
    passes = document_test(node, bindings.order)
    if bindings.knows("7.0") or not _asks_for_nameless(node) or _reads_everything(node):
        return node, lambda document: document if passes(document) else None

    def apply(document: bytes) -> bytes | None:
        """The server hands a ``$match`` only the fields that it names, and cannot name the field without a name."""
        named = v.object_of([(name, (kind, data)) for name, kind, data in v.fields_of(document) if name])
        return document if passes(named[1]) else None

    return node, apply


_FIELD_LISTS = frozenset(("minProperties", "maxProperties", "additionalProperties", "patternProperties"))


def _asks_for_nameless(node: tree.Node) -> bool:
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(map(_asks_for_nameless, node.children))
    if isinstance(node, tree.Not):
        return _asks_for_nameless(node.child)
    path = getattr(node, "path", b"_")
    return not isinstance(node, tree.SchemaTest) and (path == b"" or path[:1] == b".")


def _reads_everything(node: tree.Node) -> bool:
    """Whether a part of the match looks at the whole document: then the server hands it over whole. (Of a schema's
    keywords those that count or list fields do.)"""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(map(_reads_everything, node.children))
    if isinstance(node, tree.Not):
        return _reads_everything(node.child)
    return isinstance(node, tree.SchemaTest) and _lists_fields(node)


def _lists_fields(schema: tree.SchemaTest) -> bool:
    if schema.keyword in _FIELD_LISTS:
        return True
    inner = schema.argument if isinstance(schema.argument, tuple) else ()
    return any(isinstance(one, tree.SchemaTest) and _lists_fields(one) for one in inner)


def _projecting(name: str, code: int, parse: Callable[[bytes, Bindings], Projection]) -> StageParser:
    def parser(specification: Value, bindings: Bindings) -> tuple[Projection, Apply]:
        if specification[0] != v.OBJECT:
            if code == 40272:
                raise parse_failure(
                    code, f"{name} specification stage must be an object, got {v.type_name(specification)}"
                )
            raise parse_failure(code, f"{name} specification must be an object")
        node = parse(specification[1], bindings)
        return node, lambda document: node.document(bindings.frame(document), document)[1]

    return parser


def _unset(specification: Value, bindings: Bindings) -> tuple[Projection, Apply]:
    node = parse_unset(specification, bindings)
    return node, lambda document: node.document([], document)[1]


def _replace(expression: Expression, what: str, bindings: Bindings) -> Apply:
    evaluate = expression.evaluate

    def apply(document: bytes) -> bytes:
        root = evaluate(bindings.frame(document))
        if root is None or root[0] != v.OBJECT:
            raise failure(
                40228,
                f"{what}  must evaluate to an object, but resulting value was of type: '{v.type_name(root)}'",
            )
        return root[1]

    return apply


def _root_expression(specification: Value, bindings: Bindings) -> Expression:
    """The server optimizes what is inside the new root but keeps the outermost operator as it was parsed; only
    ``$setIsSubset`` shows it, by another code."""
    outermost = v.fields_of(specification[1])[:1] if specification[0] == v.OBJECT else []
    plain = bool(outermost) and outermost[0][0] == b"$setIsSubset"
    return parse_operand(specification, bindings.unfolded() if plain else bindings)


def _replace_with(specification: Value, bindings: Bindings) -> tuple[Expression, Apply]:
    expression = _root_expression(specification, bindings)
    return expression, _replace(expression, "'replacement document'", bindings)


def _replace_root(specification: Value, bindings: Bindings) -> tuple[Expression, Apply]:
    if specification[0] != v.OBJECT:
        raise parse_failure(
            40229, f"expected an object as specification for $replaceRoot stage, got {v.type_name(specification)}"
        )
    root: Value | None = None
    for name, kind, data in v.fields_of(specification[1]):
        if name != b"newRoot":
            shown = name.decode("utf-8", "replace")
            raise parse_failure(40415, f"BSON field '$replaceRoot.{shown}' is an unknown field.")
        root = (kind, data)
    if root is None:
        raise parse_failure(40414, "BSON field '$replaceRoot.newRoot' is missing but a required field")
    expression = _root_expression(root, bindings)
    return expression, _replace(expression, "'newRoot' expression", bindings)


def _redact(specification: Value, bindings: Bindings) -> tuple[Expression, Apply]:
    redact = Redact(specification, bindings)
    return redact.expression, redact.apply


StageParser: TypeAlias = Callable[[Value, Bindings], "tuple[tree.Node | Projection | Expression, Apply]"]

STAGES: Final[dict[str, StageParser]] = {
    "$match": _match,
    "$project": _projecting("$project", 15969, parse_project),
    "$addFields": _projecting("$addFields", 40272, parse_add_fields),
    "$set": _projecting("$set", 40272, parse_add_fields),
    "$unset": _unset,
    "$replaceRoot": _replace_root,
    "$replaceWith": _replace_with,
    "$redact": _redact,
}

listed("stages", "3.6", *STAGES)
listed("stages", "6.0", "$changeStreamSplitLargeEvent", note="last only; reported as a flag, the stage itself is apart")
