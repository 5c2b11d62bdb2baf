"""One mongod process: started, watched over, and always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tailrace.embedded import guard
from tailrace.embedded.binary import MongodBinary, find_mongod
from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.in_a_block import StartedInBlock
from tailrace.embedded.ports import LOOPBACK, free_port, give_up_port

ADDRESS_IN_USE = 48  # mongod's exit status
LISTENS = b"aiting for connections"  # the log's words once it has its port; 4.2 begins them with a small letter
_START_TRIES = 5
_STEP_S = 0.02


class Mongod(StartedInBlock):
    """A mongod on the loopback address. Give ``replica_set`` a name for a member, or none for a standalone server.

    A given ``data_dir`` is kept; otherwise a temporary directory is made, and removed by ``close``. It holds ``db/``
    and ``mongod.log``. ``parameters`` are passed by ``--setParameter``, ``arguments`` as they are.
    ``enable_test_commands`` is for fail points. The server ends with the process that started it, however that process
    ends. The port is chosen at the first start and kept.
    """

    def __init__(
        self,
        binary: MongodBinary | None = None,
        *,
        replica_set: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        port: int | None = None,
        parameters: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        enable_test_commands: bool = False,
        oplog_size_mb: int | None = None,
        cache_gb: float = 0.25,
    ) -> None:
        self.binary = binary or find_mongod()
        self.data_dir = (
            Path(data_dir).absolute() if data_dir is not None else Path(tempfile.mkdtemp(prefix="tailrace-mongod-"))
        )
        #: What goes when the server goes, also after a crash: the data directory or one around it, or nothing.
        self.temporary: Path | None = self.data_dir if data_dir is None else None
        self.port = port
        self.pid: int | None = None
        self._fixed_port = port is not None
        self._guard: subprocess.Popen[bytes] | None = None
        self._options = ["--bind_ip", LOOPBACK, "--nounixsocket", "--wiredTigerCacheSizeGB", str(cache_gb)]
        if replica_set is not None:
            self._options += ["--replSet", replica_set]
        if oplog_size_mb is not None:
            self._options += ["--oplogSize", str(oplog_size_mb)]
        settings = {"diagnosticDataCollectionEnabled": False, **(parameters or {})}
        if enable_test_commands:
            settings["enableTestCommands"] = True
        for name, value in settings.items():
            self._options += ["--setParameter", f"{name}={_as_parameter(value)}"]
        self._options += arguments

    @property
    def host(self) -> str:
        """``127.0.0.1:port``."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def uri(self) -> str:
        """A URI for this server alone, whatever its state in a replica set."""
        return f"mongodb://{self.host}/?directConnection=true"

    @property
    def log_path(self) -> Path:
        return self.data_dir / "mongod.log"

    @property
    def is_running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def start(self, *, timeout_s: float = 300.0) -> None:
        """Start it, and wait until it accepts connections. Raises EmbeddedError with the server's own reason."""
        if self.is_running:
            return
        with contextlib.suppress(FileExistsError):
            (self.data_dir / "db").mkdir(parents=True)
        for _ in range(_START_TRIES):
            if not self._fixed_port:
                self.port = free_port()
            status = self._launch(time.monotonic() + timeout_s)
            if status is None:
                self._fixed_port = True
                return
            if status != ADDRESS_IN_USE or self._fixed_port:
                break
        why = f"port {self.port} is in use" if status == ADDRESS_IN_USE else self.last_words()
        raise EmbeddedError(f"mongod {self.binary.version} did not start: {why}")

    def _launch(self, deadline: float) -> int | None:
        """Start the process; ``None`` when it takes connections, else its exit status."""
        arguments = ["--dbpath", str(self.data_dir / "db"), "--port", str(self.port)]
        arguments += ["--logpath", str(self.log_path), "--logappend", *self._options]
        job = {
            "command": self.binary.command(arguments),
            "stop_signal": int(self.binary.stop_signal),
            "parent": os.getpid(),
            "remove": [str(self.temporary)] if self.temporary else [],
        }
        told_before = self.log_path.stat().st_size if self.log_path.exists() else 0
        with (self.data_dir / "output.log").open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, json.dumps(job)],
                env=self.binary.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,  # an interrupt at the terminal is for us to handle
            )
        self._guard = process
        assert process.stdout is not None
        with process.stdout as answer:
            self.pid = int(answer.readline() or 0) or None
        while process.poll() is None:
            if self._takes_connections(told_before):
                return None
            if time.monotonic() > deadline:
                self.kill()
                raise EmbeddedError(f"mongod {self.binary.version} accepted no connection in time: {self.last_words()}")
            time.sleep(_STEP_S)
        return self._ended()

    def _takes_connections(self, told_before: int) -> bool:
        """Whether this very process listens. A connection alone does not say so: where another program was given the
        same port a moment before, that one answers, and ours is about to end with ADDRESS_IN_USE."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(told_before)
            if LISTENS in log.read():
                with socket.create_connection((LOOPBACK, self.port or 0), timeout=1.0):
                    return True
        return False

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._order(b"k")
        self._wait(None)

    def request_stop(self) -> None:
        """Ask it to shut down cleanly, without waiting. It may be called again."""
        self._order(b"t")

    def stop(self, *, timeout_s: float = 120.0) -> None:
        """Shut it down cleanly; SIGKILL if that takes longer than ``timeout_s``."""
        self.request_stop()
        if not self._wait(timeout_s):
            self.kill()

    def close(self) -> None:
        """Stop it, and remove the data directory when it is temporary. It may be called again."""
        if self.temporary is not None:
            self.kill()
            shutil.rmtree(self.data_dir, ignore_errors=True)
            if self.port is not None:
                give_up_port(self.port)
        else:  # a kept port stays ours as long as the process runs: the next one on this directory takes it again
            self.stop()

    def _order(self, order: bytes) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):  # it ended before
                self._guard.stdin.write(order)

    def _wait(self, timeout_s: float | None) -> bool:
        if self._guard is None:
            return True
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._ended()
        return True

    def _ended(self) -> int:
        assert self._guard is not None
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        status = self._guard.wait()
        self._guard = None
        self.pid = None
        return status

    def last_words(self) -> str:
        """The newest error in the log, as the server put it, or else where the log is."""
        words = f"see {self.log_path}"
        with contextlib.suppress(OSError):
            for path in (self.log_path, self.data_dir / "output.log"):
                for line in path.read_text(errors="replace").splitlines()[-200:] if path.exists() else ():
                    words = _severe_message(line) or words
        return words


def _as_parameter(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _severe_message(line: str) -> str | None:
    """The text of a log line (JSON, mongod 4.4 and later) of severity error or fatal."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line.strip() or None
    if not isinstance(entry, dict) or entry.get("s") not in ("E", "F"):
        return None
    detail = entry.get("attr", {}).get("error") or entry.get("attr", {}).get("reason")
    return f"{entry.get('msg')}: {detail}" if detail else str(entry.get("msg"))
