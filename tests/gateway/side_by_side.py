"""The same commands to the server and to a gateway in front of it, as raw bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.raw_bson import elements, encode_document
from tailrace.embedded import ReplicaSet
from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.quiet import QUIET
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

#: The version of the run comes first.
VERSIONS = tuple(dict.fromkeys((SERVER_VERSION, "5.0.4", "4.4.2")))
#: For tests that take long: in a plain run only the first version. The oldest answers differently from the default one,
#: and the one in between like one of these two.
BETWEEN_IS_SLOW = (VERSIONS[0], *(IN_BETWEEN if version == "5.0.4" else version for version in VERSIONS[1:]))
OLDER_ARE_SLOW = (VERSIONS[0], *(pytest.param(version, marks=pytest.mark.slow) for version in VERSIONS[1:]))
_OF_THE_CONNECTION = (b"$clusterTime", b"operationTime")


class SideBySide:
    """``server`` and ``gateway`` are connections; ``commands`` at either are answered by the same deployment."""

    def __init__(self, deployment: ReplicaSet, running: RunningGateway) -> None:
        self.deployment = deployment
        self.running = running
        self.server = Wire.to(deployment.uri)
        self.gateway = Wire.to(running.uri())
        # A test may talk to the server for a long time before it talks to the gateway, and a silent client is
        # disconnected.
        self.gateway.run("admin", {"ping": 1})

    def close(self) -> None:
        self.server.close()
        self.gateway.close()

    def both(
        self, database: str, command: Mapping[str, Any], ours: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two replies, which carry the server's times and are equal apart from cursor ids."""
        raw = self.server.exchange(bson.encode({**command, "$db": database}))
        mine = self.gateway.exchange(bson.encode({**(ours or command), "$db": database}))
        names = [[element.name for element in elements(reply)] for reply in (raw, mine)]
        assert names[0] == names[1], (bson.decode(raw, ANY_VALUE), bson.decode(mine, ANY_VALUE))
        native, through = RawBSONDocument(raw), RawBSONDocument(mine)
        assert comparable(native) == comparable(through), (
            bson.decode(raw, ANY_VALUE),
            bson.decode(mine, ANY_VALUE),
        )
        return bson.decode(raw, ANY_VALUE), bson.decode(mine, ANY_VALUE)


def comparable(reply: RawBSONDocument) -> bytes:
    """The reply without times, and with a mark in place of the cursor's id."""
    raw = bytes(reply.raw)
    left = encode_document(
        *(raw[each.start : each.end] for each in elements(raw) if each.name not in _OF_THE_CONNECTION)
    )
    cursor_id = reply["cursor"]["id"] if "cursor" in reply else 0
    return left.replace(bson.encode({"": Int64(cursor_id)})[6:-1], b"<the id>") if cursor_id else left


def batch_of(reply: bytes) -> list[bytes]:
    """The events of a reply. Raises AssertionError for an error."""
    document = RawBSONDocument(reply)
    assert document["ok"] == 1, bson.decode(reply, ANY_VALUE)
    cursor = document["cursor"]
    return [bytes(each.raw) for each in cursor["firstBatch" if "firstBatch" in cursor else "nextBatch"]]


def drained(wire: Wire, database: str, command: Mapping[str, Any]) -> tuple[list[bytes], bytes]:
    """Open a stream and read it to the end of the oplog: its events, and its last resume token."""
    reply = wire.exchange(bson.encode({**command, "$db": database}))
    events = batch_of(reply)
    while True:
        cursor = RawBSONDocument(reply)["cursor"]
        token = bytes(cursor["postBatchResumeToken"].raw)
        if not cursor["id"]:
            return events, token
        collection = cursor["ns"].partition(".")[2]
        reply = wire.exchange(
            bson.encode({"getMore": Int64(cursor["id"]), "collection": collection, "maxTimeMS": 10, "$db": database})
        )
        more = batch_of(reply)
        if not more and RawBSONDocument(reply)["cursor"]["id"]:
            wire.exchange(bson.encode({"killCursors": collection, "cursors": [Int64(cursor["id"])], "$db": database}))
            return events, bytes(RawBSONDocument(reply)["cursor"]["postBatchResumeToken"].raw)
        events += more


@contextmanager
def side_by_side(version: str, **options: Any) -> Iterator[SideBySide]:
    """A member of ``version`` on which nothing happens except what the test does, and a gateway in front of it."""
    with (
        ReplicaSet(1, version=version, parameters=QUIET, enable_test_commands=True) as deployment,
        running_gateway(deployment.uri, **options) as running,
    ):
        sides = SideBySide(deployment, running)
        try:
            yield sides
        finally:
            sides.close()
