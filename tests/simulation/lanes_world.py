"""Processes that share lanes, under one seeded scheduler: the logic is the real one (``rules.lane_group``,
``rules.listener``, ``rules.lane_turn``); store, stream, targets and clock are simulated.

Performing a need and answering it are separate steps, so that a process can be paused or killed before a step, or
between a step and its answer. Now and then an answer of the store is lost, whether or not the request was carried out.
Processes want different numbers of lanes. In some runs lanes lose their history, and everything is copied again.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bson.timestamp import Timestamp

from tailrace.act.consumer.lane_store import BeginningStore, LaneStore
from tailrace.act.consumer.memory_lease_store import MemoryLeaseStore
from tailrace.act.consumer.rules.commit_policy import CommitPolicy
from tailrace.act.consumer.rules.errors import (
    Fenced,
    HandlerFailed,
    LaneHistoryLost,
    LeaseDocumentError,
    LeaseLost,
    LeaseStoreUnavailable,
    OwnerNotUnique,
)
from tailrace.act.consumer.rules.keeper import keep
from tailrace.act.consumer.rules.lane_group import LaneGroupLogic
from tailrace.act.consumer.rules.lane_key import PlacedEvent
from tailrace.act.consumer.rules.lane_need import (
    FindBeginning,
    GiveLease,
    HoldLease,
    ReadRecords,
    Record,
    RunLanes,
    TakeLease,
    WriteRecord,
)
from tailrace.act.consumer.rules.lane_turn import BarrierReached, LaneTurn
from tailrace.act.consumer.rules.lanes import BARRIER_LANE, LanePlan, lane_position, lane_resource, order_of
from tailrace.act.consumer.rules.listener import ListenerLogic, ListenerSettings
from tailrace.act.consumer.rules.need import (
    AcquireLease,
    CloseStream,
    CommitPosition,
    Decision,
    HandleChange,
    JudgeError,
    KeepLease,
    MarkEntries,
    OpenStream,
    Outcome,
    Pause,
    PullChange,
    RefreshLease,
    ReleaseLease,
    RenewLease,
    SkipChange,
    TakeSnapshot,
)
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.errors import ChangeStreamHistoryLost
from tests.simulation.lanes_events import InvariantBrokenError, SimulatedEvent, events_of
from tests.simulation.lanes_operator import RESOURCE, OperatedWorld

LEASE_S: Final = 10.0
DECISIONS: Final[tuple[Decision, ...]] = ("retry", "skip", "stop")


@dataclass
class Rules:
    """What a mutant replaces."""

    turn: type[LaneTurn] = LaneTurn
    is_done: Callable[[LanePlan, PlacedEvent, Callable[[str], PlacedEvent]], bool] = LanePlan.is_done
    fences_generations: bool = True
    group: type[LaneGroupLogic] = LaneGroupLogic
    #: Whether each lane gets the result of its own commit if several were sent in one request.
    answers_each: bool = True
    #: In which lane an event is.
    placed: Callable[[SimulatedEvent, str], PlacedEvent] = SimulatedEvent.placed
    logic: type[ListenerLogic] = ListenerLogic


class Actor:
    """One generator of needs: performs the current need, and answers it one step later. ``lane``: set for a lane's
    listener, whose commits may be sent in one request with those of the process's other lanes."""

    def __init__(
        self,
        world: World,
        steps: Generator[Any, Outcome, Any],
        perform: Callable[[Any], Any],
        lane: Lane | None = None,
    ) -> None:
        self._world, self._steps, self._perform, self._lane = world, steps, perform, lane
        self._need: Any = None
        self._outcome: Outcome | None = None
        self.wakes = 0.0
        self.ended = False
        self.error: BaseException | None = None

    def step(self) -> None:
        now = self._world.now
        if self._need is not None and self._outcome is None:
            self._request(now)
            if isinstance(self._need, Pause):
                self.wakes = now + self._need.seconds
            return
        try:
            outcome, self._outcome = self._outcome, None
            if outcome is None:
                self._need = next(self._steps)
            else:
                self._need = self._steps.send(Outcome(outcome.asked, now, outcome.value, outcome.error))
        except StopIteration:
            self.ended = True
        except (LaneHistoryLost, LeaseLost, LeaseStoreUnavailable, HandlerFailed) as error:
            self.ended, self.error = True, error

    @property
    def _has_commit(self) -> bool:
        return isinstance(self._need, CommitPosition) and self._outcome is None

    def _request(self, now: float) -> None:
        """Perform the current need. A commit is sometimes sent with those of other lanes, all of which are then lost or
        late together."""
        world, together = self._world, [self]
        if self._lane is not None and self._has_commit and world.share_rng.random() < 0.7:
            together += [other for other in self._lane.process.actors if other is not self and other._has_commit]
        world.shared += len(together) > 1
        done, answered = self._fate(together, now)
        for actor in together:
            actor._outcome = actor._performed(now, done=done, answered=answered)
        if not world.rules.answers_each:
            best = min((actor._outcome for actor in together if actor._outcome), key=lambda one: one.error is not None)
            for actor in together:
                actor._outcome = best
        for actor in together:
            if actor._lane is not None and isinstance(actor._need, CommitPosition):
                actor._lane.check_heard(actor._need, actor._outcome)

    def _fate(self, together: Sequence[Actor], now: float) -> tuple[bool, bool]:
        """Whether the request is done now, and whether it is answered."""
        world = self._world
        is_asked = isinstance(
            self._need,
            ReadRecords | TakeLease | HoldLease | WriteRecord | AcquireLease | RefreshLease | CommitPosition,
        )
        lost = is_asked and world.has_faults and world.rng.random() < 0.04
        done = not (lost and world.rng.random() < 0.5)
        if not done and world.late_rng.random() < 0.5:
            late = now + world.late_rng.uniform(0.01, 0.5) * LEASE_S
            for actor in together:
                world.late.append((late, functools.partial(actor._perform, actor._need)))
        return done, not lost

    def _performed(self, now: float, *, done: bool, answered: bool) -> Outcome:
        try:
            if not done:
                raise LeaseStoreUnavailable("the request was lost")
            value = self._perform(self._need)
            if not answered:
                raise LeaseStoreUnavailable("the answer was lost")
        except InvariantBrokenError:
            raise
        except Exception as error:  # noqa: BLE001 - the logic judges it
            return Outcome(now, now, None, error)
        return Outcome(now, now, value)


class Lane:
    """One lane that a process works on: the real listener's logic over the simulated stream."""

    def __init__(self, world: World, process: Process, plan: LanePlan, lane: int) -> None:
        self.world, self.process, self.plan, self.lane = world, process, plan, lane
        self.store = LaneStore(
            world.store,
            RESOURCE,
            plan,
            lane,
            unavailable=self.stop,
            committed=lambda *_: None,  # type: ignore[arg-type]
        )
        settings = ListenerSettings(
            resource=f"{RESOURCE}/{lane}",
            lease_seconds=LEASE_S,
            on_history_lost="snapshot",
            commits=CommitPolicy(world.commit_every, idle_seconds=20.0),
        )
        self.logic = world.rules.logic(settings)
        self.actor = Actor(world, self.logic.steps(), self.perform, self)
        self.next = 0
        self.turn: LaneTurn | None = None
        self.mark: Mapping[str, Any] | None = None
        process.actors.append(self.actor)

    def stop(self) -> None:
        self.logic.stopping = True

    def perform(self, need: Any) -> Any:
        match need:
            case AcquireLease():
                return self.store.acquire(RESOURCE, self.process.name, LEASE_S)
            case RefreshLease():
                return self.store.refresh(need.lease, LEASE_S)
            case RenewLease():
                return self.store.renew(need.lease, LEASE_S)
            case CommitPosition():
                return self.world.committed(self, need.lease, need.position, ends_skip=need.ends_skip)
            case SkipChange():
                return self.world.skip(self, need.change)
            case ReleaseLease():
                return self.store.release(need.lease)
            case KeepLease():
                self.process.actors.append(Actor(self.world, keep(need.ownership, LEASE_S), self.perform))
                return None
            case OpenStream():
                return self.open(need.position)
            case PullChange():
                return self.pull()
            case HandleChange():
                return self.handle(need)
            case JudgeError():
                return self.world.judge(self, need)
            case TakeSnapshot():
                raise LaneHistoryLost("the lane's history is lost")
            case CloseStream() | MarkEntries() | Pause():
                return None
        raise InvariantBrokenError(f"unexpected: {need}")

    def check_heard(self, need: CommitPosition, outcome: Outcome | None) -> None:
        """What the lane is told about its commit must be true."""
        if outcome is None or outcome.error is not None:
            return
        name = lane_resource(RESOURCE, self.plan, self.lane)
        lease = self.world.store.read(name)
        position = None if lease is None else lane_position(lease.position, name)
        if position is None or order_of(position) < order_of(need.position):
            raise InvariantBrokenError(f"{name} was told that its commit is done, and it is not")

    def open(self, position: StreamPosition) -> None:
        first = self.world.places(self.plan)[0]
        begin = min(order_of(position), first) if self.lane != BARRIER_LANE else order_of(position)
        self.done = order_of(position)
        self.next = sum(event.order <= begin for event in self.world.events)
        self.turn = self.world.rules.turn(self.lane, self.done, lambda: self.world.places(self.plan))

    def pull(self) -> Any:
        assert self.turn is not None
        if self.world.loses_history and self.world.has_faults and self.world.rng.random() < 0.005:
            self.world.lost.add(self.plan.generation)
        if self.plan.generation in self.world.lost:
            raise ChangeStreamHistoryLost("lost")
        item = None
        self.mark = None
        while not self.turn.is_waiting and self.next < self.world.written:
            event = self.world.events[self.next]
            self.next += 1
            placed = self.world.rules.placed(event, self.plan.key)
            mine = placed.hash is None or placed.hash % self.plan.lanes == self.lane
            is_open = event.is_barrier or event.order > self.done
            if mine and is_open and not self.world.rules.is_done(self.plan, placed, event.placed):
                item = event
                break
            if event.order > self.done:
                self.mark = event.token
        return self.turn.pull(item, lambda: self.mark)

    def handle(self, need: HandleChange) -> bool:
        event = need.event
        if isinstance(event, BarrierReached):
            return False
        if self.world.fails and self.world.has_faults and self.world.fail_rng.random() < 0.1:
            raise ValueError("not this one")
        if self.world.in_transaction:
            self.world.committed(self, need.lease, need.position)
        self.world.affect(event, self.plan, self.lane, need.lease.version)
        return self.world.in_transaction


@dataclass
class Process:
    """One process: the group's logic, the lanes that it works on, and what keeps their leases."""

    world: World
    name: str
    lanes: int
    actors: list[Actor] = field(default_factory=list)
    works: dict[int, Lane] = field(default_factory=dict)
    frozen_until: float = 0.0

    def __post_init__(self) -> None:
        key = self.world.key_rng.choice(("", "path:half")) if self.world.changes_keys else self.world.lane_key
        self.logic = self.world.rules.group(RESOURCE, self.name, self.lanes, LEASE_S, key)
        self.group = Actor(self.world, self.logic.steps(), self.perform)
        self.actors.append(self.group)

    def perform(self, need: Any) -> Any:
        store = self.world.store
        match need:
            case ReadRecords():
                now = store.now()
                read = [store.read(resource) for resource in need.resources]
                return tuple(None if lease is None else Record.of(lease, now) for lease in read)
            case TakeLease():
                return store.acquire(need.resource, self.name, LEASE_S)
            case HoldLease():
                return store.refresh(need.lease, LEASE_S)
            case WriteRecord():
                if need.lease.resource == RESOURCE:
                    self.world.check_copy_is_due(need.document)
                return store.commit(need.lease, need.document, LEASE_S)
            case GiveLease():
                return store.release(need.lease)
            case FindBeginning():
                return self.find_beginning()
            case RunLanes():
                return self.run_lanes(need)
            case Pause():
                return None
        raise InvariantBrokenError(f"unexpected: {need}")

    def find_beginning(self) -> None:
        """The copy is one step here, apart from its first commit: a process that gets this far may leave it to
        another."""
        store = BeginningStore(self.world.store, lambda: None)
        lease = store.acquire(RESOURCE, self.name, LEASE_S)
        if lease is None:
            return
        record = self.world.store.read(RESOURCE)
        if record is None or not LanePlan.is_plan(record.position):
            store.commit(lease, StreamPosition(at=Timestamp(1, 0)).to_document(), LEASE_S)
        else:
            if lease.position is None:
                store.commit(lease, {"at": Timestamp(1, 0), "snapshot": {}}, LEASE_S)
                if self.world.rng.random() < 0.3:
                    return  # as after a crash: the lease runs out
            store.commit(lease, self.world.copied(lease.version).to_document(), LEASE_S)
        store.release(lease)

    def run_lanes(self, need: RunLanes) -> frozenset[int]:
        for lane, work in list(self.works.items()):
            if work.actor.ended:
                if isinstance(work.actor.error, LaneHistoryLost | OwnerNotUnique | HandlerFailed):
                    del self.works[lane]
                    raise work.actor.error
                if work.actor.error is not None and not isinstance(work.actor.error, LeaseLost):
                    raise InvariantBrokenError(f"a lane ended: {work.actor.error}")
                del self.works[lane]
            elif lane not in need.lanes:
                work.stop()
        for lane in sorted(need.lanes - self.works.keys()):
            self.works[lane] = Lane(self.world, self, need.plan, lane)
        return frozenset(self.works)


class World(OperatedWorld):
    """``run()`` to the end, or InvariantBrokenError. ``changes_keys``: processes wish for different lane keys too;
    ``lane_key``: all wish for this one. ``twins``: some processes take the owner id of another one."""

    def __init__(
        self,
        seed: int,
        *,
        in_transaction: bool,
        rules: Rules | None = None,
        changes_keys: bool = False,
        lane_key: str = "",
        twins: bool = False,
        operated: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        #: Requests that nobody waits for any more, and when they arrive. They have random numbers of their own, so that
        #: up to the first of them a seed plays the same run as before.
        self.late_rng = random.Random(f"late {seed}")
        self.late: list[tuple[float, Callable[[], Any]]] = []
        #: Also with random numbers of its own: whether a commit is sent with those of other lanes; and how often that
        #: happened.
        self.share_rng = random.Random(f"shared {seed}")
        self.shared = 0
        self.key_rng = random.Random(f"keys {seed}")
        self.changes_keys = changes_keys
        self.lane_key = lane_key
        self.twin_rng = random.Random(f"twins {seed}") if twins else None
        #: Whether handlers raise in this run, and what the error policy says.
        self.fail_rng = random.Random(f"fails {seed}")
        self.fails = self.fail_rng.random() < 0.4
        self.judged: Counter[str] = Counter()
        self.in_transaction = in_transaction
        self.rules = rules or Rules()
        self.commit_every = self.rng.choice((1, 1, 3))
        self.now = 0.0
        self.has_faults = True
        self.loses_history = self.rng.random() < 0.3
        #: The generations whose history was lost: all of their lanes find that out, one after another.
        self.lost: set[int] = set()
        self.copies = 0
        self.store = MemoryLeaseStore(lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now))
        self.events = events_of(self.rng, 40, 6, self.rng.choice((0, 1, 2, 3)))
        self.written = 5
        self.effects: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.handled: set[int] = set()
        self.fences: dict[int, dict[str, int]] = defaultdict(dict)
        self.positions: dict[str, bytes] = {}
        self.processes: list[Process] = []
        self.started = 0
        self.begin_operating(seed, operated)

    # What lanes do to the world

    def judge(self, lane: Lane, need: JudgeError) -> Decision:
        """A change that is left out counts as handled."""
        decision = self.fail_rng.choice(DECISIONS) if self.has_faults else "retry"
        self.judged[decision] += 1
        if decision == "skip":
            self.leave_out(lane, need.change)
        return decision

    def places(self, plan: LanePlan) -> list[bytes]:
        places = []
        for lane in range(plan.lanes):
            name = lane_resource(RESOURCE, plan, lane)
            lease = self.store.read(name)
            places.append(order_of((None if lease is None else lane_position(lease.position, name)) or plan.start))
        return places

    def committed(self, lane: Lane, lease: Any, position: StreamPosition, *, ends_skip: bool = False) -> Any:
        commit = lane.store.commit_skip if ends_skip else lane.store.commit
        written = commit(lease, position.to_document(), LEASE_S)
        name, place = lane_resource(RESOURCE, lane.plan, lane.lane), order_of(position)
        if place < self.positions.get(name, b""):
            raise InvariantBrokenError(f"the position of {name} went back")
        self.positions[name] = place
        return written

    def affect(self, event: SimulatedEvent, plan: LanePlan, lane: int, version: int) -> None:
        """A fenced write, with the marks that ``Fence`` leaves; the invariants are judged here."""
        if event.is_barrier:
            if plan.generation >= self.sought_generation:
                self._affect_barrier(event)
            return
        assert event.key is not None
        marks = {f"{RESOURCE}/{lane}": version}
        if self.rules.fences_generations:
            marks[RESOURCE] = plan.fencing_token(0)
        fence = self.fences[event.key]
        if any(fence.get(name, 0) > mark for name, mark in marks.items()):
            raise Fenced("a newer owner was there")
        fence.update(marks)
        if plan.generation < self.sought_generation:
            return
        seen = self.effects[event.key]
        furthest = max([self.passed[event.key], *(n for n, _ in seen)])
        if seen and version < seen[-1][1]:
            raise InvariantBrokenError(
                f"key {event.key}: an older owner's effect after a newer one's: {seen}, {event.n}"
            )
        if event.n > furthest + 1:
            raise InvariantBrokenError(f"key {event.key}: out of order: {seen}, then {event.n}")
        if seen and event.n <= seen[-1][0] and (self.in_transaction or version == seen[-1][1]):
            raise InvariantBrokenError(f"key {event.key}: handled again: {seen}, then {event.n} by {version}")
        if self.lane_key and any(
            other.key is not None and other.key // 2 == event.key // 2 and other.number not in self.handled
            for other in self.events[: event.number]
        ):
            raise InvariantBrokenError(f"event {event.number} was handled before one of its lane key in front of it")
        if any(other.is_barrier and other.number not in self.handled for other in self.events[: event.number]):
            raise InvariantBrokenError(f"event {event.number} was handled before a barrier in front of it")
        seen.append((event.n, version))
        self.handled.add(event.number)

    def check_copy_is_due(self, document: Mapping[str, Any]) -> None:
        """Everything is copied once after a generation that lost its history. ``document``: the plan that is to be
        written."""
        plan = LanePlan.from_document(document, RESOURCE)
        if plan.copies and plan.generation not in self.lost:
            raise InvariantBrokenError(f"generation {plan.generation} asks for a copy, and has lost nothing")

    def copied(self, version: int) -> StreamPosition:
        """Copy everything that is there, under the fencing token ``version``. Returns where the stream goes on."""
        self.copies += 1
        there = self.events[: self.written]
        self.handled.update(event.number for event in there)
        for key, n in {event.key: event.n for event in there if event.key is not None}.items():
            if self.fences[key].get(RESOURCE, 0) > version:
                raise InvariantBrokenError(f"key {key}: the copy is older than the lanes before it")
            seen = self.effects[key]
            if seen and (version < seen[-1][1] or n < max(m for m, _ in seen)):
                raise InvariantBrokenError(f"key {key}: the copy undoes {seen}")
            self.fences[key][RESOURCE] = version
            seen.append((n, version))
        return StreamPosition(there[-1].token)

    def _affect_barrier(self, event: SimulatedEvent) -> None:
        missing = [other.number for other in self.events[: event.number] if other.number not in self.handled]
        if missing:
            raise InvariantBrokenError(f"the barrier {event.number} was handled before {missing}")
        if event.number in self.handled and self.in_transaction:
            raise InvariantBrokenError(f"the barrier {event.number} was handled twice")
        self.handled.add(event.number)

    # The scheduler

    def run(self, steps: int = 6000) -> None:
        """Run with faults for a while, then without: everything must be handled in the end."""
        for _ in range(2):
            self._start()
        for step in range(steps):
            if step == steps // 4:
                self.has_faults = False
                self.written = len(self.events)
                for process in self.processes:
                    process.frozen_until = 0.0
            if self.has_faults:
                self._torment()
            self._operate()
            self._step()
            if not self.has_faults and len(self.handled) == len(self.events) and self._are_unique():
                return
        if not self._are_unique():
            raise InvariantBrokenError("two processes with one owner id go on beside each other")
        raise InvariantBrokenError(f"handled {len(self.handled)} of {len(self.events)} when faults were healed")

    def _are_unique(self) -> bool:
        names = [process.name for process in self.processes]
        return len(set(names)) == len(names)

    def _start(self) -> None:
        self.started += 1
        name = f"p{self.started}"
        if self.twin_rng is not None and self.processes and self.twin_rng.random() < 0.5:
            name = self.twin_rng.choice(self.processes).name
        self.processes.append(Process(self, name, self.rng.choice((1, 2, 2, 3, 4))))

    def _torment(self) -> None:
        luck = self.rng.random()
        if luck < 0.002 and self.processes:
            self.processes.remove(self.rng.choice(self.processes))
        if luck > 0.994 and len(self.processes) < 3:
            self._start()
        if 0.010 < luck < 0.016 and self.processes:
            self.rng.choice(self.processes).frozen_until = self.now + self.rng.uniform(0.3, 3.0) * LEASE_S
        if luck > 0.95 and self.written < len(self.events):
            self.written += 1

    def _step(self) -> None:
        # A process ends if it notices that another has its owner id, or if its handler failed, and a supervisor starts
        # another.
        self.processes = [
            one for one in self.processes if not isinstance(one.group.error, OwnerNotUnique | HandlerFailed)
        ]
        if not self.processes:
            self._start()
        self.now += self.rng.uniform(0, 0.02)
        for request in [one for one in self.late if one[0] <= self.now]:
            self.late.remove(request)
            with contextlib.suppress(LeaseLost, LeaseStoreUnavailable, LeaseDocumentError):
                request[1]()
        runnable, wakes = [], []
        for process in self.processes:
            process.actors = [actor for actor in process.actors if not actor.ended]
            for actor in process.actors:
                at = max(actor.wakes, process.frozen_until)
                (runnable if at <= self.now else wakes).append(actor if at <= self.now else at)
        if not runnable:
            self.now = min(wakes)
            return
        self.rng.choice(runnable).step()
