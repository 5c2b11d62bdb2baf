"""The kernel and the plain stages give the same events for a shard's part of a merged stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.kernel.fast_path import process_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import Answer, NeedShardKeys, Request
from tests.golden import sharded_recording
from tests.golden.replay import MemoryOplog
from tests.golden.sharded_recording import ShardedRecording
from tests.golden.sharded_replay import memory_of
from tests.property import random_entries
from tests.property.random_entries import document, string
from tests.property.working import drive_blocks, drive_by

UUID = bytes(range(16))


def part_plan(recording: ShardedRecording, **stage: object) -> Plan:
    options = StreamOptions.parse(Scope.cluster(), stage)
    return build_plan(replace(options, needs_merge=True), profile_for(recording.server))


def answer(oplog: MemoryOplog, keys: dict[bytes, bytes], request: Request) -> Answer:
    return [keys.get(uuid) for uuid in request.uuids] if isinstance(request, NeedShardKeys) else oplog.answer(request)


Answers = Callable[[Request], Answer]
Given = tuple[list[bytes], object]


def given(
    plan: Plan, oplog: MemoryOplog, answers: Answers, entries_max: int, *, fast: bool
) -> tuple[list[bytes], object]:
    """The events of a shard's part that are the user's, and where the part stands afterwards."""
    pipeline = ChangeStreamPipeline(plan, shard_part=True, on_shard=True)
    events: list[bytes] = []
    assert plan.read_after is not None
    for batch in oplog.batches(plan.read_after, oplog.times[-1], entries_max):
        if fast:
            for block in drive_blocks(process_batch(pipeline, batch), answers):
                events += block.events()
        else:
            for some in drive_by(pipeline.process(batch), answers):
                events += [event.to_bson() for event in some if not event.bypasses]
        if pipeline.invalidated:
            break
    return events, (pipeline.high_water, pipeline.resume_token)


@pytest.mark.long
@pytest.mark.parametrize("name", sharded_recording.names())
@pytest.mark.parametrize("dropped", [False, True])
def test_a_shards_part_is_that_of_the_plain_stages(name: str, *, dropped: bool) -> None:
    """Every shard's oplog of every recorded cluster from its beginning, with the shard keys known or dropped, and
    resumed from one of its events."""
    recording = sharded_recording.load(name)
    keys = {} if dropped else recording.shard_keys
    compared = 0
    for shard in recording.shards:
        oplog = memory_of(recording, shard)
        answers = partial(answer, oplog, keys)
        plan = part_plan(recording, startAtOperationTime=recording.start.to_timestamp())
        expected = given(plan, oplog, answers, 1 << 30, fast=False)
        compared += len(expected[0])
        for entries_max in (1 << 30, 7):
            assert given(plan, oplog, answers, entries_max, fast=True) == expected
        for event in expected[0][3:20:8]:
            token = raw_bson.find(event, b"_id")
            assert token is not None
            resumed = part_plan(recording, resumeAfter=RawBSONDocument(raw_bson.value(event, token)))
            again = given(resumed, oplog, answers, 7, fast=False)
            assert given(resumed, oplog, answers, 7, fast=True) == again
    assert compared > 50


def test_an_insert_takes_its_key_from_the_catalog() -> None:
    """On 4.4: collections sharded by ``_id`` come from the kernel, those by another field from the plain stages, in
    order."""
    recording = sharded_recording.load("migration_4.4.2")
    entries = [insert(number, uuid) for number, uuid in enumerate((UUID, UUID[::-1], UUID, bytes(16)), 1)]
    oplog = MemoryOplog(entries, (), lambda lookups: [None] * len(lookups))
    keys = {UUID: pattern(b"region", b"_id"), bytes(16): pattern(b"_id")}
    plan = part_plan(recording, startAtOperationTime=ClusterTime.of(1, 0).to_timestamp())
    expected = given(plan, oplog, partial(answer, oplog, keys), 1 << 30, fast=False)
    assert len(expected[0]) == 4
    assert len({len(event) for event in expected[0]}) == 2
    assert given(plan, oplog, partial(answer, oplog, keys), 1 << 30, fast=True) == expected


def pattern(*names: bytes) -> bytes:
    one = raw_bson.encode_int32(1)
    return raw_bson.encode_document(*(raw_bson.encode_element(raw_bson.INT32, name, one) for name in names))


def insert(number: int, uuid: bytes) -> bytes:
    identifier = raw_bson.encode_element(raw_bson.INT32, b"_id", raw_bson.encode_int32(number))
    return raw_bson.encode_document(
        string(b"op", b"i"),
        string(b"ns", b"shop.orders"),
        raw_bson.encode_element(raw_bson.BINARY, b"ui", random_entries.uuid_value()[:5] + uuid),
        document(b"o", raw_bson.encode_document(identifier, string(b"region", b"eu"))),
        raw_bson.encode_element(raw_bson.TIMESTAMP, b"ts", ClusterTime.of(2, number).to_bytes_le()),
        raw_bson.encode_element(raw_bson.DATE, b"wall", raw_bson.encode_int64(5)),
    )
