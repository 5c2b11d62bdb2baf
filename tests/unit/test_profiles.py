"""What newer servers do, according to what is published: these cases were not checked on servers of these versions."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import datetime
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import Emit, OplogBatch
from tailrace.errors import LaterEntryError, OplogFormatError, UsageError

UI = Binary(uuid.UUID(int=7).bytes, 4)
SESSION = {"lsid": {"id": Binary(uuid.UUID(int=1).bytes, 4), "uid": b"u" * 32}, "txnNumber": Int64(3)}
OPERATIONS = [{"op": "i", "ns": "d.c", "ui": UI, "o": {"_id": n}, "o2": {"_id": n}} for n in range(2)]


def _events(version: str, entry: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    entry = {**entry, "ts": Timestamp(9, 9), "t": Int64(1), "wall": datetime(2026, 1, 1)}
    plan = build_plan(StreamOptions.parse(Scope.of_database("d"), options), profile_for(version))
    pipeline = ChangeStreamPipeline(plan.start_at(ClusterTime.of(1, 1)))
    events: list[dict[str, Any]] = []
    for request in pipeline.process(OplogBatch(bson.encode(entry), ClusterTime.of(9, 9))):
        assert isinstance(request, Emit), "nothing may be asked for"
        events += [bson.decode(event.to_bson()) for event in request.events]
    return events


@pytest.mark.parametrize("version", ["8.0", "8.1"])
def test_retryable_writes_in_one_entry_show_no_transaction(version: str) -> None:
    null = {"ts": Timestamp(0, 0), "t": Int64(-1)}
    entry = {**SESSION, "op": "c", "ns": "admin.$cmd", "o": {"applyOps": OPERATIONS}, "multiOpType": 1}
    events = _events(version, {**entry, "prevOpTime": null})
    assert [event["documentKey"]["_id"] for event in events] == [0, 1]
    assert not any({"lsid", "txnNumber"} & event.keys() for event in events)


def test_8_0_does_not_follow_the_session_back_from_retryable_writes() -> None:
    previous = {"ts": Timestamp(5, 5), "t": Int64(1)}
    entry = {**SESSION, "op": "c", "ns": "admin.$cmd", "o": {"applyOps": OPERATIONS}, "multiOpType": 1}
    assert len(_events("8.0", {**entry, "prevOpTime": previous})) == 2


@pytest.mark.parametrize(("version", "count"), [("6.0", 0), ("7.0", 2), ("8.1", 2)])
def test_an_apply_ops_command_without_a_session_gives_events_from_7_on(version: str, count: int) -> None:
    command = {"applyOps": OPERATIONS, "$db": "admin"}
    events = _events(version, {"op": "c", "ns": "admin.$cmd", "o": command})
    assert len(events) == count
    assert not any("lsid" in event for event in events)


@pytest.mark.parametrize(("version", "expected"), [("8.0.4", None), ("8.0.5", "collection"), ("8.1", "collection")])
def test_create_says_what_kind_of_namespace_from_8_0_5_on(version: str, expected: str | None) -> None:
    entry = {"op": "c", "ns": "d.$cmd", "ui": UI, "o": {"create": "c", "idIndex": {"v": 2}}}
    (event,) = _events(version, entry, showExpandedEvents=True)
    assert event.get("nsType") == expected


@pytest.mark.parametrize(("source", "kind"), [("c", "view"), ("system.buckets.v", "timeseries")])
def test_a_view_is_told_from_a_time_series_collection(source: str, kind: str) -> None:
    entry = {"op": "i", "ns": "d.system.views", "ui": UI, "o": {"_id": "d.v", "viewOn": source, "pipeline": []}}
    (event,) = _events("8.1", entry, showExpandedEvents=True)
    assert (event["ns"], event["nsType"]) == ({"db": "d", "coll": "v"}, kind)
    assert list(event)[-1] == "nsType"


def test_a_time_series_collection_without_a_view_says_so() -> None:
    for collection, kind in (("c", "timeseries"), ("system.buckets.c", "collection")):
        o = {"create": collection, "timeseries": {"timeField": "t"}}
        options = {"showExpandedEvents": True, "showSystemEvents": True}
        (event,) = _events("8.3", {"op": "c", "ns": "d.$cmd", "ui": UI, "o": o}, **options)
        assert event["nsType"] == kind


BUILD = {"indexBuildUUID": UI, "indexes": [{"v": 2, "key": {"a": 1}, "name": "a_1"}], "cause": {"ok": False}}


@pytest.mark.parametrize(
    ("version", "command", "shown"),
    [
        ("7.0.30", "abortIndexBuild", 0),
        ("7.0.31", "abortIndexBuild", 1),
        ("8.0.15", "abortIndexBuild", 0),
        ("8.0.15", "startIndexBuild", 0),
        ("8.0.16", "abortIndexBuild", 1),
        ("8.0.16", "startIndexBuild", 1),
        ("8.3", "abortIndexBuild", 1),
    ],
)
def test_an_index_build_under_way_is_shown_with_both_options(version: str, command: str, shown: int) -> None:
    entry = {"op": "c", "ns": "d.$cmd", "ui": UI, "o": {command: "c", **BUILD}}
    options = ("showExpandedEvents", "showSystemEvents")
    events = _events(version, entry, **dict.fromkeys(options, True))
    assert [event["operationType"] for event in events] == [command] * shown
    for event in events:
        assert event["operationDescription"] == {"indexes": BUILD["indexes"]}
        assert event["collectionUUID"] == UI.as_uuid() or event["collectionUUID"] == UI
    for one in options:
        assert _events(version, entry, **{one: True}) == []


@pytest.mark.parametrize(("version", "shown"), [("8.0.21", 0), ("8.1", 1), ("8.3", 1)])
def test_resharding_says_when_writes_are_blocked(version: str, shown: int) -> None:
    o2 = {"type": "reshardFinalOp", "reshardBlockingWrites": "d.c", "reshardingUUID": UI}
    entry = {"op": "n", "ns": "d.c", "ui": UI, "o": {"msg": "Writes to d.c are temporarily blocked"}, "o2": o2}
    assert _events(version, entry) == _events(version, entry, showExpandedEvents=True) == []
    events = _events(version, entry, showSystemEvents=True)
    assert [event["operationType"] for event in events] == ["reshardBlockingWrites"] * shown
    for event in events:
        assert list(event) == ["reshardingUUID", "_id", "operationType", "clusterTime", "wallTime", "ns"]
    for event in _events(version, entry, showSystemEvents=True, showExpandedEvents=True):
        assert event["operationDescription"] == {"type": "reshardFinalOp", "reshardingUUID": UI}


@pytest.mark.parametrize(("version", "count"), [("7.0.28", 1), ("8.0", 0), ("8.3", 0)])
def test_a_no_op_in_the_form_of_6_0_is_read_up_to_7_0(version: str, count: int) -> None:
    entry = {"op": "n", "ns": "d.c", "ui": UI, "o": {}, "o2": {"type": "reshardBegin", "reshardingUUID": UI}}
    assert len(_events(version, entry)) == count
    named = {**entry, "o2": {"reshardBegin": "d.c", "reshardingUUID": UI}}
    assert len(_events(version, named)) == 1


@pytest.mark.parametrize(("version", "whole"), [("5", "5.0"), ("6", "6.0"), ("7", "7.0"), ("8", "8.0")])
def test_a_version_of_one_number_is_the_first_of_its_line(version: str, whole: str) -> None:
    assert profile_for(version) == profile_for(whole)
    assert profile_for("8") != profile_for("8.1")


@pytest.mark.parametrize("left_out", [["lsid"], ["lsid", "txnNumber"]])
def test_operations_without_a_whole_session_are_events_from_7_0_on(left_out: list[str]) -> None:
    session = {name: value for name, value in SESSION.items() if name not in left_out}
    entry = {**session, "op": "c", "ns": "admin.$cmd", "o": {"applyOps": OPERATIONS}}
    assert len(_events("7.0.28", entry)) == len(_events("6.0", {**entry, **SESSION})) == 2
    with pytest.raises(LaterEntryError, match="an applyOps of no session"):
        _events("6.0", entry)
    without_number = {name: value for name, value in entry.items() if name != "txnNumber"}
    assert _events("6.0", {**without_number, "lsid": SESSION["lsid"]}) == []


@pytest.mark.parametrize(
    ("version", "logged"), [("4.4", True), ("5", True), ("5.0", True), ("6", False), ("6.0", False), ("7.0", False)]
)
def test_pre_images_are_entries_before_6_0_unless_they_are_computed(version: str, logged: bool) -> None:
    options = StreamOptions.parse(Scope.of_database("d"), {})
    plan = build_plan(options, profile_for(version))
    assert plan.reads_logged_images == logged
    assert plan.finds_logged_images == plan.profile.finds_logged_pre_images
    assert plan.finds_logged_images or not logged
    assert not replace(plan, exact_images=True).reads_logged_images
    assert not replace(plan, exact_images=True).finds_logged_images


@pytest.mark.parametrize("left_out", [[], ["txnNumber"], ["lsid"]])
def test_an_end_of_a_transaction_shows_its_session(left_out: list[str]) -> None:
    session = {name: value for name, value in SESSION.items() if name not in left_out}
    o2 = {"endOfTransaction": ["d.c"], **session}
    (event,) = _events("8.0", {"op": "n", "ns": "", "o": {}, "o2": o2}, showExpandedEvents=True)
    assert {name: event[name] for name in SESSION if name in event} == session
    assert {**event["operationDescription"]} == session
    assert "ns" not in event


@pytest.mark.parametrize("name", ["txnNumber", "lsid"])
def test_an_end_of_a_transaction_with_another_session_is_an_error(name: str) -> None:
    o2 = {"endOfTransaction": ["d.c"], **SESSION, name: 1}
    with pytest.raises(OplogFormatError, match=f'Entry field "{name}" should be') as told:
        _events("8.0", {"op": "n", "ns": "", "o": {}, "o2": o2}, showExpandedEvents=True)
    assert told.value.code == 40532


@pytest.mark.parametrize(
    ("body", "by_version"),
    [
        ({"_id": 1, "$v": 1, "x": 1}, {"6.0": "replace", "7.0": 6741200, "8.2": 6741200, "8.3": "replace"}),
        ({"_id": 1, "$v": 3}, {"6.0": "replace", "7.0": 6741200, "8.2": 6741200, "8.3": "replace"}),
        ({"_id": 1, "$v": "x"}, {"8.3": "replace"}),
        ({"_id": 1, "$v": 2, "diff": {"u": {"a": 1}}}, {"6.0": "update", "8.2": "update", "8.3": "replace"}),
        ({"$v": 2, "diff": {"u": {"a": 1}}}, {"6.0": "update", "8.2": "update", "8.3": "update"}),
        ({"$v": 1, "$set": {"a": 1}}, {"6.0": "update", "7.0": 6741200, "8.3": 6741200}),
        ({"$v": "x", "diff": {"u": {"a": 1}}}, {"8.3": 6741200}),
        ({"$set": {"a": 1}}, {"6.0": "update", "7.0": 6741200, "8.3": 6741200}),
    ],
    ids=str,
)
def test_what_an_update_entry_is_taken_for(body: dict[str, Any], by_version: dict[str, Any]) -> None:
    for version, expected in by_version.items():
        try:
            (event,) = _events(version, {"op": "u", "ns": "d.c", "ui": UI, "o": body, "o2": {"_id": 1}})
            found = event["operationType"]
        except OplogFormatError as error:
            found = error.code
        assert found == expected, version


@pytest.mark.parametrize(
    ("name", "version", "code"),
    [
        ("supportedEvents", None, 40415),
        ("supportedEvents", "8.1", 40415),
        ("supportedEvents", "8.2", 115),
        ("showCommitTimestamp", "7.0", 40415),
        ("showCommitTimestamp", "8.3", 115),
        ("version", "8.3", 40415),
        ("showEndOfTransaction", "8.3", 40415),
    ],
)
def test_an_option_of_a_later_server_is_refused_by_name(name: str, version: str | None, code: int) -> None:
    profile = None if version is None else profile_for(version)
    with pytest.raises(UsageError, match=name) as told:
        StreamOptions.parse(Scope.of_database("d"), {name: True}, profile=profile)
    assert told.value.code == code
    assert "MongoDB has it" in str(told.value.hint)


def test_an_entry_with_the_new_fields_gives_the_same_event() -> None:
    """``rid`` and ``versionContext`` are about how the entry is applied, not about what has changed."""
    entry = {"op": "i", "ns": "d.c", "ui": UI, "o": {"_id": 1}, "o2": {"_id": 1}}
    more = {"rid": Int64(7), "versionContext": {"OFCV": "8.1"}}
    assert _events("8.1", {**entry, **more}) == _events("8.1", entry) != []
