"""One command as several processes that share its work: started, stopped and ended together."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Final

from tailrace.cli.output import tell

#: The exit status of a process that signal n ended is this plus n.
_SIGNALLED: Final = 128


def run_processes(parts: Sequence[argparse.Namespace]) -> int:
    """Run the command of each of ``parts`` in a process of its own; the exit code is that of the first one to end, or
    of another one that fails when it is then stopped.

    SIGTERM and Ctrl-C stop all of them; a second signal ends them at once. When one of them ends by itself, the others
    are stopped too; and all of them stop when this process dies.
    """
    context = multiprocessing.get_context("spawn")
    group = _ProcessGroup([context.Process(target=_work, args=(part,)) for part in parts])
    with _on_signals(group.on_signal):
        first = group.run()
    if group.times_told:
        codes = [process.exitcode or 0 for process in group.processes]
        return max(_status_when_told(code, group.times_told) for code in codes)
    code = first.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        tell(f"tailrace: process {first.pid} was ended by {name}; the others have been stopped")
        return 1
    # The others were told to stop; one of them that failed at it is not to be overlooked.
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


def _work(args: argparse.Namespace) -> None:
    from tailrace.cli.main import carry_out  # noqa: PLC0415  it imports this module's callers

    os.setpgrp()  # a terminal's Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
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
