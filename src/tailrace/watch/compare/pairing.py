"""Events of two streams side by side: which belong together, and what differs.

Pure: events go in for each side, and what is known about them comes out. A side *promises* a cluster time: every event
before it was given. So an event that one side lacks is called missing only when that side has passed its time, however
far the two are apart.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import token_order
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import OplogFormatError

DifferenceKind = Literal["bytes", "token", "order", "missing", "extra", "twice", "error", "end"]

SERVER: Final = 0
OURS: Final = 1
#: In words, for a report.
KINDS: Final[dict[DifferenceKind, str]] = {
    "bytes": "the events differ",
    "token": "the events differ only in their resume tokens",
    "order": "ours gives the event at another place in the order",
    "missing": "the server gives the event, and ours does not",
    "extra": "ours gives the event, and the server does not",
    "twice": "ours gives the event twice",
    "error": "one stream ends in an error, and the other does not",
    "end": "one stream ends, and the other does not",
}
#: Tokens that are remembered, to know an event again that comes twice or late.
_REMEMBERED: Final = 10_000
_FOREVER: Final = ClusterTime((1 << 64) - 1)
#: Parts of an event whose fields are the users': where a difference lies is reported no deeper.
_OF_USERS: Final = frozenset((b"fullDocument", b"fullDocumentBeforeChange", b"documentKey"))
_UPDATE: Final = frozenset((b"updateDescription", b"rawUpdateDescription", b"operationDescription"))


@dataclass(frozen=True)
class Event:
    """An event with what pairs it: its token in the order of events, and its cluster time."""

    raw: bytes
    token: bytes
    time: ClusterTime

    @classmethod
    def of(cls, raw: bytes) -> Event:
        """Raises OplogFormatError where the event holds no token: stages have taken it out."""
        element = raw_bson.find(raw, b"_id")
        if element is None or element.type != raw_bson.OBJECT:
            raise OplogFormatError("an event without its resume token", position="_id")
        token = token_order(raw[element.value_start : element.end])
        return cls(raw, token, cls.time_in(token))

    @staticmethod
    def time_in(token: bytes) -> ClusterTime:
        """The cluster time of a token in the order of events."""
        return ClusterTime(int(token[2:18], 16))

    @property
    def operation(self) -> str:
        """The operation type; empty where the event has none."""
        element = raw_bson.find(self.raw, b"operationType")
        if element is None or element.type != raw_bson.STRING:
            return ""
        return raw_bson.read_string(self.raw, element.value_start).decode("utf-8", "replace")


@dataclass(frozen=True)
class EventDifference:
    """One difference.

    Attributes:
        server: the server's event; ``None`` if it has none
        ours: our event; ``None`` if we have none
        place: the first field of the event that differs, down to where users' fields begin
        text: an explanation, for what the events do not show
    """

    kind: DifferenceKind
    operation: str
    place: str
    server: bytes | None
    ours: bytes | None
    time: ClusterTime | None
    text: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for differences of one kind, of which one is enough for a report."""
        return self.kind, self.operation, self.place


@dataclass(frozen=True)
class Pair:
    """The server's event, and whether ours is the same but for a document that was looked up at another moment."""

    event: Event
    looked_up_apart: bool = False


@dataclass
class _Side:
    """What one stream has given and is not paired yet."""

    events: deque[Event] = field(default_factory=deque)
    size: int = 0
    #: Everything before it was given.
    promise: ClusterTime = field(default_factory=lambda: ClusterTime(0))

    def put(self, event: Event) -> None:
        self.events.append(event)
        self.size += len(event.raw)
        self.promise = max(self.promise, event.time)

    def take(self) -> Event:
        event = self.events.popleft()
        self.size -= len(event.raw)
        return event

    def take_until(self, time: ClusterTime) -> list[Event]:
        found = []
        while self.events and self.events[0].time <= time:
            found.append(self.take())
        return found


class Pairing:
    """The pairing of one pair of streams that have begun at the same place.

    ``bytes_max``  of a side's events that wait for the other side: ``has_room`` says whether to read on
    ``looks_up``   the streams look current documents up (``updateLookup``), which both do at moments of their own: such
                   a document may differ, and nothing else of its event
    """

    def __init__(self, *, bytes_max: int, looks_up: bool = False) -> None:
        self._sides = (_Side(), _Side())
        self._bytes_max = bytes_max
        self._looks_up = looks_up
        self._paired: OrderedDict[bytes, None] = OrderedDict()
        self._missing: OrderedDict[bytes, None] = OrderedDict()

    def put(self, side: int, raw: bytes) -> None:
        """The next event of a side."""
        self._sides[side].put(Event.of(raw))

    def promise(self, side: int, time: ClusterTime) -> None:
        """The side has given every event before ``time``."""
        self._sides[side].promise = max(self._sides[side].promise, time)

    def end(self, side: int) -> None:
        """The side gives nothing more."""
        self._sides[side].promise = _FOREVER

    def promised(self, side: int) -> ClusterTime:
        return self._sides[side].promise

    def waiting(self, side: int) -> int:
        """How many events of the side wait for the other side."""
        return len(self._sides[side].events)

    def next_time(self, side: int) -> ClusterTime | None:
        """The time of the side's first event that waits."""
        events = self._sides[side].events
        return events[0].time if events else None

    def has_room(self, side: int) -> bool:
        """False where too much waits: the side must not read on until the other has come closer."""
        return self._sides[side].size < self._bytes_max

    def results(self) -> Iterator[Pair | EventDifference]:
        """What is known by now, in the server's order."""
        server, ours = self._sides
        while True:
            while server.events and ours.events and server.events[0].raw == ours.events[0].raw:
                ours.take()
                yield self._pair(server.take())
            heads = [side.events[0].time for side in self._sides if side.events]
            if not heads:
                return
            time = self._decided(max(heads))
            if time is None:
                return
            yield from self._aligned(server.take_until(time), ours.take_until(time))

    def _decided(self, time: ClusterTime) -> ClusterTime | None:
        """Up to which time both sides can be compared now, where their next events differ; ``None``: not yet."""
        behind = [side for side in self._sides if side.promise <= time]
        if not behind:
            return time
        if any(side.size < self._bytes_max for side in behind):
            return None  # it reads on, until it has passed the time
        # There is no room to read as far as the other side's next event: what comes before it is decided now, but for
        # the last cluster time, of which there may be more.
        first = min(side.events[0].time for side in behind)
        return max(first, ClusterTime(min(side.events[-1].time for side in behind) - 1))

    def _pair(self, event: Event, *, looked_up_apart: bool = False) -> Pair:
        self._remember(self._paired, event.token)
        return Pair(event, looked_up_apart)

    @staticmethod
    def _remember(tokens: OrderedDict[bytes, None], token: bytes) -> None:
        tokens[token] = None
        if len(tokens) > _REMEMBERED:
            tokens.popitem(last=False)

    def _aligned(self, server: list[Event], ours: list[Event]) -> Iterator[Pair | EventDifference]:
        """What events of the same time on both sides are to one another."""
        partners = _partners(server, ours)
        furthest = -1
        for event, partner in zip(server, partners, strict=True):
            if partner is None:
                self._remember(self._missing, event.token)
                yield _difference("missing", event, None)
                continue
            mine = ours[partner]
            # Of several shards' events with one token neither side settles which comes first.
            if partner < furthest and ours[furthest].token != event.token:
                self._remember(self._paired, event.token)
                yield _difference("order", event, mine)
            furthest = max(furthest, partner)
            if event.raw == mine.raw:
                yield self._pair(event)
            elif self._looks_up and _differs_in_look_up_alone(event.raw, mine.raw):
                yield self._pair(event, looked_up_apart=True)
            else:
                self._remember(self._paired, event.token)
                yield _difference("token" if _body(event.raw) == _body(mine.raw) else "bytes", event, mine)
        taken = {partner for partner in partners if partner is not None}
        for index, mine in enumerate(ours):
            if index in taken:
                continue
            if mine.token in self._paired:
                yield _difference("twice", None, mine)
            elif mine.token in self._missing:
                yield _difference("order", None, mine)
            else:
                yield _difference("extra", None, mine)


def _partners(server: list[Event], ours: list[Event]) -> list[int | None]:
    """For each event of the server the index of ours that belongs to it: the same one, else one with its token, else
    one that differs in its token alone, else the one at its place, where as many are left on both sides."""
    partners: list[int | None] = [None] * len(server)
    free = dict.fromkeys(range(len(ours)))
    for same in (lambda event: event.raw, lambda event: event.token, lambda event: (event.time, _body(event.raw))):
        found: dict[object, deque[int]] = {}
        for index in free:
            found.setdefault(same(ours[index]), deque()).append(index)
        for index, event in enumerate(server):
            candidates = found.get(same(event)) if partners[index] is None else None
            if candidates:
                partner = candidates.popleft()
                partners[index] = partner
                del free[partner]
    left = [index for index, partner in enumerate(partners) if partner is None]
    if len(left) == len(free) and all(
        server[mine].time == ours[theirs].time for mine, theirs in zip(left, free, strict=True)
    ):
        for index, partner in zip(left, list(free), strict=True):
            partners[index] = partner
    return partners


def _difference(kind: DifferenceKind, server: Event | None, ours: Event | None) -> EventDifference:
    event = server or ours
    assert event is not None
    place = ""
    if kind == "bytes" and server is not None and ours is not None:
        place = differing_place(server.raw, ours.raw)
    raws = (None if server is None else server.raw, None if ours is None else ours.raw)
    return EventDifference(kind, event.operation, place, *raws, event.time)


def _body(raw: bytes) -> bytes:
    """The event without its token."""
    element = raw_bson.find(raw, b"_id")
    return raw if element is None else raw[4 : element.start] + raw[element.end :]


def _differs_in_look_up_alone(server: bytes, ours: bytes) -> bool:
    found = [_without_look_up(raw) for raw in (server, ours)]
    return found[0] is not None and found[0] == found[1]


def _without_look_up(raw: bytes) -> bytes | None:
    """An update without its current document, ``None`` for any other event."""
    if Event.of(raw).operation != "update":
        return None
    element = raw_bson.find(raw, b"fullDocument")
    return None if element is None else raw[4 : element.start] + raw[element.end :]


def differing_place(server: bytes, ours: bytes) -> str:
    """The first field in which two events differ, such as ``updateDescription.updatedFields``. No name of a user's is
    in it."""
    left, right = list(raw_bson.elements(server)), list(raw_bson.elements(ours))
    for index in range(max(len(left), len(right))):
        one = left[index] if index < len(left) else None
        other = right[index] if index < len(right) else None
        if one is not None and other is not None and server[one.start : one.end] == ours[other.start : other.end]:
            continue
        shown = one or other
        assert shown is not None
        name = shown.name.decode("utf-8", "replace")
        if one is None or other is None or one.name != other.name or shown.name in _OF_USERS:
            return name
        if shown.name in _UPDATE and one.type == other.type == raw_bson.OBJECT:
            inner = differing_place(raw_bson.value(server, one), raw_bson.value(ours, other))
            return f"{name}.{inner}" if shown.name == b"updateDescription" else name
        return name
    return ""
