"""Azure Blob Storage for tests: Azurite on the loopback, fetched by npm when it is first needed (360 MB).

It keeps its objects in memory. Where npm or Node is missing, Unavailable says so.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import urlencode

from tests.gateway.programs import npm, tool
from tests.patience import PATIENCE_S
from tests.tables.object_server import SECRET, ObjectServer, assert_runs, on_free_ports

_PACKAGES: Final = {"azurite": "3.37.0"}
ACCOUNT: Final = "tester"
KEY: Final = base64.b64encode(SECRET.encode()).decode()
_VERSION: Final = "2021-08-06"


@dataclass(frozen=True)
class AzureServer(ObjectServer):
    """A running Azurite. Its container ``tests`` exists."""

    refusal: ClassVar[str] = "AuthorizationFailure"
    wrong: ClassVar[Mapping[str, str]] = {
        "azure_storage_account_key": base64.b64encode(b"another-secret").decode(),
    }
    listing: ClassVar[str] = "comp=list"
    page: ClassVar[int] = 5000

    def uri(self, prefix: str) -> str:
        return f"az://tests/{prefix}"

    def options(self, address: str | None = None) -> dict[str, str]:
        return {**self.without_key(address), "azure_storage_account_key": KEY}

    def without_key(self, address: str | None = None) -> dict[str, str]:
        """As ``options``."""
        return {
            "azure_storage_account_name": ACCOUNT,
            "azure_storage_endpoint": f"http://{address or self.address}/{ACCOUNT}",
            "azure_allow_http": "true",
        }


def signature_for(rights: str, container: str = "tests") -> str:
    """A shared access signature for a container with these rights (``rl`` reads and lists), for an hour."""
    end = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = [rights, "", end, f"/blob/{ACCOUNT}/{container}", "", "", "", _VERSION, "c", "", "", "", "", "", "", ""]
    given = {"sv": _VERSION, "sr": "c", "sp": rights, "se": end, "sig": _signed("\n".join(fields))}
    return urlencode(given)


@contextmanager
def azure_server(folder: Path) -> Iterator[AzureServer]:
    """Run Azurite; ``folder`` gets its log."""
    folder.mkdir(parents=True, exist_ok=True)
    with on_free_ports(1, lambda ports: _running(folder, *ports)) as server:
        yield server


@contextmanager
def _running(folder: Path, port: int) -> Iterator[AzureServer]:
    node, program = tool("node"), npm(_PACKAGES) / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    flags = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    command = [node, str(program), *flags, "--disableTelemetry", "--skipApiVersionCheck"]
    accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env=os.environ | accounts, start_new_session=True
        )
    try:
        _await(port, process, folder / "log")
        yield AzureServer(f"127.0.0.1:{port}", process.pid, folder)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the container is made."""
    last = time.monotonic() + PATIENCE_S
    while True:
        assert_runs(process, log)
        try:
            if _make_container(port) in (201, 409):
                return
        except OSError:
            pass
        assert time.monotonic() < last, log.read_text(errors="replace")[-2000:]
        time.sleep(0.1)


def _make_container(port: int) -> int:
    path, now = f"/{ACCOUNT}/tests", formatdate(usegmt=True)
    named = f"x-ms-date:{now}\nx-ms-version:{_VERSION}\n/{ACCOUNT}{path}\nrestype:container"
    headers = {
        "x-ms-date": now,
        "x-ms-version": _VERSION,
        "content-length": "0",
        "authorization": f"SharedKey {ACCOUNT}:{_signed('PUT' + chr(10) * 12 + named)}",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _signed(text: str) -> str:
    return base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
