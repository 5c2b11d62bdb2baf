"""The event loop takes what the server pushes to the shared read, in place of the reader's thread.

A thread that wakes for each reply and then wakes the loop costs more than the work itself: two system calls to wake the
loop, and contention for the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable


class LoopAttendant:
    """A ``tailrace.tail.reader.Attendant`` for the loop in which it is made.

    ``when``  asked each time: whether the loop is to take replies now
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, when: Callable[[], bool]) -> None:
        self._loop = loop
        self._when = when
        self._closed = False
        self._attended: dict[int, threading.Event] = {}

    def attend(self, file: socket.socket, turn: Callable[[], bool]) -> None:
        """See ``tailrace.tail.reader.Attendant``."""
        if self._closed or not self._when():
            return
        ended = threading.Event()
        try:
            self._loop.call_soon_threadsafe(self._begin, file, turn, ended)
        except RuntimeError:  # the loop has ended
            return
        ended.wait()

    def close(self) -> None:
        """Give everything back to the threads. In the loop."""
        self._closed = True
        for number in list(self._attended):
            self._end(number)

    def _begin(self, file: socket.socket, turn: Callable[[], bool], ended: threading.Event) -> None:
        if self._closed:
            ended.set()
            return
        number = file.fileno()
        self._attended[number] = ended
        self._loop.add_reader(number, self._turn, number, turn)

    def _turn(self, number: int, turn: Callable[[], bool]) -> None:
        if not turn():
            self._end(number)

    def _end(self, number: int) -> None:
        self._loop.remove_reader(number)
        self._attended.pop(number).set()
