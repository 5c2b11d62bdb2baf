"""Post-images by applying the delta: what mongod 6.0.27 gave for each of these shapes (``fullDocument: required``).

Documents are written as lists of pairs: some of them hold a name twice, which a dict would hide.
"""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.core import raw_bson
from tailrace.core.oplog.update_delta import apply_diff
from tailrace.errors import OplogFormatError

Pairs = list[tuple[str, Any]]


def document(pairs: Pairs) -> bytes:
    return raw_bson.encode_document(*(bson.encode({name: value})[4:-1] for name, value in pairs))


@pytest.mark.parametrize(
    ("before", "diff", "after"),
    [
        pytest.param(
            [("_id", 0), ("a", 1), ("b", 2), ("pad", "p")],
            {"i": {"b": 2, "a": 5, "new": 1}},
            [("_id", 0), ("a", 1), ("b", 2), ("pad", "p"), ("b", 2), ("a", 5), ("new", 1)],
            id="insertions alone are appended unseen",
        ),
        pytest.param(
            [("_id", 0), ("a", 1), ("b", 2), ("pad", "p"), ("c", 3)],
            {"d": {"a": False, "b": False}, "i": {"_id": 0, "c": 9}},
            [("pad", "p"), ("_id", 0), ("c", 9)],
            id="beside deletions an insertion moves the field to the end",
        ),
        pytest.param(
            [("_id", 1), ("x", 1), ("x", 2), ("pad", "p"), ("a", 2)],
            {"d": {"x": False}, "u": {"a": 9}, "i": {"q": 1}},
            [("_id", 1), ("pad", "p"), ("a", 9), ("q", 1)],
            id="a deletion takes every field of the name",
        ),
        pytest.param(
            [("_id", 4), ("a", 1), ("b", 2), ("pad", "p"), ("a", 3)],
            {"u": {"a": 7}},
            [("_id", 4), ("a", 7), ("b", 2), ("pad", "p"), ("a", 7)],
            id="an update changes every field of the name",
        ),
        pytest.param(
            [("_id", 2), ("a", 2), ("pad", "p"), ("x", 1), ("x", 2)],
            {"d": {"_id": False, "x": False}, "i": {"a": 9, "q": 1}},
            [("_id", 2), ("pad", "p"), ("a", 9), ("q", 1)],
            id="_id cannot be deleted",
        ),
        pytest.param(
            [("_id", 5), ("list", [1, 2, 3, 4])],
            {"slist": {"a": True, "l": 2, "u0": 9}},
            [("_id", 5), ("list", [9, 2])],
            id="an array is cut",
        ),
        pytest.param(
            [("_id", 5), ("list", [1, 2])],
            {"slist": {"a": True, "u4": 5}},
            [("_id", 5), ("list", [1, 2, None, None, 5])],
            id="an array is padded with nulls",
        ),
    ],
)
def test_the_post_image_is_the_servers(before: Pairs, diff: dict[str, Any], after: Pairs) -> None:
    assert apply_diff(document(before), bson.encode(diff)) == document(after)


def test_an_insertion_inside_an_object_is_appended_unseen_too() -> None:
    before = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"o", document([("x", 1), ("y", 2)])))
    after = document([("x", 1), ("y", 2), ("y", 7), ("x", 1)])
    result = apply_diff(before, bson.encode({"so": {"i": {"y": 7, "x": 1}}}))
    assert result == raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"o", after))


def test_an_array_of_an_impossible_length_is_refused() -> None:
    with pytest.raises(OplogFormatError):
        apply_diff(bson.encode({"a": [1]}), bson.encode({"sa": {"a": True, "l": 2**31 - 1}}))
