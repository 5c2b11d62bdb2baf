"""Why a program cannot listen at an address, and what to do about it."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from tailrace.errors import SinkError

_ADVICE: Final = {
    errno.EADDRINUSE: "Another program listens there: stop it, or ",
    errno.EACCES: "Ports below 1024 are for programs that have the right CAP_NET_BIND_SERVICE: grant it, or ",
    errno.EADDRNOTAVAIL: "This machine has no such address (0.0.0.0 stands for all that it has): ",
}


def bind_failure(what: str, host: str, port: int, error: OSError, another: str) -> SinkError:
    """``what``: "the console cannot listen at"; ``another``: what names another address, at the end of a sentence."""
    if isinstance(error, socket.gaierror):
        reason, advice = error.strerror, "No such name is known here: "
    else:
        # asyncio puts words of its own before the system's.
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = _ADVICE.get(error.errno or 0, "")
    hint = advice + another
    return SinkError(f"{what} {host}:{port}: {reason}", hint=hint[:1].upper() + hint[1:])
