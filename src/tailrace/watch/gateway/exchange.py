"""``exchange`` together with ``$changeStream`` ends a server's process (6.0.27, 5.0.4, 4.4.2). It is found here in
whatever form a command comes. No I/O.

The server checks the number of consumers last. So its answer to the same command without consumers is its answer to the
command itself, unless the answer is that there are no consumers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.raw_bson import ARRAY, BOOL, INT32, OBJECT, Element, encode_document, encode_element
from tailrace.errors import OplogFormatError
from tailrace.watch.gateway.command import ClientCommand, command_of
from tailrace.watch.gateway.frame import OP_QUERY, BadFrame, OpMsg, OpQuery, command_name, parse_header

#: The server's code for an exchange that has no consumer.
NO_CONSUMER: Final = 50901
_CONSUMERS_MAX: Final = 100
_BUFFER_MAX: Final = 100 << 20
#: 4.4 reads an array as a document; later servers refuse it.
_DOCUMENTS: Final = (OBJECT, ARRAY)


def is_fatal(document: bytes) -> bool:
    """Whether an aggregate may end the process of a server that carries it out."""
    exchange = raw_bson.find(document, b"exchange")
    if exchange is None or exchange.type not in _DOCUMENTS or not _is_stream(document):
        return False
    explain = raw_bson.find(document, b"explain")
    if explain is not None and (explain.type != BOOL or raw_bson.value(document, explain) == b"\x01"):
        return False  # refused, or only explained
    return not _is_refused(document, exchange)


def without_consumers(document: bytes, database: str) -> bytes:
    """The same aggregate with an exchange that has no consumer, which every server refuses. ``database`` is for a
    legacy command, which does not name it."""

    def cut(element: Element) -> bytes:
        if element.name == b"consumers":
            return encode_element(INT32, b"consumers", raw_bson.encode_int32(0))
        return document[element.start : element.end]

    def cut_whole(element: Element) -> bytes:
        if element.name != b"exchange" or element.type not in _DOCUMENTS:
            return document[element.start : element.end]
        inside = encode_document(*map(cut, raw_bson.elements(document, element.value_start)))
        return encode_element(element.type, b"exchange", inside)

    parts = [cut_whole(element) for element in raw_bson.elements(document)]
    if raw_bson.find(document, b"$db") is None:
        parts.append(encode_element(raw_bson.STRING, b"$db", raw_bson.encode_string(database)))
    return encode_document(*parts)


def command_in(message: bytes, compressor: str | None) -> ClientCommand | None:
    """The command in a message if it may be for the gateway; ``None``: the message is left to the server."""
    return command_of(message, compressor) or fatal_command(message, compressor)


def fatal_command(message: bytes, compressor: str | None) -> ClientCommand | None:
    """A command that ``is_fatal``, from a message that ``command_of`` does not read: of the legacy kind, with document
    sequences, with text that is not UTF-8, or nested deeply. Raises BadFrame for a damaged one that might be one."""
    try:
        found = _legacy(message) if parse_header(message).op_code == OP_QUERY else _modern(message)
        return None if found is None else ClientCommand(found[0], b"aggregate", found[1], None, compressor)
    except (OplogFormatError, BadFrame):
        if b"exchange\x00" in message and b"$changeStream\x00" in message:
            raise BadFrame("a damaged message names 'exchange' and a change stream") from None
        return None


def _is_stream(document: bytes) -> bool:
    pipeline = raw_bson.find(document, b"pipeline")
    if pipeline is None or pipeline.type != ARRAY:
        return False
    first = next(raw_bson.elements(document, pipeline.value_start), None)
    if first is None or first.type != OBJECT:
        return False
    named = next(raw_bson.elements(document, first.value_start), None)
    return named is not None and named.name == b"$changeStream"


def _is_refused(document: bytes, exchange: Element) -> bool:
    """Whether the server refuses the exchange itself, for its numbers."""
    consumers = raw_bson.find(document, b"consumers", exchange.value_start)
    if consumers is None or consumers.type != INT32:
        return True
    if not 0 < raw_bson.read_int32(document, consumers.value_start) <= _CONSUMERS_MAX:
        return True
    size = raw_bson.find(document, b"bufferSize", exchange.value_start)
    return (
        size is not None
        and size.type == INT32
        and not 0 <= raw_bson.read_int32(document, size.value_start) <= _BUFFER_MAX
    )


def _modern(message: bytes) -> tuple[OpMsg, str] | None:
    parsed = OpMsg.parse(message)
    if command_name(parsed.document) != b"aggregate" or not is_fatal(parsed.document):
        return None
    return parsed, ""


def _legacy(message: bytes) -> tuple[OpQuery, str] | None:
    parsed = OpQuery.parse(message)
    document = parsed.document
    outer = next(raw_bson.elements(document), None)
    if outer is not None and outer.type == OBJECT and outer.name in (b"$query", b"query"):
        document = raw_bson.value(document, outer)
    if not parsed.is_command or command_name(document) != b"aggregate" or not is_fatal(document):
        return None
    return replace(parsed, document=document), parsed.database.decode("utf-8", "replace")
