"""From the BSON of a ``$match`` to its parsed form, with the server's errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, TypeAlias

from tailrace.core.expression.language import pattern as regular
from tailrace.core.expression.language.core import DBREF_NAMES, parse_operand
from tailrace.core.expression.language.expression import Bindings
from tailrace.core.expression.language.registry import REFUSED, listed, parse_failure
from tailrace.core.expression.match import schema, tree
from tailrace.core.expression.match.refused import NEAR_CODE, PATHLESS, check_geometry, check_pathless
from tailrace.core.expression.match.types import types_of
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

#: How deep the server lets a query nest.
MAX_DEPTH: Final = 100
#: How many names a path of a query may have; 4.4 and 5.0 set no bound.
MAX_PATH_NAMES: Final = 180
_BAD_VALUE: Final = 2
_FAILED_TO_PARSE: Final = 9
_TYPE_MISMATCH: Final = 14

FieldParser: TypeAlias = "Callable[[bytes, Value, State], tree.Node]"


@dataclass(frozen=True, slots=True)
class State:
    """Where the parser stands: the bindings for ``$expr``, the depth, and whether it is inside an ``$elemMatch``."""

    bindings: Bindings
    depth: int = 0
    top_level: bool = True

    def deeper(self) -> State:
        if self.depth >= MAX_DEPTH:
            raise _bad(f"exceeded maximum query tree depth of {MAX_DEPTH}")
        return replace(self, depth=self.depth + 1)


def parse_match(query: bytes, bindings: Bindings) -> tree.Node:
    """The parsed form of a query document. Raises ``UsageError`` with the server's code."""
    return normalized(_parse_query(query, State(bindings)), bindings)


def normalized(node: tree.Node, bindings: Bindings) -> tree.Node:
    """The server's form of a query: an ``$and`` inside an ``$and`` (and so with ``$or``) is opened and goes to the
    end. That order shows where an ``$expr`` fails. From 6.0 on it sees through a ``$nor``, and from 7.0 on through an
    ``$expr`` that is true whatever the document is."""
    if isinstance(node, tree.Not):
        return tree.Not(normalized(node.child, bindings))
    if isinstance(node, tree.ExpressionIsTrue) and node.expression.constant and bindings.knows("7.0"):
        return tree.Always(True) if v.truthy(node.expression.value) else node
    if not isinstance(node, tree.And | tree.Or | tree.Nor):
        return node
    kept: list[tree.Node] = []
    absorbed: list[tree.Node] = []
    for each in node.children:
        child = normalized(each, bindings)
        if type(child) is type(node) and isinstance(child, tree.And | tree.Or):
            absorbed += child.children
        elif isinstance(node, tree.And) and isinstance(child, tree.SchemaTest) and schema.is_conjunction(child):
            absorbed.append(child)
        else:
            kept.append(child)
    children = (*kept, *absorbed)
    if isinstance(node, tree.And) and tree.Always(False) in children:
        return tree.Always(False)
    if isinstance(node, tree.And):
        children = tuple(child for child in children if child != tree.Always(True))
        if not children:
            return tree.Always(True)
    if isinstance(node, tree.Nor) and tree.Always(True) in children:
        if len(children) > 1 and bindings.knows("6.0"):
            return tree.Always(False)
        children = (tree.Always(True),)
    if isinstance(node, tree.Nor) and bindings.knows("6.0") and _are_false(children):
        return tree.Always(True)
    if isinstance(node, tree.Or):
        children = tuple(child for child in children if child != tree.Always(False))
        if not children or tree.Always(True) in children:
            return tree.Always(bool(children))
    if len(children) == 1 and not isinstance(node, tree.Nor):
        return children[0]
    return type(node)(children)


def _are_false(nodes: tuple[tree.Node, ...]) -> bool:
    return all(node == tree.Always(False) for node in nodes)


def _bad(message: str) -> Exception:
    return parse_failure(_BAD_VALUE, message)


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _parse_query(query: bytes, state: State) -> tree.Node:
    children: list[tree.Node] = []
    for name, kind, data in v.fields_of(query):
        state.bindings.enter(_shown(name))
        value = (kind, data)
        if name.count(b".") >= MAX_PATH_NAMES and state.bindings.knows("6.0"):
            raise parse_failure(5729100, f"FieldPath is too long, at most {MAX_PATH_NAMES} names")
        if name in DBREF_NAMES:
            children.append(_comparison(name, "$eq", value))  # whatever the value: it is not searched for operators
        elif name[:1] == b"$":
            children.append(_top_level(_shown(name), value, state))
        elif _is_operators(value, incomplete_reference=False):
            children += _parse_operators(name, data, state)
        elif kind == v.REGEX:
            children.append(_pattern_of(name, data, state))
        else:
            children.append(_comparison(name, "$eq", value))
        state.bindings.leave()
    return children[0] if len(children) == 1 else tree.And(tuple(children))


def _is_operators(value: Value, *, incomplete_reference: bool) -> bool:
    """Whether a value is a document of operators. A DBRef also begins with a dollar, but is a value."""
    if value[0] != v.OBJECT:
        return False
    names = [name for name, _, _ in v.fields_of(value[1])]
    if not names or names[0][:1] != b"$":
        return False
    if incomplete_reference:
        return not any(name in DBREF_NAMES for name in names)
    return not (b"$ref" in names and b"$id" in names)


# ── operators of the top level ───────────────────────────────────────────────────────────────────────────────────────


def _top_level(name: str, value: Value, state: State) -> tree.Node:
    parser = _TOP_LEVEL.get(name)
    if parser is not None:
        return parser(value, state)
    if name in PATHLESS:
        check_pathless(name, value, top_level=state.top_level)
        if name == "$sampleRate" and (rate := v.number_of(value)) in (0, 1):
            return _sampled(bool(rate), state)
        raise parse_failure(REFUSED[name].code, f"{name} {REFUSED[name].reason}")
    if name == "$not":
        raise _bad("unknown top level operator: $not. If you are trying to negate an entire expression, use $nor.")
    raise _bad(
        f"unknown top level operator: {name}. If you have a field name that starts with a '$' symbol, consider using "
        "$getField or $setField."
    )


def _sampled(everything: bool, state: State) -> tree.Node:
    """All documents or none. The server asks each one, and only 7.0 sees beforehand that it takes all."""
    nothing = tree.Nor((tree.Always(True),))
    if not everything:
        return nothing
    return tree.Always(True) if state.bindings.knows("7.0") else tree.Not(nothing)


def _logical(name: str, make: Callable[[tuple[tree.Node, ...]], tree.Node]) -> Callable[[Value, State], tree.Node]:
    def parse(value: Value, state: State) -> tree.Node:
        if value[0] != v.ARRAY:
            raise _bad(f"{name} must be an array")
        items = v.elements_of(value)
        if not items:
            raise _bad("$and/$or/$nor must be a nonempty array")
        inner = state.deeper()
        children = []
        for kind, data in items:
            if kind != v.OBJECT:
                raise _bad("$or/$and/$nor entries need to be full objects")
            children.append(_parse_query(data, inner))
        return make(tuple(children))

    return parse


def _expr(value: Value, state: State) -> tree.Node:
    if not state.top_level:
        raise _bad("$expr can only be applied to the top-level document")
    return tree.ExpressionIsTrue(parse_operand(value, state.bindings), state.bindings)


def _always(name: str, truth: bool) -> Callable[[Value, State], tree.Node]:
    def parse(value: Value, state: State) -> tree.Node:
        if value[0] not in v.NUMERIC or v.number_of(value) != 1:
            raise parse_failure(_FAILED_TO_PARSE, f"{name} must be an integer value of 1")
        return tree.Always(truth)

    return parse


def _comment(value: Value, state: State) -> tree.Node:
    return tree.Always(True)


def _json_schema(value: Value, state: State) -> tree.Node:
    if value[0] != v.OBJECT:
        raise parse_failure(_TYPE_MISMATCH, "$jsonSchema must be an object")
    return schema.parse_schema(value[1], later_patterns=state.bindings.later_patterns)


_TOP_LEVEL: Final[dict[str, Callable[[Value, State], tree.Node]]] = {
    "$and": _logical("$and", tree.And),
    "$or": _logical("$or", tree.Or),
    "$nor": _logical("$nor", tree.Nor),
    "$expr": _expr,
    "$comment": _comment,
    "$alwaysTrue": _always("$alwaysTrue", True),
    "$alwaysFalse": _always("$alwaysFalse", False),
    "$jsonSchema": _json_schema,
}


# ── operators on a field ─────────────────────────────────────────────────────────────────────────────────────────────


def _parse_operators(path: bytes, operators: bytes, state: State) -> list[tree.Node]:
    """The tests of ``{$gt: 1, $lt: 5, ...}`` on one path."""
    result = []
    fields = v.fields_of(operators)
    for name, kind, data in fields:
        shown = _shown(name)
        value = (kind, data)
        if shown == "$options":
            if not any(other == b"$regex" for other, _, _ in fields):
                raise _bad("$options needs a $regex")
            continue
        if shown == "$regex":
            result.append(_regex(path, value, fields, state))
            continue
        parser = _FIELD.get(shown)
        if parser is None:
            if shown in REFUSED and REFUSED[shown].group == "query" and shown not in PATHLESS:
                check_geometry(shown, value)
                code = REFUSED[shown].code
                code = _BAD_VALUE if code == NEAR_CODE and not state.bindings.knows("6.0") else code
                raise parse_failure(code, f"{shown} {REFUSED[shown].reason}")
            raise _bad(f"unknown operator: {shown}")
        state.bindings.enter(shown)
        result.append(parser(path, value, state))
        state.bindings.leave()
    return result


def _comparison(path: bytes, operator: str, value: Value) -> tree.Node:
    kind = value[0]
    if kind == v.UNDEFINED:
        raise _bad("cannot compare to undefined")
    if kind == v.REGEX and operator != "$eq":
        raise _bad(f"Can't have RegEx as arg to predicate over field '{_shown(path)}'.")
    return tree.Compare(path, operator, value)


def _comparing(operator: str) -> FieldParser:
    return lambda path, value, state: _comparison(path, operator, value)


def _not_equal(path: bytes, value: Value, state: State) -> tree.Node:
    if value[0] == v.REGEX:
        raise _bad("Can't have regex as arg to $ne.")
    return tree.Not(_comparison(path, "$eq", value))


def _pattern_of(path: bytes, data: bytes, state: State) -> tree.Pattern:
    pattern, options, _ = data.split(b"\x00")
    return _pattern(path, pattern, options, state)


def _pattern(path: bytes, pattern: bytes, options: bytes, state: State) -> tree.Pattern:
    later = state.bindings.later_patterns
    regular.check_options(options)
    regular.check_query_pattern(pattern, options, later=later)
    return tree.Pattern(path, pattern, options, later)


def _regex(path: bytes, value: Value, fields: list[tuple[bytes, int, bytes]], state: State) -> tree.Node:
    """``$regex`` with the ``$options`` next to it."""
    options: bytes | None = None
    for name, kind, data in fields:
        if name == b"$options":
            if kind != v.STRING:
                raise _bad("$options has to be a string")
            options = v.bytes_of((kind, data))
    if value[0] == v.STRING:
        return _pattern(path, v.bytes_of(value), options or b"", state)
    if value[0] != v.REGEX:
        raise _bad("$regex has to be a string")
    pattern, own, _ = value[1].split(b"\x00")
    if own and options is not None:
        names = [name for name, _, _ in fields]
        if names.index(b"$regex") < names.index(b"$options"):
            raise parse_failure(51075, "options set in both $regex and $options")
        if options:
            raise parse_failure(51074, "options set in both $regex and $options")
    return _pattern(path, pattern, options or own, state)


def _values_in(path: bytes, name: str, value: Value, state: State) -> tree.In:
    if value[0] != v.ARRAY:
        raise _bad(f"{name} needs an array")
    values, patterns = [], []
    for item in v.elements_of(value):
        if _is_operators(item, incomplete_reference=False):
            raise _bad(f"cannot nest $ under {name}")
        if item[0] == v.UNDEFINED:
            raise _bad("InMatchExpression equality cannot be undefined")
        if item[0] == v.REGEX:
            patterns.append(_pattern_of(path, item[1], state))
        else:
            values.append(item)
    return tree.In(path, tuple(values), tuple(patterns))


def _in(path: bytes, value: Value, state: State) -> tree.Node:
    return _values_in(path, "$in", value, state)


def _not_in(path: bytes, value: Value, state: State) -> tree.Node:
    return tree.Not(_values_in(path, "$nin", value, state))


def _not(path: bytes, value: Value, state: State) -> tree.Node:
    if value[0] == v.REGEX:
        return tree.Not(_pattern_of(path, value[1], state))
    if value[0] != v.OBJECT:
        raise _bad("$not needs a regex or a document")
    if value[1] == v.EMPTY_OBJECT[1]:
        raise _bad("$not cannot be empty")
    children = _parse_operators(path, value[1], state)
    return tree.Not(children[0] if len(children) == 1 else tree.And(tuple(children)))


def _exists(path: bytes, value: Value, state: State) -> tree.Node:
    node = tree.Exists(path)
    return node if v.truthy(value) else tree.Not(node)


def _type(path: bytes, value: Value, state: State) -> tree.Node:
    items = v.elements_of(value) if value[0] == v.ARRAY else [value]
    types = frozenset().union(*[types_of(item) for item in items])
    if not types:
        raise parse_failure(_FAILED_TO_PARSE, f"{_shown(path)} must match at least one type")
    return tree.TypeIs(path, types)


def whole_number(value: Value, what: str, *, code: int = _FAILED_TO_PARSE) -> int:
    """A number that must be whole and fit 64 bits, or ``code``."""
    if value[0] not in v.NUMERIC:
        raise parse_failure(code, f"Expected a number in: {what}")
    number = v.number_of(value)
    if isinstance(number, float | Decimal):
        if v.is_nan(number) or abs(number) == float("inf"):
            raise parse_failure(code, f"Expected an integer, but found NaN or infinity in: {what}")
        if number != int(number):
            raise parse_failure(code, f"Expected an integer: {what}")
        number = int(number)
    if not v.INT64_MIN <= number <= v.INT64_MAX:
        raise parse_failure(code, f"Cannot represent as a 64-bit integer: {what}")
    return number


def _size(path: bytes, value: Value, state: State) -> tree.Node:
    size = whole_number(value, "$size", code=_BAD_VALUE)
    if size < 0:
        raise _bad("Failed to parse $size. Expected a non-negative number in: $size")
    if size > v.INT32_MAX:
        raise _bad("Failed to parse $size. Cannot represent as a 32-bit integer: $size")
    return tree.Size(path, size)


def _mod(path: bytes, value: Value, state: State) -> tree.Node:
    if value[0] != v.ARRAY:
        raise _bad("malformed mod, needs to be an array")
    items = v.elements_of(value)
    if len(items) < 2:
        raise _bad("malformed mod, not enough elements")
    if len(items) > 2:
        raise _bad("malformed mod, too many elements")
    divisor = _coerced(items[0], "divisor")
    if divisor == 0:
        raise _bad("divisor cannot be 0")
    return tree.Mod(path, divisor, _coerced(items[1], "remainder"))


def _coerced(value: Value, what: str) -> int:
    """A number cut to a 64-bit integer."""
    if value[0] not in v.NUMERIC:
        raise _bad(f"malformed mod, {what} not a number")
    number = v.number_of(value)
    if v.is_nan(number) or abs(number) == float("inf"):
        raise _bad(f"malformed mod, {what} value is invalid :: caused by :: Unable to coerce NaN/Inf to integral type")
    number = int(number)
    if not v.INT64_MIN <= number <= v.INT64_MAX:
        raise _bad(f"malformed mod, {what} value is invalid :: caused by :: Out of bounds coercing to integral value")
    return number


def _bits(operator: str) -> FieldParser:
    def parse(path: bytes, value: Value, state: State) -> tree.Node:
        kind, data = value
        mask = 0
        if kind == v.ARRAY:
            positions = [whole_number(item, "bit position", code=_BAD_VALUE) for item in v.elements_of(value)]
            if any(position < 0 for position in positions):
                raise _bad("Failed to parse bit position. Expected a non-negative number")
            if any(position > v.INT32_MAX for position in positions):
                raise _bad("Failed to parse bit position. Cannot represent as a 32-bit integer")
        elif kind in v.NUMERIC:
            given = whole_number(value, operator)
            if given < 0:
                raise parse_failure(_FAILED_TO_PARSE, f"Expected a non-negative number in: {operator}")
            positions = _positions(given)
        elif kind == v.BINARY:
            positions = _positions(int.from_bytes(data[5:], "little"))
            for place, byte in enumerate(data[5:13]):
                # against a number, the server takes the bytes as signed: a high bit sets all bits above it
                mask |= (byte - 256 if byte > 127 else byte) << 8 * place
        else:
            raise _bad(f"{_shown(path)} takes an Array, a number, or a BinData but received: {operator}")
        for position in positions:
            mask |= 1 << min(position, 63)
        return tree.Bits(path, operator, tuple(positions), mask & 0xFFFFFFFFFFFFFFFF)

    return parse


def _positions(mask: int) -> list[int]:
    return [position for position in range(mask.bit_length()) if mask >> position & 1]


def _all(path: bytes, value: Value, state: State) -> tree.Node:
    if value[0] != v.ARRAY:
        raise _bad("$all needs an array")
    items = v.elements_of(value)
    if not items:
        return tree.Always(False)
    inner = state.deeper()
    children: list[tree.Node] = []
    first = v.fields_of(items[0][1])[:1] if items[0][0] == v.OBJECT else []
    if first and first[0][0] == b"$elemMatch":
        for kind, data in items:
            fields = v.fields_of(data)[:1] if kind == v.OBJECT else []
            if not fields or fields[0][0] != b"$elemMatch":
                raise _bad("$all/$elemMatch has to be consistent")
            children.append(_element_match(path, (fields[0][1], fields[0][2]), inner))
    else:
        for item in items:
            if item[0] == v.REGEX:
                children.append(_pattern_of(path, item[1], state))
            elif _is_operators(item, incomplete_reference=True):
                raise _bad("no $ expressions in $all")
            else:
                children.append(_comparison(path, "$eq", item))
    return children[0] if len(children) == 1 else tree.And(tuple(children))


def _element_match(path: bytes, value: Value, state: State) -> tree.Node:
    if value[0] != v.OBJECT:
        raise _bad("$elemMatch needs an Object")
    inner = replace(state, top_level=False)
    fields = v.fields_of(value[1])
    if _is_operators(value, incomplete_reference=True) and not _is_pathless(_shown(fields[0][0])):
        return tree.ElementMatchesValue(path, tuple(_parse_operators(b"", value[1], inner)))
    return tree.ElementMatchesObject(path, _parse_query(value[1], inner))


def _is_pathless(name: str) -> bool:
    return name in _TOP_LEVEL or name in PATHLESS


_FIELD: Final[dict[str, FieldParser]] = {
    "$eq": _comparing("$eq"),
    "$gt": _comparing("$gt"),
    "$gte": _comparing("$gte"),
    "$lt": _comparing("$lt"),
    "$lte": _comparing("$lte"),
    "$ne": _not_equal,
    "$in": _in,
    "$nin": _not_in,
    "$not": _not,
    "$exists": _exists,
    "$type": _type,
    "$size": _size,
    "$mod": _mod,
    "$all": _all,
    "$elemMatch": _element_match,
    "$bitsAllSet": _bits("$bitsAllSet"),
    "$bitsAllClear": _bits("$bitsAllClear"),
    "$bitsAnySet": _bits("$bitsAnySet"),
    "$bitsAnyClear": _bits("$bitsAnyClear"),
}

listed("query: comparison", "2.2", "$eq", "$gt", "$gte", "$lt", "$lte", "$ne", "$in", "$nin")
listed("query: logical", "2.2", "$and", "$or", "$nor", "$not")
listed("query: element", "2.2", "$exists", "$type")
listed("query: array", "2.2", "$all", "$elemMatch", "$size")
listed("query: evaluation", "3.6", "$expr")
listed("query: evaluation", "3.6", "$jsonSchema", note="names of fields without a dot: the server takes one for a path")
listed("query: evaluation", "2.2", "$mod")
listed("query: evaluation", "2.2", "$regex", "$options")
listed("query: bitwise", "3.2", "$bitsAllSet", "$bitsAllClear", "$bitsAnySet", "$bitsAnyClear")
listed("query: other", "2.2", "$comment")
listed("query: other", "3.6", "$alwaysTrue", "$alwaysFalse")
