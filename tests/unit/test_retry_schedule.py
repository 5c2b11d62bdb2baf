"""After how long a change is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.cli.listen import error_policy
from tailrace.cli.main import build_parser
from tailrace.consumer import RetrySchedule
from tailrace.errors import UsageError


def test_waits_are_those_of_before_without_a_word() -> None:
    assert [RetrySchedule.of(3).wait(attempt) for attempt in (1, 2, 3, 7, 8, 50, 10**9)] == [
        *(0.05, 0.1, 0.2, 3.2, 5.0, 5.0, 5.0)
    ]
    assert RetrySchedule.of(3).retries == 3


def test_waits_grow_by_their_factor_up_to_the_longest() -> None:
    schedule = RetrySchedule(4, first=1, factor=3, longest=60)
    assert [schedule.wait(attempt) for attempt in range(1, 7)] == [1, 3, 9, 27, 60, 60]
    assert RetrySchedule(1, first=2, factor=1, longest=2).wait(1_000) == 2
    assert RetrySchedule(1, first=1, factor=1e300, longest=9).wait(1_000) == 9
    assert RetrySchedule(1, first=0, factor=2, longest=0).wait(5) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"retries": -1}, "retries must be a whole number"),
        ({"retries": True}, "retries must be a whole number"),
        ({"first": -1}, "first of a retry schedule"),
        ({"first": float("nan")}, "first of a retry schedule"),
        ({"factor": 0.5}, "factor of a retry schedule must be a number, 1 or more"),
        ({"longest": float("inf")}, "longest of a retry schedule"),
        ({"first": 10.0}, "the first wait of a retry schedule, 10 s, is longer than the longest, 5 s"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RetrySchedule(**given)


def test_the_command_takes_it() -> None:
    words = ["listen", "a:b", "--resource", "r", "--retries", "4", "--retry-first", "1", "--retry-factor", "3"]
    args = build_parser().parse_args([*words, "--retry-longest", "60"])
    assert error_policy(args, None) == {"retries": RetrySchedule(4, 1, 3, 60)}
