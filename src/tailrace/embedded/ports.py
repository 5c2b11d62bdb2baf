"""Free ports of the loopback address, and no port for two processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from tailrace.embedded.errors import EmbeddedError

LOOPBACK = "127.0.0.1"
_FIRST = 10_000
_TRIES = 200

_mutex = threading.Lock()
_claimed: set[int] = set()  # by this process


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def port_becomes_free(port: int, *, timeout_s: float) -> bool:
    """Whether the port is free, or becomes free within ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not port_is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """A free port below the range that the kernel gives to outgoing connections. No other process of this user that
    asks here is given it, until this process gives it up (``give_up_port``) or ends: a server takes a second to listen,
    and a member keeps its port while it is down.

    From the kernel's range, a client that tries to reconnect could be given the very port that it connects to, and
    would then be connected to itself and hold it.
    """
    low = 32_768
    with contextlib.suppress(OSError, ValueError, IndexError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if low <= _FIRST + _TRIES:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            return int(probe.getsockname()[1])
    chooser = random.SystemRandom()
    for _ in range(_TRIES):
        port = chooser.randrange(_FIRST, low)
        if _claim(port):
            if port_is_free(port):
                return port
            give_up_port(port)
    raise EmbeddedError("No free port was found on the loopback address")


def give_up_port(port: int) -> None:
    """Let ``free_port`` give the port to others again. One that was not claimed is left alone."""
    with _mutex:
        if port not in _claimed:
            return
        _claimed.discard(port)
        file = _claims_file(os.getpid())
        if file is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_UN, 1, port)


def _claim(port: int) -> bool:
    with _mutex:
        if port in _claimed:
            return False
        file = _claims_file(os.getpid())
        if file is not None:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            except OSError:
                return False
        _claimed.add(port)
        return True


@cache
def _claims_file(pid: int) -> int | None:
    """The file whose byte N is locked by the process that has port N, opened once by each process: these locks end with
    the process however it ends, and are not handed down to a child. ``None`` where it cannot be opened: then ports are
    tried without."""
    del pid  # the cache's key: a child that was forked opens its own
    path = Path(tempfile.gettempdir()) / f"tailrace-ports-{os.getuid()}"
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return None
