"""The thread that reads a stream once and gives each event to its lane's queue.

A reader begins at the earliest place of the lanes that follow it; what a lane has already had is left out. A lane whose
queue is full holds the reader only as long as no other lane waits for events with nothing to do: then it is *left
behind*, and read for again later (``LaneReaders``). A lane that was given away, for example to another process, does
not hold the reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from tailrace.act.consumer.event_stream import WholeEventStream
from tailrace.act.consumer.lane_queue import Item, LaneQueue, operation_of
from tailrace.act.consumer.rules.lane_key import BY_ID, LaneKeys, known_lane_key
from tailrace.act.consumer.rules.lanes import BARRIER_LANE, LanePlan, least
from tailrace.act.consumer.rules.large_events import Refused
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core import raw_bson
from tailrace.errors import TailraceError
from tailrace.watch.client.patience import try_next_patiently

#: How long, at most, a reader that waits for room sleeps before it checks whether it should stop.
_LOOK_S: Final = 0.1
#: How long, at most, a reader at the end of the stream rests while every lane has enough to do.
_REST_S: Final = 0.25

#: Opens the stream at a position. Its events are raw.
LaneOpener = Callable[[StreamPosition], WholeEventStream]


class LaneReader(threading.Thread):
    """Reads for ``queues`` until stopped, or until an error, which goes to them. ``keys`` are the LaneKeys that
    this process knows besides those that a plan's names tell."""

    def __init__(
        self,
        open_stream: LaneOpener,
        plan: LanePlan,
        queues: Mapping[int, LaneQueue],
        name: str,
        keys: LaneKeys = (BY_ID,),
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._open_stream = open_stream
        self._plan = plan
        self._keys = partial(known_lane_key, own=keys)
        self._key = self._keys(plan.key)
        self._queues = dict(queues)
        self._wanted = threading.Event()
        self._begin = least([queue.follow(self, self._wanted.set) for queue in self._queues.values()])
        self._floor_end = plan.floor_end
        self._stopping = threading.Event()
        self._stream: WholeEventStream | None = None
        self._last = b""
        #: Whether everything that there was has been read at least once.
        self.caught_up = False

    @property
    def lanes(self) -> frozenset[int]:
        """The lanes that follow this reader: not those that it left behind."""
        return frozenset(self._queues)

    def stop(self) -> None:
        """End the thread and its stream, as soon as the stream's wait is over. Does not wait for it."""
        self._stopping.set()
        self._wanted.set()
        stream = self._stream
        if stream is not None:
            stream.close()

    def run(self) -> None:
        try:
            begin = self._begin
            while not self._stopping.is_set() and self._queues:
                begin = self._read_from(begin)
        except BaseException as error:  # noqa: BLE001 - raised again where the lanes take events
            if not self._stopping.is_set():
                for queue in self._queues.values():
                    queue.fail(error, self)

    def _read_from(self, begin: StreamPosition) -> StreamPosition:
        """Read one stream to its end: an invalidation, after which the next one begins."""
        with self._open_stream(begin) as stream:
            self._stream = stream
            while stream.alive and self._queues:
                event = try_next_patiently(stream)
                if isinstance(event, Refused):
                    self._dispatch(event.event, event.error)
                    return StreamPosition(event.token, start_after=True)
                if event is not None:
                    self._dispatch(raw_bson.bytes_of(event))
                if self._stopping.is_set():
                    break  # the last event may not have been put
                if not stream.has_next and (mark := stream.resume_token) is not None:
                    self._mark(mark)
                    self.caught_up = self.caught_up or event is None
                    self._rest()
            token = stream.resume_token
            return begin if token is None else StreamPosition(token, start_after=True)

    def _rest(self) -> None:
        """Let the lanes work while each of them has enough to do.

        The lanes' own commits and writes are in the oplog too. Each of them wakes a reader that waits at its end, or
        the server, although there is nothing to read: this was measured as half of the process's time.
        """
        self._wanted.clear()
        if self._stopping.is_set():  # checked after clear(), which may have undone the call of stop()
            return
        if not any(queue.is_low for queue in self._queues.values()):
            self._wanted.wait(_REST_S)

    def _mark(self, token: Mapping[str, Any]) -> None:
        for queue in self._queues.values():
            queue.mark(token, self)

    def _dispatch(self, event: bytes, error: TailraceError | None = None) -> None:
        outlined = self._key.place(event)
        plan = self._plan
        # What several shards log at one time may have one token.
        repeats, self._last = outlined.order == self._last, outlined.order
        if outlined.hash is None and repeats:
            # All lanes wait at the first of these events; lane 0 handles those that follow it.
            lanes = [BARRIER_LANE] if BARRIER_LANE in self._queues and operation_of(event) != b"invalidate" else []
        elif outlined.hash is None:
            lanes = list(self._queues)
        else:
            lane = outlined.hash % plan.lanes
            if lane not in self._queues:
                return
            lanes = [lane]
        if outlined.order <= self._floor_end and plan.is_done(outlined, lambda name: self._keys(name).place(event)):
            return
        for lane in lanes:
            is_barrier = outlined.hash is None and not repeats
            self._put(lane, Item(outlined.order, event, is_barrier=is_barrier, error=error, repeats=repeats))

    def _put(self, lane: int, item: Item) -> None:
        queue = self._queues[lane]
        while not queue.put(item, self) and not self._stopping.is_set():
            others = {number: other for number, other in self._queues.items() if number != lane}
            if queue.is_closed or any(other.is_empty for other in others.values()):
                self._queues = others
                return
            queue.wait_for_room(_LOOK_S)


class LaneReaders:
    """The readers of one process: one in front, and one for lanes that are behind it, as long as there are any.

    A lane is behind when it was taken over from another process at an older place, or when its queue was full for so
    long that the front reader went on without it. Once what is behind has come to the end of the stream, all follow
    one reader again.
    """

    def __init__(self, open_stream: LaneOpener, plan: LanePlan, name: str, keys: LaneKeys = (BY_ID,)) -> None:
        for named in (plan.key, *(floor.key for floor in plan.floors)):
            known_lane_key(named, keys)
        self._keys = keys
        self._open_stream = open_stream
        self._plan = plan
        self._name = name
        self._queues: dict[int, LaneQueue] = {}
        self._front: LaneReader | None = None
        self._behind: LaneReader | None = None
        self._ending: list[LaneReader] = []
        self._lock = threading.Lock()

    def add(self, lane: int, queue: LaneQueue) -> None:
        """Read for the lane from now on, into ``queue``."""
        with self._lock:
            self._queues[lane] = queue

    def remove(self, lane: int, queue: LaneQueue) -> None:
        """Read for the lane no more."""
        queue.close()
        with self._lock:
            if self._queues.get(lane) is queue:
                del self._queues[lane]

    def step(self) -> None:
        """Look after the readers. Called again and again, by one thread at a time."""
        with self._lock:
            self._step()

    def _step(self) -> None:
        if self._front is not None and not self._followers(self._front):
            self._stop(self._front)
            self._front = None
        if self._behind is not None and (self._behind.caught_up or not self._followers(self._behind)):
            back = self._followers(self._behind)
            self._stop(self._behind)
            self._behind = None
            if back:
                front = self._followers(self._front)
                self._stop(self._front)
                self._front = self._started(front | back, "front")
        waiting = {
            lane
            for lane in self._queues.keys() - self._followers(self._front) - self._followers(self._behind)
            if self._queues[lane].is_hungry
        }
        if not waiting:
            return
        if self._front is None:
            self._front = self._started(waiting, "front")
        else:
            waiting |= self._followers(self._behind)
            self._stop(self._behind)
            self._behind = self._started(waiting, "behind")

    def _followers(self, reader: LaneReader | None) -> set[int]:
        lanes = frozenset[int]() if reader is None or not reader.is_alive() else reader.lanes
        return {lane for lane in lanes & self._queues.keys() if self._queues[lane].follows(reader)}

    def _started(self, lanes: set[int], role: str) -> LaneReader:
        queues = {lane: self._queues[lane] for lane in lanes}
        name = f"{self._name}-{role}"
        reader = LaneReader(self._open_stream, self._plan, queues, name, self._keys)
        reader.start()
        return reader

    def _stop(self, reader: LaneReader | None) -> None:
        if reader is not None:
            reader.stop()
            self._ending = [*(other for other in self._ending if other.is_alive()), reader]

    def close(self) -> None:
        """Stop all readers and wait for them."""
        with self._lock:
            for queue in self._queues.values():
                queue.close()
            self._stop(self._front)
            self._stop(self._behind)
            self._front = self._behind = None
        for reader in self._ending:
            reader.join()
