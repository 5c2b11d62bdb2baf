"""``Listener``: the rules of ``rules.listener``, driven by threads."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from tailrace.act.consumer.listening import Handler, ListenerBase, OnError
from tailrace.act.consumer.rules.errors import LeaseDocumentError
from tailrace.errors import UsageError

__all__ = ["Handler", "Listener", "OnError"]


class Listener(ListenerBase):
    """Calls ``handler`` with every change of ``watchable``, in order, in one process at a time.

    Args:
        watchable: what to watch, from ``tailrace.connect()``: a client, a database or a collection
        handler: called with a ``Change``; when it returns, the change counts as handled. One that also has
            ``handle_batch`` (``rules.need.BatchHandler``) is given up to ``commit_every`` at a time
        resource: the lease's name: listeners with the same one take turns
        store: where leases and positions are kept (``MongoLeaseStore``)
        partitions: lanes: how many changes are handled at a time, in order for each document, by hash of its ``_id``.
            All listeners with the same resource share them; the last one to start decides how many there are. Each lane
            has a lease, a position and a fencing token of its own
        lane_key: with partitions, the key whose changes stay in order, instead of the document: a path in the event,
            such as ``"fullDocument.customer"``, or a function of the event (a dict) that returns a value. All lanes
            wait for a change that has none. By default the handler's own ``lane_key`` if it has one, such as that of an
            ``Outbox``. ``(new, old)`` if another function chose the lane until now
        commit_every: commit after this many changes. With n, up to n - 1 handled changes are handled again after a
            crash, and the effects of each must allow for that
        commit_interval: commit after this many seconds too
        commit_idle: on a quiet stream, write the position forward after this many seconds
        start: where to begin without a position: "oldest" entry of the oplog, "now", or "snapshot"
        on_history_lost: "fail" (the position stays), "gap" (continue at the oldest entry; the position keeps a record
            of the gap), "snapshot" (copy again; with partitions all lanes stop for it)
        on_invalidate: when what is watched is dropped or renamed: "fail", or "resume" and watch its name again
        on_error: "stop" when the handler raises; or a function of change, error and attempt (from 1) that returns
            "retry", "skip" (the function has kept the change elsewhere) or "stop"
        retries: how often a change is tried again before ``on_error`` is asked; a ``RetrySchedule`` also says after how
            long, for every retry
        handler_timeout: seconds after which a handler is assumed to hang and the lease is left to others; ``None``: the
            lease is kept however long the handler takes
        lease_seconds: how long after a crash others wait before they take over
        owner: this listener's id; no other listener may have the same
        fence_field: where targets of ``change.fence`` carry the fencing token

    Other keyword arguments are those of ``watch()``. A listener runs once: ``run()``, or ``start()`` and ``join()``."""

    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def run(self) -> None:
        """Listen in this thread until ``stop()``. Raises what ends it: HandlerFailed, StreamInvalidated,
        ChangeStreamHistoryLost, OwnerNotUnique, or what the stream or the store raise."""
        self._claim_run()
        if self._partitions != 1 or self._has_lanes():
            self._run_lanes(self._partitions)
            return
        try:
            self.run_alone()
        except LeaseDocumentError:
            if not self._has_lanes():
                raise
            self._run_lanes(None)  # others have divided the resource while this listener waited for its turn

    def _part(self, watchable: Any, **options: Any) -> Listener:
        """A listener with the same handler that a thread drives, such as that of one lane."""
        return Listener(watchable, self._handler, **options)

    def start(self) -> Self:
        """Listen in a thread of its own."""
        if self._thread is not None or self._begun:
            raise UsageError("a listener runs once", hint="Make a new one")
        self._thread = threading.Thread(target=self._run_quietly, name=f"listener {self.resource}", daemon=True)
        self._thread.start()
        return self

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of a started listener, ``timeout`` seconds at most. Returns whether it has ended; raises
        what ended it."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        if error is None:
            self.join()
        elif self._thread is not None:
            self._thread.join()

    def _run_quietly(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001  join() raises it
            self._error = error
