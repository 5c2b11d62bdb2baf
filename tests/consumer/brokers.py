"""Redis and NATS servers of this machine, on the loopback, that a test can stop and start again with their data."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Broker:
    """A server process on ``port``, its data in ``directory``."""

    program = ""

    def __init__(self, directory: Path) -> None:
        found = shutil.which(self.program, path="/usr/sbin:/usr/bin:/usr/local/bin:/bin:/sbin") or shutil.which(
            self.program
        )
        if found is None:
            pytest.skip(f"{self.program} is not installed (Debian: apt install {self.program})")
        self.directory = directory
        self.port = _free_port()
        self._found = found
        self._process: subprocess.Popen[bytes] | None = None

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([self._found, *self.arguments()], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class RedisServer(Broker):
    program = "redis-server"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def arguments(self) -> list[str]:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        return [*where, "--appendonly", "yes", "--appendfsync", "always", "--save", ""]


class NatsServer(Broker):
    program = "nats-server"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def arguments(self) -> list[str]:
        return ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.directory)]
