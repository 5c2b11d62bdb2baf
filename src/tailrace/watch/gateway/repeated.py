"""A stream's getMores are alike: what parsing one has shown is not parsed again for the next. No I/O.

On one connection a stream's getMores differ in their request id, and in the cluster time that the driver passes on. A
message that is equal to the last one but for these is the same command, field for field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.cursor.get_more import GetMoreCommand
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import BINARY, INT64, OBJECT, TIMESTAMP
from tailrace.errors import UsageError
from tailrace.watch.gateway.command import HEAD_BYTES, ClientCommand
from tailrace.watch.gateway.frame import HEADER_SIZE, OP_MSG, Header, OpMsg
from tailrace.watch.gateway.generic_fields import api_text, has_plain_session, is_plain_get_more, transaction_of

_HEADER: Final = struct.Struct("<iiii")
#: Opcode, flags and kind of a message that is one document and wants an answer.
_PLAIN: Final = struct.pack("<iIB", OP_MSG, 0, 0)
_BEFORE_DOCUMENT: Final = HEADER_SIZE + 5
_HASH_BYTES: Final = 20
_NO_TIME: Final = ClusterTime(0)


@dataclass(frozen=True, slots=True)
class GetMoreFacts:
    """What a getMore asks for, apart from its cluster time.

    ``wanted``  its own fields; ``None`` where they are invalid, for the reason in ``error``
    ``is_plain``, ``has_plain_session``, ``transaction``, ``api``  see ``generic_fields``
    """

    wanted: GetMoreCommand | None
    error: UsageError | None
    is_plain: bool
    has_plain_session: bool
    transaction: int | None
    api: str


@dataclass(frozen=True, slots=True)
class KnownGetMore(ClientCommand):
    """A getMore that repeats another. ``cluster_time``  its own, 0 if it has none"""

    facts: GetMoreFacts | None = None
    cluster_time: ClusterTime = _NO_TIME


def facts_of(command: ClientCommand, version: tuple[int, int]) -> GetMoreFacts:
    """The facts of a getMore to a server of ``version``."""
    document = command.document
    wanted: GetMoreCommand | None = None
    error: UsageError | None = None
    try:
        wanted = GetMoreCommand.parse(command.database, document, version)
    except UsageError as caught:
        error = caught
    return GetMoreFacts(
        wanted,
        error,
        is_plain_get_more(document, version),
        has_plain_session(document),
        transaction_of(document),
        api_text(document),
    )


class LastGetMore:
    """The last getMore of a connection that was answered here.

    ``size``  of its message in bytes; 0 while there is none
    """

    __slots__ = ("_command", "_facts", "_parts", "_time_at", "size")

    def __init__(self) -> None:
        self.size = 0
        self._command: ClientCommand | None = None
        self._facts: GetMoreFacts | None = None
        #: What has to be equal: where it begins in the message, where it ends, and its bytes.
        self._parts: list[tuple[int, int, bytes]] = []
        self._time_at = 0

    def remember(self, command: ClientCommand, facts: GetMoreFacts) -> None:
        """Note an ordinary getMore: one that was not compressed, and whose fields are as they should be."""
        if facts is self._facts:
            return
        document = command.document
        self.size, self._command = 0, None
        size = _BEFORE_DOCUMENT + len(document)
        if command.compressor is not None or command.message.flags or facts.error is not None or size > HEAD_BYTES:
            return
        try:
            holes = _holes(document)
        except ValueError:
            return
        self.size, self._command, self._facts, self._parts, self._time_at = size, command, facts, [], 0
        begin = 0
        for start, size in holes:
            self._time_at = self._time_at or _BEFORE_DOCUMENT + start
            self._keep(document, begin, start)
            begin = start + size
        self._keep(document, begin, len(document))

    def _keep(self, document: bytes, begin: int, end: int) -> None:
        self._parts.append((_BEFORE_DOCUMENT + begin, _BEFORE_DOCUMENT + end, document[begin:end]))

    @property
    def command(self) -> ClientCommand | None:
        return self._command

    @property
    def facts(self) -> GetMoreFacts | None:
        return self._facts

    def time_of(self, message: bytes) -> ClusterTime | None:
        """The cluster time that a message has which repeats the last one, 0 if it has none; ``None`` if it does not
        repeat it."""
        if self._command is None or len(message) != self.size or message[12:21] != _PLAIN:
            return None
        if message[:4] != self.size.to_bytes(4, "little"):
            return None
        for begin, end, part in self._parts:
            if message[begin:end] != part:
                return None
        at = self._time_at
        return ClusterTime.from_bytes_le(message[at : at + 8]) if at else _NO_TIME

    def repeated(self, message: bytes) -> KnownGetMore | None:
        """The command of a message that repeats the last one; ``None`` if it does not."""
        time, last = self.time_of(message), self._command
        if time is None or last is None:
            return None
        parsed = OpMsg(Header._make(_HEADER.unpack_from(message)), 0, message[_BEFORE_DOCUMENT:])
        return KnownGetMore(parsed, last.name, last.database, last.session, None, self._facts, time)


def _holes(document: bytes) -> list[tuple[int, int]]:
    """Where in a command the values of its ``$clusterTime`` stand, and how long they are; none if it has no such field.
    Raises ValueError for one of another form than servers send."""
    outer = raw_bson.find(document, b"$clusterTime")
    if outer is None:
        return []
    if outer.type != OBJECT:
        raise ValueError
    fields = list(raw_bson.elements(document, outer.value_start))
    if [(each.name, each.type) for each in fields] != [(b"clusterTime", TIMESTAMP), (b"signature", OBJECT)]:
        raise ValueError
    inner = list(raw_bson.elements(document, fields[1].value_start))
    if [(each.name, each.type) for each in inner] != [(b"hash", BINARY), (b"keyId", INT64)]:
        raise ValueError
    if inner[0].end - inner[0].value_start != _HASH_BYTES + 5:
        raise ValueError
    return [(fields[0].value_start, 8), (inner[0].value_start + 5, _HASH_BYTES), (inner[1].value_start, 8)]
