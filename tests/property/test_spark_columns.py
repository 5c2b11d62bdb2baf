"""The fast columns equal plain ones, on every recorded event and on random documents."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import bson
import numpy as np
import pyarrow as pa
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.event.event_block import EventBlock
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.errors import OplogFormatError, TailraceError
from tailrace.lake.spark.query.options import COLUMNS, DOCUMENT_FORMS
from tailrace.lake.spark.reading.columns import BYTES_MAX, ROWS_MAX, EventColumns
from tailrace.read.source.drive import drive
from tests.amounts import amount
from tests.golden import recording
from tests.golden.replay import BEGINNING, memory_of, options_of
from tests.property import plain_columns, random_values

SEED = 20240501


def recorded_events(name: str) -> list[bytes]:
    return [bytes(event) for stream in recording.load(name).streams for event in stream.events]


def random_event(rng: random.Random) -> bytes:
    fields = {
        "_id": {"_data": rng.randbytes(20).hex().upper()},
        "operationType": rng.choice(("insert", "update", "replace", "delete")),
        "clusterTime": bson.Timestamp(rng.choice((0, 1, 2**31, 2**32 - 1)), rng.choice((0, 1, 2**32 - 1))),
        "wallTime": datetime(2024, 5, 1, 12, 0, 0, rng.randrange(1000) * 1000, UTC),
        "ns": {"db": random_values.text(rng), "coll": random_values.text(rng)},
        "to": {"db": random_values.text(rng), "coll": random_values.text(rng)},
        "documentKey": RawBSONDocument(raw_bson.encode_document()),
        "txnNumber": Int64(rng.randrange(2**40)),
        "lsid": {"id": bson.Binary(rng.randbytes(16), 4), "uid": rng.randbytes(32)},
    }
    encoded = bson.encode({name: fields[name] for name in fields if rng.random() < 0.8})
    parts = [encoded[element.start : element.end] for element in raw_bson.elements(encoded)]
    for name in (b"fullDocument", b"fullDocumentBeforeChange", b"updateDescription"):
        if rng.random() < 0.6:
            parts.append(raw_bson.encode_element(raw_bson.OBJECT, name, random_values.document(rng)))
        elif rng.random() < 0.3:
            parts.append(raw_bson.encode_element(raw_bson.NULL, name, b""))
    rng.shuffle(parts)
    return raw_bson.encode_document(*parts)


@pytest.mark.long
@pytest.mark.by_turns
@pytest.mark.parametrize("documents", DOCUMENT_FORMS)
@pytest.mark.parametrize("name", recording.names())
def test_recorded_events_become_the_columns_that_their_fields_say(name: str, documents: str) -> None:
    events = recorded_events(name)
    if not events:
        pytest.skip("a recording without events")
    columns = EventColumns(COLUMNS, documents)
    got = [row for batch in columns.batches([EventBlock.of_bson(events)]) for row in batch.to_pylist()]
    assert got == plain_columns.rows(events, COLUMNS, documents)


@pytest.mark.long
@pytest.mark.parametrize("name", recording.names())
def test_what_the_kernel_noted_gives_the_columns_that_are_found(name: str) -> None:
    """The recorded streams over their oplog through the kernel, in all forms of documents."""
    source = recording.load(name)
    oplog = memory_of(source)
    for recorded in source.streams[:: amount(3, 1)]:
        try:
            plan = build_plan(options_of(recorded.database, recorded.command), profile_for(source.server))
        except TailraceError:
            continue
        plan = plan if plan.read_after is not None else plan.start_at(BEGINNING)
        stream, blocks = open_stream(plan, kernel="always"), []
        with contextlib.suppress(TailraceError):
            stream.feed(ONE_OPLOG, next(iter(oplog.batches(plan.read_after or BEGINNING, oplog.times[-1], 1 << 30))))
            blocks += drive(stream, lambda need: oplog.answer(need.request))
        events = [event for block in blocks for event in block.events()]
        for documents in DOCUMENT_FORMS:
            columns = EventColumns(COLUMNS, documents)
            found = pa.Table.from_batches(
                columns.batches([one if one.places is None else replace(one, places=None) for one in blocks]),
                columns.arrow_schema,
            )
            noted = pa.Table.from_batches(columns.batches(blocks), columns.arrow_schema)
            assert noted.equals(found)
            assert noted.to_pylist() == plain_columns.rows(events, COLUMNS, documents)


@pytest.mark.parametrize("documents", ["variant", "bson"])
def test_random_events_become_the_columns_that_their_fields_say(documents: str) -> None:
    rng = random.Random(SEED)
    events = [random_event(rng) for _ in range(amount(300, 600))]
    columns = EventColumns(COLUMNS, documents)
    batch = columns.batch(EventBlock.of_bson(events))
    batch.validate(full=True)
    assert batch.to_pylist() == plain_columns.rows(events, COLUMNS, documents)


def test_only_the_columns_asked_for_come_and_in_that_order() -> None:
    rng = random.Random(SEED)
    events = [random_event(rng) for _ in range(20)]
    for chosen in (("event",), ("token", "event"), ("full_document",), ("transaction_id", "collection")):
        batch = EventColumns(chosen, "variant").batch(EventBlock.of_bson(events))
        assert tuple(batch.schema.names) == chosen
        assert batch.to_pylist() == plain_columns.rows(events, chosen, "variant")


def test_batches_are_bounded_in_rows_and_bytes_however_the_events_come() -> None:
    small = bson.encode({"operationType": "insert", "pad": "x" * 10})
    large = bson.encode({"operationType": "update", "pad": "x" * (BYTES_MAX // 3)})
    huge = bson.encode({"operationType": "replace", "pad": "x" * (BYTES_MAX + 5)})
    events = [small] * (2 * ROWS_MAX + 7) + [large] * 7 + [huge, small, huge] + [small] * 11
    columns = EventColumns(("event", "operation_type"), "bson")
    for size in (1, 3, 1000, len(events)):
        blocks = [EventBlock.of_bson(events[start : start + size]) for start in range(0, len(events), size)]
        batches = list(columns.batches(blocks))
        assert [event for batch in batches for event in batch.column(0).to_pylist()] == events
        for batch in batches:
            assert batch.num_rows <= ROWS_MAX
            assert batch.num_rows == 1 or sum(map(len, batch.column(0).to_pylist())) <= BYTES_MAX
        assert len(batches) < 40, "small blocks are joined"


def test_no_events_make_no_batch() -> None:
    assert list(EventColumns(COLUMNS, "variant").batches([])) == []
    assert list(EventColumns(COLUMNS, "variant").batches([EventBlock.of_bson([])])) == []


def test_text_that_is_not_utf8_is_replaced_in_texts_and_kept_in_the_event() -> None:
    namespace = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.STRING, b"db", raw_bson.encode_string(b"\xff"))
    )
    event = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"ns", namespace))
    batch = EventColumns(("event", "database"), "bson").batch(EventBlock.of_bson([event]))
    assert batch.to_pylist() == [{"event": event, "database": "\N{REPLACEMENT CHARACTER}"}]


def test_a_wall_time_beyond_spark_is_null_and_a_null_document_is_told_from_an_absent_one() -> None:
    wall = raw_bson.encode_element(raw_bson.DATE, b"wallTime", raw_bson.encode_int64(253402300800000))
    far, null = raw_bson.encode_document(wall), bson.encode({"fullDocument": None})
    columns = ("wall_time", "full_document")
    as_json = EventColumns(columns, "json").batch(EventBlock.of_bson([far, null])).to_pylist()
    assert as_json == [{"wall_time": None, "full_document": None}, {"wall_time": None, "full_document": "null"}]
    as_variant = EventColumns(columns, "variant").batch(EventBlock.of_bson([far, null])).column(1)
    assert as_variant.is_null().to_pylist() == [True, False]
    as_bson = EventColumns(columns, "bson").batch(EventBlock.of_bson([far, null])).column(1)
    assert as_bson.is_null().to_pylist() == [True, False]
    assert as_bson.to_pylist() == [None, b""]


def test_the_sessions_of_transactions_are_the_texts_of_their_uuids() -> None:
    """These columns are written for a whole batch at once; the recorded transactions have few sessions, and small
    numbers."""
    rng = random.Random(11)
    uuids = [None if rng.random() < 0.3 else UUID(bytes=rng.randbytes(16)) for _ in range(300)]
    events = [
        bson.encode({"n": 1} if one is None else {"lsid": {"id": bson.Binary.from_uuid(one)}, "txnNumber": Int64(2)})
        for one in uuids
    ]
    rows = EventColumns(("transaction_id",), "bson").batch(EventBlock.of_bson(events)).to_pylist()
    expected = [None if one is None else {"lsid": str(one), "txn_number": 2} for one in uuids]
    assert [row["transaction_id"] for row in rows] == expected


def test_an_event_that_is_no_document_is_an_error_not_a_crash() -> None:
    event = bson.encode({"operationType": "insert"})
    block = replace(EventBlock.of_bson([event]), buffer=np.frombuffer(event[:-1] + b"\x01", np.uint8))
    with pytest.raises(OplogFormatError):
        EventColumns(COLUMNS, "variant").batch(block)
