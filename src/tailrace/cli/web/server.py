"""The console's server: uvicorn in a thread of its own, whatever else the process does."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from tailrace.base.bind_failure import bind_failure
from tailrace.base.threads import CheckedThread
from tailrace.cli.panels.showing import Showing
from tailrace.cli.panels.sources import Targets
from tailrace.cli.web.app import make_app
from tailrace.cli.web.feed import Feed
from tailrace.cli.web.guard import HostNames, is_loopback
from tailrace.cli.web.login import Logins, login_check
from tailrace.errors import UsageError
from tailrace.read.source.uri import ConnectionString
from tailrace.watch.client import connect

_STOP_S: Final = 3
_CONNECTIONS_MAX: Final = 256
_IMAGES: Final = ("config", "system.preimages")


@dataclass(frozen=True)
class ConsoleOptions:
    """``host`` and ``port``: where it listens; ``names``: further names by which it may be asked for. ``login``: only
    the deployment's users are let in, on this machine too. ``images``: documents before and after a change are read."""

    host: str = "127.0.0.1"
    port: int = 8099
    names: Sequence[str] = ()
    certificate: str | None = None
    login: bool = False
    images: bool = True

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    def check(self) -> None:
        """Raises UsageError where documents and passwords would go over a network as they are."""
        if not self.is_local and self.certificate is None:
            raise UsageError(
                f"the console would send documents and passwords over the network unencrypted: {self.host} is not this "
                "machine alone",
                hint="Give --tls-certificate-key-file PEM, or listen at 127.0.0.1 behind a proxy that speaks TLS, or "
                "reach it by ssh -L",
            )
        if self.certificate is not None:
            from tailrace.watch.gateway.tls import server_context  # noqa: PLC0415

            server_context(self.certificate, None)


@contextmanager
def serving_console(uri: ConnectionString, targets: Targets, options: ConsoleOptions) -> Iterator[str]:
    """Serve the console while the block runs, and yield its address. Raises UsageError, and SinkError where it cannot
    listen there."""
    options.check()
    logins = None
    if options.login or not options.is_local:
        shown = [_IMAGES] if options.images else []
        letters = targets.letters.partition(".")
        logins = Logins(login_check(uri, [*shown, (letters[0], letters[2])]))
    with ExitStack() as stack:
        listener = stack.enter_context(_listening(options.host, options.port))
        client = stack.enter_context(connect(uri))
        feed = Feed(lambda is_watched: showing.panels.watch(watched=is_watched))
        showing = Showing(client, uri, targets, feed.send, images=options.images)
        names = HostNames.of(options.host, options.names)
        showing.start()
        stack.callback(showing.stop)
        stack.enter_context(_served(make_app(showing, feed, names, logins), listener, options.certificate, feed))
        host, port = listener.getsockname()[:2]
        scheme = "http" if options.certificate is None else "https"
        yield f"{scheme}://[{host}]:{port}/" if ":" in host else f"{scheme}://{host}:{port}/"


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
            found.listen(128)
        except OSError:
            found.close()
            raise
    except OSError as error:
        another = "name another address (--listen; port 0 is a free one)"
        raise bind_failure("the console cannot listen at", host, port, error, another) from None
    return found


@contextmanager
def _served(app: ASGIApp, listener: socket.socket, certificate: str | None, feed: Feed) -> Iterator[None]:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level=logging.ERROR,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_graceful_shutdown=_STOP_S,
        ssl_certfile=certificate,
        ssl_keyfile=certificate,
    )
    server = uvicorn.Server(config)
    thread = CheckedThread(lambda: asyncio.run(server.serve([listener])), "tailrace-console-server")
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        feed.close()
        thread.join(_STOP_S + 2)
