"""Processes of one command, as far as no deployment is needed."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tailrace.cli.processes import _ProcessGroup, _status_when_told


class Process:
    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.pid: int | None = None
        self.stopped = 0
        self.killed = 0

    def start(self) -> None:
        if self.error is not None:
            raise self.error
        self.pid = 1

    def terminate(self) -> None:
        self.stopped += 1

    def kill(self) -> None:
        self.killed += 1


def test_where_one_cannot_be_started_those_before_it_are_stopped() -> None:
    """Python waits for them at its end, so the command hung. In earlier tests every process had been started."""
    processes: Any = [Process(), Process(OSError("no more processes")), Process()]
    with pytest.raises(OSError, match="no more processes"):
        _ProcessGroup(processes).run()
    assert [process.stopped for process in processes] == [1, 0, 0]


def test_the_second_signal_ends_those_that_have_started() -> None:
    started, waiting = Process(), Process()
    started.start()
    processes: Any = [started, waiting]
    group = _ProcessGroup(processes)
    group.on_signal()
    assert [(process.stopped, process.killed) for process in processes] == [(1, 0), (0, 0)]
    group.on_signal()
    assert [(process.stopped, process.killed) for process in processes] == [(1, 1), (0, 0)]


@pytest.mark.parametrize(
    ("code", "times", "status"),
    [
        (0, 1, 0),
        (1, 1, 1),
        (-signal.SIGTERM, 1, 0),  # before it had begun
        (-signal.SIGKILL, 1, 137),  # not by us
        (-signal.SIGKILL, 2, 143),
        (-signal.SIGTERM, 2, 143),
        (0, 2, 0),
    ],
)
def test_what_an_exit_code_means_once_the_command_was_told_to_stop(code: int, times: int, status: int) -> None:
    assert _status_when_told(code, times) == status
