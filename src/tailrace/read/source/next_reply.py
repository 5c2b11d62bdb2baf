"""The replies of a cursor, one after another. While the caller works on a long one, the next is on its way."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from pymongo.errors import NetworkTimeout

from tailrace.errors import UsageError
from tailrace.read.source.raw_reply import RawReplyCursor
from tailrace.read.source.time_limit import remaining_s

#: After a shorter reply the next is asked for when it is wanted: a long one shows that more is there, so the server
#: will not wait for entries.
AHEAD_BYTES_MIN: Final = 1 << 19


class Replies:
    """The replies of ``cursor``, each empty where the cursor has nothing more now.

    ``ahead``  whether the one after a long one may be read in a thread meanwhile
    """

    def __init__(self, cursor: RawReplyCursor, *, ahead: bool) -> None:
        self.cursor = cursor
        self._may_read_ahead = ahead
        self._ahead: _Reply | None = None

    def next(self) -> bytes:
        """The next reply. Raises what PyMongo raises, and may wait as long as the cursor does."""
        raw: bytes = next(self.cursor, b"") if self._ahead is None else self._ahead.result()
        self._ahead = None
        return raw

    def given(self, raw: bytes) -> bytes:
        """``raw``, which is given to the caller now: the next reply may be read meanwhile.

        Not where the caller's time is limited: a later call has a limit of its own.
        """
        if self._may_read_ahead and len(raw) >= AHEAD_BYTES_MIN and self.cursor.alive and remaining_s() is None:
            self._ahead = _Reply(self.cursor)
        return raw

    def close(self) -> None:
        """Close the cursor. If a reply is still on its way, the thread that waits for it does so afterwards."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.is_done_or_closes():
            self.cursor.close()


class _Reply:
    """One reply, which is read in a thread."""

    def __init__(self, cursor: RawReplyCursor) -> None:
        self._cursor = cursor
        self._lock = threading.Lock()
        self._is_done = self._closes = False
        self._raw: bytes | None = None
        self._error: BaseException | None = None
        run: Callable[[], None] = self._run
        # A daemon: a process that ends does not wait for the network.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(run,), name="tailrace-next-reply", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self._raw = next(self._cursor, b"")
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
            self._error = error
        with self._lock:
            self._is_done = True
        if self._closes:
            with suppress(Exception):  # nobody is left to be told
                self._cursor.close()

    def result(self) -> bytes:
        """Raises NetworkTimeout where the caller's time is over first, as PyMongo does; UsageError in a process that
        was forked meanwhile, which has no such thread; and what PyMongo raises."""
        self._thread.join(remaining_s())
        if self._thread.is_alive():
            raise NetworkTimeout("timed out")
        if self._error is not None:
            raise self._error
        if self._raw is None:
            raise UsageError(
                "the stream was opened in the process that this one was forked from, which was reading for it",
                hint="Open a stream of its own in each process, after the fork",
            )
        return self._raw

    def is_done_or_closes(self) -> bool:
        """Whether the reply has come. If it has not, the cursor is closed once it has."""
        with self._lock:
            self._closes = not self._is_done
            return self._is_done
