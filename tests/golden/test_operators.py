"""The table of operators: what real servers made of each operator over lists of values, and what we make of it.

An operator could give a wrong result unseen where no server was asked in the same run: a wrong ``$mod`` of negatives,
and a ``$week`` that was off by one, passed every test that needs no server.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.expression.language.registry import OPERATORS
from tailrace.core.expression.operators import arithmetic, calendar
from tailrace.core.expression.values import value as v
from tests.differential.fuzz_expressions import OF_THE_C_LIBRARY
from tests.golden.operator_cases import forms_of
from tests.golden.record_operators import VERSIONS, Answer, digest_of, known_to, our_answers, read

NOT_SUPPORTED = 115
#: What 4.4 and 5.0 say where we give the code of 6.0 (docs/reference/expressions.md).
EARLIER: dict[str, dict[int, int]] = {
    "4.4.2": {16554: 14, 16555: 14, 16556: 14, 16613: 14, 16609: 14, 16608: 2},
    "5.0.4": {16554: 14},
}
#: How many cases that server answers differently (docs/reference/expressions.md). The number may only fall.
KNOWN: dict[str, dict[str, int]] = {
    "4.4.2": {
        "$multiply": 44, "$add": 29, "$subtract": 16, "$substr": 13, "$substrBytes": 13, "$mod": 12, "$reduce": 3,
        "$dayOfWeek": 2, "$isoDayOfWeek": 2, "$isoWeek": 2, "$meta": 2, "$week": 2, "$toDate": 1,
    },
    "5.0.4": {
        "$add": 29, "$mod": 12, "$reduce": 3, "$subtract": 3, "$dayOfWeek": 2, "$isoDayOfWeek": 2, "$isoWeek": 2,
        "$week": 2, "$dateDiff": 1, "$toDate": 1,
    },
    "6.0.27": {},
    "7.0.28": {"$regexFind": 2, "$regexFindAll": 2, "$regexMatch": 2},
}  # fmt: skip
#: How many are refused by name: decimals in powers and trigonometry, dates far away.
REFUSED = {"4.4.2": 403, "5.0.4": 413, "6.0.27": 415, "7.0.28": 415}
LEAST_CASES = 20
#: How far apart doubles may be if another C library computed them: a recording has the results of one machine.
LAST_DIGIT = 2
#: Their argument is not evaluated, so there are fewer cases.
FEW = {"$literal", "$const", "$meta"}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return read()


def test_every_operator_has_its_cases_and_they_are_those_that_servers_were_asked(recorded: dict[str, Any]) -> None:
    """For a new operator: a form in ``operator_cases.py``, then ``record_operators --only NAME``."""
    assert [name for name in OPERATORS if not forms_of(name)] == []
    assert recorded["digests"] == {name: digest_of(name) for name in sorted(OPERATORS)}
    answers = recorded["answers"]
    assert {version: sorted(answers[version]) for version in VERSIONS} == {each: known_to(each) for each in VERSIONS}
    assert {name for name in OPERATORS if len(answers["7.0.28"][name]) < LEAST_CASES} <= FEW


def test_no_operator_is_asked_for_errors_alone(recorded: dict[str, Any]) -> None:
    computed = {
        name: sum(isinstance(answer, bytes) for answer in answers)
        for name, answers in recorded["answers"]["6.0.27"].items()
    }
    assert {name for name, count in computed.items() if count < 3} <= FEW


@pytest.mark.parametrize("version", VERSIONS)
def test_every_operator_gives_what_that_server_gives(recorded: dict[str, Any], version: str) -> None:
    different: dict[str, list[Any]] = {}
    refused = 0
    for name, theirs in recorded["answers"][version].items():
        ours = our_answers(version, name)
        refused += ours.count(NOT_SUPPORTED)
        cases = [(form.expression, document) for form in forms_of(name) for document in form.documents]
        for case, server, mine in zip(cases, theirs, ours, strict=True):
            if not is_met(name, version, server, mine):
                different.setdefault(name, []).append((*case, server, mine))
    new = {name: cases for name, cases in different.items() if len(cases) > KNOWN[version].get(name, 0)}
    assert new == {}
    assert {name: len(cases) for name, cases in different.items()} == KNOWN[version]
    assert refused == REFUSED[version]


def is_met(name: str, version: str, server: Answer, mine: Answer) -> bool:
    if mine in (server, NOT_SUPPORTED):
        return True
    if isinstance(server, int) or isinstance(mine, int):
        return isinstance(server, int) and EARLIER.get(version, {}).get(server) == mine
    return name in OF_THE_C_LIBRARY and are_neighbours(server, mine)


def are_neighbours(one: bytes, other: bytes) -> bool:
    """Whether two documents hold the same double but for its last digit."""
    bits: list[int] = []
    for document in (one, other):
        found = v.field(document, b"r")
        if found is None or found[0] != v.DOUBLE:
            return False
        bits.append(int.from_bytes(found[1], "little"))
    return abs(bits[0] - bits[1]) <= LAST_DIGIT


@pytest.mark.parametrize("name", ["$week", "$isoWeek", "$dayOfWeek", "$dateTrunc"])
def test_a_planted_fault_of_the_calendar_is_found(
    recorded: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = calendar.weekday
    monkeypatch.setattr(calendar, "weekday", lambda days: (right(days) + 1) % 7)
    assert our_answers("6.0.27", name) != recorded["answers"]["6.0.27"][name]


def test_a_planted_remainder_with_the_sign_of_the_divisor_is_found(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "abs", lambda number: number, raising=False)
    monkeypatch.setattr(arithmetic, "decimal_remainder", lambda dividend, divisor: dividend)  # not tested here
    different = [
        mine
        for mine, server in zip(our_answers("6.0.27", "$mod"), recorded["answers"]["6.0.27"]["$mod"], strict=True)
        if mine != server and isinstance(mine, bytes) and v.field(mine, b"r")[0] != v.DECIMAL  # type: ignore[index]
    ]
    assert len(different) > 5
