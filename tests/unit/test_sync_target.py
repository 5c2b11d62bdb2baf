"""Which errors of a sync's target are worth a retry, and what the others advise."""

from __future__ import annotations

import pytest
from pymongo.errors import AutoReconnect, NotPrimaryError, OperationFailure, PyMongoError

from tailrace.act.sync.target import is_worth_again, sink_error


@pytest.mark.parametrize(("code", "again"), [(365, True), (251, True), (11000, False), (13, False), (378, False)])
def test_what_a_server_says_of_a_busy_cache_is_tried_again(code: int, again: bool) -> None:
    """365 (TemporarilyUnavailable): a transaction of two documents of 16 MB met it on a 7.0 under load."""
    assert is_worth_again(OperationFailure("no", code)) is again


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OperationFailure("no space left", 14031), "Make room on the target's disk"),
        (OperationFailure("too large", 388), "Give the target more cache"),
        (OperationFailure("not authorized", 13), "needs readWrite"),
        (OperationFailure("not a column", 378), "leave its collection out"),
        (AutoReconnect("connection refused"), "a server stops when its disk is full"),
    ],
)
def test_an_error_says_what_to_do(error: PyMongoError, hint: str) -> None:
    told = sink_error("write changes", error)
    assert told.message.startswith("the target cannot write changes: ")
    assert hint in str(told.hint)
    assert told.code == getattr(error, "code", None)
    if "disk" in hint:
        assert "it goes on where it was, and nothing is lost" in str(told.hint)


def test_a_member_that_takes_no_writes_says_which_one_does() -> None:
    """The message said that its disk may be full."""
    told = sink_error("read the state", NotPrimaryError("not primary, full error: {}", {"errmsg": "not primary"}))
    assert told.message == "the target cannot read the state: not primary"
    assert "Name the replica set in TARGET" in str(told.hint)
