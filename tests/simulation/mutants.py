"""Listeners and servers with a fault planted: the simulation must notice each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from tailrace.act.consumer.rules.errors import HandlerCancelled, HandlerFailed, HandlerInterrupted, HandlerNotRun
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.listener import ListenerLogic, Steps
from tailrace.act.consumer.rules.need import FindStart, HandleChange, Handled, OpenStream, Pulled
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.errors import TailraceError
from tests.simulation.schedule import Schedule
from tests.simulation.servers import Clock, Servers, check_forward


def without_fence(schedule: Schedule) -> Servers:
    """Targets that do not look at the fencing token."""
    return Servers(schedule, fenced=False)


class _ClientClock(Servers):
    def time_of(self, client_time: Clock) -> datetime:
        return client_time()


def judged_by_the_client_s_clock(schedule: Schedule) -> Servers:
    """A lease's expiry is written and judged by the clock of the process that asks."""
    return _ClientClock(schedule)


class CommitsBeforeTheWork(ListenerLogic):
    """The position is written before the handler runs."""

    def _handle(self, owned: Ownership, batch: Sequence[Pulled]) -> Steps:
        before, last = self._position, batch[-1]
        assert before is not None
        assert last.token is not None
        self._moved(before.move_to(last.token, start_after=last.invalidate))
        yield from self._commit(owned)
        self._moved(before)
        return (yield from super()._handle(owned, batch))


class _OwnersUnchecked(Servers):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float, client_time: Clock) -> Lease:
        record = self.records.get(lease.resource, lease)
        return super().commit(record, position, seconds, client_time)


def commit_without_looking_at_the_owner(schedule: Schedule) -> Servers:
    """A commit changes the record even if somebody else holds the lease by now."""
    return _OwnersUnchecked(schedule)


class _PositionsUncompared(Servers):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float, client_time: Clock) -> Lease:
        record = self.records.get(lease.resource)
        if record is not None and (record.owner, record.version) == (lease.owner, lease.version):
            check_forward(record.position or {}, position)
        return super().commit(lease, position, seconds, client_time)


def commit_without_looking_at_the_position(schedule: Schedule) -> Servers:
    """A commit that arrives after its time-out is carried out like any other."""
    return _PositionsUncompared(schedule)


class ForgetsToReadThePositionBack(ListenerLogic):
    """After losing a lease it goes on from its own position."""

    def _forget(self, owned: Ownership) -> Steps:
        kept = self._position
        yield from super()._forget(owned)
        self._kept = kept

    def _work(self, owned: Ownership) -> Steps:
        kept: StreamPosition | None = getattr(self, "_kept", None)
        if kept is not None:
            owned.lease = replace(owned.lease, position=kept.to_document())
        yield from super()._work(owned)


class DoesNotWriteItsStartDown(ListenerLogic):
    """Figure 4b: a listener that crashes before its first commit begins anew, from a later present."""

    def _begin(self, owned: Ownership, *_: Any) -> Steps:
        time = yield from self._ask(FindStart(self.settings.start))
        yield from self._ask(OpenStream(StreamPosition(at=time)))
        self._moved(StreamPosition(at=time))


class KeepsItsToken(ListenerLogic):
    """After a change that was left out it goes on under the same fencing token."""

    def _renew(self, owned: Ownership) -> Steps:
        yield from ()


class TakesUnrunForDone(ListenerLogic):
    """Work that a handler has handed back counts as done."""

    def _run_handler(self, changes: Sequence[HandleChange]) -> Steps:
        try:
            return (yield from super()._run_handler(changes))
        except HandlerNotRun:
            return Handled(1)


class TakesCancelledForDone(ListenerLogic):
    """A handler that was cancelled, or has left off because the listener is stopping, has done its work."""

    def _run_handler(self, changes: Sequence[HandleChange]) -> Steps:
        try:
            return (yield from super()._run_handler(changes))
        except (HandlerCancelled, HandlerInterrupted):
            return Handled(1)


class PassesOverInSilence(ListenerLogic):
    """What the stream cannot give is passed over without asking the error policy."""

    def _pass_over(self, owned: Ownership, pulled: Pulled, error: TailraceError) -> Steps:
        (change,) = self._changes(owned, [pulled])
        self._moved(change.position)
        yield from self._commit(owned)
        yield from self._open(owned)


class CommitsHalves(ListenerLogic):
    """What the stream could not give is committed before it is tried again, as the first fragment of an event was."""

    def _pass_over(self, owned: Ownership, pulled: Pulled, error: TailraceError) -> Steps:
        (change,) = self._changes(owned, [pulled])
        self._moved(change.position)
        yield from self._commit(owned)
        yield from super()._pass_over(owned, pulled, error)


class GoesOnWhereItIsToStop(ListenerLogic):
    """The position is written after the change that the policy stops at."""

    def _handle(self, owned: Ownership, batch: Sequence[Pulled]) -> Steps:
        first = self._changes(owned, batch)[0]
        try:
            return (yield from super()._handle(owned, batch))
        except HandlerFailed:
            self._moved(first.position)
            raise


class KeepsNoGaps(ListenerLogic):
    """After history was lost it goes on, without a record of the gap."""

    def _moved(self, position: StreamPosition) -> None:
        super()._moved(replace(position, gaps=()))


class KeepsTheLastGap(ListenerLogic):
    """A gap overwrites earlier ones."""

    def _moved(self, position: StreamPosition) -> None:
        super()._moved(replace(position, gaps=position.gaps[-1:]))


class EndsAtAnEarlierDrop(ListenerLogic):
    """It does not know when it began."""

    def _moved(self, position: StreamPosition) -> None:
        super()._moved(replace(position, began=None))


class CommitsPastAPartialBatch(ListenerLogic):
    """If a handler has done a part of its batch, the position moves as if it had done all of it."""

    def _run_handler(self, changes: Sequence[HandleChange]) -> Steps:
        done = yield from super()._run_handler(changes)
        self._end = changes[-1].position if done.count < len(changes) else None
        return done

    def _done(self, owned: Ownership, position: StreamPosition, done: Handled) -> None:
        end, self._end = getattr(self, "_end", None), None
        super()._done(owned, end or position, done)


#: The mutants, with the options of a Simulation that plant them.
MUTANTS: dict[str, dict[str, Any]] = {
    "the fence left out": {"new_servers": without_fence},
    "the lease judged by the client's clock": {"new_servers": judged_by_the_client_s_clock},
    "the commit before the work": {"new_logic": CommitsBeforeTheWork},
    "a commit that does not look at the owner": {"new_servers": commit_without_looking_at_the_owner},
    "a commit that does not look at the position": {"new_servers": commit_without_looking_at_the_position},
    "the position not read back": {"new_logic": ForgetsToReadThePositionBack},
    "the token kept after a dead letter": {"new_logic": KeepsItsToken},
    "the start not written down": {"new_logic": DoesNotWriteItsStartDown},
    "work that was handed back taken for done": {"new_logic": TakesUnrunForDone},
    "a cancelled handler taken for done": {"new_logic": TakesCancelledForDone},
    "a refused change passed over": {"new_logic": PassesOverInSilence},
    "a refused change committed before it is tried again": {"new_logic": CommitsHalves},
    "a change passed over where the policy says stop": {"new_logic": GoesOnWhereItIsToStop},
    "a commit past a partial batch": {"new_logic": CommitsPastAPartialBatch},
    "gaps that are not kept": {"new_logic": KeepsNoGaps},
    "gaps that push out others": {"new_logic": KeepsTheLastGap},
    "an earlier drop ends it": {"new_logic": EndsAtAnEarlierDrop},
}
