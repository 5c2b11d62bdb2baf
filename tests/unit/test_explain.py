"""The plan that ``explain`` shows: which part of a ``$match`` is evaluated where, and what is left to read."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.cli.main import main
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.explain import explain, explain_text
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan


def plan(scope: str | None, *stages: dict[str, Any], **options: Any) -> dict[str, Any]:
    return explain(build_plan(StreamOptions.parse(Scope.parse(scope), options, stages)))


def test_deletes_of_one_collection_leave_only_deletes_and_what_ends_the_stream() -> None:
    shown = plan("shop.orders", {"$match": {"operationType": "delete"}})
    reads = shown["reads"]
    assert {kind for kind, share in reads.items() if share == "none"} >= {"insert", "update", "replace", "create"}
    assert reads["delete"] == reads["drop"] == reads["rename"] == reads["transactions"] == "all"
    writes = shown["oplogQuery"]["$or"][0]
    assert writes["op"] == "d"
    assert writes["ns"] == {"$in": ["shop.orders", "shop.orders\n"]}
    assert shown["match"][0]["asked"] == ["oplog query", "entry test"]
    assert shown["afterTransform"] == [{"$match": {"operationType": "delete"}}]


# What the server makes of these predicates (its own explain, 6.0.27), in the terms of an entry.
@pytest.mark.parametrize(
    ("match", "expected"),
    [
        (
            {"operationType": {"$in": ["update", "zzz"]}},
            {"op": "u", "$or": [{"o._id": {"$exists": False}}, {"o.$v": 2}]},
        ),
        ({"operationType": "invalidate"}, None),
        ({"documentKey._id": 1, "operationType": "delete"}, {"op": "d", "o._id": {"$eq": 1}}),
        ({"documentKey._id": 1, "operationType": "replace"}, {"o._id": {"$exists": True}, "o2._id": {"$eq": 1}}),
        ({"fullDocument.a": {"$gt": 3}, "operationType": "insert"}, {"op": "i", "o.a": {"$gt": 3}}),
        ({"ns.coll": "c"}, {"op": {"$in": ["i", "d", "u"]}, "ns": "db.c"}),
        ({"ns.db": "other"}, None),
        ({"clusterTime": {"$gt": bson.Timestamp(5, 1)}}, {"ts": {"$gt": bson.Timestamp(5, 1)}}),
        ({"updateDescription.removedFields": "a"}, {"o.diff.d.a": {"$exists": True}}),
        ({"updateDescription.updatedFields.a": 1}, {"o.diff.u.a": {"$eq": 1}}),
        ({"to.coll": "d"}, None),
        ({"txnNumber": 1}, None),
    ],
)
def test_predicates_become_terms_of_the_oplog(match: dict[str, Any], expected: dict[str, Any] | None) -> None:
    branches = plan("db", {"$match": match})["oplogQuery"]["$or"]
    writes = [branch for branch in branches if "fromMigrate" in branch and "$nin" not in branch.get("op", ())]
    if expected is None:
        assert not [branch for branch in writes if branch.get("op") not in ("c", "n")]
        return
    text = str(writes[0])
    for name, value in expected.items():
        assert f"{name!r}: {value!r}" in text, text


def test_a_part_that_a_stage_before_it_changes_stays_in_its_place() -> None:
    stages = ({"$set": {"fullDocument.a": 1}}, {"$match": {"fullDocument.a": 1, "operationType": "insert"}})
    asked = {tuple(part["fields"]): part["asked"] for part in plan("db.c", *stages)["match"]}
    assert ("fullDocument",) not in asked
    assert "oplog query" in asked["operationType",]


@pytest.mark.parametrize("stage", [{"$replaceWith": "$$ROOT"}, {"$redact": "$$KEEP"}])
def test_stages_that_can_change_everything_stop_a_match(stage: dict[str, Any]) -> None:
    assert plan("db.c", stage, {"$match": {"operationType": "insert"}})["match"] == []


def test_images_are_looked_up_after_what_does_not_ask_for_them() -> None:
    match = {"$match": {"ns.coll": "c", "fullDocument.a": 1}}
    shown = plan("db", match, fullDocument="updateLookup", fullDocumentBeforeChange="required")
    stages = shown["stages"]
    assert stages.index("MatchAhead") < stages.index("AddPreImage") < stages.index("AddPostImage")
    assert "looked up" in shown["images"]["fullDocument"]
    lines = "\n".join(explain_text(shown))
    assert "before images are looked up" in lines
    assert "stages: OplogMatch > UnwindTransaction > Transform" in lines


def test_an_expression_is_asked_in_part_before_images() -> None:
    """``explain`` could not show it, since only whole parts of a match were moved."""
    both = {"$and": [{"$eq": ["$ns.coll", "c"]}, {"$lte": ["$fullDocument.a", 0]}]}
    shown = plan("db", {"$match": {"$expr": both}}, fullDocument="updateLookup")
    assert "MatchAhead" in shown["stages"]
    assert "in part before images are looked up" in shown["match"][0]["asked"]
    assert "for what passes 1 part(s) of the match" in shown["images"]["fullDocument"]
    either = {"$or": both["$and"]}
    assert "MatchAhead" not in plan("db", {"$match": {"$expr": either}}, fullDocument="updateLookup")["stages"]


def test_what_could_fail_is_asked_only_in_its_place() -> None:
    match = {"$match": {"$expr": {"$eq": [1, {"$divide": [1, "$fullDocument.a"]}]}, "operationType": "insert"}}
    first, second = plan("db.c", match)["match"]
    assert first["asked"] == ["oplog query", "entry test"]
    assert second["query"] is None
    assert "oplog query" not in second["asked"]


def test_a_collation_keeps_strings_out_of_the_oplog_query() -> None:
    pytest.importorskip("icu")
    options = StreamOptions.parse(
        Scope.parse("db.c"),
        {},
        [{"$match": {"ns.coll": "C"}}],
        collation={"locale": "en", "strength": 2},
    )
    shown = explain(build_plan(options))
    assert shown["match"][0]["asked"] == ["entry test"]
    assert shown["reads"]["insert"] == "all"


def test_the_command_shows_the_plan_of_a_dump_without_reading_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", "no-such-dump", "shop.orders", "--explain", "--format", "pretty"]
    assert main([*arguments, "--pipeline", '[{"$match": {"operationType": "delete"}}]']) == 0
    said = capsys.readouterr().out
    assert "oplog query: no filter" in said
    assert '{"operationType": {"$eq": "delete"}}: entry test' in said
