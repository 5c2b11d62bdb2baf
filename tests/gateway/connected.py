"""One connection to a gateway or a server, whose commands are sent as they are: no driver chooses another
connection."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import bson
from bson.int64 import Int64

from tests.differential.wire import Wire
from tests.gateway.running import GatewayProcess, eventually

#: Fields of replies that change from moment to moment.
_OF_THE_MOMENT = ("$clusterTime", "operationTime")


class Connected:
    """To ``address``; ``tls``: what to trust."""

    def __init__(self, address: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._wire = Wire.to(f"mongodb://{address}/")
        if tls is not None:
            self._wire._socket = tls.wrap_socket(self._wire._socket, server_hostname=address.rpartition(":")[0])

    @property
    def port(self) -> int:
        """The port of this end."""
        return int(self._wire._socket.getsockname()[1])

    def raw(self, command: dict[str, Any], database: str = "processes") -> bytes:
        return self._wire.exchange(bson.encode({**command, "$db": database}))

    def command(self, command: dict[str, Any], database: str = "processes") -> dict[str, Any]:
        return bson.decode(self.raw(command, database))

    def said(self, command: dict[str, Any], database: str = "processes") -> dict[str, Any]:
        """The reply without times, and without the cursor's number and session in its text."""
        reply = {name: value for name, value in self.command(command, database).items() if name not in _OF_THE_MOMENT}
        for number in (command.get("getMore"), command.get("op"), *command.get("cursors", ())):
            if number is not None:
                reply = {name: _without(value, str(int(number))) for name, value in reply.items()}
        return reply

    def opened(
        self,
        *stages: dict[str, Any],
        collection: Any = "notes",
        database: str = "processes",
        fields: dict[str, Any] | None = None,
        **options: Any,
    ) -> Int64:
        """A stream's cursor."""
        pipeline = [{"$changeStream": options}, *stages]
        aggregate = {"aggregate": collection, "pipeline": pipeline, "cursor": {}, **(fields or {})}
        reply = self.command(aggregate, database)
        assert reply["ok"], reply
        return Int64(reply["cursor"]["id"])

    def more(self, cursor: Int64, collection: str = "notes", database: str = "processes", **fields: Any) -> Any:
        return self.command({"getMore": cursor, "collection": collection, **fields}, database)

    def login(self, user: str, password: str) -> None:
        """Log in as a driver does (SCRAM-SHA-256)."""
        nonce = base64.b64encode(os.urandom(24)).decode()
        first = f"n={user},r={nonce}"
        begun = self.command(
            {
                "saslStart": 1,
                "mechanism": "SCRAM-SHA-256",
                "payload": f"n,,{first}".encode(),
                "options": {"skipEmptyExchange": True},
            },
            "admin",
        )
        assert begun["ok"], begun
        challenge = begun["payload"].decode()
        told = dict(part.split("=", 1) for part in challenge.split(","))
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(told["s"]), int(told["i"]))
        key = hmac.digest(salted, b"Client Key", "sha256")
        last = f"c=biws,r={told['r']}"
        signed = hmac.digest(hashlib.sha256(key).digest(), f"{first},{challenge},{last}".encode(), "sha256")
        proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signed, strict=True))).decode()
        answer = {"saslContinue": 1, "conversationId": begun["conversationId"], "payload": f"{last},p={proof}".encode()}
        ended = self.command(answer, "admin")
        assert ended.get("done"), ended

    def close(self) -> None:
        self._wire.close()


def _without(value: Any, number: str) -> Any:
    return value.replace(number, "<id>").partition(", lsid: {")[0] if isinstance(value, str) else value


def process_of(connection: Connected, gateway: GatewayProcess) -> int:
    """The process of the gateway that has the connection, once one has taken it."""
    found: int = eventually(lambda: _holder(connection, gateway), "no process has the connection")
    return found


def _holder(connection: Connected, gateway: GatewayProcess) -> int | None:
    """The process that holds the socket whose other end is ours."""
    port = gateway.host_and_port[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, own, other, *_, inode = line.split()[:10]
        if [int(each.rpartition(":")[2], 16) for each in (own, other)] == [port, connection.port]:
            return next((pid for pid in children(gateway) if _holds(pid, f"socket:[{inode}]")), None)
    return None


def children(gateway: GatewayProcess) -> list[int]:
    """The processes that serve clients, and others that the gateway has started."""
    tasks = Path(f"/proc/{gateway.pid}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def _holds(pid: int, name: str) -> bool:
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(each) == name:
                return True
    return False


def at_two_processes(gateway: GatewayProcess, **options: Any) -> list[Connected]:
    """Two connections that two processes have."""
    found = [Connected(gateway.address, **options)]
    while True:
        other = Connected(gateway.address, **options)
        if process_of(other, gateway) != process_of(found[0], gateway):
            return [found[0], other]
        other.close()
