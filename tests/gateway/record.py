"""Records what drivers and a server say to one another, for the fuzzer to start from.

    python -m tests.gateway.record            writes tests/gateway/frames.bin again

Each program of ``drivers/`` that runs here, and PyMongo, use an embedded server through a proxy that keeps one message
of each kind: by direction, opcode, flags and command. Messages follow one another in the file, each with its length.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pymongo

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway import frame
from tailrace.watch.gateway.compression import decompress
from tests.gateway.programs import PROGRAMS, Unavailable

FRAMES = Path(__file__).parent / "frames.bin"
_LARGEST = 2000


def recorded() -> list[bytes]:
    """The messages of the file."""
    return list(messages_of(FRAMES.read_bytes()))


def messages_of(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        length = frame.parse_header(data[at : at + frame.HEADER_SIZE]).length
        yield data[at : at + length]
        at += length


class Recorder:
    """A proxy in front of ``host:port`` that keeps what passes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"mongodb://127.0.0.1:{self._listener.getsockname()[1]}/?directConnection=true"
        self.kept: dict[tuple[Any, ...], bytes] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._upstream)
            for source, sink, direction in ((client, server, "to server"), (server, client, "to client")):
                threading.Thread(target=self._pass, args=(source, sink, direction), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with suppress(OSError), source.makefile("rb") as reader:
            while head := reader.read(frame.HEADER_SIZE):
                message = head + reader.read(frame.parse_header(head).length - len(head))
                self._keep(message, direction)
                sink.sendall(message)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _keep(self, message: bytes, direction: str) -> None:
        if len(message) > _LARGEST:
            return
        op_code = frame.parse_header(message).op_code
        compressor = message[24] if op_code == frame.OP_COMPRESSED else None
        plain = message if compressor is None else decompress(message)
        flags, name = 0, b""
        if frame.parse_header(plain).op_code == frame.OP_MSG:
            parsed = frame.OpMsg.parse(plain)
            flags, name = parsed.flags, frame.command_name(parsed.document)
        key = (direction, op_code, compressor, flags, name, len(parsed.sequences) if name else 0)
        if key not in self.kept or len(message) < len(self.kept[key]):
            self.kept[key] = message


def main() -> int:
    with ReplicaSet(1, enable_test_commands=True) as replica_set:
        recorder = Recorder(replica_set.members[0].host)
        for name, program in PROGRAMS.items():
            for more in (
                "",
                "&compressors=zlib",
                *(("&compressors=snappy", "&compressors=zstd") if name == "c" else ()),
            ):
                try:
                    program(recorder.uri + more, f"recorded_{name}")
                except Unavailable as reason:
                    print(f"{name} was left out: {reason}", file=sys.stderr)
        for more in ("", "&compressors=zlib", "&compressors=snappy", "&compressors=zstd"):
            with pymongo.MongoClient[Any](recorder.uri + more) as client, client.recorded.c.watch() as stream:
                client.recorded.c.insert_many([{"_id": index} for index in range(3)])
                next(stream)
                client.recorded.drop_collection("c")
    FRAMES.write_bytes(b"".join(recorder.kept.values()))
    print(f"{len(recorder.kept)} messages, {FRAMES.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
