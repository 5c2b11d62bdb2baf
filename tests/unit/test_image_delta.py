"""Exact images: one document and one oplog entry. The fuzz compares the same with what a live server stores."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.core import raw_bson
from tailrace.errors import OplogFormatError
from tailrace.read.images.delta import ImageMismatchError, UnknownDocumentError, apply_entry

Pairs = list[tuple[str, Any]]


def document(pairs: Pairs) -> bytes:
    return raw_bson.encode_document(*(bson.encode({name: value})[4:-1] for name, value in pairs))


def update(change: dict[str, Any]) -> bytes:
    return bson.encode({"op": "u", "ns": "shop.orders", "o": change, "o2": {"_id": 1}})


def delta(**sections: Any) -> bytes:
    return update({"$v": 2, "diff": sections})


@pytest.mark.parametrize(
    ("before", "entry", "after"),
    [
        pytest.param(
            [("_id", 1), ("a", 1), ("b", 2)],
            delta(d={"a": False}, u={"b": 3}, i={"z": 1, "c": 2}),
            [("_id", 1), ("b", 3), ("z", 1), ("c", 2)],
            id="deleted, updated in place, appended in the order of the entry",
        ),
        pytest.param(
            [("_id", 1), ("a", 1), ("b", 2)],
            delta(i={"a": 1}),
            [("_id", 1), ("b", 2), ("a", 1)],
            id="a field that is inserted and is there moves to the end, and is not there twice",
        ),
        pytest.param(
            [("_id", 1), ("a", 1), ("pad", "p")],
            delta(d={"a": False}, i={"_id": 1, "b": 2}),
            [("_id", 1), ("pad", "p"), ("b", 2)],
            id="_id is stored in front wherever the pipeline puts it",
        ),
        pytest.param(
            [("_id", 1), ("a", 1), ("pad", "p")],
            delta(d={"_id": False}, u={"a": 2}),
            [("_id", 1), ("a", 2), ("pad", "p")],
            id="_id stays where the pipeline leaves it out",
        ),
        pytest.param(
            [("_id", 1), ("a", [1, {"x": 1}, 3, 4])],
            delta(sa={"a": True, "l": 3, "u0": None, "s1": {"u": {"x": 2}}}),
            [("_id", 1), ("a", [None, {"x": 2}, 3])],
            id="an array is cut, and changed inside",
        ),
        pytest.param([("_id", 1), ("a", [])], delta(sa={"a": True, "u2": 1}), [("_id", 1), ("a", [None, None, 1])]),
        pytest.param(
            [("_id", 1), ("a", {"b": 1}), ("c", 1)],
            update({"$v": 1, "$unset": {"c": True}, "$set": {"a.b": 2, "a.x": 3, "new": 4}}),
            [("_id", 1), ("a", {"b": 2, "x": 3}), ("new", 4)],
            id="4.4: modifiers",
        ),
        pytest.param(
            [("_id", 1), ("a", [1]), ("o", {"0": 1})],
            update({"$v": 1, "$set": {"a.3": 9, "a.1": 8, "o.0": 5, "o.10": 1, "o.9": 2}, "$unset": {"a.0": True}}),
            [("_id", 1), ("a", [None, 8, None, 9]), ("o", {"0": 5, "10": 1, "9": 2})],
            id="4.4: numbers name items of arrays and fields of documents",
        ),
        pytest.param(
            [("_id", 1), ("a", [1, 2])],
            update({"$v": 1, "$set": {"a.01": 9}}),
            [("_id", 1), ("a", [1, 9])],
            id="4.4: a number with a zero in front names an item too",
        ),
        pytest.param(
            [("_id", 1), ("pad", "p")],
            update({"pad": "q", "_id": 1, "$v": "a field"}),
            [("_id", 1), ("pad", "q"), ("$v", "a field")],
            id="a replacement",
        ),
    ],
)
def test_the_document_is_the_one_that_the_server_stores(before: Pairs, entry: bytes, after: Pairs) -> None:
    assert apply_entry(document(before), entry) == document(after)
    assert apply_entry(document(after), entry, again=True) == document(after)


def test_inserts_deletes_and_replacements_need_no_document() -> None:
    stored = document([("_id", 1), ("a", 1)])
    insert = bson.encode({"op": "i", "o": {"_id": 1, "a": 1}})
    delete = bson.encode({"op": "d", "o": {"_id": 1}})
    assert apply_entry(None, insert) == stored
    assert apply_entry(stored, delete) is None
    assert apply_entry(None, update({"_id": 1, "a": 1})) == stored
    assert apply_entry(None, delete, again=True) is None
    assert apply_entry(stored, insert, again=True) == stored


@pytest.mark.parametrize(
    "entry",
    [
        bson.encode({"op": "i", "o": {"_id": 1}}),
        delta(u={"nowhere": 1}),
        delta(d={"nowhere": False}),
        delta(snowhere={"u": {"x": 1}}),
        delta(sa={"u": {"x": 1}}),
        delta(so={"a": True, "u0": 1}),
        delta(slist={"a": True, "s5": {"u": {"x": 1}}}),
        delta(u={"twice": 1}),
        update({"$v": 1, "$set": {"a.b": 1}}),
        update({"$v": 1, "$set": {"list.x": 1}}),
        update({"$v": 1, "$unset": {"nowhere": True}}),
    ],
)
def test_an_entry_that_does_not_fit_its_document_is_an_error(entry: bytes) -> None:
    before = document([("_id", 1), ("a", 1), ("o", {"x": 1}), ("list", [1, 2]), ("twice", 1), ("twice", 2)])
    with pytest.raises(ImageMismatchError):
        apply_entry(before, entry)


def test_a_field_that_is_there_twice_is_told_of_with_what_to_do() -> None:
    """The message was as if somebody else had written to the target of a sync."""
    with pytest.raises(ImageMismatchError, match="holds twice the field that is changed, 'a'") as raised:
        apply_entry(document([("_id", 1), ("a", 1), ("a", 2)]), delta(u={"a": 3}), again=True)
    assert "Give one of the two fields another name" in str(raised.value.hint)


@pytest.mark.parametrize("entry", [delta(u={"a": 1}), update({"$set": {"a": 1}}), bson.encode({"op": "d", "o": {}})])
def test_an_update_or_delete_of_an_unknown_document_is_an_error(entry: bytes) -> None:
    with pytest.raises(UnknownDocumentError):
        apply_entry(None, entry)


@pytest.mark.parametrize(
    "entry",
    [
        bson.encode({"o": {"_id": 1}}),
        bson.encode({"op": "i"}),
        bson.encode({"op": "n", "o": {"msg": "x"}}),
        update({"$v": 2}),
        update({"$v": 2, "diff": {}}),
        update({"$v": 2, "diff": {"x": {"a": 1}}}),
        update({"$v": 3, "$set": {"a": 1}}),
        update({"$v": 1}),
        update({"$v": 1, "$push": {"a": 1}}),
        update({"$v": 1, "$set": 5}),
        update({"$v": 1, "$set": {"a": 1, "a.b": 2}}),
        update({"$v": 1, "$set": {"l.1": 1, "l.01": 2}}),
        update({"$v": 1, "$set": {"a": 1}, "$unset": {"a": True}}),
        delta(sl={"a": True, "u2000000": 1}),
        delta(d={"a": False}, sa={"u": {"x": 1}}),
        b"\x06\x00\x00\x00\x01\x00",
    ],
)
def test_what_no_server_writes_is_an_error(entry: bytes) -> None:
    with pytest.raises(OplogFormatError):
        apply_entry(document([("_id", 1), ("a", {"x": 1}), ("l", [])]), entry)
