"""A thread that does one job at a time for a caller who does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tailrace.errors import InternalError, TailraceError


class Worker:
    """Does jobs, one at a time, on a thread of its own that the first job starts.

    ``changed``  notified (its lock held) when a job is done; several workers may share it

    The thread is a daemon: one that hangs on a dead server does not keep the program from ending.
    """

    def __init__(self, name: str, changed: threading.Condition) -> None:
        self._name = name
        self._changed = changed
        self._job: Callable[[], Any] | None = None
        self._outcome: tuple[Any, TailraceError | None] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None

    def submit(self, job: Callable[[], Any]) -> None:
        """Do ``job``, which may raise TailraceError and nothing else. The job before must be done."""
        with self._changed:
            if self._closed:
                return
            if self._job is not None:
                raise InternalError("a worker is given two jobs at a time")
            self._job, self._outcome = job, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def outcome(self) -> tuple[Any, TailraceError | None] | None:
        """What the last job gave and what it raised, once; ``None`` while it is under way or was asked for."""
        with self._changed:
            outcome, self._outcome = self._outcome, None
            return outcome

    def close(self) -> None:
        """No more jobs. Does not wait for one that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, after ``timeout_s`` at most."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._job is None and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._job
            result, failure = None, None
            try:
                result = job() if job is not None else None
            except TailraceError as error:
                failure = error
            except Exception as error:  # noqa: BLE001  must not end the thread silently
                failure = InternalError(f"{type(error).__name__} in {self._name}: {error}")
            with self._changed:
                self._job, self._outcome = None, (result, failure)
                self._changed.notify_all()
