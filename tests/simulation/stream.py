"""The change stream of a run: recorded events that appear one after the other, and positions at which it can be
opened."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from random import Random
from typing import Any

from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.need import Pulled
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost, TailraceError
from tests.simulation.recorded import RecordedEvent
from tests.simulation.schedule import Schedule


class History:
    """What has happened so far: event ``i`` is there from ``appears[i]`` on."""

    def __init__(self, schedule: Schedule, events: tuple[RecordedEvent, ...], seconds: float) -> None:
        self.schedule = schedule
        self.random = Random(f"lost {len(events)} {events[0].number}")
        self.events = events
        self.appears = sorted(schedule.random.uniform(0, seconds) for _ in events)
        self.orders = [event.order for event in events]
        self.times = [event.time for event in events]
        #: How many of the first events are lost.
        self.lost = 0

    @property
    def there(self) -> int:
        """How many events there are now."""
        return bisect_right(self.appears, self.schedule.now)

    def time(self) -> ClusterTime:
        """The present cluster time: that of the last event so far, or just before the first one."""
        return ClusterTime(self.times[self.there - 1]) if self.there else ClusterTime(self.times[0] - 1)

    def oldest(self) -> Timestamp:
        return ClusterTime(self.times[self.lost]).to_timestamp()

    def truncate(self) -> None:
        """The oplog loses its oldest entries. Those of one time go together, and the last one stays."""
        until = max(self.lost, min(self.there, self.lost + self.random.randint(1, 4), len(self.events) - 1))
        while until and self.times[until] == self.times[until - 1]:
            until -= 1
        self.lost = max(self.lost, until)

    def first_after(self, position: StreamPosition) -> int:
        """The number of the first event that a stream at ``position`` gives."""
        if position.token is not None:
            return bisect_right(self.orders, ResumeToken.parse(position.token).sort_key)
        if position.at is None:
            raise AssertionError("a position without a place")
        return bisect_left(self.times, int(ClusterTime.from_timestamp(position.at)))


class SimulatedStream:
    """One process's stream."""

    def __init__(self, history: History, position: StreamPosition) -> None:
        self._history = history
        self._next = history.first_after(position)
        self._check_history()
        self._ended = False
        before = history.events[self._next - 1] if self._next else None
        if before is not None and before.invalidate and position.token == before.token and not position.start_after:
            raise AssertionError("a stream cannot be resumed after its invalidate, only started")

    def _check_history(self) -> None:
        if self._next < self._history.lost:
            raise ChangeStreamHistoryLost("the oplog has lost what follows")

    def pull(self, refuses: Callable[[], TailraceError | None]) -> Pulled:
        """The next event. ``refuses``: why the stream cannot give it, if so; then it ends."""
        if self._ended:
            return Pulled(None, None, alive=False)
        self._check_history()
        if self._next < self._history.there:
            event = self._history.events[self._next]
            self._next += 1
            error = refuses()
            if error is not None:
                self._ended = True
                return Pulled(event, event.token, event.invalidate, alone=True, error=error)
            self._ended = event.invalidate
            return Pulled(event, event.token, event.invalidate, alone=event.invalidate)
        return Pulled(None, self._high_water())

    def _high_water(self) -> Any:
        time = self._history.time().tick() if self._next else self._history.time()
        following = self._history.times[self._next] if self._next < len(self._history.times) else None
        if following is not None and time > following:
            return self._history.events[self._next - 1].token if self._next else None
        return ResumeToken.high_water_mark(time).to_document()
