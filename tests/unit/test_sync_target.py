"""Which errors of a sync's target are worth another try."""

from __future__ import annotations

import pytest
from pymongo.errors import OperationFailure

from tailrace.act.sync.target import is_worth_again


@pytest.mark.parametrize(("code", "again"), [(365, True), (251, True), (11000, False), (13, False), (378, False)])
def test_what_a_server_says_of_a_busy_cache_is_tried_again(code: int, again: bool) -> None:
    """365 (TemporarilyUnavailable): a transaction of two documents of 16 MB met it on a 7.0 under load."""
    assert is_worth_again(OperationFailure("no", code)) is again
