"""String operators, by bytes and by code points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final

from tailrace.core.expression.language.core import (
    binary,
    operator_of,
    parse_operand,
    runtime_operator,
    unary,
    variadic,
    versioned_variadic,
)
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import check_buffer, failure, not_exact, parse_failure, register
from tailrace.core.expression.language.version import Version, buffer_limit
from tailrace.core.expression.operators.arithmetic import to_long
from tailrace.core.expression.operators.array import as_int32, index_bound
from tailrace.core.expression.operators.calendar import iso_string
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

_STRING: Final = "string"


def coerced(value: Maybe) -> bytes:
    """The server's old coercion to a string, as UTF-8: null is empty, numbers and dates are written out."""
    if value is None or value[0] in v.NULLISH:
        return b""
    kind = value[0]
    if kind in (v.STRING, v.SYMBOL, v.CODE):
        return v.bytes_of(value)
    if kind in v.NUMERIC:
        number = v.number_of(value)
        if isinstance(number, float):
            return f"{number:g}".encode()  # six digits here; $toString writes as many as it needs
        return number_text(value).encode()
    if kind == v.DATE:
        return iso_string(v.integer_of(value)).encode()
    if kind == v.TIMESTAMP:
        raise not_exact("a timestamp as text")
    raise failure(16007, f"can't convert from BSON type {v.type_name(value)} to String")


def number_text(value: Value) -> str:
    """A number as the server writes it: doubles with up to 17 digits but no more than needed."""
    if value[0] == v.DECIMAL:
        exact = v.decimal_of(value)
        return "NaN" if exact.is_nan() else str(exact)
    number = v.number_of(value)
    if isinstance(number, float):
        return double_text(number)
    return str(number)


def double_text(number: float) -> str:
    if v.is_nan(number):
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    if 0 < abs(number) < sys.float_info.min:
        return repr(number)  # below the normal doubles fewer digits are enough, and they are not the rounded ones
    shown = f"{number:.15g}"
    if float(shown) != number:
        shown = f"{number:.16g}" if float(f"{number:.16g}") == number else f"{number:.17g}"
    return shown


def _concat(version: Version) -> Callable[[Iterable[Maybe]], Maybe]:
    limit = buffer_limit(version)

    def concat(args: Iterable[Maybe]) -> Maybe:
        parts, size = [], 0
        for value in args:
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            if value[0] != v.STRING:
                raise failure(16702, f"$concat only supports strings, not {v.type_name(value)}")
            parts.append(v.bytes_of(value))
            size += len(parts[-1])
            check_buffer(size, limit)
        return v.string_of(b"".join(parts))

    return concat


versioned_variadic("$concat", _STRING, "2.4", _concat)
#: Only ASCII letters change their case.
unary("$toLower", _STRING, "2.2", lambda value: v.string_of(coerced(value).lower()))
unary("$toUpper", _STRING, "2.2", lambda value: v.string_of(coerced(value).upper()))


def _strcasecmp(a: Maybe, b: Maybe) -> Maybe:
    left, right = coerced(a).upper(), coerced(b).upper()
    return v.int32((left > right) - (left < right))


binary("$strcasecmp", _STRING, "2.2", _strcasecmp)


def _length(name: str, code: int, measure: Callable[[Value], int]) -> None:
    def apply(value: Maybe) -> Maybe:
        if value is None or value[0] != v.STRING:
            raise failure(code, f"{name} requires a string argument, found: {v.type_name(value)}")
        return v.int32(measure(value))

    unary(name, _STRING, "3.4", apply)


_length("$strLenBytes", 34473, lambda value: len(v.bytes_of(value)))
_length("$strLenCP", 34471, lambda value: len(v.text_of(value)))


def _substr_bytes(args: Iterable[Maybe]) -> Maybe:
    source, start, size = args
    data = coerced(source)
    if start is None or start[0] not in v.NUMERIC:
        raise failure(
            16034, f"$substrBytes:  starting index must be a numeric type (is BSON type {v.type_name(start)})"
        )
    if size is None or size[0] not in v.NUMERIC:
        raise failure(16035, f"$substrBytes:  length must be a numeric type (is BSON type {v.type_name(size)})")
    low = to_long(start)
    if low < 0:
        raise failure(50752, f"$substrBytes:  starting index must be non-negative (got: {low})")
    length = to_long(size)
    if low >= len(data):
        return v.EMPTY_STRING
    if data[low] & 0xC0 == 0x80:
        raise failure(28656, "$substrBytes:  Invalid range, starting index is a UTF-8 continuation byte.")
    high = len(data) if length < 0 else low + length
    if high < len(data) and data[high] & 0xC0 == 0x80:
        raise failure(28657, "$substrBytes:  Invalid range, ending index is in the middle of a UTF-8 character.")
    return v.string_of(data[low:high])


variadic("$substrBytes", _STRING, "3.4", _substr_bytes, low=3, high=3)
variadic("$substr", _STRING, "2.4", _substr_bytes, low=3, high=3)


def _substr_points(args: Iterable[Maybe]) -> Maybe:
    source, start, size = args
    text = coerced(source).decode("utf-8", "surrogateescape")
    if start is None or start[0] not in v.NUMERIC:
        raise failure(34450, f"$substrCP: starting index must be a numeric type (is BSON type {v.type_name(start)})")
    low = as_int32(start)
    if low is None:
        raise failure(34451, "$substrCP: starting index cannot be represented as a 32-bit integral value")
    if size is None or size[0] not in v.NUMERIC:
        raise failure(34452, f"$substrCP: length must be a numeric type (is BSON type {v.type_name(size)})")
    length = as_int32(size)
    if length is None:
        raise failure(34453, "$substrCP: length cannot be represented as a 32-bit integral value")
    if length < 0:
        raise failure(34454, "$substrCP: length must be a nonnegative integer.")
    if low < 0:
        raise failure(34455, "$substrCP: the starting index must be nonnegative integer.")
    return v.string(text[low : low + length])


variadic("$substrCP", _STRING, "3.4", _substr_points, low=3, high=3)


def _index_of(name: str, codes: tuple[int, int], by_points: bool) -> None:
    def apply(args: Iterable[Maybe]) -> Maybe:
        given = iter(args)
        source = next(given)
        if source is None or source[0] in v.NULLISH:
            return v.NULL
        if source[0] != v.STRING:
            raise failure(codes[0], f"{name} requires a string as the first argument, found: {v.type_name(source)}")
        wanted = next(given)
        if wanted is None or wanted[0] != v.STRING:
            raise failure(codes[1], f"{name} requires a string as the second argument, found: {v.type_name(wanted)}")
        bounds = [index_bound(name, bound, which) for which, bound in zip(("starting", "ending"), given, strict=False)]
        start = bounds[0] if bounds else 0
        end = bounds[1] if len(bounds) > 1 else None
        find = _find_points if by_points else _find_bytes
        return v.int32(find(source, wanted, start, end))

    variadic(name, _STRING, "3.4", apply, low=2, high=4)


def _find_bytes(source: Value, wanted: Value, start: int, end: int | None) -> int:
    data, token = v.bytes_of(source), v.bytes_of(wanted)
    stop = len(data) if end is None else min(end, len(data))
    if start > len(data) or stop < start:
        return -1
    return data.find(token, start, stop)


def _find_points(source: Value, wanted: Value, start: int, end: int | None) -> int:
    text, token = v.text_of(source), v.text_of(wanted)
    if not text and not token and start == 0:
        return 0  # whatever the end
    stop = len(text) if end is None else min(end, len(text))
    for place in range(start, stop):
        if text.startswith(token, place):
            return place
    return -1


_index_of("$indexOfBytes", (40091, 40092), False)
_index_of("$indexOfCP", (40093, 40094), True)


def _split(a: Maybe, b: Maybe) -> Maybe:
    if v.nullish(a) or v.nullish(b):
        return v.NULL
    for value, code, which in ((a, 40085, "first"), (b, 40086, "second")):
        if value is None or value[0] != v.STRING:
            raise failure(
                code,
                f"$split requires an expression that evaluates to a string as a {which} argument, "
                f"found: {v.type_name(value)}",
            )
    separator = v.bytes_of(b)  # type: ignore[arg-type]
    if not separator:
        raise failure(40087, "$split requires a non-empty separator")
    return v.array_of(map(v.string_of, v.bytes_of(a).split(separator)))  # type: ignore[arg-type]


binary("$split", _STRING, "3.4", _split)


# ── trimming and replacing ───────────────────────────────────────────────────────────────────────────────────────────

#: What is trimmed by default: NUL, ASCII white space, and the Unicode spaces.
_SPACES: Final = "\0 \t\n\v\f\r\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"


def _trim(name: str, strip: Callable[[str, str], str]) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        if operand[0] != v.OBJECT:
            raise parse_failure(50696, f"{name} only supports an object as an argument, found {v.type_name(operand)}")
        source: Expression | None = None
        letters: Expression | None = None
        for field_name, kind, data in v.fields_of(operand[1]):
            if field_name == b"input":
                source = parse_operand((kind, data), bindings)
            elif field_name == b"chars":
                letters = parse_operand((kind, data), bindings)
            else:
                shown = field_name.decode("utf-8", "replace")
                raise parse_failure(50694, f"{name} found an unknown argument: {shown}")
        if source is None:
            raise parse_failure(50695, f"{name} requires an 'input' field")
        read, chars = source.evaluate, None if letters is None else letters.evaluate

        def evaluate(frame: Frame) -> Maybe:
            value = read(frame)
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            if value[0] != v.STRING:
                raise failure(
                    50699, f"{name} requires its input to be a string, got a value of type {v.type_name(value)}"
                )
            if chars is None:
                return v.string(strip(v.text_of(value), _SPACES))
            found = chars(frame)
            if found is None or found[0] in v.NULLISH:
                return v.NULL
            if found[0] != v.STRING:
                raise failure(
                    50700, f"{name} requires 'chars' to be a string, got a value of type {v.type_name(found)}"
                )
            wanted = v.text_of(found)
            return v.string(strip(v.text_of(value), wanted)) if wanted else value

        return operator_of(name, [source] if letters is None else [source, letters], evaluate, bindings)

    register(name, _STRING, "4.0", parse)


_trim("$trim", str.strip)
_trim("$ltrim", str.lstrip)
_trim("$rtrim", str.rstrip)


def _replace(name: str, count: int) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        if operand[0] != v.OBJECT:
            raise parse_failure(51751, f"{name} requires an object as an argument, found: {v.type_name(operand)}")
        given: dict[str, Expression] = {}
        for field_name, kind, data in v.fields_of(operand[1]):
            shown = field_name.decode("utf-8", "replace")
            if shown not in ("input", "find", "replacement"):
                raise parse_failure(51750, f"{name} found an unknown argument: {shown}")
            given[shown] = parse_operand((kind, data), bindings)
        for shown, code in (("input", 51749), ("find", 51748), ("replacement", 51747)):
            if shown not in given:
                raise parse_failure(code, f"{name} requires '{shown}' to be specified")
        args = [given["input"], given["find"], given["replacement"]]
        limit = buffer_limit(bindings.version)
        closures = [argument.evaluate for argument in args]

        def evaluate(frame: Frame) -> Maybe:
            values = [closure(frame) for closure in closures]
            for value, shown, code in zip(values, ("input", "find", "replacement"), (51746, 51745, 51744), strict=True):
                if value is not None and value[0] not in v.NULLISH and value[0] != v.STRING:
                    raise failure(code, f"{name} requires that '{shown}' be a string, found: {v.type_name(value)}")
            if any(value is None or value[0] in v.NULLISH for value in values):
                return v.NULL
            text, find, new = (v.bytes_of(value) for value in values if value is not None)
            return v.string_of(_replaced(text, find, new, count, limit))

        return runtime_operator(name, args, evaluate)

    register(name, _STRING, "4.4", parse)


def _replaced(text: bytes, find: bytes, new: bytes, count: int, limit: int) -> bytes:
    times = 1 if count == 1 and find in text else text.count(find)
    check_buffer(len(text) + times * (len(new) - len(find)), limit)
    if find:
        return text.replace(find, new, count)
    if count == 1:
        return new + text
    letters = [bytes([byte]) for byte in text]
    return new + b"".join(letter + new for letter in letters)


_replace("$replaceOne", 1)
_replace("$replaceAll", -1)
