"""A change as rows: what was, what is, and what is not known."""

from __future__ import annotations

from typing import Any

import bson

from tailrace.cli.panels.difference import ROWS_MAX, shown_event


def rows(**event: Any) -> list[list[str | None]]:
    found: list[list[str | None]] = shown_event(bson.encode({"_id": {"_data": "82"}, **event}))["rows"]
    return found


def test_an_update_with_both_documents_shows_what_differs_first() -> None:
    before = {"_id": 1, "a": {"b": 1, "c": [1, 2]}, "gone": True}
    after = {"_id": 1, "a": {"b": 2, "c": [1, 2]}, "new": None}
    assert rows(operationType="update", fullDocumentBeforeChange=before, fullDocument=after) == [
        ["changed", "a.b", "1", "2"],
        ["removed", "gone", "true", None],
        ["added", "new", None, "null"],
        ["same", "_id", "1", "1"],
        ["same", "a.c.0", "1", "1"],
        ["same", "a.c.1", "2", "2"],
    ]


def test_an_update_without_documents_shows_what_the_oplog_says() -> None:
    description = {
        "updatedFields": {"a.b": {"x": 1}},
        "removedFields": ["c"],
        "truncatedArrays": [{"field": "d", "newSize": 2}],
    }
    assert rows(operationType="update", updateDescription=description) == [
        ["changed", "a.b", None, '{"x": 1}'],
        ["removed", "c", None, None],
        ["changed", "d", None, "cut to 2 elements"],
    ]


def test_the_kinds_that_have_one_document() -> None:
    assert rows(operationType="insert", fullDocument={"_id": 1, "a": {}}) == [
        ["added", "_id", None, "1"],
        ["added", "a", None, "{}"],
    ]
    assert rows(operationType="replace", fullDocument={"a": 1}) == [["changed", "a", None, "1"]]
    assert rows(operationType="delete", documentKey={"_id": 1}) == [["removed", "_id", "1", None]]
    assert rows(operationType="delete", fullDocumentBeforeChange={"_id": 1, "a": 2}) == [
        ["removed", "_id", "1", None],
        ["removed", "a", "2", None],
    ]
    assert rows(operationType="rename", to={"db": "a", "coll": "b"}) == [
        ["added", "to.db", None, '"a"'],
        ["added", "to.coll", None, '"b"'],
    ]


def test_numbers_are_exact_and_what_is_long_is_cut() -> None:
    found = shown_event(
        bson.encode(
            {
                "_id": {"_data": "82"},
                "operationType": "insert",
                "fullDocument": {"n": bson.Int64(2**62 + 1), "s": "x" * 9000},
            }
        )
    )
    assert found["rows"][0] == ["added", "n", None, str(2**62 + 1)]
    assert len(found["rows"][1][3]) < 500
    many = shown_event(
        bson.encode({"_id": {}, "operationType": "insert", "fullDocument": {str(n): n for n in range(500)}})
    )
    assert (len(many["rows"]), many["left_out"]) == (ROWS_MAX, 500 - ROWS_MAX)
    large = shown_event(
        bson.encode({"_id": {"_data": "82"}, "operationType": "insert", "fullDocument": {"s": "x" * 300_000}})
    )
    assert (large["rows"], large["token"]) == ([], "82")
    assert large["too_large"] > 300_000


def test_bytes_that_are_no_text_and_depth_are_shown() -> None:
    raw = bson.encode({"_id": {"_data": "82"}, "operationType": "insert", "fullDocument": {"s": "AB"}})
    assert "\\\\xff" in str(shown_event(raw.replace(b"AB\0", b"\xff\xff\0"))["rows"])
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"a": deep}
    assert rows(operationType="insert", fullDocument=deep)[0][1] == "a.a.a.a.a.a.a.a"
