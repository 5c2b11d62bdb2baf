"""A block of finished change events: their bytes in one buffer, and what is known about each of them as arrays.

The maker of a block (the kernel, or the plain stages by ``EventBlock.of``) knows where each event's parts are, so
nobody who merges, cuts, resumes or serves it parses an event again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tailrace.core import raw_bson
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.oplog.cluster_time import ClusterTime

if TYPE_CHECKING:
    from collections.abc import Iterator

Bytes: TypeAlias = npt.NDArray[np.uint8]
Offsets: TypeAlias = npt.NDArray[np.int64]
PackedTimes: TypeAlias = npt.NDArray[np.uint64]

#: The operation types by their number in ``EventBlock.operation``; 0 is every type that has no number.
OPERATION_TYPES: Final = (
    "",
    "insert",
    "update",
    "replace",
    "delete",
    "invalidate",
    "drop",
    "rename",
    "dropDatabase",
    "create",
    "createIndexes",
    "dropIndexes",
    "modify",
    "shardCollection",
    "reshardCollection",
    "refineCollectionShardKey",
)
_NUMBER: Final = {name: number for number, name in enumerate(OPERATION_TYPES)}


#: ``EventBlock.operation`` of a block of one event. Nobody writes to it.
_ONE_OPERATION: Final = tuple(np.array((number,), np.uint8) for number in range(len(OPERATION_TYPES)))
for _one in _ONE_OPERATION:
    _one.flags.writeable = False


@dataclass(frozen=True, slots=True)
class EventBlock:
    """``n`` finished events in stream order.

    ``buffer``        uint8: event ``i`` is ``buffer[offsets[i] : offsets[i + 1]]``, exact BSON
    ``offsets``       int64[n + 1]; may begin anywhere in the buffer
    ``cluster_time``  uint64[n]: as a ``ClusterTime``
    ``operation``     uint8[n]: a place in ``OPERATION_TYPES``
    ``token_start``   int64[n], and ``token_end``: where in ``buffer`` the event's resume token is, the document
                      ``{_data[, _typeBits]}``. 0 and 0 where a stage of the user's has removed it
    ``ns_start``      int64[n], and ``ns_end``: where the document ``ns`` is; 0 and 0 where the event has none
    ``places``        int64[n, K]: where the parts of the events are that columns show, as the kernel noted them when it
                      wrote the event (``tailrace.core.kernel.event_parts``), counted from the event's first byte. A
                      row of zeros says nothing of its event; ``None`` says nothing of any
    """

    buffer: Bytes
    offsets: Offsets
    cluster_time: PackedTimes
    operation: Bytes
    token_start: Offsets
    token_end: Offsets
    ns_start: Offsets
    ns_end: Offsets
    places: Offsets | None = None

    @classmethod
    def of(cls, events: Sequence[ChangeEvent]) -> EventBlock:
        """The block of events that the plain stages made."""
        if len(events) == 1:  # as most blocks of a waiting stream have
            return _OneEvent(events[0])
        times = [event.cluster_time for event in events]
        numbers = [_NUMBER.get(event.operation_type, 0) for event in events]
        return cls._of([event.to_bson() for event in events], times, numbers)

    @classmethod
    def of_bson(cls, events: Sequence[bytes]) -> EventBlock:
        """A block of events of which only the bytes are known; a field that an event lacks is 0."""
        return cls._of(events, list(map(_cluster_time, events)), list(map(_operation, events)))

    @classmethod
    def _of(cls, parts: Sequence[bytes], times: Sequence[int], operations: Sequence[int]) -> EventBlock:
        count = len(parts)
        if count == 1:  # as most that a waiting stream gives; what is general costs four times as much
            part = parts[0]
            places = np.array((0, len(part), *_places(part, 0)), np.int64)
            return cls(
                np.frombuffer(part, np.uint8),
                places[:2],
                np.array(times, np.uint64),
                _ONE_OPERATION[operations[0]],
                places[2:3],
                places[3:4],
                places[4:5],
                places[5:],
            )
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        places = np.zeros((4, count), np.int64)
        for index, part in enumerate(parts):
            places[:, index] = _places(part, int(offsets[index]))
        return cls(
            np.frombuffer(b"".join(parts), np.uint8),
            offsets,
            np.array(times, np.uint64),
            np.array(operations, np.uint8),
            *places,
        )

    @classmethod
    def join(cls, blocks: Sequence[EventBlock]) -> EventBlock:
        """One block of the events of all of them, in order. At least one block."""
        if len(blocks) == 1:
            return blocks[0]
        used = [block.buffer[block.offsets[0] : block.offsets[-1]] for block in blocks]
        sizes = np.concatenate([np.diff(block.offsets) for block in blocks])
        ends = np.cumsum([part.size for part in used])
        moves = [
            int(end) - part.size - int(block.offsets[0]) for end, part, block in zip(ends, used, blocks, strict=True)
        ]

        def moved(name: str) -> Offsets:
            pairs = [(getattr(block, name), move) for block, move in zip(blocks, moves, strict=True)]
            return np.concatenate([np.where(places > 0, places + move, 0) for places, move in pairs])

        noted = noted_places(blocks)
        return cls(
            np.concatenate(used),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
            np.concatenate([block.cluster_time for block in blocks]),
            np.concatenate([block.operation for block in blocks]),
            moved("token_start"),
            moved("token_end"),
            moved("ns_start"),
            moved("ns_end"),
            None if noted is None else np.concatenate(noted),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        """Bytes of all events."""
        return int(self.offsets[-1] - self.offsets[0])

    def cut(self, first: int, last: int) -> EventBlock:
        """The events ``[first, last)``, without a copy."""
        return EventBlock(
            self.buffer,
            self.offsets[first : last + 1],
            self.cluster_time[first:last],
            self.operation[first:last],
            self.token_start[first:last],
            self.token_end[first:last],
            self.ns_start[first:last],
            self.ns_end[first:last],
            None if self.places is None else self.places[first:last],
        )

    def take(self, order: Offsets) -> EventBlock:
        """The events with these numbers, in this order. Neighbours are copied together."""
        if not order.size:
            return self.cut(0, 0)
        first = np.flatnonzero(np.diff(order, prepend=order[0]) != 1)
        last = np.append(first[1:], order.size) - 1
        data = self.buffer.data
        runs = zip(self.offsets[order[first]].tolist(), self.offsets[order[last] + 1].tolist(), strict=True)
        offsets = np.zeros(order.size + 1, np.int64)
        np.cumsum(np.diff(self.offsets)[order], out=offsets[1:])
        moves = offsets[:-1] - self.offsets[order]

        def moved(places: Offsets) -> Offsets:
            taken = places[order]
            return np.where(taken > 0, taken + moves, 0)

        return EventBlock(
            np.frombuffer(b"".join(data[start:end] for start, end in runs), np.uint8),
            offsets,
            self.cluster_time[order],
            self.operation[order],
            moved(self.token_start),
            moved(self.token_end),
            moved(self.ns_start),
            moved(self.ns_end),
            None if self.places is None else self.places[order],
        )

    def event(self, index: int) -> bytes:
        """The BSON of one event."""
        return self.buffer[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def events(self) -> list[bytes]:
        """The BSON of each event."""
        start = int(self.offsets[0])
        data = self.buffer[start : self.offsets[-1]].tobytes()
        places = (self.offsets - start).tolist()
        return [data[first:last] for first, last in pairwise(places)]

    def token(self, index: int) -> bytes:
        """The resume token of one event, as BSON; empty where a stage of the user's has removed it."""
        return self.buffer[self.token_start[index] : self.token_end[index]].tobytes()

    def tokens(self) -> list[bytes]:
        """The resume token of each event."""
        start = int(self.offsets[0])
        data = self.buffer[start : self.offsets[-1]].tobytes()
        places = zip((self.token_start - start).tolist(), (self.token_end - start).tolist(), strict=True)
        return [data[first:last] if last > first >= 0 else b"" for first, last in places]

    def times(self) -> Iterator[ClusterTime]:
        """The cluster time of each event."""
        return map(ClusterTime, self.cluster_time.tolist())


class _OneEvent(EventBlock):
    """A block of one event. Its arrays are made only when one of them is asked for: sending a single event on needs
    none, and they cost a quarter of everything else that is done for an event."""

    __slots__ = ("_bson", "_event")

    _bson: bytes
    _event: ChangeEvent

    def __init__(self, event: ChangeEvent) -> None:
        object.__setattr__(self, "_event", event)
        object.__setattr__(self, "_bson", event.to_bson())

    def __getattr__(self, name: str) -> Any:
        """Called if a field has no value yet."""
        if name not in EventBlock.__slots__:
            raise AttributeError(name)
        number = _NUMBER.get(self._event.operation_type, 0)
        made = EventBlock._of([self._bson], [self._event.cluster_time], [number])
        for field in EventBlock.__slots__:
            object.__setattr__(self, field, getattr(made, field))
        return getattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return EventBlock, tuple(getattr(self, field) for field in EventBlock.__slots__)

    def __len__(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return len(self._bson)

    def event(self, index: int) -> bytes:
        return self._bson if index == 0 else super().event(index)

    def events(self) -> list[bytes]:
        return [self._bson]

    def token(self, index: int) -> bytes:
        is_own = index == 0 and self._event.replaced_by is None
        return self._event.token_bson if is_own else super().token(index)


def noted_places(blocks: Sequence[EventBlock]) -> list[Offsets] | None:
    """The ``places`` of each block, zeros where a block has none; ``None`` where no block has any."""
    known = next((block.places for block in blocks if block.places is not None), None)
    if known is None:
        return None
    width = known.shape[1]
    return [np.zeros((len(one), width), np.int64) if one.places is None else one.places for one in blocks]


def _places(event: bytes, start: int) -> tuple[int, int, int, int]:
    """Where the token and the namespace of an event are: four places, counted from ``start`` before the event."""
    token = raw_bson.find(event, b"_id")
    namespace = raw_bson.find(event, b"ns")
    found = [0, 0, 0, 0]
    for place, element in ((0, token), (2, namespace)):
        if element is not None and element.type == raw_bson.OBJECT:
            found[place : place + 2] = start + element.value_start, start + element.end
    return found[0], found[1], found[2], found[3]


def _cluster_time(event: bytes) -> int:
    element = raw_bson.find(event, b"clusterTime")
    if element is None or element.type != raw_bson.TIMESTAMP:
        return 0
    return ClusterTime.from_bytes_le(event[element.value_start : element.end])


def _operation(event: bytes) -> int:
    element = raw_bson.find(event, b"operationType")
    if element is None or element.type != raw_bson.STRING:
        return 0
    return _NUMBER.get(raw_bson.read_string(event, element.value_start).decode("utf-8", "replace"), 0)
