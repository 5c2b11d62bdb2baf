"""Notifying systemd that the process has started, that it lives, and that it ends: through its datagram socket, and
only where systemd has named one (``Type=notify``)."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from tailrace.base.health import Health
from tailrace.base.threads import CheckedThread

#: How often the status is checked without a watchdog. With one: twice in its time.
_LOOK_S: Final = 1.0
#: A status in which only numbers have changed is not sent again.
_NUMBER: Final = re.compile(r"[\d.]+")

_log = logging.getLogger(__name__)


class StatusReceiver(Protocol):
    """Who is notified: systemd, or a process that reports to systemd for several."""

    #: After how many seconds without a word the process is ended; ``None``: never.
    watchdog_s: float | None

    @property
    def is_there(self) -> bool:
        """Whether somebody wants to be notified."""

    def tell(self, *lines: str) -> None:
        """Send ``lines`` as one message. Nothing is raised."""


class ServiceManager:
    """The socket of ``NOTIFY_SOCKET``. Nobody needs to listen there: what cannot be sent is dropped."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.watchdog_s = self._watchdog(environment)

    @property
    def is_there(self) -> bool:
        """Whether somebody wants to be notified. (Other kinds of sockets are not supported.)"""
        return self._address[:1] in ("/", "@")

    @staticmethod
    def _watchdog(environment: Mapping[str, str]) -> float | None:
        """After how many seconds without a word systemd ends the process; ``None``: never."""
        given, owner = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        if not given.isdecimal() or not int(given) or (owner and owner != str(os.getpid())):
            return None
        return int(given) / 1_000_000

    def tell(self, *lines: str) -> None:
        """Send ``lines`` as one message."""
        address = self._address
        if not self.is_there:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.sendto("\n".join(lines).encode(), "\0" + address[1:] if address[0] == "@" else address)


@contextmanager
def notifying(health: Callable[[], Health], manager: StatusReceiver | None = None) -> Iterator[Callable[[], None]]:
    """Tell systemd, or another ``manager``, of ``health`` while the body runs: READY=1 once it has begun, WATCHDOG=1 as
    long as it lives, a status line, and STOPPING=1 at the end, or as soon as what is yielded is called. Does nothing
    without systemd."""
    told = ServiceManager(os.environ) if manager is None else manager
    if not told.is_there:
        yield lambda: None
        return
    ended = threading.Event()
    stopping = threading.Event()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            told.tell("STOPPING=1")

    thread = CheckedThread(lambda: _follow(told, health, ended, stopping), "tailrace-systemd")
    thread.start()
    try:
        yield stop
    finally:
        ended.set()
        thread.join()
        stop()


def _follow(
    manager: StatusReceiver, health: Callable[[], Health], ended: threading.Event, stopping: threading.Event
) -> None:
    """Messages until ``ended``. The watchdog is fed while the process stops, too: what is in hand is finished."""
    every = _LOOK_S if manager.watchdog_s is None else min(_LOOK_S, manager.watchdog_s / 3)
    told, fed, ready = "", 0.0, False
    while True:
        found = health()
        lines = []
        if found.begun and not ready and not stopping.is_set():
            ready = True
            lines.append("READY=1")
        status = found.trouble or found.said
        if (kind := _NUMBER.sub("", status)) != told:
            told = kind
            lines.append(f"STATUS={' '.join(status.splitlines())}")
        now = time.monotonic()
        if manager.watchdog_s is not None and found.dead is None and now - fed >= manager.watchdog_s / 3:
            fed = now
            lines.append("WATCHDOG=1")
        if lines:
            manager.tell(*lines)
        if ended.wait(every):
            return
