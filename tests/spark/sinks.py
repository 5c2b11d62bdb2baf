"""Sinks on this machine: a PostgreSQL server, and a stand-in for Elasticsearch that is strict about the bulk format."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tailrace.embedded.ports import free_port

ROOT = Path(__file__).parents[2]
_PLACES = (*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),)


def example(name: str) -> ModuleType:
    """The program ``examples/sinks/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "sinks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PostgreSQL:
    """A server in a directory of its own, that can be away for a while. It does not run as root, so root gives it
    another user's id."""

    def __init__(self, directory: Path, initdb: str, server: str) -> None:
        user = "nobody" if os.geteuid() == 0 else None
        if user:
            shutil.chown(directory, user)
        self._run = partial(
            subprocess.Popen, cwd=directory, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.port = free_port()  # a port that the system gives to nobody else while the server is away
        self._directory, data = directory, str(directory / "data")
        where = ["-k", str(directory), "-h", "127.0.0.1", "-p", str(self.port)]
        self._command = [server, "-D", data, *where, "-c", "shared_buffers=16MB"]
        self._process: subprocess.Popen[bytes] | None = None
        self.dsn = f"host=127.0.0.1 port={self.port} user=test dbname=postgres sslmode=disable"
        assert self._run([initdb, "-D", data, "-U", "test", "--auth=trust", "-N", "--locale=C"]).wait(300) == 0

    def start(self) -> None:
        self._process = self._run(self._command)
        deadline = time.monotonic() + 300
        while not (self._directory / f".s.PGSQL.{self.port}").exists() or not _answers(self.port):
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server, cutting off all clients."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)  # PostgreSQL's "fast" shutdown; SIGTERM would wait for connections
        try:
            self._process.wait(300)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextmanager
def postgresql_server() -> Iterator[PostgreSQL]:
    """A running server, in a temporary directory."""
    path = os.pathsep.join([*map(str, _PLACES), os.environ.get("PATH", "")])
    initdb, server = shutil.which("initdb", path=path), shutil.which("postgres", path=path)
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    directory = Path(tempfile.mkdtemp(prefix="tailrace-pg-", dir="/tmp"))
    try:
        running = PostgreSQL(directory, initdb, server)
        try:
            running.start()
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def postgresql() -> Iterator[str]:
    """The DSN of a running server."""
    with postgresql_server() as running:
        yield running.dsn


def _answers(port: int) -> bool:
    import psycopg2

    try:
        psycopg2.connect(f"host=127.0.0.1 port={port} user=test dbname=postgres sslmode=disable").close()
    except psycopg2.OperationalError:
        return False
    return True


class Index(ThreadingHTTPServer):
    """An index with external versions. ``busy`` actions are refused with 429 first. ``refusal`` is the status of every
    action, and ``refused`` their number; ``outage`` is the status of every request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Bulk)
        self.documents: dict[str, Any] = {}
        self.versions: dict[str, int] = {}
        self.busy = 0
        self.refusal = self.outage = 0
        self.refused = 0
        self.faults: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def apply(self, kind: str, about: dict[str, Any], document: Any) -> int:
        if self.busy:
            self.busy -= 1
            return 429
        if self.refusal:
            self.refused += 1
            return self.refusal
        key, version = about["_id"], about["version"]
        if version <= self.versions.get(key, -1):
            return 409
        self.versions[key] = version
        if kind == "index":
            self.documents[key] = document
            return 200
        return 200 if self.documents.pop(key, None) is not None else 404


class _Bulk(BaseHTTPRequestHandler):
    server: Index

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.outage:
            return self.send_error(self.server.outage)
        try:
            items = self._items(body)
        except (AssertionError, KeyError, ValueError) as error:
            self.server.faults.append(repr(error))
            return self.send_error(400)
        reply = json.dumps({"items": items, "errors": any(s["status"] > 299 for i in items for s in i.values())})
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        return self.wfile.write(reply.encode()) and None

    def _items(self, body: bytes) -> list[dict[str, dict[str, Any]]]:
        assert self.headers["Content-Type"] == "application/x-ndjson"
        assert body.endswith(b"\n"), "the bulk format ends with a newline"
        lines = iter(body[:-1].split(b"\n"))
        items = []
        for line in lines:
            ((kind, about),) = json.loads(line).items()
            assert kind in {"index", "delete"}
            assert set(about) == {"_id", "version", "version_type"}
            assert about["version_type"] == "external"
            assert isinstance(about["version"], int)
            assert 0 < about["version"] < 1 << 63
            assert 0 < len(about["_id"].encode()) <= 512
            document = json.loads(next(lines)) if kind == "index" else None
            assert kind == "delete" or "_id" not in document, "a reserved name"
            items.append({kind: {"_id": about["_id"], "status": self.server.apply(kind, about, document)}})
        return items

    def log_message(self, *_: object) -> None:
        """Print nothing on standard error."""


@contextmanager
def search_index() -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
