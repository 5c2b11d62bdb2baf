"""Frames of the wire protocol: taken apart, checked, and built. No I/O.

Documents stay raw bytes. A length is checked before anything is read or allocated by it, and an error raises
``BadFrame`` with a sentence. A frame that is only passed on needs no more than ``parse_header``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.errors import OplogFormatError, UsageError

OP_REPLY: Final = 1
OP_QUERY: Final = 2004
OP_COMPRESSED: Final = 2012
OP_MSG: Final = 2013

HEADER_SIZE: Final = 16
#: mongod takes no longer message, header included (``maxMessageSizeBytes`` of its hello).
MESSAGE_SIZE_MAX: Final = 48_000_000
#: 16 MB, and 16 kB for what a command puts around a document of that size.
DOCUMENT_SIZE_MAX: Final = 16 * 1024 * 1024 + 16 * 1024

#: Flags of OP_MSG.
CHECKSUM_PRESENT: Final = 1
MORE_TO_COME: Final = 1 << 1
EXHAUST_ALLOWED: Final = 1 << 16
#: A receiver refuses a flag of the lower half that it does not know, and ignores one of the upper half.
_KNOWN_FLAGS: Final = CHECKSUM_PRESENT | MORE_TO_COME
_REQUIRED_FLAGS: Final = 0xFFFF

_BODY: Final = 0
_SEQUENCE: Final = 1

_HEADER: Final = struct.Struct("<iiii")
_INT32: Final = struct.Struct("<i")
_UINT32: Final = struct.Struct("<I")
_INT64: Final = struct.Struct("<q")
_REPLY_HEADER: Final = struct.Struct("<iqii")


class BadFrame(UsageError):
    """What a peer sent is not a message of the wire protocol, or exceeds its limits. The connection cannot be used any
    more, because nobody knows where the next message begins."""


class Header(NamedTuple):
    """A message's first 16 bytes. ``length`` is that of the whole message, header included."""

    length: int
    request_id: int
    response_to: int
    op_code: int


def parse_header(data: bytes, *, limit: int = MESSAGE_SIZE_MAX) -> Header:
    """The header that ``data`` begins with. Raises BadFrame for a length below 16 or above ``limit`` bytes."""
    if len(data) < HEADER_SIZE:
        raise BadFrame(f"a message's header has {HEADER_SIZE} bytes, and {len(data)} came")
    header = Header._make(_HEADER.unpack_from(data))
    if header.length < HEADER_SIZE:
        raise BadFrame(f"a message says that it is {header.length} bytes long; its header alone has {HEADER_SIZE}")
    if header.length > limit:
        raise BadFrame(f"a message says that it is {header.length} bytes long; the limit is {limit}")
    return header


def whole_message(message: bytes) -> Header:
    """The header of a message that is complete. Raises BadFrame if it is not."""
    header = parse_header(message)
    if header.length != len(message):
        raise BadFrame(f"a message says that it is {header.length} bytes long, and {len(message)} bytes are there")
    return header


@dataclass(frozen=True, slots=True)
class OpMsg:
    """A message of the kind that drivers send and servers answer with.

    ``document``   the command or the reply: the section of kind 0
    ``sequences``  the sections of kind 1: a field's name, and its documents one after another
    ``checksum``   CRC-32C of all that stands before it; not compared here, see ``check_checksum``
    """

    header: Header
    flags: int
    document: bytes
    sequences: tuple[tuple[bytes, bytes], ...] = ()
    checksum: int | None = None

    @property
    def more_to_come(self) -> bool:
        """From a client: it wants no answer. From a server: another reply follows unasked."""
        return bool(self.flags & MORE_TO_COME)

    @property
    def exhaust_allowed(self) -> bool:
        """The client takes replies that it did not ask for one by one."""
        return bool(self.flags & EXHAUST_ALLOWED)

    @classmethod
    def parse(cls, message: bytes) -> OpMsg:
        """Take a whole message apart, header included. Outer lengths are checked, the documents' contents are not."""
        header = _expect(message, OP_MSG)
        flags, end = _flags(message)
        document: bytes | None = None
        sequences: list[tuple[bytes, bytes]] = []
        for kind, start, stop in _sections(message, end):
            if kind == _BODY:
                if document is not None:
                    raise BadFrame("an OP_MSG has two sections of kind 0")
                document = message[start:stop]
            else:
                name, at = _cstring(message, start, stop, "the name of a document sequence")
                if any(name == known for known, _ in sequences):
                    raise BadFrame(f"an OP_MSG has two document sequences named '{name.decode('utf-8', 'replace')}'")
                sequences.append((name, message[at:stop]))
        if document is None:
            raise BadFrame("an OP_MSG has no section of kind 0, which holds the command")
        checksum = _UINT32.unpack_from(message, end)[0] if flags & CHECKSUM_PRESENT else None
        return cls(header, flags, document, tuple(sequences), checksum)

    def documents(self) -> Iterator[bytes]:
        """The documents of all sequences, in order. Raises BadFrame if one is longer than what is left of its
        sequence."""
        for _, raw in self.sequences:
            start = 0
            while start < len(raw):
                end = _document_end(raw, start, len(raw))
                yield raw[start:end]
                start = end


@dataclass(frozen=True, slots=True)
class OpQuery:
    """The legacy message in which some drivers still send their first hello."""

    header: Header
    flags: int
    collection: bytes
    skip: int
    count: int
    document: bytes

    @classmethod
    def parse(cls, message: bytes) -> OpQuery:
        """Take a whole message apart, header included."""
        header = _expect(message, OP_QUERY)
        _require(message, HEADER_SIZE, 4, "an OP_QUERY's flags")
        flags = _UINT32.unpack_from(message, HEADER_SIZE)[0]
        collection, at = _cstring(message, HEADER_SIZE + 4, len(message), "an OP_QUERY's collection")
        _require(message, at, 8, "an OP_QUERY's numbers to skip and to return")
        skip, count = _INT32.unpack_from(message, at)[0], _INT32.unpack_from(message, at + 4)[0]
        end = _document_end(message, at + 8, len(message))
        if end != len(message) and _document_end(message, end, len(message)) != len(message):
            raise BadFrame("an OP_QUERY goes on after its last document")
        return cls(header, flags, collection, skip, count, message[at + 8 : end])

    @property
    def database(self) -> bytes:
        return self.collection.partition(b".")[0]

    @property
    def more_to_come(self) -> bool:
        """As ``OpMsg.more_to_come``: an OP_QUERY is always answered."""
        return False

    @property
    def is_command(self) -> bool:
        """Whether it carries a command rather than a query."""
        return self.collection.endswith(b".$cmd")


@dataclass(frozen=True, slots=True)
class OpReply:
    """The answer to an OP_QUERY."""

    header: Header
    flags: int
    cursor_id: int
    starting_from: int
    documents: tuple[bytes, ...]

    @classmethod
    def parse(cls, message: bytes) -> OpReply:
        """Take a whole message apart, header included."""
        header = _expect(message, OP_REPLY)
        _require(message, HEADER_SIZE, _REPLY_HEADER.size, "an OP_REPLY's fields")
        flags, cursor_id, starting_from, count = _REPLY_HEADER.unpack_from(message, HEADER_SIZE)
        documents = []
        start = HEADER_SIZE + _REPLY_HEADER.size
        while start < len(message):
            end = _document_end(message, start, len(message))
            documents.append(message[start:end])
            start = end
        if count != len(documents):
            raise BadFrame(f"an OP_REPLY says that it holds {count} documents, and it holds {len(documents)}")
        return cls(header, flags, cursor_id, starting_from, tuple(documents))


def op_msg(
    document: bytes,
    *,
    request_id: int,
    response_to: int = 0,
    flags: int = 0,
    sequences: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """An OP_MSG without a checksum, whatever ``flags`` says about it."""
    parts = [_UINT32.pack(flags & ~CHECKSUM_PRESENT), b"\x00", document]
    for name, documents in sequences:
        parts += [b"\x01", _INT32.pack(4 + len(name) + 1 + len(documents)), name, b"\x00", documents]
    return _message(OP_MSG, parts, request_id, response_to)


def op_query(collection: bytes, document: bytes, *, request_id: int, flags: int = 0) -> bytes:
    """An OP_QUERY that asks for one document: a command, on ``<database>.$cmd``."""
    parts = [_UINT32.pack(flags), collection, b"\x00", _INT32.pack(0), _INT32.pack(-1), document]
    return _message(OP_QUERY, parts, request_id, 0)


def op_reply(document: bytes, *, request_id: int, response_to: int, flags: int = 8) -> bytes:
    """An OP_REPLY with one document. Flag 8, AwaitCapable, is what servers always set."""
    parts = [_REPLY_HEADER.pack(flags, 0, 0, 1), document]
    return _message(OP_REPLY, parts, request_id, response_to)


def with_document(message: OpMsg | OpQuery | OpReply, document: bytes) -> bytes:
    """The same message with another document in place of the first: no checksum, everything else as it came."""
    header = message.header
    match message:
        case OpMsg():
            return op_msg(
                document,
                request_id=header.request_id,
                response_to=header.response_to,
                flags=message.flags,
                sequences=message.sequences,
            )
        case OpQuery():
            parts = [_UINT32.pack(message.flags), message.collection, b"\x00"]
            parts += [_INT32.pack(message.skip), _INT32.pack(message.count), document]
        case OpReply():
            count = max(1, len(message.documents))
            parts = [_REPLY_HEADER.pack(message.flags, message.cursor_id, message.starting_from, count), document]
            parts += message.documents[1:]
    return _message(header.op_code, parts, header.request_id, header.response_to)


def command_name(document: bytes) -> bytes:
    """The name of a command: that of its document's first field; empty where there is none. Raises BadFrame."""
    if len(document) < 5:
        raise BadFrame(f"a command has {len(document)} bytes, too few for a document")
    if document[4] == 0:
        return b""
    end = document.find(0, 5)
    if end < 0:
        raise BadFrame("the name of a command has no end")
    return document[5:end]


def check_document(document: bytes) -> None:
    """Raise BadFrame unless every length inside a document holds, and it is nested no deeper than servers allow."""
    try:
        raw_bson.check_structure(document)
    except OplogFormatError as error:
        raise BadFrame(f"a message holds a document that is not sound: {error}") from None


def check_checksum(message: bytes) -> None:
    """Raise BadFrame if an OP_MSG carries a CRC-32C and that is wrong. About 0.1 s a MB: for commands answered here,
    which are short. A message that is passed on is checked by its receiver."""
    if not _flags(message)[0] & CHECKSUM_PRESENT:
        return
    crc = 0xFFFFFFFF
    for byte in memoryview(message)[:-4]:
        crc = (crc >> 8) ^ _CRC32C[(crc ^ byte) & 0xFF]
    if crc ^ 0xFFFFFFFF != _UINT32.unpack_from(message, len(message) - 4)[0]:
        raise BadFrame("an OP_MSG does not have the checksum that it says it has")


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC32C: Final = _crc32c_table()


def _message(op_code: int, parts: list[bytes], request_id: int, response_to: int) -> bytes:
    length = HEADER_SIZE + sum(map(len, parts))
    return b"".join([_HEADER.pack(length, request_id, response_to, op_code), *parts])


def _expect(message: bytes, op_code: int) -> Header:
    header = whole_message(message)
    if header.op_code != op_code:
        raise BadFrame(f"a message of opcode {header.op_code} came where {op_code} was expected")
    return header


def _flags(message: bytes) -> tuple[int, int]:
    """An OP_MSG's flags, and where its sections end."""
    _require(message, HEADER_SIZE, 4, "an OP_MSG's flags")
    flags: int = _UINT32.unpack_from(message, HEADER_SIZE)[0]
    if unknown := flags & _REQUIRED_FLAGS & ~_KNOWN_FLAGS:
        raise BadFrame(f"an OP_MSG has flags that are not known: {unknown:#x}")
    end = len(message) - (4 if flags & CHECKSUM_PRESENT else 0)
    if end < HEADER_SIZE + 4:
        raise BadFrame("an OP_MSG says that it has a checksum, and is too short for one")
    return flags, end


def _sections(message: bytes, end: int) -> Iterator[tuple[int, int, int]]:
    """Kind, start and end of the contents of each section of an OP_MSG."""
    at = HEADER_SIZE + 4
    while at < end:
        kind = message[at]
        at += 1
        if kind == _BODY:
            stop = _document_end(message, at, end)
            yield kind, at, stop
        elif kind == _SEQUENCE:
            if at + 4 > end:
                raise BadFrame("an OP_MSG ends inside the length of a document sequence")
            length = _INT32.unpack_from(message, at)[0]
            stop = at + length
            if length < 5 or stop > end:
                raise BadFrame(f"a document sequence says that it is {length} bytes long, and {end - at} are there")
            yield kind, at + 4, stop
        else:
            raise BadFrame(f"an OP_MSG has a section of kind {kind}, which is not known")
        at = stop


def _document_end(data: bytes, start: int, limit: int) -> int:
    """Where the document at ``start`` ends. Raises BadFrame if that is after ``limit``."""
    if start + 5 > limit:
        raise BadFrame(f"a message ends {max(0, limit - start)} bytes into a document")
    length: int = _INT32.unpack_from(data, start)[0]
    if length > DOCUMENT_SIZE_MAX:
        raise BadFrame(f"a document says that it is {length} bytes long; the limit is {DOCUMENT_SIZE_MAX}")
    if length < 5 or start + length > limit:
        raise BadFrame(f"a document says that it is {length} bytes long, and {limit - start} are there")
    if data[start + length - 1] != 0:
        raise BadFrame("a document does not end with a zero byte")
    return start + length


def _cstring(data: bytes, start: int, limit: int, what: str) -> tuple[bytes, int]:
    """The bytes up to the next zero byte, and where to go on."""
    end = data.find(0, start, limit)
    if end < 0:
        raise BadFrame(f"{what} has no end")
    return data[start:end], end + 1


def _require(message: bytes, at: int, size: int, what: str) -> None:
    if at + size > len(message):
        raise BadFrame(f"a message ends before {what}: {size} bytes are needed, {max(0, len(message) - at)} are there")
