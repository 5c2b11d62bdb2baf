"""The resume process as data: each rule of docs/reference/driver-rules.md that it keeps, by number.

Only PyMongo's stream followed these rules; ours never chose an option of the start, and waited out any error of the
oplog.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tailrace
from tailrace.errors import RESUMABLE_LABEL
from tailrace.watch.client.resume import Failure, Next, ResumeProcess, SaidStart, get_more_wait_ms, labels_of_stream

_LABELLED = frozenset({RESUMABLE_LABEL})


_NOWHERE = SaidStart()


def opened(start: SaidStart = _NOWHERE, *, is_empty: bool = True, batch_token: str | None = "pbrt") -> ResumeProcess:
    process = ResumeProcess(start)
    process.opened(is_empty=is_empty, batch_token=batch_token, operation_time=7)
    return process


def test_17_the_token_begins_as_what_the_caller_starts_after() -> None:
    assert ResumeProcess(SaidStart()).token is None
    assert ResumeProcess(SaidStart(resume_after="r")).token == "r"
    assert ResumeProcess(SaidStart(resume_after="r", start_after="s")).token == "s"


def test_18_an_empty_batch_with_a_token_replaces_it() -> None:
    process = opened(SaidStart(resume_after="r"))
    assert process.token == "pbrt"
    process.found_nothing("later")
    process.found_nothing(None)
    assert process.token == "later"
    assert opened(SaidStart(resume_after="r"), is_empty=False).token == "r"
    assert opened(SaidStart(resume_after="r"), batch_token=None).token == "r"


def test_19_an_event_that_is_given_replaces_it() -> None:
    process = opened(is_empty=False)
    process.gives("a", is_last=False, batch_token="end")
    assert process.token == "a"
    process.gives("b", is_last=True, batch_token="end")
    assert process.token == "end"
    process.gives("c", is_last=True, batch_token=None)
    assert process.token == "c"


def test_7_the_first_aggregate_sends_whatever_the_caller_has_said() -> None:
    process = ResumeProcess(SaidStart("r", "s", 5))
    assert process.start_options() == {"resumeAfter": "r", "startAfter": "s", "startAtOperationTime": 5}


def test_23_and_28_a_stream_without_a_token_goes_on_from_the_time_of_its_aggregate() -> None:
    assert opened(batch_token=None).start_options() == {"startAtOperationTime": 7}
    assert opened(SaidStart(start_at_operation_time=5), batch_token=None).start_options() == {"startAtOperationTime": 5}
    assert opened(is_empty=False, batch_token=None).start_options() == {}
    assert opened().start_options() == {"resumeAfter": "pbrt"}


def test_28_start_after_is_sent_until_an_event_was_given() -> None:
    process = opened(SaidStart(start_after="s"), is_empty=False)
    assert process.start_options() == {"startAfter": "s"}
    process.found_nothing("later")
    assert process.start_options() == {"startAfter": "later"}
    process.gives("a", is_last=False, batch_token=None)
    assert process.start_options() == {"resumeAfter": "a"}


@pytest.mark.parametrize(
    ("failure", "follows"),
    [
        (Failure("getMore"), Next.RESUME),
        (Failure("getMore", 43, wire_version=17), Next.RESUME),
        (Failure("getMore", 43, wire_version=8), Next.RESUME),
        (Failure("getMore", 6, wire_version=17), Next.END),
        (Failure("getMore", 6, _LABELLED, 17), Next.RESUME),
        (Failure("getMore", 50, _LABELLED, 9), Next.RESUME),
        (Failure("getMore", 6, wire_version=8), Next.RESUME),
        (Failure("getMore", 216, wire_version=8), Next.END),
        (Failure("getMore", 50, _LABELLED, 8), Next.END),
        (Failure("getMore", 280, wire_version=17), Next.END),
        (Failure("aggregate"), Next.RAISE),
        (Failure("aggregate", 6, _LABELLED, 17), Next.RAISE),
        (Failure("aggregate", 286, wire_version=17), Next.END),
        (Failure("getMore", out_of_time=True), Next.RAISE),
    ],
)
def test_24_to_26_what_follows_a_failure(failure: Failure, follows: Next) -> None:
    process = opened()
    assert process.failed(failure) is follows
    assert process.failed(failure) is follows  # 26: after an aggregate that worked, the next one has an attempt again


def test_a_failed_read_of_the_oplog_is_labelled_as_the_servers_stream_would_be() -> None:
    assert labels_of_stream(11600, (), "interrupted") == _LABELLED
    assert labels_of_stream(136, (), "CollectionScan died") == _LABELLED
    assert labels_of_stream(237, (), "operation was interrupted") == frozenset()
    assert labels_of_stream(43, ("Other",), "cursor id 1 not found") == {"Other"}
    forged = "Failing command via 'failCommand' failpoint"
    assert labels_of_stream(6, (), forged) == frozenset()
    assert labels_of_stream(50, (RESUMABLE_LABEL,), forged) == _LABELLED


def test_31_a_get_more_leaves_time_for_its_reply() -> None:
    assert get_more_wait_ms(None, 1.0, 0.5, 0.1) is None
    assert get_more_wait_ms(500, None, None, 0.1) == 500
    assert get_more_wait_ms(500, 2.0, 2.0, 0.1) == 500
    assert get_more_wait_ms(500, 2.0, 0.4, 0.1) == 300
    assert get_more_wait_ms(500, 2.0, 0.05, 0.1) == 1
    assert get_more_wait_ms(5000, 2.0, 1.0, 0.1) == 5000  # as PyMongo: each quiet call ends with a time-out


def test_every_rule_that_the_code_names_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "driver-rules.md").read_text()
    rules = {int(number) for number in re.findall(r"(?m)^\| (\d+) \|", page)}
    assert rules == set(range(1, 32))
    named: set[int] = set()
    for path in (Path(tailrace.__file__).parent / "watch" / "client").rglob("*.py"):
        for listed in re.findall(r"[Rr]ules? ((?:\d+(?:, | and | to )?)+)", path.read_text()):
            named |= {int(number) for number in re.findall(r"\d+", listed)}
    assert named <= rules
    assert {3, 4, 14, 17, 18, 19, 20, 23, 24, 27, 28, 29, 31} <= named


def test_the_page_names_for_each_rule_a_test_that_there_is() -> None:
    """It was written down nowhere which test shows which rule."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "reference" / "driver-rules.md").read_text()
    section = page.partition("## How each rule is shown")[2].partition("\n## ")[0]
    shown: set[int] = set()
    for numbers, tests in re.findall(r"(?m)^\| ((?:\d+(?:, )?)+) \| (.*) \|$", section):
        shown |= {int(number) for number in numbers.split(", ")}
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named or "](" in tests, numbers
        for path, name in named:
            assert f"def {name}(" in (root / path).read_text(), (numbers, path, name)
    assert shown == set(range(1, 32))
