"""Entries that no server writes, as the servers read them when they are put into an oplog by hand. The golden recording
reads each with expanded events only, and has no chain that points forward."""

from __future__ import annotations

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
from tailrace.errors import ChangeStreamHistoryLost, OplogFormatError

UI = Binary(bytes(range(16)), 4)
_INSERT = {"op": "i", "ns": "d.c", "ui": UI, "o": {"_id": 1}, "o2": {"_id": 1}}


def _types(version: str, *entries: dict[str, Any], needs_merge: bool = False, **options: Any) -> list[str]:
    raw = b"".join(
        bson.encode({**entry, "ts": Timestamp(9, number), "t": Int64(1), "wall": datetime(2026, 1, 1)})
        for number, entry in enumerate(entries, 1)
    )
    parsed = StreamOptions.parse(Scope.of_database("d"), options, needs_merge=needs_merge)
    plan = build_plan(parsed, profile_for(version))
    pipeline = ChangeStreamPipeline(plan.start_at(ClusterTime.of(1, 1)))
    found: list[str] = []
    for request in pipeline.process(OplogBatch(raw, ClusterTime.of(9, 9))):
        assert isinstance(request, Emit), "nothing may be asked for"
        found += [event.operation_type for event in request.events]
    return found


@pytest.mark.parametrize("version", ["6.0", "5.0", "4.4"])
@pytest.mark.parametrize("body", [{"collMod": "c", "validator": {}}, {"dropIndexes": "c", "index": "a_1"}])
def test_a_definition_without_its_o2_is_passed_over_where_the_stream_does_not_show_it(
    version: str, body: dict[str, Any]
) -> None:
    entry = {"op": "c", "ns": "d.$cmd", "ui": UI, "o": body}
    assert _types(version, entry, _INSERT) == ["insert"]
    if version == "6.0":
        with pytest.raises(OplogFormatError):
            _types(version, entry, _INSERT, showExpandedEvents=True)


_BY_TYPE = {"type": "migrateChunkToNewShard", "from": "sh0", "to": "sh1"}
_BY_NAME = {"migrateChunkToNewShard": "d.c", "fromShardId": "sh0", "toShardId": "sh1"}


@pytest.mark.parametrize(
    ("version", "merged", "expected"),
    [
        ("4.4", False, ["kNewShardDetected"]),
        ("6.0", False, []),
        ("6.0", True, ["kNewShardDetected"]),
        ("7.0", False, []),
        ("7.0", True, ["migrateChunkToNewShard"] * 2),
        ("7.0.28", True, ["migrateChunkToNewShard"] * 2),
        ("8.0", True, ["migrateChunkToNewShard"]),
    ],
)
def test_a_new_shard_is_told_of_to_a_merge(version: str, merged: bool, expected: list[str]) -> None:
    """Measured in ``test_crafted_entries_live.py``, except for 8.0, where the field ``type`` means nothing. The
    recordings of 7.0.28 have no stream that is merged."""
    entries = [{"op": "n", "ns": "d.c", "ui": UI, "o": {"msg": "x"}, "o2": o2} for o2 in (_BY_TYPE, _BY_NAME)]
    assert _types(version, *entries, needs_merge=merged) == expected


def test_a_transaction_whose_chain_leads_forward_is_lost_history() -> None:
    session = {"lsid": {"id": UI, "uid": b"u" * 32}, "txnNumber": Int64(5)}
    forward = {"ts": Timestamp(99, 1), "t": Int64(1)}
    entry = {"op": "c", "ns": "admin.$cmd", "o": {"applyOps": [_INSERT]}, **session, "prevOpTime": forward}
    with pytest.raises(ChangeStreamHistoryLost) as caught:
        _types("6.0", entry)
    assert caught.value.code == 286
