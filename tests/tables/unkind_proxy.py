"""An HTTP proxy before an object store that behaves as stores and networks do on a bad day."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal, Self
from urllib.parse import unquote

#: ``slow down``: a 503 as S3's, and nothing is passed on; ``too many``: a 429; ``full``: a 507; ``quota``: a 403 of a
#: user who may store no more. ``cut``: the connection ends, nothing is passed on.
#: ``lost``: the store does what was asked, and the connection ends before the answer. ``slow``: a tenth of a second.
#: ``no condition``: what the store refuses under a condition is told as done.
Fault = Literal["slow down", "too many", "full", "quota", "cut", "lost", "slow", "no condition"]
#: What is answered, and passed on to nobody.
_REFUSALS: Mapping[str, tuple[int, str, str]] = {
    "slow down": (503, "SlowDown", "Reduce your request rate."),
    "too many": (429, "SlowDown", "Reduce your request rate."),
    "full": (507, "StorageFull", "There is no drive with room left."),
    "quota": (403, "QuotaExceeded", "The user may not store more."),
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    #: Clients open dozens of connections at once. Beyond these (5 by default) one waits a second or more to try again.
    request_queue_size = 128

    def __init__(self, target: str, asked: Callable[[str, str, int], Fault | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.asked = asked


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    #: Headers and body are sent apart. With Nagle's algorithm the body waits 40 ms for the client's delayed ACK.
    disable_nagle_algorithm = True

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path, mark, query = self.path.partition("?")  # Google's clients escape all but letters
        fault = self.server.asked(
            self.command, unquote(path) + mark + query, len(body)
        )  # the client may be killed now: its request has arrived
        if fault == "cut":
            self._end()
        elif fault in _REFUSALS:
            status, code, message = _REFUSALS[fault]
            self._answer(status, [], f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())
        else:
            time.sleep(0.1 if fault == "slow" else 0)
            self._pass_on(body, fault)

    def _pass_on(self, body: bytes, fault: Fault | None) -> None:
        connection = http.client.HTTPConnection(self.server.target)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
        except OSError:
            self._end()
            return
        finally:
            connection.close()
        if fault == "lost":
            self._end()
        elif fault == "no condition" and answer.status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT):
            self._answer(200, [("etag", '"0"')], b"")
        else:
            self._answer(answer.status, answer.getheaders(), content)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), None)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        is_head = self.command == "HEAD" and length is not None
        self.send_header("content-length", str(length) if is_head else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _end(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do  # noqa: N815


class UnkindProxy:
    """Passes requests on to ``target`` (``host:port``). ``fault`` decides what happens to one, by its number, method
    and path."""

    def __init__(self, target: str, fault: Callable[[int, str, str], Fault | None]) -> None:
        self.fault = fault
        self.faults: Counter[str] = Counter()
        self.requests = 0
        #: The bytes of the requests' bodies.
        self.sent = 0
        self._lock = threading.Lock()

        self._server = _Server(target, self._asked)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def _asked(self, method: str, path: str, size: int) -> Fault | None:
        with self._lock:
            self.requests += 1
            self.sent += size
            fault = self.fault(self.requests, method, path)
            if fault is not None:
                self.faults[fault] += 1
            return fault

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
