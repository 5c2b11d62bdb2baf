"""Every bit of a computed NaN, as given by mongod 6.0.27: in cold code, and in code that ran often.

``tests/differential/test_nans_live.py`` asks servers for more of them.
"""

from __future__ import annotations

import sys
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.expression.values import value as v

PLUS, MINUS, LATER = "7ff8000000000000", "fff8000000000000", "7ff8000000000001"
SIGNALLING, LONG = "7ff0000000000001", "ffffffffffffffff"
INFINITE, LEAST, TWO = "7ff0000000000000", "fff0000000000000", "4000000000000000"
DECIMAL, NAN, NAN_5 = "30400000000000000000000000000001", "7c" + "0" * 30, "7c" + "0" * 29 + "5"


@pytest.mark.parametrize(
    ("operator", "given", "result"),
    [
        ("$add", (PLUS, MINUS), MINUS),
        ("$add", (MINUS, LATER), LATER),
        ("$add", (INFINITE, LEAST), MINUS),
        ("$multiply", (MINUS, PLUS), PLUS),
        ("$multiply", (LATER, SIGNALLING), LATER),
        ("$sum", (PLUS, MINUS), MINUS),
        ("$avg", (LATER, PLUS), PLUS),
        ("$stdDevPop", (PLUS, MINUS), MINUS),
        ("$subtract", (PLUS, MINUS), PLUS),
        ("$mod", (INFINITE, LATER), LATER),
        ("$mod", (INFINITE, TWO), MINUS),
        ("$pow", (SIGNALLING, "0" * 16), LATER),
        ("$abs", (SIGNALLING,), SIGNALLING),
        ("$ceil", (SIGNALLING,), LATER),
        ("$round", (LONG,), MINUS),
        ("$add", (LATER, DECIMAL), "7c" + "0" * 14 + "08" + "0" * 14),
        ("$add", (NAN_5, DECIMAL), NAN_5),
        ("$abs", ("fc" + NAN_5[2:],), NAN_5),
        ("$toDouble", ("fc" + NAN[2:],), MINUS),
    ],
)
def test_a_nan_has_the_server_s_bits(operator: str, given: tuple[str, ...], result: str) -> None:
    names = "ab"[: len(given)]
    stage = bson.encode({"$replaceWith": {"r": {operator: [f"${name}" for name in names]}}})
    pipeline = compile_stages([stage], version=(6, 0, 27), now=0)
    document = v.object_of((name.encode(), number(bits)) for name, bits in zip(names, given, strict=True))[1]
    wanted = v.object_of([(b"r", number(result))])[1]
    sys.setprofile(not_specialised)
    try:
        cold = pipeline.apply(document)
    finally:
        sys.setprofile(None)
    assert cold == wanted
    for _ in range(100):
        warm = pipeline.apply(document)
    assert warm == wanted


def test_a_decimal_nan_is_a_text_without_its_payload() -> None:
    pipeline = compile_stages([bson.encode({"$replaceWith": {"r": {"$toString": "$a"}}})], version=(6, 0, 27), now=0)
    assert pipeline.apply(v.object_of([(b"a", number(NAN_5))])[1]) == bson.encode({"r": "NaN"})


def number(bits: str) -> v.Value:
    return (v.DECIMAL if len(bits) == 32 else v.DOUBLE, bytes.fromhex(bits)[::-1])


def not_specialised(frame: Any, event: str, argument: Any) -> None:
    """A profiler, under which CPython 3.11 runs no specialised instruction."""
