"""Lanes: how many there are, what each has done, and how their number changes.

A position is a vector, one place a lane. Places are compared by the hex digits of the resume token: their order is the
order of the stream. The least of the vector is where one reader can serve all lanes; an event that its lane is past
already is left out.

The number of lanes changes by a new *generation*. All lanes of the old one are stopped where they are. That vector is a
*floor* of the new generation: an event is done if the old lane that it belonged to is past it. The new lanes begin at
the least place of the old ones and leave out what is below a floor. A floor is forgotten once every lane is past all of
it. So nobody has to wait until lanes stand at one place, and no document is ever handled out of order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tailrace.consumer.rules.lane_key import Outline
from tailrace.errors import SinkError, UsageError

#: The lane that handles barriers.
BARRIER_LANE: Final = 0
LANES_MAX: Final = 1024
#: A generation's fencing tokens begin here times its number: every owner in it is newer than all before.
_GENERATION_SHIFT: Final = 32


def order_of(token: Mapping[str, Any] | None) -> bytes:
    """The place of a resume token; that of no token is before all others."""
    return b"" if token is None else str(token["_data"]).upper().encode()


def least(tokens: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """The token that is first in the stream; ``None`` (the very start) where any lane has none."""
    return min(tokens, key=order_of, default=None)


@dataclass(frozen=True)
class Floor:
    """Where the lanes of an earlier generation were stopped: what they had done need not be done again."""

    tokens: tuple[Mapping[str, Any] | None, ...]

    def is_below(self, event: Outline) -> bool:
        lane = BARRIER_LANE if event.hash is None else event.hash % len(self.tokens)
        return event.order <= order_of(self.tokens[lane])

    @property
    def highest(self) -> bytes:
        return max(map(order_of, self.tokens))


@dataclass(frozen=True)
class LanePlan:
    """One generation: ``lanes`` of them, the ``start`` of those that have no position yet, and what was done before.

    It is kept as a document beside the lanes' leases, and is the same for every process.
    """

    lanes: int
    generation: int = 0
    start: Mapping[str, Any] | None = None
    floors: tuple[Floor, ...] = ()
    #: How many lanes are wanted next; the lanes of this generation are being stopped for it.
    next_lanes: int | None = None

    def __post_init__(self) -> None:
        check_lanes(self.lanes)

    def lane_of(self, event: Outline) -> int:
        """The lane that handles the event."""
        return BARRIER_LANE if event.hash is None else event.hash % self.lanes

    def is_done(self, event: Outline) -> bool:
        """Whether an earlier generation handled the event."""
        return any(floor.is_below(event) for floor in self.floors)

    def fencing_token(self, version: int) -> int:
        """The fencing token of the ``version``-th owner of a lane: it grows over generations too."""
        return (self.generation << _GENERATION_SHIFT) + version

    def begun_at(self, token: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Where a lane goes on whose lease holds ``token``."""
        return self.start if token is None else token

    def asked_for(self, lanes: int) -> LanePlan:
        """The plan with a change to ``lanes`` begun, or called off where there are so many already."""
        check_lanes(lanes)
        return replace(self, next_lanes=None if lanes == self.lanes else lanes)

    def changed(self, stopped: Sequence[Mapping[str, Any] | None]) -> LanePlan:
        """The next generation. ``stopped`` is what each lane of this one had committed when it could no longer go on;
        ``None`` for one that never did."""
        if self.next_lanes is None or len(stopped) != self.lanes:
            raise UsageError(f"{len(stopped)} positions do not stop {self.lanes} lanes")
        tokens = tuple(self.begun_at(token) for token in stopped)
        start = least(tokens)
        floors = tuple(floor for floor in self.floors if floor.highest > order_of(start))
        if any(order_of(token) > order_of(start) for token in tokens):
            floors += (Floor(tokens),)
        return LanePlan(self.next_lanes, self.generation + 1, start, floors)

    def to_document(self) -> dict[str, Any]:
        return {
            "lanes": self.lanes,
            "generation": self.generation,
            "start": self.start,
            "floors": [list(floor.tokens) for floor in self.floors],
            "nextLanes": self.next_lanes,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> LanePlan:
        """Read a plan. Raises SinkError where somebody changed it by hand into what is no plan."""
        try:
            return cls(
                lanes=int(document["lanes"]),
                generation=int(document["generation"]),
                start=_token(document["start"]),
                floors=tuple(Floor(tuple(map(_token, tokens))) for tokens in document["floors"]),
                next_lanes=None if document["nextLanes"] is None else int(document["nextLanes"]),
            )
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise SinkError(
                f"the plan of the lanes cannot be read: {error!r}",
                hint="Somebody changed it by hand. Restore it, or start anew under another resource",
            ) from None


def _token(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("_data"), str):
        raise TypeError(f"{value!r} is no resume token")
    return value


def check_lanes(lanes: object) -> None:
    """Raise UsageError unless there can be so many lanes."""
    if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= LANES_MAX:
        raise UsageError(f"partitions must be a whole number from 1 to {LANES_MAX}, not {lanes!r}")


@dataclass(frozen=True)
class LanePosition:
    """What a lane's lease holds: the ``token`` that it is done with, and the barrier that it has ``reached``: it has
    handled everything before that, and waits."""

    token: Mapping[str, Any] | None = None
    reached: bytes = b""

    def is_at(self, barrier: bytes) -> bool:
        """Whether everything of the lane before the barrier is done."""
        return self.reached >= barrier or order_of(self.token) >= barrier

    def is_past(self, barrier: bytes) -> bool:
        """For the lane that handles barriers: whether this one is done."""
        return order_of(self.token) >= barrier


def may_handle_barrier(barrier: bytes, others: Sequence[LanePosition]) -> bool:
    """Whether lane 0 may handle the barrier: ``others`` are the positions of all lanes but its own."""
    return all(position.is_at(barrier) for position in others)
