"""Shortcuts of the plain language compared with the long ways that they stand for: what they leave out must not show.

The fuzz of expressions compares both with mongod; these tests find rare differences sooner, and need no server.
"""

from __future__ import annotations

from typing import Any

import bson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.expression import compile_stages
from tailrace.core.expression.stages.redact import Redact
from tailrace.core.expression.values import value as v
from tailrace.errors import ServerError
from tests.amounts import amount

NAMES = ("a", "level", "b", "levels", "0")
LEAVES = st.one_of(
    st.integers(-(2**40), 2**40), st.floats(), st.booleans(), st.none(), st.sampled_from(["keep", "level", "\3\4"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
#: Conditions on fields of each level, also on other things, and conditions that fail or are missing if a field is.
DECISIONS: list[Any] = [
    {"$cond": [{"$eq": ["$level", 1]}, "$$PRUNE", "$$DESCEND"]},
    {"$cond": [{"$gt": ["$level", 1]}, "$$KEEP", "$$DESCEND"]},
    {"$cond": [{"$ifNull": ["$level", False]}, "$$DESCEND", "$$PRUNE"]},
    {"$cond": [{"$eq": ["$$ROOT.level", 1]}, "$$PRUNE", "$$DESCEND"]},
    {"$cond": [{"$eq": ["$a.level", "$b"]}, "$$PRUNE", "$$DESCEND"]},
    {"$cond": [{"$eq": [{"$size": "$level"}, 1]}, "$$PRUNE", "$$DESCEND"]},
    {"$ifNull": ["$level", "$$DESCEND"]},
    "$$DESCEND",
    "$$KEEP",
    "$level",
]


def _applied(stage: dict[str, Any], document: bytes) -> bytes | int | None:
    try:
        return compile_stages([bson.encode(stage)]).apply(document)
    except ServerError as error:
        return error.code


@pytest.mark.parametrize("decision", DECISIONS, ids=str)
@given(document=DOCUMENTS)
@settings(max_examples=amount(20, 60), deadline=None)
def test_redact_decides_as_if_it_looked_at_every_level(decision: Any, document: dict[str, Any]) -> None:
    whole = bson.encode(document)
    quick = _applied({"$redact": decision}, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Redact, "_decision_without_names", lambda self: None)
        assert _applied({"$redact": decision}, whole) == quick


def test_redact_numbers_the_elements_of_an_array_anew() -> None:
    """The long way of the server, which makes every array again on the way down."""
    item = bson.encode({"c": 3})
    elements = b"\x035\x00" + item + b"\x035\x00" + item
    array = (len(elements) + 5).to_bytes(4, "little") + elements + b"\x00"
    odd = bson.encode({"a": {"b": [0]}}).replace(bson.encode({"0": 0}), array)
    odd = len(odd).to_bytes(4, "little") + b"\x03a\x00" + (len(odd) - 8).to_bytes(4, "little") + odd[11:]
    made = _applied({"$redact": {"$cond": ["$level", "$$PRUNE", "$$DESCEND"]}}, odd)
    assert made == bson.encode({"a": {"b": [{"c": 3}, {"c": 3}]}})
    assert _applied({"$redact": "$$KEEP"}, odd) == odd


@given(document=DOCUMENTS, other=DOCUMENTS)
@settings(max_examples=amount(40, 200), deadline=None)
def test_merged_objects_are_those_of_two_documents(document: dict[str, Any], other: dict[str, Any]) -> None:
    """An object in the pipeline is merged without being made first, with the same result as a ``$literal`` of the
    document."""
    whole = bson.encode({"d": document, "x": other.get("a", 1)})
    literal = {"a": "$x", "missing": "$nothing", "b": other.get("b", 2)}
    made = {
        "$setField": {
            "field": "b",
            "input": {"$setField": {"field": "a", "input": {}, "value": "$x"}},
            "value": {"$literal": other.get("b", 2)},
        }
    }
    literal["b"] = {"$literal": literal["b"]}
    stages = ({"$replaceWith": {"$mergeObjects": ["$d", each]}} for each in (literal, made))
    assert len({_applied(stage, whole) for stage in stages}) == 1


@given(values=st.lists(st.integers(-(2**31), 2**31 - 1) | st.booleans() | st.none(), max_size=8))
@settings(max_examples=amount(40, 200), deadline=None)
def test_the_sum_of_ints_is_that_of_the_same_longs(values: list[Any]) -> None:
    longs = [bson.Int64(one) if type(one) is int else one for one in values]
    ints, wide = (
        bson.decode(_applied({"$replaceWith": {"s": {"$sum": "$v"}}}, bson.encode({"v": each})))
        for each in (values, longs)
    )
    assert ints == wide


@given(items=st.lists(DOCUMENTS | LEAVES, max_size=5))
@settings(max_examples=amount(40, 200), deadline=None)
def test_what_a_filter_hands_on_is_what_it_would_have_written(items: list[Any]) -> None:
    """``$map`` and ``$reduce`` take the elements of a ``$filter`` as they are; in ``$concatArrays`` it writes them."""
    kept = {"$filter": {"input": "$v", "cond": {"$ne": ["$$this.level", 1]}}}
    whole = bson.encode({"v": items})
    for source in ("$map", "$reduce"):
        more = {"initialValue": []} if source == "$reduce" else {}
        body = {"$concatArrays": ["$$value", ["$$this"]]} if more else ["$$this"]
        direct, written = (
            _applied({"$replaceWith": {"r": {source: {"input": given_, "in": body, **more}}}}, whole)
            for given_ in (kept, {"$concatArrays": [kept]})
        )
        assert direct == written


@given(document=DOCUMENTS)
@settings(max_examples=amount(40, 200), deadline=None)
def test_nested_values_are_found_among_the_others(document: dict[str, Any]) -> None:
    whole = bson.encode(document)
    assert v.nested_of(whole) == [one for one in v.elements_of((v.OBJECT, whole)) if one[0] in v.NESTED]
    assert v.numbers_its_arrays(whole)
