"""How long a caller wants to wait: ``pymongo.timeout(seconds)``, or the client's ``timeoutMS`` for each call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pymongo
from pymongo import _csot
from pymongo.errors import NetworkTimeout

from tailrace.errors import SourceError


class TimeLimitError(SourceError, NetworkTimeout):
    """The caller's time was over before there was an answer. The stream stays open, and its next call misses nothing.
    It is a ``pymongo.errors.NetworkTimeout`` too, because that is what PyMongo's own stream raises.
    """


def limit_s() -> float | None:
    """The seconds that the caller's whole call may take; ``None`` where there is no limit."""
    return _csot.get_timeout() or None


def remaining_s() -> float | None:
    """The seconds left of the caller's time, 0 at least; ``None`` where there is no limit."""
    left = _csot.remaining()  # PyMongo has no public name for what pymongo.timeout() set
    return None if left is None else max(0.0, left)


@contextlib.contextmanager
def time_limit_of(client: Any, own_ms: int | None = None) -> Iterator[None]:
    """Inside, the client's ``timeoutMS`` is the limit where ``pymongo.timeout()`` has set none.

    ``client``  a client of PyMongo's, of either flavour
    ``own_ms``  what the call itself says in place of the client: it holds within ``pymongo.timeout()`` too, where that
                leaves more. 0: no limit
    """
    limit = client.options.timeout if own_ms is None else own_ms / 1000
    if limit is None or (own_ms is None and _csot.get_timeout() is not None):
        yield
        return
    with pymongo.timeout(limit):
        yield


def check_time_limit(where: str) -> None:
    """Raises TimeLimitError where the caller's time is over."""
    if remaining_s() == 0.0:
        raise time_limit_exceeded(where)


def time_limit_exceeded(where: str) -> TimeLimitError:
    """The error that says so of ``where``, a replica set or its addresses."""
    return TimeLimitError(
        f"nothing came from {where} within the time limit (pymongo.timeout or timeoutMS)",
        hint="A stream that was already open is still open: ask again, or give it more time",
    )
