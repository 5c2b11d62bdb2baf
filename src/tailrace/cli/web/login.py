"""Who is let in: a user of the deployment, by a login there with the name and password that the browser has sent.

The console keeps no passwords and no accounts. Nobody sees a document here that they could not read at the deployment:
a user who may not read the oplog, or another collection whose documents the console shows, is not let in. A successful
login is remembered for a minute, as a keyed hash.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.uri_parser import parse_uri

from tailrace.errors import TailraceError, UsageError
from tailrace.read.source.connection import open_client
from tailrace.read.source.failure import source_error
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tailrace.read.source.uri import ClientOptions, ConnectionString

#: For how long, at most, a user who was removed or has a new password is still let in.
_REMEMBERED_S: Final = 60.0
#: How many failures of one address are answered in a minute, and how many of all addresses together.
FAILURES_MAX: Final = 5
_FAILURES_OF_ALL_MAX: Final = 60
_MINUTE_S: Final = 60.0
_HEADER_MAX: Final = 2_048
_NAMES_MAX: Final = 1_000
_WRONG: Final = "name and password of a user of the deployment, who may read what the console shows"
#: Of the server: the login failed; the user may not, or there is no such user on a shard.
_AUTHENTICATION_FAILED: Final = 18
_REFUSED: Final = (13, _AUTHENTICATION_FAILED)
_PATIENCE_MS: Final = 5_000

#: Tries a login: ``None`` if the user may see the console, otherwise why not. Raises where that cannot be found out.
Check = Callable[[str, str], str | None]


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether somebody is let in; if not, why, and after how many seconds another try is answered."""

    is_admitted: bool
    reason: str = ""
    retry_s: int = 0


class Logins:
    """Admits by ``check``, one login at a time, and not more failures than a person makes. From any thread."""

    def __init__(self, check: Check, clock: Callable[[], float] = time.monotonic) -> None:
        self._check = check
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        #: Until when a login counts, by its keyed hash.
        self._good: dict[bytes, float] = {}
        #: When logins have failed, by address; under ``None`` those of all.
        self._failed: dict[str | None, list[float]] = {}

    def admit(self, address: str, header: bytes | None) -> Admission:
        """Whether the ``Authorization`` header of a request from ``address`` names a user who may see the console."""
        pair = None if header is None else _pair(header)
        if pair is None:
            return Admission(False, _WRONG)
        digest = hmac.digest(self._key, "\0".join(pair).encode(), hashlib.sha256)
        if self._good.get(digest, 0.0) > self._clock():
            return Admission(True)
        with self._lock:
            if self._good.get(digest, 0.0) > self._clock():
                return Admission(True)  # the browser's other requests, which have waited for the first one
            wait = self._wait(address)
            if wait:
                return Admission(False, "too many logins have failed", wait)
            return self._checked(address, pair, digest)

    def _checked(self, address: str, pair: tuple[str, str], digest: bytes) -> Admission:
        try:
            reason = self._check(*pair)
        except (TailraceError, PyMongoError):
            return Admission(False, "the deployment cannot be reached at the moment", 5)
        now = self._clock()
        if reason is None:
            self._good = {one: until for one, until in self._good.items() if until > now}
            self._good[digest] = now + _REMEMBERED_S
            self._failed.pop(address, None)
            return Admission(True)
        for whose in (address, None):
            self._failed.setdefault(whose, []).append(now)
        return Admission(False, reason)

    def _wait(self, address: str) -> int:
        """For how many seconds no login from ``address`` is answered."""
        since = self._clock() - _MINUTE_S
        self._failed = {
            whose: kept for whose, times in self._failed.items() if (kept := [at for at in times if at > since])
        }
        for whose, most in ((address, FAILURES_MAX), (None, _FAILURES_OF_ALL_MAX)):
            times = self._failed.get(whose, [])
            if len(times) >= most:
                return max(1, int(times[-most] - since) + 1)
        return 0


def _pair(header: bytes) -> tuple[str, str] | None:
    """Name and password of a header of HTTP Basic."""
    scheme, _, value = header.partition(b" ")
    if scheme.lower() != b"basic" or len(header) > _HEADER_MAX:
        return None
    try:
        name, colon, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
    except ValueError:
        return None
    if not colon or not name or len(name) > _NAMES_MAX:
        return None
    return name, password


def login_check(uri: ConnectionString, namespaces: Sequence[tuple[str, str]] = ()) -> Check:
    """Logs in at the deployment of ``uri`` as the user of a pair, and reads as that user what the console shows
    documents of: the oplog, and the collections ``namespaces``. Raises UsageError where ``uri`` has no user: then the
    deployment has none that could be asked for."""
    source = _login_source(uri)

    def check(name: str, password: str) -> str | None:
        options = ClientOptions(
            username=name, password=password, authSource=source, authMechanism="DEFAULT", maxPoolSize=4
        )
        with open_client(uri, **options, serverSelectionTimeoutMS=_PATIENCE_MS) as client:
            try:
                client.admin.command("ping")
                return _missing_right(client, uri, options, namespaces)
            except PyMongoError as error:
                known = source_error(error, client)
                if known.code != _AUTHENTICATION_FAILED:
                    raise known from None
                return _WRONG

    return check


def _login_source(uri: ConnectionString) -> str:
    """The database whose users log in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were given when the client was opened
        parsed = parse_uri(uri.reveal())
    options = parsed["options"]
    if parsed["username"] is None and "authMechanism" not in options:
        raise UsageError(
            "for other machines the console asks for a user of the deployment, and the connection URI has none",
            hint="Give a URI that logs in, or let it listen only on this machine: --listen 127.0.0.1:8099",
        )
    found = str(options.get("authSource") or "admin")
    return "admin" if found == "$external" else found


def _missing_right(
    client: MongoClient[Any], uri: ConnectionString, options: ClientOptions, namespaces: Sequence[tuple[str, str]]
) -> str | None:
    """What the user of ``client`` may not read of what the console shows."""
    for what, read in _reads(client, uri, options, namespaces):
        try:
            read()
        except (TailraceError, OperationFailure) as error:
            if error.code not in _REFUSED:
                raise
            return f"this user may not read {what}, which the console shows"
    return None


def _reads(
    client: MongoClient[Any], uri: ConnectionString, options: ClientOptions, namespaces: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, Callable[[], object]]]:
    cluster = Cluster.discover(client, uri, options)
    with ExitStack() as stack:
        if cluster is not None:
            stack.callback(cluster.close)
        oplogs = [client] if cluster is None else [cluster.client(shard.name) for shard in cluster.shards()]
        for each in oplogs:
            yield "local.oplog.rs", MongodSource(each, retry_seconds=1.0, waits=False).oldest
        for database, collection in namespaces:
            for each in oplogs if database == "config" else [client]:
                yield f"{database}.{collection}", partial(each[database][collection].find_one, {}, {"_id": 1})
