"""However a stream is cut into batches and reads, it gives the same events and can be resumed at each cut."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import bson
import numpy as np
import pytest
from bson.int64 import Int64
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.cursor.reply_events import REPLY_BYTES_MAX, ReplyEvents
from tailrace.core.event.event_block import EventBlock
from tests.amounts import amount
from tests.golden import recording
from tests.golden.cursors import Cursors, MemorySource, batch_of, carry_out
from tests.golden.replay import memory_of

pytestmark = pytest.mark.usefixtures("kernel_on_and_off")

_RECORDING, _STREAM = "cursors_6.0.27", "database"
_SIZES = st.lists(st.integers(min_value=0, max_value=9), min_size=1, max_size=40)


@lru_cache(maxsize=1)
def _stream() -> tuple[recording.Recording, recording.RecordedStream]:
    source = recording.load(_RECORDING)
    return source, next(stream for stream in source.streams if stream.name == _STREAM)


@settings(max_examples=amount(20, 60), deadline=None)
@given(_SIZES, st.integers(min_value=1, max_value=12), st.booleans())
def test_any_sequence_of_batch_sizes_gives_the_same_events(sizes: list[int], entries_max: int, resumes: bool) -> None:
    source, stream = _stream()
    memory = MemorySource(memory_of(source), entries_max=entries_max)
    cursors = Cursors(memory)
    command = {**stream.command, "cursor": {"batchSize": sizes[0]}}
    reply = cursors.aggregate(stream.database, command)
    events = batch_of(reply)
    assert len(events) <= sizes[0]
    for size in [*sizes[1:], 0]:
        if resumes:
            token = bson.decode(reply["cursor"]["postBatchResumeToken"].raw)
            stage = {"$changeStream": {"resumeAfter": token}}
            again = {**stream.command, "pipeline": [stage], "cursor": {"batchSize": size}}
            reply = cursors.aggregate(stream.database, again)
            if size == 0:
                reply = cursors.get_more(reply, maxTimeMS=0)
        else:
            reply = cursors.get_more(reply, batchSize=size, maxTimeMS=0)
        assert size == 0 or len(batch_of(reply)) <= size
        events += batch_of(reply)
    assert events == list(stream.events)


def _events(sizes: list[int]) -> EventBlock:
    """Events of these sizes with tokens of 107 bytes. What they hold does not matter, and takes no memory."""
    offsets = np.cumsum([0, *sizes])
    starts, none = offsets[:-1] * 0 + 9, np.zeros(len(sizes), np.int64)
    return EventBlock(
        np.zeros(offsets[-1], np.uint8), offsets, none.astype(np.uint64), none.astype(np.uint8), starts, starts + 107,
        none, none,
    )  # fmt: skip


@settings(max_examples=amount(40, 200), deadline=None)
@given(
    st.lists(st.integers(min_value=5, max_value=REPLY_BYTES_MAX // 2 + 1000), min_size=1, max_size=6),
    st.sampled_from(("firstBatch", "nextBatch")),
    st.integers(min_value=1, max_value=6),
)
def test_a_batch_takes_its_first_document_and_never_outgrows_its_bound(sizes: list[int], field: str, cut: int) -> None:
    """It also takes the same events however they are divided into blocks."""
    block = _events(sizes)
    batch, pieces = ReplyEvents(field, None), ReplyEvents(field, None)
    taken = batch.add(block)
    for first in range(0, len(sizes), cut):
        piece = block.cut(first, min(first + cut, len(sizes)))
        if pieces.add(piece) < len(piece):
            break
    assert taken >= 1
    assert len(batch) == len(pieces) == taken
    total = sum(sizes[:taken])
    assert taken == 1 or total <= REPLY_BYTES_MAX
    if taken < len(sizes):
        assert total + sizes[taken] + 200 > REPLY_BYTES_MAX


_COMMANDS: list[dict[str, Any]] = [
    {
        "aggregate": "c",
        "pipeline": [{"$changeStream": {"fullDocument": "default"}}, {"$match": {"operationType": "insert"}}],
        "cursor": {"batchSize": 2},
        "readConcern": {"level": "majority"},
        "collation": {"locale": "simple"},
        "let": {"a": 1},
        "maxTimeMS": 5,
    },
    {"getMore": Int64(1), "collection": "c", "batchSize": 1, "maxTimeMS": 0},
    {"killCursors": "c", "cursors": [Int64(1), Int64(2)]},
]


@settings(max_examples=amount(80, 400), deadline=None)
@given(
    st.sampled_from(_COMMANDS),
    st.lists(st.tuples(st.integers(min_value=0, max_value=400), st.integers(min_value=0, max_value=255)), max_size=4),
)
def test_a_damaged_command_is_answered_and_nothing_else(
    command: dict[str, Any], changes: list[tuple[int, int]]
) -> None:
    source, stream = _stream()
    cursors = Cursors(MemorySource(memory_of(source)))
    cursors.aggregate(stream.database, stream.command)
    raw = bytearray(bson.encode(command))
    for position, byte in changes:
        raw[position % len(raw)] = byte
    reply = bson.decode(carry_out(cursors.registry.run("gr", bytes(raw), 0), cursors.source))
    assert reply["ok"] in (0, 1)
    assert reply["ok"] == 1 or (reply["code"] > 0 and reply["errmsg"])
