"""Free ports of the loopback address."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from pathlib import Path

from tailrace.embedded.errors import EmbeddedError

LOOPBACK = "127.0.0.1"
_FIRST = 10_000
_TRIES = 200


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
    """A free port below the range that the kernel gives to outgoing connections.

    A member keeps its port while it is down. From the kernel's range, a client that tries to reconnect could be given
    the very port that it connects to, and would then be connected to itself and hold it.
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
        if port_is_free(port):
            return port
    raise EmbeddedError("No free port was found on the loopback address")
