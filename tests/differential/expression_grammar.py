"""The grammar of the expression fuzz: random stages, predicates and expressions as BSON.

Expressions are mostly well typed, so that they give results, and now and then wrong in type, arity or name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator

from tailrace.core.expression.language.registry import OPERATORS
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value
from tests.differential import expression_limits as limits
from tests.differential import expression_patterns as patterns
from tests.differential import expression_values as values
from tests.differential.expression_dates import DATE_OPERATORS
from tests.differential.expression_predicates import query

Build = Callable[[random.Random, int], Value]

PATHS = (
    "$a",
    "$b",
    "$c",
    "$d",
    "$e",
    "$a.b",
    "$b.a",
    "$c.a",
    "$d.a.b",
    "$x",
    "$nope",
    "$a.0",
    "$$ROOT",
    "$$CURRENT.a",
    "$$ROOT.b",
    "$_id",
    "$d.$id",
    "$$ROOT.a.$ref",
)


def doc(**fields: Value) -> Value:
    return v.object_of([(name.rstrip("_").encode(), value) for name, value in fields.items()])


def op(name: str, operand: Value) -> Value:
    return v.object_of([(name.encode(), operand)])


def path(rng: random.Random) -> Value:
    return v.string(rng.choice(PATHS))


#: name: (kind of the result, kinds of the arguments). Kinds: n number, s string, a array, o object, d date, b boolean,
#: i small integer, x anything, r regular expression; a trailing "*" repeats, "?" may be left out.
SIMPLE: dict[str, tuple[str, str]] = {
    "$cmp": ("n", "xx"), "$eq": ("b", "xx"), "$ne": ("b", "xx"), "$gt": ("b", "xx"), "$gte": ("b", "xx"),
    "$lt": ("b", "xx"), "$lte": ("b", "xx"), "$not": ("b", "x"), "$and": ("b", "x*"), "$or": ("b", "x*"),
    "$ifNull": ("x", "xxx*"), "$add": ("n", "n*"), "$multiply": ("n", "n*"), "$subtract": ("n", "nn"),
    "$divide": ("n", "nn"), "$mod": ("n", "nn"), "$abs": ("n", "n"), "$ceil": ("n", "n"), "$floor": ("n", "n"),
    "$sqrt": ("n", "n"), "$exp": ("n", "n"), "$ln": ("n", "n"), "$log": ("n", "nn"), "$log10": ("n", "n"),
    "$pow": ("n", "nn"), "$sin": ("n", "n"), "$cos": ("n", "n"),
    "$tan": ("n", "n"), "$asin": ("n", "n"), "$acos": ("n", "n"), "$atan": ("n", "n"), "$atan2": ("n", "nn"),
    "$sinh": ("n", "n"), "$cosh": ("n", "n"), "$tanh": ("n", "n"), "$asinh": ("n", "n"), "$acosh": ("n", "n"),
    "$atanh": ("n", "n"), "$degreesToRadians": ("n", "n"), "$radiansToDegrees": ("n", "n"),
    "$sum": ("n", "n*"), "$avg": ("n", "n*"), "$min": ("x", "x*"), "$max": ("x", "x*"),
    "$stdDevPop": ("n", "n*"), "$stdDevSamp": ("n", "n*"),
    "$concat": ("s", "s*"), "$toLower": ("s", "s"), "$toUpper": ("s", "s"), "$strcasecmp": ("n", "ss"),
    "$strLenBytes": ("n", "s"), "$strLenCP": ("n", "s"), "$substr": ("s", "sii"), "$substrBytes": ("s", "sii"),
    "$substrCP": ("s", "sii"), "$indexOfBytes": ("n", "ssi?i?"), "$indexOfCP": ("n", "ssi?i?"), "$split": ("a", "ss"),
    "$toBool": ("b", "x"), "$toDate": ("d", "x"), "$toDecimal": ("n", "x"), "$toDouble": ("n", "x"),
    "$toInt": ("n", "x"), "$toLong": ("n", "x"), "$toObjectId": ("x", "x"), "$toString": ("s", "x"),
    "$type": ("s", "x"), "$isNumber": ("b", "x"), "$isArray": ("b", "x"),
    "$arrayElemAt": ("x", "ai"), "$first": ("x", "a"), "$last": ("x", "a"), "$arrayToObject": ("o", "a"),
    "$objectToArray": ("a", "o"), "$concatArrays": ("a", "a*"), "$in": ("b", "xa"), "$indexOfArray": ("n", "axi?i?"),
    "$range": ("a", "iii?"), "$reverseArray": ("a", "a"), "$size": ("n", "a"), "$slice": ("a", "aii?"),
    "$allElementsTrue": ("b", "A"), "$anyElementTrue": ("b", "A"), "$setDifference": ("a", "aa"),
    "$setEquals": ("b", "aa"), "$setIntersection": ("a", "a*"), "$setIsSubset": ("b", "aa"), "$setUnion": ("a", "a*"),
    "$mergeObjects": ("o", "o*"), "$bsonSize": ("n", "o"), "$binarySize": ("n", "s"),
    "$bitAnd": ("n", "i*"), "$bitOr": ("n", "n*"), "$bitXor": ("n", "i*"), "$bitNot": ("n", "n"),
    "$tsSecond": ("n", "t"), "$tsIncrement": ("n", "t"), "$toHashedIndexKey": ("n", "x"),
}  # fmt: skip


class Grammar:
    """Expressions from one random generator; ``only`` restricts the operators at the top, ``known`` all of them."""

    def __init__(
        self, rng: random.Random, only: frozenset[str] = frozenset(), known: Container[str] = OPERATORS
    ) -> None:
        self.rng = rng
        self.only = only
        self.variables: list[str] = []
        self.by_kind: dict[str, list[str]] = {}
        for name, (kind, _) in SIMPLE.items():
            if name in OPERATORS and name in known:
                self.by_kind.setdefault(kind, []).append(name)
        for name, (kind, _) in {**SPECIAL, **DATE_OPERATORS}.items():
            if name in OPERATORS and name in known:
                self.by_kind.setdefault(kind, []).append(name)
        self.all = sorted({name for names in self.by_kind.values() for name in names})

    def top(self, depth: int = 3) -> Value:
        chosen = sorted(self.only & set(self.all)) or self.all
        return self.operator(self.rng.choice(chosen), depth)

    def expression(self, kind: str = "x", depth: int = 2) -> Value:
        rng = self.rng
        if rng.random() < limits.RATE:
            return limits.expression(rng, kind)
        if rng.random() < 0.07:
            kind = rng.choice("nsaodbx")
        if depth <= 0 or rng.random() < 0.35:
            return self.leaf(kind)
        if kind in "xi" and rng.random() < 0.25:
            return self.literal_shape(depth)
        names = self.all if kind == "x" else self.by_kind.get(kind, [])
        if not names or (kind == "i" and rng.random() < 0.9):
            return self.leaf(kind)
        return self.operator(rng.choice(names), depth)

    def literal_shape(self, depth: int) -> Value:
        rng = self.rng
        if rng.random() < 0.5:
            return v.array_of([self.expression("x", depth - 1) for _ in range(rng.randint(0, 3))])
        names = rng.sample(values.NAMES, rng.randint(0, 3))
        return v.object_of([(name, self.expression("x", depth - 1)) for name in names])

    def leaf(self, kind: str) -> Value:
        rng = self.rng
        if kind != "i" and rng.random() < 0.55:
            if self.variables and rng.random() < 0.6:
                return v.string("$$" + rng.choice(self.variables) + rng.choice(("", "", "", ".a")))
            return path(rng)
        makers: dict[str, Callable[[random.Random], Value]] = {
            "n": values.number, "s": values.text, "a": values.array, "d": values.date,
            "o": lambda r: values.document(r, 1), "b": lambda r: v.boolean(r.random() < 0.5),
            "i": lambda r: v.int32(r.choice((0, 0, 1, 1, 2, 3, -1, -2, 5, 20))),
            "t": lambda r: v.timestamp(1600000000, 3), "A": lambda r: v.array_of([values.array(r)]),
            "r": lambda r: (v.REGEX, values.pattern(r) + b"\x00" + r.choice((b"", b"i", b"m")) + b"\x00"),
        }  # fmt: skip
        value = makers.get(kind, values.any_value)(rng)
        if kind == "i" and rng.random() < 0.06:
            value = values.number(rng)
        dollar = value[0] in (v.OBJECT, v.ARRAY) or (value[0] == v.STRING and value[1][4:5] == b"$")
        return op("$literal", value) if dollar and rng.random() < 0.9 else value

    def operator(self, name: str, depth: int) -> Value:
        rng = self.rng
        if name in SPECIAL:
            return op(name, SPECIAL[name][1](self, depth - 1))
        if name in DATE_OPERATORS:
            return op(name, DATE_OPERATORS[name][1](self, depth - 1))
        kinds = SIMPLE[name][1]
        args: list[Value] = []
        for kind, mark in _arguments(kinds):
            if mark == "*":
                args += [self.expression(kind, depth - 1) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
            elif mark != "?" or rng.random() < 0.6:
                args.append(self.expression(kind, depth - 1))
        if rng.random() < 0.01:
            args = args[1:] if rng.random() < 0.5 else [*args, self.expression("x", 0)]
        if len(args) == 1 and rng.random() < 0.6:
            return op(name, args[0])
        return op(name, v.array_of(args))

    def with_variable(self, *names: str, kind: str, depth: int) -> Value:
        self.variables += names
        body = self.expression(kind, depth)
        del self.variables[-len(names) :]
        return body


def _arguments(kinds: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(kinds):
        mark = kinds[at + 1] if at + 1 < len(kinds) and kinds[at + 1] in "*?" else ""
        yield kinds[at], mark
        at += 1 + len(mark)


# ── operators whose argument has a shape of its own ──────────────────────────────────────────────────────────────────


def _cond(g: Grammar, depth: int) -> Value:
    parts = [g.expression("b", depth), g.expression("x", depth), g.expression("x", depth)]
    if g.rng.random() < 0.5:
        return v.array_of(parts)
    return doc(if_=parts[0], then=parts[1], else_=parts[2])


def _switch(g: Grammar, depth: int) -> Value:
    branches = [
        doc(case=g.expression("b", depth), then=g.expression("x", depth)) for _ in range(g.rng.choice((0, 1, 1, 2)))
    ]
    whole = [(b"branches", v.array_of(branches))]
    if g.rng.random() < 0.8:
        whole.append((b"default", g.expression("x", depth)))
    return v.object_of(whole)


def _let(g: Grammar, depth: int) -> Value:
    name = g.rng.choice(("v", "w", "CURRENT", "this"))
    bound = v.object_of([(name.encode(), g.expression("x", depth))])
    return doc(vars=bound, in_=g.with_variable(name, kind="x", depth=depth))


def _map(g: Grammar, depth: int) -> Value:
    fields = {"input": g.expression("a", depth)}
    name = "this"
    if g.rng.random() < 0.5:
        name = "item"
        fields["as"] = v.string(name)
    return doc(**fields, in_=g.with_variable(name, kind="x", depth=depth))


def _filter(g: Grammar, depth: int) -> Value:
    fields = {"input": g.expression("a", depth), "cond": g.with_variable("this", kind="b", depth=depth)}
    if g.rng.random() < 0.3:
        fields["limit"] = g.expression("i", depth)
    return doc(**fields)


def _reduce(g: Grammar, depth: int) -> Value:
    return doc(
        input=g.expression("a", depth),
        initialValue=g.expression("x", depth),
        in_=g.with_variable("this", "value", kind="x", depth=depth),
    )


def _zip(g: Grammar, depth: int) -> Value:
    count = g.rng.randint(1, 3)
    fields = {"inputs": v.array_of([g.expression("a", depth) for _ in range(count)])}
    if g.rng.random() < 0.6:
        fields["useLongestLength"] = v.boolean(True)
        if g.rng.random() < 0.6:
            fields["defaults"] = v.array_of([g.expression("x", depth) for _ in range(count)])
    return doc(**fields)


def _sort_array(g: Grammar, depth: int) -> Value:
    by = v.int32(g.rng.choice((1, -1)))
    if g.rng.random() < 0.5:
        names = g.rng.sample((b"a", b"b", b"a.b"), g.rng.randint(1, 2))
        by = v.object_of([(name, v.int32(g.rng.choice((1, -1)))) for name in names])
    return doc(input=g.expression("a", depth), sortBy=by)


def _some_n(g: Grammar, depth: int) -> Value:
    return doc(n=g.expression("i", 0), input=g.expression("a", depth))


def _trim(g: Grammar, depth: int) -> Value:
    fields = {"input": g.expression("s", depth)}
    if g.rng.random() < 0.5:
        fields["chars"] = g.expression("s", 0)
    return doc(**fields)


def _regex(g: Grammar, depth: int) -> Value:
    fields = {"input": g.expression("s", depth), "regex": g.leaf("r")}
    roll = g.rng.random()
    if roll < 0.4:
        fields["regex"] = v.string(values.pattern(g.rng).decode())
        if roll < 0.2:
            fields["options"] = v.string(g.rng.choice(("", "i", "m", "sx")))
    elif roll < 0.7:
        fields = {
            "input": v.string(patterns.subject(g.rng)),
            "regex": op("$literal", v.string(patterns.pattern(g.rng))),
        }
        fields["options"] = v.string(patterns.options(g.rng))
    return doc(**fields)


def _replace(g: Grammar, depth: int) -> Value:
    return doc(input=g.expression("s", depth), find=g.expression("s", 0), replacement=g.expression("s", 0))


def _convert(g: Grammar, depth: int) -> Value:
    to = v.string(g.rng.choice(("int", "long", "double", "decimal", "bool", "string", "date", "objectId")))
    if g.rng.random() < 0.2:
        to = v.int32(g.rng.choice((1, 2, 7, 8, 9, 16, 18, 19, 3, 99)))
    fields = {"input": g.expression("x", depth), "to": to}
    if g.rng.random() < 0.4:
        fields["onError"] = g.expression("x", 0)
    if g.rng.random() < 0.4:
        fields["onNull"] = g.expression("x", 0)
    return doc(**fields)


def _get_field(g: Grammar, depth: int) -> Value:
    name = v.string(g.rng.choice(("a", "b", "a.b", "dot.ted")))
    if g.rng.random() < 0.4:
        return name
    return doc(field=name, input=g.expression("o", depth))


def _set_field(g: Grammar, depth: int) -> Value:
    value = g.expression("x", depth) if g.rng.random() < 0.9 else v.string("$$REMOVE")
    return doc(field=v.string(g.rng.choice(("a", "b", "a.b"))), input=g.expression("o", depth), value=value)


def _unset_field(g: Grammar, depth: int) -> Value:
    return doc(field=v.string(g.rng.choice(("a", "b", "a.b"))), input=g.expression("o", depth))


def _median(g: Grammar, depth: int) -> Value:
    fields = {"input": g.expression(g.rng.choice("aaan"), depth)}
    if g.rng.random() < 0.97:
        fields["method"] = v.string("approximate" if g.rng.random() < 0.97 else "exact")
    return doc(**fields)


def _percentile(g: Grammar, depth: int) -> Value:
    shares = [
        values.number(g.rng) if g.rng.random() < 0.04 else v.double(g.rng.choice((0.0, 1.0, 0.5, g.rng.random())))
        for _ in range(g.rng.randint(0 if g.rng.random() < 0.05 else 1, 4))
    ]
    shares = [share for share in shares if not v.is_nan(v.number_of(share))]  # mongod 7.0.28 would end
    return v.object_of([*((n, (k, d)) for n, k, d in v.fields_of(_median(g, depth)[1])), (b"p", v.array_of(shares))])


def _round(g: Grammar, depth: int) -> Value:
    """Also with more places than a decimal has digits."""
    places = (
        v.int32(g.rng.choice((-21, -5, 0, 2, 20, 33, 34, 40, 100))) if g.rng.random() < 0.6 else g.expression("i", 0)
    )
    number = values.number(g.rng) if g.rng.random() < 0.4 else g.expression("n", depth)
    return v.array_of([number, places]) if g.rng.random() < 0.85 else number


def _literal(g: Grammar, depth: int) -> Value:
    return values.any_value(g.rng)


SPECIAL: dict[str, tuple[str, Callable[[Grammar, int], Value]]] = {
    "$cond": ("x", _cond), "$switch": ("x", _switch), "$let": ("x", _let), "$map": ("a", _map),
    "$filter": ("a", _filter), "$reduce": ("x", _reduce), "$zip": ("a", _zip), "$sortArray": ("a", _sort_array),
    "$firstN": ("a", _some_n), "$lastN": ("a", _some_n), "$minN": ("a", _some_n), "$maxN": ("a", _some_n),
    "$trim": ("s", _trim), "$ltrim": ("s", _trim), "$rtrim": ("s", _trim), "$regexFind": ("o", _regex),
    "$regexFindAll": ("a", _regex), "$regexMatch": ("b", _regex), "$replaceOne": ("s", _replace),
    "$replaceAll": ("s", _replace), "$convert": ("x", _convert), "$getField": ("x", _get_field),
    "$setField": ("o", _set_field), "$unsetField": ("o", _unset_field), "$literal": ("x", _literal),
    "$median": ("n", _median), "$percentile": ("a", _percentile), "$round": ("n", _round), "$trunc": ("n", _round),
}  # fmt: skip


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────

FIELD_PATHS = (
    b"d.$id",
    b"a",
    b"b",
    b"c",
    b"d",
    b"a.b",
    b"b.a",
    b"c.a",
    b"c.b",
    b"d.a.b",
    b"e",
    b"new",
    b"new.deep",
    b"_id",
    b"x.y",
)


def pipeline(
    rng: random.Random, documents: list[bytes], only: frozenset[str], known: Container[str] = OPERATORS
) -> list[bytes]:
    """One random stage, now and then several, of the operators that are ``known``."""
    grammar = Grammar(rng, only, known)
    if only:
        return [_stage("$replaceWith", v.object_of([(b"r", grammar.top())]))]
    if rng.random() < 0.15:
        return [_one(rng, documents, grammar) for _ in range(rng.choice((2, 2, 3)))]
    return [_one(rng, documents, grammar)]


#: Operators of comparison and logic, which never fail (but ``$in``) and which every server has.
LOGIC = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$cmp", "$and", "$or", "$not", "$in", "$ifNull", "$cond")


def match(rng: random.Random, documents: list[bytes]) -> bytes:
    """A random ``$match`` with expressions of comparisons and logic over paths and constants."""
    grammar = Grammar(rng)

    def expression(depth: int = 2) -> Value:
        name = rng.choice(LOGIC)
        wanted = {"$not": 1, "$cond": 3}.get(name, rng.choice((1, 2, 3)) if name in ("$and", "$or") else 2)
        kinds = ["x"] * wanted if name != "$in" else ["x", "a"]
        nested = [depth > 0 and rng.random() < 0.4 for _ in kinds]
        args = [expression(depth - 1) if deep else grammar.leaf(kind) for kind, deep in zip(kinds, nested, strict=True)]
        return op(name, v.array_of(args))

    return _stage("$match", query(rng, documents, expression))


def _one(rng: random.Random, documents: list[bytes], grammar: Grammar) -> bytes:
    kind = rng.random()
    if kind < 0.3:
        near_a_limit = rng.random() < limits.RATE
        return _stage("$match", limits.query(rng) if near_a_limit else query(rng, documents, grammar.top))
    if kind < 0.62:
        return _stage("$replaceWith", v.object_of([(b"r", grammar.top())]))
    if kind < 0.78:
        return _stage("$project", _projection(rng, grammar))
    if kind < 0.9:
        return _stage(rng.choice(("$addFields", "$set")), _additions(rng, grammar))
    if kind < 0.94:
        names = rng.sample(FIELD_PATHS, rng.randint(1, 3))
        return _stage("$unset", v.array_of([v.string(name.decode()) for name in names]))
    if kind < 0.97:
        verdicts = [v.string(rng.choice(("$$KEEP", "$$PRUNE", "$$DESCEND", "$$DESCEND"))) for _ in range(2)]
        return _stage("$redact", op("$cond", v.array_of([grammar.expression("b", 2), *verdicts])))
    return _stage(rng.choice(("$replaceWith",)), grammar.expression("o", 2))


def shapes(rng: random.Random) -> list[bytes]:
    """A few random projections and replacements of literals and paths, which every server knows alike."""
    return [_shape(rng) for _ in range(rng.choice((1, 1, 2, 3)))]


def _shape(rng: random.Random) -> bytes:
    def computed() -> Value:
        return path(rng) if rng.random() < 0.7 else op("$literal", v.int32(5))

    names = rng.sample(FIELD_PATHS, rng.randint(1, 4))
    kind = rng.choice(("include", "exclude", "$set", "$addFields", "$unset", "$replaceWith"))
    if kind == "include":
        return _stage("$project", v.object_of([(n, v.TRUE if rng.random() < 0.6 else computed()) for n in names]))
    if kind == "exclude":
        return _stage("$project", v.object_of([(name, v.FALSE) for name in names]))
    if kind == "$unset":
        return _stage(kind, v.array_of([v.string(name.decode()) for name in names]))
    if kind == "$replaceWith":
        inner = [(name.replace(b".", b"_"), computed()) for name in names]
        return _stage(kind, path(rng) if rng.random() < 0.2 else v.object_of(inner))
    return _stage(kind, v.object_of([(name, computed()) for name in names]))


def _stage(name: str, specification: Value) -> bytes:
    return op(name, specification)[1]


def _names(rng: random.Random) -> list[bytes]:
    names = rng.sample(FIELD_PATHS, rng.randint(1, 4))
    return [*names, limits.path(rng).encode()] if rng.random() < limits.RATE else names


def _projection(rng: random.Random, grammar: Grammar) -> Value:
    roll = rng.random()
    fields: list[tuple[bytes, Value]] = []
    for name in _names(rng):
        if roll < 0.3:
            fields.append((name, v.int32(0)))
        elif rng.random() < 0.5 or roll < 0.5:
            fields.append((name, rng.choice((v.int32(1), v.TRUE, v.double(1.5)))))
        elif rng.random() < 0.2:
            inner = rng.choice((b"a", b"a", b"$id", b"$ref"))
            fields.append((name, v.object_of([(inner, v.int32(1)), (b"k", grammar.expression("x", 1))])))
        else:
            fields.append((name, grammar.expression("x", 2)))
    if rng.random() < 0.3 and all(name != b"_id" for name, _ in fields):
        fields.append((b"_id", v.int32(rng.randint(0, 1))))
    return v.object_of(fields)


def _additions(rng: random.Random, grammar: Grammar) -> Value:
    fields = []
    for name in _names(rng):
        value = grammar.expression("x", 2)
        if rng.random() < 0.15:
            value = v.object_of([(b"a", grammar.expression("x", 1)), (b"k", grammar.expression("x", 1))])
        if rng.random() < 0.07:
            value = v.string("$$REMOVE")
        fields.append((name, value))
    return v.object_of(fields)


def operators_of(stages: list[bytes]) -> set[str]:
    """Every name with a dollar in the stages, for the count of what was used."""
    found: set[str] = set()
    level = list(stages)
    while level:
        below = []
        for document in level:
            for name, kind, data in v.fields_of(document):
                if name[:1] == b"$":
                    found.add(name.decode("utf-8", "replace"))
                if kind in (v.OBJECT, v.ARRAY):
                    below.append(data)
        level = below
    return found
