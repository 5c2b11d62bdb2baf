"""The events of a block as documents."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.watch.client.block_events import BlockEvents

RAW: CodecOptions[Any] = CodecOptions(document_class=RawBSONDocument, tz_aware=True)
PLAIN: CodecOptions[Any] = CodecOptions()


def block_of(documents: list[bytes]) -> EventBlock:
    """A block whose events are these, with a stretch of something else in front of them in its buffer."""
    import numpy as np

    count = len(documents)
    offsets = np.cumsum([7, *map(len, documents)])
    token = np.array([offset + 9 for offset in offsets[:-1]], np.int64)
    sizes = np.array([int.from_bytes(document[9:13], "little") for document in documents], np.int64)
    return EventBlock(
        np.frombuffer(b"x" * 7 + b"".join(documents), np.uint8),
        offsets,
        np.zeros(count, np.uint64),
        np.ones(count, np.uint8),
        token,
        token + sizes,
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
    )


def event(number: int, size: int = 20) -> bytes:
    return bson.encode({"_id": {"_data": f"{number:08}"}, "n": number, "text": "x" * size})


def taken(events: BlockEvents) -> list[Any]:
    found = []
    while events.left:
        found += events.documents()
    return found


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_every_event_is_given_once_and_its_token_with_it(count: int) -> None:
    for options in (RAW, PLAIN):
        documents = [event(number) for number in range(count)]
        events = BlockEvents(block_of(documents), options)
        assert events.token is None
        for number in range(count):
            assert events.left == count - number
            document = next(events.documents())
            assert document == bson.decode(documents[number], options)
            assert events.token == bson.encode({"_data": f"{number:08}"})
        assert events.left == 0
        assert list(events.documents()) == []


def test_a_raw_document_is_as_its_constructor_makes_it() -> None:
    """It is made without the constructor, for speed."""
    whole = event(1)
    (made,) = taken(BlockEvents(block_of([whole]), RAW))
    own = RawBSONDocument(whole, RAW)
    assert type(made) is RawBSONDocument
    assert made == own
    assert made.raw == whole
    assert type(made.raw) is bytes
    assert repr(made) == repr(own)
    assert dict(made) == dict(own)
    assert isinstance(made["_id"], RawBSONDocument)
    assert pickle.loads(pickle.dumps(made)).raw == whole
    assert bson.encode({"inside": made}) == bson.encode({"inside": own})


def test_large_events_are_cut_out_one_at_a_time() -> None:
    """Otherwise a stream that is read slowly would hold a list of 256 documents of a megabyte each."""
    documents = [event(number, 300_000) for number in range(5)]
    events = BlockEvents(block_of(documents), RAW)
    for number in range(5):
        assert [document.raw for document in events.documents()] == [documents[number]]


def test_what_cannot_be_decoded_fails_at_its_place() -> None:
    wrong = event(2)[:-1] + b"\x01"
    events = BlockEvents(block_of([event(1), wrong, event(3)]), PLAIN)
    assert next(events.documents())["n"] == 1
    with pytest.raises(BSONError):
        next(events.documents())
    assert events.token == bson.encode({"_data": "00000002"})
    assert next(events.documents())["n"] == 3


class _Slow(dict[str, Any]):
    """A document during whose construction other threads run."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)


@pytest.mark.parametrize("options", [RAW, PLAIN, CodecOptions(document_class=_Slow)], ids=["raw", "dict", "own class"])
def test_threads_that_take_events_at_once_lose_none_and_get_none_twice(options: CodecOptions[Any]) -> None:
    count = 20_000
    events = BlockEvents(block_of([event(number) for number in range(count)]), options)
    refill, found = threading.Lock(), [list[int]() for _ in range(4)]

    def take(mine: list[int]) -> None:
        while True:
            with refill:
                if not events.left:
                    return
                ready = events.documents()
            mine.extend(document["n"] for document in ready)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=take, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(number for mine in found for number in mine) == list(range(count))


def _event_of_stages(replaced_by: bytes | None) -> ChangeEvent:
    made = ChangeEvent("insert", ClusterTime(9 << 32), bson.encode({"_data": "82"}))
    made.namespace = (b"shop", b"orders")
    made.replaced_by = replaced_by
    return made


@pytest.mark.parametrize("replaced_by", [None, bson.encode({"n": 1}), bson.encode({"_id": {"_data": "83"}, "n": 1})])
def test_a_block_of_one_event_is_as_a_longer_one(replaced_by: bytes | None) -> None:
    made = _event_of_stages(replaced_by)
    one, two = EventBlock.of([made]), EventBlock.of([made, made])
    assert (len(one), one.size) == (1, two.size // 2)
    assert one.event(0) == two.event(0)
    assert one.events() == two.events()[:1]
    assert one.token(0) == two.token(0)
    for same in (one, pickle.loads(pickle.dumps(one)), one.cut(0, 1)):
        assert same.places is None
        for field in EventBlock.__slots__[:-1]:
            length = 2 if field == "offsets" else 1 if field != "buffer" else one.size
            assert getattr(same, field).tolist() == getattr(two, field)[:length].tolist(), field
    assert EventBlock.join([one, one]).events() == two.events()
