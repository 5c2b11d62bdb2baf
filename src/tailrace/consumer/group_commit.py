"""Commits of several lanes in few requests.

A server makes writes durable in groups: writes that arrive while one group is being written go into the next. So up to
``REQUESTS_MAX`` requests are on their way at a time, each on a connection of its own. Further lanes wait, and when a
request has been answered, one of them sends the next request for all commits that have come meanwhile. A lane still
handles its next change only after its own commit. What was measured: ``docs/design/consumer.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from tailrace.consumer.lease import CommitsTogether, Lease, LeaseCommit, LeaseStore
from tailrace.errors import InternalError, SinkError, UsageError

#: Requests on their way at a time. With only one, lanes would wait for each other; with many, each would cost the
#: server and the client as much as one for all.
REQUESTS_MAX: Final = 4


class _WaitingCommit:
    """One lane's commit. ``woken`` is released when it is done, or when its thread has to send ``batch``."""

    __slots__ = ("batch", "commit", "error", "woken")

    def __init__(self, commit: LeaseCommit) -> None:
        self.commit = commit
        self.batch: list[_WaitingCommit] = []
        self.error: BaseException | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


class GroupCommit:
    """``commit()`` as in a LeaseStore, for several threads, each with a resource of its own. It has no thread: of the
    lanes that share a request, the one that has waited longest sends it."""

    def __init__(self, store: LeaseStore, *, requests_max: int = REQUESTS_MAX) -> None:
        self._store = store
        self._together = store if isinstance(store, CommitsTogether) else None
        self._requests_left = requests_max
        self._lock = threading.Lock()
        self._waiting: list[_WaitingCommit] = []

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> None:
        """See LeaseStore."""
        if self._together is None:
            self._store.commit(lease, position, seconds)
            return
        mine = _WaitingCommit(LeaseCommit(lease, position, seconds))
        with self._lock:
            if self._requests_left:
                self._requests_left -= 1
                mine.batch = [mine]
            else:
                self._waiting.append(mine)
        if not mine.batch:
            mine.woken.acquire()
        if mine.batch:
            self._send(mine.batch, self._together)
        if mine.error is not None:
            raise mine.error

    def _send(self, batch: list[_WaitingCommit], store: CommitsTogether) -> None:
        errors: list[BaseException | None]
        try:
            errors = list(store.commit_together([waiting.commit for waiting in batch]))
            if len(errors) != len(batch):
                raise InternalError(f"{len(errors)} answers to {len(batch)} commits")
        except (SinkError, UsageError) as error:
            # Each thread raises one of its own: a traceback is added to it.
            errors = [type(error)(error.message, code=error.code, hint=error.hint) for _ in batch]
        except BaseException as error:
            self._answer(batch, [InternalError(f"the commit failed: {error!r}") for _ in batch])
            raise
        self._answer(batch, errors)

    def _answer(self, batch: list[_WaitingCommit], errors: list[BaseException | None]) -> None:
        with self._lock:
            following, self._waiting = self._waiting, []
            if not following:
                self._requests_left += 1
        if following:
            following[0].batch = following
            following[0].woken.release()
        for waiting, error in zip(batch, errors, strict=True):
            waiting.error = error
            if waiting is not batch[0]:  # whose thread this is
                waiting.woken.release()
