"""Work in forked processes, several at a time: each says in a few bytes how it went."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

_MEMORY_MORE_BYTES: Final = 4 << 30
#: A process ends with the one that started it.
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)


@dataclass(frozen=True)
class Task:
    """What a process of its own does: ``work`` returns what it has to say, or calls ``say_and_end``."""

    name: str
    work: Callable[[], str]
    cpu_seconds: int
    clock_seconds: int


@dataclass
class _Running:
    task: Task
    pid: int
    pipe: int
    until: float
    said: bytes = b""


_out: int | None = None


def say_and_end(text: str) -> None:
    """In a process of ``run``: report this, and end at once."""
    assert _out is not None
    os.write(_out, text.encode()[:4000])
    os._exit(0)


def run(tasks: Iterator[Task], processes: int) -> Iterator[tuple[Task, str]]:
    """What each task has said, as they end; nothing where it was killed for its time or memory."""
    running: dict[int, _Running] = {}
    while True:
        while len(running) < processes and (task := next(tasks, None)) is not None:
            begun = _begin(task)
            running[begun.pipe] = begun
        if not running:
            return
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for one in list(running.values()):
            if one.pipe in ready:
                data = os.read(one.pipe, 4096)
                one.said += data
                if data:
                    continue
            elif time.monotonic() < one.until:
                continue
            else:
                os.killpg(one.pid, signal.SIGKILL)
            del running[one.pipe]
            os.close(one.pipe)
            os.waitpid(one.pid, 0)
            yield one.task, one.said.decode(errors="replace")


def _begin(task: Task) -> _Running:
    pipe, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(pipe)
        _work(task, write)
    os.close(write)
    return _Running(task, pid, pipe, time.monotonic() + task.clock_seconds)


def _work(task: Task, write: int) -> None:
    global _out
    _out = write
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_seconds, task.cpu_seconds + 5))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY_MORE_BYTES,) * 2)
    try:
        said = task.work()
    except BaseException as error:  # noqa: BLE001  whatever a mutant does
        said = f"killed {type(error).__name__}"
    sys.stdout.flush()
    say_and_end(said)
