"""What a lane's listener is given next: its own changes, and its part in a barrier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tailrace.act.consumer.rules.lanes import BARRIER_LANE, all_at
from tailrace.act.consumer.rules.need import Pulled
from tailrace.errors import TailraceError


class LaneItem(Protocol):
    """An event of the lane, or a barrier."""

    @property
    def order(self) -> bytes: ...
    @property
    def event(self) -> Any: ...
    @property
    def token(self) -> Mapping[str, Any]: ...
    @property
    def is_barrier(self) -> bool: ...
    @property
    def is_invalidate(self) -> bool: ...
    @property
    def error(self) -> TailraceError | None: ...


class BarrierReached:
    """What a lane other than 0 is given as its change at a barrier: there is nothing to handle, only to commit."""

    def __init__(self, token: Mapping[str, Any]) -> None:
        self._fields = {"_id": token, "operationType": "barrier"}

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]


class LaneTurn:
    """One lane's turns from one position on.

    ``places``  gives the committed places of all lanes, lane 0 first. They may be old: places only grow.
    ``ends``    called with its token where this lane, which is not lane 0, is past an invalidation that lane 0 has
                handled
    """

    def __init__(
        self,
        lane: int,
        done: bytes,
        places: Callable[[], Sequence[bytes]],
        ends: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._lane = lane
        self._places = places
        self._ends = ends
        #: Up to where the lane's position was when it began.
        self._done = done
        self._barrier: LaneItem | None = None
        self._reached = False

    @property
    def is_waiting(self) -> bool:
        """Whether the lane is at a barrier: it takes nothing from its queue."""
        return self._barrier is not None

    def pull(self, item: LaneItem | None, mark: Callable[[], Mapping[str, Any] | None]) -> Pulled:
        """The answer to ``PullChange``. ``item`` is the next one of the queue, ``None`` while ``is_waiting`` or where
        there is none; ``mark`` then says how far nothing comes for the lane."""
        if self._barrier is None:
            if item is None:
                return Pulled(None, mark())
            if not item.is_barrier:
                return Pulled(item.event, item.token, error=item.error)
            self._barrier, self._reached = item, item.order <= self._done
        return self._at_barrier(self._barrier) if self._lane != BARRIER_LANE else self._before_barrier(self._barrier)

    def _before_barrier(self, barrier: LaneItem) -> Pulled:
        if not all_at(barrier.order, self._places()[1:]):
            return Pulled(None, None)
        self._barrier = None
        return Pulled(barrier.event, barrier.token, invalidate=barrier.is_invalidate, error=barrier.error)

    def _at_barrier(self, barrier: LaneItem) -> Pulled:
        if not self._reached:
            self._reached = True
            return Pulled(BarrierReached(barrier.token), barrier.token)
        if self._places()[0] >= barrier.order:
            self._barrier = None
            if barrier.is_invalidate and self._ends is not None:
                self._ends(barrier.token)
        return Pulled(None, None)
