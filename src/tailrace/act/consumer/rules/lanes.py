"""Lanes: how many there are, what each has done, and how their number changes.

A position is a vector with one place for each lane. Places are compared by the hex digits of the resume token: their
order is the order of the stream. The smallest is where one reader can serve all lanes; an event that its lane has
already passed is left out.

The number of lanes changes by a new *generation*. All lanes of the old one are stopped where they are. That vector is a
*floor* of the new generation: an event is done if the old lane that it belonged to is past it. The new lanes begin at
the smallest place of the old ones and leave out what is below a floor. A floor is forgotten once every lane has passed
all of it. So nobody has to wait until the lanes are at one place, and no document is ever handled out of order.

A *barrier* is an event for all lanes. Each moves its position to it when it is done with what came before, and goes no
further. When all have, lane 0 handles it; the others go on once they see lane 0 past it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tailrace.act.consumer.rules.errors import LeaseDocumentError
from tailrace.act.consumer.rules.lane_key import PlacedEvent
from tailrace.act.consumer.rules.position import StreamPosition, join_gaps
from tailrace.errors import UsageError

#: The lane that handles barriers.
BARRIER_LANE: Final = 0
LANES_MAX: Final = 1024
#: A generation's fencing tokens begin here times its number: every owner in it is newer than all before.
_GENERATION_SHIFT: Final = 32
#: Every fencing token of a lane is at least this; those of listeners without lanes count from 1.
FIRST_LANE_TOKEN: Final = 1 << _GENERATION_SHIFT
_SEALED: Final = "sealed"


def order_of(position: StreamPosition) -> bytes:
    """The place of a position among events; one at a time stands before all events of that time."""
    if position.token is not None:
        return str(position.token["_data"]).upper().encode()
    return b"82%016X" % position.cluster_time if position.at is not None else b""


def least(positions: Sequence[StreamPosition]) -> StreamPosition:
    """The position that is first in the stream."""
    return min(positions, key=order_of)


@dataclass(frozen=True)
class Floor:
    """Where the lanes of an earlier generation were stopped: what they had done need not be done again. ``key`` names
    the LaneKey that they were chosen by."""

    orders: tuple[bytes, ...]
    key: str = ""

    def is_below(self, event: PlacedEvent) -> bool:
        lane = BARRIER_LANE if event.hash is None else event.hash % len(self.orders)
        return event.order <= self.orders[lane]

    def to_document(self) -> Any:
        """As a plan holds it."""
        orders = [order.decode() for order in self.orders]
        return {"orders": orders, "key": self.key} if self.key else orders

    @classmethod
    def from_document(cls, document: Any) -> Floor:
        """Read what a plan holds. Raises KeyError, TypeError or ValueError where it is none."""
        if isinstance(document, Mapping):
            return cls(tuple(map(_order, document["orders"])), _text(document["key"]))
        return cls(tuple(map(_order, document)))


@dataclass(frozen=True)
class LanePlan:
    """One generation: ``lanes`` of them, the ``start`` of those that have no position yet, and what was done before.

    It is kept as the position of the resource's own lease, and is the same for every process.

    ``beginning``  everything is copied before lanes begin again: the position of that copy, empty while there is none.
                   No lane runs in such a generation. The copy has its fencing tokens, and the lanes after it, of the
                   next one, have newer ones
    ``key``        names the LaneKey that lanes are chosen by; ``next_key`` is that of the next generation
    """

    lanes: int
    start: StreamPosition
    generation: int = 1
    floors: tuple[Floor, ...] = ()
    #: How many lanes are wanted next; the lanes of this generation are being stopped for it.
    next_lanes: int | None = None
    #: Whether the next generation begins with a copy.
    copies: bool = False
    beginning: Mapping[str, Any] | None = None
    key: str = ""
    next_key: str | None = None

    def __post_init__(self) -> None:
        check_lanes(self.lanes)

    @property
    def floor_end(self) -> bytes:
        """After this place nothing is below a floor."""
        return max((order for floor in self.floors for order in floor.orders), default=b"")

    def is_done(self, event: PlacedEvent, placed_by: Callable[[str], PlacedEvent] | None = None) -> bool:
        """Whether an earlier generation handled the event. ``placed_by`` places it by the key of a name."""
        return any(
            floor.is_below(event if floor.key == self.key or placed_by is None else placed_by(floor.key))
            for floor in self.floors
        )

    def fencing_token(self, version: int) -> int:
        """The fencing token of the ``version``-th owner of a lane: it grows over generations too."""
        return (self.generation << _GENERATION_SHIFT) + version

    def with_request(self, lanes: int, key: str = "") -> LanePlan:
        """The plan with a change to ``lanes``, chosen by ``key``, begun. One that has begun is not called off: some
        lanes may be sealed."""
        check_lanes(lanes)
        if self.next_lanes is None and (lanes, key) == (self.lanes, self.key):
            return self
        return replace(self, next_lanes=lanes, next_key=key)

    def with_copy_request(self) -> LanePlan:
        """The plan in which the change to a copy has begun."""
        return replace(self, next_lanes=self.next_lanes or self.lanes, copies=True)

    def sought(self, start: StreamPosition) -> LanePlan:
        """The next generation, begun at ``start`` whatever was done before, where an operator puts it."""
        key = self.key if self.next_key is None else self.next_key
        return LanePlan(self.next_lanes or self.lanes, start, self.generation + 1, key=key)

    def after_copy(self, position: Mapping[str, Any], resource: str) -> LanePlan:
        """The plan with the copy at ``position``; if the copy ends there, the next generation."""
        if "snapshot" in position:
            return replace(self, beginning=position)
        return LanePlan(self.lanes, StreamPosition.from_document(position, resource), self.generation + 1, key=self.key)

    def next_generation(self, stopped: Sequence[StreamPosition | None]) -> LanePlan:
        """The next generation. ``stopped`` is what each lane of this one had committed when it could no longer go on;
        ``None`` for one that never did."""
        if self.next_lanes is None or len(stopped) != self.lanes:
            raise UsageError(f"{len(stopped)} positions do not stop {self.lanes} lanes")
        positions = [position or self.start for position in stopped]
        key = self.key if self.next_key is None else self.next_key
        start = replace(least(positions), gaps=join_gaps(*(position.gaps for position in positions)))
        if self.copies or self.beginning is not None:
            return LanePlan(self.next_lanes, start, self.generation + 1, beginning=self.beginning or {}, key=key)
        floors = [*self.floors, Floor(tuple(map(order_of, positions)), self.key)]
        left = tuple(floor for floor in floors if max(floor.orders) > order_of(start))
        return LanePlan(self.next_lanes, start, self.generation + 1, left, key=key)

    def to_document(self) -> dict[str, Any]:
        """The document to commit."""
        document: dict[str, Any] = {
            "lanes": self.lanes,
            "generation": self.generation,
            "start": self.start.to_document(),
            "floors": [floor.to_document() for floor in self.floors],
            "nextLanes": self.next_lanes,
        }
        if self.copies:
            document["copies"] = True
        if self.beginning is not None:
            document["beginning"] = dict(self.beginning)
        if self.key:
            document["key"] = self.key
        if self.next_key is not None:
            document["nextKey"] = self.next_key
        return document

    @classmethod
    def is_plan(cls, document: Mapping[str, Any] | None) -> bool:
        """Whether a lease's position is a plan of lanes, and not the position of a listener without them."""
        return document is not None and "lanes" in document

    @classmethod
    def from_document(cls, document: Mapping[str, Any], resource: str) -> LanePlan:
        """Read a plan. Raises LeaseDocumentError where it is none."""
        try:
            return cls(
                lanes=_integer(document["lanes"]),
                start=StreamPosition.from_document(document["start"], resource),
                generation=_integer(document["generation"]),
                floors=tuple(map(Floor.from_document, document["floors"])),
                next_lanes=None if document["nextLanes"] is None else _integer(document["nextLanes"]),
                copies=bool(document.get("copies", False)),
                beginning=_document(document.get("beginning")),
                key=_text(document.get("key", "")),
                next_key=None if document.get("nextKey") is None else _text(document["nextKey"]),
            )
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise LeaseDocumentError(
                f"the plan of the lanes in the lease on {resource!r} cannot be read: {error!r}",
                hint="Somebody changed it by hand. Restore it, or use another resource",
            ) from None


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _document(value: object) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a document")
    return value


def _order(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a position")
    return value.encode()


def generation_token(token: int) -> int:
    """The token that marks targets under the resource's own name if a lane's fencing token is ``token``."""
    return token >> _GENERATION_SHIFT << _GENERATION_SHIFT


def lane_resource(resource: str, plan: LanePlan, lane: int) -> str:
    """The name of a lane's own lease."""
    return f"{resource}/{plan.generation}.{lane}"


def member_resource(resource: str, slot: int) -> str:
    """The name of the lease by which a process is seen. There are as many as lanes: more have nothing to do."""
    return f"{resource}/member.{slot}"


def seal(position: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is written over the ``position`` of a lane whose generation is at its end: nobody works on it any more."""
    return {_SEALED: position}


def is_sealed(position: Mapping[str, Any] | None) -> bool:
    return position is not None and _SEALED in position


def lane_position(position: Mapping[str, Any] | None, resource: str) -> StreamPosition | None:
    """The position in a lane's lease, sealed or not; ``None`` where there is none yet. Raises LeaseDocumentError."""
    document = position[_SEALED] if position is not None and _SEALED in position else position
    return None if document is None else StreamPosition.from_document(document, resource)


def check_lanes(lanes: object) -> None:
    """Raise UsageError unless there can be this many lanes."""
    if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= LANES_MAX:
        raise UsageError(f"partitions must be a whole number from 1 to {LANES_MAX}, not {lanes!r}")


def all_at(barrier: bytes, orders: Sequence[bytes]) -> bool:
    """Whether lane 0 may handle the barrier: ``orders`` are the committed places of all lanes but its own."""
    return all(order >= barrier for order in orders)
