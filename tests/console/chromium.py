"""A real Chromium for tests of the page, driven by the DevTools protocol: Debian's package, without a window."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from websockets.sync.client import connect

from tests.differential.beside import wait_until
from tests.patience import PATIENCE_S

PROGRAM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
INSTALL: Final = "apt-get update && apt-get install --yes --no-install-recommends chromium"
#: No sandbox, since tests run as root in a container; no network but this machine's.
_FLAGS: Final = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-color-profile=srgb", "--remote-debugging-port=0", "--ignore-certificate-errors",
)  # fmt: skip


class Page:
    """One page of the browser. ``problems`` are the errors that it has told: exceptions, and breaches of the policy."""

    def __init__(self, address: str) -> None:
        self._opened = ExitStack()
        self._socket = self._opened.enter_context(connect(address, max_size=1 << 26))
        self._number = 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def _send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(str(message["params"]["entry"]["text"]))
        elif message.get("method") == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {message['params']['message']}")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and whether the system prefers dark colours."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def headers(self, **headers: str) -> None:
        """Send these with each request."""
        self._send("Network.enable")
        self._send("Network.setExtraHTTPHeaders", headers=headers)

    def open(self, url: str) -> None:
        """Go there, and wait until the document has been read."""
        self._send("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def ask(self, expression: str) -> Any:
        """What an expression gives, a promise's value too."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true in the page."""
        wait_until(lambda: bool(self.ask(condition)), condition)

    def screenshot(self, path: Path, **clip: Any) -> None:
        """The page as it looks, as PNG."""
        found = self._send("Page.captureScreenshot", format="png", **clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Let the page go."""
        self._opened.close()


@contextmanager
def opened_page() -> Iterator[Page]:
    """A page of a browser that is started for it, and ended after it."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [PROGRAM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file = Path(folder) / "DevToolsActivePort"
            wait_until(lambda: port_file.exists() and "\n" in port_file.read_text(), "Chromium has started")
            port = port_file.read_text().split()[0]
            pages = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list").read())
            page = Page(next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page"))
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
