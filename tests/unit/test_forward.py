"""Whether a committed position is ahead of another: a store compares them before it lets a position go back."""

from __future__ import annotations

from typing import Any

import pytest
from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.forward import is_behind
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime

BEGIN = StreamPosition(at=Timestamp(9, 1))


def at(seconds: int, **more: Any) -> dict[str, Any]:
    return {"at": Timestamp(seconds, 1), **more}


def token(seconds: int, **more: Any) -> dict[str, Any]:
    return {"token": ResumeToken(ClusterTime.of(seconds, 1), uuid=bytes(16)).to_document(), **more}


def plan(generation: int) -> dict[str, Any]:
    return LanePlan(2, BEGIN, generation).to_document()


def copied(restarts: int, *documents: int) -> dict[str, Any]:
    return {"collections": [{"restarts": restarts, "documents": count} for count in documents]}


@pytest.mark.parametrize(
    ("position", "record", "expected"),
    [
        (at(5), None, False),
        (at(5), at(5), False),
        (at(5), at(6), True),
        (at(6), at(5), False),
        (token(5), token(6), True),
        (token(6), token(5), False),
        (token(5), token(5), False),
        (at(5), token(5), True),
        (token(5), at(5), False),
        (plan(1), plan(2), True),
        (plan(2), plan(2), False),
        (plan(2), plan(1), False),
        (at(5), plan(1), False),
        (plan(1), at(5), False),
        ({"edited": True}, at(5), False),
        (at(5), {"token": 7}, False),
        ({"token": {"_data": "8"}}, at(5), False),
        ({"token": {"_data": "8"}}, token(5), True),
        ({"token": {"_data": "82zz"}}, token(5), False),
        (at(5, snapshot=copied(0, 3, 4)), at(5, snapshot=copied(0, 4, 4)), True),
        (at(5, snapshot=copied(0, 4, 4)), at(5, snapshot=copied(0, 3, 4)), False),
        (at(5, snapshot=copied(1, 0)), at(5, snapshot=copied(0, 9)), False),
        (at(5, snapshot=copied(0, 9)), at(5, snapshot=copied(1, 0)), True),
        (at(5, snapshot=copied(0, 9)), at(5), True),  # it is all copied
        (at(5), at(5, snapshot=copied(0, 9)), False),
        (token(5, snapshot=copied(0, 1)), token(5, snapshot=copied(0, 2)), True),
        (at(5, snapshot={"collections": "edited"}), at(5, snapshot=copied(0, 1)), True),
        (at(5, snapshot={"collections": [1, {"documents": "x"}]}), at(5, snapshot=copied(0, 0)), False),
        (at(5, snapshot="edited"), at(5, snapshot=copied(0, 1)), False),
    ],
)
def test_a_position_is_behind_where_what_is_committed_is_further_on(
    position: dict[str, Any], record: dict[str, Any] | None, expected: bool
) -> None:
    assert is_behind(position, record) is expected
