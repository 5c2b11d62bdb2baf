"""A lane as something to watch: its listener sees a change stream of the lane's own changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from bson.codec_options import DEFAULT_CODEC_OPTIONS, CodecOptions
from bson.timestamp import Timestamp

from tailrace.act.consumer.lane_queue import Item, LaneQueue
from tailrace.act.consumer.rules.errors import LaneHistoryLost, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lane_turn import LaneTurn
from tailrace.act.consumer.rules.lanes import order_of
from tailrace.act.consumer.rules.large_events import Refused, as_raw
from tailrace.act.consumer.rules.position import StreamPosition

#: How long one read of a quiet lane waits, and one check of the other lanes' places before a barrier.
_AWAIT_S: Final = 0.25
_BARRIER_LOOK_S: Final = 0.03


class _Readers(Protocol):
    def add(self, lane: int, queue: LaneQueue) -> None: ...
    def remove(self, lane: int, queue: LaneQueue) -> None: ...


class LaneWatchable:
    """What the listener of one lane watches.

    ``watchable``    what is watched in truth
    ``begin``        from a lane's position, the place to begin to read at
    ``places``       the committed places of all lanes
    ``ends``         called with the token at an invalidation that lane 0 has handled
    """

    def __init__(
        self,
        watchable: Any,
        lane: int,
        readers: _Readers,
        *,
        begin: Callable[[StreamPosition], StreamPosition],
        places: Callable[[], Sequence[bytes]],
        ends: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._watchable = watchable
        self._lane = lane
        self._readers = readers
        self._begin = begin
        self._places = places
        self._ends = ends

    @property
    def codec_options(self) -> CodecOptions[Any]:
        """Those of what is watched."""
        chosen: CodecOptions[Any] = getattr(self._watchable, "codec_options", DEFAULT_CODEC_OPTIONS)
        return chosen

    @property
    def watched(self) -> Any:
        """What is watched in truth: a client, a database or a collection."""
        return self._watchable

    def take_snapshot(self, _before: StreamPosition | None) -> StreamPosition:
        """Raises LaneHistoryLost: a lane is not copied alone."""
        raise LaneHistoryLost(f"the history of lane {self._lane} is lost, and everything is to be copied again")

    def watch(
        self,
        pipeline: Sequence[Mapping[str, Any]] | None = None,
        *,
        resume_after: Mapping[str, Any] | None = None,
        start_after: Mapping[str, Any] | None = None,
        start_at_operation_time: Timestamp | None = None,
        **_options: Any,
    ) -> LaneStream:
        """The lane from a position on. The options of the stream were settled for all lanes."""
        token = resume_after if start_after is None else start_after
        position = StreamPosition(token, start_after is not None, start_at_operation_time if token is None else None)
        queue = LaneQueue(position, self._begin(position))
        turn = LaneTurn(self._lane, order_of(position), self._places, self._ends)
        self._readers.add(self._lane, queue)
        return LaneStream(queue, turn, lambda: self._readers.remove(self._lane, queue))


class LaneStream:
    """The part of a ChangeStream that a listener uses. What it raises ends it, and ``alive`` is false then: whoever
    waits patiently for a stream to resume itself would wait for ever. Only a store that does not answer is asked
    again."""

    def __init__(self, queue: LaneQueue, turn: LaneTurn, close: Callable[[], None]) -> None:
        self._queue = queue
        self._turn = turn
        self.close = close
        self.alive = True
        self._mark: Mapping[str, Any] | None = None
        self._asleep = threading.Event()

    @property
    def resume_token(self) -> Mapping[str, Any] | None:
        """Up to where nothing comes for the lane; ``None`` where that is not further than before."""
        return self._mark

    @property
    def has_next(self) -> bool:
        """Whether the lane's next event is here already."""
        return not self._turn.is_waiting and not self._queue.is_empty

    def try_next(self) -> Any | None:
        """The lane's next event, raw; ``None`` while there is none, or while the lane waits at a barrier."""
        item: Item | None = None
        try:
            if self._turn.is_waiting:
                self._asleep.wait(_BARRIER_LOOK_S)
            else:
                item = self._queue.take(_AWAIT_S)
            pulled = self._turn.pull(item, self._queue.take_mark)
        except LeaseStoreUnavailable:
            raise
        except BaseException:
            self.alive = False
            raise
        self._mark = pulled.token
        if pulled.error is not None and pulled.token is not None:
            return Refused(pulled.token, pulled.event, pulled.error)
        return as_raw(pulled.event) if isinstance(pulled.event, bytes) else pulled.event
