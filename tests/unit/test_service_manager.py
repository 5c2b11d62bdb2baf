"""What systemd is told, through a socket like the one that it creates."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.base.health import Health
from tailrace.base.service_manager import ServiceManager, notifying
from tailrace.cli.processes import Beat, _health


class Manager:
    """The other end."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(60)

    def next(self) -> list[str]:
        return self._socket.recv(4096).decode().split("\n")

    def until(self, line: str) -> list[str]:
        """All lines up to ``line``."""
        lines: list[str] = []
        while line not in lines:
            lines += self.next()
        return lines

    def rest(self) -> list[str]:
        """What has come already."""
        self._socket.setblocking(False)
        lines: list[str] = []
        try:
            while True:
                lines += self.next()
        except BlockingIOError:
            return lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest) -> Iterator[tuple[Manager, str]]:
    with tempfile.TemporaryDirectory() as directory:  # a short path: a socket's name has an end
        name = str(Path(directory, "notify"))
        address = f"\0{name}" if request.param == "abstract" else name
        found = Manager(address)
        yield found, address.replace("\0", "@")
        found.close()


def test_it_is_told_that_the_process_has_begun_lives_and_ends(manager: tuple[Manager, str]) -> None:
    systemd, address = manager
    health = [Health("it begins", begun=False)]
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}
    with notifying(lambda: health[0], ServiceManager(environment)) as stopping:
        assert set(systemd.until("WATCHDOG=1")) == {"STATUS=it begins", "WATCHDOG=1"}
        health[0] = Health("it works\nwell")
        assert "STATUS=it works well" in systemd.until("READY=1")
        stopping()
        systemd.until("STOPPING=1")
        systemd.until("WATCHDOG=1")  # current work is finished
    assert "STOPPING=1" not in systemd.rest()


def test_the_watchdog_is_not_fed_while_the_process_is_dead(manager: tuple[Manager, str]) -> None:
    systemd, address = manager
    health = [Health("", dead="the handler hangs")]
    looked = []

    def look() -> Health:
        looked.append(health[0])
        return health[0]

    with notifying(look, ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000"})):
        assert systemd.until("STATUS=the handler hangs")[0] == "READY=1"
        while len(looked) < 5:
            time.sleep(0.01)
        assert "WATCHDOG=1" not in systemd.rest()


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}],
)
def test_without_systemd_nothing_is_looked_at(environment: dict[str, str]) -> None:
    def look() -> Health:
        raise AssertionError("nobody has asked")

    with notifying(look, ServiceManager(environment)) as stopping:
        stopping()


def test_a_socket_that_nobody_reads_stops_nothing() -> None:
    with notifying(lambda: Health("it works"), ServiceManager({"NOTIFY_SOCKET": "/nowhere/at/all"})):
        pass


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_s_time_is_that_of_this_process(environment: dict[str, str], seconds: float | None) -> None:
    assert ServiceManager(environment).watchdog_s == seconds


def test_of_several_processes_the_one_that_is_silent_is_named() -> None:
    quick, silent = Beat([0.0, 0.0], None), Beat([0.0, 0.0], 1e-9)
    assert _health([quick, quick]).said == "0 of 2 processes have started"
    quick.tell("READY=1", "WATCHDOG=1")
    assert _health([quick]) == Health("1 of 1 processes have started")
    assert _health([quick, silent]).dead is None, "it has not begun yet"
    silent.tell("READY=1")
    assert _health([quick, silent]).dead == "process 2 of 2 is not alive"
    silent.watchdog_s = 1e9
    silent.tell("WATCHDOG=1")
    assert _health([quick, silent]).dead is None
