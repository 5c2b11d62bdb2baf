"""How listeners are doing, seen from outside: for metrics, health checks and systemd."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from pymongo.errors import PyMongoError

from tailrace.act.consumer.lease import LeaseStore
from tailrace.act.consumer.listening import ListenerBase
from tailrace.act.consumer.rules.health import HealthLimits, ListenerFacts, NewestTimes, judge
from tailrace.act.consumer.rules.lanes import LanePlan, lane_position, lane_resource, least
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.watching import oplogs_of
from tailrace.base.health import Health, whole
from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError
from tailrace.watch.client.client import Client, deployment_of, operation_time

LOOK_S: Final = 5.0
#: How long the end waits for a check that is under way.
_END_S: Final = 1.0


class ListenerLag(NamedTuple):
    """``seconds`` behind, ``None`` while that is unknown; ``holds``: of a listener that has the lease."""

    seconds: float | None
    holds: bool


class _LastAnswer:
    """When something answered last, and what was wrong then."""

    def __init__(self, whom: str, now: float) -> None:
        self._whom = whom
        self.at = now
        self._error: str | None = None

    def answered(self, now: float) -> None:
        self.at, self._error = now, None

    def failed(self, error: Exception) -> None:
        self._error = error.message if isinstance(error, TailraceError) else type(error).__name__

    def __str__(self) -> str:
        return f"from {self._whom}" + (f": {self._error}" if self._error else "")


class Standing:
    """Looks at the deployment and the lease store every few seconds, in a thread: ``with Standing(...) as standing``.
    A caller never waits: what was not answered shows as an age.

    ``listeners``  of one client and one store
    ``client``     of ``tailrace.connect()``: what they watch
    """

    def __init__(
        self,
        listeners: Sequence[ListenerBase],
        client: Client[Any],
        store: LeaseStore,
        *,
        limits: HealthLimits | None = None,
        every: float = LOOK_S,
    ) -> None:
        self.listeners = listeners
        self._client = client
        self._store = store
        self._limits = limits or HealthLimits()
        self._every = every
        self._times = NewestTimes()
        self._oldest: ClusterTime | None = None
        self._committed: dict[str, ClusterTime] = {}
        now = time.monotonic()
        self._deployment, self._leases = _LastAnswer("the deployment", now), _LastAnswer("the lease store", now)
        self._ended = threading.Event()
        self._thread = CheckedThread(self._run, "tailrace-standing")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            self.look()
            if self._ended.wait(self._every):
                return

    def look(self) -> None:
        """Check once. A failure shows in what is reported about the listeners."""
        try:
            self._look_at_deployment()
            self._deployment.answered(time.monotonic())
        except (TailraceError, PyMongoError) as error:
            self._deployment.failed(error)
        try:
            for listener in self.listeners:
                committed = committed_position(self._store, listener.resource)
                if committed is not None:
                    self._committed[listener.resource] = committed.cluster_time
            self._leases.answered(time.monotonic())
        except (TailraceError, PyMongoError) as error:
            self._leases.failed(error)

    def _look_at_deployment(self) -> None:
        deployment = deployment_of(self._client)
        if deployment is None:
            self._times.saw(operation_time(self._client).seconds)
            return
        sources = list(oplogs_of(deployment).values())
        self._times.saw(max(source.operation_time() for source in sources).seconds)
        oldest = [source.oldest() for source in sources]
        self._oldest = max((time for time, complete in oldest if not complete), default=None)

    def lag(self, listener: ListenerBase) -> ListenerLag:
        """Of one that holds the lease: by what it has handled. Of one that stands by: by what was committed."""
        held = [logic.statistics for logic in listener.logics if logic.statistics.lease_version]
        position = self._position(listener)
        if position is None:
            return ListenerLag(None, bool(held))
        lag = self._times.lag(position)
        if lag is None:
            return ListenerLag(None, bool(held))
        silence = time.monotonic() - self._deployment.at
        return ListenerLag(lag + (silence if silence > 2 * self._every else 0.0), bool(held))

    def _position(self, listener: ListenerBase) -> int | None:
        held = [logic.statistics for logic in listener.logics if logic.statistics.lease_version]
        if held:
            return min((one.position_time for one in held if one.position_time), default=None)
        committed = self._committed.get(listener.resource)
        return None if committed is None else committed.seconds

    def health(self) -> Health:
        """Of all listeners."""
        if self._thread.failure is not None:
            return Health("", unready=f"the listeners are no longer supervised: {self._thread.failure.message}")
        return whole(judge(self._facts(listener), self._limits) for listener in self.listeners)

    def _facts(self, listener: ListenerBase) -> ListenerFacts:
        now = time.monotonic()
        lag, position, oldest = self.lag(listener), self._position(listener), self._oldest
        owned = [one for one in (logic.ownership for logic in listener.logics) if one is not None]
        busy = [since for since in (one.busy_since for one in owned) if since is not None]
        lost = [one.lost.message for one in owned if one.lost is not None and one.busy_since is not None]
        silent = min((self._deployment, self._leases), key=lambda one: one.at)
        return ListenerFacts(
            listener.resource,
            begun=listener.has_begun,
            holds=lag.holds,
            busy_s=now - min(busy) if busy else None,
            lease_lost=lost[0] if lost else None,
            lag_s=lag.seconds,
            past_oplog=position is not None and oldest is not None and oldest.seconds > position,
            silence_s=now - silent.at,
            silence=str(silent),
        )


def committed_position(store: LeaseStore, resource: str) -> StreamPosition | None:
    """Up to where all is handled, by what is committed; of lanes, the one that is behind the others. Raises what the
    store raises."""
    record = store.read(resource)
    if record is None or record.position is None:
        return None
    if not LanePlan.is_plan(record.position):
        return StreamPosition.from_document(record.position, resource)
    plan = LanePlan.from_document(record.position, resource)
    return least(list(_places(store, resource, plan)))


def has_reached(store: LeaseStore, resource: str, until: ClusterTime) -> bool:
    """Whether everything before ``until`` is handled and committed, by whichever process: documents that are copied
    first too. Raises what the store raises."""
    record = store.read(resource)
    if record is None or record.position is None:
        return False
    if not LanePlan.is_plan(record.position):
        return _is_past(StreamPosition.from_document(record.position, resource), until)
    plan = LanePlan.from_document(record.position, resource)
    if plan.beginning is not None:
        return False
    return all(_is_past(place, until) for place in _places(store, resource, plan))


def _is_past(position: StreamPosition, until: ClusterTime) -> bool:
    return position.snapshot is None and position.cluster_time >= until


def _places(store: LeaseStore, resource: str, plan: LanePlan) -> Iterable[StreamPosition]:
    for lane in range(plan.lanes):
        name = lane_resource(resource, plan, lane)
        record = store.read(name)
        yield (None if record is None else lane_position(record.position, name)) or plan.start
