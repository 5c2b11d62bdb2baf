"""``$jsonSchema`` (JSON schema, draft 4, with the server's ``bsonType``).

A keyword restricts only values of the types it speaks of: ``minimum`` lets every string pass. Each keyword becomes a
``SchemaTest`` on the value that the schema describes; the document itself is described by the path ``b""``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from math import fmod
from typing import Final, NamedTuple, TypeAlias, cast

from tailrace.core.expression.language import pattern as regular
from tailrace.core.expression.language.registry import parse_failure
from tailrace.core.expression.match import encrypted, tree
from tailrace.core.expression.match.refused import refuse_paths
from tailrace.core.expression.match.types import ALIASES, SchemaPattern, SchemaTypes
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import compare, identity
from tailrace.core.expression.values.value import Maybe, Value

_BAD_VALUE: Final = 2
_FAILED_TO_PARSE: Final = 9
_TYPE_MISMATCH: Final = 14

ValueTest: TypeAlias = Callable[[Maybe], bool]

#: JSON schema's own names. "integer" is refused by the server.
_JSON_TYPES: Final[dict[str, frozenset[int]]] = {
    "array": frozenset({v.ARRAY}),
    "boolean": frozenset({v.BOOL}),
    "null": frozenset({v.NULL_TYPE}),
    "number": v.NUMERIC,
    "object": frozenset({v.OBJECT}),
    "string": frozenset({v.STRING}),
}


# ── parsing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_schema(document: bytes, *, later_patterns: bool = False) -> tree.Node:
    """The parsed form of a whole schema, for the root. ``later_patterns``: as servers from 7.0 on read patterns."""
    tests = _schema(document, _SchemaPlace(nested=False, later_patterns=later_patterns))
    fate = _fate(tests)
    return tree.SchemaTest(b"", "schema", tuple(tests)) if fate is None else tree.Always(fate)


def is_conjunction(node: tree.SchemaTest) -> bool:
    """Whether the server makes an ``$and`` of this schema: of several keywords, or of one that is several."""
    return _parts(cast("tuple[tree.SchemaTest, ...]", node.argument)) != 1


def _parts(tests: Iterable[tree.SchemaTest]) -> int:
    total, allowed = 0, 0
    for test in tests:
        if fate_of(test) is True:
            continue
        if test.keyword in ("properties", "required", "dependencies"):
            total += len(cast("tuple[object, ...]", test.argument))
        elif test.keyword == "allOf":
            total += sum(map(_parts, cast("tuple[tuple[tree.SchemaTest, ...], ...]", test.argument)))
        elif test.keyword in ("additionalProperties", "patternProperties"):
            allowed = 1  # one test with the server
        else:
            total += 1
    return total + allowed


#: Keywords that say something about a document; all others let every document pass.
_OF_DOCUMENTS: Final = frozenset(
    {"maxProperties", "minProperties", "additionalProperties", "patternProperties", "properties", "required", "enum"}
    | {"dependencies"}
)


def _fate(tests: Iterable[tree.SchemaTest]) -> bool | None:
    """Whether every document passes, or none, as the server sees before it looks at one: a document is an object."""
    fates = {fate_of(test) for test in tests}
    if False in fates:
        return False
    return None if None in fates else True


def fate_of(test: tree.SchemaTest) -> bool | None:
    if test.keyword in ("type", "bsonType"):
        return v.OBJECT in cast("SchemaTypes", test.argument).types
    if test.keyword == "encrypt":
        return False
    if test.keyword == "enum" and all(kind != v.OBJECT for kind, _ in cast("tuple[Value, ...]", test.argument)):
        return False
    if test.keyword in ("not", "oneOf"):
        return None  # the server does not look through these
    if test.keyword in ("allOf", "anyOf"):
        fates = [_fate(schema) for schema in cast("tuple[tuple[tree.SchemaTest, ...], ...]", test.argument)]
        decisive = test.keyword == "anyOf"
        if decisive in fates:
            return decisive
        return not decisive if all(fate is (not decisive) for fate in fates) else None
    return None if test.keyword in _OF_DOCUMENTS else True


def _mismatch(keyword: str, expected: str) -> Exception:
    return parse_failure(_TYPE_MISMATCH, f"$jsonSchema keyword '{keyword}' must be {expected}")


def _schema(document: bytes, place: _SchemaPlace) -> list[tree.SchemaTest]:
    fields = _Keywords()
    fields.place = place
    for name, kind, data in v.fields_of(document):
        keyword = name.decode("utf-8", "replace")
        if keyword in fields:
            raise parse_failure(_FAILED_TO_PARSE, f"Duplicate $jsonSchema keyword: {keyword}")
        if keyword in _UNSUPPORTED:
            raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' is not currently supported")
        if keyword not in _KEYWORDS:
            raise parse_failure(_FAILED_TO_PARSE, f"Unknown $jsonSchema keyword: {keyword}")
        fields[keyword] = (kind, data)
    for keyword in ("title", "description"):
        if keyword in fields and fields[keyword][0] != v.STRING:
            raise _mismatch(keyword, "of type string")
    if "type" in fields and "bsonType" in fields:
        raise parse_failure(_FAILED_TO_PARSE, "Cannot specify both $jsonSchema keywords 'type' and 'bsonType'")
    encrypted.check_beside(fields)
    tests = []
    for keyword, parser in _KEYWORDS.items():
        if keyword in fields and parser is not None:
            tests.append(tree.SchemaTest(b"", keyword, parser(keyword, fields[keyword], fields)))
    for dependent, base in (("exclusiveMaximum", "maximum"), ("exclusiveMinimum", "minimum")):
        if dependent in fields and base not in fields:
            raise parse_failure(
                _FAILED_TO_PARSE,
                f"$jsonSchema keyword '{base}' must be a present if {dependent} is present",
            )
    return tests


class _SchemaPlace(NamedTuple):
    """Where a schema stands. ``nested``: it speaks of a value inside the document, not of the document."""

    nested: bool
    later_patterns: bool


class _Keywords(dict[str, Value]):
    place: _SchemaPlace


def _sub_schema(keyword: str, value: Value, place: _SchemaPlace) -> tuple[tree.SchemaTest, ...]:
    if value[0] != v.OBJECT:
        raise _mismatch(keyword, "an object")
    return tuple(_schema(value[1], place))


def _types(keyword: str, value: Value, fields: _Keywords) -> object:
    items = v.elements_of(value) if value[0] == v.ARRAY else [value]
    if not items:
        raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' must name at least one type")
    found: set[int] = set()
    seen: set[str] = set()
    for item in items:
        if item[0] != v.STRING:
            raise _mismatch(keyword, "either a string or an array of strings")
        name = v.text_of(item)
        if name == "integer":
            raise parse_failure(_FAILED_TO_PARSE, "$jsonSchema type 'integer' is not currently supported.")
        types = (_JSON_TYPES if keyword == "type" else ALIASES).get(name)
        if types is None:
            raise parse_failure(_BAD_VALUE, f"Unknown type name alias: {name}")
        if name in seen:
            raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' has duplicate value: {name}")
        seen.add(name)
        found |= types
    return SchemaTypes(frozenset(found), is_one=len(items) == 1)


def _number(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] not in v.NUMERIC:
        raise _mismatch(keyword, "a number")
    exclusive = fields.get("exclusive" + keyword.capitalize())
    if exclusive is not None and exclusive[0] != v.BOOL:
        raise _mismatch("exclusive" + keyword.capitalize(), "a boolean")
    return (value, exclusive is not None and exclusive == v.TRUE)


def _multiple(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] not in v.NUMERIC:
        raise _mismatch(keyword, "a number")
    if v.number_of(value) <= 0:
        raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' must have a positive value")
    number = v.number_of(value)
    if fields.place.nested and (v.is_nan(number) or abs(number) == float("inf")):
        raise parse_failure(_BAD_VALUE, "divisor cannot be NaN or infinite")
    return value


def _count(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] not in v.NUMERIC:
        raise parse_failure(_FAILED_TO_PARSE, f"Expected a number in: {keyword}")
    number = v.number_of(value)
    if v.is_nan(number) or abs(number) == float("inf") or number != int(number) or number < 0 or number > v.INT64_MAX:
        raise parse_failure(_FAILED_TO_PARSE, f"Expected a non-negative integer in: {keyword}")
    return int(number)


def _pattern(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] != v.STRING:
        raise _mismatch(keyword, "a string")
    regular.check_query_pattern(v.bytes_of(value), b"", later=fields.place.later_patterns)
    return SchemaPattern(v.bytes_of(value), fields.place.later_patterns)


def _required(keyword: str, value: Value, fields: _Keywords) -> object:
    return _names(keyword, value)


def _names(keyword: str, value: Value) -> tuple[bytes, ...]:
    if value[0] != v.ARRAY:
        raise _mismatch(keyword, "an array")
    names: list[bytes] = []
    for item in v.elements_of(value):
        if item[0] != v.STRING:
            raise _mismatch(keyword, "an array of strings")
        if v.bytes_of(item) in names:
            raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' array cannot contain duplicates")
        names.append(v.bytes_of(item))
    if not names:
        raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' cannot be an empty array")
    refuse_paths(keyword, names)
    return tuple(names)


def _properties(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] != v.OBJECT:
        raise _mismatch(keyword, "an object")
    result = []
    for name, kind, data in v.fields_of(value[1]):
        if keyword == "patternProperties":
            regular.check_query_pattern(name, b"", code=2, later=fields.place.later_patterns)
        named = SchemaPattern(name, fields.place.later_patterns) if keyword == "patternProperties" else name
        result.append((named, _sub_schema(keyword, (kind, data), fields.place._replace(nested=True))))
    if keyword == "properties":
        refuse_paths(keyword, (name for name, _, _ in v.fields_of(value[1])))
    return tuple(result)


def _schemas(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] != v.ARRAY:
        raise _mismatch(keyword, "an array")
    items = v.elements_of(value)
    if not items:
        raise parse_failure(_BAD_VALUE, f"$jsonSchema keyword '{keyword}' must be a non-empty array")
    return tuple(_sub_schema(keyword, item, fields.place) for item in items)


def _one_schema(keyword: str, value: Value, fields: _Keywords) -> object:
    return _sub_schema(keyword, value, fields.place)


def _enum(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] != v.ARRAY:
        raise _mismatch(keyword, "an array")
    items = v.elements_of(value)
    if not items:
        raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' cannot be an empty array")
    if len({_ordered_identity(item) for item in items}) != len(items):
        raise parse_failure(_FAILED_TO_PARSE, f"$jsonSchema keyword '{keyword}' array cannot contain duplicate values")
    return tuple(items)


def _items(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] == v.OBJECT:
        return ("all", _sub_schema(keyword, value, fields.place._replace(nested=True)))
    if value[0] != v.ARRAY:
        raise _mismatch(keyword, "an array or an object")
    return (
        "each",
        tuple(_sub_schema(keyword, item, fields.place._replace(nested=True)) for item in v.elements_of(value)),
    )


def _additional(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] == v.BOOL:
        schema: object = None if value == v.TRUE else False
    else:
        if value[0] != v.OBJECT:
            raise _mismatch(keyword, "either an object or a boolean")
        schema = _sub_schema(keyword, value, fields.place._replace(nested=True))
    if keyword == "additionalItems":
        items = fields.get("items")
        return (None if items is None or items[0] != v.ARRAY else len(v.elements_of(items)), schema)
    named = [name for name, _, _ in v.fields_of(fields["properties"][1])] if "properties" in fields else []
    patterns = [n for n, _, _ in v.fields_of(fields["patternProperties"][1])] if "patternProperties" in fields else []
    return (frozenset(named), tuple(SchemaPattern(each, fields.place.later_patterns) for each in patterns), schema)


def _unique(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] != v.BOOL:
        raise _mismatch(keyword, "a boolean")
    return value == v.TRUE


def _dependencies(keyword: str, value: Value, fields: _Keywords) -> object:
    if value[0] != v.OBJECT:
        raise _mismatch(keyword, "an object")
    result = []
    for name, kind, data in v.fields_of(value[1]):
        if kind not in (v.OBJECT, v.ARRAY):
            raise _mismatch(f"{keyword}.{name.decode('utf-8', 'replace')}", "either an object or an array")
        if kind == v.OBJECT:
            result.append((name, _sub_schema(keyword, (kind, data), fields.place)))
        else:
            result.append((name, (tree.SchemaTest(b"", "required", _names(keyword, (kind, data))),)))
    refuse_paths(keyword, (name for name, _ in result))
    return tuple(result)


_UNSUPPORTED: Final = frozenset({"$ref", "$schema", "default", "definitions", "format", "id"})
#: In the order in which the server reads them, which is the order of their errors.
_KEYWORDS: Final[dict[str, Callable[[str, Value, _Keywords], object] | None]] = {
    "type": _types,
    "bsonType": _types,
    "maximum": _number,
    "minimum": _number,
    "exclusiveMaximum": None,
    "exclusiveMinimum": None,
    "maxLength": _count,
    "minLength": _count,
    "pattern": _pattern,
    "multipleOf": _multiple,
    "maxItems": _count,
    "minItems": _count,
    "uniqueItems": _unique,
    "items": _items,
    "additionalItems": _additional,
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _additional,
    "required": _required,
    "maxProperties": _count,
    "minProperties": _count,
    "dependencies": _dependencies,
    "allOf": _schemas,
    "anyOf": _schemas,
    "oneOf": _schemas,
    "not": _one_schema,
    "enum": _enum,
    "encrypt": lambda keyword, value, fields: encrypted.parse(value),
    "encryptMetadata": None,
    "title": None,
    "description": None,
}


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def value_test(node: tree.SchemaTest) -> ValueTest:
    """The test of one keyword, or of a whole schema (keyword "schema"), on one value. No collation reaches it."""
    if node.keyword == "schema":
        return _every(cast("tuple[tree.SchemaTest, ...]", node.argument))
    return _TESTS[node.keyword](node.argument)


def _every(schema: tuple[tree.SchemaTest, ...]) -> ValueTest:
    tests = [value_test(node) for node in schema]
    return lambda found: all(test(found) for test in tests)


def _on(types: frozenset[int], test: Callable[[Value], bool]) -> ValueTest:
    """Restrict a test to values of ``types``: every other value passes."""
    return lambda found: found is None or found[0] not in types or test(found)


_ARRAYS: Final = frozenset({v.ARRAY})
_OBJECTS: Final = frozenset({v.OBJECT})
_STRINGS: Final = frozenset({v.STRING})


def _bound_test(sign: int) -> Callable[[object], ValueTest]:
    def make(argument: object) -> ValueTest:
        bound, exclusive = cast("tuple[Value, bool]", argument)
        limit = v.number_of(bound)

        def test(found: Value) -> bool:
            number = v.number_of(found)
            if v.is_nan(number) or v.is_nan(limit):
                return v.is_nan(number) and v.is_nan(limit) and not exclusive
            order = compare(found, bound) * sign
            return order < 0 or (order == 0 and not exclusive)

        return _on(v.NUMERIC, test)

    return make


def _multiple_test(argument: object) -> ValueTest:
    divisor = cast("Value", argument)

    def test(found: Value) -> bool:
        a, b = v.number_of(found), v.number_of(divisor)
        if v.is_nan(a) or v.is_nan(b) or abs(a) == float("inf"):
            return False
        if isinstance(a, Decimal) or isinstance(b, Decimal):
            if abs(b) == float("inf"):
                return a == 0
            return Fraction(v.decimal_of(found)) % Fraction(v.decimal_of(divisor)) == 0
        if isinstance(a, float) or isinstance(b, float):
            return fmod(a, b) == 0
        return a % b == 0

    return _on(v.NUMERIC, test)


def _length_test(low: bool) -> Callable[[object], ValueTest]:
    def make(argument: object) -> ValueTest:
        count = cast("int", argument)
        if low:
            return _on(_STRINGS, lambda found: len(v.text_of(found)) >= count)
        return _on(_STRINGS, lambda found: len(v.text_of(found)) <= count)

    return make


def _count_test(types: frozenset[int], low: bool) -> Callable[[object], ValueTest]:
    def make(argument: object) -> ValueTest:
        count = cast("int", argument)
        if low:
            return _on(types, lambda found: len(v.fields_of(found[1])) >= count)
        return _on(types, lambda found: len(v.fields_of(found[1])) <= count)

    return make


def _type_test(argument: object) -> ValueTest:
    types = cast("SchemaTypes", argument).types
    return lambda found: found is None or found[0] in types


def _pattern_test(argument: object) -> ValueTest:
    matches = cast("SchemaPattern", argument).matcher()
    return _on(_STRINGS, lambda found: matches(v.bytes_of(found)))


def _ordered_identity(value: Value) -> object:
    """Like ``identity``, but documents are equal whatever the order of their fields."""
    if value[0] == v.OBJECT:
        return ("object", frozenset((n, _ordered_identity((k, d))) for n, k, d in v.fields_of(value[1])))
    if value[0] == v.ARRAY:
        return ("array", tuple(_ordered_identity(item) for item in v.elements_of(value)))
    return identity(value)


def _enum_test(argument: object) -> ValueTest:
    keys = {_ordered_identity(item) for item in cast("tuple[Value, ...]", argument)}
    return lambda found: found is None or _ordered_identity(found) in keys


def _many_test(combine: Callable[[list[bool]], bool]) -> Callable[[object], ValueTest]:
    def make(argument: object) -> ValueTest:
        tests = [_every(schema) for schema in cast("tuple[tuple[tree.SchemaTest, ...], ...]", argument)]
        return lambda found: combine([test(found) for test in tests])

    return make


def _not_test(argument: object) -> ValueTest:
    inner = _every(cast("tuple[tree.SchemaTest, ...]", argument))
    return lambda found: not inner(found)


def _items_test(argument: object) -> ValueTest:
    mode, schemas = cast("tuple[str, tuple[object, ...]]", argument)
    if mode == "all":
        every = _every(cast("tuple[tree.SchemaTest, ...]", schemas))
        return _on(_ARRAYS, lambda found: all(every(item) for item in v.elements_of(found)))
    tests = [_every(cast("tuple[tree.SchemaTest, ...]", schema)) for schema in schemas]
    return _on(
        _ARRAYS,
        lambda found: all(test(item) for test, item in zip(tests, v.elements_of(found), strict=False)),
    )


def _additional_items_test(argument: object) -> ValueTest:
    start, schema = cast("tuple[int | None, object]", argument)
    if start is None or schema is None:
        return lambda found: True
    if schema is False:
        return _on(_ARRAYS, lambda found: len(v.fields_of(found[1])) <= start)
    test = _every(cast("tuple[tree.SchemaTest, ...]", schema))
    return _on(_ARRAYS, lambda found: all(test(item) for item in v.elements_of(found)[start:]))


def _unique_test(argument: object) -> ValueTest:
    if not argument:
        return lambda found: True

    def test(found: Value) -> bool:
        keys = [_ordered_identity(item) for item in v.elements_of(found)]
        return len(set(keys)) == len(keys)

    return _on(_ARRAYS, test)


def _properties_test(argument: object) -> ValueTest:
    pairs = [(n, _every(s)) for n, s in cast("tuple[tuple[bytes, tuple[tree.SchemaTest, ...]], ...]", argument)]

    def test(found: Value) -> bool:
        for name, passes in pairs:
            value = v.field(found[1], name)
            if value is not None and not passes(value):
                return False
        return True

    return _on(_OBJECTS, test)


def _pattern_properties_test(argument: object) -> ValueTest:
    pairs = [
        (source.matcher(), _every(s))
        for source, s in cast("tuple[tuple[SchemaPattern, tuple[tree.SchemaTest, ...]], ...]", argument)
    ]

    def test(found: Value) -> bool:
        return all(
            passes((kind, data))
            for name, kind, data in v.fields_of(found[1])
            for matches, passes in pairs
            if matches(name)
        )

    return _on(_OBJECTS, test)


def _additional_properties_test(argument: object) -> ValueTest:
    named, sources, schema = cast("tuple[frozenset[bytes], tuple[SchemaPattern, ...], object]", argument)
    if schema is None:
        return lambda found: True
    patterns = [source.matcher() for source in sources]
    passes = None if schema is False else _every(cast("tuple[tree.SchemaTest, ...]", schema))

    def test(found: Value) -> bool:
        for name, kind, data in v.fields_of(found[1]):
            if name in named or any(matches(name) for matches in patterns):
                continue
            if passes is None or not passes((kind, data)):
                return False
        return True

    return _on(_OBJECTS, test)


def _required_test(argument: object) -> ValueTest:
    names = cast("tuple[bytes, ...]", argument)
    return _on(_OBJECTS, lambda found: all(v.field(found[1], name) is not None for name in names))


def _dependencies_test(argument: object) -> ValueTest:
    pairs = [(n, _every(s)) for n, s in cast("tuple[tuple[bytes, tuple[tree.SchemaTest, ...]], ...]", argument)]
    return _on(
        _OBJECTS,
        lambda found: all(passes(found) for name, passes in pairs if v.field(found[1], name) is not None),
    )


_TESTS: Final[dict[str, Callable[[object], ValueTest]]] = {
    "type": _type_test,
    "bsonType": _type_test,
    "maximum": _bound_test(1),
    "minimum": _bound_test(-1),
    "maxLength": _length_test(False),
    "minLength": _length_test(True),
    "pattern": _pattern_test,
    "multipleOf": _multiple_test,
    "allOf": _many_test(all),
    "anyOf": _many_test(any),
    "oneOf": _many_test(lambda results: sum(results) == 1),
    "not": _not_test,
    "enum": _enum_test,
    "items": _items_test,
    "additionalItems": _additional_items_test,
    "maxItems": _count_test(_ARRAYS, False),
    "minItems": _count_test(_ARRAYS, True),
    "uniqueItems": _unique_test,
    "properties": _properties_test,
    "additionalProperties": _additional_properties_test,
    "patternProperties": _pattern_properties_test,
    "required": _required_test,
    "maxProperties": _count_test(_OBJECTS, False),
    "minProperties": _count_test(_OBJECTS, True),
    "dependencies": _dependencies_test,
    "encrypt": lambda argument: _on(frozenset(v.TYPE_NAMES), encrypted.test_of(argument)),
}
