"""A client of the wire protocol that costs next to nothing, for benchmarks of gateways: thousands of change streams in
one process, each with a connection of its own, as a driver's waiting streams have. Not a benchmark itself.

It serves both sides, mongod and the gateway, so that what it takes itself is the same.
"""

from __future__ import annotations

import asyncio
import resource
import struct
import time
from collections.abc import Sequence
from typing import Any

import bson

from tailrace.core.raw_bson import elements, find, read_int64
from tailrace.watch.gateway import frame

#: How long a quiet stream's getMore waits.
AWAIT_MS = 60_000


def many_files() -> None:
    """As many open files as the machine allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for wanted in (1 << 20, 1 << 16, hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        except (ValueError, OSError):
            continue
        return


class WireConnection:
    """One connection, one command at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0

    @classmethod
    async def to(cls, host: str, port: int) -> WireConnection:
        made = cls(*await asyncio.open_connection(host, port, limit=1 << 16))
        who = {"driver": {"name": "bench", "version": "1"}, "os": {"type": "Linux"}}
        await made.command({"hello": 1, "$db": "admin", "client": who})
        return made

    async def command(self, command: dict[str, Any]) -> bytes:
        """The reply's document. Raises RuntimeError where it is an error."""
        self._number += 1
        self._writer.write(frame.op_msg(bson.encode(command), request_id=self._number))
        head = await self._reader.readexactly(frame.HEADER_SIZE)
        length = struct.unpack_from("<i", head)[0]
        reply = (await self._reader.readexactly(length - frame.HEADER_SIZE))[5:]
        ok = find(reply, b"ok")
        if ok is None or reply[ok.value_start : ok.end] != struct.pack("<d", 1.0):
            raise RuntimeError(f"{bson.decode(reply)} to {command}")
        return reply

    def close(self) -> None:
        self._writer.close()


class WireStream:
    """A change stream on a collection."""

    def __init__(
        self, connection: WireConnection, database: str, collection: str, stages: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._stages = stages
        self._connection = connection
        self._database = database
        self._collection = collection
        self._id = 0

    async def open(self) -> None:
        reply = await self._connection.command(
            {
                "aggregate": self._collection,
                "pipeline": [{"$changeStream": {}}, *self._stages],
                "cursor": {},
                "$db": self._database,
            }
        )
        self._id = _cursor(reply)[0]

    async def batch(self, await_ms: int = AWAIT_MS) -> list[bytes]:
        """The next batch, each event's bytes."""
        reply = await self._connection.command(
            {
                "getMore": bson.int64.Int64(self._id),
                "collection": self._collection,
                "maxTimeMS": await_ms,
                "$db": self._database,
            }
        )
        return _cursor(reply)[1]


def _cursor(reply: bytes) -> tuple[int, list[bytes]]:
    found = find(reply, b"cursor")
    assert found is not None
    number, events = 0, []
    for element in elements(reply, found.value_start):
        if element.name == b"id":
            number = read_int64(reply, element.value_start)
        elif element.name in (b"firstBatch", b"nextBatch"):
            events = [reply[each.value_start : each.end] for each in elements(reply, element.value_start)]
    return number, events


def delay_ms(event: bytes) -> float:
    """The time from just before the write, which noted ``at``, until now."""
    return (time.monotonic() - float(bson.decode(event)["fullDocument"]["at"])) * 1000
