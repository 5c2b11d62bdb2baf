"""A stream that is being opened: it can be seen and killed like one that is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final

from tailrace.core.cursor import Action, NeedStart
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import InternalError, ServerError
from tailrace.watch.gateway.reading import Reading
from tailrace.watch.gateway.served import Owner
from tailrace.watch.gateway.stage_workers import StageWorker, seconds_computing

_INTERRUPTED: Final = 11601


class StreamOpening:
    """Answers a cursor that is being opened: its first question shows what it reads.

    ``number``  what it is killed by; the cursor has another one when it is open
    ``scope``   what it is over, as far as it is known
    ``worker``  the process that computes its stages; ``None``: the gateway itself
    """

    def __init__(
        self,
        number: int,
        owner: Owner,
        tenant: Hashable,
        *,
        scope: Scope | None,
        worker: StageWorker | None,
        open_reading: Callable[[Scope, Hashable], Reading],
    ) -> None:
        self.number = number
        self.owner = owner
        self.tenant = tenant
        self.asked = scope
        self.scope = scope or Scope.cluster()
        self.worker = worker
        self.begun = time.time()
        self.reading: Reading | None = None
        self._open_reading = open_reading
        self._work: asyncio.Task[bytes] | None = None
        self._is_killed = False

    @property
    def namespace(self) -> str:
        return self.scope.command_namespace

    @property
    def computing_seconds(self) -> float | None:
        """For how long its stages are being computed; ``None``: they are not."""
        return seconds_computing(self.worker, self.number)

    async def run(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """What ``work`` gives. Raises ServerError where it was killed."""
        self._work = asyncio.create_task(work)
        try:
            if self._is_killed:
                self._work.cancel()
            return await self._work
        except asyncio.CancelledError:
            if not self._is_killed:
                raise
            raise ServerError("operation was interrupted", code=_INTERRUPTED) from None

    def kill(self) -> None:
        """End it."""
        self._is_killed = True
        if self._work is not None:
            self._work.cancel()

    async def answer(self, action: Action) -> Any:
        if isinstance(action, NeedStart):
            self.scope = action.scope
            self.reading = self._open_reading(action.scope, self.tenant)
        if self.reading is None:
            raise InternalError("a cursor asks before it says what it is over")
        return await self.reading.answer(action)

    async def version_read(self) -> str:
        """As that of what it reads."""
        if self.reading is None:
            raise InternalError("a cursor has read before it says what it is over")
        return await self.reading.version_read()

    def close(self) -> None:
        if self.reading is not None:
            self.reading.close()
