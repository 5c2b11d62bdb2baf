"""Commands in processes of their own that are forked from one that has imported everything.

Starting Python and importing what ``tailrace watch`` needs takes half a second of processor, and as long again if the
compiled code is loaded; the tests start hundreds of commands. A test of imports, of the interpreter's own options or of
the environment that they read starts Python itself.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any

from tests.patience import PATIENCE_S

_NOTHING = subprocess.DEVNULL


class CommandServer:
    """The process that forks; started with the first command. ``modules`` are what it has imported, in place of what
    commands need."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], files: list[int]) -> None:
        with self._lock:
            if self._control is None or self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
            self._control.sendmsg([json.dumps(request).encode()], ancillary)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.command_server", str(theirs.fileno()), *self._modules],
                stdin=_NOTHING, stdout=_NOTHING, pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        self._control = ours
        atexit.register(self._end, ours, self._process)

    @staticmethod
    def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        control.close()
        process.wait()


_server = CommandServer()


class Signalled:
    """Passes on signals as a ``Popen`` does: none to a process that has ended."""

    pid: int

    def poll(self) -> int | None:
        raise NotImplementedError

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Command(Signalled):
    """A running ``tailrace`` command, or the program ``code``, with the methods of a ``Popen``, and its files, but no
    pipes."""

    def __init__(
        self,
        *arguments: str,
        stdin: int | IO[Any] = _NOTHING,
        stdout: int | IO[Any] = _NOTHING,
        stderr: int | IO[Any] = _NOTHING,
        env: Mapping[str, str] | None = None,
        code: str | None = None,
        server: CommandServer = _server,
    ) -> None:
        self.args = ["tailrace" if code is None else "-c", *arguments]
        self.returncode: int | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": arguments, "code": code, "cwd": os.getcwd(), "env": dict(env or os.environ)}
        with theirs, open(os.devnull, "r+b") as nothing:
            files = [nothing if file == _NOTHING else file for file in (stdin, stdout, stderr)]
            numbers = [file if isinstance(file, int) else file.fileno() for file in files]
            server.ask(request, [*numbers, theirs.fileno()])
        self._told = ours
        self.pid = int(self._hear() or b"0")
        assert self.pid, "the process that forks commands has ended"

    def _hear(self) -> bytes:
        return self._told.recv(64)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            return self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._hear())
            self._told.close()
        return self.returncode


class Piped(Command):
    """One whose standard output is read here, as with a ``Popen`` with a pipe. Its standard error is ours."""

    def __init__(self, *arguments: str, code: str | None = None, server: CommandServer = _server) -> None:
        ours, theirs = os.pipe()
        self.stdout = open(ours, "rb")  # noqa: SIM115  as long as the command
        try:
            super().__init__(*arguments, stdout=theirs, stderr=2, code=code, server=server)
        finally:
            os.close(theirs)

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait(PATIENCE_S)


def run(
    *arguments: str, input: bytes = b"", env: Mapping[str, str] | None = None, code: str | None = None
) -> subprocess.CompletedProcess[bytes]:
    """``tailrace ARGUMENTS...`` to its end, as ``subprocess.run`` does with both outputs captured. With ``code`` that
    program, as of ``python -c``."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(input)
        stdin.seek(0)
        command = Command(*arguments, stdin=stdin, stdout=out, stderr=err, env=env, code=code)
        try:
            status = command.wait(PATIENCE_S)
        except BaseException:
            command.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command.args, status, out.read(), err.read())


def run_text(
    *arguments: str, env: Mapping[str, str] | None = None, code: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The same with the outputs as text."""
    done = run(*arguments, env=env, code=code)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
