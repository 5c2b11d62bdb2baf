"""What mongod 4.4 says of a field that is wrong: recorded from 4.4.2. ``test_cursor_live.py`` asks servers of every
version for more of them; nothing had asked one of 4.4, whose words were those of 6.0."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.int64 import Int64

from tailrace.core.cursor.aggregate import AggregateCommand
from tailrace.core.cursor.get_more import GetMoreCommand, cursors_to_kill
from tailrace.errors import UsageError

_STREAM: dict[str, Any] = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}
_MORE: dict[str, Any] = {"getMore": Int64(7), "collection": "c"}
_KILL: dict[str, Any] = {"killCursors": "c", "cursors": [Int64(7)]}
_WRONG: list[tuple[dict[str, Any], int, str]] = [
    (_STREAM | {"foo": 1, "maxTimeMS": -1}, 9, "unrecognized field 'foo'"),
    (_STREAM | {"maxTimeMS": -1, "foo": 1}, 2, "maxTimeMS is out of range"),
    (_STREAM | {"maxTimeMS": 1.5}, 2, "maxTimeMS has non-integral value"),
    (_STREAM | {"maxTimeMS": "x"}, 2, "maxTimeMS must be a number"),
    (_STREAM | {"apiVersion": "1"}, 9, "unrecognized field 'apiVersion'"),
    (_STREAM | {"cursor": {"batchSize": -1}}, 2, "cursor.batchSize must not be negative"),
    (_STREAM | {"cursor": {"batchSize": float("nan")}}, 2, "cursor.batchSize must not be negative"),
    (_STREAM | {"cursor": {"batchSize": None}}, 14, "cursor.batchSize must be a number"),
    (_STREAM | {"cursor": {"x": 1}}, 2, "cursor object can't contain fields other than batchSize"),
    (_STREAM | {"collation": None}, 14, "collation must be an object, not a null"),
    (_STREAM | {"explain": 1}, 14, "explain must be a boolean, not a int"),
    ({"aggregate": "c", "foo": 1}, 14, "'pipeline' option must be specified as an array"),
    (_STREAM | {"pipeline": [{"$changeStream": 1}]}, 50808, "$changeStream stage expects a document as argument."),
    (_STREAM | {"pipeline": [{"$match": {}}, {"$changeStream": {"foo": 1}}]}, 40415, "an unknown field"),
    (
        _STREAM | {"pipeline": [{"$match": {}}, {"$changeStream": {}}]},
        40602,
        "$changeStream is only valid as the first stage in a pipeline.",
    ),
    (_MORE | {"batchSize": -1}, 2, "Batch size for getMore must be positive, but received: -1"),
    (_MORE | {"collection": 5}, 14, "Field 'collection' must be of type string in: { getMore: 7, collection: 5 }"),
    (
        _MORE | {"foo": 1.0},
        9,
        "Failed to parse: { getMore: 7, collection: \"c\", foo: 1.0 }. Unrecognized field 'foo'.",
    ),
    (_MORE | {"term": 1}, 14, "Field 'term' must be of type NumberLong in: { getMore: 7, collection: \"c\", term: 1 }"),
    (_MORE | {"collection": "", "$db": "d"}, 73, "Invalid namespace for getMore: d."),
    (_MORE | {"getMore": Int64(0)}, 2, "Cursor id for getMore must be non-zero"),
    ({"getMore": Int64(7)}, 9, "Field 'collection' missing in: { getMore: 7 }"),
    (_KILL | {"cursors": []}, 2, 'Must specify at least one cursor id in: { killCursors: "c", cursors: [] }'),
    (_KILL | {"cursors": [Int64(7), 5]}, 9, "Field 'cursors' contains an element that is not of type long: 1: 5"),
    (_KILL | {"killCursors": 1}, 9, "First parameter must be a string in: { killCursors: 1, cursors: [ 7 ] }"),
    ({"killCursors": "c"}, 9, "Field 'cursors' must be of type array in: { killCursors: \"c\" }"),
]


@pytest.mark.parametrize(("command", "code", "message"), _WRONG, ids=[str(case[0])[:60] for case in _WRONG])
def test_a_wrong_field_is_named_in_the_words_of_4_4(command: dict[str, Any], code: int, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        _parse(command)
    assert raised.value.code == code
    assert message in raised.value.message


def test_a_database_that_is_no_utf_8_is_shown_as_far_as_it_goes() -> None:
    raw = bson.encode(_MORE | {"collection": "", "$db": "dXb"}).replace(b"dXb", b"d\xffb")
    with pytest.raises(UsageError, match="Invalid namespace for getMore: d\ufffdb"):
        GetMoreCommand.parse("d", raw, (4, 4, 2))


def test_what_4_4_takes_is_taken() -> None:
    wanted = _parse(_STREAM | {"cursor": {"batchSize": 1.9}, "hint": "x", "comment": 1})
    assert wanted.batch_size == 1
    assert _parse(_MORE | {"batchSize": 2.5, "term": Int64(1)}).batch_size == 2
    assert _parse(_KILL | {"foo": 1}) == [7]


def _parse(command: dict[str, Any]) -> Any:
    raw = bson.encode(command)
    match next(iter(command)):
        case "aggregate":
            return AggregateCommand.parse("d", raw, (4, 4, 2))
        case "getMore":
            return GetMoreCommand.parse("d", raw, (4, 4, 2))
    return cursors_to_kill(raw, (4, 4, 2))
