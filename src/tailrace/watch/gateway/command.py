"""What a client's message is, as far as the gateway has to know. No I/O.

Whatever cannot be interpreted is for the server, which answers it or closes the connection.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.cursor.command import check_bson
from tailrace.core.raw_bson import ARRAY, INT64, NULL, OBJECT, STRING
from tailrace.errors import TailraceError
from tailrace.watch.gateway.compression import compressor_of, decompress
from tailrace.watch.gateway.frame import (
    CHECKSUM_PRESENT,
    EXHAUST_ALLOWED,
    HEADER_SIZE,
    MORE_TO_COME,
    OP_COMPRESSED,
    OP_MSG,
    OP_QUERY,
    OpMsg,
    OpQuery,
    check_checksum,
    command_name,
)
from tailrace.watch.gateway.generic_fields import are_known, has_plain_size, is_ordinary

#: How much of a message shows what it is. More is read only if it is for the gateway.
HEAD_BYTES: Final = 4096

#: Commands that may change who is logged in on a connection, or what they may do.
LOGIN_NAMES: Final = frozenset((b"saslStart", b"saslContinue", b"authenticate", b"logout"))
#: Commands that the gateway answers itself, or looks into.
STREAM_NAMES: Final = frozenset((b"aggregate", b"getMore", b"killCursors", b"killOp", b"tailraceStreams"))
#: After these, the cursors of the sessions have to be closed.
SESSION_NAMES: Final = frozenset((b"killSessions", b"killAllSessions", b"killAllSessionsByPattern", b"endSessions"))
FAIL_POINT: Final = b"configureFailPoint"

#: Legacy opcodes that servers do not answer: OP_UPDATE, OP_INSERT, OP_DELETE, OP_KILL_CURSORS.
_NEVER_ANSWERED: Final = frozenset((2001, 2002, 2006, 2007))
_EXHAUST_QUERY: Final = 1 << 6
_FLAGS: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class MessageOutline:
    """What is known about a message from its first bytes.

    ``name``      the command's, empty if there is none or it is too far from the beginning
    ``answered``  the server sends a reply
    ``exhaust``   it may send several
    ``is_hidden`` another section comes before the command
    """

    op_code: int
    name: bytes
    answered: bool = True
    exhaust: bool = False
    is_hidden: bool = False


def outline(op_code: int, head: bytes) -> MessageOutline:
    """What a message that is not compressed is; ``head`` is its first bytes, header included.

    No more than ``HEAD_BYTES`` of it are read, which also bounds how deep a name can be nested.
    """
    head = head[:HEAD_BYTES]
    if op_code == OP_MSG and len(head) >= HEADER_SIZE + 5:
        flags: int = _FLAGS.unpack_from(head, HEADER_SIZE)[0]
        # With every driver the section of kind 0 comes first. A message in another order is left to the server.
        is_hidden = head[HEADER_SIZE + 4] != 0
        name = b"" if is_hidden else _first_name(head, HEADER_SIZE + 5)
        return MessageOutline(op_code, name, not flags & MORE_TO_COME, bool(flags & EXHAUST_ALLOWED), is_hidden)
    if op_code == OP_QUERY and len(head) >= HEADER_SIZE + 5:
        flags = _FLAGS.unpack_from(head, HEADER_SIZE)[0]
        end = head.find(0, HEADER_SIZE + 4)
        is_command = end > 0 and head[HEADER_SIZE + 4 : end].endswith(b".$cmd")
        name = _first_name(head, end + 9) if is_command else b""
        return MessageOutline(op_code, name, exhaust=bool(flags & _EXHAUST_QUERY))
    return MessageOutline(op_code, b"", op_code not in _NEVER_ANSWERED)


def _first_name(head: bytes, document: int) -> bytes:
    start = document + 5
    end = head.find(0, start)
    if end < 0 or end == start:
        return b""
    name = head[start:end]
    if name in (b"$query", b"query") and head[start - 1] == OBJECT:
        return _first_name(head, end + 1)  # the form that carries a read preference next to it
    return name


@dataclass(frozen=True, slots=True)
class ClientCommand:
    """A whole command.

    ``message``     decompressed; an OP_QUERY only if ``exchange.fatal_command`` found it
    ``compressor``  what it was compressed with
    ``session``     the session's id, as bytes of its own kind; ``None`` without one
    """

    message: OpMsg | OpQuery
    name: bytes
    database: str
    session: bytes | None
    compressor: str | None = None

    @property
    def document(self) -> bytes:
        return self.message.document


def unpacked(frame: bytes) -> tuple[bytes, str | None]:
    """A whole message as it is without compression, and what it was compressed with. Raises BadFrame."""
    op_code: int = _FLAGS.unpack_from(frame, 12)[0]
    return (decompress(frame), compressor_of(frame)) if op_code == OP_COMPRESSED else (frame, None)


def command_of(message: bytes, compressor: str | None) -> ClientCommand | None:
    """The command that an OP_MSG carries; ``None`` where the server had better read it itself."""
    try:
        parsed = OpMsg.parse(message)
        if parsed.sequences:
            return None
        if parsed.flags & CHECKSUM_PRESENT:
            check_checksum(message)
        raw_bson.check_structure(parsed.document)
        check_bson(parsed.document)
        names = [element.name for element in raw_bson.elements(parsed.document)]
        if len(set(names)) < len(names):
            return None  # readers of the first and of the last of two equal fields would not agree on what is asked
        database = raw_bson.find(parsed.document, b"$db")
        if database is None or database.type != STRING:
            return None
        text = raw_bson.read_string(parsed.document, database.value_start).decode()
        return ClientCommand(parsed, command_name(parsed.document), text, _session(parsed.document), compressor)
    except (TailraceError, UnicodeDecodeError):
        return None


def opens_stream(document: bytes, version: tuple[int, int] = (6, 0)) -> bool:
    """Whether an aggregate is a change stream that the engine opens, with the events of a server ``version``. An
    explain is for the server."""
    pipeline = raw_bson.find(document, b"pipeline")
    if pipeline is None or pipeline.type != ARRAY:
        return False
    if raw_bson.find(document, b"explain") is not None or not is_ordinary(document, version):
        return False
    if not has_plain_size(document, version):
        return False
    stages = raw_bson.value(document, pipeline)
    first = next(raw_bson.elements(stages), None)
    if first is None or first.type != OBJECT:
        return False
    named = next(raw_bson.elements(stages, first.value_start), None)
    if named is None or named.name != b"$changeStream":
        return False
    return named.type != OBJECT or are_known(document, raw_bson.value(stages, named), version)


def target_of(command: bytes) -> bytes:
    """What an aggregate is over, as it is written."""
    element = raw_bson.find(command, b"aggregate")
    return b"" if element is None else raw_bson.value(command, element)


def cursor_asked(document: bytes) -> int | None:
    """The cursor id that a getMore names; ``None`` if it names none."""
    element = raw_bson.find(document, b"getMore")
    if element is None or element.type != INT64:
        return None
    return raw_bson.read_int64(document, element.value_start)


def cursors_asked(document: bytes) -> list[int]:
    """The cursor ids that a killCursors names, without nulls, which the server skips (4.4 refuses them); empty where it
    does not name them as it should."""
    element = raw_bson.find(document, b"cursors")
    if element is None or element.type != ARRAY:
        return []
    array = raw_bson.value(document, element)
    listed = [each for each in raw_bson.elements(array) if each.type != NULL]
    if any(each.type != INT64 for each in listed):
        return []
    return [raw_bson.read_int64(array, each.value_start) for each in listed]


def sessions_ended(document: bytes) -> set[bytes]:
    """The ids of the sessions that an endSessions or killSessions command lists, as ``ClientCommand.session``."""
    listed = next(raw_bson.elements(document), None)
    if listed is None or listed.type != ARRAY:
        return set()
    array = raw_bson.value(document, listed)
    found = (raw_bson.find(array, b"id", each.value_start) for each in raw_bson.elements(array) if each.type == OBJECT)
    return {array[each.value_start : each.end] for each in found if each is not None}


def app_name_of(head: bytes) -> str | None:
    """The application's name in a first hello; ``None`` if there is none."""
    at = head.find(b"\x03application\x00")
    try:
        found = None if at < 0 else raw_bson.find(head, b"name", at + 13)
        return None if found is None else raw_bson.read_string(head, found.value_start).decode("utf-8", "replace")
    except (TailraceError, struct.error):
        return None


def without_cursors(document: bytes, left: list[int]) -> bytes:
    """A killCursors command that names only the cursors ``left``."""
    ids = (raw_bson.encode_element(INT64, b"%d" % i, raw_bson.encode_int64(one)) for i, one in enumerate(left))
    array = raw_bson.encode_element(ARRAY, b"cursors", raw_bson.encode_document(*ids))
    return raw_bson.encode_document(
        *(
            array if element.name == b"cursors" else document[element.start : element.end]
            for element in raw_bson.elements(document)
        )
    )


def _session(document: bytes) -> bytes | None:
    lsid = raw_bson.find(document, b"lsid")
    if lsid is None or lsid.type != OBJECT:
        return None
    element = raw_bson.find(document, b"id", lsid.value_start)
    return None if element is None else document[element.value_start : element.end]
