"""One command as several processes that share its work: started, stopped and ended together."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final

from tailrace.base.health import Health
from tailrace.base.service_manager import ServiceManager, notifying
from tailrace.cli.output import tell

#: The exit status of a process that signal n ended is this plus n.
_SIGNALLED: Final = 128


class Beat:
    """How one of several processes tells the process that started it that it has begun, and lives: that process tells
    systemd, which listens to no other. Two numbers in shared memory."""

    def __init__(self, shared: Any, watchdog_s: float | None) -> None:
        self._shared = shared
        self._shared[1] = time.monotonic()
        self.watchdog_s = watchdog_s
        self.is_there = True

    def tell(self, *lines: str) -> None:
        """See ``service_manager.StatusReceiver``."""
        if "READY=1" in lines:
            self._shared[0] = 1.0
        if "WATCHDOG=1" in lines:
            self._shared[1] = time.monotonic()

    @property
    def has_begun(self) -> bool:
        return bool(self._shared[0])

    @property
    def is_alive(self) -> bool:
        """Whether the process has said so within the watchdog's time. It may take longer to begin."""
        return not self.has_begun or self.watchdog_s is None or time.monotonic() - self._shared[1] < self.watchdog_s


def _health(beats: Sequence[Beat]) -> Health:
    dead = [number for number, beat in enumerate(beats, 1) if not beat.is_alive]
    begun = sum(beat.has_begun for beat in beats)
    return Health(
        f"{begun} of {len(beats)} processes have started",
        f"process {dead[0]} of {len(beats)} is not alive" if dead else None,
        begun=begun == len(beats),
    )


def run_processes(parts: Sequence[argparse.Namespace]) -> int:
    """Run the command of each of ``parts`` in a process of its own; the exit code is that of the first one to end, or
    of another one that fails when it is then stopped.

    SIGTERM and Ctrl-C stop all of them; a second signal ends them at once. When one of them ends on its own, the others
    are stopped too; and all of them stop when this process dies.
    """
    context = multiprocessing.get_context("spawn")
    manager = ServiceManager(os.environ)
    beats = [Beat(context.Array("d", 2, lock=False), manager.watchdog_s) for _ in parts] if manager.is_there else []
    with_beats = zip_longest(parts, beats)
    group = _ProcessGroup([context.Process(target=_work, args=arguments) for arguments in with_beats])
    with notifying(lambda: _health(beats), manager) as tell_stopping:

        def on_signal() -> None:
            tell_stopping()
            group.on_signal()

        with _on_signals(on_signal):
            first = group.run()
    if group.times_told:
        codes = [process.exitcode or 0 for process in group.processes]
        return max(_status_when_told(code, group.times_told) for code in codes)
    code = first.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        tell(f"tailrace: process {first.pid} was ended by {name}; the others have been stopped")
        return 1
    # The others were told to stop; if one of them failed while it stopped, that must not be overlooked.
    others = [process.exitcode or 0 for process in group.processes if process is not first]
    return code or max((_status_when_told(other, 1) for other in others), default=0)


def _status_when_told(code: int, times: int) -> int:
    """The command's exit status for one process's exit code. ``times``: how often the command was told to stop."""
    if times > 1 and code == -signal.SIGKILL:
        code = -signal.SIGTERM  # we ended it, as the second SIGTERM ends a command with one process
    elif times == 1 and code == -signal.SIGTERM:
        code = 0  # it had not set its signal handlers yet: there was nothing to finish
    return _SIGNALLED - code if code < 0 else code  # as a shell has it


class _ProcessGroup:
    """``on_signal`` is called while ``run`` is under way.

    For a process of the group SIGTERM is only a request, however often it comes: a supervisor may send it to each of
    them, as systemd does, and not only to the command. To end them at once, the command sends SIGKILL.
    """

    def __init__(self, processes: Sequence[SpawnProcess]) -> None:
        self.processes = processes
        self.times_told = 0

    def run(self) -> SpawnProcess:
        """Start them and wait until all have ended; returns the one that ended first."""
        try:
            for process in self.processes:
                process.start()
        except BaseException:
            self._stop()  # Python waits for those that were started
            raise
        if self.times_told:
            self._stop()  # those that had not started yet
        ended = wait([process.sentinel for process in self.processes])
        self._stop()
        for process in self.processes:
            process.join()
        return next(process for process in self.processes if process.sentinel == ended[0])

    def on_signal(self) -> None:
        self.times_told += 1
        self._stop()

    def _stop(self) -> None:
        for process in self.processes:
            if process.pid is None:
                continue
            if self.times_told > 1:
                process.kill()
            else:
                process.terminate()


def _work(args: argparse.Namespace, beat: Beat | None) -> None:
    from tailrace.cli.main import carry_out  # noqa: PLC0415  it imports this module's callers

    os.setpgrp()  # a terminal's Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    args.beat = beat
    sys.exit(carry_out(args))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _on_signals(call: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call ``call``, each time."""
    before = {
        number: signal.signal(number, lambda _number, _frame: call()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
