"""Processes of one command: what no deployment is needed for."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.cli.processes import _ProcessGroup


class Process:
    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.pid: int | None = None
        self.stopped = 0

    def start(self) -> None:
        if self.error is not None:
            raise self.error
        self.pid = 1

    def terminate(self) -> None:
        self.stopped += 1


def test_where_one_cannot_be_started_those_before_it_are_stopped() -> None:
    """Python waits for them at its end, so the command hung. Every process had always been started."""
    processes: Any = [Process(), Process(OSError("no more processes")), Process()]
    with pytest.raises(OSError, match="no more processes"):
        _ProcessGroup(processes).run()
    assert [process.stopped for process in processes] == [1, 0, 0]
