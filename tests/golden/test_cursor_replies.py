"""The cursor's replies against the recorded ones: batches, tokens, order of the fields, what closes a cursor."""

from __future__ import annotations

import lzma
import tomllib
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import elements, encode_document
from tests.amounts import half_in_quick
from tests.golden import recording
from tests.golden.cursors import Cursors, MemorySource
from tests.golden.recording import (
    RecordedStream,
    Recording,
    entry_time,
    error_of,
    same_error,
    token_is_high_water_mark,
    token_time,
)
from tests.golden.replay import memory_of

pytestmark = [pytest.mark.usefixtures("kernel_on_and_off"), pytest.mark.by_turns]

HERE = Path(__file__).parent
GAPS: dict[str, str] = tomllib.loads((HERE / "known_gaps.toml").read_text())["gaps"]
STREAMS = recording.streams()
#: In the raw recording: how many documents a getMore asked for where the aggregate asked for another number.
_GET_MORE_SIZES = {"batch0 then 2": 2, "resume mid": None}
_OF_THE_CONNECTION = (b"$clusterTime", b"operationTime")


def _written(source: Recording, stream: RecordedStream, number: int) -> ClusterTime:
    """How far the oplog went when a reply was made, as far as the replies show it. After the last one there may be
    entries that concern other streams."""
    if number < len(stream.replies) and token_is_high_water_mark(stream.replies[number].post_batch_resume_token):
        return token_time(stream.replies[number].post_batch_resume_token)
    if stream.error is not None:
        return entry_time(source.oplog[-1])
    return max(entry_time(source.oplog[0]), token_time(stream.replies[-1].post_batch_resume_token))


def _sizes(source: Recording, stream: RecordedStream) -> tuple[int | None, int | None]:
    """Batch sizes of the aggregate and of each getMore. Where a stream fails the recorder reads it anew: in one go what
    comes before the failure, and then one event a getMore."""
    if stream.error is not None or source.name.startswith("broken_entries"):
        return (max(stream.replies[0].events, 1) if stream.replies else None), 1
    size = stream.command["cursor"].get("batchSize")
    if source.name == "cursor_protocol_6.0.27":
        return size, _GET_MORE_SIZES.get(stream.name, size)
    return size, size


def _expected(stream: RecordedStream, index: int, first_event: int, cursor_id: int, namespace: str) -> bytes:
    reply = stream.replies[index]
    events = stream.events[first_event : first_event + reply.events]
    cursor: dict[str, Any] = {
        "nextBatch" if index else "firstBatch": [RawBSONDocument(event) for event in events],
        "postBatchResumeToken": RawBSONDocument(reply.post_batch_resume_token),
    }
    if reply.invalidated:
        cursor["invalidated"] = True
    cursor |= {"id": Int64(0 if reply.closed else cursor_id), "ns": namespace}
    return bson.encode({"cursor": cursor, "ok": 1.0})


@pytest.mark.parametrize("case", half_in_quick(STREAMS))
def test_every_recorded_reply_is_given_byte_for_byte(case: str) -> None:
    if case in GAPS:
        pytest.xfail(GAPS[case])
    name, index = STREAMS[case]
    source = recording.load(name)
    stream = source.streams[index]
    memory = MemorySource(memory_of(source))
    cursors = Cursors(memory, source.server)
    first_size, size = _sizes(source, stream)
    command = {**stream.command, "cursor": {} if first_size is None else {"batchSize": first_size}}
    if stream.replies:
        # A stream without a start begins a tick after what the server had applied.
        start = token_time(stream.replies[0].post_batch_resume_token)
        memory.operation_time = ClusterTime(start - 1)
    collection = command["aggregate"] if isinstance(command["aggregate"], str) else "$cmd.aggregate"
    given = 0
    cursor_id = 1
    for number in range(len(stream.replies) + (stream.error is not None)):
        recorded = stream.replies[number] if number < len(stream.replies) else None
        memory.written = _written(source, stream, number)
        more = {} if size is None else {"batchSize": size}
        if number:
            command = {"getMore": Int64(cursor_id), "collection": collection, "maxTimeMS": 0, **more}
        reply = cursors.run(stream.database, command)
        if recorded is None:
            assert same_error(stream.error, error_of(bson.decode(reply)))
            assert len(cursors.registry) == 0
            return
        assert reply == _expected(stream, number, given, cursor_id, f"{stream.database}.{collection}"), number
        given += recorded.events
        assert len(cursors.registry) == (0 if recorded.closed else 1)


def _raw_replies() -> dict[str, list[bytes]]:
    packed = bson.decode(
        lzma.decompress((HERE / "replies" / "cursor_protocol_6.0.27.bson.xz").read_bytes()),
        bson.CodecOptions(document_class=RawBSONDocument),
    )
    return {stream["name"]: [bytes(reply.raw) for reply in stream["replies"]] for stream in packed["streams"]}


@pytest.mark.parametrize(
    "stream", recording.load("cursor_protocol_6.0.27").streams, ids=lambda stream: str(stream.name)
)
def test_replies_of_the_recorded_cursor_protocol_are_the_bytes_on_the_wire(stream: RecordedStream) -> None:
    source = recording.load("cursor_protocol_6.0.27")
    memory = MemorySource(memory_of(source))
    cursors = Cursors(memory)
    _, size = _sizes(source, stream)
    raw = _raw_replies()[stream.name]
    assert len(raw) == len(stream.replies)
    for number, (wire, recorded) in enumerate(zip(raw, stream.replies, strict=True)):
        memory.written = _written(source, stream, number)
        if number == 0:
            memory.operation_time = ClusterTime(token_time(recorded.post_batch_resume_token) - 1)
            reply = cursors.run(stream.database, stream.command)
        else:
            more = {"getMore": Int64(1), "collection": "c", "maxTimeMS": 0}
            reply = cursors.run(stream.database, more if size is None else {**more, "batchSize": size})
        assert _without_the_connections(wire) == reply


def _without_the_connections(reply: bytes) -> bytes:
    """The reply without what the connection adds, and with our cursor's id."""
    kept = [reply[each.start : each.end] for each in elements(reply) if each.name not in _OF_THE_CONNECTION]
    whole = RawBSONDocument(encode_document(*kept))
    cursor_id = whole["cursor"]["id"]
    found = bson.encode({"id": Int64(cursor_id)})[4:-1]
    return bytes(whole.raw).replace(found, bson.encode({"id": Int64(1)})[4:-1])
