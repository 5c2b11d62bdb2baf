"""The server's limits, each one below, at and one above its edge: strings, arrays, paths, depth, numbers as text.

The fuzz has small documents and short numbers, so nothing had come near a limit.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.expression.language.version import buffer_limit
from tailrace.embedded import ReplicaSet
from tests.differential.fuzz_expressions import Server, Totals, compare_stage
from tests.server_in_use import IS_FOR_WINDOWS, LANGUAGE

pytestmark = pytest.mark.mongod

MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def server(replica_set: ReplicaSet) -> Server:
    return Server(replica_set.uri)


def compare(server: Server, stages: list[dict[str, Any]], document: dict[str, Any]) -> int:
    """One comparison; gives the code of the error that both end with, or 0."""
    documents = [bson.encode({"_id": 0, **document})]
    server.load(documents)
    server.collation = None
    totals = Totals()
    compare_stage(server, [bson.encode(stage) for stage in stages], documents, totals)
    assert totals.differences == []
    assert (totals.comparisons, totals.refused) == (1, 0)
    return next(iter(totals.errors), 0)


def repeated(times: int, wrap: Any, start: Any) -> Any:
    return functools.reduce(lambda inner, _: wrap(inner), range(times), start)


def length(of: Any) -> list[dict[str, Any]]:
    return [{"$project": {"n": {"$strLenBytes": of}}}]


# Here and below, cases that are answered like their neighbour at the edge are slow: each compares documents of 16 MB.
@pytest.mark.parametrize(("more", "code"), [(-1, 0), (0, 16493), pytest.param(1, 16493, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operator", ["$concat", "$replaceOne", "$replaceAll", "$reduce"])
def test_a_string_of_16_megabytes_is_too_long(server: Server, operator: str, more: int, code: int) -> None:
    text = "x" * (4 * MEGABYTE)
    rest = "y" * (MEGABYTE + more)
    made: dict[str, Any] = {
        "$concat": {"$concat": ["$a", "$a", "$a", {"$substrBytes": ["$a", 0, 3 * MEGABYTE]}, "$b"]},
        "$replaceOne": {"$replaceOne": {"input": "$a", "find": "x", "replacement": {"$concat": ["$c", "$c"]}}},
        "$replaceAll": {"$replaceAll": {"input": "$d", "find": "z", "replacement": "$a"}},
        "$reduce": {
            "$reduce": {"input": ["$a", "$a", "$a", "$e"], "initialValue": "", "in": {"$concat": ["$$value", "$$this"]}}
        },
    }
    document = {"a": text, "b": rest}
    if operator == "$replaceOne":
        document = {"a": "x" * (4 * MEGABYTE + 1 + more), "c": "y" * (6 * MEGABYTE)}
    elif operator == "$replaceAll":
        document = {"a": text, "d": "zzz" + "w" * (4 * MEGABYTE + more)}
    elif operator == "$reduce":
        document = {"a": text, "e": "w" * (4 * MEGABYTE + more)}
    assert compare(server, length(made[operator]), document) == code


@pytest.mark.parametrize(("more", "code"), [pytest.param(-1, 16493, marks=pytest.mark.slow), (0, 16493), (1, 13548)])
def test_a_buffer_of_64_megabytes_is_not_passed(server: Server, more: int, code: int) -> None:
    """125 MB from 7.0 on."""
    text = "x" * (8 * MEGABYTE)
    tail = "y" * (4 * MEGABYTE + more)
    whole, rest = divmod(buffer_limit(LANGUAGE) // MEGABYTE - 4, 8)
    parts = ["$a"] * whole + ["$b", {"$substrBytes": ["$a", 0, rest * MEGABYTE]}]
    assert compare(server, length({"$concat": parts}), {"a": text, "b": tail}) == code
    with_null = {"$project": {"n": {"$concat": [*parts, "$nope"]}}}
    assert compare(server, [with_null], {"a": text, "b": tail}) == (13548 if more == 1 else 0)
    doubled = {
        "$reduce": {"input": {"$range": [0, 40]}, "initialValue": "a", "in": {"$concat": ["$$value", "$$value"]}}
    }
    assert compare(server, length(doubled), {}) == 16493


@pytest.mark.parametrize(("count", "code"), [pytest.param(6_553_597, 0, marks=pytest.mark.slow), (6_553_598, 146)])
def test_the_longest_range(server: Server, count: int, code: int) -> None:
    assert compare(server, [{"$project": {"n": {"$size": {"$range": [0, "$n"]}}}}], {"n": count}) == code


@pytest.mark.parametrize(("levels", "code"), [(198, 0), (199, 0), (200, 15), (250, 15)])
@pytest.mark.parametrize("inner", [["$$value"], {"a": "$$value"}])
def test_what_an_expression_makes_nests_to_200(server: Server, inner: Any, levels: int, code: int) -> None:
    deep = {"$reduce": {"input": {"$range": [0, levels]}, "initialValue": 1, "in": inner}}
    assert compare(server, [{"$set": {"x": deep}}], {}) == code
    assert compare(server, [{"$set": {"x": deep}}, {"$unset": "x"}], {}) == 0
    assert compare(server, [{"$set": {"x": {"$eq": [deep, deep]}}}], {}) == 0


@pytest.mark.parametrize(("levels", "code"), [(196, 0), (197, 0), (198, 15), (199, 15)])
def test_a_stage_nests_to_199(server: Server, levels: int, code: int) -> None:
    assert compare(server, [{"$set": {"x": repeated(levels, lambda inner: [inner], 1)}}], {}) == code
    assert compare(server, [{"$set": {"x": repeated(levels, lambda inner: {"$abs": inner}, -1)}}], {}) == code


@pytest.mark.parametrize(("levels", "code"), [(97, 0), (98, 0), (99, 15), (100, 15)])
def test_a_query_s_logic_nests_to_98(server: Server, levels: int, code: int) -> None:
    assert compare(server, [{"$match": repeated(levels, lambda inner: {"$and": [inner]}, {"s": 1})}], {"s": 1}) == code


@pytest.mark.parametrize("levels", [99, 100, 101, 150, 190])
@pytest.mark.parametrize("operator", ["$not", "$elemMatch"])
def test_what_a_query_asks_of_a_value_nests_deeper(server: Server, operator: str, levels: int) -> None:
    query = {"s": repeated(levels, lambda inner: {operator: inner}, {"$gt": 1})}
    assert compare(server, [{"$match": query}], {"s": "x"}) == 0


@pytest.mark.parametrize(("names", "code"), [(179, 0), (180, 0), (181, 5729100), (200, 5729100)])
def test_a_query_s_path_has_180_names(server: Server, names: int, code: int) -> None:
    path = ".".join("a" * names)
    assert compare(server, [{"$match": {path: 1}}], {"a": 1}) == code
    assert compare(server, [{"$match": {"x": {"$elemMatch": {path: {"$exists": True}}}}}], {"a": 1}) == code


@pytest.mark.parametrize("names", [198, 199, 200, 201])
def test_paths_of_expressions_and_projections_have_200_names(server: Server, names: int) -> None:
    path = ".".join("a" * names)
    found = [
        compare(server, [stage], {"a": 1})
        for stage in (
            {"$set": {"x": "$" + path}},
            {"$set": {"x": "$$ROOT." + path}},
            {"$set": {path: 1}},
            {"$project": {path: 1}},
            {"$unset": path},
        )
    ]
    own = 15 if names > 200 else 0
    assert found == [15 if names > 199 else 0, 15 if names > 199 else 0, own, own, own]


@pytest.mark.parametrize("names", [197, 198, 199, 200])
@pytest.mark.parametrize("nested", [{"k": "$z"}, {"k": 1}, {"k": {"j": "$z"}}, {"k": ["$z"]}, ["$z"]])
def test_nested_names_count_like_dotted_ones(server: Server, names: int, nested: Any) -> None:
    """They are refused when the pipeline is read. Only dotted paths had been tried, and only without another fault."""
    path = ".".join("b" * names)
    fails = {"$divide": [1, "$z"]}
    for stage in ("$set", "$project"):
        compare(server, [{stage: {path: nested}}], {"a": 1})
        compare(server, [{stage: {"q": fails, path: nested}}], {"a": 1, "z": 0})


def test_depth_is_looked_at_before_any_stage_is_parsed(server: Server) -> None:
    """The command itself is nested too deep. Two stages, each with a fault of its own, had not been tried."""
    deep = repeated(99, lambda inner: {"$and": [inner]}, {"s": 1})
    assert compare(server, [{"$project": {"a.b": 1, "a": 1}}, {"$match": deep}], {"s": 1}) == 15


def is_left_out(operator: str, text: str) -> bool:
    """The C library of Windows reads subnormal doubles, where the servers' own reader on Linux finds no number."""
    return IS_FOR_WINDOWS and operator == "$toDouble" and 0 < abs(float(text)) < sys.float_info.min


DIGITS = [19, 20, 308, 309, 310, 4300, 4301, 6144, 6145, 6146, 100_000]


@pytest.mark.parametrize("count", DIGITS)
def test_numbers_of_many_digits_as_text(server: Server, count: int) -> None:
    """Python reads no integer of more than 4300 digits, and said so in an error of its own."""
    texts = [
        "1" * count,
        "-" + "9" * count,
        "0" * count + "7",
        "+" + "0" * count,
        f"0.{'0' * count}1",
        f"1E{'9' * count}",
    ]
    for operator in ("$toInt", "$toLong", "$toDouble", "$toDecimal", "$toBool"):
        for text in texts:
            if not is_left_out(operator, text):
                compare(server, [{"$set": {"x": {operator: "$a"}}}], {"a": text})


@pytest.mark.parametrize("exponent", [308, 309, 323, 324, 325, 6143, 6144, 6145, 6175, 6176, 6177, 6200])
def test_exponents_as_text(server: Server, exponent: int) -> None:
    for text in (f"1E-{exponent}", f"1E+{exponent}", f"12345E-{exponent}", f"0E-{exponent}", f"0E+{exponent}"):
        for operator in ("$toDouble", "$toDecimal"):
            if not is_left_out(operator, text):
                compare(server, [{"$set": {"x": {operator: "$a"}}}], {"a": text})


@pytest.mark.parametrize("places", [-21, -20, -19, 99, 100, 101, 2**31 - 1])
@pytest.mark.parametrize("number", [15, bson.Int64(2**62), 1.5, 1e300])
def test_the_places_of_round_and_trunc(server: Server, number: Any, places: int) -> None:
    for operator in ("$round", "$trunc"):
        compare(server, [{"$set": {"x": {operator: ["$n", "$p"]}}}], {"n": number, "p": places})


def test_an_event_that_fits_into_no_buffer_is_said_so_as_the_server_says_it(server: Server) -> None:
    fields = {f"f{at}": "$a" for at in range(buffer_limit(LANGUAGE) // MEGABYTE // 8)}
    assert compare(server, [{"$set": fields}], {"a": "x" * (9 * MEGABYTE)}) == 13548


def test_what_grows_without_end_on_the_server_has_a_bound() -> None:
    """Not compared: mongod would take all the memory of the machine."""
    both = ["$$value", "$$value"]
    text = "x" * 10_000
    for start, inner in (([text], {"$concatArrays": both}), ([1], both), ({"a": 1}, {"a": "$$value", "b": "$$value"})):
        grown = {"$reduce": {"input": {"$range": [0, 60]}, "initialValue": {"$literal": start}, "in": inner}}
        with pytest.raises(Exception, match="grew past 128 MB") as raised:
            compile_stages([bson.encode({"$set": {"x": {"$size": {"$concatArrays": [[grown]]}}}})]).apply(
                bson.encode({"_id": 1})
            )
        assert getattr(raised.value, "code", None) == 13548
