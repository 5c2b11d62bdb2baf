"""The ids of the gateway's cursors."""

from __future__ import annotations

import secrets
from collections.abc import Iterator


def new_ids() -> Iterator[int]:
    """Like the server's: positive, of 63 random bits, so that none can be guessed and no two are equal."""
    while True:
        number = secrets.randbits(63)
        if number:
            yield number
