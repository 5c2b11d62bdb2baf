"""What the connections of a gateway have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tailrace.watch.gateway.command import ClientCommand
from tailrace.watch.gateway.identification import KnownRights
from tailrace.watch.gateway.loop_turns import LoopTurns
from tailrace.watch.gateway.memory import MemoryBudget
from tailrace.watch.gateway.metrics import GatewayMetrics
from tailrace.watch.gateway.options import GatewayOptions
from tailrace.watch.gateway.replies import ServerClock
from tailrace.watch.gateway.rights_watch import UNHEARD, RightsHeard
from tailrace.watch.gateway.upstream import Upstream


class QuickWork(Protocol):
    """What is answered on a connection without its task (``QuickGetMore``). ``is_busy``: something is under way."""

    is_busy: bool

    def client_left(self) -> None:
        """Nobody waits for it any more."""

    async def done(self) -> None:
        """Wait until nothing is under way."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the connections of a gateway have in common.

    ``names``         the names of the commands that may be for the gateway
    ``answer``        answers such a command of a ``ClientConnection``; false if the command is the server's
    ``memory``        the bytes that large messages of clients take
    ``reply_memory``  the bytes that large replies take. With one budget for both, each would wait for the other
    ``strangers``     as ``memory``, for clients that have not logged in where the deployment has users
    ``turns``         whose work the event loop does next
    ``may_connect``   whether the limit of open files allows another connection
    ``rights``        what the server said last of each user's rights
    ``rights_heard``  which changes of rights are known
    ``parked``        the connections that have none to the server for the time being
    """

    options: GatewayOptions
    metrics: GatewayMetrics
    upstream: Upstream
    clock: ServerClock
    names: frozenset[bytes]
    answer: Callable[[Any, ClientCommand], Awaitable[bool]]
    memory: MemoryBudget
    reply_memory: MemoryBudget
    strangers: MemoryBudget
    turns: LoopTurns
    may_connect: Callable[[], bool] = lambda: True
    rights: KnownRights = field(default_factory=KnownRights)
    rights_heard: Callable[[], RightsHeard] = lambda: UNHEARD
    parked: set[Any] = field(default_factory=set)
