"""The other processes of a gateway, as one of them sees them.

A cursor is in the process that opened it, and its next getMore may come on a connection that another process has. That
process then has the cursor's process carry out the command, as if the connection were there. What has to be asked on
the client's own connection to the server, the cursor's process asks through the first process.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import ServerError
from tailrace.watch.gateway.command import ClientCommand
from tailrace.watch.gateway.cursor_ids import ProcessIds
from tailrace.watch.gateway.line import Line, LineClosedError
from tailrace.watch.gateway.repeated import LastGetMore
from tailrace.watch.gateway.rights import Identity
from tailrace.watch.gateway.served import Owner

#: Of a process that does not take a connection: it is being started, or has just ended.
_CONNECT_S: Final = 5.0
#: RetryChangeStream: drivers resume, and do not take the member for one that shuts down.
_RESUME: Final = 234
_ANY_TIME: Final = ClusterTime(0)


@dataclass(frozen=True, slots=True)
class PeerStream:
    """A stream, or the opening of one, in another process."""

    process: int
    cursor_id: int
    owner: Owner
    scope: Scope


class CommandingConnection(Protocol):
    """A ``ClientConnection``, as far as a command of its that is carried out elsewhere needs it."""

    client_host: str
    app_name: str | None

    @property
    def tenant(self) -> Hashable: ...

    async def identity(self, age_seconds: float, until: ClusterTime = ...) -> Identity: ...

    async def ask(self, document: bytes, *, may_take_long: bool = False) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Relay:
    """A command for another process. ``key`` names the connection in what that process asks back; ``identity`` is what
    the server has just said of it."""

    key: int
    command: ClientCommand
    client_host: str
    app_name: str | None
    tenant: Hashable
    identity: Identity


@dataclass(frozen=True, slots=True)
class Relayed:
    """What came of it. ``is_answered``: as of ``Commands.answered``; ``rests``: the connection may rest."""

    is_answered: bool
    reply: bytes | None
    rests: bool


class RelayedConnection:
    """Stands for a client's connection that another process has, for the code that carries its command out here."""

    is_relayed = True
    server_left = False

    def __init__(self, relay: Relay, line: Line) -> None:
        self.client_host = relay.client_host
        self.app_name = relay.app_name
        self.tenant = relay.tenant
        self.last_get_more = LastGetMore()
        self._relay = relay
        self._line = line
        self._known: Identity | None = relay.identity
        self._reply: bytes | None = None
        self._rests = False

    async def answered(self) -> None:
        """It was waited for where the connection is."""

    async def identity(self, age_seconds: float, until: ClusterTime = _ANY_TIME) -> Identity:
        known, self._known = self._known, None
        if known is not None and (known.may_all or not until):
            return known
        found: Identity = await self._line.ask("identity", self._relay.key, age_seconds, int(until))
        return found

    async def ask(self, document: bytes, *, may_take_long: bool = False) -> bytes:
        found: bytes = await self._line.ask("upstream", self._relay.key, document, may_take_long)
        return found

    async def reply(self, command: ClientCommand, document: bytes) -> None:
        self._reply = document

    def rest(self) -> None:
        self._rests = True

    def outcome(self, is_answered: bool) -> Relayed:
        return Relayed(is_answered, self._reply, self._rests)


class Peers:
    """``paths``: of the sockets at which each process answers the others. A gateway of one process has no others."""

    def __init__(self, ids: ProcessIds | None = None, paths: tuple[str, ...] = ()) -> None:
        self.ids = ids
        self._paths = paths
        self._lines: dict[int, Line] = {}
        self._opening: dict[int, asyncio.Lock] = {}
        self._keys = itertools.count(1)
        self._relaying: dict[int, CommandingConnection] = {}

    @property
    def others(self) -> list[int]:
        """Their numbers."""
        ids = self.ids
        return [] if ids is None else [number for number in range(ids.count) if number != ids.number]

    def having(self, cursor_id: int) -> int | None:
        """The other process that has this cursor, if there is such a cursor; ``None``: none has it."""
        if self.ids is None:
            return None
        maker = self.ids.maker(cursor_id)
        return None if maker == self.ids.number else maker

    def home_of(self, tenant: Hashable) -> int | None:
        """The process that computes this tenant's stages; ``None``: this one."""
        if self.ids is None:
            return None
        text = repr(sorted(tenant) if isinstance(tenant, frozenset) else tenant)
        home = zlib.crc32(text.encode()) % self.ids.count
        return None if home == self.ids.number else home

    async def relayed(self, process: int, connection: Any, command: ClientCommand, identity: Identity) -> Relayed:
        """Have another process carry a command out. Raises LineClosedError if it ends meanwhile."""
        key = next(self._keys)
        self._relaying[key] = connection
        relay = Relay(key, command, connection.client_host, connection.app_name, connection.tenant, identity)
        try:
            found: Relayed = await self.ask(process, "command", relay)
            return found
        finally:
            del self._relaying[key]

    async def found(self, numbers: Iterable[int]) -> dict[int, PeerStream]:
        """The streams of these numbers that other processes have."""
        by_process: dict[int, list[int]] = {}
        for number in numbers:
            if (process := self.having(number)) is not None:
                by_process.setdefault(process, []).append(number)
        streams: dict[int, PeerStream] = {}
        for process, wanted in by_process.items():
            with suppress(LineClosedError):
                for cursor_id, owner, scope in await self.ask(process, "found", wanted):
                    streams[cursor_id] = PeerStream(process, cursor_id, owner, scope)
        return streams

    async def kill(self, streams: Iterable[PeerStream]) -> None:
        """Close them."""
        by_process: dict[int, list[int]] = {}
        for one in streams:
            by_process.setdefault(one.process, []).append(one.cursor_id)
        for process, numbers in by_process.items():
            with suppress(LineClosedError):
                await self.ask(process, "kill", numbers)

    async def ask_all(self, name: str, *args: Any) -> list[Any]:
        """The answers of all others; one that has ended gives none."""
        found = await asyncio.gather(*(self.ask(each, name, *args) for each in self.others), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, LineClosedError):
                raise each
        return [each for each in found if not isinstance(each, BaseException)]

    async def ask(self, process: int, name: str, *args: Any) -> Any:
        """The answer of another process. Raises LineClosedError if it has ended."""
        return await (await self._line(process)).ask(name, *args)

    async def _line(self, process: int) -> Line:
        async with self._opening.setdefault(process, asyncio.Lock()):
            line = self._lines.get(process)
            if line is None or line.closed.is_set():
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        ends = await asyncio.open_unix_connection(self._paths[process])
                except (OSError, TimeoutError):
                    raise gone() from None
                line = self._lines[process] = Line(*ends, self._answer)
            return line

    async def _answer(self, name: str, key: int, *args: Any) -> Any:
        """What a process asks back about a connection."""
        connection = self._relaying.get(key)
        if connection is None:
            raise gone()
        if name == "identity":
            age_seconds, until = args
            return await connection.identity(age_seconds, ClusterTime(until))
        document, may_take_long = args
        return await connection.ask(document, may_take_long=may_take_long)

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


def gone() -> LineClosedError:
    return LineClosedError("another process of the gateway has ended")


def lost_stream() -> ServerError:
    """The reply to the client of a stream whose process has ended: its driver resumes."""
    return ServerError("the process of the gateway that served this stream has ended", code=_RESUME)
