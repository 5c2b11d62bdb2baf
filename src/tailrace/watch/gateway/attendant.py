"""The event loop receives what the server pushes to the shared read, instead of the reader's thread.

A thread that wakes for each reply and then wakes the loop costs more than the work itself: two system calls to wake the
loop, and contention for the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

#: How long the loop keeps a connection; then its thread reads one reply. A server that is well pushes one each
#: second at least. One that hangs pushes nothing: PyMongo gives up such a member in time, but only if it is asked.
_KEEP_S: Final = 5.0

_log = logging.getLogger("tailrace.gateway")


class LoopAttendant:
    """A ``tailrace.read.tail.reader.Attendant`` for the loop in which it is made.

    ``when``    asked each time: whether the loop is to take replies now
    ``keep_s``  after how many seconds the connection goes back to its thread, for one reply at least
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, when: Callable[[], bool], *, keep_s: float = _KEEP_S) -> None:
        self._loop = loop
        self._when = when
        self._keep_s = keep_s
        self._closed = False
        self._attended: dict[int, threading.Event] = {}

    def attend(self, file: socket.socket, turn: Callable[[], bool]) -> None:
        """See ``tailrace.read.tail.reader.Attendant``."""
        if self._closed or not self._when():
            return
        ended, number = threading.Event(), file.fileno()
        try:
            self._loop.call_soon_threadsafe(self._begin, number, turn, ended)
            while not ended.wait(self._keep_s):
                self._loop.call_soon_threadsafe(self._give_back, number, ended)
        except RuntimeError:  # the loop has ended
            return

    def close(self) -> None:
        """Give everything back to the threads. In the loop."""
        self._closed = True
        for number in list(self._attended):
            self._end(number)

    def _begin(self, number: int, turn: Callable[[], bool], ended: threading.Event) -> None:
        if self._closed:
            ended.set()
            return
        try:
            self._loop.add_reader(number, self._turn, number, turn)
        except (OSError, RuntimeError) as error:
            self._closed = True
            _log.warning("the event loop cannot watch a connection, so threads do: %s", error)
            ended.set()
            return
        self._attended[number] = ended

    def _give_back(self, number: int, ended: threading.Event) -> None:
        if self._attended.get(number) is ended:
            self._end(number)

    def _turn(self, number: int, turn: Callable[[], bool]) -> None:
        if not turn():
            self._end(number)

    def _end(self, number: int) -> None:
        self._loop.remove_reader(number)
        self._attended.pop(number).set()
