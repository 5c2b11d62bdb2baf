"""Threads whose end is known: what ended one is kept, reported, and raised where somebody waits for it.

Code that starts a thread, a process or a task in another way is on the list of ``tests/tidy/test_threads.py``, with the
reason why its end is known there too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tailrace.errors import InternalError, TailraceError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class CheckedThread(threading.Thread):
    """Does ``work`` in a daemon thread.

    ``failed``  called in the thread with what ended it, if anything did: ``work`` may raise whatever it likes. Without
                it a failure is logged, in one line
    """

    def __init__(
        self, work: Callable[[], Any], name: str, *, failed: Callable[[TailraceError], None] | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._failed = failed
        self.failure: TailraceError | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is told
            self.failure = known_error(error, self.name)
            if self._failed is not None:
                self._failed(self.failure)
            else:
                _log.warning("the thread %s has failed: %s", self.name, self.failure)

    def check(self) -> None:
        """Wait for its end, and raise what ended it."""
        self.join()
        if self.failure is not None:
            raise self.failure


def known_error(error: BaseException, where: str) -> TailraceError:
    """``error`` if Tailrace has raised it on purpose. Anything else is our own bug, which names its kind, and
    ``where`` it came up; the error itself is its cause, with its traceback."""
    if isinstance(error, TailraceError):
        return error
    known = InternalError(f"{type(error).__name__} in {where}: {error}")
    known.__cause__ = error
    return known


def told(work: Future[_T], complaint: str) -> Future[_T]:
    """``work``, whose outcome nobody waits for; ``complaint`` and its error are logged where it fails."""

    def look(done: Future[_T]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            _log.warning("%s: %s: %s", complaint, type(error).__name__, error)

    work.add_done_callback(look)
    return work
