"""The processes in which users' stages are computed, as the gateway sees them: who has which, their limits, their end.

Nothing that a stage computes takes the gateway's own interpreter. The system shares the CPU among the processes, and a
user has one of them: one who computes without end takes one core at most, at a lower priority than the gateway, and
keeps only streams of the same process waiting.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tailrace.core.cursor import Action
from tailrace.core.cursor.reply import error_reply
from tailrace.core.oplog.entry_kinds import PASSED_OVER
from tailrace.errors import InternalError, ServerError, TailraceError
from tailrace.watch.gateway.log import note
from tailrace.watch.gateway.stage_process import LENGTH, NUMBER, Begin, GoOn, Response, WorkerRequest
from tailrace.watch.gateway.turns import CpuUse, Turns

#: For each piece of entries of this many bytes, one more second is allowed.
_BYTES_A_SECOND: Final = 1 << 18
#: A process that is asked to end a computation, and does not, ends itself.
_HARD_S: Final = 1.0
#: How long one tenant may compute in a process that another one waits for.
SHARED_S: Final = 1.0
_IDLE_S: Final = 30.0
#: How long a tenant that had to make way opens its streams in the process for those.
_LONG_S: Final = 300.0
_KEPT_MAX: Final = 1_000
_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[4:]; from tailrace.watch.gateway.stage_process import main; main()"
)
_TIME_LIMIT: Final = 50
_MEMORY_LIMIT: Final = 146
_KILLED: Final = 237
#: RetryChangeStream: drivers resume, and do not take the member for one that shuts down.
_RESUME: Final = 234

_log = logging.getLogger("tailrace.gateway")


@dataclass(frozen=True, slots=True)
class StageLimits:
    """``seconds``    CPU time for one batch of 256 kB or less; each further 256 kB may take a second more
    ``memory_bytes``  of one process
    ``processes``     how many there may be at a time
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 16

    def seconds_for(self, size: int) -> float:
        return self.seconds + size / _BYTES_A_SECOND


class StageStoppedError(ServerError):
    """A computation was ended. ``is_excess``: it exceeded its limits, and would again. ``made_way``: others waited."""

    is_excess = False
    made_way = False


@dataclass(eq=False, slots=True)
class _Current:
    """The step that a process computes. ``number`` of the request; ``cursor`` that it is about, or the number of the
    opening. ``stopped``: why it was asked to end."""

    number: int
    cursor: int
    namespace: str
    begun: float = field(default_factory=time.monotonic)
    stopped: str | None = None


class StageWorker:
    """One process. Used in the event loop; its requests are carried out one after another.

    ``cursors``  that are open there
    ``cpu``      seconds that its computations have taken
    """

    def __init__(self, limits: StageLimits, use: CpuUse, *, is_for_long: bool = False) -> None:
        self.limits = limits
        #: Nobody has to make way here.
        self.is_for_long = is_for_long
        self._use = use
        self.cursors: set[int] = set()
        self.tenants: set[Hashable] = set()
        self.cpu = 0.0
        self.used = time.monotonic()
        self.current: _Current | None = None
        self.acting = 0
        #: The gateway ends: nothing more is computed.
        self.is_stopping = False
        self._kills: list[int] = []
        self._closes: list[int] = []
        self._commands = 0
        self._requests = 0
        self._turns = Turns(use)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._ended = False
        self._ours, theirs = socket.socketpair()
        reads, self._control = os.pipe()
        numbers = theirs.fileno(), reads
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, numbers), str(limits.memory_bytes), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=numbers,
            )
        finally:
            theirs.close()
            os.close(reads)
        note("stage process started", process=self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._ended or self._process.poll() is not None

    def command(self) -> int:
        """The number of a new command."""
        self._commands += 1
        self.acting += 1
        return self._commands

    def close_command(self, number: int, *, is_done: bool) -> None:
        """Nobody waits for a command any more. ``is_done``: it has given its reply."""
        self.acting -= 1
        self.used = time.monotonic()
        if not is_done:
            self._closes.append(number)

    def kill(self, cursor: int) -> None:
        """Close a cursor, and end what is computed for it."""
        self.cursors.discard(cursor)
        self._kills.append(cursor)
        if self.current is not None and self.current.cursor == cursor:
            self.interrupt("asked")

    def interrupt(self, why: str) -> None:
        """End what is computed now."""
        current = self.current
        if current is None or current.stopped is not None:
            return
        current.stopped = why
        with suppress(OSError):
            os.write(self._control, NUMBER.pack(current.number))
            self._process.send_signal(signal.SIGUSR1)
        asyncio.get_running_loop().call_later(_HARD_S, self._end_if_at, current)

    def _end_if_at(self, current: _Current) -> None:
        if self.current is current and not self._ended:
            self._process.kill()

    async def turn(self, tenant: Hashable) -> None:
        """Wait until the process is free. ``ask`` must follow at once."""
        if self._turns.is_taken and self._turns.holder != tenant:
            asyncio.get_running_loop().call_later(SHARED_S, self._make_way)
        await self._turns.take(tenant)

    def _make_way(self) -> None:
        """End what one tenant has computed for long while another one waits."""
        current = self.current
        if current is None or self.is_for_long or self._ended or not self._turns.others_wait:
            return
        left = current.begun + SHARED_S - time.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._make_way)
        else:
            self.interrupt("shared")

    async def ask(self, step: Begin | GoOn, cursor: int, namespace: str, seconds: float, shown: int) -> Response:
        """Have a step computed. Raises StageStoppedError. If the task is cancelled, so is the computation. ``shown``:
        what it is seen as while it is computed."""
        current = self.current = _Current(self._requests + 1, shown, namespace)
        exchange = asyncio.create_task(self._exchange(current, step, cursor, seconds))
        exchange.add_done_callback(self._exchanged)
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            self.interrupt("asked")
            raise

    def _exchanged(self, exchange: asyncio.Task[Response]) -> None:
        self.current = None
        self.used = time.monotonic()
        self._turns.give()
        if self._turns.others_wait:
            asyncio.get_running_loop().call_later(SHARED_S, self._make_way)
        if not exchange.cancelled():
            exchange.exception()  # retrieved: the task that asked may have been cancelled

    async def _exchange(self, current: _Current, step: Begin | GoOn, cursor: int, seconds: float) -> Response:
        try:
            if self.is_stopping:
                raise _stopped("asked", self.limits, seconds)
            if self._ended:
                raise ConnectionResetError
            await self._send(step, cursor, seconds)
            response = await self._received()
        except (OSError, EOFError):
            raise self._end_of(current, await self._status()) from None
        self.cpu += response.cpu
        self._use.add(self._turns.holder, response.cpu)
        PASSED_OVER.update(response.passed_over or {})
        if cursor and not response.is_open:
            self.cursors.discard(cursor)
        if response.stopped is not None:
            raise _stopped(current.stopped if response.stopped == "asked" else response.stopped, self.limits, seconds)
        if response.fault is not None:
            raise InternalError(f"the computation of a stream's stages has failed: {response.fault}")
        return response

    async def _send(self, step: Begin | GoOn | None, cursor: int = 0, seconds: float = 0.0) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._ours)
        kills, self._kills = tuple(self._kills), []
        closes, self._closes = tuple(self._closes), []
        data = pickle.dumps(WorkerRequest(kills, closes, step, cursor, seconds), pickle.HIGHEST_PROTOCOL)
        self._requests += 1
        writer = self._streams[1]
        writer.write(LENGTH.pack(len(data)))
        writer.write(data)
        await writer.drain()

    async def _received(self) -> Response:
        assert self._streams is not None
        reader = self._streams[0]
        size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
        response: Response = pickle.loads(await reader.readexactly(size))
        return response

    async def _status(self) -> int:
        """The process has closed its end of the socket: its exit status."""
        self._ended = True
        self.cursors.clear()
        self._process.kill()
        return await asyncio.to_thread(self._process.wait)

    def _end_of(self, current: _Current, status: int) -> StageStoppedError:
        note("stage process ended", process=self.pid, status=status)
        seconds = self.limits.seconds
        if current.stopped is not None:
            return _stopped(current.stopped, self.limits, seconds)
        if status == -signal.SIGXCPU:
            return _stopped("time", self.limits, seconds)
        _log.warning("process %s, which computed the stages of streams, has ended with status %s", self.pid, status)
        return _stopped("ended", self.limits, seconds)

    async def tidy(self) -> None:
        """Carry out what waits for the next request."""
        if (self._kills or self._closes) and not self._turns.is_taken and not self._ended:
            await self._turns.take(None)
            try:
                with suppress(OSError):
                    await self._send(None)
            finally:
                self._turns.give()

    @property
    def is_idle(self) -> bool:
        return not self.cursors and not self.acting and time.monotonic() - self.used > _IDLE_S

    def close(self) -> None:
        """End the process."""
        if not self._ended:
            self._ended = True
            self._process.kill()
        self._process.wait()  # it was killed: there is nothing to wait for
        self.cursors.clear()
        os.close(self._control)
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._ours.close()


def seconds_computing(worker: StageWorker | None, number: int) -> float | None:
    """For how long ``worker`` computes the stream or the opening of this number; ``None``: it does not."""
    current = None if worker is None else worker.current
    return None if current is None or current.cursor != number else time.monotonic() - current.begun


class RemoteActing:
    """A command that a process carries out for ``tenant``. ``cursor``: of a getMore; 0: an aggregate, which is seen as
    ``shown``."""

    def __init__(
        self,
        worker: StageWorker,
        tenant: Hashable,
        begin: Callable[[int], Begin],
        cursor: int,
        namespace: str,
        *,
        shown: int = 0,
    ) -> None:
        self._shown = shown or cursor
        self._worker = worker
        self._tenant = tenant
        self._begin = begin
        self._cursor = cursor
        self._namespace = namespace
        self._number = worker.command()
        self._has_begun = False
        self._is_done = False

    async def advance(self, size: int, answer: Any, error: TailraceError | None) -> Action | bytes:
        """One step: what the command asks for, or its reply. ``size``: bytes that it looks at."""
        worker = self._worker
        await worker.turn(self._tenant)
        step = GoOn(self._number, answer, error) if self._has_begun else self._begin(self._number)
        self._has_begun = True
        response = await worker.ask(step, self._cursor, self._namespace, worker.limits.seconds_for(size), self._shown)
        if response.action is not None:
            return response.action
        self._is_done = True
        assert response.reply is not None
        return response.reply

    def close(self) -> None:
        self._worker.close_command(self._number, is_done=self._is_done or not self._has_begun)
        if self._has_begun and not self._is_done and self._cursor:
            self._worker.cursors.discard(self._cursor)


class StageWorkers:
    """All processes of a gateway. Each tenant has one; beyond ``limits.processes`` tenants share them, and there is one
    more for those that had to make way for others."""

    def __init__(self, limits: StageLimits) -> None:
        self.limits = limits
        self.workers: list[StageWorker] = []
        self.use = CpuUse()
        self._cpu_of_ended = 0.0
        #: The tenants that had to make way, and when they did last.
        self._long: dict[Hashable, float] = {}

    def of(self, tenant: Hashable) -> StageWorker:
        """The process of a tenant."""
        self._forget_ended()
        is_for_long = time.monotonic() - self._long.get(tenant, -math.inf) < _LONG_S
        workers = [one for one in self.workers if one.is_for_long is is_for_long]
        for worker in workers:
            if tenant in worker.tenants:
                return worker
        if len(workers) < (1 if is_for_long else self.limits.processes):
            chosen = StageWorker(self.limits, self.use, is_for_long=is_for_long)
            self.workers.append(chosen)
        else:
            chosen = min(workers, key=lambda one: (len(one.tenants), sum(map(self.use.of, one.tenants))))
        chosen.tenants.add(tenant)
        return chosen

    def made_way(self, tenant: Hashable) -> None:
        """A computation of this tenant had to make way: it is resumed in another process."""
        self._long.pop(tenant, None)
        self._long[tenant] = time.monotonic()
        if len(self._long) > _KEPT_MAX:
            del self._long[next(iter(self._long))]

    def _forget_ended(self) -> None:
        for worker in [one for one in self.workers if one.has_ended]:
            self._close(worker)

    def _close(self, worker: StageWorker) -> None:
        self.workers.remove(worker)
        self._cpu_of_ended += worker.cpu
        worker.close()

    async def look_after(self) -> None:
        """End processes that nobody needs."""
        self._forget_ended()
        for worker in list(self.workers):
            await worker.tidy()
            if worker.is_idle:
                self._close(worker)
                note("stage process ended", process=worker.pid, status=0)

    @property
    def cpu(self) -> float:
        """Seconds that computations have taken, in processes that have ended too."""
        return self._cpu_of_ended + sum(worker.cpu for worker in self.workers)

    def stop(self) -> None:
        """End what is computed; nothing more is."""
        for worker in self.workers:
            worker.is_stopping = True
            worker.interrupt("asked")

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()


def _stopped(why: str | None, limits: StageLimits, seconds: float) -> StageStoppedError:
    if why == "time":
        text = (
            f"operation exceeded time limit: the stages of this stream have computed for more than {seconds:.3g} s of "
            "CPU time, which the gateway allows them for one batch"
        )
        error = StageStoppedError(text, code=_TIME_LIMIT)
    elif why == "memory":
        text = (
            f"the stages of this stream need more than the {limits.memory_bytes >> 20} MB of memory that the gateway "
            "allows the streams of a user"
        )
        error = StageStoppedError(text, code=_MEMORY_LIMIT)
    elif why == "shared":
        text = f"the stages have computed for more than {SHARED_S:.0f} s in a process for which another user waits"
        made_way = StageStoppedError(text, code=_RESUME)
        made_way.made_way = True
        return made_way
    elif why == "asked":
        return StageStoppedError("operation was interrupted", code=_KILLED)
    else:
        return StageStoppedError("the process that computes the stages of this stream has ended", code=_RESUME)
    error.is_excess = True
    return error


#: How long a stream that exceeded its limits is refused: at first, and at most. Each further time doubles it.
_REFUSED_S: Final = 10.0
_REFUSED_S_MAX: Final = 600.0


class Offenders:
    """Streams that have exceeded their limits: a client that opens one again is refused for a while, so that drivers
    that resume at once do not keep a core busy."""

    def __init__(self) -> None:
        self._until: dict[Hashable, tuple[float, float]] = {}

    def refusal(self, stream: Hashable, version: tuple[int, int]) -> bytes | None:
        """The reply to a client that opens such a stream again."""
        until, _ = self._until.get(stream, (0.0, 0.0))
        left = until - time.monotonic()
        if left <= 0:
            return None
        text = (
            "operation exceeded time limit: the stages of this stream have exceeded the limits of the gateway, which "
            f"opens it again in {left:.0f} s at the earliest"
        )
        return error_reply(ServerError(text, code=_TIME_LIMIT), in_stream=True, version=version)

    def add(self, stream: Hashable) -> None:
        _, seconds = self._until.pop(stream, (0.0, _REFUSED_S / 2))
        seconds = min(seconds * 2, _REFUSED_S_MAX)
        self._until[stream] = time.monotonic() + seconds, seconds
        if len(self._until) > _KEPT_MAX:
            del self._until[next(iter(self._until))]
