"""Calls under a short time limit, which a busy machine does not always keep."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from pymongo.errors import PyMongoError

PATIENCE_S = 300.0


def patiently(call: Callable[[], Any]) -> Any:
    """What a call gives, made again after a time-out."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except PyMongoError as error:
            if not error.timeout or time.monotonic() > deadline:
                raise


async def patiently_awaited(call: Callable[[], Awaitable[Any]]) -> Any:
    """The same of a coroutine."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except PyMongoError as error:
            if not error.timeout or time.monotonic() > deadline:
                raise
