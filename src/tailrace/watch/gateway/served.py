"""A cursor of the gateway, and whose it is."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tailrace.core.cursor import Action, ReadOplog
from tailrace.core.cursor.registry import IDLE_MS_MAX
from tailrace.core.oplog.namespace import Scope
from tailrace.watch.gateway.cost import StageCost
from tailrace.watch.gateway.local_acting import size_of
from tailrace.watch.gateway.reading import Reading
from tailrace.watch.gateway.rights import User
from tailrace.watch.gateway.shared_steps import Sharing
from tailrace.watch.gateway.stage_workers import StageWorker, seconds_computing


class Owner(NamedTuple):
    """Who owns a cursor: the users of the connection that opened it, and their session.

    ``session``  the value of ``lsid``'s ``id``, ``None`` without a session
    """

    users: frozenset[User]
    session: bytes | None

    def tenant(self, client_host: str) -> Hashable:
        """Who shares a process for the computations of stages: the streams of the same users; without users, those of
        clients at the same address."""
        return self.users or client_host

    @property
    def shown(self) -> list[str]:
        """The users' names."""
        return [f"{user}@{database}" for user, database in sorted(self.users)]


class WaitsWithoutTask(Protocol):
    """A getMore that waits without a task (``QuickGetMore``)."""

    def begin(self) -> None:
        """Have its cursor know that it waits, if it does not yet."""


@dataclass(eq=False, slots=True)
class ServedStream:
    """A cursor of the gateway.

    ``tenant``    who it counts for
    ``cost``      of its stages
    ``offender``  what it is called if it exceeds its limits: its users, scope and stages
    ``worker``    the process that computes its stages; ``None``: the gateway itself
    ``opened``  when, seconds since 1970
    ``used_ms``   when it was last asked for, on the cursors' clock
    ``events``  how many were sent
    ``heavy``     bytes of the last batch: some of it may be left for the next command
    ``api``      the API parameters with which it was opened, as text
    ``sharing``  what it may share with streams that ask the same
    ``quick``    the getMore that works on it without a task
    ``is_busy``  a command is working on it
    ``is_ended``  its session has ended, and it will soon be closed
    """

    cursor_id: int
    owner: Owner
    tenant: Hashable
    scope: Scope
    namespace: str
    reading: Reading
    cost: StageCost
    offender: Hashable
    worker: StageWorker | None
    used_ms: int
    sharing: Sharing
    api: str = "{}"
    opened: float = field(default_factory=time.time)
    events: int = 0
    heavy: int = 0
    quick: WaitsWithoutTask | None = None
    is_busy: bool = False
    is_ended: bool = False

    @property
    def computing_seconds(self) -> float | None:
        """For how long its stages are being computed; ``None``: they are not."""
        return seconds_computing(self.worker, self.cursor_id)

    def noted(self) -> dict[str, Any]:
        """What is logged of it."""
        return {
            "cursor": self.cursor_id,
            "ns": self.namespace,
            "users": self.owner.shown,
        }


def weighed(action: Action, answer: Any, size: int, stream: ServedStream | None) -> int:
    """How many bytes the next step reads: of a new batch its own; images come in addition to what asked for them."""
    found = size_of(answer)
    if not isinstance(action, ReadOplog):
        return max(size, found)
    if stream is not None:
        stream.heavy = found
    return found


def expire_in_processes(streams: Iterable[ServedStream], now_ms: int) -> int:
    """Kill the cursors in worker processes that nobody has used for long. Returns how many they are. Those of the
    registry expire there."""
    idle = [
        one for one in streams if one.worker is not None and not one.is_busy and now_ms - one.used_ms >= IDLE_MS_MAX
    ]
    for stream in idle:
        if stream.worker is not None:
            stream.worker.kill(stream.cursor_id)
    return len(idle)
