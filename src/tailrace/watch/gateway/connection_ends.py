"""What the log says about a connection that has ended."""

from __future__ import annotations

import asyncio
import logging
import traceback
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.watch.gateway.memory import ClosedConnection

_log = logging.getLogger("tailrace.gateway")


def tell_of_end(number: int, outcome: BaseException) -> None:
    """Log why the connection with this number was closed. Nothing is said about a client or server that has left."""
    match outcome:
        case asyncio.CancelledError() | ClosedConnection() | OSError() | EOFError() | TimeoutError():
            return
        case TailraceError():  # BadFrame among them
            _log.warning("connection %d was closed: %s", number, outcome)
        case _:
            where = traceback.extract_tb(outcome.__traceback__)[-1:]
            _log.error(
                "connection %d was closed by a fault of the gateway: %s%s",
                number,
                type(outcome).__name__,
                "".join(f" at {Path(each.filename).name}:{each.lineno}" for each in where),
                exc_info=outcome,
            )
