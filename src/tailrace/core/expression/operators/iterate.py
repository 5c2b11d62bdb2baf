"""Operators that evaluate an expression for each element of an array, or take named arguments about one."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tailrace.core.expression.language.core import check_variable_write, parse_operand, runtime_operator
from tailrace.core.expression.language.expression import Bindings, Evaluate, Expression, Frame, Items
from tailrace.core.expression.language.registry import NOT_SUPPORTED, failure, parse_failure, register
from tailrace.core.expression.operators.arithmetic import float_of, to_long
from tailrace.core.expression.operators.array import as_int32
from tailrace.core.expression.operators.introsort import introsorted
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import Order
from tailrace.core.expression.values.value import Maybe, Value

_ARRAY: Final = "array"


def arguments(operand: Value, names: tuple[str, ...], unknown: tuple[int, str]) -> dict[str, Value]:
    """The named arguments of a document; ``unknown`` is the error for any other name."""
    result: dict[str, Value] = {}
    for name, kind, data in v.fields_of(operand[1]):
        shown = name.decode("utf-8", "replace")
        if shown not in names:
            raise parse_failure(unknown[0], f"{unknown[1]}: {shown}")
        result[shown] = (kind, data)
    return result


def _variable(given: dict[str, Value], bindings: Bindings) -> tuple[Bindings, int]:
    """The bindings with the element's variable: the name in "as", or "this"."""
    name = "this"
    if "as" in given:
        name = v.text_of(given["as"]) if given["as"][0] == v.STRING else ""
        check_variable_write(name, bindings)
    inner, (slot,) = bindings.bind(name)
    return inner, slot


def _map(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(16878, "$map only supports an object as its argument")
    given = arguments(operand, ("input", "as", "in"), (16879, "Unrecognized parameter to $map"))
    if "input" not in given:
        raise parse_failure(16880, "Missing 'input' parameter to $map")
    if "in" not in given:
        raise parse_failure(16882, "Missing 'in' parameter to $map")
    source = parse_operand(given["input"], bindings)
    inner, slot = _variable(given, bindings)
    body = parse_operand(given["in"], inner)
    items_of, each = _items(source, 16883, "input to $map must be an array not"), body.evaluate

    def evaluate(frame: Frame) -> Maybe:
        items = items_of(frame)
        if items is None:
            return v.NULL
        size = 0
        made = []
        for item in items:
            frame[slot] = item
            value = each(frame)
            made.append(value)
            size += 0 if value is None else len(value[1])
            if size > v.CONTAINER_LIMIT:
                v.too_large()
        return v.array_of(made)

    return runtime_operator("$map", [source, body], evaluate)


def _items(source: Expression, code: int, refusal: str) -> Items:
    """Reads the elements of the array that ``source`` gives, ``None`` of null. Raises ``code`` for any other value."""
    if source.items is not None:
        return source.items
    read = source.evaluate

    def items(frame: Frame) -> list[Value] | None:
        array = read(frame)
        if array is None or array[0] in v.NULLISH:
            return None
        if array[0] != v.ARRAY:
            raise failure(code, f"{refusal} {v.type_name(array)}")
        return v.elements_of(array)

    return items


register("$map", _ARRAY, "2.6", _map)


def _filter(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(28646, "$filter only supports an object as its argument")
    names = ("input", "as", "cond", "limit") if bindings.knows("5.2") else ("input", "as", "cond")
    given = arguments(operand, names, (28647, "Unrecognized parameter to $filter"))
    if "input" not in given:
        raise parse_failure(28648, "Missing 'input' parameter to $filter")
    if "cond" not in given:
        raise parse_failure(28650, "Missing 'cond' parameter to $filter")
    source = parse_operand(given["input"], bindings)
    inner, slot = _variable(given, bindings)
    condition = parse_operand(given["cond"], inner)
    limit = parse_operand(given["limit"], bindings) if "limit" in given else None
    items_of, passes = _items(source, 28651, "input to $filter must be an array not"), condition.evaluate

    def kept_items(frame: Frame) -> list[Value] | None:
        items = items_of(frame)
        if items is None:
            return None
        left = None if limit is None or not items else _limit(limit.evaluate(frame))
        kept = []
        for item in items:
            frame[slot] = item
            truth = passes(frame)
            if truth is not v.FALSE and v.truthy(truth):
                kept.append(item)
                if len(kept) == left:
                    break
        return kept

    def evaluate(frame: Frame) -> Maybe:
        kept = kept_items(frame)
        return v.NULL if kept is None else v.array_of(kept)

    args = [source, condition, *([] if limit is None else [limit])]
    return replace(runtime_operator("$filter", args, evaluate), items=kept_items)


def _limit(value: Maybe) -> int | None:
    if value is None or value[0] in v.NULLISH:
        return None
    number = as_int32(value) if value[0] in v.NUMERIC else None
    if number is None:
        raise failure(327391, "$filter: limit must be represented as a 32-bit integral value")
    if number <= 0:
        raise failure(327392, f"$filter: limit must be greater than 0: {number}")
    return number


register("$filter", _ARRAY, "3.2", _filter)


def _reduce(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(40075, f"$reduce requires an object as an argument, found: {v.type_name(operand)}")
    given = arguments(operand, ("input", "initialValue", "in"), (40076, "$reduce found an unknown argument"))
    for name, code in (("input", 40077), ("initialValue", 40078), ("in", 40079)):
        if name not in given:
            raise parse_failure(code, f"$reduce requires '{name}' to be specified")
    source = parse_operand(given["input"], bindings)
    initial = parse_operand(given["initialValue"], bindings)
    inner, (this, total) = bindings.bind("this", "value")
    body = parse_operand(given["in"], inner)
    items_of = _items(source, 40080, "$reduce requires that 'input' be an array, found:")
    start, each = initial.evaluate, body.evaluate

    def evaluate(frame: Frame) -> Maybe:
        items = items_of(frame)
        if items is None:
            return v.NULL
        value = start(frame)
        for item in items:
            frame[this], frame[total] = item, value
            value = each(frame)
        return value

    return runtime_operator("$reduce", [source, initial, body], evaluate)


register("$reduce", _ARRAY, "3.4", _reduce)


def _zip(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(34460, f"$zip only supports an object as an argument, found {v.type_name(operand)}")
    inputs: list[Expression] = []
    defaults: list[Expression] = []
    longest = False
    for name, kind, data in v.fields_of(operand[1]):
        if name in (b"inputs", b"defaults"):
            shown = name.decode()
            if kind != v.ARRAY:
                code = 34461 if name == b"inputs" else 34462
                raise parse_failure(code, f"{shown} must be an array of expressions, found {v.TYPE_NAMES[kind]}")
            items = [parse_operand(item, bindings) for item in v.elements_of((kind, data))]
            inputs, defaults = (items, defaults) if name == b"inputs" else (inputs, items)
        elif name == b"useLongestLength":
            if kind != v.BOOL:
                raise parse_failure(34463, f"useLongestLength must be a bool, found {v.TYPE_NAMES[kind]}")
            longest = data == b"\x01"
        else:
            raise parse_failure(34464, f"$zip found an unknown argument: {name.decode('utf-8', 'replace')}")
    if not inputs:
        raise parse_failure(34465, "$zip requires at least one input array")
    if defaults and not longest:
        raise parse_failure(34466, "cannot specify defaults unless useLongestLength is true")
    if defaults and len(defaults) != len(inputs):
        raise parse_failure(34467, "defaults and inputs must have the same length")
    return runtime_operator("$zip", [*inputs, *defaults], _zipping(inputs, defaults, longest))


def _zipping(inputs: list[Expression], defaults: list[Expression], longest: bool) -> Evaluate:
    reads = [item.evaluate for item in inputs]
    fill = [item.evaluate for item in defaults]

    def evaluate(frame: Frame) -> Maybe:
        columns, size = [], 0
        for read in reads:
            array = read(frame)
            if array is None or array[0] in v.NULLISH:
                return v.NULL
            if array[0] != v.ARRAY:
                raise failure(34468, f"$zip found a non-array expression in input: {v.type_name(array)}")
            size += len(array[1])
            if size > v.CONTAINER_LIMIT:
                v.too_large()
            columns.append(v.elements_of(array))
        lengths = [len(column) for column in columns]
        length = (max if longest else min)(lengths)
        fillers: list[Maybe] = [v.NULL] * len(columns)
        if fill and min(lengths) != max(lengths):
            fillers = [item(frame) for item in fill]
        return v.array_of(_row(columns, fillers, row) for row in range(length))

    return evaluate


def _row(columns: list[list[Value]], fillers: list[Maybe], row: int) -> Value:
    found = [column[row] if row < len(column) else filler for column, filler in zip(columns, fillers, strict=True)]
    if None in found:
        raise failure(NOT_SUPPORTED, "$zip with a default that is missing is not supported")
    return v.array_of(found)


register("$zip", _ARRAY, "3.4", _zip)

# ── sorting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sort_array(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(2942500, f"$sortArray requires an object as an argument, found: {v.type_name(operand)}")
    given = arguments(operand, ("input", "sortBy"), (2942501, "$sortArray found an unknown argument"))
    if "input" not in given:
        raise parse_failure(2942502, "$sortArray requires 'input' to be specified")
    if "sortBy" not in given:
        raise parse_failure(2942503, "$sortArray requires 'sortBy' to be specified")
    source = parse_operand(given["input"], bindings)
    sort = _sort(given["sortBy"], bindings.order)
    read = source.evaluate

    def evaluate(frame: Frame) -> Maybe:
        array = read(frame)
        if array is None or array[0] in v.NULLISH:
            return v.NULL
        if array[0] != v.ARRAY:
            raise failure(
                2942504, f"The input argument to $sortArray must be an array, but was of type: {v.type_name(array)}"
            )
        return v.array_of(sort(v.elements_of(array)))

    return runtime_operator("$sortArray", [source], evaluate)


Sort = Callable[[list[Value]], list[Value]]


def _sort(by: Value, order: Order) -> Sort:
    if by[0] in v.NUMERIC:
        direction = v.number_of(by)
        if direction not in (1, -1):
            raise parse_failure(2942506, "The $sort element value must be either 1 or -1")
        sign = int(direction)
        return lambda items: introsorted(items, lambda a, b: order.compare(a, b) * sign < 0)
    if by[0] != v.OBJECT:
        raise parse_failure(
            2942507,
            "The $sort is invalid: use 1/-1 to sort the whole element, or {field:1/-1} to sort embedded fields",
        )
    keys = []
    for name, kind, data in v.fields_of(by[1]):
        path = _sort_path(name)
        if kind not in v.NUMERIC or v.number_of((kind, data)) not in (1, -1):
            raise parse_failure(2942505, "BadValue: The sort element value must be either 1 or -1")
        keys.append((path, v.number_of((kind, data)) == -1))
    if not keys:
        raise parse_failure(2942505, "BadValue: The sort pattern is empty when it should be a set of fields.")
    return lambda items: _sorted_by(items, keys, order)


def _sort_path(name: bytes) -> tuple[bytes, ...]:
    if not all(name.split(b".")):  # names may begin with a dollar here
        raise parse_failure(2942505, "BadValue: FieldPath of the sort pattern is not valid")
    return tuple(name.split(b"."))


def _sorted_by(items: list[Value], keys: list[tuple[tuple[bytes, ...], bool]], order: Order) -> list[Value]:
    keyed = [([_sort_value(item, path) for path, _ in keys], item) for item in items]

    def less(a: tuple[list[Value], Value], b: tuple[list[Value], Value]) -> bool:
        for left, right, (_, descending) in zip(a[0], b[0], keys, strict=True):
            comparison = order.compare(left, right)
            if comparison:
                return (comparison < 0) != descending
        return False

    return [item for _, item in introsorted(keyed, less)]


def _sort_value(item: Value, path: tuple[bytes, ...]) -> Value:
    """What the pattern finds in one element. An array on the way would give several keys: not reproduced."""
    value: Maybe = item
    for name in path:
        if value is None or value[0] != v.OBJECT:
            if value is not None and value[0] == v.ARRAY:
                raise failure(NOT_SUPPORTED, "$sortArray by a field inside an array is not supported")
            return v.NULL
        value = v.field(value[1], name)
    if value is not None and value[0] == v.ARRAY:
        raise failure(NOT_SUPPORTED, "$sortArray by a field that holds an array is not supported")
    return v.NULL if value is None else value


register("$sortArray", _ARRAY, "5.2", _sort_array, note="sort keys that are arrays are refused when they are met")


# ── the first, last, smallest, largest few ───────────────────────────────────────────────────────────────────────────


def _some(name: str, group: str, choose: Callable[[list[Value], int, Order], list[Value]]) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        if operand[0] != v.OBJECT:
            code = 5787801 if name in ("$firstN", "$lastN") else 5787900
            raise parse_failure(code, f"specification must be an object; found {v.type_name(operand)}")
        given = arguments(operand, ("n", "input"), (5787901, "Unknown argument for 'n' operator"))
        if "n" not in given:
            raise parse_failure(5787906, "Missing value for 'n'")
        if "input" not in given:
            raise parse_failure(5787907, "Missing value for 'input'")
        count = parse_operand(given["n"], bindings.unfolded())
        source = parse_operand(given["input"], bindings.unfolded())
        wanted, read = count.evaluate, source.evaluate

        def evaluate(frame: Frame) -> Maybe:
            size = _count(wanted(frame))
            array = read(frame)
            if array is None or array[0] != v.ARRAY:
                raise failure(5788200, "Input must be an array")
            return v.array_of(choose(v.elements_of(array), size, bindings.order))

        return runtime_operator(name, [count, source], evaluate)

    register(name, group, "5.2", parse)


def _count(value: Maybe) -> int:
    if value is None or value[0] not in v.NUMERIC:
        raise failure(5787902, f"Value for 'n' must be of integral type, but found {v.type_name(value)}")
    number = to_long(value)
    if value[0] in (v.DOUBLE, v.DECIMAL) and float(number) != float_of(value):
        raise failure(5787903, "Value for 'n' must be of integral type")
    if number <= 0:
        raise failure(5787908, f"'n' must be greater than 0, found {number}")
    return number


def _without_null(items: list[Value]) -> list[Value]:
    return [item for item in items if item[0] not in v.NULLISH]


def _largest(items: list[Value], n: int, order: Order) -> list[Value]:
    """Of equal values the server keeps those that came first, until a greater one pushes out the first of them."""
    kept: list[Value] = []
    key = functools.cmp_to_key(order.compare)
    for item in _without_null(items):
        if len(kept) == n:
            if order.compare(item, kept[0]) <= 0:
                continue
            del kept[0]
        bisect.insort_right(kept, item, key=key)
    return kept[::-1]


_some("$firstN", _ARRAY, lambda items, n, order: items[:n])
_some("$lastN", _ARRAY, lambda items, n, order: items[-n:])
_some("$minN", _ARRAY, lambda items, n, order: order.sorted(_without_null(items))[:n])
_some("$maxN", _ARRAY, _largest)
