"""The events that compiled code makes of a chunk are those of plain code, byte for byte, and in order."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import bson
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.regex import Regex

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import OplogFormatError
from tailrace.read.snapshot.block import snapshot_block
from tailrace.read.snapshot.documents import RunOfDocuments
from tailrace.read.snapshot.event import snapshot_event
from tests.property import random_values

UUID = bytes(range(16))
START = ClusterTime.of(1_700_000_000, 7)
IDS: list[Any] = [
    bson.ObjectId(b"twelve bytes"),
    0,
    -1,
    2**31,
    Int64(5),
    1.5,
    float("nan"),
    Decimal128("1.50"),
    "text",
    "with\0zero",
    "x" * 300,
    {"a": {"b": [1, 2.5, {"c": None}]}},
    {},
    b"\x01\x02",
    True,
    None,
    datetime(2026, 1, 1, tzinfo=UTC),
    bson.Timestamp(1, 2),
    bson.MinKey(),
    Regex("a", "i"),
    bson.Code("f"),
]


def events_of(block: Any) -> list[bytes]:
    data = block.buffer.tobytes()
    return [data[low:high] for low, high in pairwise(block.offsets.tolist())]


@pytest.mark.parametrize("pattern", [None, {"_id": "hashed"}, {"region": 1, "_id": 1}, {"a.b": 1}])
@pytest.mark.parametrize("position", [0, 1, 300, 70_000])
@pytest.mark.parametrize("in_a_run", [False, True])
def test_compiled_and_plain_events_are_the_same(pattern: dict[str, Any] | None, position: int, in_a_run: bool) -> None:
    rng = random.Random(position)
    documents = [
        bson.encode({"region": "n", "_id": value, "a": {"b": 1}, "rest": "x" * rng.randrange(50)}) for value in IDS
    ]
    for _ in range(100):
        identifier = raw_bson.encode_element(raw_bson.OBJECT, b"_id", random_values.document(rng))
        documents.append(raw_bson.encode_document(identifier))
    rng.shuffle(documents)
    given = RunOfDocuments(b"".join(documents)) if in_a_run else documents
    block = snapshot_block(given, "shop.orders", UUID, START, pattern, position=position)
    wanted = [snapshot_event(one, "shop.orders", UUID, START, pattern, position=position) for one in documents]
    assert events_of(block) == wanted
    assert len(block) == len(documents)


def test_later_chunks_come_later_and_all_come_before_the_stream_after_them() -> None:
    documents = [bson.encode({"_id": value}) for value in (3, 1, "z", None)]
    tokens = [
        bson.decode(event)["_id"]["_data"]
        for position in (0, 1, 2, 255, 256, 70_000)
        for event in sorted(events_of(snapshot_block(documents, "d.c", UUID, START, None, position=position)))
    ]
    chunks = [sorted(tokens[first : first + 4]) for first in range(0, len(tokens), 4)]
    assert all(left[-1] < right[0] for left, right in pairwise(chunks))
    for version in (1, 2):
        assert chunks[-1][-1] < ResumeToken.high_water_mark(START.tick(), version=version).data
    assert len(set(tokens)) == len(tokens)


def test_a_chunk_without_documents_is_an_empty_block() -> None:
    for documents in ([], RunOfDocuments(b"")):
        assert len(snapshot_block(documents, "d.c", UUID, START, None)) == 0


def test_a_run_of_documents_is_the_sequence_of_them() -> None:
    documents = [bson.encode({"_id": number, "text": "x" * number}) for number in range(5)]
    run = RunOfDocuments(b"".join(documents))
    assert (list(run), len(run), bool(run), bool(RunOfDocuments(b""))) == (documents, 5, True, False)
    assert [run[0], run[-1], run[1:3], run[3:]] == [documents[0], documents[4], documents[1:3], documents[3:]]
    with pytest.raises(IndexError):
        run[5]
    with pytest.raises(OplogFormatError):
        len(RunOfDocuments(run.buffer[:-1]))
    with pytest.raises(OplogFormatError):
        snapshot_block(RunOfDocuments(run.buffer[:-1]), "d.c", UUID, START, None)
