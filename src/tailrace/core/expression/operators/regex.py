"""``$regexFind``, ``$regexFindAll`` and ``$regexMatch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from tailrace.core.expression.language import pattern as regular
from tailrace.core.expression.language.core import parse_operand, runtime_operator
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.pattern import CompiledPattern
from tailrace.core.expression.language.registry import failure, parse_failure, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import TailraceError

_STRING: Final = "string"

#: From the operator's name, the pattern and the input's bytes.
RegexResult = Callable[[str, CompiledPattern, bytes], Value]


def _operator(name: str, nothing: Value, answer: RegexResult) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        if operand[0] != v.OBJECT:
            raise parse_failure(51103, f"{name} expects an object of named arguments but found: {v.type_name(operand)}")
        given: dict[str, Expression] = {}
        for field_name, kind, data in v.fields_of(operand[1]):
            shown = field_name.decode("utf-8", "replace")
            if shown not in ("input", "regex", "options"):
                raise parse_failure(31024, f"{name} found an unknown argument: {shown}")
            given[shown] = parse_operand((kind, data), bindings)
        if "input" not in given:
            raise parse_failure(31022, f"{name} requires 'input' parameter")
        if "regex" not in given:
            raise parse_failure(31023, f"{name} requires 'regex' parameter")
        return _built(name, given, (nothing, answer), bindings)

    register(name, _STRING, "4.2", parse)


def _built(
    name: str, given: dict[str, Expression], result: tuple[Value, RegexResult], bindings: Bindings
) -> Expression:
    nothing, answer = result
    source, pattern, options = given["input"], given["regex"], given.get("options")
    read = source.evaluate
    fixed: CompiledPattern | None = None
    later = bindings.later_patterns
    known = bindings.folding and pattern.constant and (options is None or options.constant)
    if known:
        try:
            fixed = _compiled(name, pattern.value, None if options is None else options.value, later)
        except TailraceError as error:  # the server compiles a constant pattern when it optimizes
            if error.code == 115:
                raise
            bindings.fail_later(error.code, error.message)

    def evaluate(frame: Frame) -> Maybe:
        value = read(frame)
        compiled = fixed
        source_pattern: Maybe = None
        found: Maybe = None
        if not known:
            source_pattern = pattern.evaluate(frame)
            found = None if options is None else options.evaluate(frame)
        missing = value is None or value[0] in v.NULLISH
        if value is not None and not missing and value[0] != v.STRING:
            raise failure(51104, f"{name} needs 'input' to be of type string")
        if not known:
            compiled = _compiled(name, source_pattern, found, later)
        if missing or compiled is None:
            return nothing
        return answer(name, compiled, v.bytes_of(value))  # type: ignore[arg-type]

    return runtime_operator(name, [source, pattern, *([] if options is None else [options])], evaluate)


def _compiled(name: str, pattern: Maybe, options: Maybe, later: bool) -> CompiledPattern | None:
    """The pattern of an evaluated argument; ``None`` for null."""
    source = _source(name, pattern)
    letters = _options(name, pattern, options)
    if source is None:
        return None
    try:
        return regular.compile_pattern(source, letters, later=later)
    except TailraceError as error:
        if error.code == 51091:
            raise failure(51111, f"Invalid Regex in {name}: {error.message}") from None
        raise


def _source(name: str, pattern: Maybe) -> bytes | None:
    if pattern is None or pattern[0] in v.NULLISH:
        return None
    if pattern[0] == v.REGEX:
        return pattern[1].split(b"\x00")[0]
    if pattern[0] != v.STRING:
        raise failure(51105, f"{name} needs 'regex' to be of type string or regex")
    source = v.bytes_of(pattern)
    if b"\x00" in source:
        raise failure(51109, f"{name}: regular expression cannot contain an embedded null byte")
    return source


def _options(name: str, pattern: Maybe, options: Maybe) -> bytes:
    own = pattern[1].split(b"\x00")[1] if pattern is not None and pattern[0] == v.REGEX else b""
    letters = own
    if options is not None and options[0] not in v.NULLISH:
        if options[0] != v.STRING:
            raise failure(51106, f"{name} needs 'options' to be of type string")
        if own:
            raise failure(51107, f"{name}: found regex option(s) specified in both 'regex' and 'option' fields")
        letters = v.bytes_of(options)
        if b"\x00" in letters:
            raise failure(51110, f"{name}: regular expression options cannot contain an embedded null byte")
    regular.check_options(letters)
    return letters


def _found(match: Any, data: bytes, index: int) -> Value:
    spans = [match.span(number) for number in range(match.re.groups + 1)]
    parts = [v.NULL if start < 0 else v.string_of(data[start:end]) for start, end in spans]
    return v.object_of([(b"match", parts[0]), (b"idx", v.int32(index)), (b"captures", v.array_of(parts[1:]))])


def _letters(data: bytes) -> int:
    """How many code points a piece of UTF-8 holds."""
    return len(data) if data.isascii() else len(data.decode("utf-8", "replace"))


def _find(name: str, pattern: CompiledPattern, data: bytes) -> Value:
    match = pattern.search(name, data, 0)
    return v.NULL if match is None else _found(match, data, _letters(data[: match.start()]))


def _find_all(name: str, pattern: CompiledPattern, data: bytes) -> Value:
    """Every match; after an empty one the search goes on one code point further."""
    return v.array_of(_all_matches(name, pattern, data))


def _all_matches(name: str, pattern: CompiledPattern, data: bytes) -> Iterator[Value]:
    start, counted, index, size = 0, 0, 0, 0
    while True:
        match = pattern.search(name, data, start)
        if match is None:
            return
        first, start = match.span()
        index += _letters(data[counted:first])
        counted = first
        found = _found(match, data, index)
        size += len(found[1])
        if size > v.BUFFER_LIMIT:
            raise failure(51151, f"{name}: the size of buffer to store output exceeded the 64MB limit")
        yield found
        if first == start:
            start += 1
            while start < len(data) and data[start] & 0xC0 == 0x80:
                start += 1
        if start >= len(data):
            return


def _match(name: str, pattern: CompiledPattern, data: bytes) -> Value:
    return v.boolean(pattern.search(name, data, 0) is not None)


_operator("$regexFind", v.NULL, _find)
_operator("$regexFindAll", v.EMPTY_ARRAY, _find_all)
_operator("$regexMatch", v.FALSE, _match)
