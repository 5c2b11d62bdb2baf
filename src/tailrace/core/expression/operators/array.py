"""Array operators that take evaluated arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tailrace.core.expression.language.core import (
    binary,
    check_arity,
    operator_of,
    ordered_binary,
    parse_arguments,
    unary,
    variadic,
)
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import failure, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import Order
from tailrace.core.expression.values.value import Maybe, Value

_ARRAY: Final = "array"
#: How much memory the server lets ``$range`` take, and what it counts for one element.
_RANGE_LIMIT: Final = 104857600
_RANGE_ELEMENT: Final = 16


def as_int32(value: Value) -> int | None:
    """A number that is a whole int, or ``None``."""
    number = v.number_of(value)
    if v.is_nan(number) or abs(number) == float("inf") or number != int(number):
        return None
    return int(number) if v.INT32_MIN <= number <= v.INT32_MAX else None


def _element_at(array: Maybe, index: Maybe) -> Maybe:
    if v.nullish(array) or v.nullish(index):
        return v.NULL
    if array[0] != v.ARRAY:  # type: ignore[index]
        raise failure(28689, f"$arrayElemAt's first argument must be an array, but is {v.type_name(array)}")
    if index[0] not in v.NUMERIC:  # type: ignore[index]
        raise failure(28690, f"$arrayElemAt's second argument must be a numeric value, but is {v.type_name(index)}")
    place = as_int32(index)  # type: ignore[arg-type]
    if place is None:
        raise failure(28691, "$arrayElemAt's second argument must be representable as a 32-bit integer")
    items = v.elements_of(array)  # type: ignore[arg-type]
    return items[place] if -len(items) <= place < len(items) else None


binary("$arrayElemAt", _ARRAY, "3.2", _element_at)


def _end_of(name: str, place: int) -> None:
    def apply(array: Maybe) -> Maybe:
        if array is None or array[0] in v.NULLISH:
            return v.NULL
        if array[0] != v.ARRAY:
            raise failure(28689, f"{name}'s argument must be an array, but is {v.type_name(array)}")
        items = v.elements_of(array)
        return items[place] if items else None

    unary(name, _ARRAY, "4.4", apply)


_end_of("$first", 0)
_end_of("$last", -1)


def _concat_arrays(args: Iterable[Maybe]) -> Maybe:
    items: list[Value] = []
    size = 0
    for array in args:
        if array is None or array[0] in v.NULLISH:
            return v.NULL
        if array[0] != v.ARRAY:
            raise failure(28664, f"$concatArrays only supports arrays, not {v.type_name(array)}")
        size += len(array[1])
        if size > v.CONTAINER_LIMIT:
            v.too_large()
        items += v.elements_of(array)
    return v.array_of(items)


variadic("$concatArrays", _ARRAY, "3.2", _concat_arrays, associative=True)


def _in(order: Order) -> Callable[[Maybe, Maybe], Maybe]:
    def apply(wanted: Maybe, array: Maybe) -> Maybe:
        if array is None or array[0] != v.ARRAY:
            raise failure(40081, f"$in requires an array as a second argument, found: {v.type_name(array)}")
        return v.boolean(any(order.equal(wanted, item) for item in v.elements_of(array)))

    return apply


ordered_binary("$in", _ARRAY, "3.4", _in)


def index_bound(name: str, value: Maybe, which: str) -> int:
    """A start or an end of a search: a whole int that is not negative."""
    place = as_int32(value) if value is not None and value[0] in v.NUMERIC else None
    if place is None:
        raise failure(40096, f"{name}requires an integral {which} index, found a value of type: {v.type_name(value)}")
    if place < 0:
        raise failure(40097, f"{name} requires a nonnegative {which} index, found: {place}")
    return place


def _index_of(operand: Value, bindings: Bindings) -> Expression:
    """The array, the bounds, then what is searched for: errors are raised in that order."""
    args = parse_arguments(operand, bindings)
    check_arity("$indexOfArray", len(args), 2, 4)
    read, wanted, *bounds = [argument.evaluate for argument in args]
    equal = bindings.order.equal
    if args[0].constant and bindings.folding and not v.nullish(args[0].value) and v.type_name(args[0].value) != "array":
        bindings.fail_later(
            50809 if not all(argument.constant for argument in args) else 40090,
            f"First operand of $indexOfArray must be an array. It is of type: {v.type_name(args[0].value)}",
        )

    def evaluate(frame: Frame) -> Maybe:
        array = read(frame)
        if array is None or array[0] in v.NULLISH:
            return v.NULL
        if array[0] != v.ARRAY:
            raise failure(40090, f"$indexOfArray requires an array as a first argument, found: {v.type_name(array)}")
        items = v.elements_of(array)
        start = index_bound("$indexOfArray", bounds[0](frame), "starting") if bounds else 0
        end = index_bound("$indexOfArray", bounds[1](frame), "ending") if len(bounds) > 1 else len(items)
        value = wanted(frame)
        for place in range(start, min(end, len(items))):
            if equal(items[place], value):
                return v.int32(place)
        return v.int32(-1)

    return operator_of("$indexOfArray", args, evaluate, bindings)


register("$indexOfArray", _ARRAY, "3.4", _index_of)


def _range(args: Iterable[Maybe]) -> Maybe:
    given = iter(args)
    start, end = next(given), next(given)
    low = _range_bound(start, 34443, 34444, "starting value")
    high = _range_bound(end, 34445, 34446, "ending value")
    step = 1
    for value in given:
        step = _range_bound(value, 34447, 34448, "step value")
    if step == 0:
        raise failure(34449, "$range requires a non-zero step value")
    numbers = range(low, high, step)
    needed = len(numbers) * _RANGE_ELEMENT + 40
    if needed > _RANGE_LIMIT:
        raise failure(146, f"$range would use too much memory ({needed} bytes) and cannot spill to disk")
    return v.array_of(map(v.int32, numbers))


def _range_bound(value: Maybe, type_code: int, size_code: int, what: str) -> int:
    if value is None or value[0] not in v.NUMERIC:
        raise failure(type_code, f"$range requires a numeric {what}, found value of type: {v.type_name(value)}")
    number = as_int32(value)
    if number is None:
        raise failure(size_code, f"$range requires a {what} that can be represented as a 32-bit integer")
    return number


variadic("$range", _ARRAY, "3.4", _range, low=2, high=3)


def _reverse(array: Maybe) -> Maybe:
    if array is None or array[0] in v.NULLISH:
        return v.NULL
    if array[0] != v.ARRAY:
        raise failure(34435, f"The argument to $reverseArray must be an array, but was of type: {v.type_name(array)}")
    return v.array_of(v.elements_of(array)[::-1])


unary("$reverseArray", _ARRAY, "3.4", _reverse)


def _size(array: Maybe) -> Maybe:
    if array is None or array[0] != v.ARRAY:
        raise failure(17124, f"The argument to $size must be an array, but was of type: {v.type_name(array)}")
    return v.int32(v.count_of(array[1]))


unary("$size", _ARRAY, "2.6", _size)
unary("$isArray", _ARRAY, "3.2", lambda value: v.boolean(value is not None and value[0] == v.ARRAY))


def _slice(args: Iterable[Maybe]) -> Maybe:
    given = iter(args)
    array, second = next(given), next(given)
    if array is None or second is None or array[0] in v.NULLISH or second[0] in v.NULLISH:
        return v.NULL
    if array[0] != v.ARRAY:
        raise failure(28724, f"First argument to $slice must be an array, but is of type: {v.type_name(array)}")
    if second[0] not in v.NUMERIC:
        raise failure(
            28725, f"Second argument to $slice must be a numeric value, but is of type: {v.type_name(second)}"
        )
    place = as_int32(second)
    if place is None:
        raise failure(28726, "Second argument to $slice can't be represented as a 32-bit integer")
    items = v.elements_of(array)
    rest = list(given)
    if not rest:
        return v.array_of(items[:place] if place >= 0 else items[place:])
    count = rest[0]
    if count is None or count[0] in v.NULLISH:
        return v.NULL
    if count[0] not in v.NUMERIC:
        raise failure(28727, f"Third argument to $slice must be numeric, but is of type: {v.type_name(count)}")
    wanted = as_int32(count)
    if wanted is None:
        raise failure(28728, "Third argument to $slice can't be represented as a 32-bit integer")
    if wanted <= 0:
        raise failure(28729, f"Third argument to $slice must be positive: {wanted}")
    start = max(0, len(items) + place) if place < 0 else place
    return v.array_of(items[start : start + wanted])


variadic("$slice", _ARRAY, "3.2", _slice, low=2, high=3)


def _array_to_object(array: Maybe) -> Maybe:
    if array is None or array[0] in v.NULLISH:
        return v.NULL
    if array[0] != v.ARRAY:
        raise failure(40386, f"$arrayToObject requires an array input, found: {v.type_name(array)}")
    items = v.elements_of(array)
    result: dict[bytes, Value] = {}
    if items and items[0][0] not in (v.ARRAY, v.OBJECT):
        raise failure(40398, f"Unrecognised input type format for $arrayToObject: {v.type_name(items[0])}")
    for item in items:
        name, value = (_pair if items[0][0] == v.ARRAY else _key_and_value)(item)
        result[name] = value
    return v.object_of(result.items())


def _pair(item: Value) -> tuple[bytes, Value]:
    if item[0] != v.ARRAY:
        raise failure(40396, f"$arrayToObject requires a consistent input format, now found: {v.type_name(item)}")
    parts = v.elements_of(item)
    if len(parts) != 2:
        raise failure(40397, f"$arrayToObject requires an array of size 2 arrays,found array of size: {len(parts)}")
    key, value = parts
    if key[0] != v.STRING:
        raise failure(40395, f"$arrayToObject requires a key of type string. Found key type: {v.type_name(key)}")
    name = v.bytes_of(key)
    if b"\x00" in name:
        raise failure(4940400, "Key field cannot contain an embedded null byte")
    return name, value


def _key_and_value(item: Value) -> tuple[bytes, Value]:
    if item[0] != v.OBJECT:
        raise failure(40391, f"$arrayToObject requires a consistent input format, now found: {v.type_name(item)}")
    fields = v.fields_of(item[1])
    if len(fields) != 2:
        raise failure(
            40392,
            f"$arrayToObject requires an object keys of 'k' and 'v'. Found incorrect number of keys:{len(fields)}",
        )
    key, value = v.field(item[1], b"k"), v.field(item[1], b"v")
    if key is None or value is None:
        raise failure(40393, "$arrayToObject requires an object with keys 'k' and 'v'. Missing either or both keys")
    if key[0] != v.STRING:
        raise failure(40394, f"$arrayToObject requires a 'k' of type string. Found type: {v.type_name(key)}")
    name = v.bytes_of(key)
    if b"\x00" in name:
        raise failure(4940401, "Key field cannot contain an embedded null byte")
    return name, value


unary("$arrayToObject", _ARRAY, "3.4", _array_to_object)


def _object_to_array(value: Maybe) -> Maybe:
    if value is None or value[0] in v.NULLISH:
        return v.NULL
    if value[0] != v.OBJECT:
        raise failure(40390, f"$objectToArray requires a document input, found: {v.type_name(value)}")
    return v.array_of(
        [v.object_of([(b"k", v.string_of(name)), (b"v", (kind, data))]) for name, kind, data in v.fields_of(value[1])]
    )


unary("$objectToArray", "object", "3.4", _object_to_array)
