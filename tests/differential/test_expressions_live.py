"""A short slice of the expression fuzz; ``make fuzz-expressions`` runs as many expressions as asked."""

from __future__ import annotations

import importlib.util
import math
import struct
from datetime import UTC, datetime
from typing import Any

import bson
import pytest

from tailrace.core.expression.language.registry import OPERATORS
from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.differential import expression_grammar as grammar
from tests.differential.fuzz_expressions import Server, Totals, compare_stage, fuzz
from tests.differential.icu import WITHOUT_ICU

pytestmark = pytest.mark.mongod


@pytest.fixture(scope="module")
def server(replica_set: ReplicaSet) -> Server:
    return Server(replica_set.uri)


@pytest.mark.parametrize("seed", [1001, 1002, 1003])
def test_random_stages_give_the_servers_bytes_and_error_codes(server: Server, seed: int) -> None:
    stages = amount(80, 250)
    totals = fuzz(server, seed, stages)
    assert totals.comparisons > 4 * stages
    assert totals.differences == []


@pytest.mark.parametrize("stages", [amount(1, 4), pytest.param(12, marks=pytest.mark.slow)])
def test_every_operator_gives_the_servers_bytes_and_error_codes(server: Server, stages: int) -> None:
    names = sorted(set(grammar.Grammar(grammar.random.Random(0)).all))
    whole = Totals()
    for place, name in enumerate(names):
        totals = fuzz(server, 2000 + place, stages, only=frozenset({name}), size=12)
        whole.comparisons += totals.comparisons
        whole.differences += totals.differences
    assert whole.comparisons > 400 * stages
    assert whole.differences == []


def test_the_grammar_knows_every_operator_that_is_supported() -> None:
    # $meta accepts only a constant, and depends on where the server runs it
    assert set(grammar.Grammar(grammar.random.Random(0)).all) | {"$const", "$meta"} == set(OPERATORS)


NEGATIVE_NAN = struct.unpack("<d", bytes.fromhex("000000000000f8ff"))[0]
#: A millisecond before 1970: before it, what does not fit would wrap around and fit.
MOMENT = datetime.fromtimestamp(-0.001, UTC)
#: What the fuzz found: a document, an expression on it, and the collation that it was found under.
FOUND: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = [
    ({"n": 5e-324}, {"$toString": "$n"}, None),
    ({"n": -1.1e-320}, {"$concat": [{"$toString": "$n"}, "x"]}, None),
    ({"n": NEGATIVE_NAN}, {"$atan2": ["$n", 1.5]}, None),
    ({"n": NEGATIVE_NAN, "m": math.nan}, {"$atan2": ["$n", "$m"]}, None),
    ({"n": NEGATIVE_NAN, "m": math.nan}, {"$atan2": ["$m", "$n"]}, None),
    ({"d": MOMENT, "n": math.nan}, {"$subtract": ["$d", "$n"]}, None),
    ({"d": MOMENT, "n": -math.inf}, {"$subtract": ["$d", "$n"]}, None),
    ({"d": MOMENT, "n": 2.0**63}, {"$subtract": ["$d", "$n"]}, None),
    ({"d": MOMENT, "n": -(2.0**63)}, {"$subtract": ["$d", "$n"]}, None),
    ({"d": MOMENT, "n": bson.Decimal128("NaN")}, {"$subtract": ["$d", "$n"]}, None),
    ({"d": MOMENT, "n": bson.Decimal128("-9223372036854775808.4")}, {"$subtract": ["$d", "$n"]}, None),
    ({"d": MOMENT, "n": bson.Decimal128("9223372036854775807.6")}, {"$add": ["$d", "$n"]}, None),
    ({"n": bson.Decimal128("1E-6176")}, {"$log": ["$n", -9.223372036854776e18]}, None),
    ({"b": ["E"]}, {"$setUnion": [1, "$nope"]}, {"locale": "en"}),
    ({"b": ["a", "B"]}, {"$setUnion": [["A"], "$b", ["b"]]}, {"locale": "en", "strength": 1}),
    ({"b": [[]]}, {"$setIntersection": [True, "$nope"]}, {"locale": "en"}),
]


@pytest.mark.parametrize("place", range(len(FOUND)))
def test_what_the_fuzz_has_found_stays_mended(server: Server, place: int) -> None:
    document, expression, collation = FOUND[place]
    if collation is not None and importlib.util.find_spec("icu") is None:
        pytest.skip(WITHOUT_ICU)
    totals = Totals()
    documents = [bson.encode({"_id": 0, **document})]
    server.load(documents)
    server.collation = collation
    compare_stage(server, [bson.encode({"$replaceWith": {"r": expression}})], documents, totals)
    assert totals.comparisons == 1
    assert totals.differences == []


SCHEMAS: list[dict[str, Any]] = [
    {"minProperties": 1},
    {"maxProperties": 9},
    {"properties": {"a": {"type": "string"}}},
    {"required": ["a"]},
    {"additionalProperties": True},
    {"patternProperties": {"b": {}}},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_schema_that_lists_fields_shows_the_nameless_one_to_its_neighbours(server: Server, schema: Any) -> None:
    """In half a million comparisons the fuzz had never combined a schema with a field without a name."""
    totals = Totals()
    documents = [bson.encode({"_id": 0, "a": "x", "": 5}), bson.encode({"_id": 1, "a": "x"})]
    server.load(documents)
    server.collation = None
    compare_stage(
        server, [bson.encode({"$match": {"": {"$type": "number"}, "$jsonSchema": schema}})], documents, totals
    )
    assert totals.differences == []


#: Decimals at every edge: of digits, of exponents, of signs.
_EDGES = """1 1.5 -2.25 123456789012345678901234567890.1234 9.999999999999999999999999999999999 0 -0 0.000 0E+10 0E-6176
1E-6176 1E+6111 9.999999999999999999999999999999999E+6144 1E+20 12345E-10 -5E-3 1.25E+30 NaN -NaN Infinity -Infinity
1234567890123456789012345678901234 -1E-6150"""
_ROUNDED = [
    {name: ["$n", places]} for name in ("$round", "$trunc") for places in (-20, -1, 0, 1, 20, 33, 34, 35, 60, 100)
]
_DEGREES = [{"$degreesToRadians": "$n"}, {"$radiansToDegrees": "$n"}]


def test_decimals_are_rounded_and_turned_as_on_the_server(server: Server) -> None:
    """The grammar's places for ``$round`` were small: never more than the digits that a decimal has left."""
    rng = grammar.random.Random(5)
    texts = _EDGES.split() + [f"{rng.randint(-(10**33), 10**34)}E{rng.randint(-60, 30)}" for _ in range(200)]
    documents = [bson.encode({"_id": place, "n": bson.Decimal128(text)}) for place, text in enumerate(texts)]
    server.load(documents)
    server.collation = None
    totals = Totals()
    for expression in (*_ROUNDED, *_DEGREES):
        compare_stage(server, [bson.encode({"$replaceWith": {"r": expression}})], documents, totals)
    assert totals.differences == []
    assert totals.comparisons == len(texts) * 22


#: Some of these are equal and not identical.
_NUMBERS_AND_MORE = (1, 1.0, bson.Int64(1), 2, 2.0, None, "x")


@pytest.mark.parametrize("alike", [True, False])
def test_long_arrays_of_equal_elements_are_sorted_as_the_servers_library_sorts_them(
    server: Server, alike: bool
) -> None:
    """No array of the fuzz had more than sixteen elements with some that are equal but not identical."""
    if server.is_for_windows and not alike:
        pytest.skip("a mongod for Windows sorts by another library (docs/reference/differences.md)")
    rng = grammar.random.Random(6)
    documents, totals = [], Totals()
    for place in range(120):
        size = rng.choice((15, 16, 17, 18, 33, 60, 200))
        found: list[Any] = [
            {"$id": rng.randint(0, 3), "b": rng.randint(0, 1), "i": 0 if alike else i} for i in range(size)
        ]
        if place % 3 == 0:
            found = [rng.choice(_NUMBERS_AND_MORE) for _ in range(size)]
        if place % 3 == 0 and alike:
            found = [{"$id": one if isinstance(one, str) else 1.5, "b": 0} for one in found]
        documents.append(bson.encode({"_id": place, "list": found}))
    server.load(documents)
    server.collation = None
    orders = [1, -1, {"$id": 1, "b": 1}, {"$id": -1, "b": 1}]
    for by in orders if alike else [*orders, {"$id": 1}, {"nope": 1}]:
        expression = {"$sortArray": {"input": "$list", "sortBy": by}}
        compare_stage(server, [bson.encode({"$replaceWith": {"r": expression}})], documents, totals)
    assert totals.differences == []
    assert totals.comparisons == (480 if alike else 720)


@pytest.mark.parametrize(
    "arguments", [[0, "$a"], [None, 0, "$a"], ["$a", 0, "$b"], [None, "$a"], [None, None, "$a"], ["$a", None]]
)
def test_constants_of_if_null_are_taken_beforehand(server: Server, arguments: list[Any]) -> None:
    """Found by the fuzz: if the first argument is constant, the error of the whole expression is raised on opening."""
    stages = [{"$replaceWith": {"r": {"$toInt": "$b"}}}, {"$set": {"r": {"$toDate": {"$ifNull": arguments}}}}]
    documents = [bson.encode({"_id": 0, "b": "no number"}), bson.encode({"_id": 1, "b": "1"})]
    server.load(documents)
    server.collation = None
    totals = Totals()
    compare_stage(server, [bson.encode(stage) for stage in stages], documents, totals)
    assert totals.differences == []


@pytest.mark.parametrize(
    ("number", "divisor"),
    [
        ("9.9E6144", "3E-6176"),
        ("9.9E6144", "7E-6176"),
        ("1E40", "3"),
        ("3E40", "3"),
        ("1E34", "0.1"),
        ("1E-6176", "5E6111"),
        ("1", "Infinity"),
        ("0", "Infinity"),
    ],
)
def test_a_decimal_far_larger_than_its_divisor_is_a_multiple_or_not(server: Server, number: str, divisor: str) -> None:
    """A quotient of more than 34 digits ended in Python's own error; the fuzz draws one in few of its seeds."""
    totals = Totals()
    documents = [bson.encode({"_id": 0, "n": bson.Decimal128(number)})]
    server.load(documents)
    server.collation = None
    schema = {"properties": {"n": {"multipleOf": bson.Decimal128(divisor)}}}
    compare_stage(server, [bson.encode({"$match": {"$jsonSchema": schema}})], documents, totals)
    assert totals.comparisons == 1
    assert totals.differences == []
