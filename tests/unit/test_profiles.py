"""What newer servers do, by their published documents: no server of these versions stands behind these cases."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.pipeline.shard import ChangeStreamPipeline
from tailrace.plan.options import StreamOptions
from tailrace.plan.plan import build_plan
from tailrace.plan.profile import profile_for
from tailrace.plan.request import Emit, OplogBatch

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


@pytest.mark.parametrize(("version", "expected"), [("8.0", None), ("8.1", "collection")])
def test_create_says_what_kind_of_namespace_from_8_1_on(version: str, expected: str | None) -> None:
    entry = {"op": "c", "ns": "d.$cmd", "ui": UI, "o": {"create": "c", "idIndex": {"v": 2}}}
    (event,) = _events(version, entry, showExpandedEvents=True)
    assert event.get("nsType") == expected


@pytest.mark.parametrize(("source", "kind"), [("c", "view"), ("system.buckets.v", "timeseries")])
def test_a_view_is_told_from_a_time_series_collection(source: str, kind: str) -> None:
    entry = {"op": "i", "ns": "d.system.views", "ui": UI, "o": {"_id": "d.v", "viewOn": source, "pipeline": []}}
    (event,) = _events("8.1", entry, showExpandedEvents=True)
    assert (event["ns"], event["nsType"]) == ({"db": "d", "coll": "v"}, kind)
    assert list(event)[-1] == "nsType"
