"""What mongod 6.0 says of a field of a command that is wrong, or of the first of two: recorded from 6.0.27.

``test_cursor_live.py`` asks every version. Of these rules no test without a server had one.
"""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.int64 import Int64

from tailrace.core.cursor.aggregate import AggregateCommand
from tailrace.core.cursor.get_more import GetMoreCommand, cursors_to_kill
from tailrace.errors import UsageError

_STREAM: dict[str, Any] = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}
_SECOND = [{"$match": {}}, {"$changeStream": {"foo": 1}}]
_BOTH = [{"$changeStream": {"fullDocument": 1}}, {"$changeStream": {"foo": 1}}]


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (_STREAM | {"maxTimeMS": -1, "foo": 1}, 51024, "BSON field 'maxTimeMS' value must be >= 0, actual value '-1'"),
        (_STREAM | {"foo": 1, "maxTimeMS": -1}, 40415, "BSON field 'aggregate.foo' is an unknown field."),
        (_STREAM | {"hint": 5}, 9, "Hint must be a string or an object"),
        (_STREAM | {"pipeline": _SECOND}, 40415, "BSON field '$changeStream.foo' is an unknown field."),
        (_STREAM | {"pipeline": _BOTH}, 14, "BSON field '$changeStream.fullDocument' is the wrong type 'int'"),
        (
            _STREAM | {"pipeline": [{"$match": {}}, {"$changeStream": {}}]},
            40602,
            "$_internalChangeStreamOplogMatch is only valid as the first stage in a pipeline",
        ),
        (
            _STREAM | {"pipeline": [{"$changeStream": float("nan")}]},
            6188500,
            "$changeStream must take a nested object but found: $changeStream: nan.0",
        ),
        ({"getMore": Int64(7), "collection": "c", "term": "x"}, 14, "BSON field 'getMore.term' is the wrong type"),
        ({"killCursors": "c", "cursors": None}, 10065, "invalid parameter: expected an object (cursors)"),
    ],
)
def test_the_first_wrong_field_is_named_as_by_the_server(command: dict[str, Any], code: int, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        _parse(command)
    assert raised.value.code == code
    assert raised.value.message.startswith(message)


def _parse(command: dict[str, Any]) -> object:
    raw = bson.encode(command)
    match next(iter(command)):
        case "aggregate":
            return AggregateCommand.parse("d", raw, (6, 0, 27))
        case "getMore":
            return GetMoreCommand.parse("d", raw, (6, 0, 27))
    return cursors_to_kill(raw, (6, 0, 27))
