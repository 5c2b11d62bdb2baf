"""Reports that users have sent in, and examples of them: each case in them is a test for ever.

A new one is a file in ``reports``, as ``tailrace compare --report`` has written it, with a name that says what it found
and on which version. Its test fails until the difference is gone. What says ``planted`` was altered on purpose
(``tests/compare/planted_report.py``): ours is right there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bson
import pytest

from tailrace.compare import read_report
from tests.compare.replay import cases

REPORTS = sorted(path for path in (Path(__file__).parent / "reports").iterdir() if path.suffix in (".json", ".bson"))


@pytest.mark.parametrize("path", REPORTS, ids=[path.name for path in REPORTS])
def test_each_case_of_a_report_is_met(path: Path) -> None:
    found = list(cases(read_report(path)))
    assert found, "a report without a case tests nothing"
    for number, case in enumerate(found, 1):
        difference = case.difference()
        assert difference is None, f"case {number} of {path.name}: {difference}"


@pytest.mark.parametrize("path", REPORTS, ids=[path.name for path in REPORTS])
def test_no_name_of_a_user_is_kept_here(path: Path) -> None:
    assert read_report(path)["names"] == "masked"


def test_the_examples_hold_every_kind_of_event_and_a_case_that_is_not_met_is_told() -> None:
    path = next(path for path in REPORTS if path.name == "planted-7.0.28.json")
    report = read_report(path)
    assert {one["operation"] for one in report["differences"]} == {
        "create", "insert", "update", "replace", "createIndexes", "delete", "rename", "drop", "dropDatabase",
        "invalidate",
    }  # fmt: skip
    for case in cases(report):
        altered = replace(case, expected=bson.encode({**bson.decode(case.expected), "more": 1}))
        assert altered.difference() is not None
