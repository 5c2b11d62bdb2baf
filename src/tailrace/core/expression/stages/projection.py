"""``$project``, ``$addFields``/``$set`` and ``$unset`` on the bytes of a document.

Both are one tree of field names. A node takes a document's fields in their own order, keeps, drops or descends into
them, then sets its computed fields in the order of the specification: over the old value where there is one, else at
the end. Arrays are entered element by element.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tailrace.core.expression.language.core import DBREF_NAMES, check_length, parse_object, parse_operand, split_path
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import operator_of, parse_failure, refused_expression
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import UsageError

Mode = Literal["include", "exclude", "add"]


@dataclass(slots=True)
class Projection:
    """One level of a projection: plain names, deeper nodes, expressions, and the order in which they were named."""

    mode: Mode
    names: set[bytes] = field(default_factory=set)
    children: dict[bytes, Projection] = field(default_factory=dict)
    expressions: dict[bytes, Expression] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)
    computes: bool = False
    #: Whether a field that goes keeps its place for a later stage.
    places: bool = False
    #: Whether the documents may hold such places of an earlier stage.
    gaps: bool = False
    #: Whether an element that an array loses keeps its place too, as it does before 7.0.
    element_places: bool = False

    def child(self, name: bytes) -> Projection:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Projection(
                self.mode, places=self.places, gaps=self.gaps, element_places=self.element_places
            )
            self.order.append(name)
        return found

    # ── what it does to a document ───────────────────────────────────────────────────────────────────────────────────

    def document(self, frame: Frame, document: bytes) -> Value:
        """The projected document."""
        if not self.places and not self.computes:
            return self._cut(frame, document)
        if not self.places and not self.gaps and self.mode == "add":
            return self._added(frame, document)
        fields: list[tuple[bytes, Maybe]] = []
        children = self.children
        keep = self.mode == "include"
        found = [(n, (k, d)) for n, k, d in v.fields_of(document)] if keep else v.places_of(document)
        for name, value in found:
            child = children.get(name)
            if child is not None and value is not None:
                fields.append((name, value if child.computes else child.value(frame, value)))
            elif (name in self.names) == keep or child is not None:
                fields.append((name, value))
            elif not keep:
                fields.append((name, None))
        if self.computes:
            self._compute(frame, fields)
        return self._built(fields)

    def _cut(self, frame: Frame, document: bytes) -> Value:
        """What stays, copied as it stands: where nothing is computed and no place is to be kept."""
        children, names, keep = self.children, self.names, self.mode == "include"
        parts = []
        for name, start, value_start, end in v.spans_of(document):
            child = children.get(name)
            if child is None:
                if (name in names) == keep:
                    parts.append(document[start:end])
                continue
            kind = document[start]
            value = child.value(frame, (kind, document[value_start:end]))
            if value is not None:
                parts.append(b"%c%b\x00%b" % (value[0], name, value[1]))
        return v.document_of(parts)

    def _added(self, frame: Frame, document: bytes) -> Value:
        """Everything copied as it stands, but for the fields that are set; where no place is to be kept or filled."""
        found = v.spans_of(document)
        parts = [document[start:end] for _, start, _, end in found]
        places: dict[bytes, int] = {}
        for place, (name, _, _, _) in enumerate(found):
            places.setdefault(name, place)
        for name in self.order:
            at = places.get(name)
            expression = self.expressions.get(name)
            if expression is not None:
                value = expression.evaluate(frame)
            else:
                old: Maybe = None
                if at is not None:
                    _, start, value_start, end = found[at]
                    old = (document[start], document[value_start:end])
                value = self.children[name].value(frame, old)
            part = b"" if value is None else b"%c%b\x00%b" % (value[0], name, value[1])
            if at is None:
                parts.append(part)
            else:
                parts[at] = part
        return v.document_of(parts)

    def _built(self, fields: list[tuple[bytes, Maybe]]) -> Value:
        if self.places:
            return v.object_with_places(fields)
        return v.object_of([(name, value) for name, value in fields if value is not None])

    def _compute(self, frame: Frame, fields: list[tuple[bytes, Maybe]]) -> None:
        places: dict[bytes, int] = {}
        for place, (name, _) in enumerate(fields):
            places.setdefault(name, place)
        for name in self.order:
            at = places.get(name)
            expression = self.expressions.get(name)
            if expression is not None:
                value = expression.evaluate(frame)
            else:
                child = self.children[name]
                if not child.computes:
                    if at is None:
                        places[name] = len(fields)
                        fields.append((name, None))
                    continue
                value = child.value(frame, None if at is None else fields[at][1])
            if at is not None:
                fields[at] = (name, value)
            else:
                places[name] = len(fields)
                fields.append((name, value))

    def value(self, frame: Frame, value: Maybe) -> Maybe:
        """What becomes of a value below a dotted name."""
        if value is not None:
            kind, data = value
            if kind == v.OBJECT:
                return self.document(frame, data)
            if kind == v.ARRAY:
                items = [self.value(frame, item) for _, item in v.places_of(data)]
                if self.element_places:
                    return v.array_with_places(items)
                return v.array_of([item for item in items if item is not None])
        if self.computes:
            fields: list[tuple[bytes, Maybe]] = []
            self._compute(frame, fields)
            return self._built(fields)
        return None if self.mode == "include" else value


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "replace")


# ── $project ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Leaf:
    """A plain name or an expression of a ``$project``, in the order of the specification."""

    path: tuple[bytes, ...]
    expression: Expression | None
    keep: bool = True


def parse_project(specification: bytes, bindings: Bindings) -> Projection:
    """The tree of a ``$project``; inclusion or exclusion is decided by the first name that says so."""
    fields = v.fields_of(specification)
    if not fields:
        raise parse_failure(
            51272, "Invalid $project :: caused by :: projection specification must have at least one field"
        )
    parser = _ProjectParser(bindings)
    for name, kind, data in fields:
        parser.field((), name, (kind, data))
    return parser.tree()


class _ProjectParser:
    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.mode: Mode | None = None
        self.keep_id: bool | None = None
        self.leaves: list[_Leaf] = []
        self._failures = _Failures(bindings)
        self._taken: set[tuple[bytes, ...]] = set()
        self._inner: set[tuple[bytes, ...]] = set()

    def field(self, parents: tuple[bytes, ...], name: bytes, value: Value) -> None:
        """One element of the specification, at any depth."""
        self.bindings.enter(_shown(name))
        kind, data = value
        if name == b"$" or name.endswith(b".$"):
            raise parse_failure(31324, "Cannot use positional projection in aggregation projection")
        path = (*parents, *split_path(name))
        check_length(len(path))
        if kind == v.OBJECT:
            self._object(path, data)
        elif kind == v.BOOL or kind in v.NUMERIC:
            self._plain(path, v.truthy(value))
        else:
            self._computed(path, parse_operand(value, self.bindings))
        self.bindings.leave()

    def _object(self, path: tuple[bytes, ...], data: bytes) -> None:
        fields = v.fields_of(data)
        if not fields:
            raise parse_failure(51270, "An empty sub-projection is not a valid value. Found empty object at path")
        first = _shown(fields[0][0])
        if len(fields) == 1 and first.startswith("$") and fields[0][0] not in DBREF_NAMES:
            if first in ("$elemMatch",):
                raise parse_failure(168, f"Cannot use {first} in this context")
            version = self.bindings.version
            if operator_of(first, version) is None and refused_expression(first, version) is None:
                raise parse_failure(31325, f"Unknown expression {first}")
            if self.mode == "exclude":
                shown = b".".join(path).decode("utf-8", "replace")
                raise parse_failure(31252, f"Cannot use an expression {shown} in an exclusion projection")
            self._computed(path, parse_object(data, self.bindings))
            return
        self._check(path)
        for name, kind, inner in fields:
            self.field(path, name, (kind, inner))

    def _plain(self, path: tuple[bytes, ...], keep: bool) -> None:
        if path == (b"_id",):
            self._take(path)
            self.keep_id = keep
            return
        self._take(path)
        mode: Mode = "include" if keep else "exclude"
        if self.mode not in (None, mode):
            shown = b".".join(path).decode("utf-8", "replace")
            if keep:
                raise parse_failure(31253, f"Cannot do inclusion on field {shown} in exclusion projection")
            raise parse_failure(31254, f"Cannot do exclusion on field {shown} in inclusion projection")
        self.mode = mode
        self.leaves.append(_Leaf(path, None, keep))

    def _computed(self, path: tuple[bytes, ...], expression: Expression) -> None:
        if self.mode == "exclude":
            shown = b".".join(path).decode("utf-8", "replace")
            raise parse_failure(31310, f"Cannot use an expression {shown} in an exclusion projection")
        self.mode = "include"
        self._failures.note(len(path))
        self._take(path)
        self.leaves.append(_Leaf(path, expression))

    def _take(self, path: tuple[bytes, ...]) -> None:
        """Two names must not be the same, nor one inside the other."""
        self._check(path)
        if path in self._inner:
            raise parse_failure(31250, f"Path collision at {b'.'.join(path).decode('utf-8', 'replace')}")
        self._taken.add(path)
        self._inner.update(path[:length] for length in range(1, len(path)))

    def _check(self, path: tuple[bytes, ...]) -> None:
        for length in range(1, len(path)):
            if path[:length] in self._taken:
                rest = b".".join(path[length:]).decode("utf-8", "replace")
                raise parse_failure(
                    31249, f"Path collision at {b'.'.join(path).decode('utf-8', 'replace')} remaining portion {rest}"
                )
        if path in self._taken:
            raise parse_failure(31250, f"Path collision at {b'.'.join(path).decode('utf-8', 'replace')}")

    def tree(self) -> Projection:
        self._failures.settle()
        mode: Mode = self.mode or ("exclude" if self.keep_id is False else "include")
        root = Projection(mode, places=self.bindings.compilation.places, element_places=self.bindings.element_places)
        for leaf in self.leaves:
            _place(root, leaf.path, leaf.expression)
        identified = any(leaf.path[0] == b"_id" for leaf in self.leaves)
        if not identified and (mode == "include") == (self.keep_id is not False):
            root.names.add(b"_id")
        return root


def _place(root: Projection, path: tuple[bytes, ...], expression: Expression | None) -> None:
    node = root
    for name in path[:-1]:
        node.computes |= expression is not None
        node = node.child(name)
    if expression is None:
        node.names.add(path[-1])
        return
    node.computes = True
    node.expressions[path[-1]] = expression
    node.order.append(path[-1])


def _keep_place(root: Projection, path: tuple[bytes, ...]) -> None:
    node = root
    for name in path:
        node = node.child(name)


def parse_unset(value: Value, bindings: Bindings) -> Projection:
    """``$unset``: a name, or an array of names, to leave out."""
    if value[0] not in (v.STRING, v.ARRAY):
        raise parse_failure(31002, "$unset specification must be a string or an array")
    items = v.elements_of(value) if value[0] == v.ARRAY else [value]
    if not items:
        raise parse_failure(31119, "$unset specification must be a string or an array with at least one field")
    if any(item[0] != v.STRING for item in items):
        raise parse_failure(31120, "$unset specification must be a string or an array containing only string values")
    if any(b"\x00" in v.bytes_of(item) for item in items):
        raise parse_failure(9527900, "$unset names may not contain a null byte")
    parser = _ProjectParser(bindings)
    for item in items:
        parser.field((), v.bytes_of(item), v.FALSE)
    return parser.tree()


# ── $addFields ───────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_add_fields(specification: bytes, bindings: Bindings) -> Projection:
    """``$addFields`` and ``$set``: nested documents name nested fields, everything else is an expression."""
    root = Projection(
        "add",
        places=bindings.compilation.places,
        gaps=bindings.compilation.after_places,
        element_places=bindings.element_places,
    )
    if specification == v.EMPTY_OBJECT[1] and not bindings.knows("5.0"):
        raise parse_failure(40177, "specification must have at least one field")
    seen: list[tuple[bytes, ...]] = []
    found: list[tuple[tuple[bytes, ...], Value]] = []
    for name, kind, data in v.fields_of(specification):
        bindings.enter(_shown(name))
        _collect(split_path(name), (kind, data), (seen, found), takes_empty=bindings.knows("7.0"))
        bindings.leave()
    ordered = _Failures(bindings)
    for path, value in found:
        bindings.enter(b".".join(path).decode("utf-8", "replace"))
        expression = parse_operand(value, bindings)
        ordered.note(len(path))
        if any(other[: len(path)] == path for other, _ in found if other != path):
            _keep_place(root, path)  # what is set inside it wins, at the place where it was named first
        else:
            _place(root, path, expression)
        bindings.leave()
    ordered.settle()
    return root


class _Failures:
    """The server optimizes the expressions of one level before those of the levels below it: so errors are sorted."""

    def __init__(self, bindings: Bindings) -> None:
        self._failures = bindings.compilation.failures
        self._start = self._seen = len(self._failures)
        self._noted: list[tuple[int, UsageError]] = []

    def note(self, depth: int) -> None:
        self._noted += [(depth, error) for error in self._failures[self._seen :]]
        self._seen = len(self._failures)

    def settle(self) -> None:
        self._failures[self._start :] = [error for _, error in sorted(self._noted, key=lambda noted: noted[0])]


def _collect(
    path: tuple[bytes, ...],
    value: Value,
    noted: tuple[list[tuple[bytes, ...]], list[tuple[tuple[bytes, ...], Value]]],
    *,
    takes_empty: bool,
) -> None:
    """The shape alone, before any expression is parsed: errors of it come first. Notes the paths and their values.
    ``takes_empty``: an empty object is a value, as it is from 7.0 on."""
    seen, found = noted
    kind, data = value
    fields = v.fields_of(data) if kind == v.OBJECT else []
    dollars = [name for name, _, _ in fields if name[:1] == b"$"]
    shown = b".".join(path).decode("utf-8", "replace")
    if kind == v.OBJECT and not fields and not takes_empty:
        raise parse_failure(40180, f"an empty object is not a valid value. Found empty object at path {shown}")
    if dollars and len(fields) > 1:
        raise parse_failure(
            40181,
            "an expression specification must contain exactly one field, the name of the expression. "
            f"Found {len(fields)} fields at path {shown}",
        )
    if kind == v.OBJECT and not fields:
        found.append((path, value))  # the server does not look whether another path conflicts
        return
    if kind != v.OBJECT or dollars:
        _check_conflict(path, seen)
        found.append((path, value))
        return
    for name, inner_kind, inner in fields:
        if b"." in name:
            raise parse_failure(40183, f"cannot use dotted field name '{_shown(name)}' in a sub object")
        inner_path = (*path, *split_path(name))
        check_length(len(inner_path) + 1)  # the server takes one name less here than in a dotted path
        _collect(inner_path, (inner_kind, inner), noted, takes_empty=takes_empty)


def _check_conflict(path: tuple[bytes, ...], seen: list[tuple[bytes, ...]]) -> None:
    for other in seen:
        shorter = min(len(other), len(path))
        if other[:shorter] == path[:shorter]:
            raise parse_failure(
                40176,
                "specification contains two conflicting paths. Cannot specify both "
                f"'{b'.'.join(path).decode('utf-8', 'replace')}' and '{b'.'.join(other).decode('utf-8', 'replace')}'",
            )
    seen.append(path)
