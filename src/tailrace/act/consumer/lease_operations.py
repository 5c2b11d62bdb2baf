"""What an operator does with the leases of a resource: pause, resume, seek, skip, release, delete.

Whatever moves a position or takes a lease away goes by the fencing token: a listener that is at work commits nothing
afterwards. What only asks a listener for something (``pause``, and ``skip``, which pauses first) waits until it has
finished the change in hand and given its lease back.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from tailrace.act.consumer.lease import Lease, LeaseStoreUnavailable, OperatedLeaseStore
from tailrace.act.consumer.rules import instructions
from tailrace.act.consumer.rules import lease as rules
from tailrace.act.consumer.rules.lanes import LanePlan, is_sealed, lane_position, lane_resource, least, seal
from tailrace.act.consumer.rules.position import StreamPosition, join_gaps
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import UsageError

#: How long, at most, the operator itself holds a lease, for example if it is killed while it moves a position.
_HOLDS_S: Final = 30.0
#: How often a record whose owner changes meanwhile is read again.
_TRIES: Final = 20
_LOOK_S: Final = 0.1
_LANE: Final = re.compile(r"(.+)/(\d+)", re.DOTALL)


class StillHeldError(UsageError):
    """A listener has not given its lease back in time: its handler is still at work on one change."""


@dataclass(frozen=True)
class Resource:
    """What one command is about.

    Attributes:
        record: the lease with the given name
        plan: the lease in which lanes share the resource; ``None`` for a listener without lanes, and for a single lane
    """

    record: Lease
    plan: LanePlan | None

    @property
    def name(self) -> str:
        """As it is in the store."""
        return self.record.resource

    @property
    def lanes(self) -> list[str]:
        """The leases that hold positions: those of the lanes, if there are any."""
        if self.plan is None:
            return [self.name]
        return [lane_resource(self.name, self.plan, lane) for lane in range(self.plan.lanes)]

    @property
    def names(self) -> list[str]:
        """All leases, that of the plan first: while that one is paused, nobody changes the number of lanes."""
        return self.lanes if self.plan is None else [self.name, *self.lanes]


class LeaseOperations:
    """``store`` keeps the leases. Each method takes the name of a resource, and acts on all its lanes; the name of a
    lane, ``orders/2`` or as it is in the store, means that lane alone. Raises UsageError where there is no such lease.

    Args:
        where: what messages call the store
        wait_seconds: how long it waits for a listener to give its lease back, by ``clock``"""

    def __init__(
        self,
        store: OperatedLeaseStore,
        *,
        where: str = "the store",
        wait_seconds: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._sleep, self._clock = sleep, clock
        self._where = where
        self._wait_s = wait_seconds
        self._owner = f"operator-{uuid.uuid4().hex[:12]}"

    def find(self, resource: str) -> Resource:
        """The resource as it is now."""
        record = self._store.read(resource)
        lane = _LANE.fullmatch(resource) if record is None else None
        if lane is not None:
            whole = self._store.read(lane[1])
            plan = None if whole is None else _plan_of(whole)
            if plan is not None and int(lane[2]) < plan.lanes:
                name = lane_resource(lane[1], plan, int(lane[2]))
                record = self._store.read(name) or Lease(name, None, 0)
        if record is None:
            raise UsageError(
                f"there is no lease on {resource!r} in {self._where}", hint="tailrace leases lists those that are"
            )
        return Resource(record, _plan_of(record))

    # Held still

    def pause(self, resource: str, *, now: bool = False) -> Resource:
        """Nobody begins another change. Returns when every owner has given its lease back. Raises StillHeldError if
        that takes too long: the resource stays paused, and the lease is given back when the change in hand is finished.

        Args:
            now: take the lease from its owner at once: what the owner does with the change in hand is not committed"""

        def pause(record: Lease, at: datetime) -> Lease:
            held_still = instructions.pause(record, at)
            return instructions.disown(held_still) if now or record.is_free(at) else held_still

        marked: set[str] = set()
        while True:
            leases = self.find(resource)
            left = [name for name in leases.names if name not in marked]
            if not left:
                return leases
            for name in left:
                self._amend(name, pause)
                marked.add(name)
            self._wait(leases.names)  # a process may have been about to change the number of lanes

    def resume(self, resource: str) -> bool:
        """Anybody may take the lease again. Returns whether it was paused."""
        leases = self.find(resource)
        lanes = [] if leases.plan is None else self._lanes_of(leases.name)
        before = [self._amend(name, lambda record, _: instructions.resume(record)) for name in [*lanes, leases.name]]
        return any(record is not None and record.paused_at is not None for record in before)

    def _wait(self, names: Sequence[str]) -> None:
        end = self._clock() + self._wait_s
        while held := self._held(names):
            if self._clock() > end:
                raise StillHeldError(
                    f"{held[0].owner} is still at work on a change of {held[0].resource}, after {self._wait_s:g} s",
                    hint="It gives the lease back when it has finished that change. --now takes it away at once",
                )
            self._sleep(_LOOK_S)
        for name in names:
            record = self._store.read(name)
            if record is not None and record.owner is not None:
                # Its lease has run out: a refresh that comes late must not hold it again.
                self._amend(name, lambda one, at: instructions.disown(one) if one.is_free(at) else one)

    def _held(self, names: Sequence[str]) -> list[Lease]:
        now = self._store.now()
        records = (self._store.read(name) for name in names)
        return [record for record in records if record is not None and not record.is_free(now)]

    # Given to somebody else

    def release(self, resource: str, to: str | None = None, seconds: float = 60.0) -> list[Lease]:
        """Take the lease from its owner; returns the records as they were. What the owner does later is refused.

        Args:
            to: an owner's id, or its part before a hyphen, such as a host's name: others wait ``seconds`` for it"""
        if to is None:
            before = [
                self._amend(name, lambda record, _: instructions.disown(record)) for name in self._known(resource)
            ]
        else:
            rules.check_arguments(resource, to, 1)
            if not 1 <= seconds <= rules.LEASE_SECONDS_MAX:
                raise UsageError(
                    f"it can be reserved for {to} for 1 to {rules.LEASE_SECONDS_MAX:.0f} s, not {seconds:g}"
                )
            given = to
            before = [
                self._amend(name, lambda record, now: instructions.hand_over(record, given, seconds, now))
                for name in self.find(resource).lanes
            ]
        return [record for record in before if record is not None]

    def _known(self, resource: str) -> list[str]:
        """The leases that were taken at some time."""
        return [name for name in self.find(resource).names if self._store.read(name) is not None]

    # Put elsewhere

    def seek(
        self,
        resource: str,
        target: StreamPosition,
        *,
        oldest: ClusterTime | None = None,
        newest: ClusterTime | None = None,
    ) -> StreamPosition | None:
        """Put the position at ``target``, and return the previous one. A listener that is at work loses the lease:
        nothing of what it does is committed. With lanes a new generation begins there.

        Args:
            oldest: where the oplog begins, if that is known: a place before it is refused
            newest: where the oplog ends, if that is known: a place after it is refused"""
        if oldest is not None and target.cluster_time < oldest:
            raise UsageError(
                f"{target.cluster_time} lies before the oldest entry of the oplog, {oldest}",
                hint="A listener that begins there ends with ChangeStreamHistoryLost",
            )
        if newest is not None and target.cluster_time > newest:
            raise UsageError(f"{target.cluster_time} lies in the future: the deployment is at {newest}")
        leases = self.find(resource)
        self._refuse_lane(resource, leases)
        lease = self._seize(leases.name)
        try:
            plan = _plan_of(lease)
            if plan is None:
                before = lane_position(lease.position, lease.resource)
                after = (before or target).sought(target).to_document()
            else:
                # A process that finds lanes sealed because the operator was killed here changes to the next generation,
                # where nothing is lost, and the position is not moved.
                self._write(lease, replace(plan, next_lanes=plan.next_lanes or plan.lanes).to_document())
                before = self._sealed_lanes(lease.resource, plan)
                after = plan.sought(before.sought(target)).to_document()
            self._write(lease, after)
        finally:
            self._store.release(lease)
        return before

    def _sealed_lanes(self, resource: str, plan: LanePlan) -> StreamPosition:
        """End all lanes where they are; the first of their places, with the gaps of all."""
        positions = []
        for lane in range(plan.lanes):
            lease = self._seize(lane_resource(resource, plan, lane))
            try:
                positions.append(lane_position(lease.position, lease.resource) or plan.start)
                if not is_sealed(lease.position):
                    self._write(lease, seal(lease.position))
            finally:
                self._store.release(lease)
        return replace(least(positions), gaps=join_gaps(*(position.gaps for position in positions)))

    def _seize(self, name: str) -> Lease:
        """The operator as an owner with the newest fencing token."""
        self._amend(name, lambda record, now: instructions.seize(record, self._owner, _HOLDS_S, now))
        lease = self._store.read(name)
        if lease is None or lease.owner != self._owner:
            raise LeaseStoreUnavailable(f"somebody else has taken the lease on {name!r} in the meantime")
        return lease

    def _write(self, lease: Lease, position: Mapping[str, Any]) -> None:
        if not self._store.amend(lease, instructions.place(lease, position, self._store.now())):
            raise rules.lease_lost(self._store.read(lease.resource), lease)

    # One change left out

    def skip(
        self, resource: str, letters: str | None = None, *, all_lanes: bool = False, now: bool = False
    ) -> list[str]:
        """The first change that the next owner meets is not handled: it is written to the dead letters, and the
        position moves past it. A listener that is at work gives its lease back first, so that the change left out is
        the one that it could not handle. Returns the leases in question; ``pending`` says whether it is done.

        Args:
            letters: the collection of the dead letters, for a listener without an error policy that keeps them
            all_lanes: with lanes: the next change of each of them
            now: as for ``pause``. Changes that were handled but not committed are delivered again before it"""
        leases = self.find(resource)
        if leases.plan is not None and len(leases.lanes) > 1 and not all_lanes:
            raise UsageError(
                f"{resource} has {len(leases.lanes)} lanes: the next change of which one is to be left out?",
                hint=f"Name the lane, such as {resource}/0, or give --all-lanes",
            )
        if leases.plan is not None and leases.plan.next_lanes is not None:
            raise UsageError(
                f"the number of lanes of {resource} is being changed, and each change may then belong to another lane",
                hint="Ask again in a moment",
            )
        for name in leases.lanes:
            _refuse_unskippable(self._store.read(name))
        for name in leases.lanes:
            self._skip_one(name, {"letters": letters}, now)
        return leases.lanes

    def _skip_one(self, name: str, skip: Mapping[str, Any], now: bool) -> None:
        before = self._amend(
            name, lambda record, at: instructions.pause(instructions.disown(record) if now else record, at)
        )
        since = None if before is None else before.paused_at
        try:
            self._wait([name])
        except BaseException:
            self._amend(name, lambda record, _: replace(record, paused_at=since))
            raise

        def mark(record: Lease, _: datetime) -> Lease:
            is_able = not is_sealed(record.position) and _plan_of(record) is None
            return replace(instructions.mark_skip(record, skip) if is_able else record, paused_at=since)

        self._amend(name, mark)
        _refuse_unskippable(self._store.read(name))

    def withdraw_skip(self, resource: str) -> bool:
        """The next change is handled after all. Returns whether one was to be left out."""
        names = self._known(resource)
        before = [self._amend(name, lambda record, _: instructions.mark_skip(record, None)) for name in names]
        return any(record is not None and record.skip is not None for record in before)

    def pending(self, names: Sequence[str]) -> list[str]:
        """The leases whose next change is still to be left out. Raises UsageError if that will never happen."""
        records = [record for name in names if (record := self._store.read(name)) is not None]
        waiting = [record for record in records if record.skip is not None]
        for record in waiting:
            _refuse_unskippable(record)
        return [record.resource for record in waiting]

    # Gone

    def delete(self, resource: str, *, force: bool = False) -> list[str]:
        """Remove a resource for good, with its lanes: its position is lost, and fencing tokens start again. Refused
        while somebody holds one of its leases, unless ``force``. Returns the names that were removed."""
        leases = self.find(resource)
        self._refuse_lane(resource, leases)
        if leases.plan is None:
            self._remove(leases.name, force)
            return [leases.name]
        names = self._lanes_of(resource)
        if not force:
            self._refuse_held([resource, *names])
        # Nobody begins while it is paused; a process that was about to is found by its lease.
        self._amend(resource, instructions.pause)
        removed = [resource]
        try:
            while names and (not force or len(removed) == 1):
                for name in names:
                    self._remove(name, force)
                removed += names
                names = self._lanes_of(resource)
        except BaseException:
            self._amend(resource, lambda record, _: replace(record, paused_at=leases.record.paused_at))
            raise
        self._remove(resource, force)
        return sorted(set(removed))

    def _remove(self, name: str, force: bool) -> None:
        for _ in range(_TRIES):
            record = self._store.read(name)
            if record is not None and not force:
                self._refuse_if_held(record)
            if record is None or self._store.remove(record):
                return
        raise LeaseStoreUnavailable(f"the lease on {name!r} keeps changing its owner")

    def _refuse_held(self, names: Sequence[str]) -> None:
        for record in self._held(names):
            self._refuse_if_held(record)

    def _refuse_if_held(self, record: Lease) -> None:
        if not record.is_free(self._store.now()):
            raise UsageError(
                f"{record.owner} holds the lease on {record.resource}",
                hint="Stop its listeners first, or give --force: one that still runs would begin again from its start",
            )

    def _lanes_of(self, resource: str) -> list[str]:
        """All leases that belong to a resource with lanes, those of earlier generations and of processes too."""
        part = re.compile(re.escape(resource) + r"/(\d+\.\d+|member\.\d+)")
        return [record.resource for record in self._store.leases() if part.fullmatch(record.resource)]

    def _refuse_lane(self, resource: str, found: Resource) -> None:
        """Raise UsageError where the resource is a part of another."""
        whole = re.fullmatch(r"(.+)/(\d+\.\d+|member\.\d+)", found.name, re.DOTALL)
        record = None if whole is None else self._store.read(whole[1])
        if record is not None and _plan_of(record) is not None:
            raise UsageError(
                f"{resource} is a part of {record.resource}, and this action is for the whole",
                hint=f"Name {record.resource} itself",
            )

    def _amend(self, name: str, change: Callable[[Lease, datetime], Lease]) -> Lease | None:
        """Change a record, made where there is none; as it was before. A transaction of its owner is waited for."""
        end = self._clock() + self._wait_s
        for _ in range(_TRIES):
            before = self._store.read(name)
            record = Lease(name, None, 0) if before is None else before
            after = change(record, self._store.now())
            try:
                if after == before or self._store.amend(before, after):
                    return before
            except LeaseStoreUnavailable:
                if self._clock() > end:
                    raise
        raise LeaseStoreUnavailable(f"the lease on {name!r} keeps changing its owner")


def _plan_of(record: Lease) -> LanePlan | None:
    position = record.position
    if position is None or not LanePlan.is_plan(position):
        return None
    return LanePlan.from_document(position, record.resource)


def _refuse_unskippable(record: Lease | None) -> None:
    if record is None or record.position is None:
        return
    if is_sealed(record.position):
        raise UsageError(
            f"{record.resource} is a lane of an earlier number of lanes: it has no next change, and none was left out",
            hint="tailrace leases lists the lanes that there are now",
        )
    if _plan_of(record) is not None:
        raise UsageError(
            f"{record.resource} has been divided into lanes in the meantime, and no change was left out",
            hint=f"Name the lane, such as {record.resource}/0",
        )
    if "snapshot" in record.position:
        raise UsageError(
            f"{record.resource} is still copying its snapshot, from which no single document can be left out",
            hint="An error policy can do that: on_error=DeadLetters(...)",
        )
