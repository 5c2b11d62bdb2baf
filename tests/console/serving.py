"""A console in the test's process, and what it answers over HTTP."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tailrace.cli.panels.sources import Targets
from tailrace.cli.web.server import ConsoleOptions, serving_console
from tailrace.read.source.uri import hide
from tests.patience import PATIENCE_S


class ServedConsole:
    """Asks the console at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and body. A header's name has ``_`` for ``-``."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def state(self) -> dict[str, Any]:
        """Look at these panels."""
        found: dict[str, Any] = json.loads(self.ask("/api/state")[2])
        return found

    def wait_until_it_follows(self) -> None:
        """Wait until the console counts every change."""
        with self.live() as messages:
            for kind, value in messages:
                if kind == "panel" and value["name"] == "activity" and value["data"]["lag"] is not None:
                    return

    @contextmanager
    def live(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """What a page is sent: kinds of messages, and their values."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", "/api/live")
            yield _messages(connection.getresponse())
        finally:
            connection.close()


def panel(console: ServedConsole, name: str, metric: str = "") -> dict[str, Any]:
    """The next reading of the panel ``name``, one that has ``metric`` in it if that is given."""
    with console.live() as messages:
        for kind, value in messages:
            shown = kind == "panel" and value["name"] == name
            if shown and (not metric or metric in [one["name"] for one in value["data"]]):
                found: dict[str, Any] = value
                return found
    raise AssertionError(name)


def _messages(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    kind, deadline = "", time.monotonic() + PATIENCE_S
    while line := answer.readline().decode().rstrip("\n"):
        while line:
            name, _, text = line.partition(": ")
            if name == "event":
                kind = text
            elif name == "data":
                assert time.monotonic() < deadline, "what the test waits for does not come"
                yield kind, json.loads(text)
            line = answer.readline().decode().rstrip("\n")


@contextmanager
def served(uri: str, targets: Targets | None = None, **options: Any) -> Iterator[ServedConsole]:
    """A console of the deployment at ``uri`` on a free port. ``options``: of ``ConsoleOptions``."""
    with serving_console(hide(uri), targets or Targets(), ConsoleOptions(port=0, **options)) as url:
        yield ServedConsole(url)
