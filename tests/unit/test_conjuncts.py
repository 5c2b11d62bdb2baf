"""Parts of a ``$match``: what the oplog query asks for, what an ``$expr`` implies, what a pipeline drops unseen."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.core.plan.conjuncts import Conjunct, drops_unseen, leading_conjuncts


def part(match: dict[str, Any]) -> Conjunct:
    (one,) = leading_conjuncts(compile_stages([bson.encode({"$match": match})]), moves_array_tests=False)
    return one


@pytest.mark.parametrize("field", ["documentKey", "documentKey._id", "clusterTime", "lsid.id", "txnNumber"])
def test_a_test_of_an_array_that_the_query_asks_for_is_asked_early(field: str) -> None:
    asked = {field: {"$size": 1}}
    assert not part(asked).stays
    assert not part({"$or": [asked, {"lsid.uid": {"$size": 2}}]}).stays
    assert part({"$or": [asked, {"other": {"$size": 2}}]}).stays
    is_whole_key = field == "documentKey"
    assert part({field: {"$not": {"$size": 1}}}).stays == is_whole_key
    assert part({"$nor": [asked]}).stays == is_whole_key
    assert part({"$nor": [{"$or": [asked, asked]}]}).stays == is_whole_key


@pytest.mark.parametrize(
    ("field", "stays"),
    [
        ("updateDescription.updatedFields.x", False),
        ("updateDescription.updatedFields.x.y", True),
        ("updateDescription.updatedFields", True),
        ("documentKeys", True),
        ("fullDocument.x", True),
        ("ns.db", True),
    ],
)
def test_one_name_of_the_updated_fields_is_asked_for_and_none_below_it(field: str, stays: bool) -> None:
    assert part({field: {"$size": 1}}).stays == stays


def implied(match: dict[str, Any]) -> list[list[str]]:
    return [sorted(name.decode() for name in one.fields or ()) for one in part(match).implied()]


def test_comparisons_inside_an_expression_are_implied_by_it_also_in_an_or_of_one() -> None:
    expression = {"$expr": {"$eq": ["$operationType", "update"]}}
    assert implied(expression) == [["operationType"]]
    assert implied({"$or": [expression]}) == [["operationType"]]
    assert implied({"$or": [{"$or": [expression]}]}) == [["operationType"]]
    other = {"$expr": {"$eq": ["$ns.db", "shop"]}}
    assert implied({"$or": [expression, other]}) == []
    both = {"$expr": {"$and": [expression["$expr"], {"$gt": ["$ns.db", "a"]}]}}
    assert sorted(implied(both)) == [["ns"], ["operationType"]]
    either = {"$expr": {"$or": [expression["$expr"], other["$expr"]]}}
    assert implied(either) == [["ns", "operationType"]]
    assert implied({"$expr": {"$or": [expression["$expr"], {"$eq": ["$a", "$b"]}]}}) == []
    assert implied({"operationType": "update"}) == []


@pytest.mark.parametrize(
    ("stages", "drops"),
    [
        ([], False),
        ([{"$project": {"x": 1}}], True),
        ([{"$project": {"name": 1}}], False),
        ([{"$project": {"name.part": 1}}], False),
        ([{"$project": {"name": 0}}], True),
        ([{"$project": {"x": 0}}], False),
        ([{"$project": {"name.part": 0}}], False),
        ([{"$unset": ["x"]}, {"$unset": ["name"]}], True),
        ([{"$match": {"x": 1}}, {"$unset": ["name"]}], True),
        ([{"$match": {"name": 1}}, {"$unset": ["name"]}], False),
        ([{"$match": {"name.part": 1}}, {"$unset": ["name"]}], False),
        ([{"$match": {"$expr": {"$eq": ["$$ROOT", 1]}}}, {"$unset": ["name"]}], False),
        ([{"$set": {"x": 1}}, {"$unset": ["name"]}], False),
        ([{"$project": {"x": {"$add": ["$name", 1]}}}], False),
        ([{"$project": {"x": {"y": "$name"}}}], False),
        ([{"$replaceRoot": {"newRoot": "$name"}}], False),
    ],
    ids=str,
)
def test_a_field_is_dropped_unseen_where_nothing_before_has_looked_at_it(
    stages: list[dict[str, Any]], drops: bool
) -> None:
    assert drops_unseen(compile_stages([bson.encode(stage) for stage in stages]), b"name") == drops
