"""Who may ask the console for what: only to read, only under one of the console's names, and only after a login where
one is required.

* GET and HEAD alone: nothing here changes a state.
* The ``Host`` header must be one of the console's names. A page of another site may have its own name lead to this
  machine (DNS rebinding); its requests name that site.
* Beyond this machine, and wherever a login is wanted: HTTP Basic, checked by ``Logins``.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tailrace.cli.web.login import Logins

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_READ_ONLY: Final = ("GET", "HEAD")
#: Sent with every answer. No inline script or style, nothing from elsewhere, no frame around it, nothing kept.
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_CHALLENGE: Final = ("www-authenticate", 'Basic realm="tailrace console", charset="UTF-8"')


@dataclass(frozen=True)
class HostNames:
    """The names by which the console may be asked for. ``any_address``: also by any IP address, where it listens beyond
    this machine: another site that has its name lead here still names itself."""

    names: frozenset[str]
    any_address: bool = False

    @classmethod
    def of(cls, listens_at: str, names: Iterable[str] = ()) -> HostNames:
        """Those of a console that listens at an address; ``names`` are further ones."""
        here = is_loopback(listens_at)
        own = {"localhost", "127.0.0.1", "::1"} if here else set()
        return cls(frozenset(name.lower() for name in (*own, listens_at, *names)), any_address=not here)

    def __contains__(self, host: object) -> bool:
        """Whether the value of a ``Host`` header names the console."""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name is None:
            return False
        return name in self.names or (self.any_address and _address(name) is not None)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class Guard:
    """Stands before the console's answers. ``logins``: who may see them; ``None``: everyone who reaches the address."""

    def __init__(self, app: ASGIApp, names: HostNames, logins: Logins | None) -> None:
        self._app = app
        self._names = names
        self._logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            return  # no websocket; and nothing is to be done when the server starts or ends
        refusal = self._refusal(scope)
        if refusal is None and self._logins is not None:
            refusal = await self._login(scope, self._logins)
        if refusal is not None:
            await _refuse(send, *refusal)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(message)
            await send(message)

        await self._app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str, tuple[tuple[str, str], ...]] | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._names:
            return 421, "this is not a name of this console: tailrace console --host NAME adds one", ()
        if scope["method"] not in _READ_ONLY:
            return 405, "the console changes nothing: only GET is allowed", (("allow", "GET, HEAD"),)
        site = next((value for name, value in scope["headers"] if name == b"sec-fetch-site"), b"none")
        if site not in (b"none", b"same-origin") and scope["path"] != "/":
            return 403, "requests from another site are refused", ()
        return None

    async def _login(self, scope: Scope, logins: Logins) -> tuple[int, str, tuple[tuple[str, str], ...]] | None:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        client = scope.get("client")
        address = "" if client is None else str(client[0])
        found = await asyncio.to_thread(logins.admit, address, header)
        if found.is_admitted:
            return None
        if found.retry_s:
            return 429, found.reason, (("retry-after", str(found.retry_s)),)
        return 401, found.reason, (_CHALLENGE,)


def _add_headers(message: MutableMapping[str, Any]) -> None:
    message["headers"] = [
        *message.get("headers", ()),
        *((name.encode(), value.encode()) for name, value in HEADERS.items()),
    ]


async def _refuse(send: Send, status: int, reason: str, headers: Iterable[tuple[str, str]]) -> None:
    body = f"{status} {HTTPStatus(status).phrase}: {reason}\n".encode()
    start: dict[str, Any] = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            *((name.encode(), value.encode()) for name, value in headers),
        ],
    }
    _add_headers(start)
    await send(start)
    await send({"type": "http.response.body", "body": body})
