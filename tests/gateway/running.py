"""A gateway in a process of its own, as users start it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pymongo
from prometheus_client.parser import text_string_to_metric_families

from tests import commands

_LISTENING = re.compile(r"listening at (\S+:\d+)")
_STATISTICS = re.compile(r"statistics at (http://\S+)")
_START_S = 300.0


class GatewayProcess:
    """``tailrace gateway`` in front of ``upstream``, on a free port of the loopback address unless told otherwise.

    What it prints goes to ``log``.
    """

    def __init__(self, upstream: str, log: Path, *arguments: str, listen: str = "127.0.0.1:0") -> None:
        self.log = log
        self._options = upstream.partition("/?")[2]
        words = ["gateway", "--upstream", upstream, "--listen", listen, *arguments]
        begun = log.stat().st_size if log.exists() else 0
        with log.open("a") as sink:
            self.process = commands.Command(*words, stdout=sink, stderr=sink)
        try:
            wanted = [_LISTENING] + ([_STATISTICS] if "--metrics" in arguments else [])
            found = [self._await(pattern, begun) for pattern in wanted]
        except BaseException:
            self.process.kill()
            raise
        self.address = found[0]
        self._statistics = found[1] if len(found) > 1 else None

    def _await(self, pattern: re.Pattern[str], begun: int) -> str:
        limit = time.monotonic() + _START_S
        while time.monotonic() < limit:
            if match := pattern.search(self.log.read_text()[begun:]):
                return match[1]
            assert self.process.poll() is None, f"the gateway ended: {self.log.read_text()[begun:]}"
            time.sleep(0.02)
        raise AssertionError(f"the gateway did not say where it listens: {self.log.read_text()[begun:]}")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def uri(self) -> str:
        """The upstream's address with the gateway's in its place."""
        return f"mongodb://{self.address}/?{self._options}"

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def statistics(self) -> dict[str, float]:
        """What it serves to Prometheus, without the prefix; it was started with ``--metrics``."""
        assert self._statistics is not None
        with urllib.request.urlopen(self._statistics, timeout=300) as answer:
            return {
                " ".join([sample.name.removeprefix("tailrace_gateway_"), *sample.labels.values()]): sample.value
                for family in text_string_to_metric_families(answer.read().decode())
                for sample in family.samples
            }

    def handles(self) -> int:
        """How many files and sockets it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def memory(self) -> int:
        """Bytes that it holds in memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) << 10

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it, and give its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(300)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(300)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def streams_of_the_server(uri: str) -> int:
    """How many ``$changeStream`` stages a mongod has run since it started."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        counters = client.admin.command("serverStatus")["metrics"]["aggStageCounters"]
        return int(counters["$changeStream"])


def eventually(holds: Callable[[], Any], what: str, *, within_s: float = 120.0) -> Any:
    """The first value of ``holds`` that is true. Fails with ``what`` after ``within_s``."""
    limit = time.monotonic() + within_s
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < limit, f"{what}: {found!r}"
        time.sleep(0.05)


def lines_of(log: Path) -> Iterator[dict[str, Any]]:
    """The structured lines of a log."""
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            yield json.loads(line)
