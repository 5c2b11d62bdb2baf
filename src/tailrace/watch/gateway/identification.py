"""Who is logged in on one connection, as the server said last, and when it has to be asked again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import bson

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.watch.gateway.replies import is_ok
from tailrace.watch.gateway.rights import Identity, User
from tailrace.watch.gateway.rights_watch import RightsHeard

_STATUS: Final = bson.encode({"connectionStatus": 1, "showPrivileges": True, "$db": "admin"})
#: A command that only users who have logged in may run, if the deployment has access control.
_PROBE: Final = bson.encode(
    {
        "find": "system.version",
        "filter": {"_id": 0},
        "limit": 1,
        "singleBatch": True,
        "$db": "admin",
        "$readPreference": {"mode": "secondaryPreferred"},  # the server may be one that takes no writes
    }
)
#: The rights of at most this many sets of users are remembered.
_RIGHTS_MAX: Final = 1000
_ANY_TIME: Final = ClusterTime(0)


@dataclass(frozen=True, slots=True)
class _Told:
    """What the server said: ``asked`` when, by the monotonic clock, and after how many changes of rights."""

    identity: Identity
    asked: float
    generation: int

    def holds(self, heard: RightsHeard, age_seconds: float, until: ClusterTime) -> bool:
        is_of_now = self.generation == heard.generation and heard.until >= until
        return is_of_now and time.monotonic() - self.asked <= age_seconds


class KnownRights:
    """The last answers about each set of users, for all connections of a gateway."""

    def __init__(self) -> None:
        self._told: dict[frozenset[User], _Told] = {}

    def get(self, users: frozenset[User]) -> _Told | None:
        return self._told.get(users)

    def add(self, told: _Told) -> None:
        if len(self._told) >= _RIGHTS_MAX:
            self._told.clear()
        self._told[told.identity.users] = told


class Identification:
    """``ask`` puts a question of ours on the connection; ``heard`` says which changes of rights are known."""

    def __init__(
        self, ask: Callable[[bytes], Awaitable[bytes]], known: KnownRights, heard: Callable[[], RightsHeard]
    ) -> None:
        self._ask = ask
        self._known = known
        self._heard = heard
        self._told: _Told | None = None
        #: Whether the deployment lets everybody do everything; ``None``: it was not asked.
        self.asks_nobody: bool | None = None

    @property
    def last(self) -> Identity | None:
        """Who was logged in when the server was asked last; ``None``: it was not asked, or somebody may have logged in
        since."""
        return None if self._told is None else self._told.identity

    def forget(self) -> None:
        """Somebody may have logged in or out."""
        self._told = None

    def known(self, age_seconds: float, until: ClusterTime = _ANY_TIME) -> Identity | None:
        """As ``identity``, where the server need not be asked; ``None``: it has to be."""
        told = self._told
        if told is None or told.identity.may_all:
            return None if told is None else told.identity
        heard = self._heard()
        if told.holds(heard, age_seconds, until):
            return told.identity
        # Another connection of the same users may have asked since.
        others = self._known.get(told.identity.users)
        if others is not None and others.holds(heard, age_seconds, until):
            self._told = others
            return others.identity
        return None

    async def identity(self, age_seconds: float, until: ClusterTime = _ANY_TIME) -> Identity:
        """Who is logged in here and what they may do, from an answer of the server no older than this, and with every
        change of rights that the oplog has up to ``until``."""
        if (known := self.known(age_seconds, until)) is not None:
            return known
        heard = self._heard()
        asked = time.monotonic()
        found = Identity.of_status(bson.decode(await self._ask(_STATUS)))
        if not found.users and self.asks_nobody is None:
            self.asks_nobody = is_ok(await self._ask(_PROBE))
        if self.asks_nobody:
            found = Identity(found.users, may_all=True)
        self._told = _Told(found, asked, heard.generation)
        if found.users and not found.may_all:
            self._known.add(self._told)
        return found
