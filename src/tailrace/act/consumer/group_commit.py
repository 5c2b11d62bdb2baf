"""Commits of several lanes in few requests.

Lanes that commit at about the same time share a request (``rules.gathering``): one of them sends it for all. Where no
other lane is quick, a lane sends its own at once; up to ``REQUESTS_MAX`` requests are on their way at a time, each on a
connection of its own. Further lanes wait until one of them has been answered. A lane still handles its next change only
after its own commit. What was measured: ``docs/design/consumer.md``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from tailrace.act.consumer.lease import CommitsTogether, Lease, LeaseCommit, LeaseStore, commits_together
from tailrace.act.consumer.rules.gathering import Gathering
from tailrace.errors import InternalError, SinkError, UsageError

#: Requests on their way at a time. With only one, slow lanes would wait for each other; with many, each would cost the
#: server and the client as much as one for all.
REQUESTS_MAX: Final = 4
_FOR_EVER: Final = -1.0


class _WaitingCommit:
    """One lane's commit. ``woken`` is released when its thread has to look again: the commit ``is_done``, the thread
    has to send ``batch``, or the time for which it may wait has changed."""

    __slots__ = ("batch", "came", "commit", "error", "is_done", "woken")

    def __init__(self, commit: LeaseCommit) -> None:
        self.commit = commit
        self.came = time.monotonic()
        self.batch: list[_WaitingCommit] = []
        self.is_done = False
        self.error: BaseException | None = None
        self.woken = threading.Lock()
        self.woken.acquire()

    @property
    def is_waiting(self) -> bool:
        return not self.batch and not self.is_done


class GroupCommit:
    """``commit()`` as in a LeaseStore, for several threads, each with a resource of its own. It has no thread: of the
    lanes that share a request, one sends it.

    While commits wait and a request may be sent, the first of them waits for a limited time; the others are woken.
    """

    def __init__(self, store: LeaseStore, *, requests_max: int = REQUESTS_MAX) -> None:
        self._store = store
        self._together = commits_together(store)
        self._requests_left = requests_max
        self._lock = threading.Lock()
        self._waiting: list[_WaitingCommit] = []
        self._gathering = Gathering()

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> None:
        """See LeaseStore."""
        if self._together is None:
            self._store.commit(lease, position, seconds)
            return
        mine = _WaitingCommit(LeaseCommit(lease, position, seconds))
        with self._lock:
            self._gathering.note_commit(lease.resource, mine.came)
            self._waiting.append(mine)
            timeout = self._look(mine)
        while mine.is_waiting:
            mine.woken.acquire(timeout=timeout)
            if mine.is_waiting:
                with self._lock:
                    timeout = self._look(mine)
        if mine.batch:
            self._send(mine.batch, self._together)
        if mine.error is not None:
            raise mine.error

    def _look(self, mine: _WaitingCommit) -> float:
        """Let ``mine`` send what is waiting if it is time to; else, how many seconds its thread waits at most."""
        if not self._requests_left or mine not in self._waiting:
            return _FOR_EVER
        left = self._gathering.wait(self._waiting[0].came, time.monotonic())
        if left <= 0:
            self._give_batch(mine)
            return _FOR_EVER
        return left if mine is self._waiting[0] else _FOR_EVER

    def _give_batch(self, sender: _WaitingCommit) -> None:
        """Everything that is waiting goes out in one request, of which ``sender`` is the first."""
        self._requests_left -= 1
        sender.batch = [sender, *(waiting for waiting in self._waiting if waiting is not sender)]
        self._waiting = []
        self._gathering.note_sent(waiting.commit.lease.resource for waiting in sender.batch)

    def _send(self, batch: list[_WaitingCommit], store: CommitsTogether) -> None:
        errors: list[BaseException | None]
        begun: float | None = time.monotonic()
        try:
            errors = list(store.commit_together([waiting.commit for waiting in batch]))
            if len(errors) != len(batch):
                raise InternalError(f"{len(errors)} answers to {len(batch)} commits")
        except (SinkError, UsageError) as error:
            # Each thread raises one of its own: a traceback is added to it.
            errors = [type(error)(error.message, code=error.code, hint=error.hint) for _ in batch]
            begun = None
        except BaseException as error:
            self._answer(batch, [InternalError(f"the commit failed: {error!r}") for _ in batch], None)
            raise
        self._answer(batch, errors, begun)

    def _answer(self, batch: list[_WaitingCommit], errors: list[BaseException | None], begun: float | None) -> None:
        with self._lock:
            self._requests_left += 1
            self._gathering.note_answered((waiting.commit.lease.resource for waiting in batch), begun, time.monotonic())
            for waiting, error in zip(batch, errors, strict=True):
                waiting.error, waiting.is_done = error, True
            first = self._waiting[:1]
            for waiting in first:
                self._look(waiting)
            for waiting in (*batch[1:], *first):  # the thread of batch[0] is this one
                if waiting.woken.locked():  # else it has been woken and has not looked yet
                    waiting.woken.release()
