"""``updateDescription`` and ``disambiguatedPaths`` of update deltas, name by name."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.core.event.update_description import describe_update
from tailrace.errors import OplogFormatError


def described(diff: dict[str, Any], *, paths: bool = True) -> dict[str, Any]:
    return bson.decode(describe_update(bson.encode({"$v": 2, "diff": diff}), disambiguated_paths=paths))


def paths(diff: dict[str, Any]) -> dict[str, Any]:
    return described(diff)["disambiguatedPaths"]


@pytest.mark.parametrize(
    ("name", "is_ambiguous"),
    [("0", True), ("1", True), ("10", True), ("00", False), ("01", False), ("a", False), ("1a", False), ("", False)],
)
def test_a_name_that_reads_like_an_index_is_told_apart(name: str, is_ambiguous: bool) -> None:
    for section, given in (("u", {name: 1}), ("i", {name: 1}), ("d", {name: False})):
        assert paths({"sa": {section: given}}) == ({f"a.{name}": ["a", name]} if is_ambiguous else {})
        assert paths({section: given}) == {}  # there can be no array at the first level
    expected = {f"a.{name}.b": ["a", name, "b"]} if is_ambiguous else {}
    assert paths({"sa": {f"s{name}": {"u": {"b": 1}}}}) == expected


def test_a_name_with_a_dot_is_told_apart_at_every_level() -> None:
    assert paths({"d": {"c.d": False}, "u": {"a.b": 1}}) == {"a.b": ["a.b"], "c.d": ["c.d"]}
    assert paths({"sx": {"sy.z": {"i": {"n": 1}}}}) == {"x.y.z.n": ["x", "y.z", "n"]}


def test_what_is_in_an_array_below_an_ambiguous_name_is_told_apart_and_its_new_length() -> None:
    array = {"a": True, "l": 2, "u0": 5, "s1": {"u": {"b": 1}}}
    whole = described({"sa.b": array})
    assert whole["disambiguatedPaths"] == {
        "a.b": ["a.b"],
        "a.b.0": ["a.b", 0],
        "a.b.1.b": ["a.b", 1, "b"],
    }
    assert whole["truncatedArrays"] == [{"field": "a.b", "newSize": 2}]
    assert whole["updatedFields"] == {"a.b.0": 5, "a.b.1.b": 1}
    assert paths({"sa": array}) == {}


def test_without_the_option_there_is_no_field_for_paths() -> None:
    assert described({"u": {"a.b": 1}}, paths=False) == {
        "updatedFields": {"a.b": 1},
        "removedFields": [],
        "truncatedArrays": [],
    }


def test_fields_stand_in_the_server_s_order() -> None:
    diff = {"d": {"x": False}, "u": {"b": 1}, "i": {"a": 2}, "sn": {"d": {"y": False}, "u": {"c": 3}}}
    whole = described(diff)
    assert [*whole["updatedFields"].items()] == [("b", 1), ("a", 2), ("n.c", 3)]
    assert whole["removedFields"] == ["x", "n.y"]


def test_the_old_form_lists_what_it_sets_and_unsets() -> None:
    for version in ({}, {"$v": 1}):
        entry = bson.encode({**version, "$set": {"a.b": 1}, "$unset": {"c": True, "d": True}})
        assert bson.decode(describe_update(entry)) == {"updatedFields": {"a.b": 1}, "removedFields": ["c", "d"]}
    assert bson.decode(describe_update(bson.encode({"$set": 1, "$unset": 2}))) == {
        "updatedFields": {},
        "removedFields": [],
    }


def test_deltas_are_followed_250_levels_deep() -> None:
    def nested(levels: int) -> dict[str, Any]:
        diff: dict[str, Any] = {"u": {"x": 1}}
        for _ in range(levels):
            diff = {"sa": diff}
        return diff

    # As many names as there may be lie above the innermost delta.
    assert [*described(nested(150))["updatedFields"]] == ["a." * 150 + "x"]


@pytest.mark.parametrize(("o", "code"), [({"$v": "2"}, 8), ({"$v": 2}, 40532), ({"$v": 2, "diff": 5}, 40532)])
def test_an_entry_without_a_delta_is_refused_with_the_server_s_code(o: dict[str, Any], code: int) -> None:
    with pytest.raises(OplogFormatError) as refused:
        describe_update(bson.encode(o))
    assert refused.value.code == code
