"""Lanes: one stream, handled by several listeners at a time, each with a lease and a position of its own.

A lane is a listener as any other: what it watches is its lane of the stream, and its store is the lane's part of the
lease store. Which lanes this process works on is decided by ``rules.lane_group``, and what they have in common is here:
the stream, which is read once, and what the others have done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol

from tailrace.act.consumer.event_stream import WholeEventStream
from tailrace.act.consumer.group_commit import GroupCommit
from tailrace.act.consumer.lane_group import LaneGroup
from tailrace.act.consumer.lane_reader import LaneReaders
from tailrace.act.consumer.lane_store import BeginningStore, LaneStore
from tailrace.act.consumer.lane_stream import LaneWatchable
from tailrace.act.consumer.lease import LeaseStore
from tailrace.act.consumer.rules.lane_group import LaneGroupLogic
from tailrace.act.consumer.rules.lane_key import LaneKeys
from tailrace.act.consumer.rules.lanes import BARRIER_LANE, LanePlan, lane_position, lane_resource, least, order_of
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.errors import StreamInvalidated

#: How long one read of a quiet stream waits: readers that are to stop end after that at the latest.
_AWAIT_MS: Final = 250
#: What is known about the other lanes' places is read again after this time.
_PLACES_S: Final = 0.03


class LaneListener(Protocol):
    """What lanes need of a listener."""

    def run_alone(self) -> None: ...
    def stop(self) -> None: ...


class MakeListener(Protocol):
    """Makes a listener with the user's handler and settings. ``copies``: it begins with a copy, whatever the
    settings."""

    def __call__(
        self, watchable: Any, *, resource: str, store: Any, plan: LanePlan | None, copies: bool = False
    ) -> LaneListener: ...


class _LaneThread(threading.Thread):
    """One lane at work."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.listener: LaneListener | None = None
        self.error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return not self.is_alive()

    def stop(self) -> None:
        if self.listener is not None:
            self.listener.stop()

    def run(self) -> None:
        try:
            assert self.listener is not None
            self.listener.run_alone()
        except BaseException as error:  # noqa: BLE001 - raised again by the group
            self.error = error


class Lanes:
    """The lanes of ``resource`` that fall to this process. ``run()`` until ``stop()``.

    ``lanes``          how many there should be; the last process to begin settles it for all;
                       ``None``: as many as there are
    ``keys``           what lanes are chosen by, and further keys that are known
    ``watch_options``  those of ``watch()``
    ``make_listener``  makes the listener of a lane, and the one that settles where the first lanes begin
    ``resumes``        whether lanes go on after an invalidation
    ``note_pause``     called often, with the time since which an operator holds the resource still, or ``None``
    """

    def __init__(
        self,
        watchable: Any,
        *,
        resource: str,
        store: LeaseStore,
        owner: str,
        lanes: int | None,
        lease_seconds: float,
        keys: LaneKeys,
        watch_options: Mapping[str, Any],
        make_listener: MakeListener,
        resumes: bool,
        note_pause: Callable[[datetime | None], None] = lambda since: None,
    ) -> None:
        self._watchable = watchable
        self._resource = resource
        self._store = store
        self._commits = GroupCommit(store)
        self._options = {"max_await_time_ms": _AWAIT_MS, **watch_options}
        self._make_listener = make_listener
        self._resumes = resumes
        self._note_pause = note_pause
        self._readers: LaneReaders | None = None
        self._readers_plan: LanePlan | None = None
        self._beginning: LaneListener | None = None
        self._places: dict[int, bytes] = {}
        self._places_at = 0.0
        self._places_lock = threading.Lock()
        self._keys = keys
        self._logic = LaneGroupLogic(resource, owner, lanes, lease_seconds, keys[0].name)
        self._group = LaneGroup(
            self._logic,
            store,
            owner,
            lease_seconds,
            start_lane=self._start_lane,
            look=self._look,
            bootstrap=self._find_beginning,
        )

    @property
    def plan(self) -> LanePlan | None:
        """The plan that this process follows; ``None`` before it knows one."""
        return self._logic.plan

    def run(self) -> None:
        """Work on lanes in this process until ``stop()``. Raises what ends a lane other than the loss of its lease."""
        try:
            self._group.run()
        finally:
            if self._readers is not None:
                self._readers.close()

    def stop(self) -> None:
        """Finish what is in hand, commit, give the leases back, end. Does not wait."""
        self._group.stop()
        if self._beginning is not None:
            self._beginning.stop()

    def _look(self) -> None:
        self._note_pause(self._logic.paused_at)
        if self._readers is not None:
            self._readers.step()

    def _find_beginning(self) -> None:
        def done() -> None:
            if self._beginning is not None:
                self._beginning.stop()

        store = BeginningStore(self._store, done)
        plan = self._logic.plan
        copies = plan is not None and plan.beginning is not None
        self._beginning = self._make_listener(
            self._watchable, resource=self._resource, store=store, plan=None, copies=copies
        )
        if not self._logic.stopping:
            self._beginning.run_alone()
        self._beginning = None

    def _start_lane(self, plan: LanePlan, lane: int) -> _LaneThread:
        readers = self._readers
        if readers is None or self._readers_plan is not plan:
            if readers is not None:
                readers.close()
            readers = LaneReaders(self._open, plan, f"lanes {self._resource}", self._keys)
            self._readers, self._readers_plan, self._places = readers, plan, {}
        name = f"{self._resource}/{lane}"
        thread = _LaneThread(f"lane {name}")
        store = LaneStore(
            self._store,
            self._resource,
            plan,
            lane,
            unavailable=thread.stop,
            committed=self._note_place,
            commits=self._commits,
        )
        watchable = LaneWatchable(
            self._watchable,
            lane,
            readers,
            begin=lambda position: self._begin(plan, lane, position),
            places=lambda: self._look_at_places(plan),
            ends=partial(self._ends, plan),
        )
        thread.listener = self._make_listener(watchable, resource=name, store=store, plan=plan)
        thread.start()
        return thread

    def _open(self, position: StreamPosition) -> WholeEventStream:
        begin = position if position.token is None else StreamPosition(position.token, start_after=True)
        return WholeEventStream(self._watchable, self._options, begin)

    def _ends(self, plan: LanePlan, token: Mapping[str, Any]) -> None:
        is_history = plan.start.began is not None and plan.start.move_to(token).began is not None
        if not self._resumes and not is_history:
            raise StreamInvalidated(
                f"what the listener on {self._resource!r} watched was dropped or renamed",
                hint='The position after it is kept: start the listener again to go on, or use on_invalidate="resume"',
            )

    # What the other lanes have done

    def _position(self, plan: LanePlan, lane: int) -> StreamPosition:
        name = lane_resource(self._resource, plan, lane)
        lease = self._store.read(name)
        return (None if lease is None else lane_position(lease.position, name)) or plan.start

    def _begin(self, plan: LanePlan, lane: int, position: StreamPosition) -> StreamPosition:
        """A barrier between lane 0's place and this lane's may not be done yet, so reading begins before it."""
        if lane == BARRIER_LANE:
            return position
        return least([position, self._position(plan, BARRIER_LANE)])

    def _note_place(self, lane: int, order: bytes) -> None:
        with self._places_lock:
            self._places[lane] = max(order, self._places.get(lane, b""))

    def _look_at_places(self, plan: LanePlan) -> Sequence[bytes]:
        if time.monotonic() - self._places_at > _PLACES_S:
            for lane in range(plan.lanes):
                self._note_place(lane, order_of(self._position(plan, lane)))
            self._places_at = time.monotonic()
        with self._places_lock:
            return [self._places.get(lane, b"") for lane in range(plan.lanes)]
