"""How many change streams may be open: in all, and of one user; in every process of a gateway together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from tailrace.watch.gateway.opening import StreamOpening
from tailrace.watch.gateway.served import Owner, ServedStream


class OpeningTurn(NamedTuple):
    """When a stream was asked for, by the clock that all processes of a machine share, and its number."""

    asked_ns: int
    number: int


class StreamLimits:
    """``in_all``, ``per_user``  how many may be open; ``None``: four fifths of all for a user, no limit for an address
    ``streams``, ``openings``  those of this process
    """

    #: How many streams are open in other processes of this gateway, or were asked for before this turn, and how many of
    #: them are a tenant's.
    others_open: Callable[[Hashable, OpeningTurn], Awaitable[tuple[int, int]]]

    def __init__(
        self,
        in_all: int,
        per_user: int | None,
        streams: Mapping[int, ServedStream],
        openings: Mapping[int, StreamOpening],
    ) -> None:
        self._in_all = in_all
        self._per_user = per_user
        self._streams = streams
        self._openings = openings
        #: Of which it is not decided yet whether there is room for them, and whose they are.
        self._asked_for: dict[OpeningTurn, Hashable] = {}
        self.others_open = _none_elsewhere

    @contextmanager
    def asking(self, turn: OpeningTurn, tenant: Hashable) -> Iterator[None]:
        """Until it is decided, and the stream is among the openings if there is room for it."""
        self._asked_for[turn] = tenant
        try:
            yield
        finally:
            del self._asked_for[turn]

    def open_of(self, tenant: Hashable, turn: OpeningTurn) -> tuple[int, int]:
        """How many streams are open or being opened in this process, or were asked for before this turn, and how many
        of them are this tenant's. So of those that are asked for at the same moment, in whatever processes, each counts
        the earlier ones, and no more are opened than the limit says."""
        return self._opened(turn), self._opened_of(tenant, turn)

    def _opened(self, turn: OpeningTurn) -> int:
        return len(self._streams) + len(self._openings) + sum(other < turn for other in self._asked_for)

    def _opened_of(self, tenant: Hashable, turn: OpeningTurn) -> int:
        opened = sum(one.tenant == tenant for each in (self._streams, self._openings) for one in each.values())
        return opened + sum(whose == tenant and other < turn for other, whose in self._asked_for.items())

    async def full(self, owner: Owner, tenant: Hashable, turn: OpeningTurn) -> str | None:
        """Which limit forbids another stream, in words; ``None``: none."""
        others, of_tenant = await self.others_open(tenant, turn)
        opened = self._opened(turn) + others
        if opened >= self._in_all:
            return f"{self._in_all} change streams open, which is its limit"
        limit = self._per_user
        if limit is None:
            # A client that opens streams without end leaves room for others; an address may be that of many.
            limit = max(1, self._in_all * 4 // 5) if owner.users else self._in_all
        if opened < limit or self._opened_of(tenant, turn) + of_tenant < limit:
            return None
        whose = "user" if owner.users else "address"
        return f"{limit} change streams of this {whose} open, which is the limit for one {whose}"


async def _none_elsewhere(tenant: Hashable, turn: OpeningTurn) -> tuple[int, int]:
    return 0, 0
