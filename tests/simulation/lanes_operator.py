"""An operator in a simulation of lanes: the requests that it sends, and what must be handled after them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from tailrace.act.consumer.rules import instructions
from tailrace.act.consumer.rules.lane_turn import BarrierReached
from tailrace.act.consumer.rules.lanes import LanePlan, order_of
from tailrace.act.consumer.rules.need import HandleChange
from tests.simulation.lanes_events import InvariantBrokenError, SimulatedEvent
from tests.simulation.operating import Operator

RESOURCE: Final = "orders"


class OperatedWorld:
    """The part of a ``World`` that an operator has to do with."""

    store: Any
    events: list[SimulatedEvent]
    written: int
    now: float
    has_faults: bool
    handled: set[int]
    effects: dict[int, list[tuple[int, int]]]
    processes: list[Any]
    _step: Any

    def begin_operating(self, seed: int, operated: bool) -> None:
        self.operator = self._new_operator(random.Random(f"operator {seed}")) if operated else None
        self.operator_rng = random.Random(f"when {seed}")
        #: The generation that began where an operator last put the position; what older ones still do comes again.
        self.sought_generation = 0
        #: For each key, up to where an operator had changes passed over.
        self.passed: dict[int, int] = defaultdict(int)
        self.skips = self.seeks = 0

    def skip(self, lane: Any, change: HandleChange) -> bool:
        """An operator wants the change left out: it counts as handled."""
        if isinstance(change.event, BarrierReached):
            return False
        self.skips += 1
        return self.leave_out(lane, change)

    def leave_out(self, lane: Any, change: HandleChange) -> bool:
        """The change counts as handled."""
        event = change.event
        if lane.plan.generation < self.sought_generation:
            return True
        if event.key is not None:
            self.passed[event.key] = max(self.passed[event.key], event.n)
        elif any(other.number not in self.handled for other in self.events[: event.number]):
            raise InvariantBrokenError(
                f"the barrier {event.number} was left out before those in front of it were handled"
            )
        self.handled.add(event.number)
        return True

    # An operator's requests

    def read(self, resource: str) -> Any:
        return self.store.read(resource)

    def leases(self) -> Any:
        return self.store.leases()

    def release(self, lease: Any) -> None:
        self.store.release(lease)

    def amend(self, before: Any, after: Any) -> bool:
        if not self.store.amend(before, after):
            return False
        if after.resource == RESOURCE and LanePlan.is_plan(after.position):
            plan = LanePlan.from_document(after.position, RESOURCE)
            if before is not None and plan.generation != before.position["generation"]:
                self._sought(plan)
        return True

    def _sought(self, plan: LanePlan) -> None:
        """An operator's plan: what is before its start counts as handled, and what is after it must be handled
        again."""
        self.seeks += 1
        self.sought_generation = plan.generation
        start = order_of(plan.start)
        before = [event for event in self.events if event.order <= start]
        self.handled = {event.number for event in before}
        self.passed.clear()
        for event in before:
            if event.key is not None:
                self.passed[event.key] = event.n
        for key, seen in self.effects.items():
            newest = seen[-1][1] if seen else 0
            seen[:] = [(self.passed[key], newest)] if newest else []

    def check_removable(self, record: Any) -> None:
        found = self.store.read(record.resource)
        if found == record and not record.is_free(self.store.now()):
            raise InvariantBrokenError(
                f"an operator deletes the lease on {record.resource}, which {record.owner} holds"
            )

    def check_unheld(self, names: Sequence[str]) -> None:
        for name in names:
            record = self.store.read(name)
            if record is not None and record.paused_at is not None and not record.is_free(self.store.now()):
                raise InvariantBrokenError(f"{record.owner} holds the lease on {name}, which is paused")

    def _new_operator(self, rng: random.Random) -> Operator:
        def between() -> None:
            for _ in range(rng.choice((0, 0, 1, 3, 30))):
                self._step()

        def sleep(seconds: float) -> None:
            until = self.now + seconds
            while self.now < until:
                self._step()

        def parts() -> list[str]:
            record = self.store.read(RESOURCE)
            plan = LanePlan.from_document((record and record.position) or {}, RESOURCE)
            return [f"{RESOURCE}/{lane}" for lane in range(plan.lanes)]

        return Operator(
            self,
            rng,
            RESOURCE,
            between=between,
            sleep=sleep,
            clock=lambda: self.now,
            server_time=self.store.now,
            times=lambda: [(event.number + 2) << 32 for event in self.events[: self.written]],
            owners=lambda: [process.name for process in self.processes],
            parts=parts,
        )

    def _operate(self) -> None:
        """Only once there is a plan: the other simulation covers a resource that nobody has divided yet."""
        record = self.store.read(RESOURCE)
        if self.operator is None or record is None or not LanePlan.is_plan(record.position):
            return
        if self.has_faults and self.operator_rng.random() < 0.01:
            self.operator.act()
        elif not self.has_faults:
            for one in self.store.leases():
                done = instructions.mark_skip(instructions.resume(one), None)
                if done != one:
                    self.store.amend(one, done)
