"""What a listener does about lost history and a source that stays away: it waits between attempts, and says so.

The only earlier test of lost history lost it once, on a server. Fifty gaps in four seconds displaced the real one from
the twenty that are kept, and lanes whose stream could be opened but not read retried for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.commit_policy import CommitPolicy
from tailrace.act.consumer.rules.errors import LeaseStoreUnavailable
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.listener import ListenerLogic
from tailrace.act.consumer.rules.need import (
    AcquireLease,
    CommitPosition,
    FindStart,
    HandleChange,
    JudgeError,
    ListenerNeed,
    OpenStream,
    Outcome,
    Pause,
    PullChange,
    Pulled,
    RenewLease,
    TakeSnapshot,
    TellGap,
)
from tailrace.act.consumer.rules.position import GAPS_MAX, StreamPosition, join_gaps
from tailrace.act.consumer.rules.settings import ListenerSettings
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost, SourceError


def token(seconds: int) -> Mapping[str, Any]:
    return ResumeToken.high_water_mark(ClusterTime.of(seconds, 1)).to_document()


def gap(begin: int, end: int) -> dict[str, Any]:
    return {"from": Timestamp(begin, 1), "to": Timestamp(end, 1)}


class World:
    """Answers a listener's needs. ``answers`` says what an open, a pull and a look for the oldest entry give; ``None``
    stands for an ordinary answer."""

    def __init__(self, stored: StreamPosition, answers: Callable[[ListenerNeed], Any], **settings: Any) -> None:
        self.needs: list[ListenerNeed] = []
        self.now = 1000.0
        self.logic = ListenerLogic(
            ListenerSettings(resource="r", lease_seconds=10_000, commits=CommitPolicy(1), **settings)
        )
        self._stored = stored
        self._answers = answers

    def run(self) -> None:
        steps = self.logic.steps()
        need = next(steps)
        try:
            for _ in range(5000):
                self.needs.append(need)
                asked, value, error = self.now, None, None
                try:
                    value = self._answer(need)
                except (SourceError, ChangeStreamHistoryLost, LeaseStoreUnavailable) as raised:
                    error = raised
                need = steps.send(Outcome(asked, self.now, value, error))
            raise AssertionError("the listener goes on for ever")
        except StopIteration:
            return

    def _answer(self, need: ListenerNeed) -> Any:
        self.now += need.seconds if isinstance(need, Pause) else 0.001
        if isinstance(need, AcquireLease):
            return Lease("r", "me", 1, self._stored.to_document())
        return False if isinstance(need, HandleChange) else self._answers(need)

    def of(self, kind: type[Any]) -> list[Any]:
        return [need for need in self.needs if isinstance(need, kind)]


STORED = StreamPosition(token(100), gaps=(gap(10, 20),))


def test_an_oplog_that_is_being_truncated_makes_one_gap_and_is_waited_for() -> None:
    oldest = iter(range(200, 250))

    def answers(need: ListenerNeed) -> Any:
        match need:
            case FindStart():
                return Timestamp(next(oldest), 1)
            case OpenStream():
                if need.position.at != Timestamp(249, 1):
                    raise ChangeStreamHistoryLost("truncated")
            case PullChange():
                world.logic.stopping = True
                return Pulled({}, token(300))
        return None

    world = World(STORED, answers, on_history_lost="gap")
    world.run()
    positions = [need.position for need in world.of(CommitPosition)]
    assert positions[-1].token == token(300)
    assert len(positions) == 51, "one for each of the fifty, and that of the change"
    assert all(list(one.gaps) == [gap(10, 20), {"from": Timestamp(100, 1), "to": one.at}] for one in positions[:-1])
    assert list(positions[-1].gaps) == [gap(10, 20), gap(100, 249)]
    assert [(told.begin, told.end) for told in world.of(TellGap)][:2] == [
        (Timestamp(100, 1), Timestamp(200, 1)),
        (Timestamp(200, 1), Timestamp(201, 1)),
    ]
    assert world.now - 1000 > 200, "fifty tries in 4 s"
    assert world.logic.statistics.gaps == 50


def test_a_lane_whose_own_place_is_there_waits_for_the_one_that_has_lost_its_own() -> None:
    """The lane was moved back to the oldest entry, which the store refuses."""
    tries = 0

    def answers(need: ListenerNeed) -> Any:
        nonlocal tries
        match need:
            case FindStart():
                return Timestamp(50, 1)
            case PullChange():
                tries += 1
                if tries < 5:
                    raise ChangeStreamHistoryLost("lane 0")
                world.logic.stopping = True
                return Pulled({}, token(300))
        return None

    world = World(STORED, answers, on_history_lost="gap")
    world.run()
    (position,) = [need.position for need in world.of(CommitPosition)]
    assert (position.token, list(position.gaps)) == (token(300), [gap(10, 20)])
    assert world.of(TellGap) == []
    assert len(world.of(Pause)) == 3


def test_history_that_is_lost_during_a_copy_is_copied_again_and_no_gap() -> None:
    """The rest of the copy would have been silently left out."""

    def answers(need: ListenerNeed) -> Any:
        match need:
            case OpenStream():
                if need.position.at == Timestamp(100, 1):
                    raise ChangeStreamHistoryLost("truncated")
            case TakeSnapshot():
                assert need.position is not None
                return replace(need.position, at=Timestamp(400, 1))
            case PullChange():
                world.logic.stopping = True
                return Pulled(None, None)
        return None

    stored = StreamPosition(at=Timestamp(100, 1), snapshot={"collections": []}, gaps=(gap(10, 20),))
    world = World(stored, answers, on_history_lost="gap")
    world.run()
    assert len(world.of(TakeSnapshot)) == 1
    assert list(world.of(CommitPosition)[-1].position.gaps) == [gap(10, 20)]


def test_a_read_that_was_cut_while_the_oldest_entry_was_looked_for_is_tried_again() -> None:
    """As by 136: the oplog was truncated under the read. It ended the listener."""
    failing = iter([SourceError("position in capped collection lost", code=136)] * 3)

    def answers(need: ListenerNeed) -> Any:
        match need:
            case FindStart():
                for error in failing:
                    raise error
                return Timestamp(200, 1)
            case OpenStream():
                if need.position.token is not None:
                    raise ChangeStreamHistoryLost("truncated")
            case PullChange():
                world.logic.stopping = True
                return Pulled(None, None)
        return None

    world = World(STORED, answers, on_history_lost="gap")
    world.run()
    assert list(world.of(CommitPosition)[-1].position.gaps) == [gap(10, 20), gap(100, 200)]


@pytest.mark.parametrize("failing", [OpenStream, PullChange, FindStart])
def test_a_source_that_stays_away_ends_the_listener_after_five_minutes(failing: type[Any]) -> None:
    """A source that could be opened but not read did not end it. A lane's source can be like that, since its reader is
    another thread."""

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, failing):
            raise SourceError("away")
        if isinstance(need, OpenStream) and failing is FindStart:
            raise ChangeStreamHistoryLost("truncated")
        return None

    world = World(STORED, answers, on_history_lost="gap")
    with pytest.raises(SourceError, match="away"):
        world.run()
    assert 300 < world.now - 1000 < 400


def test_a_store_that_is_away_while_a_lane_s_stream_is_opened_is_waited_for() -> None:
    """The chaos of ``make kills`` found it: a lane's stream asks the store where other lanes are, and the listener
    ended where a member was killed just then. The simulation's lanes ask nobody."""
    opened = 0

    def answers(need: ListenerNeed) -> Any:
        nonlocal opened
        if isinstance(need, OpenStream):
            opened += 1
            if opened < 4:
                raise LeaseStoreUnavailable("connection reset")
        if isinstance(need, PullChange):
            world.logic.stopping = True
            return Pulled({}, token(300))
        return None

    world = World(STORED, answers)
    world.run()
    assert [need.position.token for need in world.of(CommitPosition)] == [token(300)]
    assert [need.reason for need in world.of(Pause)] == ["connection reset"] * 3


@pytest.mark.parametrize("failing", [OpenStream, PullChange])
def test_a_listener_that_is_stopped_while_its_source_is_away_ends_in_peace(failing: type[Any]) -> None:
    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, failing):
            raise SourceError("away")
        world.logic.stopping = len(world.of(Pause)) == 3
        return None

    world = World(STORED, answers)
    world.run()


def test_more_gaps_than_are_kept_are_joined_and_cover_all_that_was_lost() -> None:
    gaps = [gap(10 * n, 10 * n + 2) for n in range(GAPS_MAX)] + [gap(1000, 1002), gap(1004, 1006)]
    joined = join_gaps(gaps[5:], gaps[:8])
    assert len(joined) == GAPS_MAX
    for lost in gaps:
        assert any(one["from"] <= lost["from"] and lost["to"] <= one["to"] for one in joined)
    assert joined[-1] == gap(1000, 1006), "those that are nearest to each other"


def test_another_number_of_lanes_keeps_the_gaps_of_all() -> None:
    start = StreamPosition(at=Timestamp(1, 1))
    lanes = [StreamPosition(token(100 + n), gaps=(gap(10 + 5 * n, 14 + 5 * n),)) for n in range(3)]
    plan = LanePlan(3, start).with_request(2).next_generation(lanes)
    assert list(plan.start.gaps) == [gap(10, 14), gap(15, 19), gap(20, 24)]
    assert plan.start.token == token(100)


@pytest.mark.parametrize("decision", ["skip", "stop"])
def test_a_change_that_the_stream_cannot_give_is_not_handled(decision: str) -> None:
    """The policy is asked about it. Only tests with a server noticed a listener that handled it like any other."""

    def answers(need: ListenerNeed) -> Any:
        match need:
            case PullChange():
                if world.of(JudgeError):
                    world.logic.stopping = True
                    return Pulled(None, token(301))
                return Pulled({}, token(300), error=SourceError("too large"))
            case JudgeError():
                return decision
            case RenewLease():
                return Lease("r", "me", 2, STORED.to_document())
        return None

    world = World(STORED, answers)
    if decision == "stop":
        with pytest.raises(SourceError, match="too large"):
            world.run()
    else:
        world.run()
        assert world.of(CommitPosition)[0].position.token == token(300)
    assert [need.attempt for need in world.of(JudgeError)] == [1]
    assert world.of(HandleChange) == []
    assert world.logic.statistics.skipped == (decision == "skip")
