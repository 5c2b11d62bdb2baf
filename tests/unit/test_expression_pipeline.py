"""What the compiled pipeline tells its caller, and what it accepts from it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp

from tailrace.core.expression import compile_stages
from tailrace.core.expression.match import tree
from tailrace.core.expression.reference import reference
from tailrace.errors import UsageError


def compiled(*stages: dict[str, Any], **options: Any) -> Any:
    return compile_stages([bson.encode(stage) for stage in stages], **options)


def applied(event: dict[str, Any], *stages: dict[str, Any], **options: Any) -> dict[str, Any] | None:
    out = compiled(*stages, **options).apply(bson.encode(event))
    return None if out is None else bson.decode(out)


def test_an_empty_pipeline_hands_on_the_same_bytes() -> None:
    event = bson.encode({"_id": 1})
    assert compile_stages([]).apply(event) is event


def test_an_event_that_does_not_match_is_none() -> None:
    assert applied({"_id": 1, "a": 1}, {"$match": {"a": 2}}) is None


def test_the_split_stage_is_reported_as_a_flag_and_must_be_last() -> None:
    assert compiled({"$match": {}}, {"$changeStreamSplitLargeEvent": {}}).split_large_event
    assert not compiled({"$match": {}}).split_large_event
    with pytest.raises(UsageError) as raised:
        compiled({"$changeStreamSplitLargeEvent": {}}, {"$match": {}})
    assert raised.value.code == 7182802


def test_the_parsed_match_can_be_read_again() -> None:
    (stage,) = compiled({"$match": {"operationType": {"$in": ["insert", "delete"]}, "ns.coll": "c"}}).stages
    assert stage.name == "$match"
    assert isinstance(stage.parsed, tree.And)
    inside, equal = stage.parsed.children
    assert isinstance(inside, tree.In)
    assert inside.path == b"operationType"
    assert isinstance(equal, tree.Compare)
    assert (equal.path, equal.operator) == (b"ns.coll", "$eq")


def test_an_expr_keeps_its_operator_and_its_arguments() -> None:
    (stage,) = compiled({"$match": {"$expr": {"$eq": ["$operationType", "insert"]}}}).stages
    assert isinstance(stage.parsed, tree.ExpressionIsTrue)
    expression = stage.parsed.expression
    assert (expression.kind, expression.name) == ("operator", "$eq")
    assert (expression.args[0].kind, expression.args[0].path) == ("field", (b"operationType",))
    assert expression.args[1].constant


def test_only_stages_that_can_touch_the_identifier_ask_for_its_guard() -> None:
    assert not compiled({"$match": {}}).replaces_id
    assert compiled({"$match": {}}, {"$unset": "x"}).replaces_id


def test_now_cluster_time_and_let_come_from_the_caller() -> None:
    stage = {"$replaceWith": {"now": "$$NOW", "time": "$$CLUSTER_TIME", "let": "$$mine.a", "sum": {"$add": ["$$n", 1]}}}
    out = applied({"_id": 1}, stage, now=1000, cluster_time=5 << 32 | 6, let={"mine": {"a": "x"}, "n": 2})
    assert out == {"now": datetime(1970, 1, 1, 0, 0, 1), "time": Timestamp(5, 6), "let": "x", "sum": 3}
    assert datetime.fromtimestamp(1, UTC).second == 1


def test_a_clock_that_is_not_given_is_an_undefined_variable() -> None:
    with pytest.raises(UsageError) as raised:
        compiled({"$set": {"x": "$$NOW"}})
    assert raised.value.code == 17276


def test_a_field_that_was_dropped_comes_back_in_its_place() -> None:
    out = applied({"_id": 1, "a": 1, "b": 2}, {"$unset": "a"}, {"$match": {"b": 2}}, {"$set": {"a": 3}})
    assert list(out or {}) == ["_id", "a", "b"]


def test_the_reference_is_the_one_that_the_code_makes() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "expressions.md"
    assert page.read_text() == reference()
