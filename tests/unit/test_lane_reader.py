"""The reader of lanes: it rests while the lanes have enough to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.act.consumer import lane_reader
from tailrace.act.consumer.lane_queue import LaneQueue
from tailrace.act.consumer.lane_reader import LaneReader
from tailrace.act.consumer.rules.lane_key import outline
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.act.consumer.rules.position import StreamPosition

BEGIN = StreamPosition(at=Timestamp(1, 1))
EVENTS = 60


def token(number: int) -> dict[str, Any]:
    return {"_data": f"82{(1 << 32) + 1 + number:016X}2B0429296E1404"}


class Stream:
    """Gives its events, and then nothing, without waiting for it."""

    alive = True

    def __init__(self) -> None:
        self.left = list(range(1, EVENTS + 1))
        self.looks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    @property
    def has_next(self) -> bool:
        return bool(self.left)

    @property
    def resume_token(self) -> dict[str, Any]:
        return token(EVENTS)

    def try_next(self) -> RawBSONDocument | None:
        self.looks += 1
        if not self.left:
            return None
        number = self.left.pop(0)
        event = {"_id": token(number), "operationType": "insert", "documentKey": {"_id": number}}
        return RawBSONDocument(bson.encode(event))


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_reader_rests_while_every_lane_has_enough_and_looks_again_when_one_runs_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the lanes' own writes woke it, which took half of the process's time; no test had counted its reads."""
    monkeypatch.setattr(lane_reader, "_REST_S", 600.0)
    stream, rests = Stream(), threading.Event()
    queue = LaneQueue(BEGIN)
    reader = LaneReader(lambda _: stream, LanePlan(1, BEGIN), {0: queue}, "reading")  # type: ignore[arg-type, return-value]
    wait = reader._wanted.wait

    def noted_wait(timeout: float | None = None) -> bool:
        rests.set()
        return wait(timeout)

    monkeypatch.setattr(reader._wanted, "wait", noted_wait)
    reader.start()
    assert rests.wait(300)
    assert stream.looks == EVENTS
    for _ in range(10):
        assert queue.take(1) is not None
    assert stream.looks == EVENTS
    assert queue.take(1) is not None
    until(lambda: stream.looks > EVENTS + 10)  # and it rests no more
    reader.stop()
    reader.join(300)
    assert not reader.is_alive()


def test_a_reader_that_rests_is_woken_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_reader, "_REST_S", 600.0)
    stream = Stream()
    reader = LaneReader(lambda _: stream, LanePlan(1, BEGIN), {0: LaneQueue(BEGIN)}, "reading")  # type: ignore[arg-type, return-value]
    reader.start()
    until(lambda: stream.looks == EVENTS)
    reader.stop()
    reader.join(300)
    assert not reader.is_alive()


def test_a_reader_that_is_stopped_just_before_it_rests_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgot that it was woken, and rested to the end; the test above would hit that moment only by chance."""
    monkeypatch.setattr(lane_reader, "_REST_S", 600.0)
    stream = Stream()
    reader = LaneReader(lambda _: stream, LanePlan(1, BEGIN), {0: LaneQueue(BEGIN)}, "reading")  # type: ignore[arg-type, return-value]
    clear = reader._wanted.clear

    def stopped_before() -> None:
        reader.stop()
        clear()

    monkeypatch.setattr(reader._wanted, "clear", stopped_before)
    reader.start()
    reader.join(300)
    assert not reader.is_alive()


def test_a_lane_that_has_gone_holds_nobody() -> None:
    """The reader asked its full queue for room again and again, without waiting, until another lane ran empty: two
    processes that shared lanes lost most of a core. No test took a lane away while its queue was full."""
    stream = Stream()
    queues = {0: LaneQueue(BEGIN, events=1), 1: LaneQueue(BEGIN)}
    reader = LaneReader(lambda _: stream, LanePlan(2, BEGIN), queues, "reading")  # type: ignore[arg-type, return-value]
    reader.start()
    until(lambda: not queues[0].is_empty and not queues[1].is_empty)
    queues[0].close()
    until(lambda: not stream.left)
    assert reader.lanes == {1}
    reader.stop()
    reader.join(300)
    assert not reader.is_alive()


def at_one_time(queue: LaneQueue, lane: int, *, begin: int = 0) -> list[tuple[int, bool]]:
    """What a reader that begins after event ``begin`` puts into the queue of ``lane`` of two, of a stream in which two
    shards have logged an insert, a drop and an invalidate at one time each: numbers, and whether all lanes wait."""
    shards = [(1, "insert"), (2, "insert"), (2, "insert"), (3, "drop"), (3, "drop"), (4, "insert")]
    shards += [(5, "invalidate"), (5, "invalidate")]
    left = [
        bson.encode({"_id": token(place), "operationType": kind, "documentKey": {"_id": 0}, "n": number})
        for number, (place, kind) in enumerate(shards)
        if place > begin
    ]
    stream: Any = Stream()
    stream.try_next = lambda: RawBSONDocument(left.pop(0)) if left else None
    stream.left = left
    reader = LaneReader(lambda _: stream, LanePlan(2, BEGIN), {lane: queue}, "reading")
    reader.start()
    until(lambda: reader.caught_up)
    reader.stop()
    reader.join(300)
    assert not reader.is_alive()
    found = []
    while not queue.is_empty:
        item = queue.take(1)
        assert item is not None
        found.append((bson.decode(item.event)["n"], item.is_barrier))
    return found


def test_lanes_are_given_each_event_of_a_token_that_several_have() -> None:
    """A cluster's shards may give different events with the same token, of which a lane got only the first: a reader
    took the second for one that it had already queued. No test had a stream in which a token occurs twice."""
    assert key_hash_of_0() == 1, "the documents are of lane 1"
    queue = LaneQueue(BEGIN)
    assert at_one_time(queue, 0) == [(3, True), (4, False), (6, True)]
    assert at_one_time(queue, 0) == [], "another reader has put them all"
    assert at_one_time(LaneQueue(BEGIN), 1) == [(0, False), (1, False), (2, False), (3, True), (5, False), (6, True)]
    # A lane that is done with such a token is done with all events that have it, as is a stream that resumes there.
    done = LaneQueue(StreamPosition(token(2)), BEGIN)
    assert at_one_time(done, 1) == [(3, True), (5, False), (6, True)]


def key_hash_of_0() -> int:
    event = bson.encode({"_id": token(1), "operationType": "insert", "documentKey": {"_id": 0}})
    return (outline(event).hash or 0) % 2
