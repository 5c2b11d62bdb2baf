"""The XML API of Google Cloud Storage, as ``object_store`` uses it, in front of a server that has only the JSON API.

Uploads, lists and deletions become requests to the JSON API; reads are passed on as they are. That server alone decides
whether a condition holds (``x-goog-if-generation-match``): the front passes on the number. The front itself decides who
may read and write, and it keeps the parts of an upload until the last request joins them.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import format_datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.tables.google_keys import READER, owner_of

_ROOT: Final = Path(__file__).parents[2]
#: An answer to a list has at most this many objects.
PAGE: Final = 1000
_NAMESPACE: Final = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
#: How Google words what it refuses.
_ERRORS: Final = {
    HTTPStatus.UNAUTHORIZED: ("AuthenticationRequired", "Authentication required."),
    HTTPStatus.FORBIDDEN: ("AccessDenied", "Access denied."),
    HTTPStatus.PRECONDITION_FAILED: (
        "PreconditionFailed",
        "At least one of the pre-conditions you specified did not hold.",
    ),
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: ("InvalidRange", "The requested range cannot be satisfied."),
}
_NO_BUCKET: Final = ("NoSuchBucket", "The specified bucket does not exist.")
_NO_KEY: Final = ("NoSuchKey", "The specified key does not exist.")
_NO_UPLOAD: Final = ("NoSuchUpload", "The requested upload was not found.")


class Answer(NamedTuple):
    """What a server has answered."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


def ask(server: str, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> Answer:
    """Send one request to ``host:port``."""
    connection = http.client.HTTPConnection(server, timeout=60)
    try:
        connection.request(method, path, body=body or None, headers=headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        #: Of uploads that are not finished: their parts, by number.
        self.uploads: dict[str, dict[int, bytes]] = {}


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        given = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(url.path[1:]).partition("/")
        who = owner_of((self.headers.get("authorization") or "").removeprefix("Bearer "))
        try:
            if not who:
                self._refuse(HTTPStatus.UNAUTHORIZED)
            elif who == READER and self.command not in ("GET", "HEAD"):
                self._refuse(HTTPStatus.FORBIDDEN)
            elif self.command in ("GET", "HEAD"):
                self._read(bucket, key) if key else self._list(bucket, given)
            elif "uploads" in given or "uploadId" in given:
                self._upload_in_parts(bucket, key, given, body)
            elif self.command == "PUT" and "x-goog-copy-source" not in self.headers:
                self._upload(bucket, key, body)
            elif self.command == "DELETE":
                done = ask(self.server.target, "DELETE", _json_path(bucket, key))
                self._answer(204) if done.status < 400 else self._fail(bucket, done)
            else:
                self._refuse(HTTPStatus.NOT_IMPLEMENTED)
        except OSError:
            self._end()

    # -- reads ------------------------------------------------------------------------------------------------------

    def _read(self, bucket: str, key: str) -> None:
        headers = {name: self.headers[name] for name in ("range",) if name in self.headers}
        found = ask(self.server.target, self.command, f"/{bucket}/{quote(key, safe='')}", headers)
        if found.status >= 400:
            self._fail(bucket, found)
            return
        kept = ("etag", "last-modified", "content-range", "content-length", "x-goog-generation", "x-goog-hash")
        named = {name: found.headers[name] for name in kept if name in found.headers}
        if found.status == HTTPStatus.OK:
            named.pop("content-range", None)
        elif named.get("content-range", "").startswith("bytes -"):  # the testbench's end of a shorter object
            self._read_whole(bucket, key)
            return
        if "last-modified" not in named or "etag" not in named:  # Google's testbench leaves them out
            described = self._described(bucket, key, named["x-goog-generation"])
            if described is None:
                self._read(bucket, key)  # replaced meanwhile
                return
            named |= {"etag": f'"{described["etag"]}"', "last-modified": _http_date(described["updated"])}
        self._answer(found.status, named, found.content)

    def _read_whole(self, bucket: str, key: str) -> None:
        """Answer as to a request for an end that is longer than the object."""
        self.headers.replace_header("range", "bytes=0-")
        self._read(bucket, key)

    def _described(self, bucket: str, key: str, generation: str) -> Any:
        found = ask(self.server.target, "GET", f"{_json_path(bucket, key)}?generation={generation}")
        return found.json() if found.status == HTTPStatus.OK else None

    def _list(self, bucket: str, given: dict[str, str]) -> None:
        asked = {name: given[name] for name in ("prefix", "delimiter") if name in given}
        asked["maxResults"] = str(min(PAGE, int(given.get("max-keys", PAGE))))
        if "continuation-token" in given:
            asked["pageToken"] = given["continuation-token"]
        elif "start-after" in given:
            asked["startOffset"] = given["start-after"] + "\0"  # startOffset begins with the name itself
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in asked.items())
        found = ask(self.server.target, "GET", f"/storage/v1/b/{bucket}/o?{query}")
        if found.status >= 400:
            self._fail(bucket, found)
            return
        listing = found.json()
        more = listing.get("nextPageToken")
        lines = [
            f"<Contents><Key>{escape(one['name'])}</Key><Generation>{one['generation']}</Generation>"
            f"<LastModified>{one['updated']}</LastModified><ETag>&quot;{one['etag']}&quot;</ETag>"
            f"<Size>{one.get('size', 0)}</Size></Contents>"
            for one in listing.get("items", [])
        ]
        lines += [
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in listing.get("prefixes", [])
        ]
        if more:
            lines.append(f"<NextContinuationToken>{escape(more)}</NextContinuationToken>")
        head = f"<Name>{bucket}</Name><IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        self._answer_xml(f"<ListBucketResult {_NAMESPACE}>{head}{''.join(lines)}</ListBucketResult>")

    # -- writes -----------------------------------------------------------------------------------------------------

    def _upload(self, bucket: str, key: str, content: bytes) -> dict[str, str] | None:
        """Answers with no body; in an upload of parts, returns the headers to answer with. ``None`` if it failed."""
        border = f"border{uuid.uuid4().hex}"
        described = json.dumps({"name": key, "contentType": "application/octet-stream"})
        parts = f"--{border}\r\nContent-Type: application/json\r\n\r\n{described}\r\n".encode()
        parts += f"--{border}\r\nContent-Type: application/octet-stream\r\n\r\n".encode() + content
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart&name={quote(key, safe='')}"
        if "x-goog-if-generation-match" in self.headers:
            path += f"&ifGenerationMatch={quote(self.headers['x-goog-if-generation-match'])}"
        headers = {"content-type": f"multipart/related; boundary={border}"}
        done = ask(self.server.target, "POST", path, headers, parts + f"\r\n--{border}--\r\n".encode())
        if done.status >= 400:
            self._fail(bucket, done)
            return None
        made = done.json()
        found = {"etag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}
        if self.command == "PUT":
            self._answer(200, found)
        return found

    def _upload_in_parts(self, bucket: str, key: str, given: dict[str, str], body: bytes) -> None:
        name = given.get("uploadId", "")
        parts = self.server.uploads.get(name)
        if "uploads" in given:
            name = uuid.uuid4().hex
            self.server.uploads[name] = {}
            self._answer_xml(
                f"<InitiateMultipartUploadResult {_NAMESPACE}><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            )
        elif parts is None:
            self._answer_error(404, *_NO_UPLOAD)
        elif self.command == "PUT":
            number = int(given["partNumber"])
            parts[number] = body
            self._answer(200, {"etag": f'"{number}"'})
        elif self.command == "DELETE":
            self.server.uploads.pop(name, None)
            self._answer(204)
        else:
            found = self._upload(bucket, key, b"".join(parts[number] for number in sorted(parts)))
            if found is not None:
                self.server.uploads.pop(name, None)
                tag = found["etag"].replace('"', "&quot;")
                named = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>{tag}</ETag>"
                text = f"<CompleteMultipartUploadResult {_NAMESPACE}>{named}</CompleteMultipartUploadResult>"
                self._answer_xml(text, headers={"x-goog-generation": found["x-goog-generation"]})

    # -- answers ----------------------------------------------------------------------------------------------------

    def _fail(self, bucket: str, answer: Answer) -> None:
        """Say in XML what the server has said."""
        if answer.status == HTTPStatus.NOT_FOUND:
            is_there = ask(self.server.target, "GET", f"/storage/v1/b/{bucket}").status == HTTPStatus.OK
            self._answer_error(404, *(_NO_KEY if is_there else _NO_BUCKET))
        else:
            self._refuse(HTTPStatus(answer.status), answer.content.decode(errors="replace"))

    def _refuse(self, status: HTTPStatus, said: str = "") -> None:
        self._answer_error(
            status, *_ERRORS.get(status, (status.phrase.replace(" ", ""), escape(said or status.phrase)))
        )

    def _answer_error(self, status: int, code: str, message: str) -> None:
        self._answer_xml(f"<Error><Code>{code}</Code><Message>{message}</Message></Error>", status)

    def _answer_xml(self, text: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        named = {"content-type": "application/xml; charset=UTF-8", **(headers or {})}
        self._answer(status, named, f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode())

    def _answer(self, status: int, headers: dict[str, str] | None = None, content: bytes = b"") -> None:
        named = {"content-length": str(len(content)), **(headers or {})}
        if self.command != "HEAD" and status != HTTPStatus.NO_CONTENT:
            named["content-length"] = str(len(content))
        self.send_response(status)
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _end(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.close()

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do  # noqa: N815


def _json_path(bucket: str, key: str) -> str:
    return f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}"


def _http_date(text: str) -> str:
    return format_datetime(datetime.fromisoformat(text), usegmt=True)


@contextmanager
def google_front(target: str) -> Iterator[str]:
    """The address of an XML API for the server at ``target``; both are ``host:port``. It is a process of its own,
    since ``deltalake`` holds the interpreter's lock while a query waits for the store."""
    command = [sys.executable, "-m", __name__, target]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def main() -> None:
    """Run until the process that has begun it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has begun it may be interrupted and go on
    server = _Server(sys.argv[1])
    print(f"127.0.0.1:{server.server_address[1]}", flush=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
