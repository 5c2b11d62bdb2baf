"""Programs of ours in processes that are forked from one that has loaded Tailrace.

Python and what a listener loads take 0.7 s of processor each time that they are started, and some tests start dozens. A
test of the start itself, or of what a process inherits, starts one as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.commands import Signalled

#: Loads no more than its programs would, and starts no threads: they would be missing in the forked processes.
_LOADED: Final = ("tailrace.cli.main", "tailrace.cli.listen", "tailrace.consumer", "tailrace.consumer.views")
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, *_LOADED])


class Forked(Signalled):
    """``python -m module arguments`` as ``subprocess.Popen`` starts it. What it says on standard error is in the file
    ``errors``, if one is named."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] = os.environ,
        errors: Path | None = None,
    ) -> None:
        self._process = _CONTEXT.Process(target=_become, args=(module, list(arguments), cwd, dict(env), errors))
        self._process.start()
        self.errors = errors
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode


def _become(module: str, arguments: list[str], cwd: Path, env: dict[str, str], errors: Path | None) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    if errors is not None:
        opened = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, 2)
        os.close(opened)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  until the process ends
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
