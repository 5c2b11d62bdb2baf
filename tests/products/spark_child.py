"""The lake's own driver in a process of its own, with its JVM and its Python workers, so that it can be killed while it
works. What the harness compares runs on the harness's own session (``lake.session``)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Final

from tests.kills.parts import command_line, descendants
from tests.products.children import PATIENCE_S
from tests.products.product import Job

_ROOT: Final = Path(__file__).parents[2]


class SparkChild:
    """A running one, in a group of processes of its own."""

    def __init__(self, job: Job, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._root = job.root
        self._log: IO[bytes] = (folder / "log").open("wb")
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix="job-", delete=False) as file:
            file.write(job.to_json())
        self._before = self._seen()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.products.children", file.name],
            cwd=_ROOT, stdout=self._log, stderr=self._log, start_new_session=True,
            env={**os.environ, "SPARK_LOCAL_DIRS": str(folder)},
        )  # fmt: skip

    def wait_for_work(self) -> bool:
        """Wait until it has written something to the store. Returns whether it still runs."""
        deadline = time.monotonic() + PATIENCE_S
        while self._process.poll() is None and self._seen() == self._before:
            assert time.monotonic() < deadline, "the lake's driver does not begin"
            time.sleep(0.02)
        return self._process.poll() is None

    def kill_a_worker(self, rng: random.Random) -> bool:
        """SIGKILL to one of Spark's Python processes. Returns whether there was one."""
        workers = [pid for pid in descendants(self._process.pid) if b"pyspark" in command_line(pid)]
        if not workers:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(workers), signal.SIGKILL)
        return True

    def kill(self) -> bool:
        """SIGKILL to the driver and its JVM. Returns whether it was still running. Its workers end when nobody needs
        them."""
        running = self._process.poll() is None
        below = descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        # A worker that still writes would run beside the next writer.
        deadline = time.monotonic() + PATIENCE_S
        while any(b"pyspark" in command_line(pid) for pid in below):
            assert time.monotonic() < deadline, "a worker of Spark's has outlived its JVM"
            time.sleep(0.02)
        return running

    def _seen(self) -> set[Path]:
        """The number of files in the store; some vanish while they are counted."""
        found = set()
        for folder, _, names in os.walk(self._root):
            found |= {Path(folder, name) for name in names}
        return found
