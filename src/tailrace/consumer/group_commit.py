"""One request for the commits of several lanes: they wait for the majority once, and not one after the other.

A server makes writes durable in groups: a write that arrives while a group is on its way waits for the next one. So
four lanes that commit separately are hardly twice as fast as one (measured; ``docs/design/consumer.md``), and in one
request they are four times as fast. A lane still handles its next change only after its own commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from tailrace.consumer.lease import CommitsTogether, Lease, LeaseCommit, LeaseStore
from tailrace.errors import InternalError, SinkError, UsageError

#: A request waits for lanes that were quick the last time for half as long as a request takes, and never longer.
_GATHER_OF: Final = 0.5
_GATHER_MAX_S: Final = 0.005


class _WaitingCommit:
    """One lane's commit. ``woken`` is released when it is done, or when its thread has to send the next request."""

    __slots__ = ("commit", "done", "error", "woken")

    def __init__(self, commit: LeaseCommit) -> None:
        self.commit = commit
        self.done = False
        self.error: BaseException | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


class GroupCommit:
    """``commit()`` as in a LeaseStore, for several threads, each with a resource of its own.

    It has no thread: of the lanes that wait, the first one sends for all. One request is on its way at a time, and the
    next one takes everything that has come meanwhile.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._together = store if isinstance(store, CommitsTogether) else None
        self._lock = threading.Lock()
        self._waiting: list[_WaitingCommit] = []
        self._leader: _WaitingCommit | None = None
        self._is_gathering = False
        #: When a resource's last commit was answered, by ``time.monotonic``.
        self._answered: dict[str, float] = {}
        #: Resources of the last request whose lanes were quick the time before: the next request waits for them.
        self._expected: set[str] = set()
        self._quick: set[str] = set()
        self._gather_s = 0.0

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> None:
        """See LeaseStore."""
        if self._together is None:
            self._store.commit(lease, position, seconds)
            return
        waiting = _WaitingCommit(LeaseCommit(lease, position, seconds))
        if not self._joins(waiting):
            waiting.woken.acquire()
        if not waiting.done:
            self._lead(waiting, self._together)
        if waiting.error is not None:
            raise waiting.error

    def _joins(self, waiting: _WaitingCommit) -> bool:
        """Wait with the others. Whether this one has to send."""
        resource, now = waiting.commit.lease.resource, time.monotonic()
        with self._lock:
            if now - self._answered.get(resource, 0.0) <= self._gather_s:
                self._quick.add(resource)
            else:
                self._quick.discard(resource)
            self._expected.discard(resource)
            self._waiting.append(waiting)
            if self._leader is None:
                self._leader = waiting
                return True
            if self._is_gathering and not self._expected:
                self._is_gathering = False
                self._leader.woken.release()
            return False

    def _lead(self, leader: _WaitingCommit, store: CommitsTogether) -> None:
        batch = self._gathered(leader)
        begun = time.monotonic()
        errors: list[BaseException | None]
        try:
            errors = list(store.commit_together([waiting.commit for waiting in batch]))
            if len(errors) != len(batch):
                raise InternalError(f"{len(errors)} answers to {len(batch)} commits")
        except (SinkError, UsageError) as error:
            # Each thread raises one of its own: a traceback is added to it.
            errors = [type(error)(error.message, code=error.code, hint=error.hint) for _ in batch]
        except BaseException as error:
            self._answer(batch, [InternalError(f"the commit failed: {error!r}") for _ in batch], begun)
            raise
        self._answer(batch, errors, begun)

    def _gathered(self, leader: _WaitingCommit) -> list[_WaitingCommit]:
        """The commits for one request; waits for those that are about to come."""
        with self._lock:
            self._is_gathering = bool(self._expected)
        if self._is_gathering:
            leader.woken.acquire(timeout=self._gather_s)
        with self._lock:
            if not self._is_gathering:
                leader.woken.acquire(blocking=False)  # it may have been released when the time was over
            self._is_gathering = False
            self._expected.clear()
            batch, self._waiting = self._waiting, []
            return batch

    def _answer(self, batch: list[_WaitingCommit], errors: list[BaseException | None], begun: float) -> None:
        now = time.monotonic()
        with self._lock:
            self._gather_s = min(_GATHER_MAX_S, 0.9 * self._gather_s + 0.1 * _GATHER_OF * (now - begun))
            for waiting, error in zip(batch, errors, strict=True):
                waiting.error, waiting.done = error, True
                self._answered[waiting.commit.lease.resource] = now
            self._expected = {waiting.commit.lease.resource for waiting in batch} & self._quick
            self._leader = leader = self._waiting[0] if self._waiting else None
        for waiting in batch:
            waiting.woken.release()
        if leader is not None:
            leader.woken.release()
