"""Ceph's S3 gateway for tests, on the loopback: a monitor, an OSD that keeps its objects in memory, and ``radosgw``.

Debian has them: ``apt install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common``. Where they are missing,
Unavailable says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyarrow import ArrowException, fs

from tests.gateway.programs import Unavailable
from tests.patience import PATIENCE_S
from tests.tables.object_server import KEY, SECRET, ObjectServer, assert_runs, on_free_ports

_PROGRAMS: Final = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_SETTINGS: Final = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = {mon}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {folder}/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon data avail warn = 1
mon data avail crit = 1
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 2147483648
mon data = {folder}/mon
osd data = {folder}/osd
run dir = {folder}
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
admin socket =
pid file =
"""
_RIGHTS: Final = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
}


@dataclass(frozen=True)
class CephServer(ObjectServer):
    """A running gateway. Its bucket ``tests`` exists."""


@contextmanager
def ceph_server(folder: Path) -> Iterator[CephServer]:
    """Run one in ``folder``."""
    if missing := [one for one in _PROGRAMS if shutil.which(one) is None]:
        raise Unavailable(f"waits for {', '.join(missing)} (Debian: radosgw, ceph-mon, ceph-osd, ceph-common)")
    folder.mkdir(parents=True, exist_ok=True)
    with on_free_ports(3, lambda ports: _running(folder, ports)) as server:
        yield server


class _Cluster:
    """The programs of one cluster, in one folder."""

    def __init__(self, folder: Path, mon: str) -> None:
        self.folder, self.log = folder, folder / "log"
        self._mon, self._fsid = mon, str(uuid.uuid4())
        self.processes: list[subprocess.Popen[bytes]] = []
        for one in ("mon", "osd"):
            shutil.rmtree(folder / one, ignore_errors=True)
            (folder / one).mkdir()
        (folder / "keyring").unlink(missing_ok=True)
        (folder / "conf").write_text(_SETTINGS.format(folder=folder, fsid=self._fsid, mon=mon))

    def run(self, *words: str) -> None:
        done = subprocess.run(
            [*words, "-c", str(self.folder / "conf")], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        assert done.returncode == 0, (words, done.stderr[-2000:])

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*words, "-c", str(self.folder / "conf"), "-f"], stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def begin(self) -> None:
        """A monitor and an OSD."""
        keyring, monmap, osd = self.folder / "keyring", str(self.folder / "monmap"), str(uuid.uuid4())
        for name, rights in _RIGHTS.items():
            words = ["ceph-authtool", str(keyring), *([] if keyring.exists() else ["--create-keyring"]), "--gen-key"]
            caps = [word for kind, right in rights.items() for word in ("--cap", kind, right)]
            subprocess.run([*words, "-n", name, *caps], capture_output=True, check=True)
        made = ["monmaptool", "--create", "--clobber", "--addv", "a", self._mon, "--fsid", self._fsid, monmap]
        subprocess.run(made, capture_output=True, check=True)
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", str(keyring))
        assert_runs(self.start("ceph-mon", "-i", "a"), self.log)
        self.run("ceph", "--connect-timeout", "60", "osd", "new", osd)
        self.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self.start("ceph-osd", "-i", "0")
        names = ["--uid=tester", "--display-name=tester", "--access-key", KEY, "--secret", SECRET]
        self.run("radosgw-admin", "user", "create", *names)

    def end(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _running(folder: Path, ports: Sequence[int]) -> Iterator[CephServer]:
    address = f"127.0.0.1:{ports[0]}"
    cluster = _Cluster(folder, f"[v2:127.0.0.1:{ports[1]},v1:127.0.0.1:{ports[2]}]")
    try:
        cluster.begin()
        # Headers and body are sent apart: with Nagle's algorithm each body waits 40 ms for the client's delayed ACK.
        listening = f"--rgw_frontends=beast endpoint={address} tcp_nodelay=1"
        gateway = cluster.start("radosgw", "-n", "client.admin", listening)
        _await(address, gateway, cluster.log)
        yield CephServer(address, gateway.pid, folder)
    finally:
        cluster.end()


def _await(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the bucket is made."""
    last = time.monotonic() + PATIENCE_S
    place = {"endpoint_override": address, "scheme": "http", "region": "us-east-1"}
    while True:
        assert_runs(process, log)
        try:
            fs.S3FileSystem(access_key=KEY, secret_key=SECRET, allow_bucket_creation=True, **place).create_dir("tests")
        except (OSError, ArrowException):
            assert time.monotonic() < last, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)
        else:
            return
