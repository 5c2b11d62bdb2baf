"""Merged deltas give the same document as the deltas applied one after the other."""

from __future__ import annotations

import bson
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.read.images.delta import apply_operation
from tailrace.read.window.merge_updates import merged, updated_fields

_NAMES = ("a", "b", "$v", "diff", "u", "")
_VALUES = st.one_of(st.integers(-5, 2**40), st.text(max_size=5), st.none(), st.lists(st.integers(0, 9), max_size=2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(_NAMES), _VALUES, min_size=1), min_size=1, max_size=6))
def test_merged_deltas_equal_one_after_the_other(deltas: list[dict[str, object]]) -> None:
    document = bson.encode({"_id": 1, **dict.fromkeys(_NAMES, 0), "rest": "x"})
    changes = [bson.encode({"$v": 2, "diff": {"u": delta}}) for delta in deltas]
    after: bytes | None = document
    for change in changes:
        after = apply_operation(after, b"u", change)
    one = merged(changes)
    assert one is not None
    assert apply_operation(document, b"u", one) == after


def test_anything_else_is_left_alone() -> None:
    for diff in ({"d": {"a": False}}, {"u": {"a": 1}, "i": {"b": 1}}, {"sa": {"u": {"b": 1}}}, {"i": {"a": 1}}):
        assert updated_fields(bson.encode({"$v": 2, "diff": diff})) == -1
    assert updated_fields(bson.encode({"_id": 1, "diff": {"u": {"a": 1}}})) == -1
    assert updated_fields(bson.encode({"$v": 1, "$set": {"a": 1}})) == -1
    assert updated_fields(b"\5\0\0\0\0") == -1
    assert merged([bson.encode({"$v": 2, "diff": {"u": {"a": 1}}}), bson.encode({"_id": 1})]) is None
