"""Transactions in pieces: one of any size streams through, and its chain is requested piece by piece."""

from __future__ import annotations

import uuid
from datetime import datetime

import bson
import pytest
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.request import Answer, Emit, NeedEntries, OplogBatch
from tailrace.errors import ChangeStreamHistoryLost, OplogFormatError

OPTIONS = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
UI = Binary(uuid.UUID(int=7).bytes, 4)
LSID = {"id": Binary(uuid.UUID(int=1).bytes, 4), "uid": b"u" * 32}
NULL_OP_TIME = {"ts": Timestamp(0, 0), "t": Int64(-1)}


def _operation(number: int, size: int = 10) -> dict[str, object]:
    key = {"_id": number}
    return {"op": "i", "ns": "d.c", "ui": UI, "o": {**key, "fill": "x" * size}, "o2": key}


def _member(increment: int, operations: list[dict[str, object]], **extra: object) -> bytes:
    previous = {"ts": Timestamp(9, increment - 1), "t": Int64(1)} if increment > 1 else NULL_OP_TIME
    entry = {
        "lsid": LSID,
        "txnNumber": Int64(3),
        "op": "c",
        "ns": "admin.$cmd",
        "o": {"applyOps": operations, **extra},
        "ts": Timestamp(9, increment),
        "wall": datetime(2026, 1, 1),
        "prevOpTime": previous,
    }
    return bson.encode(entry, codec_options=OPTIONS)


def _chain(members: int, operations_each: int, size: int) -> list[bytes]:
    number = 0
    entries = []
    for increment in range(1, members + 1):
        operations = [_operation(number + i, size) for i in range(operations_each)]
        number += operations_each
        last = increment == members
        entries.append(_member(increment, operations, **({"count": Int64(number)} if last else {"partialTxn": True})))
    return entries


def _pipeline() -> ChangeStreamPipeline:
    options = StreamOptions.parse(Scope.of_database("d"))
    return ChangeStreamPipeline(build_plan(options).start_at(ClusterTime.of(1, 1)))


def test_a_64_mb_transaction_passes_in_bounded_pieces() -> None:
    entries = _chain(members=8, operations_each=80, size=100_000)
    assert sum(map(len, entries)) > 64_000_000
    by_time = {ClusterTime.of(9, i + 1): entry for i, entry in enumerate(entries)}
    pipeline = _pipeline()
    running = pipeline.process(OplogBatch(entries[-1], ClusterTime.of(9, 8)))
    answer: Answer = None
    seen, largest = 0, 0
    while True:
        try:
            request = running.send(answer)
        except StopIteration:
            break
        answer = None
        if isinstance(request, NeedEntries):
            assert len(request.times) == 1
            answer = [by_time[time] for time in request.times]
        else:
            assert isinstance(request, Emit)
            assert [event.token.txn_op_index for event in request.events] == list(
                range(seen, seen + len(request.events))
            )
            seen += len(request.events)
            largest = max(largest, sum(len(event.full_document or b"") for event in request.events))
    assert seen == 640
    assert largest < 5_000_000


def test_chain_members_that_were_read_before_their_commit_are_not_asked_for_again() -> None:
    entries = _chain(members=3, operations_each=2, size=5)
    running = _pipeline().process(OplogBatch(b"".join(entries), ClusterTime.of(9, 3)))
    requests = list(running)
    assert all(isinstance(request, Emit) for request in requests)
    assert sum(len(request.events) for request in requests if isinstance(request, Emit)) == 6


def test_a_member_that_the_oplog_no_longer_has_is_286_and_says_which() -> None:
    entries = _chain(members=3, operations_each=2, size=5)
    running = _pipeline().process(OplogBatch(entries[-1], ClusterTime.of(9, 3)))
    assert isinstance(next(running), NeedEntries)
    with pytest.raises(ChangeStreamHistoryLost, match=r"Timestamp\(9, 2\)"):
        running.send([None])


def test_a_chain_that_leads_to_itself_is_refused_with_its_position() -> None:
    entry = bson.decode(_chain(members=2, operations_each=1, size=5)[1], codec_options=OPTIONS)
    entry["prevOpTime"] = {"ts": Timestamp(9, 2), "t": Int64(1)}
    raw = bson.encode(entry, codec_options=OPTIONS)
    with pytest.raises(OplogFormatError, match=r"does not lead back.*UTC \(9,2\)"):
        list(_pipeline().process(OplogBatch(raw, ClusterTime.of(9, 3))))
