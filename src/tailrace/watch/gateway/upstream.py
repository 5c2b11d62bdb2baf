"""The server behind the gateway: which member it is at the moment, and connections to it."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from pymongo import MongoClient, monitoring
from pymongo.topology_description import TopologyDescription
from pymongo.uri_parser import parse_uri

from tailrace.errors import SourceError, UsageError
from tailrace.read.source.connection import open_client
from tailrace.read.source.uri import ConnectionString
from tailrace.watch.gateway.read_preference import unmatched

#: Tells our own connections from those of clients, in the server's log and for its fail points.
APP_NAME: Final = "tailrace-gateway"
#: How long a client's connection waits for a primary before it is made to another member.
_PRIMARY_S: Final = 5.0
_CONNECT_S: Final = 10.0
_BUFFER: Final = 1 << 16

_WRITABLE: Final = ("RSPrimary", "Mongos", "Standalone", "LoadBalancer")

_log = logging.getLogger("tailrace.gateway")


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Channel(NamedTuple):
    """Both directions of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Upstream(monitoring.TopologyListener):
    """Follows the deployment that ``uri`` names, and connects to the member that takes writes; with
    ``directConnection``, to the one that is named.

    ``client``  reads the deployment for the engine; ``on_change`` is called in the event loop when another member takes
    writes, or none does any more

    All connections of all clients go to one member: a mongos knows the cursors and transactions of no other one.
    """

    def __init__(self, uri: ConnectionString, on_change: Callable[[Address | None], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._closed = False
        #: The member that takes writes; ``None`` if there is none.
        self.address: Address | None = None
        #: The last one that did.
        self._last: Address | None = None
        self._writable: list[Address] = []
        self._others: list[Address] = []
        #: Which of several that take writes is to be taken.
        self._preferred: Address | None = None
        self._description: TopologyDescription | None = None
        # It looks at the URI first, because it says what is wrong with a URI and hides its secrets.
        self.client: MongoClient[Any] = open_client(uri, event_listeners=[self], appname=APP_NAME)
        parsed = _parsed(uri)
        #: Whether the upstream URI logs in.
        self.has_users = parsed["username"] is not None or "authMechanism" in parsed["options"]
        self._ssl = _tls_of(uri)

    # -- what PyMongo tells, in threads of its own ------------------------------------------------------------------

    def opened(self, event: monitoring.TopologyOpenedEvent) -> None:
        """Nothing is known yet."""

    def closed(self, event: monitoring.TopologyClosedEvent) -> None:
        """The client was closed."""

    def description_changed(self, event: monitoring.TopologyDescriptionChangedEvent) -> None:
        """A member has come, gone, or been elected."""
        self._description = event.new_description
        writable, readable = [], []
        # A URI that names one member means that one, hidden ones too: no connection waits for a primary.
        is_one = event.new_description.topology_type_name == "Single"
        wanted = (*_WRITABLE, "RSSecondary", "RSOther") if is_one else _WRITABLE
        for address, server in event.new_description.server_descriptions().items():
            if server.server_type_name in wanted:
                writable.append(Address(address[0], address[1] or 27017))
            elif server.server_type_name == "RSSecondary":
                readable.append(Address(address[0], address[1] or 27017))
        if not self._closed:
            try:
                self._loop.call_soon_threadsafe(self._take_over, writable, readable)
            except RuntimeError:
                self._closed = True  # the loop has ended before the client

    def unmatched(self, command: bytes) -> str | None:
        """The read preference of a command, as text, if no member of the deployment can fulfil it."""
        return unmatched(self._description, command)

    def _take_over(self, writable: list[Address], readable: list[Address]) -> None:
        self._writable, self._others = writable, readable
        if self._preferred in writable:
            self.address = self._preferred
        elif self.address not in writable:
            self.address = writable[0] if writable else None
        if self.address is not None and self.address != self._last:
            _log.info("the server behind the gateway is %s", self.address)
            self._last = self.address
            self._on_change(self.address)
        elif self.address is None and self._last in readable:
            # It says so itself. A member of unknown state may still be primary: those connected to it will see.
            _log.info("%s no longer takes writes, and no other member does yet", self._last)
            self._last = None
            self._on_change(None)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def prefer(self, address: Address | None) -> None:
        """Of several mongos, take this one, as the other processes of a gateway do: a cursor or a transaction that one
        of a client's connections begins must be found from the others."""
        if address != self._preferred:
            self._preferred = address
            self._take_over(self._writable, self._others)

    # -- what clients' connections need -----------------------------------------------------------------------------

    async def connect(self) -> tuple[Address, Channel]:
        """A new connection to the member that takes writes; if there is none for a while, to one that can be read.
        Raises SourceError."""
        while True:
            address = await self.chosen()
            channel = await self._connected(address)
            if self.address in (None, address):
                return address, channel
            # Another one was elected meanwhile, and ``on_change`` has not found this connection yet.
            channel.writer.close()

    async def _connected(self, address: Address) -> Channel:
        name = address.host if self._ssl is not None else None
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=self._ssl, server_hostname=name, limit=_BUFFER
                )
        except (OSError, TimeoutError) as error:
            raise SourceError(f"{address} cannot be reached: {error or type(error).__name__}") from None
        keep_alive(writer)
        return Channel(reader, writer)

    async def chosen(self) -> Address:
        """Where the next connection is made to. Raises SourceError if there is no member for a while."""
        deadline = self._loop.time() + _PRIMARY_S
        while self.address is None:
            changed = self._changed
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                if self._others:
                    return self._others[0]
                raise SourceError("no member of the deployment can be reached at the moment") from None
        return self.address

    def close(self) -> None:
        """Close the engine's client. Connections that were made stay open. Takes a moment."""
        self._closed = True
        self.client.close()


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the system find out within two minutes that the other end has gone."""
    found = writer.get_extra_info("socket")
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 120_000)):
        option = getattr(socket, name, None)
        if option is not None:
            found.setsockopt(socket.IPPROTO_TCP, option, value)


def _parsed(uri: ConnectionString) -> dict[str, Any]:
    """The parts of a URI. PyMongo's warnings were already given when the client was opened."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(parse_uri(uri.reveal(), validate=True, warn=True))


def _tls_of(uri: ConnectionString) -> ssl.SSLContext | None:
    """What the URI says about TLS, for connections that are not PyMongo's."""
    options = _parsed(uri)["options"]
    is_srv = uri.reveal().startswith("mongodb+srv://")
    if not options.get("tls", is_srv):
        return None
    insecure = options.get("tlsInsecure", False)
    try:
        context = ssl.create_default_context(cafile=options.get("tlsCAFile"))
        if options.get("tlsCertificateKeyFile"):
            context.load_cert_chain(
                options["tlsCertificateKeyFile"], password=options.get("tlsCertificateKeyFilePassword")
            )
        if options.get("tlsCRLFile"):
            context.verify_flags = ssl.VERIFY_CRL_CHECK_LEAF
            context.load_verify_locations(options["tlsCRLFile"])
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the certificate in the upstream URI cannot be used: {error}") from None
    if insecure or options.get("tlsAllowInvalidHostnames") or options.get("tlsAllowInvalidCertificates"):
        context.check_hostname = False
    if insecure or options.get("tlsAllowInvalidCertificates"):
        context.verify_mode = ssl.CERT_NONE
    return context
