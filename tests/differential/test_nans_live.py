"""Which NaN a computation gives: every bit of it, in code that has just been loaded and in code that ran often.

A NaN has a sign and a payload, and of two NaNs one is the result. CPython leaves that choice to its C compiler, and
swaps the operands once it has specialised an addition. No test had seen it, since all comparisons ran in warm code.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.expression.values import value as v
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tests.differential.fuzz_expressions import Server
from tests.golden.record_operators import server_answers_of_stage


def double_of(bits: str) -> v.Value:
    return (v.DOUBLE, bytes.fromhex(bits)[::-1])


def decimal_of(bits: str) -> v.Value:
    return (v.DECIMAL, bytes.fromhex(bits)[::-1])


VALUES = [
    double_of("7ff8000000000000"),
    double_of("fff8000000000000"),
    double_of("7ff8000000000001"),
    double_of("fff8000000000002"),
    double_of("7ff0000000000001"),  # a signalling one
    double_of("ffffffffffffffff"),  # its payload has more digits than one of a decimal
    v.double(float("inf")),
    v.double(float("-inf")),
    v.double(0.0),
    v.int32(1),
    v.int32(2),
    v.int64(3),
    decimal_of("30400000000000000000000000000001"),
    decimal_of("7c000000000000000000000000000000"),
    decimal_of("7c000000000000000000000000000005"),
    decimal_of("fc0000000000000000000000000000ff"),
    decimal_of("7c003fffffffffffffffffffffffffff"),  # a payload that is too long for the type
]
LISTS = ["$add", "$multiply", "$sum", "$avg", "$stdDevPop", "$stdDevSamp", "$max", "$min"]
PAIRS = ["$subtract", "$divide", "$mod", "$pow", "$atan2", "$log"]
SINGLE = [
    "$abs", "$ceil", "$floor", "$round", "$trunc", "$sqrt", "$exp", "$ln", "$log10", "$sin", "$degreesToRadians",
    "$radiansToDegrees", "$toDecimal", "$toDouble", "$toString", "$toBool",
]  # fmt: skip
NOT_SUPPORTED = 115
#: Where versions differ from what we give for all of them (docs/reference/differences.md).
OTHERWISE = {
    "5.0": {"$add", "$mod"},
    "4.4": {"$add", "$sum", "$avg", "$mod", "$divide", "$subtract", "$multiply", "$ceil", "$floor"},
    "7.0": {"$multiply", "$pow", "$ceil", "$floor", "$ln", "$log10"},  # the C library of Windows
}


@pytest.fixture(scope="module")
def server(replica_set: ReplicaSet) -> Server:
    return Server(replica_set.uri)


def documents(names: str) -> list[bytes]:
    return [
        v.object_of([(b"_id", v.int32(number)), *zip((one.encode() for one in names), values, strict=True)])[1]
        for number, values in enumerate(itertools.product(VALUES, repeat=len(names)))
    ]


def ours(stage: bytes, given: list[bytes], version: tuple[int, ...]) -> list[int | bytes]:
    pipeline = compile_stages([stage], version=version, now=0)
    answers: list[int | bytes] = []
    for document in given:
        try:
            made = pipeline.apply(document)
            assert made is not None
            answers.append(made)
        except TailraceError as error:
            answers.append(error.code or -1)
    return answers


def unspecialised(frame: Any, event: str, argument: Any) -> None:
    """A profiler, under which CPython 3.11 runs no specialised instruction."""


@pytest.mark.parametrize(
    ("operators", "names"), [(LISTS, "ab"), (PAIRS, "ab"), (SINGLE, "a")], ids=["of lists", "of two", "of one"]
)
def test_a_nan_is_the_server_s_in_every_bit(
    server: Server, replica_set: ReplicaSet, operators: list[str], names: str
) -> None:
    version = tuple(map(int, replica_set.version.split(".")))
    given = documents(names)
    server.load(given)
    different: dict[str, Any] = {}
    nans = 0
    for name in operators:
        arguments = [f"${one}" for one in names]
        stage = bson.encode({"$replaceWith": {"r": {name: arguments}}})
        theirs = server_answers_of_stage(server, stage, 0, len(given))
        for _ in range(2):
            warm = ours(stage, given, version)
        sys.setprofile(unspecialised)
        try:
            cold = ours(stage, given, version)
        finally:
            sys.setprofile(None)
        assert warm == cold, name
        met = [mine in (their, NOT_SUPPORTED) for their, mine in zip(theirs, cold, strict=True)]
        nans += sum(isinstance(one, bytes) and b"\xf8" in one[-4:] for one in cold)
        if not all(met):
            different[name] = [(bson.decode(given[at]), theirs[at], cold[at]) for at in range(len(met)) if not met[at]]
    assert nans > len(operators), "the values give no NaN"
    assert set(different) <= OTHERWISE.get(replica_set.version[:3], set()), different
