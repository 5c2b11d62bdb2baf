"""A Python that has loaded PySpark, Arrow, the stages and the kernel once, and is forked for each that Spark starts.

A query needs six Python processes in addition to its workers (for the data source, its planning, its offsets, its
sink), and each loads the same packages: 0.3 to 0.6 s of CPU, one after another, 3 s of the first query of a session
and 0.5 s of every other (PySpark 4.3, two cores). ``local_session`` starts this server next to the JVM; Spark starts
``launcher.py`` in place of Python, which asks here for a process. Where anything is missing, Python starts as usual.

The server ends with the process that started it. Nothing that it loads starts a thread, opens a connection or reads a
clock, so a fork is safe.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import pyarrow as pa

from tailrace.core import kernel

#: What Spark's processes load sooner or later. The modules that they are started with are not among them: a module that
#: is run must not be loaded before.
_LOADED: Final = (
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.worker",
    "tailrace.lake.store.part_writer",
    "tailrace.lake.spark.store.sink",
    "tailrace.lake.spark.store.source",
    "tailrace.lake.spark.planning.opening",
    "tailrace.lake.spark.reading.slice_reader",
    "tailrace.lake.spark.source.data_source",
)
_REQUEST_MAX: Final = 16 << 20


class _Server:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        # A name is seen as soon as it is bound, and refuses until the socket listens: so it gets its name last.
        unready = path.with_name(f"{path.name}.new")
        self._socket.bind(str(unready))
        self._socket.listen(64)
        unready.rename(path)
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        #: Where Python looks next, after the directory that it is started in and what ``PYTHONPATH`` names.
        self._search = [entry for entry in sys.path[1:] if entry not in given]
        self._seed = os.environ.get("PYTHONHASHSEED")
        self._launchers: dict[int, socket.socket] = {}
        self._pipe = os.pipe()

    def run(self, parent: int) -> None:
        """Serve until ``parent``, a descriptor that somebody else holds the other end of, is closed."""
        woken, wake = self._pipe
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            connections = {connection.fileno(): pid for pid, connection in self._launchers.items()}
            listening = self._socket.fileno()
            ready, _, _ = select.select([parent, woken, listening, *connections], [], [])
            if parent in ready:
                return
            if woken in ready:
                os.read(woken, 512)
                self._reap()
            for descriptor in ready:
                if descriptor in connections:
                    self._abandon(connections[descriptor])
            if listening in ready:
                connection, _ = self._socket.accept()
                try:
                    self._serve(connection)
                except (OSError, ValueError, KeyError):
                    connection.close()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                connection = self._launchers.pop(pid, None)
                if connection is not None:
                    code = os.waitstatus_to_exitcode(status)
                    with suppress(OSError):
                        connection.sendall((code if code >= 0 else 128 - code).to_bytes(4, "big"))
                    connection.close()

    def _abandon(self, pid: int) -> None:
        """The launcher was ended: so is the process that it stands for."""
        connection = self._launchers.pop(pid, None)
        if connection is not None:
            connection.close()
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        size = int.from_bytes(head, "big")
        try:
            if len(head) != 4 or len(streams) != 3 or size > _REQUEST_MAX:
                raise ValueError("no request")
            body = bytearray()
            while len(body) < size:
                piece = connection.recv(size - len(body))
                if not piece:
                    raise ValueError("half a request")
                body += piece
            request = json.loads(body.decode("utf-8", "surrogateescape"))
            # Texts hash by a seed that is chosen when Python starts, and Spark's partitions must agree on it.
            if request["environment"].get("PYTHONHASHSEED", self._seed) != self._seed:
                connection.sendall(bytes(4))
                connection.close()
                return
            pid = os.fork()
            if pid == 0:
                self._become(request, streams, connection)
            try:
                connection.sendall(pid.to_bytes(4, "big"))
            except OSError:
                os.kill(pid, signal.SIGKILL)  # its launcher was ended while it waited
                raise
            self._launchers[pid] = connection
        finally:
            for stream in streams:
                os.close(stream)

    def _become(self, request: dict[str, Any], streams: list[int], connection: socket.socket) -> NoReturn:
        """The process that was asked for, in the child."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for other in (self._socket, connection, *self._launchers.values()):
                other.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for descriptor in (*self._pipe, *streams):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["environment"])
            time.tzset()
            os.chdir(request["directory"])
            _, module, *arguments = request["arguments"]
            given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
            sys.path[:] = [os.getcwd(), *given, *self._search]
            importlib.invalidate_caches()
            sys.argv = ["-m", *arguments]
            sys.orig_argv = [sys.executable, *request["arguments"]]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code & 0xFF if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:  # noqa: BLE001  as Python itself does at the top of a program
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(status)


def load_what_is_asked_for_later() -> None:
    """Load what a process would load by itself only at its first events, each worker anew: the compiled kernel (0.1 s
    of processor) and pandas (0.4 s).

    pyarrow loads pandas, where it is installed, as soon as it makes an array of Python's or numpy's values. Pandas in
    turn may load packages that start threads, but none for the one thread that ``OMP_NUM_THREADS`` allows here.
    """
    if kernel.comes_compiled():
        kernel.warm_up()
    pa.array([0])


def serve(path: Path) -> None:
    """Listen at ``path``, load everything, and serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the driver's to answer
    server = _Server(path)  # who asks before everything is loaded waits
    try:
        for name in _LOADED:
            importlib.import_module(name)
        load_what_is_asked_for_later()
        gc.collect()
        gc.freeze()
        server.run(sys.stdin.fileno())
    finally:
        with suppress(OSError):
            path.unlink()
        with suppress(OSError):
            path.parent.rmdir()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
