"""An operator in a simulation, with the real ``LeaseOperations``. Everything else goes on between its requests, and now
and then it is killed in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from random import Random
from typing import Any, cast

from bson.timestamp import Timestamp

from tailrace.act.consumer.lease_operations import LeaseOperations
from tailrace.act.consumer.rules.errors import LeaseLost, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import UsageError

ACTIONS = ("pause", "resume", "seek", "seek", "skip", "skip", "release", "hand over", "delete")


class OperatorDiedError(Exception):
    """The operator's process is gone: it does nothing more, and does not clean up."""


class SteppedStore:
    """The store as the operator sees it. ``between`` lets the world go on before each request."""

    def __init__(
        self, store: Any, now: Callable[[], datetime], between: Callable[[], None], dies: Callable[[], bool]
    ) -> None:
        self._store = store
        self._now = now
        self._between = between
        self._dies = dies
        self._dead = False

    def _step(self) -> None:
        self._dead = self._dead or self._dies()
        if self._dead:
            raise OperatorDiedError
        self._between()

    def read(self, resource: str) -> Lease | None:
        self._step()
        return cast(Lease | None, self._store.read(resource))

    def amend(self, before: Lease | None, after: Lease) -> bool:
        self._step()
        return bool(self._store.amend(before, after))

    def remove(self, record: Lease) -> bool:
        """Check that nobody holds what would be removed. It is not removed, since a resource that begins anew has a
        history of its own."""
        self._step()
        self._store.check_removable(record)
        self._dead = True
        raise OperatorDiedError

    def release(self, lease: Lease) -> bool:
        self._step()
        with suppress(LeaseLost):
            self._store.release(lease)
        return True

    def leases(self) -> list[Lease]:
        self._step()
        return list(self._store.leases())

    def now(self) -> datetime:
        return self._now()


class Operator:
    """``act()`` does something at random. ``parts``: where a change may be left out."""

    def __init__(
        self,
        store: Any,
        random: Random,
        resource: str,
        *,
        between: Callable[[], None],
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        server_time: Callable[[], datetime],
        times: Callable[[], Sequence[int]],
        owners: Callable[[], Sequence[str]],
        parts: Callable[[], Sequence[str]],
    ) -> None:
        self._store = store
        self._random = random
        self._resource = resource
        self._between, self._sleep, self._clock = between, sleep, clock
        self._server_time = server_time
        self._times, self._owners, self._parts = times, owners, parts
        self.done: dict[str, int] = {}

    def act(self) -> None:
        action = self._random.choice(ACTIONS)
        store = SteppedStore(self._store, self._server_time, self._between, lambda: self._random.random() < 0.01)
        wait = self._random.choice((0.0, 5.0, 30.0))
        operations = LeaseOperations(cast(Any, store), wait_seconds=wait, sleep=self._sleep, clock=self._clock)
        with suppress(UsageError, LeaseStoreUnavailable, LeaseLost, OperatorDiedError):
            self._do(action, operations)
            self.done[action] = self.done.get(action, 0) + 1

    def _do(self, action: str, operations: LeaseOperations) -> None:
        now = self._random.random() < 0.3
        match action:
            case "pause":
                operations.pause(self._resource, now=now)
                self._store.check_unheld(operations.find(self._resource).lanes)
            case "resume":
                operations.resume(self._resource)
            case "seek":
                time = ClusterTime(self._random.choice(self._times())).to_timestamp()
                operations.seek(self._resource, StreamPosition(at=Timestamp(time.time, time.inc)))
            case "skip":
                operations.skip(self._random.choice(self._parts()), "any.letters", now=now)
            case "release":
                operations.release(self._resource)
            case "hand over":
                to = self._random.choice([*self._owners(), "nobody"])
                operations.release(self._resource, to, self._random.choice((1.0, 10.0, 60.0)))
            case "delete":
                operations.delete(self._resource)
