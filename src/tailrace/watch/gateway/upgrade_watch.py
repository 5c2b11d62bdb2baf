"""When a gateway asks its deployment for its version again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pymongo import MongoClient, ReadPreference

from tailrace.read.source.compatibility import ASK_AGAIN_S
from tailrace.read.source.member_version import PresentMember, present_member


class UpgradeWatch:
    """Asks for the version before a stream is opened, if it may be another one than the last time: because there are
    other processes of members, or because the feature compatibility version may have been set.

    ``client``  what the gateway's user has named
    ``ask``     gives the version
    """

    def __init__(self, client: MongoClient[Any], ask: Callable[[], Awaitable[str]]) -> None:
        self._client = client
        self._ask = ask
        #: The members' processes that were known when the version was asked last.
        self._asked_of: frozenset[PresentMember | None] = frozenset()
        self._asked_s = 0.0

    async def version(self, clients: Sequence[MongoClient[Any]]) -> str | None:
        """The version; ``None``: it need not be asked, or cannot be derived from what ``clients`` know."""
        present = frozenset(map(present_member, clients))
        if None in present or self._client.read_preference != ReadPreference.PRIMARY:
            return None
        now = time.monotonic()
        if present == self._asked_of and now - self._asked_s < ASK_AGAIN_S:
            return None
        self._asked_s = now
        version = await self._ask()
        self._asked_of = present
        return version
