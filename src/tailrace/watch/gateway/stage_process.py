"""The process that carries out the commands of streams whose stages may compute for long.

It is started by ``stage_processes`` and reads the requests of that module from a socket, one at a time. It has no
connection to the deployment: what a command asks for goes back to the gateway, which answers it. The system ends a
computation that exceeds its CPU time, even if the gateway has ended: first by a signal on which Python raises, then,
where Python does not get to it because a C function works on, by the end of this process.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, Final, NamedTuple

from tailrace.core.cursor import Acting, Action, CursorRegistry
from tailrace.core.oplog.entry_kinds import PASSED_OVER
from tailrace.core.plan.profile import ServerProfile, profile_for
from tailrace.errors import TailraceError

LENGTH: Final = struct.Struct("<Q")
NUMBER: Final = struct.Struct("<Q")
#: CPU seconds between the signal on which Python raises and the end of the process.
GRACE_S: Final = 2.0
#: The signal comes again until Python raises: it may have come while an object was finalized, where nothing is raised.
_AGAIN_S: Final = 0.25
_NICE: Final = 10
#: As in the gateway: for a smaller batch the compiled code takes longer than the plain stages.
_KERNEL_BYTES_MIN: Final = 8_192

_profile_for = cache(profile_for)


class Begin(NamedTuple):
    """Carry out a command. ``number`` names it in what follows; ``version`` of the server whose streams are opened;
    ``compiled``: the compiled code may be loaded; ``cursor_id``: of the cursor that it opens, if it opens one."""

    number: int
    database: str
    command: bytes
    now_ms: int
    version: str
    compiled: bool
    cursor_id: int


class GoOn(NamedTuple):
    """The answer to what a command asked for, or the error in its place."""

    number: int
    answer: Any
    error: TailraceError | None


class WorkerRequest(NamedTuple):
    """``kills``    cursors to close first
    ``closes``   commands that nobody waits for any more
    ``step``     what to do then; ``None``: nothing
    ``cursor``   the cursor that the command is about; 0: it opens one
    ``seconds``  CPU time that it may take
    """

    kills: tuple[int, ...]
    closes: tuple[int, ...]
    step: Begin | GoOn | None
    cursor: int = 0
    seconds: float = 0.0


class Response(NamedTuple):
    """``action``  what the command asks for, or
    ``reply``    its reply, or
    ``stopped``  why it was ended: "time", "asked" or "memory", or
    ``fault``    the traceback of an error of our own
    ``is_open``  whether the request's cursor is open
    ``cpu``      seconds that the step took
    ``passed_over``  what was counted in the process since the last response (``entry_kinds.PASSED_OVER``)
    """

    action: Action | None = None
    reply: bytes | None = None
    stopped: str | None = None
    fault: str | None = None
    is_open: bool = False
    cpu: float = 0.0
    passed_over: Counter[str] | None = None


class _Stopped(BaseException):
    """A computation is to end. No handler for errors of the stages may catch it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(slots=True)
class _Kernel:
    """Loads the compiled code when a batch is worth it: a process whose streams have small batches does without."""

    is_asked: bool = False

    def __call__(self, size: int) -> bool:
        if not self.is_asked or 0 < size < _KERNEL_BYTES_MIN:
            return False
        from tailrace.watch.client import kernel_loader  # noqa: PLC0415  it takes a second

        return kernel_loader.is_ready(size)

    def expect(self, size: int) -> None:
        if not self.is_asked and size >= _KERNEL_BYTES_MIN:
            from tailrace.watch.client import kernel_loader  # noqa: PLC0415

            kernel_loader.prepare()
            self.is_asked = True


class StageProcess:
    """The commands under way and the cursors of one process. ``requests``: where they come from; ``control``: a pipe
    with the numbers of steps that are to end; SIGUSR1 wakes their reader."""

    def __init__(self, requests: socket.socket, control: int) -> None:
        self._requests = requests
        self._control = control
        self._kernel = _Kernel()
        self._registry = CursorRegistry(self._ids(), kernel=self._kernel)
        self._acting: dict[int, Acting] = {}
        #: The ids for the cursors of those commands, and the command at work.
        self._cursor_ids: dict[int, int] = {}
        self._at = 0
        self._steps = 0
        #: The number of the step that is computed; 0: none.
        self._computing = 0
        self._may_compile = False
        self._told_of: Counter[str] = Counter()

    def serve(self) -> None:
        """Until the gateway closes the socket."""
        signal.signal(signal.SIGPROF, self._time_is_over)
        signal.signal(signal.SIGUSR1, self._is_asked_to_stop)
        while (request := self._received()) is not None:
            self._steps += 1
            for number in request.closes:
                self._close(number)
            if request.kills:
                self._kill(request.kills)
            if request.step is not None:
                response = self._stepped(request, request.step)
                new, self._told_of = PASSED_OVER - self._told_of, PASSED_OVER.copy()
                self._send(response._replace(is_open=request.cursor in self._registry, passed_over=new))

    def _stepped(self, request: WorkerRequest, step: Begin | GoOn) -> Response:
        if isinstance(step, Begin):
            self._may_compile = step.compiled
            self._registry.profile = self._profile(step.version)
            self._cursor_ids[step.number] = step.cursor_id
            self._acting[step.number] = self._registry.run(step.database, step.command, step.now_ms)
        elif self._may_compile and (batch := getattr(step.answer, "batch", None)) is not None:
            self._kernel.expect(len(batch.raw))
        begun = _cpu()
        try:
            response = self._computed(request, step)
        except _Stopped as stopped:
            response = Response(stopped=stopped.why)
        except MemoryError:
            response = Response(stopped="memory")
        except Exception:  # noqa: BLE001  the gateway logs it
            response = Response(fault=traceback.format_exc())
        self._computing = 0
        _lift_limit()
        if response.action is None:
            self._close(step.number)
            if response.reply is None and request.cursor:
                self._kill((request.cursor,))
        return response._replace(cpu=_cpu() - begun)

    def _profile(self, version: str) -> ServerProfile:
        return _profile_for(version)

    def _ids(self) -> Iterator[int]:
        while True:
            yield self._cursor_ids[self._at]

    def _computed(self, request: WorkerRequest, step: Begin | GoOn) -> Response:
        acting, self._at = self._acting[step.number], step.number
        _limit_cpu(request.seconds)
        self._computing = self._steps
        try:
            if isinstance(step, Begin):
                return Response(action=next(acting))
            if step.error is not None:
                return Response(action=acting.throw(step.error))
            return Response(action=acting.send(step.answer))
        except StopIteration as end:
            return Response(reply=end.value)
        finally:
            self._computing = 0

    def _close(self, number: int) -> None:
        self._cursor_ids.pop(number, None)
        acting = self._acting.pop(number, None)
        if acting is not None:
            with suppress(Exception):
                acting.close()

    def _kill(self, cursors: tuple[int, ...]) -> None:
        for cursor in cursors:
            self._registry.kill(cursor)

    def _time_is_over(self, number: int, frame: FrameType | None) -> None:
        if self._computing:
            raise _Stopped("time")

    def _is_asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        asked: set[int] = set()
        with suppress(BlockingIOError):
            while data := os.read(self._control, NUMBER.size):
                asked.add(NUMBER.unpack(data)[0])
        if self._computing and self._computing in asked:
            raise _Stopped("asked")

    def _received(self) -> WorkerRequest | None:
        head = self._read(LENGTH.size)
        data = None if head is None else self._read(LENGTH.unpack(head)[0])
        if data is None:
            return None
        request: WorkerRequest = pickle.loads(data)
        return request

    def _read(self, size: int) -> bytes | None:
        data = bytearray(size)
        view = memoryview(data)
        at = 0
        while at < size:
            count = self._requests.recv_into(view[at:])
            if not count:
                return None
            at += count
        return bytes(data)

    def _send(self, response: Response) -> None:
        data = pickle.dumps(response, pickle.HIGHEST_PROTOCOL)
        self._requests.sendall(LENGTH.pack(len(data)) + data)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _limit_cpu(seconds: float) -> None:
    """From now on: raise after this many seconds, and have the system end this process some seconds later."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    last = int(_cpu() + seconds + GRACE_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (last if hard == resource.RLIM_INFINITY else min(last, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)


def _lift_limit() -> None:
    """What is done between steps, such as loading the compiled code, is the gateway's work."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def main() -> None:
    """``requests``, ``control``: file descriptors, and how many bytes of memory this process may have: the first three
    arguments."""
    requests, control, memory = map(int, sys.argv[1:4])
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the gateway
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    os.set_blocking(control, False)
    with socket.socket(fileno=requests) as connection, suppress(OSError):
        StageProcess(connection, control).serve()


if __name__ == "__main__":
    main()
