"""What a listener's position knows about its history, and what that costs.

It knew only its deployment, whose identity stays the same after a restoration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.commit_policy import CommitPolicy
from tailrace.act.consumer.rules.errors import LeaseDocumentError
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.listener import ListenerLogic, ListenerSettings
from tailrace.act.consumer.rules.need import (
    AcquireLease,
    CommitPosition,
    HandleChange,
    ListenerNeed,
    MarkEntries,
    OpenStream,
    Outcome,
    PullChange,
    Pulled,
)
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.errors import SourceError


def token(seconds: int) -> Mapping[str, Any]:
    return ResumeToken.high_water_mark(ClusterTime.of(seconds, 1)).to_document()


class World:
    """Answers a listener's needs. ``pulls`` are what the stream gives, each after so many seconds, before it stops."""

    def __init__(self, pulls: list[tuple[float, Pulled]], *, stored: StreamPosition, every: int = 1) -> None:
        self.pulls = pulls
        self.stored = stored
        self.marked: list[MarkEntries] = []
        self.commits: list[StreamPosition] = []
        self.fails = False
        self._now = 1000.0
        self._logic = ListenerLogic(ListenerSettings(resource="r", commits=CommitPolicy(every), lease_seconds=10_000))

    def run(self) -> None:
        steps = self._logic.steps()
        need = next(steps)
        try:
            while True:
                value, error = None, None
                try:
                    value = self._answer(need)
                except SourceError as raised:
                    error = raised
                need = steps.send(Outcome(self._now, self._now, value, error))
        except StopIteration:
            return

    def _answer(self, need: ListenerNeed) -> Any:
        match need:
            case AcquireLease():
                return Lease("r", "me", 1, self.stored.to_document())
            case OpenStream():
                return "rs0/id"
            case PullChange():
                seconds, pulled = self.pulls.pop(0)
                self._logic.stopping = not self.pulls
                self._now += seconds
                return pulled
            case HandleChange():
                return False
            case MarkEntries():
                self.marked.append(need)
                if self.fails:
                    raise SourceError("away")
                return {"rs0": EntryMark(need.position.cluster_time, "d")}
            case CommitPosition():
                self.commits.append(StreamPosition.from_document(need.position.to_document(), "r"))
        return None


def change(seconds: int) -> Pulled:
    return Pulled({"_id": token(seconds)}, token(seconds))


def quiet(seconds: int) -> Pulled:
    return Pulled(None, token(seconds))


STORED = StreamPosition(token(5), deployment="rs0/id")


def test_a_quiet_stream_moves_with_the_entry_that_it_stands_at() -> None:
    world = World([(1.0, change(10)), (1.0, quiet(11)), (31.0, quiet(12)), (1.0, quiet(13))], stored=STORED)
    world.run()
    assert [one.token for one in world.commits] == [token(10), token(12)]
    assert [one.entries for one in world.commits] == [{}, {"rs0": EntryMark(ClusterTime.of(12, 1), "d")}]
    assert [(one.after, one.position.cluster_time) for one in world.marked] == [
        (ClusterTime.of(5, 1), ClusterTime.of(12, 1))
    ]


def test_what_is_left_over_is_committed_at_its_own_change_between() -> None:
    """A high-water mark without its entry is never committed: it could be of any history."""
    world = World([(1.0, change(10)), (1.0, quiet(11)), (1.0, quiet(12))], stored=STORED, every=5)
    world.run()
    assert [(one.token, one.entries) for one in world.commits] == [(token(10), {})]


def test_entries_are_marked_twice_a_minute_however_often_is_committed() -> None:
    world = World([(1.0, change(n)) for n in range(10, 110)], stored=STORED)
    world.run()
    assert len(world.commits) == 100
    assert [one.position.cluster_time.seconds for one in world.marked] == [39, 69, 99]
    assert world.commits[-1].entries == {"rs0": EntryMark(ClusterTime.of(99, 1), "d")}


def test_a_stream_whose_oplogs_cannot_be_read_now_stays_at_its_change() -> None:
    world = World([(40.0, quiet(11)), (1.0, change(12)), (40.0, quiet(13)), (1.0, quiet(14))], stored=STORED)
    world.fails = True
    world.run()
    assert [(one.token, one.entries) for one in world.commits] == [(token(12), {})]
    assert len(world.marked) == 2


def test_a_stream_whose_oplogs_nobody_may_ask_moves_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``engine="server"`` it goes on as before."""
    world = World([(40.0, quiet(11))], stored=STORED)
    answer = world._answer
    monkeypatch.setattr(world, "_answer", lambda need: None if isinstance(need, MarkEntries) else answer(need))
    world.run()
    assert [(one.token, one.entries) for one in world.commits] == [(token(11), {})]


def test_entries_stay_with_the_position_and_are_read_back() -> None:
    mark = EntryMark(ClusterTime.of(7, 2), "ab")
    position = StreamPosition(token(9), deployment="rs0/id", entries={"rs0": mark})
    assert StreamPosition.from_document(position.to_document(), "r") == position
    assert position.move_to(token(10)).entries == {"rs0": mark}
    assert position.jump_to(Timestamp(11, 1)).entries == {"rs0": mark}
    assert StreamPosition.from_document({"token": token(9)}, "r").entries == {}
    for wrong in ({"rs0": 1}, {"rs0": {"ts": "x", "digest": ""}}, {"rs0": {}}, 7, ["rs0"]):
        with pytest.raises(LeaseDocumentError, match="cannot be read"):
            StreamPosition.from_document({"token": token(9), "entries": wrong}, "r")
