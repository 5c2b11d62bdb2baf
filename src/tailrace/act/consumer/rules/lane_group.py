"""One process among those that share the lanes of a resource: which lanes it works on, from moment to moment.

There is no coordinator. Everything is decided by what the leases say: the plan (the position of the resource's own
lease), one lease for each process that takes part, one for each lane.

The number of lanes is changed by the first process that sees that the change is wanted and that every process is at
rest: it takes the lease of each old lane and *seals* it, so that nobody goes on there, and then writes the next
generation's plan. It may stop anywhere; another process goes on, and comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from datetime import datetime
from typing import Any, Final

from tailrace.act.consumer.rules.errors import LaneHistoryLost, LeaseLost, LeaseStoreUnavailable, OwnerNotUnique
from tailrace.act.consumer.rules.lane_need import (
    FindBeginning,
    GiveLease,
    GroupNeed,
    HoldLease,
    ReadRecords,
    Record,
    RunLanes,
    TakeLease,
    WriteRecord,
)
from tailrace.act.consumer.rules.lane_shares import moves
from tailrace.act.consumer.rules.lanes import (
    LanePlan,
    check_lanes,
    is_sealed,
    lane_position,
    lane_resource,
    member_resource,
    seal,
)
from tailrace.act.consumer.rules.lease import Lease, names_of
from tailrace.act.consumer.rules.need import Outcome, Pause
from tailrace.act.consumer.rules.position import StreamPosition

#: How many times a process checks the leases while one of them runs.
_LOOKS: Final = 6
_LOOK_MAX_S: Final = 2.0
#: The same while something is about to change.
_SOON_S: Final = 0.1

#: How often a lease is taken under a process's own id before it says that another has that id too; forgotten after this
#: many rounds in which nothing was to be done.
_STOLEN_MAX: Final = 3
_CALM_ROUNDS: Final = 10

GroupSteps = Generator[GroupNeed, Outcome, Any]


def _has_skip(lanes: tuple[Record | None, ...]) -> bool:
    """Whether a change is still to be left out in lanes that are all at work. With another number of lanes, the first
    change of a lane need not be the first of any."""
    leases = [record.lease for record in lanes if record is not None]
    return any(lease.skip is not None for lease in leases) and not any(is_sealed(lease.position) for lease in leases)


class LaneGroupLogic:
    """``steps()`` is driven by one driver; ``stopping`` may be set by anybody: lanes finish the change in hand, commit,
    and everything is given back.

    A process asks for its number of ``lanes`` once, when it begins. From then on it follows the plan, so that
    processes that were started with different numbers do not undo each other's wish for ever: the last one counts.
    With ``None`` it asks for nothing. ``key`` names the LaneKey that it asks for.
    """

    def __init__(self, resource: str, owner: str, lanes: int | None, lease_seconds: float, key: str = "") -> None:
        if lanes is not None:
            check_lanes(lanes)
        self.stopping = False
        self.plan: LanePlan | None = None
        self._resource = resource
        self._owner = owner
        self._wanted = lanes
        self._key = key
        self._look_s = min(lease_seconds / _LOOKS, _LOOK_MAX_S)
        self._member: Lease | None = None
        self._slot = 0
        #: How often a lease was taken under this process's own id, and how long nothing has happened since. A request
        #: of its own that arrives late does that too; another process with the same id does it again and again.
        self._stolen = self._calm_rounds = 0
        #: Since when an operator holds the resource still.
        self.paused_at: datetime | None = None
        #: The generation whose lanes found their history lost: it is to be followed by a copy.
        self._lost: int | None = None

    def steps(self) -> GroupSteps:
        """Needs, until the process is asked to stop. Raises what ends it."""
        while not self.stopping:
            try:
                if self.plan is None:
                    self.plan = yield from self._settled_plan()
                    calm = self.paused_at is not None
                else:
                    calm = yield from self._round(self.plan)
                if self._lost is not None:
                    yield from self._ask_for_copy(self._lost)
                    calm = False
            except LaneHistoryLost:
                # Not asked for under a later plan: another process may have copied everything by then.
                self._lost = None if self.plan is None else self.plan.generation
                calm = False
            except OwnerNotUnique:
                self._stolen += 1
                if self._stolen >= _STOLEN_MAX:
                    raise
                calm = False
            except (LeaseStoreUnavailable, LeaseLost):
                calm = True
            self._calm_rounds = self._calm_rounds + 1 if calm else 0
            if self._calm_rounds > _CALM_ROUNDS:
                self._stolen = 0
            yield Pause(self._look_s if calm else min(_SOON_S, self._look_s), "until the next look at the leases")
        yield from self.leave()

    def _ask(self, need: GroupNeed) -> GroupSteps:
        outcome = yield need
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    # The plan

    def _settled_plan(self) -> GroupSteps:
        """The plan, made or asked to change where need be; ``None``: not yet."""
        (record,) = yield from self._ask(ReadRecords((self._resource,)))
        self._note_pause(record)
        if record is not None and LanePlan.is_plan(record.lease.position):
            plan = LanePlan.from_document(record.lease.position, self._resource)
            if self._wanted is None or plan == plan.with_request(self._wanted, self._key):
                return plan
        lease = None if self.paused_at is not None else (yield from self._ask(TakeLease(self._resource)))
        if lease is None:
            return None  # another process changes it, or a listener without lanes is at work
        position: Mapping[str, Any] | None = lease.position
        if LanePlan.is_plan(position):
            plan = LanePlan.from_document(position or {}, self._resource)
            plan = plan.with_request(self._wanted or 1, self._key)
        elif position is None or "snapshot" in position:
            yield from self._ask(GiveLease(lease))
            yield from self._ask(FindBeginning())
            return None
        else:
            start = StreamPosition.from_document(position, self._resource)
            plan = LanePlan(self._wanted or 1, start, key=self._key)
        yield from self._ask(WriteRecord(lease, plan.to_document()))
        yield from self._ask(GiveLease(lease))
        return plan

    def _note_pause(self, record: Record | None) -> None:
        self.paused_at = None if record is None else record.lease.paused_at

    def _change_generation(self) -> GroupSteps:
        """Seal all lanes and write the next plan, if nobody holds one of them any more."""
        lease = yield from self._ask(TakeLease(self._resource))
        if lease is None:
            return
        plan = LanePlan.from_document(lease.position, self._resource)
        positions = []
        for lane in range(plan.lanes if plan.next_lanes is not None else 0):
            name = lane_resource(self._resource, plan, lane)
            taken = yield from self._ask(TakeLease(name))
            if taken is None:
                yield from self._ask(GiveLease(lease))
                return
            if not is_sealed(taken.position):
                yield from self._ask(WriteRecord(taken, seal(taken.position)))
            yield from self._ask(GiveLease(taken))
            positions.append(lane_position(taken.position, name))
        if positions:
            yield from self._ask(WriteRecord(lease, plan.next_generation(positions).to_document()))
        yield from self._ask(GiveLease(lease))

    def _ask_for_copy(self, lost: int) -> GroupSteps:
        """Write down that everything is to be copied after the generation that is ``lost``, unless that is written
        down, or done, already."""
        lease = yield from self._ask(TakeLease(self._resource))
        if lease is None:
            return
        plan = LanePlan.from_document(lease.position, self._resource)
        if plan.generation == lost and plan.beginning is None:
            yield from self._ask(WriteRecord(lease, plan.with_copy_request().to_document()))
        self._lost = None
        yield from self._ask(GiveLease(lease))

    # Round after round

    def _round(self, plan: LanePlan) -> GroupSteps:
        """Look at the leases and act; whether nothing was to be done."""
        names = [self._resource]
        names += [member_resource(self._resource, slot) for slot in range(plan.lanes)]
        names += [lane_resource(self._resource, plan, lane) for lane in range(plan.lanes)]
        records: tuple[Record | None, ...] = yield from self._ask(ReadRecords(tuple(names)))
        first, slots, lanes = records[0], records[1 : plan.lanes + 1], records[plan.lanes + 1 :]
        self._note_pause(first)
        now = plan if first is None else LanePlan.from_document(first.lease.position or {}, self._resource)
        if now != plan:
            if (yield from self._ask(RunLanes(plan, frozenset()))):
                return False
            self.plan = now
            return False
        if self.paused_at is not None:  # it stays a member, and the number of lanes stays what it is
            yield from self._ask(RunLanes(plan, frozenset()))
            yield from self._take_part(plan, slots)
            return True
        if plan.next_lanes is not None and (plan.copies or not _has_skip(lanes)):
            if not (yield from self._ask(RunLanes(plan, frozenset()))):
                yield from self._change_generation()
            return False
        if plan.beginning is not None:
            yield from self._ask(FindBeginning())
            return True
        handed = frozenset(lane for lane, record in enumerate(lanes) if record is not None and self._is_handed(record))
        if not (yield from self._take_part(plan, slots)):  # more processes than lanes: what an operator hands to it
            running = yield from self._ask(RunLanes(plan, handed))
            return not handed or running == handed
        members = {record.holder for record in slots if record is not None} - {None}
        owners = {lane: record.holder for lane, record in enumerate(lanes) if record is not None and record.holder}
        closed = {lane for lane, record in enumerate(lanes) if record is not None and self._is_closed(record)}
        everybody = {str(member) for member in members}
        move = moves(self._owner, everybody, owners, plan.lanes, handed=handed, closed=closed)
        mine = {lane for lane, owner in owners.items() if owner == self._owner}
        wanted = frozenset((mine - set(move.give_up)) | set(move.take))
        running = yield from self._ask(RunLanes(plan, wanted))
        return running == wanted == mine

    def _is_handed(self, record: Record) -> bool:
        is_ours = record.is_reserved and record.lease.reserved_for in names_of(self._owner)
        return is_ours and record.lease.paused_at is None

    def _is_closed(self, record: Record) -> bool:
        return record.lease.paused_at is not None or (record.is_reserved and not self._is_handed(record))

    def _take_part(self, plan: LanePlan, slots: tuple[Record | None, ...]) -> GroupSteps:
        """Be seen by the others: hold one of the members' leases. False where others hold all of them."""
        if self._member is not None and self._slot < plan.lanes:
            try:
                yield from self._ask(HoldLease(self._member))
            except LeaseLost as error:
                self._member = None
                if isinstance(error, OwnerNotUnique):
                    raise
            else:
                return True
        if self._member is not None:
            yield from self._ask(GiveLease(self._member))
            self._member = None
        for slot, record in enumerate(slots):
            if record is None or record.is_free or record.lease.owner == self._owner:
                self._member = yield from self._ask(TakeLease(member_resource(self._resource, slot)))
                if self._member is not None:
                    self._slot = slot
                    return True
        return False

    def _still_run(self, plan: LanePlan) -> GroupSteps:
        try:
            return (yield from self._ask(RunLanes(plan, frozenset())))
        except LaneHistoryLost:
            return True  # the next owner finds it too

    def leave(self) -> GroupSteps:
        """Stop all lanes, wait for them, and give back what is held."""
        failure: Exception | None = None
        try:
            if self.plan is not None:
                while (yield from self._still_run(self.plan)):
                    yield Pause(_SOON_S, "until the lanes have ended")
        except Exception as error:  # noqa: BLE001 - raised below, once the lease is given back
            failure = error
        if self._member is not None:  # not in a ``finally``: a generator that is closed may not ask for anything more
            yield GiveLease(self._member)
        if failure is not None:
            raise failure
