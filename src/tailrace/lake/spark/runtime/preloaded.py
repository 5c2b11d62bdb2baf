"""Starting the fork server (``fork_server.py``) of a Spark session, and ending it with this process."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tailrace.lake.spark.runtime.launcher import SOCKET

_server: subprocess.Popen[bytes] | None = None


def start_fork_server() -> bool:
    """Have Spark's Python processes forked from one that has loaded everything; call it before the JVM is started.

    Returns whether that was done. Where the system cannot do it, they are started as usual.
    """
    global _server  # noqa: PLW0603  one for this process, whose JVM is one too
    if sys.platform != "linux":  # elsewhere a fork of what is loaded here is not safe
        return False
    if _server is not None and _server.poll() is None:
        return True
    directory = ""
    try:
        directory = tempfile.mkdtemp(prefix="tailrace-")  # for this user alone
        path = Path(directory) / "fork"
        environment = {
            **os.environ,
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # what PySpark gives its workers
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # no pool of threads before the fork
        }
        _server = subprocess.Popen(
            [sys.executable, "-m", "tailrace.lake.spark.runtime.fork_server", str(path)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        return False
    atexit.register(_stop, _server, directory)
    os.environ[SOCKET] = str(path)
    return True


def _stop(server: subprocess.Popen[bytes], directory: str) -> None:
    if server.stdin is not None:
        with suppress(OSError):
            server.stdin.close()  # which it takes for its end
    try:
        server.wait(2)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    shutil.rmtree(directory, ignore_errors=True)
