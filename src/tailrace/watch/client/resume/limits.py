"""How long a stream's commands may wait (rule 31)."""

from __future__ import annotations


def get_more_wait_ms(
    max_await_time_ms: int | None, limit_s: float | None, left_s: float | None, round_trip_s: float
) -> int | None:
    """Rule 31: the ``maxTimeMS`` of a getMore, so that an empty reply arrives before the caller's time is over.
    ``None``: none is sent.

    ``limit_s``       of the caller's whole call; ``None``: no limit
    ``left_s``        what is left of it
    ``round_trip_s``  the shortest way to the server and back
    """
    if max_await_time_ms is None or limit_s is None or left_s is None or max_await_time_ms >= limit_s * 1000:
        # A caller that lets one look wait longer than a call may take gets a time-out from every quiet look, as from
        # PyMongo.
        return max_await_time_ms
    return max(1, min(max_await_time_ms, int((left_s - round_trip_s) * 1000)))


def waits_too_long(max_await_time_ms: int | None, timeout_ms: int | None) -> bool:
    """Rule 31: whether a look that finds nothing would outlast the time that each call on the stream was given."""
    return bool(timeout_ms) and max_await_time_ms is not None and max_await_time_ms >= (timeout_ms or 0)
