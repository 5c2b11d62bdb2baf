"""A config server that claims to be a mongos: there is no wheel with a real one.

Drivers, and the gateway, then treat it as one: no replica set, no members, the shards found by ``getShardMap``.
``listensAt`` in a hello tells one from another.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import bson

from tailrace.watch.gateway.frame import OP_MSG, OpMsg, OpReply, with_document

_HEADER = struct.Struct("<iiii")


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


def _frame(sock: socket.socket) -> bytes:
    head = _receive(sock, _HEADER.size)
    return head + _receive(sock, _HEADER.unpack(head)[0] - _HEADER.size)


def _as_mongos(frame: bytes, port: int) -> bytes:
    parsed = OpMsg.parse(frame) if _HEADER.unpack_from(frame)[3] == OP_MSG else OpReply.parse(frame)
    document = parsed.document if isinstance(parsed, OpMsg) else parsed.documents[0]
    reply = bson.decode(document)
    if "maxWireVersion" not in reply or "setName" not in reply:
        return frame
    for name in (
        "hosts",
        "setName",
        "setVersion",
        "primary",
        "me",
        "electionId",
        "secondary",
        "configsvr",
        "topologyVersion",
    ):
        reply.pop(name, None)
    return with_document(parsed, bson.encode({**reply, "msg": "isdbgrid", "listensAt": port}))


def _serve(client: socket.socket, upstream: tuple[str, int]) -> None:
    port = client.getsockname()[1]
    with suppress(OSError), client, socket.create_connection(upstream) as server:
        while True:
            server.sendall(_frame(client))
            client.sendall(_as_mongos(_frame(server), port))


@contextmanager
def fake_mongos(host: str, port: int) -> Iterator[str]:
    """The URI of one in front of the config server at ``host:port``."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=_serve, args=(client, (host, port)), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"mongodb://127.0.0.1:{listening.getsockname()[1]}/"
