"""A listener's process: the real logic and the real keeper, driven step by step, paused, killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from tailrace.act.consumer.rules.errors import (
    HandlerFailed,
    HandlerNotRun,
    LeaseDocumentError,
    LeaseLost,
    LeaseStoreUnavailable,
    OwnerNotUnique,
)
from tailrace.act.consumer.rules.keeper import keep
from tailrace.act.consumer.rules.listener import ListenerLogic, ListenerSettings
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
    MarkEntries,
    OpenStream,
    Outcome,
    Pause,
    PullChange,
    RefreshLease,
    ReleaseLease,
    RenewLease,
    SkipChange,
    TellGap,
)
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.errors import ChangeStreamHistoryLost, ServerError, SourceError, StreamInvalidated
from tests.simulation.faults import NONE
from tests.simulation.servers import BrokenPromiseError
from tests.simulation.stream import SimulatedStream

Answer = Callable[[Any, BaseException | None], None]
Steps = Generator[ListenerNeed, Outcome, Any]

TIMEOUT_S = 10.0


class HandlerError(Exception):
    """Raised by a simulated handler whose write got no answer."""


class Process:
    """One incarnation after the other of one listener. ``run`` is the Simulation that it belongs to."""

    def __init__(
        self, run: Any, name: str, settings: ListenerSettings, new_logic: Callable[..., ListenerLogic]
    ) -> None:
        self.run = run
        self.name = name
        self.settings = settings
        self.new_logic = new_logic
        random = run.schedule.random
        self.fixed_id = random.random() < 0.2
        #: How the process's clocks are wrong: the wall clock is off by seconds, the monotonic one runs fast or slow.
        self.skew = random.choice((0.0, 0.0, random.uniform(-100, 100)))
        self.rate = random.choice((1.0, random.uniform(0.95, 1.05)))
        self.incarnation = 0
        self.alive = False
        self.paused_until = 0.0
        self.logic: ListenerLogic | None = None
        self.ownership: Ownership | None = None
        #: How long the next pause after a handler's error must be.
        self.retry_due: float | None = None
        self.stream: SimulatedStream | None = None
        self._steps: list[Steps] = []
        self._committed_before = False
        #: The change after which it goes on under a newer token.
        self.left_out: Any = None

    @property
    def owner(self) -> str:
        return self.name if self.fixed_id else f"{self.name}.{self.incarnation}"

    def monotonic(self) -> float:
        return float(self.run.schedule.now * self.rate)

    def wall(self) -> datetime:
        return self.run.schedule.server_time() + timedelta(seconds=self.skew)

    # Life and death

    def start(self) -> None:
        self.incarnation += 1
        self.alive = True
        self.paused_until = 0.0
        self.ownership = self.stream = None
        self.logic = self.new_logic(self.settings)
        self._begin(self.logic.steps())

    def kill(self) -> None:
        """SIGKILL: it does nothing more, and tells nobody."""
        self.alive = False
        for steps in self._steps:
            steps.close()
        self._steps.clear()

    def stop(self) -> None:
        """SIGTERM."""
        if self.alive and self.logic is not None:
            self.logic.stopping = True

    def ended(self, error: BaseException | None) -> None:
        """The listener has ended by itself."""
        if isinstance(error, StreamInvalidated):
            self._check_invalidated()
        elif (
            error is not None and not isinstance(error, OwnerNotUnique | SourceError) and not self._may_end_with(error)
        ):
            raise error
        self.kill()
        self.run.process_ended(self)

    def _may_end_with(self, error: BaseException) -> bool:
        failing = self.run.failing
        if isinstance(error, HandlerFailed):
            return bool(failing.stop or failing.cancelled)
        if isinstance(error, HandlerNotRun):
            return bool(failing.unrun)
        return isinstance(error, ServerError) and bool(failing.refused)

    def _check_invalidated(self) -> None:
        """A drop from before the listener began does not end it."""
        record = self.run.servers.records.get(self.settings.resource)
        position = None if record is None else StreamPosition.from_document(record.position, self.settings.resource)
        if position is None or not self.run.failing.ends_at_invalidates:
            raise BrokenPromiseError("an invalidate has ended the listener")
        if position.cluster_time <= self.run.began:
            raise BrokenPromiseError("an invalidate from before it began has ended the listener")

    # Driving

    def _begin(self, steps: Steps) -> None:
        self._steps.append(steps)
        self._continue(steps, None)

    def _continue(self, steps: Steps, outcome: Outcome | None) -> None:
        is_main = self.logic is not None and steps is self._steps[0]
        try:
            need = next(steps) if outcome is None else steps.send(outcome)
        except StopIteration:
            if is_main:
                self.ended(None)
            return
        except Exception as error:
            if not is_main:
                raise
            self.ended(error)
            return
        asked = self.monotonic()

        def answer(value: Any, error: BaseException | None) -> None:
            self.later(lambda: self._continue(steps, Outcome(asked, self.monotonic(), value, error)))

        self.perform(need, answer)

    def later(self, action: Callable[[], None], seconds: float = 0.0) -> None:
        """Do ``action`` in this incarnation when it is not paused; now and then it is killed or paused first."""
        incarnation = self.incarnation

        def act() -> None:
            if not self.alive or self.incarnation != incarnation:
                return
            faults, random, schedule = self.run.faults, self.run.schedule.random, self.run.schedule
            if schedule.now < self.paused_until:
                schedule.after(self.paused_until - schedule.now, act)
            elif random.random() < faults.crash:
                self.kill()
                self.run.process_ended(self)
            elif random.random() < faults.pause:
                self.paused_until = schedule.now + random.choice((0.5, 1.2, 3.0)) * self.settings.lease_seconds
                schedule.after(self.paused_until - schedule.now, act)
            else:
                action()

        self.run.schedule.after(seconds, act)

    def call(self, apply: Callable[[], Any], answer: Answer, lost: Callable[[str], Exception]) -> None:
        """Ask a server: the request or the reply may be lost or late, and what was applied stays applied."""
        self.later(lambda: self._send(apply, answer, lost))

    def _send(self, apply: Callable[[], Any], answer: Answer, lost: Callable[[str], Exception]) -> None:
        faults, random, schedule = self.run.faults, self.run.schedule.random, self.run.schedule
        if random.random() < faults.lost_request:
            schedule.after(TIMEOUT_S, lambda: answer(None, lost("no answer")))
            if lost is LeaseStoreUnavailable and schedule.late_random.random() < 0.5:
                self.run.servers.late += 1
                schedule.after(schedule.late_random.uniform(TIMEOUT_S, 6 * TIMEOUT_S), lambda: self._arrive_late(apply))
            return

        def arrive() -> None:
            value, error = None, None
            try:
                value = apply()
            except (LeaseLost, LeaseStoreUnavailable) as raised:
                error = raised
            if random.random() < faults.lost_reply:
                schedule.after(TIMEOUT_S, lambda: answer(None, lost("no reply")))
            else:
                schedule.after(self._delay(), lambda: answer(value, error))

        schedule.after(self._delay(), arrive)

    def _arrive_late(self, apply: Callable[[], Any]) -> None:
        """The server was frozen, and goes on with requests that nobody waits for any more."""
        with suppress(LeaseLost, LeaseStoreUnavailable, LeaseDocumentError):
            apply()

    def _delay(self) -> float:
        random = self.run.schedule.random
        return float(random.uniform(1, 8)) if random.random() < self.run.faults.slow else float(random.random() * 0.02)

    # Needs

    def perform(self, need: ListenerNeed, answer: Answer) -> None:
        servers, seconds = self.run.servers, self.settings.lease_seconds
        random = self.run.schedule.random
        resource, owner, clock = self.settings.resource, self.owner, self.wall
        match need:
            case AcquireLease():
                self.call(lambda: servers.acquire(resource, owner, seconds, clock), answer, LeaseStoreUnavailable)
            case RefreshLease(lease):
                self.call(lambda: servers.refresh(lease, seconds, clock), answer, LeaseStoreUnavailable)
            case CommitPosition(lease, position, ends_skip):
                document, commit = position.to_document(), servers.commit_skip if ends_skip else servers.commit
                self.call(lambda: commit(lease, document, seconds, clock), answer, LeaseStoreUnavailable)
            case SkipChange(change):
                answer(self._skipped(change), None)
            case ReleaseLease(lease):
                self.call(lambda: servers.release(lease), lambda _value, _error: answer(None, None), LeaseLost)
            case KeepLease(ownership):
                self.ownership = ownership
                self._begin(keep(ownership, seconds))
                answer(None, None)
            case Pause():
                if need.reason.startswith("the handler raised") and need.seconds != self.retry_due:
                    raise BrokenPromiseError(f"a retry after {need.seconds} s, and not {self.retry_due}")
                self.later(lambda: answer(None, None), need.seconds * random.uniform(0.75, 1.25))
            case HandleChange():
                self._handle(need, answer)
            case HandleChanges(changes):
                self._handle_one_of(changes, 0, answer)
            case JudgeError():
                answer(self._judged(need), None)
            case RenewLease(lease):
                change = self.left_out
                self.call(lambda: servers.renew(lease, seconds, clock, change), answer, LeaseStoreUnavailable)
            case FindStart():
                answer(self.run.start_time(need.start), None)
            case MarkEntries():
                answer(None, None)
            case _:
                self._perform_stream(need, answer)

    def _perform_stream(self, need: ListenerNeed, answer: Answer) -> None:
        match need:
            case OpenStream(position):
                if self.run.schedule.random.random() < self.run.faults.source_away:
                    answer(None, SourceError("away"))
                else:
                    self._open(position, answer)
            case TellGap(_, end):
                assert self.ownership is not None
                following = self.run.servers.first_after({"at": end})
                self.run.servers.next_change[self.ownership.lease.version] = following
                answer(None, None)
            case CloseStream():
                self.stream = None
                answer(None, None)
            case PullChange(wait):
                self._pull(wait, answer)
            case _:
                raise AssertionError(f"nobody answers {need}")

    def _judged(self, need: JudgeError) -> Any:
        self.retry_due = self.settings.retry.wait(need.attempt)
        self.run.retries += 1
        self.left_out = need.change.event  # or tried again
        return self.run.judge(need)

    def _skipped(self, change: HandleChange) -> bool:
        self.left_out = change.event
        self.run.skipped(change)
        return True

    def _handle_one_of(self, changes: Sequence[HandleChange], place: int, answer: Answer) -> None:
        """Handle changes one after the other; now and then stop before the last."""
        incarnation = self.incarnation

        def handled(committed: Any, error: BaseException | None) -> None:
            if self.incarnation != incarnation:
                return  # killed and started again meanwhile: nobody is left to go on with them
            if error is not None:
                answer(*((None, error) if place == 0 else (Handled(place, before), None)))
            elif place + 1 == len(changes) or self.run.schedule.random.random() < 0.1:
                answer(Handled(place + 1, bool(committed)), None)
            else:
                self._committed_before = bool(committed)
                self.later(lambda: self._handle_one_of(changes, place + 1, answer))

        before = place > 0 and self._committed_before
        self._handle(changes[place], handled)

    def _handle(self, change: HandleChange, answer: Answer) -> None:
        assert self.logic is not None
        error = None
        if self.run.faults is not NONE:
            error = self.run.failing.handler_error(stopping=self.logic.leaves)
        if error is not None:
            self.later(lambda: answer(None, error))
        else:
            self.run.handler(self, change, answer)

    def _open(self, position: StreamPosition, answer: Answer) -> None:
        try:
            self.stream = SimulatedStream(self.run.history, position)
        except ChangeStreamHistoryLost as error:
            answer(None, error)
        else:
            answer(None, None)

    def _pull(self, wait: bool, answer: Answer) -> None:
        if self.run.schedule.random.random() < self.run.faults.source_away:
            answer(None, SourceError("away"))
            return
        assert self.stream is not None
        faults = self.run.faults
        try:
            pulled = self.stream.pull(lambda: None if faults is NONE else self.run.failing.refuses())
        except ChangeStreamHistoryLost as error:
            answer(None, error)
            return
        seconds = 0.5 if wait and pulled.event is None and pulled.alive else 0.0
        self.run.schedule.after(seconds, lambda: answer(pulled, None))

    # Handlers

    def check(self) -> LeaseLost | None:
        """What ``change.fence`` and ``change.transaction`` check first."""
        assert self.ownership is not None
        try:
            self.ownership.check(self.monotonic())
        except LeaseLost as error:
            return error
        return None


def fenced_handler(process: Process, need: HandleChange, answer: Answer) -> None:
    """Check the lease, do something that takes a while, write."""
    run = process.run
    if run.schedule.random.random() < run.faults.handler_error or run.is_poison():
        answer(None, HandlerError("raises"))
        return

    def write() -> None:
        # The longest pause may come here, between the check and the write: figure 3.
        process.call(lambda: run.servers.write(need.event, need.lease.version), answer, HandlerError)

    def look() -> None:
        error = process.check()
        if error is not None:
            answer(None, error)
        else:
            process.later(write, run.schedule.random.choice((0.0, 0.01, 1.0)))

    process.later(look)


def transactional_handler(process: Process, need: HandleChange, answer: Answer) -> None:
    """The effect and the commit of the position in one transaction, as ``change.transaction()`` does it."""
    run, lease, transaction = process.run, need.lease, object()
    ownership = process.ownership
    assert ownership is not None
    position, seconds = need.position.to_document(), process.settings.lease_seconds
    tries = 5

    def end(value: Any, error: BaseException | None) -> None:
        ownership.in_transaction = False
        if isinstance(error, LeaseLost):
            ownership.lose(error)
        if error is not None:
            run.servers.end(transaction, lease.resource)
        answer(value, error)

    def begun(_: Any, error: BaseException | None) -> None:
        if error is not None:
            end(None, error)
        else:
            process.later(commit, run.schedule.random.choice((0.0, 0.1, 3.0)))

    result: list[bool] = []

    def apply() -> None:
        # A repeated commit is carried out once: the server knows the transaction by its number.
        if not result:
            run.servers.commit_transaction(transaction, lease, position, seconds, need.event)
            result.append(True)

    def commit() -> None:
        process.call(apply, committed, HandlerError)

    def committed(_: Any, error: BaseException | None) -> None:
        nonlocal tries
        if isinstance(error, HandlerError):
            tries -= 1
            if tries:
                process.later(commit)
            else:
                end(None, LeaseStoreUnavailable("the outcome is unknown"))
            return
        end(error is None, error)

    error = process.check()
    if error is not None:
        answer(None, error)
        return
    ownership.in_transaction = True
    process.call(lambda: run.servers.begin(transaction, lease), begun, LeaseStoreUnavailable)
