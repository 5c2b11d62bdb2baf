"""Commands to one mongod as raw BSON over a plain socket: no driver adds, hides or decodes anything.

Sessions, transaction numbers and cursors are fields of the commands, as the workload writes them; replies come back as
bytes, so that what is compared is what the server sent.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import bson
from bson.codec_options import DatetimeConversion
from bson.raw_bson import RawBSONDocument

_HEADER = struct.Struct("<iiii")
#: Decodes whatever a server may store: dates outside Python's years stay numbers.
ANY_VALUE: bson.CodecOptions[dict[str, Any]] = bson.CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)
_OP_MSG = 2013
_TIMEOUT_S = 300.0


def raw_command(kind: str, database: bytes, collection: bytes, fields: bytes = b"") -> bytes:
    """A command for ``Wire.exchange`` whose names need not be UTF-8; ``fields`` are the elements of its other
    fields."""
    body = _text(kind.encode(), collection) + fields + _text(b"$db", database)
    return struct.pack("<i", len(body) + 5) + body + b"\0"


def raw_insert(database: bytes, collection: bytes, *documents: Mapping[str, Any]) -> bytes:
    """The same that inserts."""
    numbered = bson.encode({str(number): one for number, one in enumerate(documents)})
    return raw_command("insert", database, collection, b"\x04documents\0" + numbered)


def _text(name: bytes, value: bytes) -> bytes:
    return b"\x02" + name + b"\0" + struct.pack("<i", len(value) + 1) + value + b"\0"


class CommandError(Exception):
    """The server's reply has ``ok: 0``; ``details`` is the reply."""

    def __init__(self, details: dict[str, Any]) -> None:
        super().__init__(f"{details.get('code')} {details.get('codeName')}: {details.get('errmsg')}")
        self.details = details
        self.code: int = details.get("code", 0)


class Wire:
    """One connection. Not safe for threads."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request_id = 0

    @classmethod
    def to(cls, uri: str) -> Wire:
        """To the first host of a ``mongodb://`` address without credentials."""
        host, _, port = urlsplit(uri).netloc.split(",")[0].partition(":")
        return cls(host, int(port or 27017))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def run(self, database: str, command: Mapping[str, Any]) -> RawBSONDocument:
        """Send one command; its raw reply. Raises CommandError."""
        reply = RawBSONDocument(self.exchange(bson.encode({**command, "$db": database})))
        if reply["ok"] != 1:
            raise CommandError(bson.decode(reply.raw, ANY_VALUE))
        return reply

    def exchange(self, command: bytes) -> bytes:
        """One command document (with ``$db``) and the reply's bytes."""
        self._request_id += 1
        self._socket.sendall(
            _HEADER.pack(len(command) + 21, self._request_id, 0, _OP_MSG) + b"\x00\x00\x00\x00\x00" + command
        )
        size, _, _, _ = _HEADER.unpack(self._read(_HEADER.size))
        return self._read(size - _HEADER.size)[5:]

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionError("the server closed the connection")
            view = view[count:]
        return bytes(data)
