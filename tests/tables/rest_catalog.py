"""An Iceberg REST catalogue: the requests that pyiceberg makes for tables, over its own SQL catalogue in a file. There
is no well-maintained server for that protocol on PyPI."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from pyiceberg import exceptions
from pyiceberg.catalog.rest import CommitTableRequest
from pyiceberg.catalog.sql import SqlCatalog

TOKEN = "a-token-nobody-may-see"
_CODES = {
    exceptions.CommitFailedException: 409,
    exceptions.NamespaceAlreadyExistsError: 409,
    exceptions.NoSuchNamespaceError: 404,
    exceptions.NoSuchTableError: 404,
}


class RestServer:
    """``silent``: so many requests get no answer; ``lost``: so many commits are carried out, and their answer is lost;
    ``broken``: what so many requests are answered with, an HTTP status. ``properties``: of the store that it writes
    metadata to."""

    def __init__(self, file: Path, **properties: str) -> None:
        place = {"uri": f"sqlite:///{file}", "warehouse": f"file://{file.parent}"}
        self.catalog = SqlCatalog("tailrace", **place, **properties)
        self.silent = self.lost = 0
        self.broken: list[int] = []
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"rest": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.catalog.close()


@contextmanager
def rest_catalog(file: Path, **properties: str) -> Iterator[RestServer]:
    server = RestServer(file, **properties)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    rest: RestServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815  names of the standard library

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        self.rest.requests.append(f"{self.command} {self.path}")
        if self.rest.silent:
            self.rest.silent -= 1
            self.close_connection = True
            return
        if self.rest.broken:
            self._answer(self.rest.broken.pop(0), {"error": {"message": f"no: {TOKEN}", "type": "X", "code": 1}})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": {"message": "who are you?", "type": "NotAuthorizedException", "code": 401}})
            return
        try:
            found = self._result([unquote(part) for part in self.path.split("?")[0].strip("/").split("/")[1:]], body)
        except tuple(_CODES) as error:
            code = next(number for kind, number in _CODES.items() if isinstance(error, kind))
            self._answer(code, {"error": {"message": str(error), "type": type(error).__name__, "code": code}})
            return
        if self.command == "POST" and "/tables/" in self.path and self.rest.lost:
            self.rest.lost -= 1
            self.close_connection = True
            return
        self._answer(200, found)

    def _result(self, parts: list[str], body: dict[str, Any]) -> dict[str, Any]:
        catalog = self.rest.catalog
        match (self.command, *parts):
            case ("GET", "config"):
                return {"defaults": {}, "overrides": {}}
            case ("POST", "namespaces"):
                catalog.create_namespace(tuple(body["namespace"]))
                return {"namespace": body["namespace"], "properties": {}}
            case ("GET", "namespaces", name, "tables", table):
                found: Any = catalog.load_table((name, table))
            case ("POST", "namespaces", name, "tables", table):
                request = CommitTableRequest.model_validate(body)
                given: Any = SimpleNamespace(name=lambda: (name, table))
                found = catalog.commit_table(given, request.requirements, request.updates)
            case _:
                raise exceptions.NoSuchTableError(self.path)
        metadata = json.loads(found.metadata.model_dump_json(by_alias=True))
        return {"metadata-location": found.metadata_location, "metadata": metadata, "config": {}}

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
