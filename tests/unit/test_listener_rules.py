"""A listener's rules, need by need: what it asks for after errors, what it counts, and when it commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.commit_policy import CommitPolicy
from tailrace.act.consumer.rules.errors import Fenced, HandlerFailed, LeaseLost, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.listener import ListenerLogic
from tailrace.act.consumer.rules.need import (
    AcquireLease,
    CloseStream,
    CommitPosition,
    FindStart,
    HandleChange,
    HandleChanges,
    Handled,
    JudgeError,
    KeepLease,
    ListenerNeed,
    OpenStream,
    Outcome,
    Pause,
    PullChange,
    Pulled,
    RefreshLease,
    ReleaseLease,
    RenewLease,
    TellGap,
)
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.rules.retry_schedule import RetrySchedule
from tailrace.act.consumer.rules.settings import ListenerSettings, ListenerStatistics, together
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost, SourceError, UsageError


def token(seconds: int) -> Mapping[str, Any]:
    return ResumeToken.high_water_mark(ClusterTime.of(seconds, 1)).to_document()


def change(seconds: int, **more: Any) -> Pulled:
    return Pulled({"n": seconds}, token(seconds), **more)


class World:
    """Answers needs: ``answers`` gives a value, raises, or returns ``NotImplemented`` for the ordinary answer. It stops
    the listener when the changes are at their end."""

    def __init__(
        self,
        changes: list[Pulled],
        answers: Callable[[ListenerNeed], Any] = lambda need: NotImplemented,
        *,
        stored: StreamPosition | None = None,
        **settings: Any,
    ) -> None:
        self.needs: list[ListenerNeed] = []
        self.now = 1000.0
        settings = {"resource": "r", "lease_seconds": 10_000, "commits": CommitPolicy(1)} | settings
        self.logic = ListenerLogic(ListenerSettings(**settings))
        self.owned: Any = None
        self._changes = changes
        self._stored = stored if stored is not None else StreamPosition(token(5))
        self._answers = answers

    def run(self) -> World:
        steps = self.logic.steps()
        need = next(steps)
        try:
            for _ in range(1000):
                self.needs.append(need)
                asked, value, error = self.now, None, None
                try:
                    value = self._answers(need)
                    if value is NotImplemented:
                        value = self._ordinary(need)
                except Exception as raised:  # noqa: BLE001  whatever an answer raises is the need's error
                    error = raised
                self.now += need.seconds if isinstance(need, Pause) else 0.001
                need = steps.send(Outcome(asked, self.now, value, error))
            raise AssertionError("the listener goes on for ever")
        except StopIteration:
            return self

    def _ordinary(self, need: ListenerNeed) -> Any:
        match need:
            case AcquireLease():
                return Lease("r", "me", 1, self._stored.to_document())
            case KeepLease():
                self.owned = need.ownership
            case RenewLease():
                return Lease("r", "me", 2, self._stored.to_document())
            case HandleChange():
                return False
            case HandleChanges():
                return Handled(len(need.changes))
            case PullChange():
                self.logic.stopping = self.logic.stopping or (need.wait and not self._changes)
                return self._changes.pop(0) if self._changes else Pulled(None, None)
        return None

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [need for need in self.needs if isinstance(need, kinds)]


def failing(times: int, decision: str) -> Callable[[ListenerNeed], Any]:
    """The handler raises so many times, and the policy says this."""
    left = [times]

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, JudgeError):
            return decision
        if isinstance(need, HandleChange | HandleChanges) and left[0] > 0:
            left[0] -= 1
            raise ValueError("the handler's own")
        return NotImplemented

    return answers


def test_a_change_that_is_tried_again_keeps_its_lease_and_its_waits_grow() -> None:
    schedule = RetrySchedule(5, first=1.0, factor=3.0, longest=100.0)
    world = World([change(10), change(11)], failing(3, "retry"), retry=schedule).run()
    assert [one.seconds for one in world.of(Pause)] == [1.0, 3.0, 9.0]
    assert [one.event["n"] for one in world.of(HandleChange)] == [10, 10, 10, 10, 11]
    assert [one.attempt for one in world.of(JudgeError)] == [1, 2, 3]
    assert len(world.of(AcquireLease)) == len(world.of(OpenStream)) == 1
    statistics = world.logic.statistics
    assert (statistics.failures, statistics.handled, statistics.skipped) == (3, 2, 0)


def test_a_listener_that_is_stopped_while_it_waits_tries_no_more() -> None:
    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, Pause):
            world.logic.stopping = True
        return failed(need)

    failed = failing(3, "retry")
    world = World([change(10), change(11)], answers)
    world.run()
    assert len(world.of(HandleChange)) == 1
    assert world.of(CommitPosition) == []


def test_a_change_that_is_passed_over_is_counted_and_the_next_ones_have_a_newer_token() -> None:
    world = World([change(10), change(11)], failing(1, "skip")).run()
    assert [(one.event["n"], one.lease.version) for one in world.of(HandleChange)] == [(10, 1), (11, 2)]
    assert [one.position.token for one in world.of(CommitPosition)] == [token(10), token(11)]
    statistics = world.logic.statistics
    assert (statistics.failures, statistics.handled, statistics.skipped, statistics.commits) == (1, 1, 1, 2)


def test_a_policy_that_stops_commits_nothing_of_the_change() -> None:
    world = World([change(10), change(11)], failing(1, "stop"))
    with pytest.raises(HandlerFailed):
        world.run()
    assert [one.position.token for one in world.of(CommitPosition)] == []
    assert world.logic.statistics.failures == 1


def test_an_error_names_the_handler_s_own_line() -> None:
    """Not the lines of packages that it calls, nor Tailrace's."""
    names: dict[str, Any] = {}
    exec(compile("\ndef inside(): raise ValueError('x')", "/env/site-packages/driver/pool.py", "exec"), names)
    exec(compile("\n\ndef handler(): inside()", "/app/shop/handlers.py", "exec"), names)

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, HandleChange):
            names["handler"]()
        return "stop" if isinstance(need, JudgeError) else NotImplemented

    with pytest.raises(
        HandlerFailed, match=r"raised ValueError in handlers.py, line 3, at the change with token 82.*: x"
    ):
        World([change(10)], answers).run()


def test_a_batch_is_tried_again_from_the_change_that_failed() -> None:
    counts = iter([2, ValueError("third"), 1])

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, JudgeError):
            return "retry"
        if isinstance(need, HandleChanges):
            answer = next(counts)
            if isinstance(answer, Exception):
                raise answer
            return Handled(answer)
        return NotImplemented

    world = World([change(10), change(11), change(12)], answers, batch=3, commits=CommitPolicy(3)).run()
    tried = [[one.event["n"] for one in need.changes] for need in world.of(HandleChanges)]
    assert tried == [[10, 11, 12], [12], [12]]
    assert [one.attempt for one in world.of(JudgeError)] == [1]
    assert [one.position.token for one in world.of(CommitPosition)] == [token(12)]
    assert world.logic.statistics.handled == 3


def test_since_when_a_handler_is_at_work_is_known_while_it_is() -> None:
    seen = []

    def answers(need: ListenerNeed) -> Any:
        seen.append((type(need), None if world.owned is None else world.owned.busy_since, world.now))
        return failed(need)

    failed = failing(1, "retry")
    world = World([change(10)], answers)
    world.run()
    of_handler = [(since, now) for kind, since, now in seen if kind is HandleChange]
    assert len(of_handler) == 2
    assert all(since is not None and abs(since - now) < 0.01 for since, now in of_handler)
    assert {since for kind, since, _ in seen if kind in (JudgeError, PullChange, CommitPosition)} == {None}


def test_changes_of_one_token_are_counted() -> None:
    world = World([change(10), change(10), change(10), change(11)]).run()
    assert [one.again for one in world.of(HandleChange)] == [0, 1, 2, 0]


def test_the_gap_that_lost_history_leaves_is_told_and_committed_before_the_stream_is_opened() -> None:
    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, FindStart):
            return Timestamp(50, 1)
        if isinstance(need, OpenStream) and need.position.token == token(5):
            raise ChangeStreamHistoryLost("truncated")
        return NotImplemented

    world = World([change(60)], answers, on_history_lost="gap").run()
    kinds = [type(need) for need in world.of(OpenStream, FindStart, TellGap, CommitPosition, HandleChange)]
    assert kinds == [OpenStream, FindStart, TellGap, CommitPosition, OpenStream, HandleChange, CommitPosition]
    first = world.of(CommitPosition)[0].position
    assert (first.at, first.gaps) == (Timestamp(50, 1), ({"from": Timestamp(5, 1), "to": Timestamp(50, 1)},))


@pytest.mark.parametrize("hint", [None, "Keep more"])
def test_lost_history_ends_a_listener_that_was_not_told_what_to_do(hint: str | None) -> None:
    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, OpenStream):
            raise ChangeStreamHistoryLost("truncated", hint=hint)
        return NotImplemented

    with pytest.raises(ChangeStreamHistoryLost, match="truncated") as raised:
        World([change(60)], answers).run()
    assert raised.value.hint is not None
    assert raised.value.hint.startswith('on_history_lost="snapshot"' if hint is None else "Keep more. on_history_lost")


@pytest.mark.parametrize("error", [SourceError("away"), LeaseStoreUnavailable("away")])
def test_waits_for_a_stream_that_cannot_be_opened_double_up_to_a_bound(error: Exception) -> None:
    left = [10]

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, OpenStream) and left[0] > 0:
            left[0] -= 1
            raise error
        return NotImplemented

    world = World([change(60)], answers).run()
    waits = [one.seconds for one in world.of(Pause)]
    assert waits == [min(5.0, 0.05 * 2**number) for number in range(10)]
    assert {one.reason for one in world.of(Pause)} == {"away"}


def test_waits_for_a_stream_that_cannot_be_read_double_until_it_can() -> None:
    fails = iter([True, True, True, False, True, False, False])

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, PullChange) and next(fails):
            raise SourceError("away")
        return NotImplemented

    world = World([change(10), change(11)], answers)
    world.run()
    assert [one.seconds for one in world.of(Pause)] == [0.05, 0.1, 0.2, 0.05]
    assert len(world.of(OpenStream)) == 5


@pytest.mark.parametrize("kind", [CommitPosition, RenewLease])
def test_waits_for_a_store_that_is_away_double_and_a_stop_does_not_end_them(kind: type[Any]) -> None:
    """A listener that is stopped still commits, but does not retry more often for it."""
    left = [4]

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, kind) and left[0] > 0:
            left[0] -= 1
            raise LeaseStoreUnavailable("the store is away")
        return skipped(need)

    skipped = failing(1 if kind is RenewLease else 0, "skip")
    world = World([change(10), change(11)], answers).run()
    waits = [one for one in world.of(Pause) if one.reason == "the store is away"]
    assert [one.seconds for one in waits] == [0.05, 0.1, 0.2, 0.4]
    assert all(one.always for one in waits)
    assert world.of(CommitPosition)[-1].position.token == token(11)


@pytest.mark.parametrize("error", [SourceError("away"), ChangeStreamHistoryLost("just gone")])
def test_waits_for_a_first_start_double_until_it_is_found(error: Exception) -> None:
    left = [4]

    def answers(need: ListenerNeed) -> Any:
        match need:
            case AcquireLease():
                return Lease("r", "me", 1)
            case FindStart() if left[0] > 0:
                left[0] -= 1
                raise error
            case FindStart():
                return Timestamp(70, 1)
        return NotImplemented

    world = World([change(80)], answers).run()
    assert [one.seconds for one in world.of(Pause)] == [0.05, 0.1, 0.2, 0.4]
    assert [one.event["n"] for one in world.of(HandleChange)] == [80]


def test_a_source_that_stays_away_ends_the_listener_with_its_error() -> None:
    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, OpenStream):
            raise SourceError("away")
        return NotImplemented

    world = World([change(60)], answers)
    with pytest.raises(SourceError, match="away"):
        world.run()
    assert 300 < world.now - 1000 < 330


def test_a_lease_that_ends_while_the_start_is_looked_for_is_asked_for_again() -> None:
    left = [40]

    def answers(need: ListenerNeed) -> Any:
        match need:
            case AcquireLease():
                return Lease("r", "me", 1)
            case FindStart() if left[0] > 0:
                left[0] -= 1
                raise SourceError("away")
            case FindStart():
                return Timestamp(50, 1)
        return NotImplemented

    world = World([change(60)], answers, lease_seconds=10)
    world.run()
    assert len(world.of(AcquireLease)) > 5
    assert world.logic.statistics.leases_lost == len(world.of(AcquireLease)) - 1


@pytest.mark.parametrize("start", ["oldest", "now"])
def test_a_first_start_is_written_down_before_anything_is_handled(start: str) -> None:
    def answers(need: ListenerNeed) -> Any:
        match need:
            case AcquireLease():
                return Lease("r", "me", 1)
            case FindStart():
                return Timestamp(70 if need.start == "now" else 20, 1)
            case OpenStream():
                return "rs0/id"
        return NotImplemented

    world = World([change(80)], answers, start=start).run()
    first, second = (one.position for one in world.of(CommitPosition))
    began = Timestamp(70, 1) if start == "oldest" else None
    at = Timestamp(20 if start == "oldest" else 70, 1)
    assert first == StreamPosition(at=at, deployment="rs0/id", began=began)
    assert second == StreamPosition(token(80), deployment="rs0/id")
    assert world.needs.index(world.of(CommitPosition)[0]) < world.needs.index(world.of(PullChange)[0])


def test_a_lease_is_asked_for_until_it_is_there() -> None:
    given: list[Any] = [
        LeaseStoreUnavailable("away"),
        LeaseStoreUnavailable("away"),
        None,
        LeaseStoreUnavailable("away"),
    ]

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, AcquireLease) and given:
            answer = given.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return NotImplemented

    world = World([change(10)], answers, lease_seconds=4)
    assert not world.logic.begun
    world.run()
    assert [(one.seconds, one.reason) for one in world.of(Pause)] == [
        (0.05, "away"),
        (0.1, "away"),
        (1.0, "another listener holds the lease"),
        (0.05, "away"),
    ]
    assert world.logic.begun
    assert len(world.of(HandleChange)) == 1


def test_a_handler_that_was_fenced_while_the_store_is_away_loses_its_lease() -> None:
    """It cannot find out whether another owner has the lease, so it acquires it again. No test without a server covered
    that."""

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, HandleChange) and len(world.of(AcquireLease)) == 1:
            raise Fenced("a newer owner's token")
        if isinstance(need, RefreshLease):
            raise LeaseStoreUnavailable("the store is away")
        return NotImplemented

    world = World([change(10), change(10)], answers)
    world.run()
    assert len(world.of(RefreshLease)) == 1
    assert len(world.of(AcquireLease)) == 2
    assert world.logic.statistics.failures == 0


def test_a_commit_policy_is_the_arguments_of_a_listener() -> None:
    expected = {"commit_every": 5, "commit_interval": 2.0, "commit_idle": 7.0}
    assert CommitPolicy(5, 2.0, 7.0).arguments == expected


def test_a_lease_that_is_lost_is_acquired_again_and_nothing_uncommitted_counts() -> None:
    versions = iter([1, 4])
    after = []

    def answers(need: ListenerNeed) -> Any:
        match need:
            case AcquireLease():
                after.append((world.logic.statistics.lease_version, world.logic.statistics.position_time))
                return Lease("r", "me", next(versions), StreamPosition(token(5)).to_document())
            case CommitPosition() if need.lease.version == 1:
                raise LeaseLost("somebody has it")
        return NotImplemented

    world = World([change(10), change(10), change(11)], answers, commits=CommitPolicy(1))
    world.run()
    assert after == [(0, 0), (0, 0)]
    assert [(one.event["n"], one.lease.version) for one in world.of(HandleChange)] == [(10, 1), (10, 4), (11, 4)]
    assert [one.position.token for one in world.of(OpenStream)] == [token(5), token(5)]
    assert world.logic.statistics.leases_lost == 1
    kinds = [type(need) for need in world.of(CloseStream, ReleaseLease, AcquireLease)]
    assert kinds == [AcquireLease, CloseStream, AcquireLease, ReleaseLease, CloseStream]


def test_a_listener_that_leaves_commits_what_it_has_handled_and_gives_its_lease_back() -> None:
    world = World([change(10), change(11)], commits=CommitPolicy(100))
    world.run()
    assert [type(need) for need in world.needs[-3:]] == [CommitPosition, ReleaseLease, CloseStream]
    assert world.of(CommitPosition)[-1].position.token == token(11)
    assert world.owned.ended
    assert world.logic.ownership is None
    assert world.logic.statistics.lease_version == 0


def test_changes_are_committed_together_as_the_policy_says() -> None:
    world = World([change(n) for n in range(10, 17)], commits=CommitPolicy(3)).run()
    assert [one.position.token for one in world.of(CommitPosition)] == [token(n) for n in (12, 15, 16)]
    assert world.logic.statistics.commits == 3
    assert world.logic.statistics.position_time == 16


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("start", ("oldest", "now", "snapshot")),
        ("on_history_lost", ("fail", "snapshot", "gap")),
        ("on_invalidate", ("fail", "resume")),
    ],
)
def test_settings_take_what_they_know_and_nothing_else(name: str, values: tuple[str, ...]) -> None:
    for value in values:
        assert getattr(ListenerSettings(resource="r", **{name: value}), name) == value
    with pytest.raises(UsageError, match=f"{name} must be one of {', '.join(values)}, not 'other'"):
        ListenerSettings(resource="r", **{name: "other"})


def test_statistics_of_several_listeners_are_added_up() -> None:
    first = ListenerStatistics(1, 2, 3, 4, 5, lease_version=6, position_time=70, gaps=8, paused=0)
    second = ListenerStatistics(10, 20, 30, 40, 50, lease_version=60, position_time=7, gaps=80, paused=1)
    waiting = ListenerStatistics(position_time=1)  # it holds nothing: its position says nothing
    whole = ListenerStatistics(11, 22, 33, 44, 55, lease_version=60, position_time=7, gaps=88, paused=1)
    assert together([first, second, waiting]) == whole
    assert together([waiting]) == ListenerStatistics()


@pytest.mark.parametrize("seconds", [0.5, 1, 1e-3])
def test_a_commit_may_be_due_within_a_second(seconds: float) -> None:
    """No test had a time above 0 and below 1."""
    assert CommitPolicy(interval=seconds, idle_seconds=seconds).interval == seconds


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_commit_is_not_due_at_once(seconds: float) -> None:
    with pytest.raises(UsageError, match="commit_interval must be"):
        CommitPolicy(interval=seconds)
