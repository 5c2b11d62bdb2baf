"""Oplogs, tokens and options that break their format. Each ends in the server's code or a named error with the entry's
position; everything before it has been delivered; nothing is skipped without being counted, and nothing crashes.

What mongod itself does with broken entries is recorded (``broken_entries`` among the golden recordings).
"""

from __future__ import annotations

import datetime
import random
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import SERVER_6_0
from tailrace.core.plan.request import Answer, OplogBatch, Request
from tailrace.core.stage.oplog_match import OplogMatch
from tailrace.errors import NON_RESUMABLE_LABEL, OplogFormatError, TailraceError
from tests.golden import recording
from tests.golden.recording import entry_time
from tests.golden.replay import BEGINNING, MemoryOplog, OurStream, memory_of

UUID = Binary(bytes(range(16)), 4)
WALL = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
START = {"startAtOperationTime": Timestamp(9, 0)}


def entry(second: int, op: str, o: Any, **more: Any) -> dict[str, Any]:
    return {
        "op": op,
        "ns": "db.c",
        "ui": UUID,
        "o": o,
        "ts": Timestamp(second, 1),
        "t": Int64(1),
        "v": Int64(2),
        "wall": WALL,
        **more,
    }


def insert(second: int, **more: Any) -> dict[str, Any]:
    return entry(second, "i", {"_id": second}, o2={"_id": second}, **more)


def update(second: int, o: Any) -> dict[str, Any]:
    return entry(second, "u", o, o2={"_id": 1})


def run(*entries: dict[str, Any], stage: dict[str, Any] | None = None) -> OurStream:
    """A stream on db.c over these entries."""
    oplog = MemoryOplog([bson.encode(one) for one in entries], [], lambda lookups: [None] * len(lookups))
    stream = OurStream(
        oplog, "db", {"aggregate": "c", "pipeline": [{"$changeStream": stage or START}]}, server="6.0.27"
    )
    stream.advance(ClusterTime.of(1000, 0))
    return stream


class Bytes:
    """An oplog of one batch of any bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def answer(self, request: Request) -> Answer:
        raise AssertionError(request)

    def batches(
        self, after: ClusterTime, until: ClusterTime, entries_max: int, oplog_filter: bytes | None = None
    ) -> list[OplogBatch]:
        return [OplogBatch(self._raw, until)]


def run_bytes(raw: bytes) -> OurStream:
    command = {"aggregate": "c", "pipeline": [{"$changeStream": START}]}
    stream = OurStream(Bytes(raw), "db", command, server="6.0.27")
    stream.advance(ClusterTime.of(1000, 0))
    return stream


def test_a_truncated_entry_is_named_after_the_events_before_it() -> None:
    whole, cut = bson.encode(insert(10)), bson.encode(insert(11))[:-7]
    stream = run_bytes(whole + cut)
    assert len(stream.events) == 1
    assert isinstance(stream.raised, OplogFormatError)
    assert stream.error is not None
    assert stream.error.code == 8


def test_an_entry_with_a_corrupt_inside_is_named_with_its_time() -> None:
    broken = bytearray(bson.encode(insert(11)))
    # The length of the document o, made longer than the entry.
    at = broken.index(b"\x03o\x00") + 3
    broken[at : at + 4] = (10**6).to_bytes(4, "little")
    moved = bytes(broken)
    stream = run_bytes(bson.encode(insert(10)) + moved)
    assert len(stream.events) == 1
    assert isinstance(stream.raised, OplogFormatError)
    assert stream.raised.position is not None


@pytest.mark.parametrize("field", ["op", "ts", "ui", "o"])
def test_an_insert_without_a_needed_field_is_an_error_with_a_position(field: str) -> None:
    broken = insert(11)
    del broken[field]
    raw = bson.encode(broken)
    stream = run_bytes(bson.encode(insert(10)) + raw)
    assert len(stream.events) == 1
    assert isinstance(stream.raised, OplogFormatError)
    assert stream.raised.position is not None


@pytest.mark.parametrize(("field", "value"), [("op", 1), ("ns", 1), ("ui", "x"), ("ui", Binary(b"1", 4)), ("ts", 1)])
def test_an_entry_with_a_field_of_another_type_is_an_error(field: str, value: Any) -> None:
    stream = run_bytes(bson.encode(insert(10)) + bson.encode(insert(11) | {field: value}))
    assert len(stream.events) == 1
    assert isinstance(stream.raised, OplogFormatError)


@pytest.mark.parametrize("version", [Int64(2), 2.0, "2", None, {"x": 1}])
def test_an_update_whose_version_is_no_int32_ends_the_stream_with_code_8(version: Any) -> None:
    stream = run(insert(10), update(11, {"$v": version, "diff": {"u": {"a": 1}}}))
    assert len(stream.events) == 1
    assert stream.error is not None
    assert stream.error.code == 8


@pytest.mark.parametrize(
    ("diff", "code"),
    [
        ({"i": {"a": 1}, "u": {"b": 1}}, 4770503),
        ({"u": {"a": 1}, "d": {"b": False}}, 4770503),
        ({"sa": {"u": {"b": 1}}, "i": {"c": 1}}, 4770514),
        ({"z": {"a": 1}}, 4770503),
        ({}, 4770500),
        ({"u": 5}, 4770507),
        ({"sa": {"a": True, "l": "2"}}, 4770507),
        ({"sa": {"a": True, "ux": 1}}, 4770512),
    ],
)
def test_a_diff_that_breaks_its_format_has_the_servers_code(diff: Any, code: int) -> None:
    stream = run(insert(10), update(11, {"$v": 2, "diff": diff}))
    assert len(stream.events) == 1
    assert isinstance(stream.raised, OplogFormatError)
    assert stream.raised.code == code


def test_a_diff_nested_deeper_than_any_document_is_an_error() -> None:
    diff = raw_bson.encode_document(raw_bson.encode_element(0x03, b"u", bson.encode({"x": 1})))
    for _ in range(5000):
        diff = raw_bson.encode_document(raw_bson.encode_element(0x03, b"sa", diff))
    o = raw_bson.encode_document(
        raw_bson.encode_element(0x10, b"$v", raw_bson.encode_int32(2)), raw_bson.encode_element(0x03, b"diff", diff)
    )
    plain = bson.encode(update(11, {}))
    element = raw_bson.find(plain, b"o")
    assert element is not None
    raw = raw_bson.encode_document(
        plain[4 : element.start], raw_bson.encode_element(0x03, b"o", o), plain[element.end : -1]
    )
    stream = run_bytes(raw)
    assert isinstance(stream.raised, OplogFormatError)


def test_an_operation_letter_that_is_not_known_is_skipped_and_counted() -> None:
    stream = run(insert(10), entry(11, "xi", {"_id": 1}), insert(12))
    assert stream.error is None
    assert len(stream.events) == 2
    match = OplogMatch(StreamOptions.parse(Scope.of_collection("db", "c")), SERVER_6_0)
    assert not match.matches(parse_entry(bson.encode(entry(11, "xi", {"_id": 1}))))
    assert match.unknown_operations == {"xi": 1}


def test_a_transaction_whose_chain_is_gone_is_history_lost() -> None:
    operation = {"op": "i", "ns": "db.c", "ui": UUID, "o": {"_id": 1}, "o2": {"_id": 1}}
    session = {"lsid": {"id": UUID}, "txnNumber": Int64(1), "prevOpTime": {"ts": Timestamp(5, 5), "t": Int64(1)}}
    stream = run(insert(10), entry(11, "c", {"applyOps": [operation]}, **session) | {"ns": "admin.$cmd"})
    assert len(stream.events) == 1
    assert stream.error is not None
    assert stream.error.code == 286
    assert NON_RESUMABLE_LABEL in stream.error.labels


def test_what_is_broken_after_an_invalidation_is_not_looked_at() -> None:
    drop = entry(11, "c", {"drop": "c"}) | {"ns": "db.$cmd"}
    stream = run(insert(10), drop, update(12, {"$v": "2", "diff": {"u": {"a": 1}}}))
    assert stream.error is None
    assert stream.closed
    kinds = [bson.decode(event)["operationType"] for event in stream.events]
    assert kinds == ["insert", "drop", "invalidate"]


def test_the_token_of_another_stream_is_not_found() -> None:
    first = run(insert(10), insert(11))
    token = bson.decode(first.tokens[0])
    others = [insert(10) | {"ns": "db.d", "ui": Binary(bytes(16), 4)}, insert(12)]
    stream = run(*others, stage={"resumeAfter": token})
    assert not stream.events
    assert stream.error is not None
    assert stream.error.code == 280
    assert stream.error.message.startswith("cannot resume stream; the resume token was not found. {_data: ")
    assert NON_RESUMABLE_LABEL in stream.error.labels


def test_an_event_above_16_mb_is_an_error_where_it_is_not_split() -> None:
    source = recording.load("large_events_6.0.27")
    command = next(stream.command for stream in source.streams if stream.name == "without the split")
    stream = OurStream(memory_of(source), "gr", command, server=source.server)
    stream.advance(entry_time(source.oplog[-1]))
    assert stream.error is not None
    assert stream.error.code == 10334


@pytest.mark.parametrize(
    ("stage", "code"),
    [
        ({"fullDocument": 1}, 14),
        ({"showExpandedEvents": "yes"}, 14),
        ({"showExpandedEvents": None}, 14),
        ({"resumeAfter": "token"}, 14),
        ({"startAtOperationTime": 5}, 14),
        ({"fullDocument": "bad"}, 2),
        ({"unknown": 1}, 40415),
        ({"resumeAfter": {"_data": "zz"}}, 9),
        ({"resumeAfter": {}}, 40647),
    ],
)
def test_an_option_of_a_wrong_type_has_the_servers_code(stage: dict[str, Any], code: int) -> None:
    stream = run(stage=stage)
    assert stream.error is not None
    assert stream.error.code == code


@pytest.mark.parametrize("name", ["transactions_6.0.27", "ddl_6.0.27", "update_descriptions_6.0.27", "sessions_6.0.27"])
def test_damaged_bytes_end_in_a_named_error_or_in_events(name: str) -> None:
    """Every entry of a recording with bytes changed or cut, alone in its batch, after the entries before it."""
    source = recording.load(name)
    memory = memory_of(source)
    rng = random.Random(f"damage {name}")
    stage = {
        "allChangesForCluster": True,
        "showExpandedEvents": True,
        "showSystemEvents": True,
        "showMigrationEvents": True,
    }
    start = {"startAtOperationTime": BEGINNING.to_timestamp(), "fullDocument": "whenAvailable"}
    command = {"aggregate": 1, "pipeline": [{"$changeStream": stage | start}]}
    for whole in source.oplog:
        for _ in range(12):
            damaged = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 5))):
                damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 2, 3, 4, 127, 255, rng.randrange(256)))
            if rng.random() < 0.2:
                del damaged[rng.randrange(len(damaged)) :]
            stream = OurStream(_Damaged(memory, bytes(damaged)), "admin", command, server=source.server)
            # Any exception other than our own errors gets through here and fails the test.
            stream.advance(ClusterTime(1 << 62))
            assert stream.raised is None or isinstance(stream.raised, TailraceError)


class _Damaged(Bytes):
    """One damaged batch; requests are answered from the whole recording."""

    def __init__(self, memory: MemoryOplog, raw: bytes) -> None:
        super().__init__(raw)
        self._memory = memory

    def answer(self, request: Request) -> Answer:
        return self._memory.answer(request)
