"""The Spark pipeline of the demo as a child process, ``tailrace run``, so that it can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tailrace.demo.shop import URI_VARIABLE
from tailrace.errors import TailraceError

_STOP_WAIT_S = 60

_PIPELINE = """\
# What the demo runs: tailrace run pipeline.yaml
source:
  uri: ${{{uri}}}
  database: {database}
  startAtOperationTime: "{since}"
lake:
  path: lake
  checkpoint: checkpoint
  documents: json
compaction:
  every: 32
tables:
  path: tables
  collections: ["{database}.*"]
  every: 2 seconds
"""


def write_pipeline(directory: Path, *, database: str, since: str) -> Path:
    """Write the demo's pipeline file into ``directory``; ``since`` is a cluster time, ``seconds,increment``."""
    path = directory / "pipeline.yaml"
    path.write_text(_PIPELINE.format(uri=URI_VARIABLE, database=database, since=since), encoding="utf-8")
    return path


class PipelineProcess:
    """``tailrace run`` with all the processes that Spark starts for it, in a session (process group) of its own."""

    def __init__(self, pipeline: Path, uri: str, log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = start_child(["run", str(pipeline), "--progress", "none"], uri, stdout=output)

    def check(self) -> None:
        """Raise what stopped it, if it has stopped."""
        code = self._process.poll()
        if code is not None:
            raise TailraceError(f"the pipeline ended with exit status {code}: {self._last_words()}")

    def kill(self) -> int:
        """SIGKILL the driver, its JVM and whatever is in their group. Returns the exit code: -9 when it was killed."""
        os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def stop(self) -> int:
        """Ask it to end (SIGTERM) and wait. Returns its exit code; after a minute it is killed."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                return self._process.wait(_STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                return self.kill()
        return self._process.returncode

    def close(self) -> None:
        """Leave nothing running, whatever happened."""
        if self._process.poll() is None:
            self.kill()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def start_child(arguments: Sequence[str], uri: str, *, stdout: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """``tailrace.demo.child`` with ``arguments`` in a session of its own, the URI in its environment (never in its
    arguments, which everybody on the machine can read). Its errors go where its output goes. If its output is a pipe,
    its input is one too, and its errors go to our own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tailrace.demo.child", *arguments],
        env={**os.environ, URI_VARIABLE: uri},
        stdin=subprocess.PIPE if stdout == subprocess.PIPE else subprocess.DEVNULL,
        stdout=stdout,
        stderr=None if stdout == subprocess.PIPE else subprocess.STDOUT,
        start_new_session=True,
    )
