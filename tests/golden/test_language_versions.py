"""Each version's own language: later additions are answered as that server answers them.

No test had asked for an operator in the language of an older server: every stream compiled that of 6.0, whatever its
profile, so a stream of 4.4 took ``$firstN``, and one of 7.0 did not know ``$bitAnd``.
"""

from __future__ import annotations

import json
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.router import compiled
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import PROFILES, profile_for
from tailrace.errors import UsageError
from tests.golden.record_language import RECORDING, VERSIONS, digest_of_cases, our_answers

NOT_SUPPORTED = 115
KINDS = ("stages", "expressions", "pipelines")
#: How many of the cases may be refused by name in each version.
REFUSED = {"4.4.2": 8, "5.0.4": 9, "6.0.27": 9, "7.0.28": 13}
#: What 4.4 and 5.0 give where a sum or a product meets another type, and we do not (docs/reference/expressions.md).
EARLIER = {16554: 14, 16555: 14}


@pytest.fixture(scope="module")
def recorded() -> Any:
    return json.loads(RECORDING.read_text())


def test_the_recording_is_of_these_cases(recorded: Any) -> None:
    assert recorded["cases"] == digest_of_cases()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_case_is_answered_as_that_server_answers_it(recorded: Any, version: str) -> None:
    theirs, ours = recorded["answers"][version], our_answers(tuple(map(int, version.split("."))))
    asked = [[answer for kind in KINDS for answer in answers[kind]] for answers in (theirs, ours)]
    different = [
        (case, server, mine)
        for case, server, mine in zip(recorded["cases"], *asked, strict=True)
        if mine not in (server, NOT_SUPPORTED, EARLIER.get(server))
    ]
    assert different == []
    assert asked[1].count(NOT_SUPPORTED) == REFUSED[version]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda one: one.name)
def test_a_plan_speaks_the_language_of_its_profile(profile: Any) -> None:
    stage = bson.encode({"$set": {"x": {"$bitAnd": [6, 3]}}})
    options = StreamOptions.parse(Scope.of_collection("a", "b"), bson.encode({}), (stage,), profile=profile)
    if profile.series < (7, 0):
        with pytest.raises(UsageError) as raised:
            compiled(build_plan(options, profile))
        assert raised.value.code == 168
    else:
        out = compiled(build_plan(options, profile)).apply(bson.encode({"_id": 1}))
        assert out == bson.encode({"_id": 1, "x": 2})


@pytest.mark.parametrize(
    "stage",
    [{"$set": {"x": {"$toUUID": "$a"}}}, {"$project": {"x": {"$toUUID": "$a"}}}, {"$nextYears": {}}],
)
def test_a_name_that_a_later_server_may_know_is_refused_and_not_unknown(stage: dict[str, Any]) -> None:
    """The language of 8.0 was not measured: a code of "unknown" would be a guess."""
    with pytest.raises(UsageError, match="has not been measured") as raised:
        compile_stages([bson.encode(stage)], version=profile_for("8.0").version)
    assert raised.value.code == NOT_SUPPORTED
    with pytest.raises(UsageError) as raised:
        compile_stages([bson.encode(stage)], version=profile_for("7.0").version)
    assert raised.value.code in (168, 31325, 40324)


REFUSED_BY_NAME: list[dict[str, Any]] = [
    {"$set": {"x": "$$USER_ROLES"}},
    {"$set": {"x": {"$rand": {}}}},
    {"$set": {"x": {"$percentile": {"input": "$a", "p": [float("nan")], "method": "approximate"}}}},
]


@pytest.mark.parametrize("stage", REFUSED_BY_NAME)
def test_a_refusal_says_who_does_it(stage: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r'is not supported: .*engine="server"') as raised:
        compile_stages([bson.encode(stage)], version=(7, 0))
    assert raised.value.code == NOT_SUPPORTED
