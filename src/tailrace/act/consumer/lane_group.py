"""Drives one process's part in the lanes of a resource: what ``rules.lane_group`` decides is done here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from tailrace.act.consumer.lease import LeaseStore
from tailrace.act.consumer.rules.lane_group import GroupSteps, LaneGroupLogic
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
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.act.consumer.rules.need import Outcome, Pause
from tailrace.errors import InternalError

#: How often the readers are checked between two checks of the leases, and how often while everything is stopping.
_LOOK_S: Final = 0.1
_ENDING_LOOK_S: Final = 0.02


class LaneWork(Protocol):
    """One lane at work in a thread of its own."""

    @property
    def has_ended(self) -> bool: ...
    @property
    def error(self) -> BaseException | None:
        """What ended it, other than being told to."""

    def stop(self) -> None:
        """Tell it to finish the change in hand. Does not wait."""

    def join(self) -> None:
        """Wait until it has ended."""


class LaneGroup:
    """``run()`` until ``stop()``, in the calling thread; lanes run in threads of their own.

    ``start_lane``  begins to work on a lane
    ``look``        called at every look at the leases, and ten times a second between: readers are looked after
    ``bootstrap``   settles where the first lanes begin (``FindBeginning``)
    """

    def __init__(
        self,
        logic: LaneGroupLogic,
        store: LeaseStore,
        owner: str,
        lease_seconds: float,
        *,
        start_lane: Callable[[LanePlan, int], LaneWork],
        look: Callable[[], None],
        bootstrap: Callable[[], None],
    ) -> None:
        self._logic = logic
        self._store = store
        self._owner = owner
        self._seconds = lease_seconds
        self._start_lane = start_lane
        self._look = look
        self._bootstrap = bootstrap
        self._stopped = threading.Event()
        self._works: dict[int, LaneWork] = {}

    def stop(self) -> None:
        """Finish what is in hand and end. Does not wait."""
        self._logic.stopping = True
        self._stopped.set()

    def run(self) -> None:
        """Raises what ends the group: an error of a lane, or of the store. All lanes have ended then."""
        try:
            self._drive(self._logic.steps())
        except BaseException:
            for work in self._works.values():
                work.stop()
            for work in self._works.values():
                work.join()
            self._works.clear()
            with contextlib.suppress(Exception):  # the error that counts is on its way
                self._drive(self._logic.leave())
            raise

    def _drive(self, steps: GroupSteps) -> None:
        try:
            need = next(steps)
            while True:
                need = steps.send(self._answered(need))
        except StopIteration:
            return

    def _answered(self, need: GroupNeed) -> Outcome:
        try:
            return Outcome(0.0, 0.0, self._answer(need))
        except Exception as error:  # noqa: BLE001 - the logic judges it
            return Outcome(0.0, 0.0, None, error)

    def _answer(self, need: GroupNeed) -> Any:
        match need:
            case ReadRecords():
                records = [self._store.read(resource) for resource in need.resources]
                now = self._store.now()
                return tuple(None if lease is None else Record.of(lease, now) for lease in records)
            case TakeLease():
                return self._store.acquire(need.resource, self._owner, self._seconds)
            case HoldLease():
                return self._store.refresh(need.lease, self._seconds)
            case WriteRecord():
                return self._store.commit(need.lease, need.document, self._seconds)
            case GiveLease():
                return self._store.release(need.lease)
            case FindBeginning():
                return self._bootstrap()
            case RunLanes():
                return self._run_lanes(need)
            case Pause():
                return self._pause(need.seconds)
        raise InternalError(f"a need that nobody answers: {need}")

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._look()
            if self._stopped.is_set():
                time.sleep(_ENDING_LOOK_S)
                return
            self._stopped.wait(min(left, _LOOK_S))

    def _run_lanes(self, need: RunLanes) -> frozenset[int]:
        for lane, work in list(self._works.items()):
            if work.has_ended:
                del self._works[lane]
                if work.error is not None:
                    raise work.error
            elif lane not in need.lanes:
                work.stop()
        for lane in sorted(need.lanes - self._works.keys()):
            self._works[lane] = self._start_lane(need.plan, lane)
        self._look()
        return frozenset(self._works)
