"""Random queries for the expression fuzz. Half of the values come from the documents, so that they hit."""

from __future__ import annotations

import random
from collections.abc import Callable

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value
from tests.differential import expression_patterns as patterns
from tests.differential import expression_values as values

PATHS = (
    "a", "b", "c", "d", "e", "x", "0", "a.b", "b.a", "c.a", "c.b", "d.a", "a.0", "b.1", "c.0.a", "a.b.c", "a.0.0",
    "d.a.0.b", "b.0.1", "e.b.0", "nope", "a.nope", "_id", "", "a.", "c.01",
    "d.$id", "a.$ref", "$id",
)  # fmt: skip
COMPARISONS = ("$eq", "$gt", "$gte", "$lt", "$lte", "$ne")
SCHEMA_TYPES = ("string", "int", "number", "object", "array", "bool", "null", "double", "date", "long", "objectId")

Expression = Callable[[], Value]


def _object(**fields: Value) -> Value:
    return v.object_of([(name.encode(), value) for name, value in fields.items()])


#: Operators with an empty argument, or with one that decides the result at once.
DEGENERATE: tuple[tuple[bytes, Value], ...] = (
    (b"$in", v.EMPTY_ARRAY),
    (b"$nin", v.EMPTY_ARRAY),
    (b"$all", v.EMPTY_ARRAY),
    (b"$elemMatch", v.EMPTY_OBJECT),
    (b"$elemMatch", _object(**{"$and": v.array_of([v.EMPTY_OBJECT])})),
    (b"$elemMatch", _object(**{"$nor": v.array_of([v.EMPTY_OBJECT])})),
    (b"$elemMatch", _object(**{"$id": v.int32(1)})),
    (b"$elemMatch", _object(**{"$nin": v.EMPTY_ARRAY})),
    (b"$not", _object(**{"$elemMatch": v.EMPTY_OBJECT})),
    (b"$not", _object(**{"$all": v.EMPTY_ARRAY})),
    (b"$type", v.EMPTY_ARRAY),
    (b"$bitsAllSet", v.EMPTY_ARRAY),
    (b"$bitsAnySet", v.EMPTY_ARRAY),
    (b"$bitsAnyClear", v.int32(0)),
    (b"$mod", v.array_of([v.int32(1), v.int32(0)])),
    (b"$size", v.int32(0)),
    (b"$id", v.int32(1)),
)
WHOLE: tuple[tuple[bytes, Value], ...] = (
    (b"$and", v.array_of([v.EMPTY_OBJECT])),
    (b"$or", v.array_of([v.EMPTY_OBJECT])),
    (b"$nor", v.array_of([v.EMPTY_OBJECT])),
    (b"$and", v.EMPTY_ARRAY),
    (b"$expr", v.EMPTY_OBJECT),
    (b"$expr", _object(**{"$or": v.EMPTY_ARRAY})),
    (b"$jsonSchema", v.EMPTY_OBJECT),
    (b"$sampleRate", v.int32(0)),
    (b"$comment", v.NULL),
)


class _Queries:
    def __init__(self, rng: random.Random, documents: list[bytes], expression: Expression) -> None:
        self.rng = rng
        self.documents = documents
        self.expression = expression

    def value(self) -> Value:
        if self.rng.random() < 0.4:
            return values.any_value(self.rng)
        found = self.rng.choice(v.fields_of(self.rng.choice(self.documents)))
        value = (found[1], found[2])
        for _ in range(2):
            if value[0] in (v.OBJECT, v.ARRAY) and self.rng.random() < 0.5 and (inner := v.fields_of(value[1])):
                chosen = self.rng.choice(inner)
                value = (chosen[1], chosen[2])
        return value

    def query(self, depth: int) -> Value:
        rng = self.rng
        fields: list[tuple[bytes, Value]] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            roll = rng.random()
            if depth > 0 and roll < 0.22:
                clauses = [self.query(depth - 1) for _ in range(rng.choice((1, 2, 2, 3)))]
                fields.append((rng.choice((b"$and", b"$or", b"$nor")), v.array_of(clauses)))
            elif roll < 0.24:
                fields.append(rng.choice(WHOLE))
            elif roll < 0.27:
                fields.append((b"$expr", self.expression()))
            elif roll < 0.31:
                fields.append((b"$jsonSchema", self.schema(2)))
            else:
                fields.append((rng.choice(PATHS).encode(), self.predicate(depth)))
        return v.object_of(list(dict(fields).items()))

    def predicate(self, depth: int) -> Value:
        if self.rng.random() < 0.2:
            return self.value()
        return self.operators(depth)

    def operators(self, depth: int) -> Value:
        count = self.rng.choice((1, 1, 1, 2))
        found = [self.operator(depth) for _ in range(count)]
        return v.object_of(list({name: value for pairs in found for name, value in pairs}.items()))

    def operator(self, depth: int) -> list[tuple[bytes, Value]]:
        rng = self.rng
        roll = rng.random()
        if roll < 0.03:
            return [rng.choice(DEGENERATE)]
        if roll < 0.38:
            return [(rng.choice(COMPARISONS).encode(), self.value())]
        if roll < 0.5:
            return [(rng.choice((b"$in", b"$nin")), v.array_of([self.value() for _ in range(rng.randint(0, 3))]))]
        if roll < 0.57:
            return [(b"$exists", rng.choice((v.TRUE, v.FALSE, v.int32(1), v.int32(0))))]
        if roll < 0.64:
            return [(b"$type", self.type_argument())]
        if roll < 0.68:
            return [(b"$size", rng.choice((v.int32(rng.randint(0, 3)), v.double(2.0), values.number(rng))))]
        if roll < 0.73:
            return [(b"$mod", v.array_of([values.number(rng), v.int32(rng.randint(-2, 3))]))]
        if roll < 0.79:
            return self.regex()
        if roll < 0.84:
            name = rng.choice((b"$bitsAllSet", b"$bitsAllClear", b"$bitsAnySet", b"$bitsAnyClear"))
            return [(name, self.bits())]
        if depth <= 0 or roll < 0.89:
            return [(b"$all", v.array_of([self.value() for _ in range(rng.randint(0, 2))]))]
        if roll < 0.97:
            body = self.query(depth - 1) if rng.random() < 0.5 else self.operators(depth - 1)
            return [(b"$elemMatch", body)]
        return [(b"$not", self.operators(depth - 1))]

    def type_argument(self) -> Value:
        names = ("string", "int", "number", "object", "array", "bool", "null", "date", "double", "long", "decimal")
        rng = self.rng
        if rng.random() < 0.3:
            return v.int32(rng.choice((1, 2, 3, 4, 6, 8, 10, 16, 18, -1, 127, 0, 42)))
        if rng.random() < 0.3:
            return v.array_of([v.string(name) for name in rng.sample(names, 2)])
        return v.string(rng.choice((*names, "symbol", "undefined", "missing", "minKey", "what")))

    def regex(self) -> list[tuple[bytes, Value]]:
        rng = self.rng
        pattern, options = values.pattern(rng), rng.choice(("", "i", "m", "s", "x", "im"))
        if rng.random() < 0.4:
            pattern = patterns.pattern(rng).encode()
        if rng.random() < 0.5:
            return [(b"$regex", (v.REGEX, pattern + b"\x00" + options.encode() + b"\x00"))]
        found = [(b"$regex", v.string(pattern.decode()))]
        return [*found, (b"$options", v.string(options))] if rng.random() < 0.6 else found

    def bits(self) -> Value:
        rng = self.rng
        roll = rng.random()
        if roll < 0.4:
            return v.array_of([v.int32(rng.choice((0, 1, 2, 7, 31, 63, 64, 200))) for _ in range(rng.randint(0, 3))])
        if roll < 0.8:
            return rng.choice((v.int32(rng.randint(0, 20)), v.int64(1 << 40), v.double(5.0), values.number(rng)))
        return values.binary(rng)

    def schema(self, depth: int) -> Value:
        """A schema of one to three keywords."""
        rng = self.rng
        fields: dict[bytes, Value] = {}
        for _ in range(rng.randint(1, 3)):
            name, value = self.keyword(depth)
            fields[name] = value
        return v.object_of(list(fields.items()))

    def keyword(self, depth: int) -> tuple[bytes, Value]:
        rng = self.rng
        names = [name.decode() for name in rng.sample(values.NAMES[:5], rng.randint(1, 3))]
        if depth > 0 and rng.random() < 0.5:
            kind = rng.choice(
                ("properties", "not", "anyOf", "allOf", "oneOf", "items", "additionalProperties", "deps", "pattern")
            )
            if kind == "properties":
                return b"properties", v.object_of([(n.encode(), self.schema(depth - 1)) for n in names])
            if kind in ("anyOf", "allOf", "oneOf"):
                return kind.encode(), v.array_of([self.schema(depth - 1) for _ in range(2)])
            if kind == "items" and rng.random() < 0.4:
                return b"items", v.array_of([self.schema(depth - 1) for _ in range(2)])
            if kind == "deps":
                need = v.array_of([v.string(names[0])]) if rng.random() < 0.5 else self.schema(depth - 1)
                return b"dependencies", v.object_of([(names[-1].encode(), need)])
            if kind == "pattern":
                return b"patternProperties", v.object_of([(b"^[ab]", self.schema(depth - 1))])
            if kind == "additionalProperties" and rng.random() < 0.5:
                return b"additionalProperties", v.FALSE
            return kind.encode(), self.schema(depth - 1)
        roll = rng.randrange(9)
        if roll == 0:
            return b"required", v.array_of([v.string(name) for name in names])
        if roll == 1:
            return b"bsonType", v.string(rng.choice(SCHEMA_TYPES))
        if roll == 2:
            return b"type", v.string(rng.choice(("string", "object", "array", "number", "boolean", "null", "integer")))
        if roll == 3:
            return rng.choice((b"minimum", b"maximum")), values.number(rng)
        if roll == 4:
            name = rng.choice(
                (b"minLength", b"maxLength", b"minItems", b"maxItems", b"minProperties", b"maxProperties")
            )
            return name, v.int32(rng.randint(0, 4))
        if roll == 5:
            return b"enum", v.array_of([self.value() for _ in range(rng.randint(1, 3))])
        if roll == 6:
            return b"uniqueItems", v.boolean(rng.random() < 0.8)
        if roll == 7:
            return b"multipleOf", rng.choice((v.int32(2), v.double(0.5), v.int32(0), values.number(rng)))
        return b"pattern", v.string(rng.choice(values.PATTERNS).decode())


def query(rng: random.Random, documents: list[bytes], expression: Expression) -> Value:
    """A random query document."""
    return _Queries(rng, documents, expression).query(2)
