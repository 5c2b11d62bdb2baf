"""Finished events that wait for the merge: one participant's, in their order, and how those of several become one run.

They wait as blocks, and as lists where the router's stages have to see the events themselves. They are ordered by the
resume token, whose text begins with the cluster time: arrays of times decide most cases, and tokens are compared only
where two events have the same time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.event_block import OPERATION_TYPES, EventBlock, Offsets, PackedTimes
from tailrace.core.event.resume_token import ResumeToken, token_order
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.stage.split_large_event import SURELY_SMALL_BYTES, approximate_bytes

#: What an event costs in addition to its documents, alone and in a block.
_EVENT_BYTES: Final = 1_000
_ROW_BYTES: Final = 170

EventsPiece: TypeAlias = EventBlock | list[ChangeEvent]


class Place(NamedTuple):
    """Where something stands in the merged order. Places compare as the tokens do."""

    time: ClusterTime
    token: bytes

    @classmethod
    def of(cls, token: ResumeToken) -> Place:
        return cls(token.cluster_time, token_order(token.to_bson()))

    @classmethod
    def after(cls, time: ClusterTime) -> Place:
        """After all that has this time: tokens are hexadecimal digits."""
        return cls(time, b"\xff")


class WaitingEvents:
    """One participant's events, in order."""

    def __init__(self) -> None:
        self._pieces: deque[EventsPiece] = deque()
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: EventsPiece) -> None:
        if len(piece):
            self._pieces.append(piece)
            self.bytes += _size(piece)

    def clear(self) -> None:
        self._pieces.clear()
        self.bytes = 0

    @property
    def first(self) -> Place:
        return _place(self._pieces[0], 0)

    @property
    def last(self) -> Place:
        return _place(self._pieces[-1], -1)

    def events(self) -> Iterator[ChangeEvent]:
        """The events that wait in lists."""
        for piece in self._pieces:
            if not isinstance(piece, EventBlock):
                yield from piece

    def take(self, bound: Place) -> list[EventsPiece]:
        """The events up to the bound, inclusive, which wait no longer."""
        taken: list[EventsPiece] = []
        while self._pieces:
            piece = self._pieces[0]
            count = _count(piece, bound)
            if count:
                given, rest = _cut(piece, count)
                taken.append(given)
                self.bytes -= _size(given)
                if rest is not None:
                    self._pieces[0] = rest
                    break
                self._pieces.popleft()
            else:
                break
        return taken


def _size(piece: EventsPiece) -> int:
    if isinstance(piece, EventBlock):
        return piece.size + len(piece) * _ROW_BYTES
    return sum(_EVENT_BYTES + approximate_bytes(event) for event in piece)


def _place(piece: EventsPiece, index: int) -> Place:
    if isinstance(piece, EventBlock):
        return Place(ClusterTime(int(piece.cluster_time[index])), token_order(piece.token(index)))
    return _place_of(piece[index])


def _place_of(event: ChangeEvent) -> Place:
    return Place(event.cluster_time, token_order(event.token_bson))


def _count(piece: EventsPiece, bound: Place) -> int:
    """How many of the events stand at or before the bound."""
    if not isinstance(piece, EventBlock):
        return bisect_right(piece, bound, key=_place_of)
    time = np.uint64(bound.time)
    first = int(np.searchsorted(piece.cluster_time, time, side="left"))
    last = int(np.searchsorted(piece.cluster_time, time, side="right"))
    same = range(first, last)
    return first + bisect_right(same, bound.token, key=lambda index: token_order(piece.token(index)))


def _cut(piece: EventsPiece, count: int) -> tuple[EventsPiece, EventsPiece | None]:
    if count == len(piece):
        return piece, None
    if isinstance(piece, EventBlock):
        return piece.cut(0, count), piece.cut(count, len(piece))
    return piece[:count], piece[count:]


def merged_blocks(blocks: Sequence[EventBlock]) -> EventBlock:
    """The events of all blocks, each of one participant and in order, in the order of their tokens. Of equal tokens the
    block that is named first goes first."""
    whole = EventBlock.join(blocks)
    if len(blocks) == 1:
        return whole
    times = whole.cluster_time
    owners = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    order = np.lexsort((owners, times))
    for tied in _ties(times[order], owners[order]):
        order[tied] = list(_by_token(whole, order[tied], owners))
    return whole.take(order)


def _by_token(whole: EventBlock, events: Offsets, owners: Offsets) -> Iterator[int]:
    """Events of one time, in the order of their owners, merged by token. No owner's own order is changed."""
    groups = np.split(events, np.flatnonzero(np.diff(owners[events])) + 1)
    # Of equal tokens ``merge`` gives the one of the earlier group.
    return merge(*(group.tolist() for group in groups), key=lambda event: token_order(whole.token(event)))


def _ties(times: PackedTimes, owners: Offsets) -> Iterator[slice]:
    """Where events of one cluster time come from several owners. Both arrays are in the order of time, then owner."""
    done = 0
    for place in np.flatnonzero((np.diff(times) == 0) & (np.diff(owners) != 0)):
        if place < done:
            continue
        first = int(np.searchsorted(times, times[place], side="left"))
        done = int(np.searchsorted(times, times[place], side="right"))
        yield slice(first, done)


def merged_events(parts: Sequence[Sequence[EventsPiece]]) -> list[ChangeEvent]:
    """The same, as events one by one: what the router's stages take."""
    # Of equal tokens ``merge`` gives the one of the earlier part.
    return list(merge(*(_one_by_one(pieces) for pieces in parts), key=_place_of))


def _one_by_one(pieces: Sequence[EventsPiece]) -> Iterator[ChangeEvent]:
    for piece in pieces:
        yield from events_of(piece) if isinstance(piece, EventBlock) else piece


def events_of(block: EventBlock) -> list[ChangeEvent]:
    """A block's events in the form for stages that look at bytes and tokens only."""
    events = []
    parts = zip(block.events(), block.tokens(), block.times(), block.operation.tolist(), strict=True)
    for document, token, time, operation in parts:
        event = ChangeEvent(OPERATION_TYPES[operation], time, token)
        event.replaced_by = document
        events.append(event)
    return events


def block_is_surely_small(block: EventBlock) -> bool:
    """Whether each event is certainly within the limits of an event's size."""
    return not len(block) or int(np.diff(block.offsets).max()) < SURELY_SMALL_BYTES
