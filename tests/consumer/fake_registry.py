"""A schema registry on the loopback: the part of Confluent's interface that its client asks for, and ways to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class FakeRegistry:
    """``schemas``: by number, from 1; ``subjects``: the numbers of each. ``failing``: a status that all requests are
    answered with. ``asked``: the requests."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.subjects: dict[str, list[int]] = {}
        self.failing: int | None = None
        self.asked: list[str] = []
        self.url = ""

    def post(self, path: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Register a schema, or look it up."""
        wanted = {"schema": given["schema"], "schemaType": given.get("schemaType", "AVRO")}
        parts = [unquote(one) for one in path.strip("/").split("/")]
        subject = parts[1]
        if wanted not in self.schemas:
            if parts[-1] != "versions":
                return 404, {"error_code": 40403, "message": "Schema not found"}
            self.schemas.append(wanted)
        number = self.schemas.index(wanted) + 1
        known = self.subjects.setdefault(subject, [])
        if number not in known:
            if parts[-1] != "versions":
                return 404, {"error_code": 40403, "message": "Schema not found"}
            known.append(number)
        version = known.index(number) + 1
        return 200, {"subject": subject, "version": version, "id": number, **wanted}

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """A schema by its number."""
        number = path.rpartition("/")[2]
        if not number.isdigit():
            return 404, {"error_code": 404, "message": "Not found"}
        return 200, self.schemas[int(number) - 1]


@contextmanager
def fake_registry(port: int = 0) -> Iterator[FakeRegistry]:
    """A registry for the length of a test."""
    registry = FakeRegistry()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(*registry.post(urlsplit(self.path).path, given))

        def do_GET(self) -> None:
            self._answer(*registry.get(urlsplit(self.path).path))

        def _answer(self, status: int, answer: dict[str, Any]) -> None:
            registry.asked.append(f"{self.command} {self.path}")
            if registry.failing is not None:
                status, answer = registry.failing, {"error_code": registry.failing, "message": "not so"}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    registry.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
